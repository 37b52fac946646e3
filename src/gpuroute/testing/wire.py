"""A small HTTP/1.1 server on asyncio protocols, for the stand-in: fast, exact, and rude on demand.

Ready-made servers hide what a client's tests need to see or to provoke: the raw request line and header bytes, the
instant a client goes away, a reply cut at a chosen byte. Replies are callbacks, not tasks: a token is one write.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import struct
import time
from http import HTTPStatus
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Headers = Iterable[tuple[str, str]]

MAX_HEAD = 64 * 1024
MAX_BODY = 64 * 1024 * 1024
JSON_TYPE = "application/json"
_TERMINAL_CHUNK = b"0\r\n\r\n"


class BadRequest(Exception):
    """The bytes on the wire are not an HTTP/1.1 request that this server takes."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Request:
    """One request as it arrived: `target`, `headers` and `body` are the bytes of the wire (chunks joined)."""

    __slots__ = ("_lower", "body", "connection", "headers", "method", "target", "version")

    def __init__(self, head: bytes, connection: int) -> None:
        first, *lines = head.split(b"\r\n")
        parts = first.split(b" ")
        if len(parts) != 3 or not parts[2].startswith(b"HTTP/1."):
            raise BadRequest(400, "malformed request line")
        self.method, self.target, self.version = parts[0].decode("latin-1"), parts[1], parts[2]
        pairs = (line.partition(b":") for line in lines)
        self.headers = [(name, value.strip()) for name, _, value in pairs]
        self._lower = {name.lower().decode("latin-1"): value.decode("latin-1") for name, value in self.headers}
        self.connection = connection
        self.body = b""

    @property
    def path(self) -> str:
        """The target without its query."""
        return self.target.partition(b"?")[0].decode("latin-1")

    def header(self, name: str, default: str = "") -> str:
        """The last value of a header, by lower-case name."""
        return self._lower.get(name, default)

    @property
    def keeps_alive(self) -> bool:
        """Whether the client wants the connection to live on."""
        asked = self.header("connection").lower()
        return asked != "close" and (self.version == b"HTTP/1.1" or asked == "keep-alive")


class Reply:
    """The answer to one request: `send` once, or `start`, `event`..., `end`; or `cut`. Loop thread only.

    `on_abort` runs if the client goes away first. `written` counts events, `began` says whether any byte left.
    """

    __slots__ = ("_connection", "_head_only", "_keep_alive", "began", "done", "on_abort", "written")

    def __init__(self, connection: Connection, request: Request) -> None:
        self._connection = connection
        self._keep_alive = request.keeps_alive
        self._head_only = request.method == "HEAD"
        self.began = self.done = False
        self.written = 0
        self.on_abort: Callable[[], None] | None = None

    def send(self, status: int, body: bytes, content_type: str = JSON_TYPE, headers: Headers = ()) -> None:
        """A whole response."""
        if not self.done:
            extra = f"content-length: {len(body)}\r\n" + (f"content-type: {content_type}\r\n" if body else "")
            self._write(_head(status, extra, headers, close=not self._keep_alive) + (b"" if self._head_only else body))
            self._finish()

    def send_half(self, status: int, body: bytes, content_type: str = JSON_TYPE) -> None:
        """A response whose body stops in the middle of what its length promised; then `cut`."""
        extra = f"content-length: {len(body)}\r\ncontent-type: {content_type}\r\n"
        self._write(_head(status, extra, (), close=False) + body[: len(body) // 2])

    def start(self, headers: Headers = ()) -> None:
        """The head of a server-sent event stream."""
        extra = "content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n"
        self._write(_head(200, extra, headers, close=not self._keep_alive))

    def event(self, data: bytes) -> None:
        """One event of the stream, as its own chunk."""
        if not self.done:
            self.written += 1
            self._write(b"%x\r\n%b\r\n" % (len(data), data))

    def end(self) -> None:
        """The regular end of a stream."""
        if not self.done:
            self._write(_TERMINAL_CHUNK)
            self._finish()

    def cut(self, *, reset: bool = False) -> None:
        """Close the connection here, whatever was promised; with RST instead of FIN if `reset`."""
        self.done = True
        self._connection.cut(reset=reset)

    def _write(self, data: bytes) -> None:
        self.began = True
        self._connection.write(data)

    def _finish(self) -> None:
        self.done = True
        self._connection.reply_done(keep_alive=self._keep_alive)


class Connection(asyncio.Protocol):
    """Parses requests of one client connection and hands them to `app`, one at a time."""

    _numbers = itertools.count(1)

    def __init__(self, app: Callable[[Request, Reply], None], live: set[Connection], limit: int, idle: float) -> None:
        self.number = next(self._numbers)
        self._app, self._live, self._limit, self._idle = app, live, limit, idle
        self._served = 0
        self._buffer = bytearray()
        self._request: Request | None = None
        self._reply: Reply | None = None
        self._need = 0
        self._chunks: _ChunkedBody | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client connected."""
        self._transport = transport
        self._live.add(self)
        self._rest()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  (asyncio's signature)
        """The client went away: whoever works on its request is told."""
        self._live.discard(self)
        self._wake()
        reply, self._reply = self._reply, None
        if reply is not None and not reply.done:
            reply.done = True
            if reply.on_abort is not None:
                reply.on_abort()

    def data_received(self, data: bytes) -> None:
        """Bytes arrived; those of a pipelined request wait until the present one is answered."""
        self._buffer += data
        self._wake()
        self._parse()

    def write(self, data: bytes) -> None:
        """Bytes to the client; none after it is gone."""
        if not self._transport.is_closing():
            self._transport.write(data)  # type: ignore[attr-defined]

    def reply_done(self, *, keep_alive: bool) -> None:
        """The present request is answered: take the next one, or hang up as real servers do."""
        self._reply = None
        self._served += 1
        if not keep_alive or (self._limit and self._served >= self._limit):
            self._transport.close()
            return
        self._rest()
        if self._buffer:
            self._parse()

    def cut(self, *, reset: bool) -> None:
        """Close now; `reset` throws unsent bytes away and makes the peer see a connection reset."""
        if self._transport.is_closing():
            return
        raw = self._transport.get_extra_info("socket")
        if reset and raw is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()  # type: ignore[attr-defined]
            return
        self._transport.close()

    @property
    def idle(self) -> bool:
        """True if no request is being read or answered."""
        return self._reply is None and self._request is None and not self._buffer

    def _rest(self) -> None:
        if self._idle > 0:
            self._timer = asyncio.get_running_loop().call_later(self._idle, self._transport.close)

    def _wake(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _parse(self) -> None:
        try:
            while self._reply is None and not self._transport.is_closing() and self._advance():
                pass
        except BadRequest as error:
            body = str(error).encode()
            self.write(_head(error.status, f"content-length: {len(body)}\r\n", (), close=True) + body)
            self._transport.close()

    def _advance(self) -> bool:
        """Read the head, or the body, or nothing more for now."""
        if self._request is None:
            return self._read_head()
        body = self._read_body()
        if body is None:
            return False
        request, self._request = self._request, None
        request.body = body
        self._reply = Reply(self, request)
        self._app(request, self._reply)
        return True

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD:
                raise BadRequest(431, "header too large")
            return False
        request = Request(bytes(self._buffer[:end]), self.number)
        del self._buffer[: end + 4]
        self._expect(request)
        self._request = request
        return True

    def _expect(self, request: Request) -> None:
        """Note how the body is framed, and let the client send it."""
        self._chunks = _ChunkedBody() if "chunked" in request.header("transfer-encoding").lower() else None
        length = request.header("content-length", "0")
        if not length.isdecimal():
            raise BadRequest(400, "malformed content-length")
        self._need = int(length)
        if self._need > MAX_BODY:
            raise BadRequest(413, "body too large")
        if request.header("expect").lower() == "100-continue":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _read_body(self) -> bytes | None:
        if self._chunks is not None:
            return self._chunks.feed(self._buffer)
        if len(self._buffer) < self._need:
            return None
        body = bytes(self._buffer[: self._need])
        del self._buffer[: self._need]
        return body


class _ChunkedBody:
    """Takes chunks out of a buffer as they arrive; trailers are read and dropped."""

    __slots__ = ("_body", "_last")

    def __init__(self) -> None:
        self._body = bytearray()
        self._last = False

    def feed(self, buffer: bytearray) -> bytes | None:
        """The whole body once its last chunk is in, else None."""
        while (end := buffer.find(b"\r\n")) >= 0:
            if self._last:
                del buffer[: end + 2]
                if end == 0:
                    return bytes(self._body)
                continue
            size = _chunk_size(bytes(buffer[:end]))
            if size and len(buffer) < end + 2 + size + 2:
                return None
            self._body += buffer[end + 2 : end + 2 + size]
            del buffer[: end + 2 + (size + 2 if size else 0)]
            self._last = size == 0
            if len(self._body) > MAX_BODY:
                raise BadRequest(413, "body too large")
        return None


def _chunk_size(line: bytes) -> int:
    try:
        return int(line.partition(b";")[0], 16)
    except ValueError:
        raise BadRequest(400, "malformed chunk size") from None


_REASONS = {status.value: status.phrase for status in HTTPStatus}
_date = (0, "")


def _head(status: int, extra: str, headers: Headers, *, close: bool) -> bytes:
    global _date  # noqa: PLW0603  (formatting a date costs more than the rest of a reply)
    second = int(time.time())
    if _date[0] != second:
        _date = (second, time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(second)))
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    ending = "connection: close\r\n" if close else ""
    reason = _REASONS.get(status, "Status")
    text = f"HTTP/1.1 {status} {reason}\r\ndate: {_date[1]}\r\nserver: uvicorn\r\n{extra}{lines}{ending}\r\n"
    return text.encode("latin-1", "replace")
