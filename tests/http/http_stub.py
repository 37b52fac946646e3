"""Endpoints for the tests of the HTTP transport: raw bytes on real sockets, rude on demand, remembering what came."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ssl
    from collections.abc import Coroutine


@dataclass
class Came:
    """One request as it was on the wire."""

    method: str
    target: bytes
    headers: list[tuple[str, str]]
    body: bytes
    connection: int

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)


class Exchange:
    """One request and the answer to it, written by a behaviour."""

    def __init__(self, stub: Stub, came: Came, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.stub, self.came, self.reader, self.writer = stub, came, reader, writer

    def reply(self, status: int = 200, body: bytes | dict = b"", **headers: str) -> None:
        if isinstance(body, dict):
            body, headers = json.dumps(body).encode(), {"content_type": "application/json", **headers}
        head = f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n"
        self.writer.write((head + _lines(headers) + "\r\n").encode() + body)

    def start(self, status: int = 200, **headers: str) -> None:
        headers = {"content_type": "text/event-stream", **headers}
        head = f"HTTP/1.1 {status} X\r\ntransfer-encoding: chunked\r\n"
        self.writer.write((head + _lines(headers) + "\r\n").encode())

    async def chunk(self, data: bytes, pause: float = 0.0) -> None:
        self.writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        await self.writer.drain()
        await asyncio.sleep(pause)

    def end(self) -> None:
        self.writer.write(b"0\r\n\r\n")

    def reset(self) -> None:
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def hang_up(self) -> None:
        self.writer.close()


Behaviour = "Callable[[Exchange], Awaitable[None]]"


async def ok(exchange: Exchange) -> None:
    """200, saying which endpoint this is."""
    exchange.reply(200, {"endpoint": exchange.stub.name, "ok": True})


def status(code: int, body: bytes | dict = b"", **headers: str) -> Any:
    async def behave(exchange: Exchange) -> None:
        exchange.reply(code, body, **headers)

    return behave


async def hang(exchange: Exchange) -> None:
    """Never answer."""
    await exchange.reader.read()


async def reset(exchange: Exchange) -> None:
    exchange.reset()


def token(text: str) -> bytes:
    return b'data: {"choices":[{"index":0,"delta":{"content":%b}}]}\n\n' % json.dumps(text).encode()


DONE = b"data: [DONE]\n\n"


def sse(*texts: str, pause: float = 0.0, then: Any = None, done: bool = True) -> Any:
    """A chat stream of these tokens; `then(exchange)` instead of its regular end."""

    async def behave(exchange: Exchange) -> None:
        exchange.start()
        for text in texts:
            await exchange.chunk(token(text), pause)
        if then is not None:
            result = then(exchange)
            if result is not None:
                await result
            return
        if done:
            await exchange.chunk(DONE)
        exchange.end()

    return behave


@dataclass
class Stub:
    """One endpoint. `behave` may be replaced at any time."""

    loop: asyncio.AbstractEventLoop
    name: str = "a"
    tls: ssl.SSLContext | None = None
    behave: Any = ok
    idle: float | None = None
    came: list[Came] = field(default_factory=list)
    connections: int = 0
    open: int = 0

    def start(self, port: int = 0) -> Stub:
        self._server = self._run(asyncio.start_server(self._serve, "127.0.0.1", port, ssl=self.tls))
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def stop(self) -> None:
        """Refuse connections and cut those that are open."""
        self._run(self._stop())

    async def _stop(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def __post_init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        self.open += 1
        number, idle = self.connections, None
        try:
            while not writer.is_closing():
                async with asyncio.timeout(idle):  # a first request may be long in coming: it is on its way
                    came = await _read(reader, number)
                idle = self.idle
                self.came.append(came)
                await self.behave(Exchange(self, came, reader, writer))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            self.open -= 1
            self._tasks.discard(task)


async def _read(reader: asyncio.StreamReader, number: int) -> Came:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.strip().split("\r\n")
    method, target, _ = first.split(" ")
    headers = [(k, v.strip()) for k, _, v in (line.partition(":") for line in lines)]
    by_name = {k.lower(): v for k, v in headers}
    if "chunked" in by_name.get("transfer-encoding", ""):
        body = await _chunks(reader)
    else:
        body = await reader.readexactly(int(by_name.get("content-length", "0")))
    return Came(method, target.encode(), headers, body, number)


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readline()
    await reader.readline()
    return body


def _lines(headers: dict[str, str]) -> str:
    return "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())


class Stage:
    """A loop in a thread, and the endpoints that live on it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self._stubs: list[Stub] = []

    def __call__(self, *names: str, **options: Any) -> list[Stub]:
        stubs = [Stub(self.loop, name, **options).start() for name in names]
        self._stubs += stubs
        return stubs

    def close(self) -> None:
        for stub in self._stubs:
            stub.stop()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(60)
        self.loop.close()
