"""Real grpcio servers with generic handlers (bytes in, bytes out: no protobuf), and channels to them."""

from __future__ import annotations

import asyncio
import struct
import threading
import time
from concurrent import futures
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import grpc

import gpuroute
import gpuroute.grpc
import gpuroute.grpc.aio
from gpuroute.core.endpoint import Endpoint
from gpuroute.core.wire import encode
from gpuroute.testing import FakeRegistry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SERVICE = "test.Service"
WAITING = encode((8, encode((1, "num_requests_waiting")) + b"\x11" + struct.pack("<d", 5.0)))
"""An ORCA load report: five wait. Field 8 is a map entry."""


def method(name: str) -> str:
    return f"/{SERVICE}/{name}"


class Service:
    """Behaviours by method name. `received` counts calls that reached a handler; `release` ends the slow ones."""

    def __init__(self, name: str = "") -> None:
        self.name = name.encode()
        self.received = 0
        self.metadata: list[tuple[tuple[str, Any], ...]] = []
        self.requests: list[bytes] = []
        self.release = threading.Event()
        self.cancelled = threading.Event()
        self.fail_next: list[grpc.StatusCode] = []
        self.trailing: tuple[tuple[str, Any], ...] = ()
        self.hang = False
        self.reads_first = False  # what is collected, before it may fail: of a late write grpcio says INTERNAL
        self.released_code: grpc.StatusCode | None = None
        self.heard: Callable[[], object] = lambda: None
        self.follows = True
        self.followed: list[bytes] = []  # requests for load reports out of band
        self.following = 0
        self.mute = False  # follows, and says nothing

    def _wait(self, context: grpc.ServicerContext) -> None:
        """Until the test says so, or the call has ended: a thread must not outlive its call."""
        while context.is_active() and not self.release.wait(0.02):
            pass

    def _tell_of_its_end(self, context: grpc.ServicerContext) -> None:
        if not context.add_callback(self.cancelled.set):  # it has ended before it came here
            self.cancelled.set()

    def _enter(self, context: grpc.ServicerContext) -> None:
        self.received += 1
        self.heard()
        self.metadata.append(tuple((k, v) for k, v in context.invocation_metadata() if k != "user-agent"))
        if self.trailing:
            context.set_trailing_metadata(self.trailing)
        if self.fail_next:
            context.abort(self.fail_next.pop(0), "told to fail")
        if self.hang:
            self._tell_of_its_end(context)
            self._wait(context)
            if self.released_code is not None:
                context.abort(self.released_code, "released to fail")

    def echo(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self._enter(context)
        self.requests.append(request)
        sent = [(k, v) for k, v in context.invocation_metadata() if k.startswith("echo-")]
        context.send_initial_metadata((("initial", "one"), *sent))
        context.set_trailing_metadata((("trailing", "two"), ("trailing-bin", b"\x00\xff"), *self.trailing))
        return request

    def who(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self._enter(context)
        return self.name

    def fail(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self._enter(context)
        context.set_trailing_metadata((("why", "because"),))
        context.abort(grpc.StatusCode[request.decode()], f"failed with {request.decode()}")

    def explode(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self._enter(context)
        raise ValueError("a bug in the application")

    def slow(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self._tell_of_its_end(context)
        self._enter(context)
        self._wait(context)
        return request

    def big(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self._enter(context)
        return b"x" * int(request)

    def count(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        self._tell_of_its_end(context)
        self._enter(context)
        context.send_initial_metadata((("initial", "one"),))
        number, _, then = request.decode().partition(" ")
        for i in range(int(number)):
            yield b"%d" % i
        if then == "wait":
            self._wait(context)
        elif then:
            context.abort(grpc.StatusCode[then], "after some messages")
        context.set_trailing_metadata((("trailing", "two"),))

    def collect(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        given = list(requests) if self.reads_first else requests
        self._enter(context)
        return b",".join(given)

    def refuse(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        self._enter(context)
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, "reads nothing")

    def chat(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        self._tell_of_its_end(context)
        self._enter(context)
        context.send_initial_metadata((("initial", "one"),))
        for request in requests:
            if request == b"end":
                context.set_trailing_metadata((("trailing", "two"),))
                return
            if request == b"fail":
                context.abort(grpc.StatusCode.INTERNAL, "in the middle")
            yield b"re:" + request

    def load(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        if not self.follows:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such service")
        self.followed.append(request)
        self.following += 1
        try:
            while context.is_active() and not self.release.wait(0.02):
                if not self.mute:
                    yield WAITING
        finally:
            self.following -= 1

    def handlers(self) -> grpc.GenericRpcHandler:
        unary, server = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        client, both = grpc.stream_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        ones = {name: unary(getattr(self, name.lower())) for name in ("Echo", "Who", "Fail", "Explode", "Slow", "Big")}
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                **ones,
                "Count": server(self.count),
                "Collect": client(self.collect),
                "Refuse": client(self.refuse),
                "Chat": both(self.chat),
            },
        )


class Server:
    """One running server; `url` is its registry URL."""

    def __init__(self, name: str = "", port: int = 0, *, credentials: Any = None, options: Any = (), threads: int = 32):
        self.service = Service(name)
        how = [("grpc.so_reuseport", 0), *options]
        self._server = grpc.server(futures.ThreadPoolExecutor(threads), options=how)
        reports = {"StreamCoreMetrics": grpc.unary_stream_rpc_method_handler(self.service.load)}
        orca = grpc.method_handlers_generic_handler("xds.service.orca.v3.OpenRcaService", reports)
        self._server.add_generic_rpc_handlers((self.service.handlers(), orca))
        address = f"127.0.0.1:{port}"
        secure = self._server.add_secure_port
        self.port = secure(address, credentials) if credentials else self._server.add_insecure_port(address)
        self.target = f"ipv4:127.0.0.1:{self.port}"
        self.url = f"grpc://127.0.0.1:{self.port}"
        self._server.start()

    def stop(self, grace: float | None = None) -> None:
        self.service.release.set()
        self._server.stop(grace).wait(60)


@contextmanager
def servers(count: int, **how: Any) -> Iterator[list[Server]]:
    running = [Server(f"s{i}", **how) for i in range(count)]
    try:
        yield running
    finally:
        for server in running:
            server.stop()


def refused_url() -> str:
    """A URL at which nobody listens."""
    from ports import own_port  # which the processes that tests start do not find

    return f"grpc://127.0.0.1:{own_port()}"


PATIENT = {"breaker_failures": 1000, "connect_timeout": "20s", "watchdog": False}
"""Settings for busy machines: a server that is there is not taken for slow or dead, unless a test asks for that."""


def router_of(*endpoints: str | Endpoint, **settings: Any) -> gpuroute.Router:
    """A patient router over these endpoints (pool `p`)."""
    return gpuroute.Router(FakeRegistry({"p": list(endpoints)}), **(PATIENT | settings))


def endpoint(server: Server, **fields: Any) -> Endpoint:
    return Endpoint(id=fields.pop("id", server.url), url=fields.pop("url", server.url), **fields)


def in_flight(router: gpuroute.Router) -> int:
    pools = router.snapshot().pools
    return sum(view.in_flight for view in pools["p"].endpoints) if pools else 0


PATIENCE_S = 30.0
"""How long what must happen may take: the machine may be ten times as busy as it has processors."""


def soon(condition: Callable[[], Any], within: float = PATIENCE_S) -> bool:
    """True once the condition holds; False if that does not come true."""
    until = time.monotonic() + within
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True


def undisturbed(scenario: Callable[[], bool], tries: int = 5) -> bool:
    """True once the machine lets a scenario run that has limits of time of its own; False if it never does.

    A scenario returns False, or raises what a call ends with, if something came too late for what it wants to see.
    """
    for _ in range(tries):
        with suppress(grpc.RpcError):
            if scenario():
                return True
    return False


def drained(router: gpuroute.Router) -> bool:
    """True once nothing is in flight; False if that does not come true."""
    return soon(lambda: in_flight(router) == 0)


# ------------------------------------------------------------------------------------------ one call, in every manner


def _blocking(router: gpuroute.Router, name: str, request: Any, how: Any, given: Any) -> Any:
    with gpuroute.grpc.channel(router, "p", **given) as channel:
        return _kind(channel, name, request)(request, **how)


def _future(router: gpuroute.Router, name: str, request: Any, how: Any, given: Any) -> Any:
    with gpuroute.grpc.channel(router, "p", **given) as channel:
        return _kind(channel, name, request).future(request, **how).result()


def _asyncio(router: gpuroute.Router, name: str, request: Any, how: Any, given: Any) -> Any:
    async def run() -> Any:
        async with gpuroute.grpc.aio.channel(router, "p", **given) as channel:
            return await _kind(channel, name, request)(request, **how)

    return asyncio.run(run())


def _kind(channel: Any, name: str, request: Any) -> Any:
    return (channel.unary_unary if isinstance(request, bytes) else channel.stream_unary)(method(name))


MANNERS = {"blocking": _blocking, "future": _future, "asyncio": _asyncio}


class Manner:
    """Calls through a fresh routed channel: blocking, by future, or in asyncio."""

    def __init__(self, name: str) -> None:
        self.name = name

    def call(self, router: gpuroute.Router, name: str, request: Any, *, given: Any = None, **how: Any) -> Any:
        """The response of one call; `given`: arguments of the channel."""
        return MANNERS[self.name](router, name, request, how, given or {})

    def stream(self, router: gpuroute.Router, name: str, request: Any, **how: Any) -> tuple[list[bytes], Any]:
        """The messages of one server stream, and the error that ended it, if one did."""
        return (asyncio.run(_aio_stream(router, name, request, how)) if self.name == "asyncio" else
                _sync_stream(router, name, request, how))  # fmt: skip


def _sync_stream(router: gpuroute.Router, name: str, request: Any, how: Any) -> tuple[list[bytes], Any]:
    found: list[bytes] = []
    with gpuroute.grpc.channel(router, "p") as channel:
        try:
            found.extend(channel.unary_stream(method(name))(request, **how))
        except grpc.RpcError as error:
            return found, error
    return found, None


async def _aio_stream(router: gpuroute.Router, name: str, request: Any, how: Any) -> tuple[list[bytes], Any]:
    found: list[bytes] = []
    async with gpuroute.grpc.aio.channel(router, "p") as channel:
        try:
            async for message in channel.unary_stream(method(name))(request, **how):
                found.append(message)  # noqa: PERF401  (what came before an error counts)
        except grpc.RpcError as error:
            return found, error
    return found, None
