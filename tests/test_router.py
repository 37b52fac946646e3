"""The Router: a fleet in, calls out; any thread, any loop, after a fork, and honest when there is nothing to route to."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
import threading
from collections import Counter
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from gpuroute import Endpoint, Outcome, Router, Settings
from gpuroute.core.call import Call
from gpuroute.core.candidates import Ask
from gpuroute.core.endpoint import State
from gpuroute.core.fleet import Fleet, PoolConfig, PoolSpec
from gpuroute.core.subset import Seat, subset
from gpuroute.errors import (
    ConfigError,
    DeadlineExceeded,
    NoEndpointAvailable,
    RegistryUnavailable,
    RouterClosed,
    UnknownPool,
)
from gpuroute.testing import FakeClock, FakeRegistry

if TYPE_CHECKING:
    from collections.abc import Callable


def named(*names: str, **fields: Any) -> list[Endpoint]:
    return [Endpoint(name, f"http://{name}:8000", **fields) for name in names]


def make(fleet: Any = None, **settings: Any) -> Router:
    """A router over a fake registry, with a clock that stands still."""
    registry = (
        fleet
        if isinstance(fleet, FakeRegistry)
        else FakeRegistry({"llm": named("a", "b", "c")} if fleet is None else fleet)
    )
    clock = settings.pop("clock", FakeClock())
    return Router(registry, clock=clock, random=Random(1).random, policy=settings.pop("policy", "p2c"), **settings)


def one_call(router: Router, pool: str = "llm", **options: Any) -> str:
    """A call that succeeds; where it went."""
    call = router.call(pool, **options)
    attempt = call.next_attempt(router.clock())
    call.finish(attempt, Outcome.SUCCESS, router.clock())
    return attempt.endpoint.id


# ---------------------------------------------------------------------------------------------- sources


def test_exactly_one_source() -> None:
    with pytest.raises(ConfigError, match="registry= or endpoints=, not both"):
        Router("http://a", endpoints=["http://b"])
    with pytest.raises(ConfigError, match="no registry: set GPUROUTE_REGISTRY"):
        Router()
    with pytest.raises(ConfigError, match="settings= or policy, not both"):
        Router(endpoints=["http://a"], settings=Settings(), policy="p2c")
    with pytest.raises(ConfigError, match=r"registry= is of type dict.*endpoints="):
        Router({"llama": ["http://a"]})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "source",
    [
        {"registry": "llm=http://a:8000,http://b:8000"},
        {"endpoints": {"llm": ["http://a:8000", "http://b:8000"]}},
        {"registry": FakeRegistry({"llm": named("a", "b")})},
    ],
)
def test_every_source_routes(source: dict[str, Any]) -> None:
    with Router(**source) as router:
        router.ready()
        assert {router.pool("llm").pick().endpoint.url for _ in range(60)} == {"http://a:8000", "http://b:8000"}  # type: ignore[union-attr]


def test_the_environment_is_a_source() -> None:
    with Router.from_env({"GPUROUTE_REGISTRY": "http://a:1,http://b:2", "GPUROUTE_POLICY": "round_robin"}) as router:
        assert Counter(one_call(router, "default") for _ in range(4)).most_common(1)[0][1] == 2


def test_nothing_starts_before_the_first_call() -> None:
    registry = FakeRegistry({"llm": named("a")})
    router = make(registry)
    assert registry.subscribers == 0
    one_call(router)
    assert registry.subscribers == 1
    router.close()
    assert registry.subscribers == 0


# ---------------------------------------------------------------------------------------------- the first view


def test_a_call_before_the_first_view_says_what_is_missing() -> None:
    router = make(FakeRegistry(), ready_timeout=0.01)
    with pytest.raises(RegistryUnavailable, match="no view of the fleet yet from FakeRegistry"):
        router.call("llm")
    with pytest.raises(RegistryUnavailable, match="has not answered"):
        router.ready()
    assert not router.is_ready


def test_the_registrys_own_trouble_is_in_the_error() -> None:
    registry = FakeRegistry()
    registry.fail("etcd-1: connection refused")
    with pytest.raises(RegistryUnavailable, match="etcd-1: connection refused"):
        make(registry, ready_timeout=0.01).ready()


def test_ready_waits_for_the_first_view() -> None:
    registry = FakeRegistry()
    router, waiting = make(registry), threading.Event()
    seen: list[str] = []

    def wait() -> None:
        waiting.set()
        router.ready()
        seen.append(one_call(router))

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait()
    registry.set({"llm": named("a")})
    thread.join(60)
    assert seen == ["a"]


def test_aready_waits_without_blocking_the_loop_and_leaves_no_trace() -> None:
    registry = FakeRegistry()
    router = make(registry)

    async def run() -> list[str]:
        tasks = [asyncio.create_task(router.aready()) for _ in range(5)]
        while len(router._waiting) < 5:
            await asyncio.sleep(0.001)
        tasks[0].cancel()
        await asyncio.sleep(0.001)
        assert len(router._waiting) == 4
        registry.set({"llm": named("a")})
        await asyncio.gather(*tasks[1:])
        await router.aready()
        return [one_call(router)]

    assert asyncio.run(run()) == ["a"]
    assert router._waiting == []


def test_aready_that_times_out_leaves_no_trace() -> None:
    router = make(FakeRegistry(), ready_timeout=0.005)

    async def run() -> None:
        for _ in range(5):
            with pytest.raises(RegistryUnavailable):
                await router.aready()

    asyncio.run(run())
    assert router._waiting == []


def test_a_loop_that_has_ended_is_no_trouble() -> None:
    registry, left_behind = FakeRegistry(), []
    router = make(registry)

    async def wait_and_end() -> None:
        task = asyncio.ensure_future(router.aready())
        while not router._waiting:
            await asyncio.sleep(0.001)
        left_behind.extend(router._waiting)
        task.cancel()

    asyncio.run(wait_and_end())
    router._waiting.extend(left_behind)  # as if the update had taken the list just before the loop ended
    registry.set({"llm": named("a")})
    assert one_call(router) == "a"


def test_a_subscription_that_fails_can_be_tried_again() -> None:
    class Broken(FakeRegistry):
        broken = True

        def subscribe(self, on_change: Callable[[Fleet], None]) -> Any:
            if self.broken:
                raise RegistryUnavailable("no such file")
            return super().subscribe(on_change)

    registry = Broken({"llm": named("a")})
    router = make(registry)
    with pytest.raises(RegistryUnavailable, match="no such file"):
        router.ready()
    registry.broken = False
    assert one_call(router) == "a"


# ---------------------------------------------------------------------------------------------- closing


def test_a_closed_router_refuses_everything_new() -> None:
    router = make()
    call = router.call("llm")
    attempt = call.next_attempt(router.clock())
    router.close()
    router.close()
    for use in (lambda: router.call("llm"), router.ready, router.start, lambda: router.resolve("llm")):
        with pytest.raises(RouterClosed):
            use()
    assert call.finish(attempt, Outcome.SUCCESS, router.clock()) is False  # what runs may end
    assert not attempt.state.in_flight
    assert "closed" in repr(router)


def test_closing_wakes_those_who_wait_for_a_view() -> None:
    router = make(FakeRegistry(), ready_timeout=110.0)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            router.ready()
        except RouterClosed as error:
            caught.append(error)

    async def await_it() -> None:
        task = asyncio.ensure_future(router.aready())
        while not router._waiting:
            await asyncio.sleep(0.001)
        router.close()
        with pytest.raises(RouterClosed):
            await task

    thread = threading.Thread(target=wait)
    thread.start()
    asyncio.run(await_it())
    thread.join(60)
    assert len(caught) == 1


def test_a_router_closed_while_it_subscribes_does_not_leave_a_watch_behind() -> None:
    class Slow(FakeRegistry):
        def subscribe(self, on_change: Callable[[Fleet], None]) -> Any:
            subscription = super().subscribe(on_change)
            router.close()
            return subscription

    registry = Slow({"llm": named("a")})
    router = make(registry)
    with pytest.raises(RouterClosed):
        router.start()
    assert registry.subscribers == 0


def test_context_managers_close() -> None:
    registry = FakeRegistry({"llm": named("a")})
    with make(registry) as router:
        one_call(router)
    assert registry.subscribers == 0

    async def run() -> None:
        async with make(registry) as router:
            one_call(router)
            assert registry.subscribers == 1

    asyncio.run(run())
    assert registry.subscribers == 0


# ---------------------------------------------------------------------------------------------- pools


def test_an_unknown_pool_lists_the_known_ones() -> None:
    with pytest.raises(
        UnknownPool, match=r"pool 'http://llm' is not in the fleet: give its name, not a URL; known pools: llm"
    ):
        make().call("http://llm")
    with pytest.raises(UnknownPool, match="pool 'lm' is not in the fleet; known pools: llm"):
        make().call("lm")


def test_a_pool_that_leaves_the_registry_is_empty_and_comes_back_as_it_was() -> None:
    registry = FakeRegistry({"llm": named("a"), "other": named("x")})
    router = make(registry)
    assert one_call(router) == "a"
    state = router.pool("llm").snapshot.by_id["a"]
    registry.set({"other": named("x")})
    with pytest.raises(NoEndpointAvailable, match="lists no endpoint"):
        router.call("llm").next_attempt(router.clock())
    registry.set({"llm": named("a"), "other": named("x")})
    assert one_call(router) == "a"
    assert router.pool("llm").snapshot.by_id["a"] is state


def test_registry_trouble_keeps_the_last_fleet() -> None:
    registry = FakeRegistry({"llm": named("a")})
    router = make(registry)
    one_call(router)
    registry.fail("watch lost")
    registry.go_stale()
    assert one_call(router) == "a"
    view = router.snapshot()
    assert view.stale
    assert view.registry_error == "watch lost"


@pytest.mark.parametrize("state", [State.DRAINING, State.WARMING])
def test_an_endpoint_that_is_not_in_service_gets_nothing_new(state: State) -> None:
    router = make({"llm": [*named("a"), *named("b", state=state)]})
    assert {one_call(router) for _ in range(50)} == {"a"}


def test_a_pools_settings_in_the_registry_hold_unless_the_user_was_explicit() -> None:
    spec = PoolSpec("llm", tuple(named("a")), PoolConfig(policy="random", timeout=3.0, attempts=7, max_in_flight=2))
    router = Router(FakeRegistry({"llm": spec}), clock=FakeClock(), attempts=2)
    call = router.call("llm")
    assert (call.time_left(router.clock()), call.attempts) == (3.0, 2)
    assert router.pool("llm").rules.policy == "random"
    assert router.pool("llm").snapshot.by_id["a"].limit == 2
    assert router.call("llm", timeout=9.0, attempts=1).attempts == 1


@pytest.mark.parametrize("wrong", [{"timeout": -1.0}, {"timeout": math.nan}, {"attempts": 0}, {"attempts": -3}])
def test_a_call_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="call: need timeout >= 0"):
        make().call("llm", **wrong)


def test_no_time_at_all_is_a_deadline() -> None:
    router = make()
    with pytest.raises(DeadlineExceeded):
        router.call("llm", timeout=0.0).next_attempt(router.clock())


# ---------------------------------------------------------------------------------------------- models


MIXED = {
    "small": named("h1", "h2", model="small"),
    "large": named("h3", "h4", model="lg", adapters=("lora-a", "lora-b")),
    "half": [*named("h5", model="both", adapters=("lora-c",)), *named("h6", model="both")],
    "twin-1": named("h7", model="twin"),
    "twin-2": named("h8", model="twin"),
}


@pytest.mark.parametrize(
    ("model", "pool"),
    [("small", "small"), ("large", "large"), ("lg", "large"), ("lora-a", "large"), ("lora-b", "large"), ("both", "half")],
)
def test_x3_a_model_finds_the_pool_that_serves_it(model: str, pool: str) -> None:
    assert make(MIXED).resolve(model) == pool


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("SMALL", "no pool serves model 'SMALL'; known pools: half, large, small, twin-1, twin-2"),
        (" small ", "no pool serves model ' small '"),
        ("typo", "no pool serves"),
        ("", "no pool serves"),
        ("lora-c", "served by only some endpoints of pool half"),
        ("twin", r"served by several pools \(twin-1, twin-2\)"),
    ],
)
def test_x3_anything_else_is_a_local_error_and_nothing_is_sent(model: str, why: str) -> None:
    router = make(MIXED)
    with pytest.raises(UnknownPool, match=why):
        router.resolve(model)
    assert all(not pool.signals["attempts"] for pool in router.snapshot().pools.values())


def test_x3_a_pool_that_is_gone_does_not_hide_the_one_that_serves_its_model() -> None:
    registry = FakeRegistry({"lg": named("a", model="lg"), "new": named("b", model="other")})
    router = make(registry)
    assert router.resolve("lg") == "lg"
    registry.set({"new": named("b", model="lg")})
    assert router.resolve("lg") == "new"
    registry.set({"new": named("b", model="other")})
    assert router.resolve("lg") == "lg"


def test_names_of_pools_that_are_gone_are_forgotten_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuroute.pools.MAX_GONE", 3)
    registry = FakeRegistry({"stays": named("s")})
    router = make(registry)
    router.ready()
    for number in range(10):
        registry.set({"stays": named("s"), f"job-{number}": named("b")})
    registry.set({"stays": named("s"), "job-7": named("b")})
    assert set(router.snapshot().pools) == {"stays", "job-6", "job-7", "job-8", "job-9"}
    with pytest.raises(NoEndpointAvailable):
        router.call("job-9").next_attempt(router.clock())
    with pytest.raises(UnknownPool):
        router.call("job-1")
    assert router.call("job-7").next_attempt(router.clock()).endpoint.id == "b"
    registry.set({"stays": named("s"), "job-1": named("b")})
    assert router.call("job-1").next_attempt(router.clock()).endpoint.id == "b", "it is a new one"


def test_x3_before_the_first_view_it_is_not_the_model_that_is_unknown() -> None:
    with pytest.raises(RegistryUnavailable):
        make(FakeRegistry()).resolve("small")


# ---------------------------------------------------------------------------------------------- keys


@pytest.mark.parametrize("policy", ["session", "prefix"])
@pytest.mark.parametrize("key", [None, "", "  ", "\t\n"])
def test_a6_a_blank_session_is_no_session(policy: str, key: str | None) -> None:
    router = make({"llm": named(*"abcdefgh")}, policy=policy)
    counts = Counter(one_call(router, key=key) for _ in range(4_000))
    assert all(abs(counts[name] / 4_000 - 1 / 8) <= 4 * math.sqrt(7 / 64 / 4_000) for name in "abcdefgh")
    assert router.snapshot().pools["llm"].signals["keyless"] == 4_000
    assert all(row.why == "random" for row in router.explain("llm", key=key).candidates)
    assert router.snapshot().pools["llm"].signals["keyless"] == 4_000  # looking is not calling


@pytest.mark.parametrize("policy", ["session", "prefix"])
@pytest.mark.parametrize("key", ["user-1", " user-1", "k" * 10_000, "\N{SNOWMAN}", "\udcff"])
def test_a6_a_session_stays_where_it_is(policy: str, key: str) -> None:
    router = make({"llm": named(*"abcdefgh")}, policy=policy)
    assert len({one_call(router, key=key) for _ in range(50)}) == 1
    assert router.snapshot().pools["llm"].signals["keyless"] == 0
    assert key not in json.dumps(router.snapshot().as_dict())


def test_a6_letters_of_another_case_are_another_session() -> None:
    router = make({"llm": named(*(f"gpu-{n}" for n in range(32)))}, policy="session")
    differ = sum(one_call(router, key=f"user-{n}") != one_call(router, key=f"USER-{n}") for n in range(50))
    assert differ > 40


def test_sessions_depend_on_the_salt_and_on_nothing_else() -> None:
    def homes(salt: str, seed: int) -> list[str]:
        spec = PoolSpec("llm", tuple(named(*"abcdefgh")), PoolConfig(salt=salt))
        router = Router(FakeRegistry({"llm": spec}), clock=FakeClock(), random=Random(seed).random, policy="session")
        return [one_call(router, key=f"user-{n}") for n in range(100)]

    own = Router(FakeRegistry({"llm": named(*"abcdefgh")}), clock=FakeClock(), policy="session", salt="x")
    assert [one_call(own, key=f"user-{n}") for n in range(100)] == homes("x", 1)  # the client's own salt wins
    assert homes("x", 1) == homes("x", 2)
    assert sum(a == b for a, b in zip(homes("x", 1), homes("y", 1), strict=True)) < 40


# ---------------------------------------------------------------------------------------------- kill switch, rollout


def test_the_kill_switch_needs_no_registry() -> None:
    router = make(FakeRegistry(), disabled=True, fallback_url="http://old:80")
    assert router.fallback("llm") == "http://old:80"


@pytest.mark.parametrize(("asked", "left"), [(None, 30.0), (0, 0.0), (0.0, 0.0), (2.0, 2.0)])
def test_a_call_to_the_fallback_keeps_the_timeout_that_was_asked_for(asked: float | None, left: float) -> None:
    router = make(FakeRegistry(), disabled=True, fallback_url="http://old:80", timeout=30.0)
    call = router.unrouted("http://old:80", asked)
    assert call.time_left(call.started) == left


@pytest.mark.parametrize("outcome", [Outcome.OVERLOADED, Outcome.FAILED, Outcome.TIMED_OUT])
def test_what_became_of_one_unrouted_call_is_nothing_to_the_others(outcome: Outcome) -> None:
    """A balancer that tells one caller to come back in a minute does not mean all of them."""
    clock = FakeClock()
    router = make(FakeRegistry(), disabled=True, fallback_url="http://old:80", clock=clock)
    for _ in range(200):
        call = router.unrouted("http://old:80")
        assert call.delay(clock()) == 0.0
        attempt = call.next_attempt(clock())
        attempt.sent(clock())
        assert not call.finish(attempt, outcome, clock.advance(0.1), retry_after=60.0, answered=True)
    assert attempt.state.limit == math.inf
    assert attempt.state.pool.signals.panic_picks == 0


def test_the_kill_switch_and_the_rollout_hold_for_attempts() -> None:
    for router in (
        make(FakeRegistry(), disabled=True, fallback_url="http://old:80"),
        make(FakeRegistry({"llm": named("a")}), rollout="0%", fallback_url="http://old:80"),
    ):
        with router.attempt("llm", key="k") as attempt:
            assert attempt.url == "http://old:80"


def test_a_pool_can_be_switched_off_in_the_registry() -> None:
    registry = FakeRegistry({"llm": PoolSpec("llm", (), PoolConfig(disabled=True, fallback_url="http://old:80"))})
    router = make(registry)
    router.ready()
    assert router.fallback("llm") == "http://old:80"
    registry.set({"llm": PoolSpec("llm", (), PoolConfig(disabled=True))})
    with pytest.raises(ConfigError, match="disabled in the registry but has no fallback_url"):
        router.fallback("llm")
    registry.set({"llm": named("a")})
    assert router.fallback("llm") is None


@pytest.mark.parametrize("share", ["10%", "50%", "90%"])
def test_a_rollout_is_a_stable_share(share: str) -> None:
    router = make(rollout=share, fallback_url="http://old:80")
    part = float(share[:-1]) / 100
    routed = [router.fallback("llm") is None for _ in range(1_000)]
    for start in range(0, 990, 10):
        assert abs(sum(routed[start : start + 10]) - 10 * part) <= 1
    assert abs(sum(routed) - 1_000 * part) <= 1
    keyed = [router.fallback("llm", f"user-{n}") is None for n in range(4_000)]
    assert keyed == [router.fallback("llm", f"user-{n}") is None for n in range(4_000)]
    assert abs(sum(keyed) / 4_000 - part) <= 4 * math.sqrt(part * (1 - part) / 4_000)


# ---------------------------------------------------------------------------------------------- looking


def test_a_snapshot_is_json_without_secrets() -> None:
    secret = Endpoint("a", "http://a:8000", headers={"authorization": "Bearer swordfish"})
    router = make({"llm": [secret]}, max_in_flight=3)
    call = router.call("llm")
    attempt = call.next_attempt(router.clock())
    router.clock.advance(2.0)  # type: ignore[attr-defined]
    call.finish(attempt, Outcome.FAILED, router.clock(), reason="500")
    router.call("llm").next_attempt(router.clock())
    router.clock.advance(1.5)  # type: ignore[attr-defined]
    text = json.dumps(router.snapshot().as_dict(), allow_nan=False)
    assert "swordfish" not in text + repr(router) + repr(secret)
    (row,) = json.loads(text)["pools"]["llm"]["endpoints"]
    assert row["in_flight"] == 1
    assert row["limit"] == 3
    assert row["last_error"] == "500"
    assert row["last_error_age_s"] == 1.5
    assert row["oldest_attempt_s"] == 1.5


def test_looking_changes_nothing_and_shows_what_holds_now() -> None:
    router = make()
    router.ready()
    pool = router.pool("llm")
    pool.snapshot.by_id["a"].pause(router.clock() + 5.0)
    before = (pool.shared.signals.as_dict(), pool.budget.balance(router.clock()))
    shown = router.explain("llm")
    assert shown.excluded == {"a": "pause limit 0"}
    router.snapshot()
    assert (pool.shared.signals.as_dict(), pool.budget.balance(router.clock())) == before
    router.clock.advance(5.0)  # type: ignore[attr-defined]
    assert router.explain("llm").excluded == {}
    assert all(row.limit is None for row in router.snapshot().pools["llm"].endpoints)


@pytest.mark.parametrize("policy", ["random", "p2c", "least_request", "prefix", "session", "auto"])
@pytest.mark.parametrize("asked", [{}, {"key": "user-1"}, {"ladder": (1, 2, 3), "tokens": 3_000}])
def test_the_explained_winner_is_the_cheapest_of_those_shown(policy: str, asked: dict[str, Any]) -> None:
    router = make({"llm": named(*"abcdefgh")}, policy=policy)
    for _ in range(20):
        router.call("llm").next_attempt(router.clock())
    for _ in range(30):
        shown = router.explain("llm", **asked)
        assert shown.winner in {row.endpoint for row in shown.candidates}
        costs = {row.endpoint: row.cost for row in shown.candidates}
        if all(row.why in {"random", "candidate"} for row in shown.candidates):
            assert costs[shown.winner] == min(costs.values())  # type: ignore[index]
        assert str(shown).startswith(f"llm by {policy}: {shown.winner}")


def test_explain_says_why_nobody_can_take_it() -> None:
    router = make({"llm": [*named("a", weight=0.0), *named("b", state=State.DRAINING)]})
    shown = router.explain("llm")
    assert shown.winner is None
    assert shown.excluded == {"a": "drained by weight 0", "b": "draining"}
    assert json.loads(json.dumps(shown.as_dict()))["winner"] is None


# ---------------------------------------------------------------------------------------------- any other client


def test_an_attempt_as_a_context_manager_counts_and_teaches() -> None:
    router = make()
    with router.attempt("llm", key="user-1") as attempt:
        state = router.pool("llm").snapshot.by_id[attempt.endpoint.id]
        assert attempt.url == attempt.endpoint.url
        assert len(state.in_flight) == 1
        attempt.first_token()
    assert (len(state.in_flight), state.served, state.failed) == (0, 1, 0)


@pytest.mark.parametrize(
    ("error", "failed"),
    [
        (ConnectionResetError("reset"), 1),
        (TimeoutError("slow"), 1),
        (ValueError("the caller's own"), 0),
        (KeyboardInterrupt(), 0),
        (GeneratorExit(), 0),
        (asyncio.CancelledError(), 0),
        (NoEndpointAvailable("of a call within"), 0),
        (DeadlineExceeded("of a call within"), 0),
    ],
)
def test_r10_what_leaves_the_block_is_judged_by_whose_fault_it_is(error: BaseException, failed: int) -> None:
    router = make({"llm": named("a")})
    with pytest.raises(type(error)), router.attempt("llm"):
        raise error
    (row,) = router.snapshot().pools["llm"].endpoints
    state = router.pool("llm").snapshot.by_id["a"]
    assert (row.in_flight, state.failed) == (0, failed)


def test_an_attempt_that_says_busy_pauses_and_the_next_is_told_when() -> None:
    router = make({"llm": named("a")})
    with router.attempt("llm") as attempt:
        attempt.overloaded(retry_after=4.0)
    with pytest.raises(NoEndpointAvailable, match=r"returns in 4\.00 s") as caught, router.attempt("llm"):
        pass
    assert caught.value.retry_after == 4.0
    router.clock.advance(4.0)  # type: ignore[attr-defined]
    with router.attempt("llm") as attempt:
        attempt.failed("garbage")
    assert router.snapshot().pools["llm"].endpoints[0].last_error == "garbage"


def test_an_attempt_outside_its_block_is_a_clear_error() -> None:
    with pytest.raises(RuntimeError, match="is a context manager"):
        make().attempt("llm").url  # noqa: B018


def test_an_attempt_entered_twice_is_refused_and_entered_again_is_fine() -> None:
    router = make()
    attempt = router.attempt("llm")
    for _ in range(2):
        with attempt, pytest.raises(RuntimeError, match="is under way"), attempt:
            pass
        assert router.snapshot().pools["llm"].in_flight == 0


def test_an_interrupt_on_the_way_into_the_block_leaves_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    router = make()
    start = Call.next_attempt

    def interrupted(call: Call, now: float) -> None:
        start(call, now)
        raise KeyboardInterrupt

    monkeypatch.setattr(Call, "next_attempt", interrupted)
    with pytest.raises(KeyboardInterrupt), router.attempt("llm"):
        pass
    assert router.snapshot().pools["llm"].in_flight == 0


def test_an_attempt_works_in_async_code_too() -> None:
    router = make()

    async def run() -> str:
        async with router.attempt("llm") as attempt:
            return attempt.endpoint.id

    assert asyncio.run(run()) in {"a", "b", "c"}
    assert router.snapshot().pools["llm"].in_flight == 0


# ---------------------------------------------------------------------------------------------- subsets


class SeatingRegistry(FakeRegistry):
    """A registry that can tell its clients apart; the test says which one the router is."""

    sit: Callable[[Seat], None]

    def __init__(self, fleet: Any = None) -> None:
        super().__init__(fleet)
        self.seats = 0

    def take_seat(self, on_seat: Callable[[Seat], None], place: tuple[str, str], *, numbered: bool) -> Any:
        self.sit, self.seats, self.place = on_seat, self.seats + 1, place
        registry = self

        class Held:
            error: str | None = None

            def __init__(self) -> None:
                self.numbered = numbered

            def close(self) -> None:
                registry.seats -= 1

        self.held = Held()
        return self.held


FLEET = [f"g{n}" for n in range(100)]


def visible(router: Router) -> set[str]:
    return {state.id for state in router.pool("llm").snapshot.states}


def test_a_subset_is_what_the_pool_consists_of() -> None:
    registry = SeatingRegistry({"llm": named(*FLEET)})
    with make(registry, subset="auto") as router:
        assert visible(router) == set(FLEET)
        assert str(router.snapshot().pools["llm"].subset) == "all 100, no ordinal yet"
        version = router.version
        registry.sit(Seat(7, 40))
        mine = visible(router)
        assert mine == set(subset(FLEET, 7, 20))
        assert router.version > version
        assert str(router.snapshot().pools["llm"].subset) == "subset 20 of 100, ordinal 7 of 40"
        assert json.loads(json.dumps(router.snapshot().as_dict()))["pools"]["llm"]["subset"]["ordinal"] == 7
        assert {one_call(router) for _ in range(200)} == mine
        registry.set({"llm": named(*FLEET[1:])})
        assert len(mine - visible(router)) <= 2
        assert registry.seats == 1
    assert registry.seats == 0


def test_health_checks_and_asks_see_the_subset_only() -> None:
    from gpuroute.httpx2 import LIBRARY
    from gpuroute.transports.health import Checker
    from gpuroute.transports.pools import Way

    registry = SeatingRegistry({"llm": named(*FLEET, agent="udp://127.0.0.1:9")})
    with make(registry, subset=20, policy="auto") as router:
        router.ready()
        registry.sit(Seat(7, 40))
        checker = Checker()
        checker._routers.add(router)
        checker._ways[router.pool("llm")] = Way(LIBRARY)
        mine = set(subset(FLEET, 7, 20))
        assert {state.id for *_, state in checker._endpoints()} == mine
        picker = router.pool("llm").snapshot.picker
        assert {state.id for _ in range(50) for state in picker.candidates(Ask())} <= mine  # whom an asker would ask


def test_state_survives_when_the_subset_moves_away_and_back_and_nobody_is_taken_for_cold() -> None:
    registry = SeatingRegistry({"llm": named(*FLEET)})
    with make(registry, subset=20) as router:
        router.ready()
        registry.sit(Seat(0, 10))
        before = {state.id: state for state in router.pool("llm").snapshot.states}
        one = next(iter(before.values()))
        one.served = 99
        registry.sit(Seat(5, 10))
        assert visible(router) != set(before)
        assert not any(state.ramp_at for state in router.pool("llm").snapshot.states)
        registry.sit(Seat(0, 10))
        assert {state.id: state for state in router.pool("llm").snapshot.states} == before
        assert before[one.id].served == 99
        registry.set({"llm": named(*FLEET, *(f"new{n}" for n in range(100)))})
        ramping = {state.id for state in router.pool("llm").snapshot.states if state.ramp_at is not None}
        assert ramping == {name for name in visible(router) if name.startswith("new")}


def test_a_running_call_ends_well_although_its_endpoint_left_the_subset() -> None:
    registry = SeatingRegistry({"llm": named(*FLEET)})
    with make(registry, subset=20) as router:
        router.ready()
        registry.sit(Seat(0, 10))
        call = router.call("llm")
        attempt = call.next_attempt(router.clock())
        registry.sit(Seat(1, 10))
        assert attempt.endpoint.id not in visible(router)
        call.finish(attempt, Outcome.SUCCESS, router.clock())
        assert router.snapshot().pools["llm"].in_flight == 0


@pytest.mark.parametrize(
    ("settings", "config", "size"),
    [
        ({}, {}, 100),
        ({}, {"subset": 30}, 30),
        ({"subset": "off"}, {"subset": 30}, 100),
        ({"subset": 25}, {"subset": 30}, 25),
    ],
)
def test_a_pool_may_ask_for_subsets_and_an_explicit_setting_wins(settings: Any, config: Any, size: int) -> None:
    fleet = Fleet({"llm": PoolSpec("llm", tuple(named(*FLEET)), PoolConfig(**config))})
    registry = SeatingRegistry(fleet)
    with make(registry, **settings) as router:
        router.ready()
        assert registry.seats == (size < 100)
        if registry.seats:
            registry.sit(Seat(3, 8))
        assert len(visible(router)) == size


def test_subsets_need_a_registry_with_ordinals(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"subset is set but FakeRegistry gives no ordinals: it needs etcd"):
        make({"llm": named("a")}, subset="auto")
    with pytest.raises(ConfigError, match=r"subset is set but registry is not etcd"):
        Router("llm=http://a:1", subset=30)
    with pytest.raises(ConfigError, match=r"subset='some': expected auto, off or a whole number of at least 1"):
        Router("llm=http://a:1", subset="some")
    with make(Fleet({"llm": PoolSpec("llm", tuple(named("a")), PoolConfig(subset="auto"))})) as router:
        router.ready()
        assert "all of it is used" in caplog.text
        assert one_call(router) == "a"


def test_that_no_ordinal_is_to_be_had_is_not_kept_secret() -> None:
    registry = SeatingRegistry({"llm": named(*FLEET)})
    with make(registry, subset="auto") as router:
        router.ready()
        assert router.snapshot().registry_error is None
        registry.held.error = "PERMISSION_DENIED"
        assert router.snapshot().registry_error == "PERMISSION_DENIED"
        assert one_call(router) in FLEET


def test_a_forked_child_has_no_seat_before_its_first_call() -> None:
    registry = SeatingRegistry({"llm": named(*FLEET)})
    with make(registry, subset=20) as router:
        router.ready()
        registry.sit(Seat(4, 10))
        router.after_fork()
        assert registry.seats == 1
        assert {state.id for pool in router.pools() for state in pool.snapshot.states} == set(FLEET)
        one_call(router)
        assert registry.seats == 2
        registry.sit(Seat(5, 11))
        assert visible(router) == set(subset(FLEET, 5, 20))


# ------------------------------------------------------------------------------------------------- zones


def test_calls_stay_in_the_zone_and_leave_it_when_it_dies() -> None:
    fleet = {"llm": [*named("a1", "a2", zone="a"), *named("b1", "b2", zone="b")]}
    with make(fleet, zone="a") as router:
        assert {one_call(router) for _ in range(50)} == {"a1", "a2"}
        for state in router.pool("llm").snapshot.states[:2]:
            state.set_cap("ejection", 0, until=1e9)
        assert {one_call(router) for _ in range(50)} == {"b1", "b2"}
    with make(fleet) as router:
        assert {one_call(router) for _ in range(50)} == {"a1", "a2", "b1", "b2"}


def test_what_leaving_costs_comes_from_settings_or_else_the_pool() -> None:
    endpoints = tuple(named("b", zone="b", region="us"))
    registry = FakeRegistry(Fleet({"llm": PoolSpec("llm", endpoints, PoolConfig(zone_price=1.0, region_price=2.0))}))

    def away(**settings: Any) -> float:
        with make(registry, **settings) as router:
            (state,) = router.pool("llm").snapshot.states
            return float(round(state.away, 1))

    assert away() == 0.0
    assert away(zone="a") == 1.0
    assert away(zone="a", region="eu") == 3.1
    assert away(zone="a", region="eu", region_price=7.0) == 8.1
    assert away(zone="a", region="eu", zone_price=0.0) == 2.1


@pytest.mark.parametrize("subset", [None, "auto"])
def test_a_seat_says_how_many_clients_live_in_this_zone(subset: str | None) -> None:
    fleet = {"llm": [*named("a1", "a2", zone="a"), *named("b1", "b2", zone="b")]}
    registry = SeatingRegistry(fleet)
    with make(registry, subset=subset, zone="a") as router:
        assert {one_call(router) for _ in range(50)} == {"a1", "a2"}
        assert registry.place == ("", "a")
        assert registry.held.numbered == (subset == "auto")
        registry.sit(Seat(None, 0, 9, 10, 10))  # nine of ten live here, with half of the endpoints
        went = Counter(one_call(router)[0] for _ in range(2_000))
        assert went["a"] / 2_000 == pytest.approx(5 / 9, abs=0.06)
        assert len(visible(router)) == 4
        registry.set(Fleet({"llm": PoolSpec("llm", tuple(fleet["llm"]), PoolConfig(subset="auto"))}))
        assert registry.held.numbered
        assert registry.seats == 1


def test_nobody_is_counted_who_does_not_need_it() -> None:
    fleet = {"llm": [*named("a", zone="a"), *named("b", zone="b")]}
    for settings in ({"policy": "p2c"}, {"policy": "auto", "zone": "a"}):
        registry = SeatingRegistry(fleet)
        with make(registry, **settings) as router:
            router.ready()
            assert registry.seats == 0


# ---------------------------------------------------------------------------------------------- threads and forks


def test_updates_and_calls_from_many_threads() -> None:
    registry = FakeRegistry({"llm": named("a", "b")})
    router, errors = make(registry, clock=FakeClock()), []
    router.ready()  # else one thread may call while another is still on its way to the first view

    def work(number: int) -> None:
        try:
            for turn in range(150):
                if number == 0:
                    registry.set({"llm": named("a", *("b" if turn % 2 else "c"))})
                else:
                    one_call(router)
                    router.snapshot()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert router.snapshot().pools["llm"].in_flight == 0


@pytest.mark.parametrize("tokens", [-1, -1_000, -(10**9)])
def test_a_negative_count_of_tokens_is_an_unknown_one(tokens: int) -> None:
    clock = FakeClock()
    router = make({"llm": named("a", "b")}, clock=clock)
    for given in (tokens, 500, tokens):
        with router.attempt("llm", tokens=given) as attempt:
            clock.advance(0.1)
            attempt.first_token()
    assert router.pool("llm").mean_tokens == 500
    assert router.explain("llm", tokens=tokens).winner in {"a", "b"}


FORK = """
import json, os, sys, threading
from gpuroute import Router
from gpuroute.testing import FakeRegistry

registry = FakeRegistry({"llm": [f"http://gpu-{n}:8000" for n in range(50)]})
router = Router(registry, policy="random")
class Transport:
    forks = 0
    def forked(self): self.forks += 1
transport = Transport()
router.on_fork(transport.forked)
calls = [router.call("llm") for _ in range(10)]
attempts = [call.next_attempt(router.clock()) for call in calls]
locked = threading.Event()
def hold():  # another thread holds the locks of router and pool at the moment of the fork
    with router._lock, router.pool("llm").lock, router.pool("llm").shared.lock:
        locked.set()
        threading.Event().wait()
threading.Thread(target=hold, daemon=True).start()
locked.wait()
rows = []
for _ in range(2):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        picks = []
        for _ in range(12):
            call = router.call("llm", timeout=5.0)
            attempt = call.next_attempt(router.clock())
            picks.append(attempt.endpoint.id)
            call.close(router.clock())
        for call in calls:
            call.close(router.clock())  # inherited ones may be ended too
        row = {"in_flight": router.snapshot().pools["llm"].in_flight, "picks": picks, "forks": transport.forks,
               "ready": router.is_ready}
        os.write(write, json.dumps(row).encode())
        os._exit(0)
    os.waitpid(child, 0)
    rows.append(json.loads(os.read(read, 65536)))
parent = len(router.pool("llm").shared.in_flight)
print(json.dumps({"children": rows, "parent": parent, "forks": transport.forks}))
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_a_forked_child_starts_afresh_whatever_its_parent_held() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    one, two = result["children"]
    for child in (one, two):
        assert child["in_flight"] == 0
        assert child["forks"] == 1
        assert child["ready"] is True
    assert one["picks"] != two["picks"]  # 50^-12 by chance
    assert result["parent"] == 10
    assert result["forks"] == 0


def test_clients_say_that_they_take_a_router() -> None:
    import gpuroute.grpc
    import gpuroute.httpx2

    for make in (gpuroute.httpx2.Client, gpuroute.httpx2.AsyncClient, gpuroute.httpx2.Transport):
        with pytest.raises(ConfigError, match=r"expected a gpuroute\.Router, got str"):
            make("http://llama")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"expected a gpuroute\.Router, got str"):
        gpuroute.grpc.channel("llama", "pool")  # type: ignore[arg-type]
