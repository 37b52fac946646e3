"""Cases G4 and G7 where they are more than one behaviour: connections that a gateway forgets, and the same shares of the
load as over HTTP for every kind of call."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from concurrent import futures
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from relay import Relay
from world import drained, method, router_of, servers, soon

import gpuroute
import gpuroute.grpc
import gpuroute.grpc.aio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from world import Server

pytestmark = pytest.mark.real_time

QUICK_PINGS = (("grpc.keepalive_time_ms", 1000), ("grpc.http2.ping_timeout_ms", 1000))


# ------------------------------------------------------------------------------------------ G4: silence after idleness


class Nat(Relay):
    """A relay that can forget its connections: what is sent on those vanishes, and nobody is told. New ones work."""

    def __init__(self, server: Server) -> None:
        self._forgotten = threading.Event()
        self.closed_by_client = 0
        self.swallowed = 0  # bytes
        super().__init__(server)

    def forget(self) -> None:
        """Drop what comes on the connections of before."""
        self._forgotten.set()
        self._forgotten = threading.Event()

    def pump(self) -> Callable[[socket.socket, socket.socket], None]:
        return partial(self._pass_on, self._forgotten)

    def _pass_on(self, forgotten: threading.Event, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                if forgotten.is_set():
                    self.swallowed += len(data)
                else:
                    target.sendall(data)
            if not forgotten.is_set():
                self.closed_by_client += source.getsockname()[1] == self.listens_at
                target.shutdown(socket.SHUT_WR)


@pytest.fixture
def nat() -> Iterator[tuple[Nat, Server]]:
    with servers(1) as (server,):
        relay = Nat(server)
        yield relay, server
        relay.close()


def _who_twice(router: gpuroute.Router, nat: Nat, replay: str) -> bytes:
    with gpuroute.grpc.channel(router, "p", options=QUICK_PINGS, replay=replay) as channel:
        who = channel.unary_unary(method("Who"))
        assert who(b"", timeout=60) == b"s0"
        nat.forget()
        return who(b"", timeout=60)


def _who_twice_in_asyncio(router: gpuroute.Router, nat: Nat, replay: str) -> bytes:
    async def run() -> Any:
        options = QUICK_PINGS
        async with gpuroute.grpc.aio.channel(router, "p", options=options, replay=replay) as channel:
            who = channel.unary_unary(method("Who"))
            assert await who(b"", timeout=60) == b"s0"
            nat.forget()
            return await who(b"", timeout=60)

    return asyncio.run(run())


def _counting(dial: Any, opened: list[str]) -> Any:
    def counted(target: str, *how: Any, **named: Any) -> Any:
        opened.append(target)
        return dial(target, *how, **named)

    return counted


@pytest.mark.parametrize("twice", [_who_twice, _who_twice_in_asyncio])
def test_g4_an_idle_connection_that_was_dropped_in_silence_costs_no_call(
    twice: Any, nat: tuple[Nat, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ping finds it out, and the call goes out again on a new connection; nobody is ejected for that."""
    relay, server = nat
    opened: list[str] = []
    for module in (grpc, grpc.aio):
        monkeypatch.setattr(module, "insecure_channel", _counting(module.insecure_channel, opened))
    router = router_of(relay.url, breaker_failures=3, watchdog=False)
    assert twice(router, relay, "unavailable") == b"s0"
    assert relay.swallowed, "the call was not sent into the void"
    assert len(opened) >= 2, "the repetition may have met the dead connection, which grpcio keeps until a write has ended"
    assert server.service.received >= 2
    pool = router.snapshot().pools["p"]
    (view,) = pool.endpoints
    assert (view.breaker, view.in_flight) == ("closed", 0)
    assert pool.signals["ejections"] == pool.signals["breaker_opened"] == 0


@pytest.mark.parametrize("twice", [_who_twice, _who_twice_in_asyncio])
def test_g4_a_call_that_may_not_be_repeated_fails_and_never_ran(twice: Any, nat: tuple[Nat, Server]) -> None:
    relay, server = nat
    with pytest.raises(grpc.RpcError) as error:
        twice(router_of(relay.url, watchdog=False), relay, "unsent")
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert server.service.received == 1


def test_g4_a_stream_whose_connection_is_dropped_in_silence_is_cut_and_not_replayed(nat: tuple[Nat, Server]) -> None:
    relay, server = nat
    router = router_of(relay.url, watchdog=False)
    with gpuroute.grpc.channel(router, "p", options=QUICK_PINGS) as channel:
        stream = channel.unary_stream(method("Count"))(b"2 wait", timeout=90)
        assert [next(stream), next(stream)] == [b"0", b"1"]
        relay.forget()
        with pytest.raises(grpc.RpcError) as error:
            next(stream)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert server.service.received == 1
    assert drained(router)


def test_g4_connections_that_idle_are_closed_before_a_gateway_forgets_them(nat: tuple[Nat, Server]) -> None:
    relay, _ = nat
    with gpuroute.grpc.channel(router_of(relay.url), "p", idle_timeout=1.0) as channel:
        who = channel.unary_unary(method("Who"))
        assert who(b"", timeout=60) == b"s0"
        assert soon(lambda: relay.closed_by_client == 1), "the idle connection stays open"
        relay.forget()
        assert who(b"", timeout=60) == b"s0"


# ------------------------------------------------------------------------------------------ G7: the shares of HTTP

HELD, SHORT = 40, 20


class Holding:
    """A server, of gRPC and of HTTP, that answers calls of any kind with its name once it is released."""

    def __init__(self, name: str) -> None:
        self.name = name.encode()
        self.release = threading.Event()
        self._server = grpc.server(futures.ThreadPoolExecutor(HELD + 8), options=(("grpc.so_reuseport", 0),))
        kinds = {
            "unary_unary": grpc.unary_unary_rpc_method_handler(self._one),
            "unary_stream": grpc.unary_stream_rpc_method_handler(self._many),
            "stream_unary": grpc.stream_unary_rpc_method_handler(self._one),
            "stream_stream": grpc.stream_stream_rpc_method_handler(self._many),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Holding", kinds),))
        self.grpc_url = f"grpc://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.http_url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

    def _one(self, _: Any, context: grpc.ServicerContext) -> bytes:
        while context.is_active() and not self.release.wait(0.05):
            pass
        return self.name

    def _many(self, requests: Any, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield self._one(requests, context)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        holding = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                holding.release.wait()
                self.send_response(200)
                self.send_header("content-length", str(len(holding.name)))
                self.end_headers()
                self.wfile.write(holding.name)

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    def stop(self) -> None:
        self.release.set()
        self._server.stop(None).wait(60)
        self._http.shutdown()
        self._http.server_close()


@contextlib.contextmanager
def _two() -> Iterator[list[Holding]]:
    running = [Holding("a"), Holding("b")]
    try:
        yield running
    finally:
        for one in running:
            one.stop()


Shares = tuple[float, float]
"""The share of a burst that went to `a`, and of the short calls to `b` while `a` is busy."""


async def _shares(router: gpuroute.Router, two: list[Holding], start: Callable[[], Any]) -> Shares:
    """Forty calls at once, of which those at `b` then end; then short calls, one after another."""
    held = [asyncio.ensure_future(start()) for _ in range(HELD)]
    assert await asyncio.to_thread(soon, lambda: sum(_loads(router)) == HELD), _loads(router)
    burst = _loads(router)[0] / HELD
    two[1].release.set()
    assert await asyncio.to_thread(soon, lambda: _loads(router)[1] == 0), _loads(router)
    short = [await start() for _ in range(SHORT)]
    two[0].release.set()
    await asyncio.gather(*held)
    assert await asyncio.to_thread(drained, router), "something is still counted as in flight"
    return burst, short.count(b"b") / SHORT


def _loads(router: gpuroute.Router) -> list[int]:
    pools = router.snapshot().pools
    return [view.in_flight for view in pools["p"].endpoints] if pools else []


@pytest.fixture(scope="module")
def over_http() -> Shares:
    pytest.importorskip("httpx2")
    import gpuroute.httpx2

    async def run(two: list[Holding]) -> Shares:
        router = router_of(*(one.http_url for one in two), policy="least_request", watchdog=False)
        async with gpuroute.httpx2.AsyncClient(router, timeout=90) as client:

            async def start() -> bytes:
                return (await client.get("http://p/")).content

            return await _shares(router, two, start)

    with _two() as two:
        return asyncio.run(run(two))


def _aio_start(channel: Any, kind: str) -> Callable[[], Any]:
    async def start() -> Any:
        call = getattr(channel, kind)(f"/test.Holding/{kind}")(_request(kind), timeout=90)
        return await anext(aiter(call)) if kind.endswith("stream") else await call

    return start


def _request(kind: str) -> Any:
    return b"x" if kind.startswith("unary") else [b"x"]


def _sync_start(channel: Any, kind: str) -> Callable[[], Any]:
    """Begun here and now, one after another; waited for in a thread."""
    multicallable = getattr(channel, kind)(f"/test.Holding/{kind}")

    def start() -> Any:
        request = b"x" if kind.startswith("unary") else iter([b"x"])
        if kind.endswith("stream"):
            call = multicallable(request, timeout=90)
            return asyncio.get_running_loop().run_in_executor(THREADS, lambda: b"".join(call))
        return asyncio.get_running_loop().run_in_executor(THREADS, multicallable.future(request, timeout=90).result)

    return start


THREADS = futures.ThreadPoolExecutor(HELD)


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream", "stream_unary", "stream_stream"])
@pytest.mark.parametrize("manner", ["sync", "asyncio"])
def test_g7_every_kind_of_call_is_shared_as_over_http(kind: str, manner: str, over_http: Shares) -> None:
    """Cases L1 and L2 over gRPC: what is open counts as load, to the end and no longer."""

    async def run(two: list[Holding]) -> Shares:
        router = router_of(*(one.grpc_url for one in two), policy="least_request", watchdog=False)
        if manner == "sync":
            with gpuroute.grpc.channel(router, "p") as channel:
                return await _shares(router, two, _sync_start(channel, kind))
        async with gpuroute.grpc.aio.channel(router, "p") as channel:
            return await _shares(router, two, _aio_start(channel, kind))

    with _two() as two:
        found = asyncio.run(run(two))
    assert found == pytest.approx(over_http, abs=0.05)
    assert found == (pytest.approx(0.5, abs=0.05), 1.0)


def test_g7_one_host_of_both_protocols_is_counted_for_each_by_itself() -> None:
    """Calls by HTTP and by gRPC to one host in one pool: each client counts what it sent, and at rest that is nothing."""

    pytest.importorskip("httpx2")
    import gpuroute.httpx2

    async def run(two: list[Holding]) -> None:
        urls = [url for one in two for url in (one.http_url, one.grpc_url)]
        router = router_of(*urls, policy="least_request", watchdog=False)
        async with gpuroute.grpc.aio.channel(router, "p") as channel:
            async with gpuroute.httpx2.AsyncClient(router, timeout=90) as client:
                start = _aio_start(channel, "unary_unary")
                held = [asyncio.ensure_future(each) for _ in range(10) for each in (start(), client.get("http://p/"))]
                assert await asyncio.to_thread(soon, lambda: all_loads(router) == {"p": [5, 5], "p (grpc)": [5, 5]})
                for one in two:
                    one.release.set()
                await asyncio.gather(*held)
                assert await asyncio.to_thread(soon, lambda: all_loads(router) == {"p": [0, 0], "p (grpc)": [0, 0]})

    def all_loads(router: gpuroute.Router) -> dict[str, list[int]]:
        return {name: [v.in_flight for v in pool.endpoints] for name, pool in router.snapshot().pools.items()}

    with _two() as two:
        asyncio.run(run(two))
