"""Cases of public failures: how far a fault reaches, what is charged to whom, and what is never sent at all.

Also both sides of every question on which people want opposite things, as docs/resilience.md answers it.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from email.utils import formatdate
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx2 as library
import pytest
from fault_world import PATIENCE_S, TEXT, ask, vllm
from http_caller import endpoint, router_for
from http_stub import Exchange, Stage, ok, status
from hypothesis import given
from hypothesis import strategies as st
from ports import own_port

from gpuroute import Endpoint, NoEndpointAvailable, Router, UnknownPool, httpx2
from gpuroute.core.breaker import BreakerRules
from gpuroute.core.call import Call
from gpuroute.core.candidates import Ask
from gpuroute.core.endpoint import Capacity, State
from gpuroute.core.fleet import PoolSpec
from gpuroute.core.outcome import Outcome
from gpuroute.core.pickers import queue_depth
from gpuroute.core.pool import Pool, PoolRules
from gpuroute.core.report import MAX_AGE_S, Report
from gpuroute.core.state import EJECTION, PAUSE
from gpuroute.testing import FakeRegistry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gpuroute.testing import GpuServer

    Gpus = Callable[..., list[GpuServer]]

ANY = "http://gpuroute/v1/completions"
GOOD = {"choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]}


@pytest.fixture
def stubs() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


def signals_of(router: Router, pool: str) -> dict[str, int]:
    return dict(router.snapshot().pools[pool].signals)


# ---------------------------------------------------------------------------------------- B7: model or host


def two_models(*hosts: Any) -> Router:
    """Each host serves models x and y: the same URL in the pool of either."""
    pools = {
        model: PoolSpec(model, tuple(endpoint(host, id=f"{host.name}-{model}", model=model) for host in hosts))
        for model in ("x", "y")
    }
    router = Router(
        FakeRegistry(pools), policy="round_robin", random=lambda: 0.0, retry_floor="1000/s", breaker_open="60s"
    )
    router.ready()
    return router


async def fails_on_x(exchange: Exchange) -> None:
    if json.loads(exchange.came.body)["model"] == "x":
        exchange.reply(500, b"CUDA error")
    else:
        exchange.reply(200, GOOD)


def test_b7_a_model_that_fails_does_not_take_its_host_from_other_models(stubs: Stage) -> None:
    one, other = stubs("one", "other", behave=fails_on_x)
    with two_models(one, other) as router, httpx2.Client(router, timeout=PATIENCE_S) as client:
        for _ in range(30):
            assert client.post(ANY, json=ask() | {"model": "x"}).status_code == 500
            assert client.post(ANY, json=ask() | {"model": "y"}).status_code == 200
        assert {view.breaker for view in router.snapshot().pools["x"].endpoints} == {"open"}
        well = router.pool("y").snapshot.states
        assert [(state.failed, state.breaker.failures) for state in well] == [(0, 0)] * 2


def test_b7_a_dead_host_is_found_out_for_all_pools_and_costs_no_call(stubs: Stage) -> None:
    """It costs its threshold once, as retries, and each further pool one more (see test_hosts); no caller notices."""
    (well,) = stubs("well", behave=fails_on_nothing)
    dead = SimpleNamespace(name="dead", url=f"http://127.0.0.1:{own_port()}")
    with two_models(dead, well) as router, httpx2.Client(router, timeout=PATIENCE_S) as client:
        for _ in range(40):
            for model in ("x", "y"):
                assert client.post(ANY, json=ask() | {"model": model}).status_code == 200
        states = [router.pool(model).snapshot.by_id[f"dead-{model}"] for model in ("x", "y")]
        assert [state.limit for state in states] == [0, 0]
        assert sum(state.failed for state in states) <= 6


async def fails_on_nothing(exchange: Exchange) -> None:
    exchange.reply(200, GOOD)


def test_b7_names_that_callers_invent_leave_no_state(stubs: Stage) -> None:
    (host,) = stubs("host", behave=fails_on_nothing)
    with two_models(host) as router, httpx2.Client(router, timeout=PATIENCE_S) as client:
        client.post(ANY, json=ask() | {"model": "y"})
        before = router.snapshot().as_dict()["pools"].keys()
        for number in range(2_000):
            with pytest.raises(UnknownPool):
                client.post(ANY, json=ask() | {"model": f"random-{number}"})
        assert router.snapshot().as_dict()["pools"].keys() == before
        assert len(host.came) == 1
        assert sum(pool.shared.signals.calls for pool in router.pools()) == 1


# ---------------------------------------------------------------------------------------- H8: connections that end


def test_h8_servers_that_end_connections_after_so_many_requests_cost_no_call(gpus: Gpus) -> None:
    """Over HTTP/1.1, which is what endpoints are spoken to in; for gRPC see case G4."""
    servers = gpus(2, keepalive_requests=3, time_scale=0.0)
    router = router_for(vllm(servers), "llama")
    limits = library.Limits(max_connections=2)

    async def scenario() -> list[int]:
        async with httpx2.AsyncClient(router, limits=limits, timeout=60.0) as client:

            async def caller() -> list[int]:
                return [(await client.post(TEXT, json=ask(1, stream=False))).status_code for _ in range(6)]

            return [code for codes in await asyncio.gather(*(caller() for _ in range(10))) for code in codes]

    with router:
        assert asyncio.run(scenario()) == [200] * 60
        states = router.pool("llama").snapshot.states
        assert [(state.failed, state.breaker.failures) for state in states] == [(0, 0)] * 2
        assert sum(state.served for state in states) == 60
        connections = {request.connection for server in servers for request in server.requests}
        assert len(connections) >= 60 / 3, "at most four at a time: they did end"


# ---------------------------------------------------------------------------------------- X5: one hangs


def test_x5_a_host_that_never_answers_does_not_stop_the_others(stubs: Stage) -> None:
    silent, one, other = stubs("silent", "one", "other")
    given_up = asyncio.Event()

    async def hang(exchange: Exchange) -> None:
        await given_up.wait()
        exchange.hang_up()

    silent.behave = hang
    router = router_for([silent, one, other], "llama", watchdog=False)
    held: list[str] = []
    limits = library.Limits(max_connections=20)  # per endpoint: what hangs at one takes nothing from the others

    async def scenario() -> None:
        async with httpx2.AsyncClient(router, limits=limits, timeout=PATIENCE_S) as client:

            async def caller() -> None:
                for _ in range(4):
                    response = await client.post("http://llama/v1/x")
                    assert response.status_code == 200
                    if len(response.extensions["gpuroute"]["attempts"]) > 1:
                        held.append(response.extensions["gpuroute"]["endpoint"])

            first = [asyncio.create_task(caller()) for _ in range(100)]
            while len(one.came) + len(other.came) < 100:  # while silent holds some, the others serve on
                await asyncio.sleep(0.005)
            assert silent.came, "it holds some"
            assert not any(state.failed for state in router.pool("llama").snapshot.states)
            silent.loop.call_soon_threadsafe(given_up.set)  # as their timeouts would
            await asyncio.gather(*first)

    with router:
        asyncio.run(asyncio.wait_for(scenario(), 100))
        assert held, "some were at the silent one, and went elsewhere"
        signals = signals_of(router, "llama")
        assert signals["ejections"] + signals["breaker_opened"] >= 1, "it was taken out"


# ---------------------------------------------------------------------------------------- X6: registered, not ready


def test_x6_only_ready_ones_get_calls_and_loading_is_no_failure(gpus: Gpus, eventually: Callable[..., None]) -> None:
    well, loading, warming, draining = (gpus(1, time_scale=0.0, **how)[0] for how in ({}, {"startup_s": 1e9}, {}, {}))
    records = vllm([well, loading])
    records += [
        Endpoint("warming", warming.url, state=State.WARMING),
        Endpoint("draining", draining.url, state=State.DRAINING),
    ]
    with router_for(records, "llama") as router, httpx2.Client(router, timeout=PATIENCE_S) as client:

        def served() -> bool:
            assert client.post(TEXT, json=ask(1)).status_code == 200
            return bool(loading.state()["finished"])

        for _ in range(3):
            assert not served(), "it says 503 while it loads"
        assert loading.state()["received"]
        loading._host.app._ready_at = 0.0
        eventually(served, "the loading one serves once it can")
        state = router.pool("llama").snapshot.by_id["gpu-1"]
        assert (state.breaker.failures, EJECTION in state.caps) == (0, False)
        assert signals_of(router, "llama")["breaker_opened"] == 0
        assert (warming.state()["received"], draining.state()["received"]) == (0, 0)
        router.registry.set({"llama": [*records[:2], Endpoint("warming", warming.url)]})
        eventually(lambda: served() and warming.state()["received"], "ready now, so it is called")


# ---------------------------------------------------------------------------------------- T1: a limit is what it says


@pytest.mark.parametrize("record", [2, 10, 100, 0])
@pytest.mark.parametrize("setting", [2, 10, 100, None])
def test_t1_overlapping_limits_pass_exactly_the_smallest(record: int, setting: int | None) -> None:
    """The library's own limit is that of calls in flight, stated by the record, the pool or the process."""
    limits = [limit for limit in (record, setting) if limit]
    one = Endpoint("a", "http://a:1", capacity=Capacity(max_in_flight=record))
    pool = Pool(PoolSpec("p", (one,)), PoolRules(policy="p2c", max_in_flight=setting), random=lambda: 0.0)
    for now in (0.0, 60.0, 120.0):  # and again, when all have left
        calls = [Call(pool, now) for _ in range(150)]
        passed = 0
        for call in calls:
            try:
                call.next_attempt(now)
                passed += 1
            except NoEndpointAvailable:
                pass
        assert passed == min([*limits, 150])
        for call in calls:
            call.close(now + 1)


# ---------------------------------------------------------------------------------------- T3: what is charged


def failing(pool: Pool, now: float, *outcomes: Outcome) -> Call:
    """A call whose attempts end so, as long as there is another one."""
    call = Call(pool, now)
    for outcome in outcomes:
        attempt = call.next_attempt(now)
        attempt.sent(now)
        if not call.finish(attempt, outcome, now, answered=True, reason=outcome.label):
            break
    return call


def pool_of(size: int = 3, **rules: Any) -> Pool:
    fleet = tuple(Endpoint(f"gpu-{n}", f"http://gpu-{n}") for n in range(size))
    rules = {"policy": "p2c", "breaker": BreakerRules(failures=0), "budget_floor": 0.0, **rules}
    return Pool(PoolSpec("p", fleet), PoolRules(**rules), random=random.Random(1).random)


@given(st.lists(st.sampled_from(list(Outcome)), max_size=60))
def test_t3_the_ledger_is_the_sum_of_logical_calls(ends: list[Outcome]) -> None:
    pool = pool_of(budget_floor=1000.0)
    calls = [failing(pool, 100.0 * number, Outcome.FAILED, end) for number, end in enumerate(ends)]  # pauses are over
    signals = pool.shared.signals
    assert signals.calls == len(ends), "a call counts once, however often it is tried"
    assert signals.attempts == sum(len(call.history) for call in calls) == signals.calls + signals.retries


@pytest.mark.parametrize(("ratio", "granted"), [(0.2, 20), (1.0, 100)])
def test_t3_failed_work_is_not_refunded_and_the_other_side_is_a_larger_budget(ratio: float, granted: int) -> None:
    pool = pool_of(budget_ratio=ratio)
    for _ in range(100):
        failing(pool, 1.0, Outcome.FAILED, Outcome.FAILED)  # a retry that fails too is not given back
    assert pool.shared.signals.retries == pytest.approx(granted, abs=1)


def test_t3_callers_mistakes_and_cancelled_calls_are_charged_nothing() -> None:
    pool = pool_of(budget_ratio=0.2)
    for _ in range(1_000):
        failing(pool, 1.0, Outcome.REJECTED)
        failing(pool, 1.0, Outcome.CANCELLED)
    assert pool.shared.signals.retries == 0
    assert all(not state.failed for state in pool.snapshot.states)


# ---------------------------------------------------------------------------------------- T4: clocks that step


@pytest.mark.parametrize("step_s", [-3_600, 3_600])
def test_t4_a_wall_clock_that_is_wrong_by_an_hour_moves_no_pause_beyond_a_minute(stubs: Stage, step_s: int) -> None:
    """A date in `Retry-After` is the only thing that the wall clock decides; here theirs differs from ours."""
    one, other = stubs("one", "other")
    date = formatdate(time.time() + step_s + 30, usegmt=True)
    one.behave = status(429, retry_after=date)
    with router_for([one, other], "llama") as router, httpx2.Client(router, timeout=PATIENCE_S) as client:
        for _ in range(4):
            assert client.post("http://llama/v1/x").status_code == 200
        until = router.pool("llama").snapshot.by_id["one"].until.get(PAUSE, 0.0) - router.clock()
        assert until <= 60.0
        assert (until > 0) == (step_s > 0)


# ---------------------------------------------------------------------------------------- T5: waiting


def test_t5_nothing_is_sent_whose_time_is_over(stubs: Stage, eventually: Callable[..., None]) -> None:
    """One connection, held by a slow call; those that wait for it give up at their deadline, and are never sent."""
    (host,) = stubs("host")
    release = asyncio.Event()

    async def held(exchange: Exchange) -> None:
        await release.wait()
        await ok(exchange)

    host.behave = held
    router = router_for([host], "llama")
    limits = library.Limits(max_connections=1)
    with router, httpx2.Client(router, limits=limits, timeout=PATIENCE_S) as client:
        slow = threading.Thread(target=client.post, args=("http://llama/v1/slow",))
        slow.start()
        eventually(lambda: len(host.came) == 1, "the slow one is there")
        for _ in range(5):
            with pytest.raises(library.TimeoutException):
                client.post("http://llama/v1/late", extensions={"gpuroute": {"timeout": 0.1}})
        host.loop.call_soon_threadsafe(release.set)
        slow.join(PATIENCE_S)
        assert client.post("http://llama/v1/next").status_code == 200
    assert [came.target for came in host.came] == [b"/v1/slow", b"/v1/next"]


def test_t5_who_waits_for_a_connection_gets_one_in_his_turn(stubs: Stage) -> None:
    """A hundred callers of one tenant do not shut out the single call of another: it waits for those before it."""
    (host,) = stubs("host")
    router = router_for([host], "llama")
    ended: list[str] = []

    async def scenario() -> None:
        limits = library.Limits(max_connections=2)
        async with httpx2.AsyncClient(router, limits=limits, timeout=PATIENCE_S) as client:

            async def many() -> None:
                for _ in range(5):
                    await client.post("http://llama/v1/many")
                    ended.append("many")

            crowd = [asyncio.create_task(many()) for _ in range(50)]
            while len(ended) < 10:
                await asyncio.sleep(0)
            before = len(ended)
            await client.post("http://llama/v1/single")
            ended.append("single")
            assert len(ended) - before <= 3 * 50
            await asyncio.gather(*crowd)

    with router:
        asyncio.run(scenario())


# ---------------------------------------------------------------------------------------- forks


def test_l7_an_old_report_is_neither_full_nor_idle_but_absent() -> None:
    ask_now = Ask()
    pool = pool_of(1)
    (state,) = pool.snapshot.states
    for said in (0, 500):  # it looked idle, it looked full
        state.report = Report(at=100.0, running=said)
        for age, counted in ((0.0, said), (MAX_AGE_S + 0.1, 0)):
            ask_now.now = 100.0 + age
            assert queue_depth(state, ask_now) == counted


def test_forks_that_a_setting_decides_have_both_sides() -> None:
    """Each row of the table in docs/resilience.md that names a setting: the default, and the other side."""
    from gpuroute.config import Settings

    sides = {
        "empty_grace": (10.0, "0s"),
        "eject_share": (0.34, "0%"),
        "panic": ("fail_open", "fail_fast"),
        "retry_budget": (0.2, "100%"),
    }
    for name, (default, other) in sides.items():
        assert getattr(Settings.from_env({}), name) == default
        assert getattr(Settings.from_env({f"GPUROUTE_{name.upper()}": other}), name) != default


def test_l8_when_all_weights_are_zero_nobody_is_called_and_small_ones_are_the_other_side(stubs: Stage) -> None:
    one, other = stubs("one", "other", behave=status(200))
    with router_for([endpoint(one, weight=0), endpoint(other, weight=0)], "llama") as router:
        with httpx2.Client(router, timeout=PATIENCE_S) as client, pytest.raises(NoEndpointAvailable):
            client.post("http://llama/v1/x")
        router.registry.set({"llama": [endpoint(one, weight=1e-6), endpoint(other, weight=1e-6)]})
        with httpx2.Client(router, timeout=PATIENCE_S) as client:
            for _ in range(4):
                assert client.post("http://llama/v1/x").status_code == 200
    assert (len(one.came), len(other.came)) == (2, 2)
