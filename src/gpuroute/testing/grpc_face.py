"""The gRPC face of a `GpuServer`: KServe v2 and Triton's streaming call, over the same engine, faults and counters.

    with GpuServer() as server, GrpcFace(server) as face:
        router = Router(endpoints=[face.url])

A gRPC request becomes a completion request of the stand-in, so whatever a test orders (`answer`, `hang`, `slow`, a full
queue, a drop in mid-stream) shows here too, as the gRPC status that stands for it. Messages are written by field number.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import grpc
from grpc import StatusCode

from gpuroute.core.wire import Message, WireError, encode

from .wire import Reply, Request

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import TracebackType
    from typing import Self

    from .app import App
    from .server import GpuServer
    from .wire import Headers

SERVICE = "inference.GRPCInferenceService"
_CODES = {
    400: StatusCode.INVALID_ARGUMENT,
    404: StatusCode.NOT_FOUND,
    429: StatusCode.RESOURCE_EXHAUSTED,
    500: StatusCode.INTERNAL,
    503: StatusCode.UNAVAILABLE,
}
_CUT = 0
_START_S = 10.0


class _Piece:
    """Something that the stand-in said: a status and a body, an event of the stream, or that it hung up."""

    __slots__ = ("body", "last", "status")

    def __init__(self, status: int, body: bytes = b"", *, last: bool = False) -> None:
        self.status = status
        self.body = body
        self.last = last


class _QueuedReply(Reply):
    """A reply that goes to a gRPC handler instead of a socket."""

    __slots__ = ("pieces",)

    def __init__(self) -> None:
        self.pieces: asyncio.Queue[_Piece] = asyncio.Queue()
        self.began = self.done = False
        self.written = 0
        self.on_abort = None

    def send(self, status: int, body: bytes, content_type: str = "", headers: Headers = ()) -> None:  # noqa: ARG002
        if not self.done:
            self.began = self.done = True
            self.pieces.put_nowait(_Piece(status, body, last=True))

    def send_half(self, status: int, body: bytes, content_type: str = "") -> None:
        """Nothing: half a message cannot be sent."""

    def start(self, headers: Headers = ()) -> None:  # noqa: ARG002
        self.began = True

    def event(self, data: bytes) -> None:
        if not self.done:
            self.written += 1
            self.pieces.put_nowait(_Piece(200, data))

    def end(self) -> None:
        if not self.done:
            self.done = True
            self.pieces.put_nowait(_Piece(200, last=True))

    def cut(self, *, reset: bool = False) -> None:  # noqa: ARG002
        self.done = True
        self.pieces.put_nowait(_Piece(_CUT, last=True))


class GrpcFace:
    """A gRPC port of a running GpuServer. Any thread may call the methods."""

    def __init__(self, server: GpuServer, *, port: int = 0) -> None:
        self._gpu = server
        self._port = port
        self._server: grpc.aio.Server | None = None

    @property
    def url(self) -> str:
        """`grpc://127.0.0.1:PORT`."""
        return f"grpc://127.0.0.1:{self._port}"

    def start(self) -> Self:
        """Listen, on the same port every time."""
        self._run(self._listen())
        return self

    def stop(self) -> None:
        """Close the port and cancel what is under way, as a killed process would. Idempotent."""
        if self._server is not None:
            self._run(self._server.stop(0))
            self._server = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self, coroutine: Any) -> Any:
        loop = self._gpu._loop  # noqa: SLF001  (one thing in two files)
        if loop is None:
            raise ConnectionError("the GpuServer is not running: start it before its gRPC face")
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(_START_S)

    async def _listen(self) -> None:
        if self._server is None:
            server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
            server.add_generic_rpc_handlers(self._handlers(self._gpu._running().app))  # noqa: SLF001
            self._port = server.add_insecure_port(f"127.0.0.1:{self._port}")
            await server.start()
            self._server = server

    @staticmethod
    def _handlers(app: App) -> tuple[grpc.GenericRpcHandler, ...]:
        face = _Service(app)
        unary: Any = grpc.unary_unary_rpc_method_handler
        stream: Any = grpc.stream_stream_rpc_method_handler
        inference = {
            "ServerLive": unary(face.live),
            "ServerReady": unary(face.ready),
            "ModelReady": unary(face.ready),
            "ModelInfer": unary(face.infer),
            "ModelStreamInfer": stream(face.stream),
        }
        health = {"Check": unary(face.check)}
        make = grpc.method_handlers_generic_handler
        return make(SERVICE, inference), make("grpc.health.v1.Health", health)


class _Service:
    """The methods, on the stand-in's loop."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def live(self, request: bytes, context: Any) -> bytes:  # noqa: ARG002
        return encode((1, True))

    async def ready(self, request: bytes, context: Any) -> bytes:  # noqa: ARG002
        return encode((1, await self._is_healthy()))

    async def check(self, request: bytes, context: Any) -> bytes:  # noqa: ARG002
        return encode((1, 1 if await self._is_healthy() else 2))

    async def infer(self, request: bytes, context: Any) -> bytes:
        ask = await self._read(request, context)
        async for piece in self._answer(ask, stream=False):
            if piece.status != 200:
                await context.abort(*_status(piece))
            choice = json.loads(piece.body)["choices"][0]
            return ask.response(choice["text"], final=True)
        raise AssertionError("the stand-in ended an answer without a word")

    async def stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            ask = await self._read(request, context)
            async for piece in self._answer(ask, stream=True):
                if piece.status != 200:
                    code, details = _status(piece)
                    if piece.status == _CUT:
                        await context.abort(code, details)
                    yield encode((1, details))  # Triton reports a failed request in the stream, which goes on
                elif piece.last:
                    yield encode((2, ask.response("", final=True)))
                elif (text := _text(piece.body)) is not None:
                    yield encode((2, ask.response(text)))

    async def _read(self, request: bytes, context: Any) -> _Asked:
        try:
            return _Asked(request)
        except WireError:
            await context.abort(StatusCode.INTERNAL, "malformed request")
            raise

    async def _is_healthy(self) -> bool:
        reply = self._begin("GET", "/health", b"", {})
        return (await reply.pieces.get()).status == 200

    async def _answer(self, ask: _Asked, *, stream: bool) -> AsyncIterator[_Piece]:
        body = {"model": ask.model, "prompt": ask.text, "stream": stream}
        if ask.max_tokens:
            body["max_tokens"] = ask.max_tokens
        reply = self._begin("POST", "/v1/completions", json.dumps(body).encode(), {"x-request-id": ask.id})
        try:
            last = False
            while not last:
                piece = await reply.pieces.get()
                last = piece.last
                yield piece
        finally:
            if not reply.done and reply.on_abort is not None:
                reply.done = True
                reply.on_abort()

    def _begin(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> _QueuedReply:
        lines = "".join(f"\r\n{name}: {value}" for name, value in headers.items() if value)
        target = self._app.options.prefix + path
        request = Request(f"{method} {target} HTTP/1.1{lines}".encode("latin-1", "replace"), 0)
        request.body = body
        reply = _QueuedReply()
        self._app.handle(request, reply)
        return reply


class _Asked:
    """A ModelInferRequest: the text in `text_input`, and `max_tokens` as a tensor or a parameter."""

    def __init__(self, request: bytes) -> None:
        message = Message(request)
        self.model, self.id = message.text(1), message.text(3)
        raw = message.all(7)
        self.text, self.max_tokens = "", 0
        for entry in message.messages(4):
            if entry.text(1) == "max_tokens":
                self.max_tokens = entry.message(2).integer(2)
        for place, tensor in enumerate(message.messages(5)):
            data = raw[place] if place < len(raw) else b""
            if tensor.text(1) == "text_input":
                texts = tensor.message(5).all(8)
                self.text = (data[4:] or (texts[0] if texts else b"")).decode("utf-8", "replace")
            elif tensor.text(1) == "max_tokens" and data:
                self.max_tokens = int.from_bytes(data, "little", signed=True)

    def response(self, text: str, *, final: bool = False) -> bytes:
        """A ModelInferResponse with this text in `text_output`."""
        data = text.encode()
        tensor = encode((1, "text_output"), (2, "BYTES"), (3, b"\x01"))
        flag = encode((1, "triton_final_response"), (2, encode((1, final))))
        raw = len(data).to_bytes(4, "little") + data
        return encode((1, self.model), (2, "1"), (3, self.id or None), (4, flag), (5, tensor), (6, raw))


def _status(piece: _Piece) -> tuple[StatusCode, str]:
    if piece.status == _CUT:
        return StatusCode.UNAVAILABLE, "Socket closed"
    try:
        error = json.loads(piece.body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        error = piece.body.decode("utf-8", "replace") or f"HTTP status {piece.status}"
    return _CODES.get(piece.status, StatusCode.UNKNOWN), error


def _text(event: bytes) -> str | None:
    """The text in one server-sent event; None for the others (usage, the end mark)."""
    data = event.removeprefix(b"data: ").strip()
    if not data.startswith(b"{"):
        return None
    choices = json.loads(data).get("choices")
    return choices[0]["text"] if choices else None
