"""One network connection: plain bytes in and out with timeouts, under httpcore's HTTP/1.1 state machine.

httpcore takes any stream with `read`, `write` and a close. Ours differ from its own in what a router needs:

- a per-call `until` clips every read and write, so that a trickling answer cannot outlive the call's deadline;
- `heard` tells whether any byte arrived since the last request began (may a stale connection be tried afresh?);
- a request's head waits for the first of its body and leaves in one packet with it, as `begin` orders;
- closing is synchronous and cannot be cancelled, so no cancellation between two awaits can leak a connection;
- after `quiet` seconds of silence a read asks `patience` whether to wait on, so that a hung endpoint is noticed without
  any work on the way of one that answers;
- an idle asyncio connection notices the server's close at once instead of polling the socket before each use.

The asyncio one also leaves out anyio, whose checkpoints cost 150 us of a 630 us request (measured 2026-08).
"""

from __future__ import annotations

import asyncio
import math
import select
import socket
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, Self, cast

from gpuroute.transports.reach import UNREACHABLE, reach, reached

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuroute.transports.reach import Address

INF = math.inf
BUFFER = 256 * 1024
"""Unread bytes above which an asyncio connection stops reading, so that a slow consumer slows its server."""

COPIED = 64 * 1024
"""Bytes of a body up to which they are copied to leave in one packet with the head."""

LONGEST = 1e6
"""Seconds that a socket can be told to wait: the operating system cannot count as far as a caller can write."""


class Core(Protocol):
    """The exceptions of `httpcore` or `httpcore2` that a wire raises."""

    ConnectError: type[Exception]
    ConnectTimeout: type[Exception]
    PoolTimeout: type[Exception]
    ReadError: type[Exception]
    ReadTimeout: type[Exception]
    WriteError: type[Exception]
    WriteTimeout: type[Exception]


class Wire:
    """A blocking connection. Used by one thread at a time."""

    __slots__ = ("_core", "_held", "_holds", "_sock", "_timeout", "heard", "patience", "quiet", "until")

    def __init__(self, core: Core, sock: socket.socket) -> None:
        self._core = core
        self._sock = sock
        self._timeout: float | None = -1.0
        self._holds = False
        self._held = b""
        self.heard = False
        self.until: float | None = None
        self.quiet = INF
        self.patience: Callable[[], float] | None = None

    @classmethod
    def connect(cls, core: Core, address: Address, timeout: float | None) -> Self:
        """Connect, with TLS if the address has a context. Raises the core's ConnectError, ConnectTimeout."""
        started = time.monotonic()
        if timeout is not None and timeout <= 0:  # which would mean "do not block"
            raise core.ConnectTimeout("no time is left to connect")
        timeout = _bounded(timeout)
        try:
            sock = reach(address, timeout)
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for option in address.options:
                    sock.setsockopt(*option)
                if address.context is not None:
                    sock.settimeout(None if timeout is None else max(1e-3, timeout - (time.monotonic() - started)))
                    sock = address.context.wrap_socket(sock, server_hostname=address.server_name)
            except BaseException:
                sock.close()
                raise
        except TimeoutError as error:
            raise core.ConnectTimeout(str(error)) from error
        except UNREACHABLE as error:
            raise core.ConnectError(str(error)) from error
        return cls(core, sock)

    def begin(self, until: float | None, quiet: float = INF, patience: Callable[[], float] | None = None) -> None:
        """A request begins, which must end before `until` (monotonic seconds): hold its first write back.

        `patience` tells how many seconds of silence are still normal; it is asked after `quiet` seconds of a read.
        """
        self._holds = True
        self.heard = False
        self.until = until
        self.quiet = quiet
        self.patience = patience

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """The next bytes, or b"" at the end. Raises ReadTimeout, ReadError."""
        try:
            data = self._receive(max_bytes, timeout)
        except TimeoutError as error:
            raise self._core.ReadTimeout(str(error)) from error
        except OSError as error:
            raise self._core.ReadError(str(error)) from error
        self.heard = self.heard or bool(data)
        return data

    def _receive(self, max_bytes: int, timeout: float | None) -> bytes:
        left, wait = INF if timeout is None else timeout, self.quiet
        while wait < left:
            try:
                self._settle(wait)
                return self._sock.recv(max_bytes)
            except TimeoutError:
                wait, left = self._on_silence(wait, left)
        self._settle(None if left == INF else left)
        return self._sock.recv(max_bytes)

    def _on_silence(self, waited: float, left: float) -> tuple[float, float]:
        """Whether to wait on: seconds until the next question, and what is left of the read's timeout."""
        more = _more_patience(self.patience)
        if self.until is not None and time.monotonic() >= self.until:
            raise TimeoutError("the call's deadline passed")
        return more, left - waited

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Send all of it; the timeout holds for each piece. Raises WriteTimeout, WriteError."""
        if self._holds:
            self._holds, self._held = False, buffer
            return
        if self._held:
            held, self._held = self._held, b""
            if len(buffer) > COPIED:
                self.write(held, timeout)
            else:
                buffer = held + buffer
        view = memoryview(buffer)
        try:
            while view:
                self._settle(timeout)
                view = view[self._sock.send(view) :]
        except TimeoutError as error:
            raise self._core.WriteTimeout(str(error)) from error
        except OSError as error:
            raise self._core.WriteError(str(error)) from error

    def _settle(self, timeout: float | None) -> None:
        if self.until is not None:
            left = self.until - time.monotonic()
            timeout = left if timeout is None else min(timeout, left)
            if timeout <= 0:
                raise TimeoutError("the call's deadline passed")
        if timeout != self._timeout:  # a system call each time otherwise
            self._sock.settimeout(_bounded(timeout))
            self._timeout = timeout

    @property
    def stale(self) -> bool:
        """True if an idle connection must not be used: the server closed it, or sent what nobody asked for."""
        try:
            return _readable(self._sock)
        except (OSError, ValueError):
            return True

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._sock.close()

    def abort(self) -> None:
        """Hang up while another thread may be waiting on the connection: it wakes up. Idempotent."""
        with suppress(OSError):
            # Not TLS's own: that gives up encryption first, and what another thread sends then would go in the clear.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def get_extra_info(self, info: str) -> Any:
        """What httpcore's streams offer: `socket`, `ssl_object`, `client_addr`, `server_addr`, `is_readable`."""
        if info == "is_readable":
            return self.stale
        if info == "ssl_object":
            return self._sock if hasattr(self._sock, "selected_alpn_protocol") else None
        return _socket_info(self._sock, info)


class AsyncWire(asyncio.Protocol):
    """An asyncio connection. Belongs to the loop that made it; `close` may be called from that loop only."""

    _transport: asyncio.Transport

    def __init__(self, core: Core) -> None:
        self._core = core
        self._loop = asyncio.get_running_loop()
        self._chunks: deque[bytes] = deque()
        self._buffered = 0
        self._paused = False
        self._ended = False
        self._error: Exception | None = None
        self._reading: asyncio.Future[None] | None = None
        self._writing: asyncio.Future[None] | None = None
        self._full = False
        self._holds = False
        self._held = b""
        self.heard = False
        self.until: float | None = None
        self.quiet = INF
        self.patience: Callable[[], float] | None = None

    @classmethod
    async def connect(cls, core: Core, address: Address, timeout: float | None) -> Self:
        """Connect, with TLS if the address has a context. Raises the core's ConnectError, ConnectTimeout."""
        wire = cls(core)
        context = address.context
        try:
            async with asyncio.timeout(timeout):
                sock = await reached(wire._loop, address, timeout)
                name = address.server_name if context is not None else None
                await wire._loop.create_connection(lambda: wire, sock=sock, ssl=context, server_hostname=name)
        except TimeoutError as error:
            raise core.ConnectTimeout(str(error) or f"no connection within {timeout} s") from error
        except UNREACHABLE as error:
            raise core.ConnectError(str(error)) from error
        try:
            for option in address.options:
                wire._transport.get_extra_info("socket").setsockopt(*option)
        except OSError as error:
            wire.close()
            raise core.ConnectError(str(error)) from error
        return wire

    def begin(self, until: float | None, quiet: float = INF, patience: Callable[[], float] | None = None) -> None:
        """A request begins, which must end before `until` (monotonic seconds): hold its first write back.

        `patience` tells how many seconds of silence are still normal; it is asked after `quiet` seconds of a read.
        """
        self._holds = True
        self.heard = False
        self.until = until
        self.quiet = quiet
        self.patience = patience

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """The next bytes, or b"" at the end. Raises ReadTimeout, ReadError."""
        if self.until is not None and self._loop.time() > self.until:
            raise self._core.ReadTimeout("the call's deadline passed")
        if not self._chunks and not self._ended:
            await self._arrival(timeout)
        if not self._chunks:
            if self._error is not None:
                raise self._core.ReadError(str(self._error)) from self._error
            return b""
        data = self._chunks.popleft()
        if len(data) > max_bytes:
            self._chunks.appendleft(data[max_bytes:])
            data = data[:max_bytes]
        self._buffered -= len(data)
        if self._paused and self._buffered <= BUFFER // 2:
            self._paused = False
            self._transport.resume_reading()
        return data

    async def _arrival(self, timeout: float | None) -> None:
        left, wait = INF if timeout is None else timeout, self.quiet
        while wait < left and (self.until is None or self._loop.time() + wait < self.until):
            self._reading = self._loop.create_future()
            try:
                await self._wait(self._reading, wait, TimeoutError)
                return
            except TimeoutError:
                left -= wait
            try:
                wait = _more_patience(self.patience)
            except TimeoutError as error:
                raise self._core.ReadTimeout(str(error)) from error
        self._reading = self._loop.create_future()
        await self._wait(self._reading, None if left == INF else left, self._core.ReadTimeout)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Send it, waiting while the send buffer is full. Raises WriteTimeout, WriteError."""
        if self._holds:
            self._holds, self._held = False, buffer
            return
        if self._held:
            held, self._held = self._held, b""
            if len(buffer) > COPIED:
                await self.write(held, timeout)
            else:
                buffer = held + buffer
        if self._ended or self._transport.is_closing():
            raise self._core.WriteError(str(self._error or "the connection is closed"))
        self._transport.write(buffer)
        if self._full:
            self._writing = self._loop.create_future()
            await self._wait(self._writing, timeout, self._core.WriteTimeout)
            if self._error is not None:
                raise self._core.WriteError(str(self._error)) from self._error

    async def _wait(self, waiter: asyncio.Future[None], timeout: float | None, late: type[Exception]) -> None:
        if self.until is not None:
            left = self.until - self._loop.time()
            timeout = left if timeout is None else min(timeout, left)
        timer = None if timeout is None else self._loop.call_later(timeout, _expire, waiter, late, timeout)
        try:
            await waiter
        finally:
            if timer is not None:
                timer.cancel()

    @property
    def stale(self) -> bool:
        """True if an idle connection must not be used: the server closed it, or sent what nobody asked for."""
        return self._ended or bool(self._chunks) or self._transport.is_closing()

    def close(self) -> None:
        """Hang up at once. Idempotent."""
        self._transport.abort()

    abort = close

    async def aclose(self) -> None:
        """Hang up at once. Idempotent; never waits, so it cannot be cancelled half-way."""
        self._transport.abort()

    def get_extra_info(self, info: str) -> Any:
        """What httpcore's streams offer: `socket`, `ssl_object`, `client_addr`, `server_addr`, `is_readable`."""
        if info == "is_readable":
            return self.stale
        if info == "ssl_object":
            return self._transport.get_extra_info("ssl_object")
        return _socket_info(self._transport.get_extra_info("socket"), info)

    # ---------------------------------------------------------------- called by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected, and past the TLS handshake."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's for TLS is no subclass of it

    def data_received(self, data: bytes) -> None:
        """Bytes arrived."""
        self.heard = True
        self._chunks.append(data)
        self._buffered += len(data)
        if self._buffered > BUFFER and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        _wake(self._reading)

    def eof_received(self) -> bool:
        """The server will send no more: hang up too."""
        self._ended = True
        _wake(self._reading)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Closed by either side."""
        self._ended = True
        self._error = exc
        _wake(self._reading)
        _wake(self._writing)

    def pause_writing(self) -> None:
        """The send buffer is full."""
        self._full = True

    def resume_writing(self) -> None:
        """The send buffer has room."""
        self._full = False
        _wake(self._writing)


def _more_patience(patience: Callable[[], float] | None) -> float:
    """Seconds until it is asked again. Raises TimeoutError if it has run out."""
    more = INF if patience is None else patience()
    if more <= 0:
        raise TimeoutError("silent for longer than is normal here")
    return max(more, 0.01)


def _bounded(timeout: float | None) -> float | None:
    return timeout if timeout is None or timeout < LONGEST else LONGEST


def _expire(waiter: asyncio.Future[None], late: type[Exception], timeout: float) -> None:
    if not waiter.done():
        waiter.set_exception(late(f"nothing happened within {max(0.0, timeout):.3g} s"))


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


def _readable(sock: socket.socket) -> bool:
    if hasattr(select, "poll"):
        poller = select.poll()
        poller.register(sock, select.POLLIN)
        return bool(poller.poll(0))
    return bool(select.select([sock], [], [], 0)[0])


def _socket_info(sock: Any, info: str) -> Any:
    if info == "socket":
        return sock
    if info == "client_addr":
        return sock.getsockname()
    return sock.getpeername() if info == "server_addr" else None
