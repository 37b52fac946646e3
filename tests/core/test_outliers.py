"""Ejection of what is worse than its peers: who is judged, for how long, and that it is forgiven by good service."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage import ERROR_500, OK, Answer, Stage, endpoints

from gpuroute.core.breaker import BreakerRules
from gpuroute.core.health import Checked, HealthRules
from gpuroute.core.outcome import Outcome
from gpuroute.core.outliers import OutlierRules
from gpuroute.core.state import EJECTION
from gpuroute.errors import ConfigError

RULES = OutlierRules(min_calls=5)
NO_BREAKER = BreakerRules(failures=0)


def serve(stage: Stage, failing: dict[str, float], calls: int = 400, seconds: float = 10.0) -> None:
    """An interval of calls; `failing` names the share of failures of each sick endpoint."""
    seen: dict[str, int] = {}

    def answer(attempt: object) -> Answer:
        name = attempt.state.id  # type: ignore[attr-defined]
        seen[name] = seen.get(name, 0) + 1
        share = failing.get(name, 0.0)
        return ERROR_500 if int(seen[name] * share) > int((seen[name] - 1) * share) else OK

    for _ in range(calls):
        stage.drive(answer, attempts=1)
        stage.clock.advance(seconds / calls)
    stage.clock.advance(0.01)
    stage.drive(lambda _: OK)  # the first call after the interval sweeps


def ejected(stage: Stage) -> set[str]:
    return {state.id for state in stage.pool.snapshot.states if EJECTION in state.caps}


def test_three_dead_of_ten_are_seen_although_they_move_the_mean() -> None:
    stage = Stage(10, breaker=NO_BREAKER, outliers=OutlierRules(min_calls=5, max_share=0.5))
    serve(stage, {"gpu-1": 1.0, "gpu-2": 1.0, "gpu-3": 1.0})
    assert ejected(stage) == {"gpu-1", "gpu-2", "gpu-3"}


def test_a_quiet_endpoint_is_not_judged() -> None:
    stage = Stage(3, breaker=NO_BREAKER, outliers=RULES)
    serve(stage, {"gpu-0": 1.0}, calls=9)
    assert ejected(stage) == set()


def sit_out(stage: Stage) -> float:
    """Let gpu-0 fail until it is ejected, and wait until it is back; the seconds that it was out."""
    for _ in range(1_000):
        stage.drive(lambda attempt: ERROR_500 if attempt.state.id == "gpu-0" else OK, attempts=1)
        if EJECTION in stage.state("gpu-0").until:
            return stage.clock.advance(stage.state("gpu-0").until[EJECTION] - (now := stage.clock())) - now
        stage.clock.advance(0.05)
    raise AssertionError("never ejected")


def test_an_ejection_ends_and_the_next_is_longer() -> None:
    stage = Stage(4, breaker=NO_BREAKER, outliers=OutlierRules(min_calls=5, base_s=10.0))
    lengths = [sit_out(stage) for _ in range(3)]
    for number, seconds in enumerate(lengths, start=1):
        assert seconds == pytest.approx(10.0 * number, rel=0.11)


def test_good_service_is_what_shortens_the_next_ejection_again() -> None:
    stage = Stage(4, breaker=NO_BREAKER, outliers=OutlierRules(min_calls=5, base_s=10.0))
    for _ in range(3):
        sit_out(stage)
    for _ in range(4):
        serve(stage, {})
    assert sit_out(stage) == pytest.approx(10.0, rel=0.11)


def test_what_comes_back_ramps() -> None:
    stage = Stage(4, breaker=NO_BREAKER, outliers=OutlierRules(min_calls=5, base_s=10.0))
    serve(stage, {"gpu-0": 1.0})
    stage.clock.advance(11.1)
    stage.drive(lambda _: OK)
    assert ejected(stage) == set()
    assert stage.pool.shared.ramping == {stage.state("gpu-0")}


@pytest.mark.parametrize("how", ["drained", "unlisted"])
def test_what_was_mended_and_comes_back_is_not_judged_by_what_it_did_before(how: str) -> None:
    stage = Stage(4, policy="round_robin", breaker=NO_BREAKER, outliers=OutlierRules(min_calls=5, max_share=0.0))
    serve(stage, {"gpu-0": 0.9})
    away = endpoints({f"gpu-{n}": float(n > 0) for n in range(4)})
    stage.update(away if how == "drained" else away[1:])
    serve(stage, {})
    stage.pool.outliers.rules = RULES
    stage.update(4)
    for _ in range(3):
        serve(stage, {})
        assert ejected(stage) == set()


def test_a_newcomer_is_judged_by_its_first_interval() -> None:
    stage = Stage(3, policy="round_robin", breaker=NO_BREAKER, outliers=RULES)
    serve(stage, {})
    stage.update(4)
    serve(stage, {"gpu-3": 1.0})
    assert ejected(stage) == {"gpu-3"}


def answer_in(stage: Stage, seconds: dict[str, float], calls: int) -> None:
    """An interval in which these endpoints, and no others, answer so many calls each after so long."""
    for name, slow in seconds.items():
        for _ in range(calls):
            attempt = stage.state(name).acquire(stage.clock())
            if attempt is not None:
                attempt.first_token(stage.clock() + slow)
                attempt.finish(Outcome.SUCCESS, stage.clock() + slow)
    stage.clock.advance(10.01)
    stage.drive(lambda _: OK)


def test_slowness_is_no_more_than_what_was_seen_since() -> None:
    stage = Stage(4, outliers=OutlierRules(min_calls=5, interval_s=10.0, slow_sweeps=3))
    usual = {f"gpu-{n}": 0.1 for n in range(1, 4)}
    answer_in(stage, {**usual, "gpu-0": 5.0}, 10)
    for _ in range(6):
        answer_in(stage, usual, 10)  # nobody calls gpu-0
        assert ejected(stage) == set()


def test_what_was_slow_and_is_quick_again_is_ejected_once() -> None:
    stage = Stage(4, outliers=OutlierRules(min_calls=5, interval_s=10.0, slow_sweeps=3))
    usual = {f"gpu-{n}": 0.1 for n in range(1, 4)}
    while "gpu-0" not in ejected(stage):
        answer_in(stage, {**usual, "gpu-0": 5.0}, 10)
    for _ in range(30):
        answer_in(stage, {**usual, "gpu-0": 0.1}, 4)
    assert stage.pool.shared.signals.ejections == 1


@pytest.mark.parametrize("checks", ["two good ones", "three bad ones"])
def test_health_checks_neither_lift_nor_shorten_what_they_did_not_begin(checks: str) -> None:
    stage = Stage(4)
    state, checked = stage.state("gpu-0"), Checked(HealthRules(), stage.clock(), lambda: 0.5)
    for _ in range(3):
        checked.ended(stage.pool, state, stage.clock(), well=False)
    assert ejected(stage) == {"gpu-0"}
    stage.pool.tick(stage.clock.advance(60.0))  # it ended by itself
    assert stage.pool.outliers.eject(state, stage.pool.snapshot.routable, stage.pool.shared, stage.clock())
    until = state.until[EJECTION]
    for _ in range(3):
        checked.ended(stage.pool, state, stage.clock(), well=checks == "two good ones")
    assert state.until[EJECTION] == until


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 12),
    st.floats(0.0, 1.0),
    st.lists(st.lists(st.integers(0, 11), max_size=12, unique=True), min_size=1, max_size=4),
)
def test_never_more_leave_than_the_cap_allows(size: int, max_share: float, rounds: list[list[int]]) -> None:
    rules = OutlierRules(min_calls=1, max_share=max_share, base_s=15.0)
    stage = Stage(size, policy="round_robin", breaker=NO_BREAKER, outliers=rules)
    for sick in rounds:
        serve(stage, {f"gpu-{n}": 1.0 for n in sick}, calls=2 * size)
        out = len(ejected(stage))
        assert out < size
        assert out <= max(1 if max_share > 0 else 0, max_share * size)


@pytest.mark.parametrize("wrong", [{"interval_s": -1.0}, {"base_s": 0.0}, {"max_s": 1.0}, {"max_share": 1.5}])
def test_rules_that_cannot_work_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="outlier rules"):
        OutlierRules(**wrong)  # type: ignore[arg-type]
