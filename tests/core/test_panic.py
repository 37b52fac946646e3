"""When nearly everything is sick: what may be taken out, what is tried all the same, and how soon it is over."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from stage import ERROR_500, OK, REFUSED, Answer, Stage, outcome_of, places

from gpuroute.core.breaker import BreakerRules, BreakerState
from gpuroute.core.outcome import Outcome
from gpuroute.core.outliers import OutlierRules
from gpuroute.core.state import EJECTION
from gpuroute.errors import NoEndpointAvailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuroute.core.attempt import Attempt

NO_BREAKER = BreakerRules(failures=0)
NO_EJECTION = OutlierRules(interval_s=0)


def bad(*names: str) -> Callable[[Attempt], Answer]:
    return lambda attempt: ERROR_500 if attempt.state.id in names else OK


def run(stage: Stage, answer: Callable[[Attempt], Answer], seconds: float, per_second: int = 20) -> list[Outcome | None]:
    """Calls of one attempt at an even rate."""
    ended = []
    for _ in range(int(seconds * per_second)):
        ended.append(outcome_of(stage.drive(answer, attempts=1)))
        stage.clock.advance(1 / per_second)
    return ended


def ejected(stage: Stage) -> set[str]:
    return {state.id for state in stage.pool.snapshot.states if EJECTION in state.caps}


@pytest.mark.parametrize(
    ("size", "share", "one_bad", "all_bad"),
    [
        (1, 0.1, 0, 0),
        (1, 1.0, 0, 0),
        (2, 0.1, 1, 1),
        (2, 0.5, 1, 1),
        (2, 1.0, 1, 1),
        (3, 0.1, 1, 1),
        (3, 0.5, 1, 1),
        (3, 1.0, 1, 2),
        (10, 0.1, 1, 1),
        (10, 0.5, 1, 5),
        (10, 1.0, 1, 9),
        (10, 0.0, 0, 0),
    ],
)
def test_b6_how_many_leave(size: int, share: float, one_bad: int, all_bad: int) -> None:
    """A pool of one is never emptied, at least one may leave a larger one, one always stays."""
    names = [f"gpu-{n}" for n in range(size)]
    for broken, expected in ((names[:1], one_bad), (names, all_bad)):
        stage = Stage(size, breaker=NO_BREAKER, outliers=OutlierRules(max_share=share, min_calls=5))
        run(stage, bad(*broken), 12, per_second=max(20, 5 * size))
        assert len(ejected(stage)) == expected
        assert ejected(stage) <= set(broken)
        assert outcome_of(stage.drive(bad(*broken), attempts=1)) is not None  # somebody still takes calls


def test_b6_what_the_cap_forbade_is_counted() -> None:
    stage = Stage(3, breaker=NO_BREAKER, outliers=OutlierRules(max_share=0.34, min_calls=5))
    run(stage, bad("gpu-0", "gpu-1", "gpu-2"), 12)
    signals = stage.pool.shared.signals
    assert signals.ejections == 1
    assert signals.ejections_unenforced == 2


@pytest.mark.parametrize("size", [1, 2, 3])
def test_b6_all_bad_is_the_backends_own_error_and_ends_with_the_fault(size: int) -> None:
    stage = Stage(size)
    names = [f"gpu-{n}" for n in range(size)]
    assert set(run(stage, bad(*names), 30)) == {Outcome.FAILED}
    assert stage.pool.shared.signals.panic_picks > 0
    assert outcome_of(stage.drive(lambda _: OK, attempts=1)) is Outcome.SUCCESS
    assert stage.residue() == {}


def test_b6_what_answers_in_panic_is_well_again() -> None:
    """After a long fault breakers are open for minutes: the first success of a panic pick must close its breaker, or a
    hundred callers would lean on whichever endpoint is half open first."""
    stage = Stage(3, outliers=NO_EJECTION, breaker=BreakerRules(open_s=60.0))
    run(stage, bad("gpu-0", "gpu-1", "gpu-2"), 2)
    assert all(state.breaker.state is BreakerState.OPEN for state in stage.pool.snapshot.states)
    run(stage, bad(), 0.1)
    closed = [state for state in stage.pool.snapshot.states if state.breaker.state is BreakerState.CLOSED]
    assert closed


def test_b6_fail_fast_is_the_other_side() -> None:
    stage = Stage(2, panic="fail_fast", outliers=NO_EJECTION)
    with pytest.raises(NoEndpointAvailable) as caught:
        run(stage, bad("gpu-0", "gpu-1"), 30)
    assert 0 < caught.value.retry_after <= 6  # type: ignore[operator]
    assert "none of its 2 endpoints may take a call now" in str(caught.value)
    assert stage.pool.shared.signals.panic_picks == 0


def test_b6_panic_respects_capacity() -> None:
    stage = Stage(2, max_in_flight=1, outliers=NO_EJECTION)
    for state in stage.pool.snapshot.states:
        for _ in range(5):
            attempt = state.acquire(stage.clock())
            assert attempt is not None
            attempt.finish(Outcome.FAILED, stage.clock())
    live = [stage.start(), stage.start()]
    assert {attempt.state.id for attempt in live} == {"gpu-0", "gpu-1"}
    with pytest.raises(NoEndpointAvailable):
        stage.start()


def test_b6_in_panic_too_a_retry_goes_elsewhere() -> None:
    for seed in range(20):
        stage = Stage(3, seed=seed, outliers=NO_EJECTION, breaker=BreakerRules(failures=1, open_s=60.0))
        stage.drive(lambda _: REFUSED, attempts=3)
        assert all(state.breaker.state is BreakerState.OPEN for state in stage.pool.snapshot.states)
        assert len(set(places(stage.drive(lambda _: REFUSED, attempts=3)))) == 3


def test_b6_panic_share_spreads_over_the_sick_before_the_last_healthy_one_drowns() -> None:
    stage = Stage(10, outliers=NO_EJECTION, panic_share=0.2)
    for name in [f"gpu-{n}" for n in range(9)]:
        for _ in range(5):
            attempt = stage.state(name).acquire(stage.clock())
            assert attempt is not None
            attempt.finish(Outcome.FAILED, stage.clock())
    places_now = {stage.start().state.id for _ in range(200)}
    assert len(places_now) == 10


@pytest.mark.parametrize("panic", ["fail_open", "fail_fast"])
def test_x1_an_outage_of_five_seconds_is_soon_over(panic: str) -> None:
    """20 calls a second with a deadline of 10 s; every endpoint fails for 5 s. Opened for 60 s, the calls that fail fast
    wait no longer than the first endpoint takes to come back; failing open they notice at once."""
    open_s = 60.0 if panic == "fail_open" else 5.0
    stage = Stage(3, panic=panic, breaker=BreakerRules(open_s=open_s), outliers=NO_EJECTION)
    start, last_failure = stage.clock(), 0.0
    while stage.clock() < start + 40:
        is_down = stage.clock() < start + 5
        try:
            call = stage.drive(lambda _, down=is_down: REFUSED if down else OK, timeout=10.0, attempts=1)  # type: ignore[misc]
            failed = outcome_of(call) is not Outcome.SUCCESS
        except NoEndpointAvailable:
            failed = True
        last_failure = stage.clock() - start if failed else last_failure
        stage.clock.advance(0.05)
    assert last_failure <= (5.1 if panic == "fail_open" else 10.0)


def test_x1_the_error_carries_the_earliest_return_and_the_state_is_readable() -> None:
    stage = Stage(3, panic="fail_fast", outliers=NO_EJECTION)
    for number, state in enumerate(stage.pool.snapshot.states):
        stage.clock.advance(number)
        for _ in range(5):
            attempt = state.acquire(stage.clock())
            assert attempt is not None
            attempt.finish(Outcome.FAILED, stage.clock(), "refused")
    with pytest.raises(NoEndpointAvailable) as caught:
        stage.drive(lambda _: OK)
    earliest = min(state.until["breaker"] for state in stage.pool.snapshot.states)
    assert caught.value.retry_after == pytest.approx(earliest - stage.clock())
    assert f"the earliest returns in {earliest - stage.clock():.2f} s" in str(caught.value)
    assert all(state.last_error == "refused" for state in stage.pool.snapshot.states)


def test_a_pool_without_endpoints_says_which_kind_of_nothing() -> None:
    empty = Stage(0)
    with pytest.raises(NoEndpointAvailable, match="lists no endpoint"):
        empty.drive(lambda _: OK)
    drained = Stage({"a": 0.0})
    with pytest.raises(NoEndpointAvailable, match="none of its 1 endpoints is in service"):
        drained.drive(lambda _: OK)
    assert empty.pool.shared.signals.no_endpoint == 1


def test_a_single_endpoint_is_retried_after_one_failure() -> None:
    stage, failures = Stage(1), iter([REFUSED])
    call = stage.drive(lambda _: next(failures, OK))
    assert places(call) == ["gpu-0", "gpu-0"]
    assert outcome_of(call) is Outcome.SUCCESS
