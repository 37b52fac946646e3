"""Active health checks: opt in, hysteresis, and live traffic has the last word."""

from __future__ import annotations

import contextlib
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import trustme
from fault_world import TEXT, ask, vllm
from http_caller import router_for
from http_stub import Stage
from hypothesis import given
from hypothesis import strategies as st

import gpuroute.grpc
from gpuroute import ConfigError, Endpoint, Router
from gpuroute.core.fleet import PoolSpec
from gpuroute.core.health import Checked, HealthRules
from gpuroute.core.outcome import Outcome
from gpuroute.core.pool import Pool, PoolRules
from gpuroute.core.state import EJECTION
from gpuroute.core.subset import Seat
from gpuroute.httpx2 import LIBRARY
from gpuroute.testing import FakeRegistry
from gpuroute.transports import health
from gpuroute.transports.grpc_peers import Dialer, channel_options
from gpuroute.transports.pools import Way

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from http_caller import Caller

    from gpuroute.testing import GpuServer

RULES = HealthRules()
WAY = Way(LIBRARY)


def pool_of(count: int) -> Pool:
    spec = PoolSpec("p", tuple(Endpoint(f"gpu-{n}", f"http://gpu-{n}") for n in range(count)))
    return Pool(spec, PoolRules(), random=random.Random(1).random)


def test_three_failures_take_out_and_two_successes_bring_back() -> None:
    pool = pool_of(3)
    state = pool.snapshot.states[0]
    checked = Checked(RULES, 0.0, lambda: 0.5)
    now = 0.0
    for well, out in [(False, 0), (False, 0), (True, 0), (False, 0), (False, 0), (False, 1), (True, 1), (True, 0)]:
        now += 5
        checked.ended(pool, state, now, well=well)
        assert (EJECTION in state.caps) == out
    assert state.ramp_at is not None  # back, but on the ramp


def test_a_check_never_outweighs_live_traffic() -> None:
    pool = pool_of(3)
    state = pool.snapshot.states[0]
    checked = Checked(RULES, 0.0, lambda: 0.5)
    for now in range(10):
        checked.ended(pool, state, float(now), well=False)
        attempt = state.acquire(float(now))
        assert attempt is not None
        attempt.finish(Outcome.SUCCESS, now + 0.5)
    assert EJECTION not in state.caps


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=80))
def test_whatever_checks_say_the_cap_holds(answers: list[tuple[int, bool]]) -> None:
    pool = pool_of(6)
    checks = [Checked(RULES, 0.0, lambda: 0.5) for _ in range(6)]
    for step, (index, well) in enumerate(answers):
        checks[index].ended(pool, pool.snapshot.states[index], float(step), well=well)
        assert sum(EJECTION in state.caps for state in pool.snapshot.states) <= 2


def test_checks_are_jittered() -> None:
    checked = Checked(RULES, 0.0, random.Random(1).random)
    moments = []
    for _ in range(50):
        checked.begin(0.0, random.Random(len(moments)).random)
        moments.append(checked.due_at)
    assert 4 <= min(moments) < max(moments) - 1 < 5


def test_contradictions_are_refused() -> None:
    for fields in ({"interval_s": 0}, {"jitter": 1.0}, {"fall": 0}):
        with pytest.raises(ConfigError):
            HealthRules(**fields)


def test_an_endpoint_that_says_503_is_taken_out_without_any_call_failing(
    gpus: Callable[..., list[GpuServer]], call: Callable[..., Caller], eventually: Callable[..., None]
) -> None:
    servers = gpus(3)
    client = call("httpx2-sync", vllm(servers), health_checks=True, health_interval="50ms")
    servers[0].health(503)
    client.post(TEXT, json=ask())  # starts the checker: nothing runs before the first call
    states = client.router.pool("llama").snapshot.states
    eventually(lambda: EJECTION in states[0].caps, "gpu-0 is out")
    before = servers[0].state()["received"]
    for _ in range(6):
        assert client.post(TEXT, json=ask()).status_code == 200
    assert servers[0].state()["received"] == before
    servers[0].resume()
    eventually(lambda: EJECTION not in states[0].caps, "gpu-0 is back")
    assert EJECTION not in states[1].caps


def test_off_by_default(gpus: Callable[..., list[GpuServer]], call: Callable[..., Caller]) -> None:
    client = call("httpx2-sync", vllm(gpus(1)))
    client.post(TEXT, json=ask())
    assert client.router not in health.CHECKER._routers


class Seating(FakeRegistry):
    """A registry that tells the router which of two clients it is, when the test says so."""

    def take_seat(self, on_seat: Callable[[Seat], None], *place: Any, numbered: bool) -> Any:
        self.sit = on_seat
        return SimpleNamespace(error=None, numbered=numbered, close=lambda: None)


@pytest.fixture
def stubs() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


def test_only_endpoints_of_the_clients_own_subset_are_asked(stubs: Stage, eventually: Callable[..., None]) -> None:
    servers = stubs("gpu-0", "gpu-1", "gpu-2")
    registry = Seating({"llama": vllm(servers)})

    def asked() -> list[int]:
        return [len(server.came) for server in servers]

    def alone(number: int) -> bool:
        """Whether this one is asked on and nobody else is; what was under way may hide that at first."""
        before = asked()
        eventually(lambda: asked()[number] >= before[number] + 3, f"gpu-{number} is asked on")
        return [n for n, count in enumerate(asked()) if count > before[n]] == [number]

    with Router(registry, subset=1, health_checks=True, health_interval="30ms") as router:
        router.ready()
        health.CHECKER.watch(router, router.pool("llama"), WAY)
        eventually(lambda: all(asked()), "without an ordinal all are asked")
        registry.sit(Seat(0, 8))
        (mine,) = (int(state.id[-1]) for state in router.pool("llama").snapshot.states)
        eventually(lambda: alone(mine), "only its own endpoint is asked")
        registry.set({"llama": vllm(servers)[:1]})
        eventually(lambda: alone(0), "only the one that is left is asked")


def test_one_thread_checks_for_all_routers_of_a_process(stubs: Stage, eventually: Callable[..., None]) -> None:
    servers = stubs("gpu-0", "gpu-1")
    routers = [router_for([one], "llama", health_checks=True, health_interval="50ms") for one in vllm(servers)]
    for router in routers:
        router.ready()
        health.CHECKER.watch(router, router.pool("llama"), WAY)
        health.CHECKER.watch(router, router.pool("llama"), WAY)
    eventually(lambda: all(server.came for server in servers), "both are asked")

    def threads() -> int:
        return [thread.name for thread in threading.enumerate()].count("gpuroute-health")

    eventually(lambda: threads() == 1, "that of an earlier test has ended, and there are no two of them")
    for router in routers:
        router.close()
    eventually(lambda: threads() == 0, "it ends with them")


class Health(grpc.GenericRpcHandler):
    def __init__(self, answer: bytes | None) -> None:
        self.answer = answer

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if details.method != "/grpc.health.v1.Health/Check" or self.answer is None:
            return None
        return grpc.unary_unary_rpc_method_handler(lambda *_: self.answer)


def dialer(credentials: grpc.ChannelCredentials | None = None) -> Dialer:
    options = channel_options((), connect_timeout=20.0, idle=60.0, trust_env=False)
    return Dialer(grpc.insecure_channel, grpc.secure_channel, options, credentials, None)


@pytest.mark.parametrize(("answer", "well"), [(b"\x08\x01", True), (b"\x08\x02", False), (b"", False), (None, True)])
def test_grpc_servers_are_asked_by_the_standard_protocol(answer: bytes | None, well: bool) -> None:
    server = grpc.server(ThreadPoolExecutor(1), handlers=[Health(answer)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        endpoint = Endpoint("a", f"grpc://127.0.0.1:{port}", protocol="grpc")
        assert health._grpc(endpoint, dialer(), 60.0) is well
    finally:
        server.stop(0)
    assert health._grpc(endpoint, dialer(), 0.5) is False


@contextlib.contextmanager
def serving(authority: trustme.CA, asked: list[str]) -> Iterator[int]:
    """A gRPC server over TLS, and the port it is at; it notes the methods that were called."""

    def handle(details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        asked.append(details.method)
        return grpc.unary_unary_rpc_method_handler(lambda *_: b"\x08\x01")

    identity = authority.issue_cert("127.0.0.1")
    pair = identity.private_key_pem.bytes(), identity.cert_chain_pems[0].bytes()
    server = grpc.server(ThreadPoolExecutor(1), handlers=[SimpleNamespace(service=handle)])
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    server.start()
    try:
        yield port
    finally:
        server.stop(0)


@pytest.mark.parametrize("scheme", ["grpcs", "grpc", "http"])
def test_a_channels_credentials_are_those_of_its_checks(scheme: str, eventually: Callable[..., None]) -> None:
    """They make TLS of every call, whatever the URL says."""
    authority, asked = trustme.CA(), []
    credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    with (
        serving(authority, asked) as port,
        Router(
            f"p={scheme}://127.0.0.1:{port}", health_checks=True, health_interval="50ms", connect_timeout="20s"
        ) as router,
        gpuroute.grpc.channel(router, "p", credentials=credentials) as channel,
    ):
        assert channel.unary_unary("/a.B/Call")(b"", timeout=60) == b"\x08\x01"
        eventually(lambda: asked.count("/grpc.health.v1.Health/Check") >= 3, "it is asked")


def test_many_silent_servers_keep_no_check_waiting(
    monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None]
) -> None:
    asked, over = [], threading.Event()

    def ask_silence(*_: Any) -> bool:
        asked.append(_)
        return not over.wait(60)

    monkeypatch.setattr(health, "_grpc", ask_silence)
    silent = ",".join(f"grpc://127.0.0.1:{port}" for port in range(1, 41))
    with Router(f"p={silent}", health_checks=True, health_interval="50ms") as router:
        router.ready()
        health.CHECKER.watch(router, router.pool("p", "grpc"), dialer())
        try:
            eventually(lambda: len(asked) >= 40, "all are asked beside each other")
        finally:
            over.set()


def test_checks_begin_once_there_are_threads_again(stubs: Stage, eventually: Callable[..., None]) -> None:
    (server,) = stubs("gpu-0")
    checker = health.Checker()
    with router_for(vllm([server]), "llama", health_checks=True, health_interval="50ms") as router:
        router.ready()
        pool = router.pool("llama")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            checker.watch(router, pool, WAY)
        checker.watch(router, pool, WAY)
        eventually(lambda: server.came, "it is asked")


def no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_the_request_of_a_check_knows_prefix_engine_and_credentials() -> None:
    endpoint = Endpoint("a", "http://h:1/gw/v1", engine="triton", model="resnet", headers={"authorization": "Bearer s"})
    assert health._request(endpoint, "/gw/v1", "h:1").split(b"\r\n")[:3] == [
        b"GET /gw/v2/models/resnet/ready HTTP/1.1",
        b"Host: h:1",
        b"authorization: Bearer s",
    ]
