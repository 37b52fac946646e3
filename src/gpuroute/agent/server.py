"""The answering socket: UDP datagrams in and out of one event loop.

`add_reader` and a loop that drains the socket, not `DatagramTransport`: that costs a third more for each datagram.
"""

from __future__ import annotations

import ipaddress
import select
import socket
import time
from typing import TYPE_CHECKING

from gpuroute.errors import ConfigError

if TYPE_CHECKING:
    import asyncio

    from gpuroute.agent.answers import Answers

BURST = 64
"""Datagrams that are read in a row before the loop may see to something else."""

BUFFER = 1 << 20


def netloc(host: str, port: int) -> str:
    """HOST:PORT as in a URL: an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def open_socket(host: str, port: int, *, authenticated: bool, insecure: bool = False) -> socket.socket:
    """A bound UDP socket. Raises ConfigError for an address that others can reach when nobody is authenticated."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    if not (authenticated or insecure or ipaddress.ip_address(found[4][0]).is_loopback):
        raise ConfigError(
            f"agent on {host}: asks from other hosts need a key (GPUROUTE_AGENT_KEY), or the word --insecure"
        )
    made = socket.socket(found[0], socket.SOCK_DGRAM)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
    made.bind(found[4])
    return made


class UdpServer:
    """Answers on a bound socket for as long as it is open. Loop thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, answers: Answers) -> None:
        self._loop = loop
        self._socket = sock
        self._answers = answers
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        loop.add_reader(sock, self._read)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Stop answering. Idempotent."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()

    def _read(self) -> None:
        receive, send, answer = self._socket.recvfrom, self._socket.sendto, self._answers.answer
        now, now_ms = time.monotonic(), int(time.time() * 1000)
        for number in range(BURST):
            try:
                data, source = receive(512)
                reply = answer(data, source[0], now, now_ms)
                if reply:
                    send(reply, source)
            except BlockingIOError:
                return  # all read, or the network is full: a lost answer means "no report"
            except OSError:
                continue  # an ICMP error of an earlier answer; or the source cannot be reached
            if not number and not self._poll.poll(0):
                return  # mostly it is one; to hear that by an exception costs four times as much
