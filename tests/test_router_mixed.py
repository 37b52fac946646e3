"""A pool whose endpoints speak different protocols: each client library is only offered those that it can speak to."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import grpc
import pytest

import gpuroute.grpc
import gpuroute.httpx2
from gpuroute import ConfigError, Endpoint, Router, pools
from gpuroute.core.fleet import Fleet, PoolConfig, PoolSpec
from gpuroute.errors import NoEndpointAvailable
from gpuroute.testing import FakeRegistry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuroute.core.describe import PoolView
    from gpuroute.core.pool import Pool

pytestmark = pytest.mark.real_time

HTTP = [Endpoint(f"h{n}", f"http://h{n}:8000") for n in range(3)]
GRPC = [Endpoint(f"g{n}", f"grpc://g{n}:8001") for n in range(2)]


def ids(router: Router, protocol: str | None) -> set[str]:
    return {state.id for state in router.pool("llm", protocol).snapshot.states}


def make(*endpoints: Endpoint, **settings: object) -> tuple[FakeRegistry, Router]:
    registry = FakeRegistry({"llm": endpoints})
    return registry, Router(registry, policy="p2c", **settings)


def test_what_was_counted_stays_counted_when_a_part_of_a_pool_has_nobody_left() -> None:
    """A counter that falls is read as a restart, and all that is left of it as new."""
    registry, router = make(*HTTP, *GRPC)
    with router:
        for protocol in ("http", "grpc"):
            router.call("llm", protocol=protocol)
        counted = sum(pool.shared.signals.calls for pool in router.pools())
        for left in (HTTP, GRPC, [], [*HTTP, *GRPC]):
            registry.set({"llm": left})
            assert sum(pool.shared.signals.calls for pool in router.pools()) == counted == 2


def test_the_scheme_says_the_protocol() -> None:
    assert Endpoint("a", "grpcs://a:1").protocol == Endpoint("a", "grpc://a:1", protocol="http").protocol == "grpc"
    assert Endpoint("a", "http://a:1").protocol == "http"
    assert Endpoint("a", "http://a:1", protocol="grpc").protocol == "grpc"


def test_each_protocol_has_its_part_of_a_mixed_pool() -> None:
    _, router = make(*HTTP, *GRPC)
    with router:
        assert ids(router, "http") == {"h0", "h1", "h2"} == ids(router, None)
        assert ids(router, "grpc") == {"g0", "g1"}
        view = router.snapshot().pools
        assert {name: len(pool.endpoints) for name, pool in view.items()} == {"llm": 3, "llm (grpc)": 2}
        assert {pool.name for pool in view.values()} == {"llm"}
        assert len(router.pools()) == 2
        with router.attempt("llm", protocol="grpc") as attempt:
            assert attempt.url.startswith("grpc://")
        assert router.explain("llm", protocol="grpc").winner in {"g0", "g1"}
        assert router.explain("llm").winner in {"h0", "h1", "h2"}


def test_a_pool_of_one_protocol_is_one_pool() -> None:
    _, router = make(*HTTP)
    with router:
        assert router.pool("llm") is router.pool("llm", "http") is router.pool("llm", "grpc")  # http:// may be meant so


def test_a_pool_without_the_protocol_is_one_clear_error_and_no_breaker_counts_it() -> None:
    _, router = make(*GRPC)
    with router, gpuroute.httpx2.Client(router) as client:
        for _ in range(10):
            with pytest.raises(ConfigError, match=r"pool 'llm' has no endpoint for HTTP: all of them speak gRPC"):
                client.get("http://llm/v1/models")
        (view,) = router.snapshot().pools.values()
        assert [(e.served, e.breaker, e.last_error) for e in view.endpoints] == [(0, "closed", "")] * 2
        with pytest.raises(ConfigError, match=r"protocol 'soap': expected one of http, grpc"):
            router.pool("llm", "soap")


def test_parts_come_and_go_and_those_that_stay_keep_what_they_know() -> None:
    registry, router = make(*HTTP)
    with router:
        first = router.pool("llm", "http")
        registry.set({"llm": [*HTTP, *GRPC]})
        assert router.pool("llm", "http") is first
        second = router.pool("llm", "grpc")
        registry.set({"llm": GRPC})
        assert router.pool("llm", "grpc") is second is router.pool("llm")
        with pytest.raises(NoEndpointAvailable, match="or none in the protocol of this client"):  # it moved
            router.call("llm", protocol="http").next_attempt(router.clock())
        registry.set({"llm": []})
        with pytest.raises(NoEndpointAvailable):
            router.call("llm", protocol="http").next_attempt(router.clock())
        registry.set({"llm": [*GRPC, *HTTP]})
        assert router.pool("llm", "grpc") is second
        assert ids(router, "http") == {"h0", "h1", "h2"}


def test_settings_of_the_pool_hold_for_both_parts() -> None:
    spec = PoolSpec("llm", (*HTTP, *GRPC), PoolConfig(attempts=7))
    with Router(FakeRegistry(Fleet({"llm": spec}))) as router:
        assert [router.pool("llm", protocol).rules.retry.attempts for protocol in ("http", "grpc")] == [7, 7]


class Plain(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def both() -> Iterator[list[Endpoint]]:
    """A real HTTP server and a real gRPC server."""
    plain = ThreadingHTTPServer(("127.0.0.1", 0), Plain)
    threading.Thread(target=plain.serve_forever, daemon=True).start()
    server = grpc.server(ThreadPoolExecutor(2))
    echo = grpc.unary_unary_rpc_method_handler(lambda request, _: request)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Service", {"Echo": echo})])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield [
        Endpoint("http", f"http://127.0.0.1:{plain.server_port}/v1"),
        Endpoint("grpc", f"grpc://127.0.0.1:{port}"),
    ]
    server.stop(0).wait()
    plain.shutdown()
    plain.server_close()


def test_no_call_meets_an_endpoint_that_does_not_understand_it(both: list[Endpoint]) -> None:
    """Each once failed for its share of the calls, with a ConfigError."""
    with Router(FakeRegistry({"llm": both}), connect_timeout="20s", watchdog=False) as router:
        with gpuroute.httpx2.Client(router, timeout=60) as client:
            assert {client.get("http://llm/models").extensions["gpuroute"]["endpoint"] for _ in range(20)} == {"http"}
        with gpuroute.grpc.channel(router, "llm") as channel:
            say = channel.unary_unary("/test.Service/Echo")
            assert [say(b"%d" % n, timeout=60) for n in range(20)] == [b"%d" % n for n in range(20)]


def test_http_endpoints_are_called_directly_whatever_the_environment_says(
    both: list[Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with (
        Router(FakeRegistry({"llm": both[:1]}), trust_env=True, connect_timeout="20s", watchdog=False) as router,
        gpuroute.httpx2.Client(router, timeout=60) as client,
    ):
        assert client.get("http://llm/models").text == "ok"


def test_looking_while_endpoints_change_their_protocol_never_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry's thread may turn an HTTP pool into a gRPC one in the middle of a snapshot."""
    registry, router = make(*HTTP)
    router.start()
    described = pools.describe_pool
    flapped: list[object] = []

    def slow(pool: Pool, now: float) -> PoolView:
        if not flapped:
            flapped.append(pool)
            registry.set({"llm": GRPC, "other": HTTP})
        return described(pool, now)

    monkeypatch.setattr(pools, "describe_pool", slow)
    registry.set({"llm": HTTP, "other": GRPC})
    assert set(router.snapshot().pools) == {"llm", "other"}
    assert flapped
    router.close()


@pytest.mark.parametrize("away", [HTTP, GRPC, []])
def test_endpoints_whose_protocol_was_gone_come_back_with_what_was_known_of_them(away: list[Endpoint]) -> None:
    registry, router = make(*HTTP, *GRPC)
    held = [router.call("llm", protocol=protocol) for protocol in ("http", "grpc")]
    attempts = [call.next_attempt(router.clock()) for call in held]
    registry.set({"llm": away})
    registry.set({"llm": [*HTTP, *GRPC]})
    for protocol, attempt in zip(("http", "grpc"), attempts, strict=True):
        state = router.pool("llm", protocol).snapshot.by_id[attempt.endpoint.id]
        assert attempt in state.in_flight, "the load of this process is still counted"
    for call in held:
        call.close(router.clock())
    assert all(not pool.shared.in_flight for pool in router.pools())
    router.close()
