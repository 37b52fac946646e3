"""What an endpoint keeps when the registry's view changes, and what it must not keep."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from stage import OK, REFUSED, Stage, endpoints, places

from gpuroute.core.breaker import BreakerRules, BreakerState
from gpuroute.core.candidates import Ask
from gpuroute.core.endpoint import Capacity, State
from gpuroute.core.outcome import Outcome
from gpuroute.core.policies import POLICIES
from gpuroute.core.predictive import Model, cohort_of
from gpuroute.core.ramp import RAMP_CALLS, RAMP_S, join
from gpuroute.core.snapshot import Survivors

if TYPE_CHECKING:
    from gpuroute.core.endpoint import Endpoint
    from gpuroute.core.state import EndpointState


def test_e9_a_flapping_key_keeps_load_breaker_and_affinity() -> None:
    """B's key is deleted and put again every 2 s for a minute, while it serves."""
    stage, home = Stage("abc", policy="session"), {}
    for key in range(300):
        home[key] = stage.drive(lambda _: OK, ask=Ask(key=key << 55)).history[0].state
    state = stage.state("b")
    for _ in range(3):
        attempt = state.acquire(stage.clock())
        assert attempt is not None
        attempt.finish(Outcome.FAILED, stage.clock())
    stream = state.acquire(stage.clock())
    assert stream is not None
    for _ in range(30):
        stage.update("ac")
        stage.clock.advance(0.2)
        assert stage.pool.pick().id != "b"  # type: ignore[union-attr]
        stage.update("abc")
        assert stage.state("b") is state
        assert stream in state.in_flight
        stage.clock.advance(1.8)
    assert state.breaker.failures == 3
    for key, before in home.items():
        assert stage.pool.pick(Ask(key=key << 55)) is before
    stream.finish(Outcome.SUCCESS, stage.clock())
    assert not state.in_flight


def test_e9_a_flap_is_no_restart_so_the_share_stays_fair() -> None:
    """60 calls at a time over three endpoints, one of which is away for 0.2 s of every 2 s."""
    stage, counts, live = Stage("abc", policy="p2c"), Counter[str](), []
    for _ in range(30):
        stage.update("ac")
        stage.clock.advance(0.2)
        stage.update("abc")
        for _ in range(60):
            live.append(stage.start())
            counts[live[-1].state.id] += 1
        while live:
            live.pop().finish(Outcome.SUCCESS, stage.clock())
        stage.clock.advance(1.8)
    assert counts["b"] / sum(counts.values()) == pytest.approx(1 / 3, rel=0.2)
    assert stage.residue() == {}


def test_e9_an_attempt_that_ends_while_its_key_is_away_is_not_counted_for_ever() -> None:
    stage = Stage("ab")
    live = [stage.start() for _ in range(10)]
    stage.update("a")
    for attempt in live:
        attempt.finish(Outcome.SUCCESS, stage.clock())
    stage.update("ab")
    assert stage.residue() == {}
    assert stage.state("b").served == sum(attempt.state.id == "b" for attempt in live)


def test_another_address_under_the_same_id_is_another_server() -> None:
    stage = Stage("ab")
    old = stage.state("a")
    for _ in range(5):
        stage.drive(lambda a: REFUSED if a.state is old else OK, attempts=1)
    old.last_error = "connection refused"
    moved = replace(old.endpoint, url="http://elsewhere:8000")
    stage.update((moved, stage.state("b").endpoint))
    assert stage.state("a") is not old
    assert stage.state("a").last_error == ""


def test_an_update_that_changes_nothing_rebuilds_nothing() -> None:
    stage = Stage("abc", policy="auto")
    before = stage.pool.snapshot
    stage.update("abc")
    assert stage.pool.snapshot is before


def test_a_new_record_of_an_endpoint_is_adopted_at_once() -> None:
    stage = Stage({"a": 1.0, "b": 1.0})
    state = stage.state("a")
    stage.update({"a": 4.0, "b": 1.0})
    assert stage.state("a") is state
    assert state.inverse_weight == 0.25


def test_only_a_newcomer_ramps_and_not_a_fleet_that_is_all_new() -> None:
    stage = Stage(8)
    assert not stage.pool.shared.ramping
    stage.update(9)
    assert {state.id for state in stage.pool.shared.ramping} == {"gpu-8"}
    assert stage.state("gpu-8").inverse_weight == pytest.approx(10.0)
    stage.clock.advance(RAMP_S / 2)
    stage.drive(lambda _: OK)
    assert stage.state("gpu-8").inverse_weight == pytest.approx(2.0, rel=0.1)
    stage.clock.advance(RAMP_S / 2)
    stage.drive(lambda _: OK)
    assert stage.state("gpu-8").inverse_weight == 1.0
    assert not stage.pool.shared.ramping


def test_a_ramp_is_climbed_by_completed_calls_not_by_failures() -> None:
    stage = Stage(2, breaker=BreakerRules(failures=0))
    stage.update(3)
    state = stage.state("gpu-2")
    for _ in range(RAMP_CALLS):
        attempt = state.acquire_in_panic(stage.clock())
        assert attempt is not None
        attempt.finish(Outcome.FAILED, stage.clock())
    assert state.ramp_at is not None
    for _ in range(RAMP_CALLS):
        attempt = state.acquire_in_panic(stage.clock())
        assert attempt is not None
        attempt.finish(Outcome.SUCCESS, stage.clock())
    assert state.ramp_at is None


def test_a_newcomer_has_a_part_of_its_share_at_once_and_all_of_it_after_the_ramp() -> None:
    """Under the default policy, where all others have answered without a wait for a minute."""
    stage = Stage(8, policy="auto")

    def share(seconds: int) -> float:
        calls = []
        for _ in range(10 * seconds):
            attempt = stage.start(ask=Ask(None, (), 1_000))
            stage.clock.advance(0.1 * (0.5 + stage.random.random()))
            attempt.first_token(stage.clock())
            attempt.finish(Outcome.SUCCESS, stage.clock())
            calls.append(attempt.state.id)
        return calls.count("gpu-8") / len(calls)

    share(60)
    stage.update(9)
    assert 0 < share(20) < 1 / 9
    share(10)
    assert share(60) > 0.4 / 9


@pytest.mark.parametrize("how", ["away", "restarted", "warming", "drained"])
def test_what_comes_back_cold_ramps(how: str) -> None:
    stage = Stage((replace(endpoints("a")[0], started_at=5.0), *endpoints("bc")))
    a, b, c = (state.endpoint for state in stage.pool.snapshot.states)
    if how == "away":
        stage.update((b, c))
        stage.clock.advance(RAMP_S + 1)
    elif how != "restarted":
        stage.update((replace(a, state=State.WARMING) if how == "warming" else replace(a, weight=0.0), b, c))
    stage.update((replace(a, started_at=6.0) if how == "restarted" else a, b, c))
    assert stage.pool.shared.ramping == {stage.state("a")}


@pytest.mark.parametrize("gone", [(), ("draining", "absent"), ("warming", "absent", "warming"), ("long",)])
@pytest.mark.parametrize("process", ["same", "another", "unknown"])
def test_an_engine_whose_agent_alone_was_away_is_as_warm_as_before(gone: tuple[str, ...], process: str) -> None:
    """Agents say since when the engine runs; what they did meanwhile does not cool its caches."""
    named = replace(endpoints("a")[0], agent="udp://a:1", started_at=0.0 if process == "unknown" else 5.0)
    others = endpoints("bc")
    stage = Stage((named, *others))
    before = stage.state("a")
    for step in (*gone, "warming"):
        if step in {"absent", "long"}:
            stage.update(others)
            stage.clock.advance(RAMP_S + 1 if step == "long" else 1.0)
        else:
            stage.update((replace(named, state=State(step)), *others))
    if process == "another":
        named = replace(named, started_at=6.0)
    stage.update((named, *others))
    assert stage.state("a") is before
    assert stage.pool.shared.ramping == (set() if process == "same" else {before})


def test_an_engine_that_an_agent_brings_ramps_once() -> None:
    stage = Stage(endpoints("bc"))
    newcomer = replace(endpoints("a")[0], agent="udp://a:1", started_at=5.0, state=State.WARMING)
    stage.update((newcomer, *endpoints("bc")))
    for state in (State.READY, State.DRAINING, State.READY):
        stage.update((replace(newcomer, state=state), *endpoints("bc")))
        assert stage.pool.shared.ramping == {stage.state("a")}
    stage.clock.advance(RAMP_S + 1)
    stage.pool.wake(stage.clock())
    for state in (State.WARMING, State.READY):
        stage.update((replace(newcomer, state=state), *endpoints("bc")))
    assert not stage.pool.shared.ramping


def test_an_endpoint_drained_while_it_ramps_ends_its_streams_in_peace() -> None:
    """Its weight is then 0, and nothing may be divided by it."""
    stage = Stage({"a": 1.0})
    stage.update({"a": 1.0, "b": 1.0})
    stream = stage.state("b").acquire(stage.clock())
    assert stream is not None
    stage.update({"a": 1.0, "b": 0.0})
    stage.clock.advance(1.0)
    assert stream.finish(Outcome.SUCCESS, stage.clock())
    assert stage.drive(lambda _: OK).history[0].state.id == "a"
    assert not stage.pool.shared.ramping


@pytest.mark.parametrize(("stated", "own", "limit"), [(0, None, None), (4, None, 4), (0, 3, 3), (4, 3, 3), (2, 3, 2)])
def test_capacity_is_the_smaller_of_what_the_registry_and_the_client_allow(
    stated: int, own: int | None, limit: int | None
) -> None:
    endpoint = replace(endpoints("a")[0], capacity=Capacity(max_in_flight=stated))
    stage = Stage((endpoint,), max_in_flight=own)
    assert stage.state("a").limit == (limit or float("inf"))


def test_a_limit_that_the_registry_lifts_is_lifted() -> None:
    endpoint = replace(endpoints("a")[0], capacity=Capacity(max_in_flight=1))
    stage = Stage((endpoint,))
    stage.start()
    assert stage.pool.pick() is None
    stage.update((replace(endpoint, capacity=Capacity()),))
    assert places(stage.drive(lambda _: OK)) == ["a"]
    assert stage.state("a").breaker.state is BreakerState.CLOSED


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("half", [False, True])
def test_a_pick_that_meets_an_update_of_weights_halfway_goes_on(policy: str, half: bool) -> None:
    """Endpoints have their new weight before the new view is there; their inverse weight comes a moment later."""
    stage = Stage({f"gpu-{n}": 1.0 for n in range(4)}, policy=policy)
    shared = stage.pool.shared
    shared.speeds.usual_latency = 0.0
    for state in stage.pool.snapshot.states:
        join(state, stage.clock())
        shared.speeds.models[cohort_of(state)] = Model()
        drained = replace(state.endpoint, weight=0.0)
        if half:
            state.endpoint = drained
        else:
            state.adopt(drained)
    for number in range(50):
        stage.pool.pick(Ask(None, (number,), 100))


def test_an_update_looks_closely_only_at_who_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of many endpoints gets another label: the others are what they were, to the object."""
    fleet = endpoints([f"gpu-{number:03}" for number in range(300)])
    stage = Stage(fleet, policy="session")
    looked: list[str] = []
    close = Survivors._state

    def look(self: Survivors, endpoint: Endpoint, now: float) -> tuple[EndpointState, bool]:
        looked.append(endpoint.id)
        return close(self, endpoint, now)

    monkeypatch.setattr(Survivors, "_state", look)
    states, ring = stage.pool.snapshot.states, stage.pool.snapshot.picker.ring
    changed = replace(fleet[7], labels={"rack": "r1"})
    stage.update((*fleet[:7], changed, *fleet[8:]))
    assert looked == ["gpu-007"]
    assert stage.pool.snapshot.states == states
    assert stage.state("gpu-007").endpoint is changed
    assert stage.pool.snapshot.picker.ring is ring, "no weight changed"
    stage.rules = replace(stage.rules, max_in_flight=3)
    stage.update((*fleet[:7], changed, *fleet[8:]))
    assert {state.limit for state in stage.pool.snapshot.states} == {3}, "a new limit is everybody's"
