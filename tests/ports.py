"""Ports for servers that cannot choose one themselves, and ports where nobody listens.

A port that was free a moment ago may be anybody's by the time a server binds it: each outgoing connection of the machine
takes one. So a socket that never listens holds each of these until the process ends: the system gives the port to nobody
who asks for any port, a connection to it is refused, and a server that asks for this very one (with SO_REUSEADDR, as
servers do) gets it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket

_held: list[socket.socket] = []


def own_port() -> int:
    """A port of 127.0.0.1 chosen by the system, held for whoever names it."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind(("127.0.0.1", 0))
    _held.append(sock)
    port: int = sock.getsockname()[1]
    return port


def closed_udp_port() -> int:
    """A UDP port at which nobody hears anything: the socket that holds it is connected, to a port where nobody speaks."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("127.0.0.1", 0))
    sock.connect(("127.0.0.1", 9))
    _held.append(sock)
    port: int = sock.getsockname()[1]
    return port


def lasting_udp_port() -> int:
    """A UDP port that can be left and taken again: it is none of those that the system gives to whoever asks for any."""
    for port in range(20_000 + os.getpid() % 10_000, 32_000):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise OSError("all ports are taken")


def own_ports(count: int) -> list[int]:
    return [own_port() for _ in range(count)]


@atexit.register
def _release() -> None:
    for sock in _held:
        sock.close()
