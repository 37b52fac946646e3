"""`tritonclient.http` and its asyncio twin over a pool; the stand-in server speaks KServe v2 over real sockets."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from world import drained, router_of, soon

import gpuroute
import gpuroute.triton
from gpuroute import observe
from gpuroute.core.endpoint import Endpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.real_time

np = pytest.importorskip("numpy", reason="tritonclient needs numpy")
client = pytest.importorskip("tritonclient.http", reason="the package tritonclient[http] is not installed")
aio_client = pytest.importorskip("tritonclient.http.aio")


class V2(ThreadingHTTPServer):
    """Answers `infer` with its own name. `fail_next`: statuses to give first; `hold`: answers wait for it."""

    daemon_threads = True

    def __init__(self, name: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.name = name
        self.fail_next: list[tuple[int, dict[str, str]]] = []
        self.seen: list[tuple[str, dict[str, str]]] = []
        self.hold = threading.Event()
        self.hold.set()
        self.at_once, self.most_at_once, self.counting = 0, 0, threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.hold.set()
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: V2

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length", 0))
        self.rfile.read(length)
        server = self.server
        with server.counting:
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
        server.hold.wait(60)
        with server.counting:
            server.at_once -= 1
        output = {"name": "server", "datatype": "BYTES", "shape": [1], "data": [server.name]}
        self._answer(json.dumps({"model_name": "echo", "outputs": [output]}).encode())

    def _answer(self, body: bytes) -> None:
        server = self.server
        server.seen.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
        status, headers = server.fail_next.pop(0) if server.fail_next else (200, {})
        if status != 200:
            body = b'{"error": "told to fail"}'
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def running(count: int) -> Iterator[list[V2]]:
    servers = [V2(f"s{n}") for n in range(count)]
    try:
        yield servers
    finally:
        for server in servers:
            server.stop()


@pytest.fixture
def two() -> Iterator[list[V2]]:
    with running(2) as servers:
        yield servers


def text(value: bytes = b"x", *, binary: bool = True) -> list[Any]:
    tensor = client.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([value], dtype=object), binary_data=binary)
    return [tensor]


def answered_by(result: Any) -> str:
    name = result.as_numpy("server")[0]
    return name.decode() if isinstance(name, bytes) else str(name)


def router_to(servers: list[V2], **settings: Any) -> gpuroute.Router:
    return router_of(*(server.url for server in servers), **settings)


class Blocking:
    """Requests of a wrapped `tritonclient.http` client, one after the other."""

    def infer(self, router: gpuroute.Router, count: int, *, value: bytes = b"x", **how: Any) -> list[str]:
        routed = gpuroute.wrap(client.InferenceServerClient("127.0.0.1:1"), router, pool="p")
        try:
            inputs = text(value, binary=not how.pop("json", False))
            return [answered_by(routed.infer("echo", inputs, **how)) for _ in range(count)]
        finally:
            routed.close()


class Asyncio:
    """The same of `tritonclient.http.aio`."""

    def infer(self, router: gpuroute.Router, count: int, *, value: bytes = b"x", **how: Any) -> list[str]:
        async def run() -> list[str]:
            async with aio_client.InferenceServerClient("127.0.0.1:1") as routed:
                gpuroute.wrap(routed, router, pool="p")
                inputs = text(value, binary=not how.pop("json", False))
                return [answered_by(await routed.infer("echo", inputs, **how)) for _ in range(count)]

        return asyncio.run(run())


@pytest.fixture(params=[Blocking, Asyncio])
def manner(request: pytest.FixtureRequest) -> Any:
    return request.param()


def test_requests_go_to_every_server(manner: Any, two: list[V2]) -> None:
    router = router_to(two, policy="round_robin")
    assert sorted(manner.infer(router, 4)) == ["s0", "s0", "s1", "s1"]
    assert drained(router)
    assert sum(view.served for view in router.snapshot().pools["p"].endpoints) == 4


def test_their_router_is_in_the_gauges_and_its_endpoints_are_checked(
    manner: Any, two: list[V2], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observe, "_routers", set())
    records = [Endpoint(server.name, server.url, engine="triton") for server in two]
    with router_of(*records, health_checks=True, health_interval="50ms") as router:
        manner.infer(router, 1)
        assert observe.watched() == [router]
        for server in two:
            assert soon(lambda server=server: "/v2/health/live" in [path for path, _ in server.seen])


@pytest.mark.parametrize("switch", [{"disabled": True}, {"rollout": "0%"}])
def test_the_kill_switch_and_the_rollout_hold(manner: Any, two: list[V2], switch: dict[str, Any]) -> None:
    router = router_to(two[:1], fallback_url=two[1].url, **switch)
    assert manner.infer(router, 2, headers={"x-gpuroute-key": "k"}) == ["s1", "s1"]
    assert "x-gpuroute-key" not in two[1].seen[0][1]


def test_a_dead_endpoint_costs_only_an_attempt(manner: Any, two: list[V2]) -> None:
    router = router_of("http://127.0.0.1:1", two[0].url, policy="round_robin")
    assert manner.infer(router, 4) == ["s0"] * 4
    assert router.snapshot().pools["p"].signals["retries"] >= 1


@pytest.mark.parametrize(("status", "headers"), [(503, {}), (429, {"retry-after": "1"}), (500, {})])
def test_a_server_that_cannot_is_left_for_one_that_can(
    manner: Any, two: list[V2], status: int, headers: dict[str, str]
) -> None:
    router = router_to(two, policy="round_robin")
    two[0].fail_next = two[1].fail_next = [(status, headers)]  # one list: whoever is first fails, once
    (answer,) = manner.infer(router, 1)
    assert [len(server.seen) for server in two] == [1, 1]
    assert two[int(answer[1])].seen[0][1]["x-gpuroute-attempt"] == "2"
    assert router.snapshot().pools["p"].signals["retries"] == 1


def test_a_load_report_of_odd_characters_ends_no_call(manner: Any, two: list[V2]) -> None:
    odd = "JSON {\u20ac}".encode().decode("latin-1")
    two[0].fail_next = two[1].fail_next = [(200, {"endpoint-load-metrics": odd})] * 2
    assert len(manner.infer(router_to(two), 2)) == 2


def test_a_rejection_is_the_callers(manner: Any, two: list[V2]) -> None:
    two[0].fail_next = [(400, {})]
    router = router_to(two[:1], breaker_failures=1)
    with pytest.raises(client.InferenceServerException, match="told to fail"):
        manner.infer(router, 1)
    assert manner.infer(router, 1) == ["s0"]
    assert router.snapshot().pools["p"].signals["retries"] == 0


def test_the_last_error_is_the_librarys_own_and_tells_of_all_attempts(manner: Any) -> None:
    router = router_of("http://127.0.0.1:1", "http://127.0.0.1:2")
    with pytest.raises(OSError, match=r"127\.0\.0\.1|refused") as error:
        manner.infer(router, 1)
    assert any(re.match(r"gpuroute: \d attempts: ", note) for note in error.value.__notes__)


def test_nobody_to_call_is_our_own_error(manner: Any, two: list[V2]) -> None:
    router = router_of(Endpoint("a", two[0].url, state="draining"))
    with pytest.raises(gpuroute.NoEndpointAvailable):
        manner.infer(router, 1)


def test_a_timeout_spans_all_attempts(manner: Any, two: list[V2]) -> None:
    for server in two:
        server.hold.clear()
    router = router_to(two)
    with pytest.raises(gpuroute.DeadlineExceeded):
        manner.infer(router, 1, headers={"x-gpuroute-timeout": "300ms"})
    assert drained(router)
    assert "x-gpuroute-timeout" not in (two[0].seen + two[1].seen + [("", {})])[0][1]


def test_an_endpoints_path_and_headers_are_its_own(manner: Any, two: list[V2]) -> None:
    router = router_of(Endpoint("a", two[0].url + "/triton", headers={"Authorization": "Bearer its-own"}))
    assert manner.infer(router, 1, headers={"authorization": "mine", "x-other": "kept"}) == ["s0"]
    path, headers = two[0].seen[0]
    assert path == "/triton/v2/models/echo/infer"
    assert headers["authorization"] == "Bearer its-own"
    assert headers["x-other"] == "kept"


def test_a_key_and_an_equal_prompt_meet_at_one_server(manner: Any, two: list[V2]) -> None:
    router = router_to(two, policy="prefix")
    keyed = [manner.infer(router, 3, headers={"x-gpuroute-key": f"session-{n}"}) for n in range(8)]
    assert all(len(set(servers)) == 1 for servers in keyed)
    prompts = [manner.infer(router, 2, value=b"%d " % n * 900, json=True) for n in range(48)]
    assert all(len(set(servers)) == 1 for servers in prompts)
    assert len(set.union(*map(set, prompts))) == 2  # by chance 1 less than once in 10^11: homes follow from ports


def test_greenlets_still_run_side_by_side(two: list[V2]) -> None:
    """Nothing is monkey patched, and yet `async_infer` does not wait for the one before."""
    for server in two:
        server.hold.clear()
    router = router_to(two, policy="round_robin")
    routed = gpuroute.wrap(client.InferenceServerClient("127.0.0.1:1", concurrency=4), router, pool="p")
    requests = [routed.async_infer("echo", text()) for _ in range(4)]
    release = threading.Thread(target=_release_when_full, args=(two,))
    release.start()
    answers = sorted(answered_by(request.get_result()) for request in requests)
    release.join()
    routed.close()
    assert answers == ["s0", "s0", "s1", "s1"]
    assert [server.most_at_once for server in two] == [2, 2]


def _release_when_full(servers: list[V2]) -> None:
    from world import soon

    soon(lambda: sum(server.at_once for server in servers) == 4)
    for server in servers:
        server.hold.set()


def test_unwrapped_it_is_what_it_was(two: list[V2]) -> None:
    plain = client.InferenceServerClient(two[1].url.removeprefix("http://"))
    original = plain._client_stub
    gpuroute.triton.attach(plain, router_to(two[:1]), "p")
    gpuroute.triton.attach(plain, router_to(two[:1]), "p")
    assert plain.is_server_ready()
    assert answered_by(plain.infer("echo", text())) == "s0"
    gpuroute.unwrap(plain)
    assert plain._client_stub is original
    assert answered_by(plain.infer("echo", text())) == "s1"
    gpuroute.triton.detach(plain)
    plain.close()


def test_what_it_cannot_take_is_refused(two: list[V2]) -> None:
    plain = client.InferenceServerClient("127.0.0.1:1")
    with pytest.raises(gpuroute.ConfigError, match="pool=NAME"):
        gpuroute.wrap(plain, router_to(two))
    with pytest.raises(gpuroute.ConfigError, match="takes no replay"):
        gpuroute.triton.attach(plain, router_to(two), "p", replay="failed")
    plain.close()
