"""Where a host is, and a socket that is connected to it: to one of its addresses, each of which has its share."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterable, Iterator

INF = math.inf
ADDRESS_S = (0.3, 1.0)
"""Seconds, from and to, to wait for one address of a host that has others left."""

UNREACHABLE = (OSError, UnicodeError, OverflowError)
"""What connecting raises; the latter two for a host or a port that cannot be one."""

SocketOption = tuple[int, int, Any]


class Address:
    """Where and how to connect: all that an endpoint's URL and the client's settings say."""

    __slots__ = ("context", "host", "local", "options", "port", "server_name")

    def __init__(
        self,
        host: str,
        port: int,
        context: ssl.SSLContext | None = None,
        server_name: str = "",
        local: str | None = None,
        options: Iterable[SocketOption] = (),
    ) -> None:
        self.host = host
        self.port = port
        self.context = context
        self.server_name = server_name or host
        self.local = local
        self.options = tuple(options)


def reach(address: Address, timeout: float | None) -> socket.socket:
    """A socket that is connected to one of the host's addresses: who swallows all must not use up the others' time.

    `timeout` in seconds for all of them. Raises what is in UNREACHABLE. Blocks.
    """
    infos = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    until = None if timeout is None else time.monotonic() + timeout
    for info, share in zip(infos, _shares(len(infos), timeout), strict=True):
        with _unless_last(share), _socket_to(info, address.local) as sock:
            left = share if until is None else min(share, max(1e-3, until - time.monotonic()))
            sock.settimeout(None if left == INF else left)
            sock.connect(info[4])
            return sock
    raise OSError(f"{address.host} has no address")


async def reached(loop: asyncio.AbstractEventLoop, address: Address, timeout: float | None) -> socket.socket:
    """The same for a task, whose timeout is its caller's to keep."""
    if _is_literal(address.host):  # no look-up, and no thread for it
        infos = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    else:
        infos = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    for info, share in zip(infos, _shares(len(infos), timeout), strict=True):
        with _unless_last(share), _socket_to(info, address.local) as sock:
            sock.setblocking(False)
            async with asyncio.timeout(None if share == INF else share):
                await loop.sock_connect(sock, info[4])
            return sock
    raise OSError(f"{address.host} has no address")


@contextmanager
def _socket_to(info: tuple[Any, ...], local: str | None) -> Iterator[socket.socket]:
    """A socket for one address, closed if what is done with it fails."""
    sock = socket.socket(*info[:3])
    try:
        if local:
            sock.bind((local, 0))
        yield sock
    except BaseException:
        sock.close()
        raise


def _unless_last(share: float) -> AbstractContextManager[None]:
    """Failure at an address is one of the host only if there is no other address left."""
    return nullcontext() if share == INF else suppress(OSError)


def _shares(addresses: int, timeout: float | None) -> list[float]:
    """Seconds for each of a host's addresses; no bound for the last one."""
    share = ADDRESS_S[1] if timeout is None else min(ADDRESS_S[1], max(ADDRESS_S[0], timeout / max(1, addresses)))
    return [share] * (addresses - 1) + [INF] * min(1, addresses)


def _is_literal(host: str) -> bool:
    try:
        socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host.partition("%")[0])
    except OSError:
        return False
    return True
