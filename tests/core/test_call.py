"""One logical call: how often it is sent, where, when, and what it leaves behind."""

from __future__ import annotations

import math
from collections import Counter
from random import Random
from typing import TYPE_CHECKING

import pytest
from stage import BAD_REQUEST, ERROR_500, OK, REFUSED, Answer, Stage, busy, endpoints, outcome_of, places

from gpuroute.core.attempt import DONE, READY, SENT, STREAMING
from gpuroute.core.breaker import BreakerRules, BreakerState
from gpuroute.core.candidates import Ask
from gpuroute.core.endpoint import Endpoint
from gpuroute.core.hedge import HedgeRules
from gpuroute.core.outcome import Outcome, http_outcome
from gpuroute.core.outliers import OutlierRules
from gpuroute.core.retry import RetryRules
from gpuroute.core.retry_after import parse_retry_after
from gpuroute.errors import ConfigError, DeadlineExceeded, NoEndpointAvailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuroute.core.attempt import Attempt

NO_BREAKER = BreakerRules(failures=0)
NO_EJECTION = OutlierRules(interval_s=0)
FAR = 1e9


def only(name: str, answer: Answer) -> Callable[[Attempt], Answer]:
    """That answer from one endpoint, success from the others."""
    return lambda attempt: answer if attempt.state.id == name else OK


# ---------------------------------------------------------------------------------------------- the count


def test_l1_a_thousand_cancels_at_random_points_leave_nothing() -> None:
    stage, dice = Stage(4, max_in_flight=300), Random(7)
    for _ in range(1_000):
        call = stage.call(timeout=dice.choice([None, 0.5]))
        for _ in range(dice.randrange(4)):
            try:
                attempt = call.next_attempt(stage.clock())
            except (NoEndpointAvailable, DeadlineExceeded):
                break
            if dice.random() < 0.7:
                attempt.sent(stage.clock())
            if dice.random() < 0.4:
                attempt.first_token(stage.clock())
            if dice.random() < 0.5 and not call.finish(attempt, dice.choice(list(Outcome)), stage.clock()):
                break
            stage.clock.advance(dice.random() * 0.2)
        call.close(stage.clock())
        call.close(stage.clock())  # cancelled twice
    assert stage.residue() == {}
    stage.clock.advance(400.0)
    counts = Counter(places(stage.drive(lambda _: OK))[0] for _ in range(4_000))
    assert all(abs(count / 4_000 - 0.25) <= 4 * math.sqrt(0.25 * 0.75 / 4_000) for count in counts.values())


def test_l1_a_second_end_is_no_end() -> None:
    stage = Stage(1)
    call = stage.call()
    attempt = call.next_attempt(stage.clock())
    assert call.finish(attempt, Outcome.FAILED, stage.clock()) is True
    assert call.finish(attempt, Outcome.FAILED, stage.clock()) is False
    assert attempt.finish(Outcome.SUCCESS, stage.clock()) is False
    assert attempt.outcome is Outcome.FAILED
    assert stage.state("gpu-0").breaker.failures == 1
    assert stage.residue() == {}


def test_l2_the_count_spans_dispatch_to_the_end_of_the_body() -> None:
    stage = Stage(1)
    state, call = stage.state("gpu-0"), stage.call()
    attempt = call.next_attempt(stage.clock())
    seen = [len(state.in_flight)]  # before connect
    attempt.sent(stage.clock())
    seen.append(len(state.in_flight))  # waiting for headers
    attempt.first_token(stage.clock())
    attempt.chunk(stage.clock.advance(0.1))
    seen.append(len(state.in_flight))  # mid-body
    call.finish(attempt, Outcome.SUCCESS, stage.clock())
    assert [*seen, len(state.in_flight)] == [1, 1, 1, 0]
    assert (attempt.phase, attempt.reached) == (DONE, STREAMING)


def test_l2_long_streams_turn_short_calls_away_and_a_burst_splits_evenly() -> None:
    stage = Stage("ab")
    streams = [stage.state("a").acquire(stage.clock()) for _ in range(20)]
    assert Counter(places(stage.drive(lambda _: OK))[0] for _ in range(20)) == {"b": 20}
    for stream in streams:
        stream.finish(Outcome.SUCCESS, stage.clock())  # type: ignore[union-attr]
    burst = [stage.start() for _ in range(20)]  # no header is back before the last one is out
    assert Counter(attempt.state.id for attempt in burst) == {"a": 10, "b": 10}


def test_phases_only_rise() -> None:
    stage = Stage(1)
    attempt = stage.call().next_attempt(stage.clock())
    assert attempt.phase is READY
    attempt.first_token(stage.clock())
    attempt.sent(stage.clock())
    assert attempt.phase is STREAMING
    attempt.first_token(stage.clock.advance(1.0))
    assert attempt.first == stage.clock() - 1.0
    attempt.finish(Outcome.SUCCESS, stage.clock())
    attempt.first_token(stage.clock())
    assert attempt.phase is DONE


# ---------------------------------------------------------------------------------------------- attempts


@pytest.mark.parametrize("attempts", [1, 2, 3, 5])
def test_r1_a_call_is_sent_as_often_as_configured_and_says_so(attempts: int) -> None:
    stage = Stage(5, breaker=NO_BREAKER)
    call = stage.drive(lambda _: ERROR_500, attempts=attempts)
    assert len(call.history) == attempts
    assert [attempt.number for attempt in call.history] == list(range(1, attempts + 1))
    assert call.story().startswith(f"{attempts} attempt")


@pytest.mark.parametrize(("ratio", "floor"), [(0.2, 0.0), (0.2, 10.0), (0.0, 0.0), (1.0, 0.0)])
def test_r1_at_total_failure_the_fleet_sees_one_plus_the_budget(ratio: float, floor: float) -> None:
    """100 calls a second for a minute, all of which fail."""
    stage = Stage(4, budget_ratio=ratio, budget_floor=floor, breaker=NO_BREAKER, outliers=NO_EJECTION)
    start = stage.clock()
    sent = calls = 0
    while stage.clock() < start + 60:
        call = stage.call()
        sent, calls, again = sent + 1, calls + 1, True
        while True:
            attempt = call.next_attempt(stage.clock())
            attempt.sent(stage.clock())
            again = call.finish(attempt, Outcome.FAILED, stage.clock(), answered=True)
            if not again:
                break
            sent += 1
        stage.clock.advance(0.01)
    assert sent / calls <= 1 + ratio + (floor * 60 + 10 * floor) / calls + 0.001
    assert stage.pool.shared.signals.retries == sent - calls
    assert stage.pool.shared.signals.retries_denied > 0


def test_r1_a_denied_retry_leaves_the_last_answer_to_the_caller() -> None:
    stage = Stage(2, budget_ratio=0.0, budget_floor=0.0)
    call = stage.drive(lambda _: ERROR_500)
    assert len(call.history) == 1
    assert stage.pool.shared.signals.retries_denied == 1


@pytest.mark.parametrize("policy", ["random", "round_robin", "p2c", "least_request", "prefix", "session", "auto"])
def test_r2_the_second_attempt_goes_elsewhere(policy: str) -> None:
    """Whatever pins the call to the dead host: weight, session or prefix."""
    stage = Stage({"dead": 100.0, "live": 1.0}, policy=policy, breaker=NO_BREAKER, outliers=NO_EJECTION)
    for number in range(50):
        ask = Ask(key=number << 57, ladder=(number, number + 1, number + 2), tokens=4_000)
        call = stage.drive(only("dead", REFUSED), ask=ask, attempts=2)
        assert outcome_of(call) is Outcome.SUCCESS
        assert places(call).count("dead") <= 1


def test_r2_a_pool_of_one_is_tried_again_and_all_may_be_used_again_when_all_were_tried() -> None:
    answers = iter([REFUSED])
    alone = Stage(1, panic="fail_fast")
    assert places(alone.drive(lambda _: next(answers, OK))) == ["gpu-0", "gpu-0"]
    stage = Stage(3, breaker=NO_BREAKER)
    call = stage.drive(lambda _: REFUSED, attempts=5)
    assert len(call.history) == 5
    assert set(places(call)[:3]) == {"gpu-0", "gpu-1", "gpu-2"}


def test_r2_a_failed_rack_is_avoided_while_there_is_another() -> None:
    fleet = tuple(
        Endpoint(name, f"http://{name}:8000", labels={"rack": rack})
        for name, rack in [("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b")]
    )
    for seed in range(20):
        stage = Stage(fleet, seed=seed, breaker=NO_BREAKER)
        call = stage.drive(lambda a: REFUSED if a.state.id.startswith("a") else OK, attempts=2)
        assert outcome_of(call) is Outcome.SUCCESS
        one_rack = Stage(fleet[:3], seed=seed, breaker=NO_BREAKER)
        assert len(set(places(one_rack.drive(lambda _: REFUSED, attempts=3)))) == 3  # else its other hosts


def test_after_a_request_was_sent_a_silent_death_permits_one_more_attempt() -> None:
    """A request that kills its server must not walk through the fleet; one that is answered or never left may go on."""
    stage = Stage(8, breaker=NO_BREAKER, outliers=NO_EJECTION)
    walked = stage.call(attempts=6)
    while True:
        attempt = walked.next_attempt(stage.clock())
        attempt.sent(stage.clock())
        if not walked.finish(attempt, Outcome.FAILED, stage.clock()):
            break
    assert len(walked.history) == 2
    assert len(stage.drive(lambda _: REFUSED, attempts=6).history) == 6
    assert len(stage.drive(lambda _: ERROR_500, attempts=6).history) == 6


def test_a_busy_answer_is_an_answer_even_if_the_driver_does_not_say_so() -> None:
    stage = Stage(8)

    def answer(attempt: Attempt) -> Answer:
        attempt.sent(stage.clock())
        return Outcome.OVERLOADED, {"retry_after": 0.0}

    assert len(stage.drive(answer, attempts=6).history) == 6


def test_nothing_is_repeated_after_the_first_byte_or_without_a_body_to_send() -> None:
    stage = Stage(3)
    streamed = stage.call()
    attempt = streamed.next_attempt(stage.clock())
    attempt.sent(stage.clock())
    attempt.first_token(stage.clock())
    assert streamed.finish(attempt, Outcome.FAILED, stage.clock()) is False
    once = stage.call(replayable=False)
    attempt = once.next_attempt(stage.clock())
    attempt.sent(stage.clock())
    assert once.finish(attempt, Outcome.FAILED, stage.clock(), answered=True) is False
    unsent = stage.call(replayable=False)
    attempt = unsent.next_attempt(stage.clock())
    assert unsent.finish(attempt, Outcome.FAILED, stage.clock()) is True  # it never left: the body is still whole


# ---------------------------------------------------------------------------------------------- Retry-After


@pytest.mark.parametrize(
    ("text", "wait"),
    [
        ("2", 2.0),
        ("1.5", 1.5),
        (" 2 ", 2.0),
        ("0", 0.0),
        ("-5", 0.0),
        ("1e30", 60.0),
        ("Sun, 06 Nov 1994 08:49:40 GMT", 3.0),
        ("Sun, 06 Nov 1994 08:49:30 GMT", 0.0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 60.0),
        ("NaN", None),
        ("inf", None),
        ("", None),
        ("soon", None),
    ],
)
def test_r7_the_pause_is_clipped_and_what_cannot_be_read_is_our_own(text: str, wait: float | None) -> None:
    stage = Stage(1, retry=RetryRules(overload_pause=0.25))
    asked = parse_retry_after(text, 784_111_777.0)  # Sun, 06 Nov 1994 08:49:37 GMT
    answers = iter([busy(asked)])
    call = stage.drive(lambda _: next(answers, OK))
    waited = sum(stage.clock.slept)
    assert outcome_of(call) is Outcome.SUCCESS
    if wait is None:
        assert 0.125 <= waited <= 0.375 + 0.025
    else:
        assert wait <= waited <= wait + 0.025  # and a backoff where the server asked for none


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, -1.0, 1e300])
def test_r7_a_driver_may_hand_over_any_number(odd: float) -> None:
    pause = RetryRules().pause(odd, lambda: 0.5)
    assert 0.0 <= pause <= 60.0


def test_r7_a_later_pause_wins_and_an_earlier_one_does_not_shorten_it() -> None:
    stage = Stage(1)
    state = stage.state("gpu-0")
    state.pause(stage.clock() + 5)
    state.pause(stage.clock() + 2)
    assert stage.pool.pause_left(stage.clock()) == 5.0
    stage.clock.advance(5)
    assert stage.pool.pause_left(stage.clock()) == 0.0
    assert state.limit == math.inf


def test_r8_one_busy_host_is_left_at_once() -> None:
    stage = Stage(3)
    for _ in range(30):
        call = stage.drive(only("gpu-0", busy(2.0)))
        assert outcome_of(call) is Outcome.SUCCESS
    assert stage.clock.slept == []


def test_r8_all_busy_waits_for_the_first_to_return_if_the_deadline_permits() -> None:
    stage = Stage(3)
    start, sent = stage.clock(), []

    def answer(attempt: Attempt) -> Answer:
        sent.append(stage.clock() - start)
        return busy(2.0) if stage.clock() < start + 2 else OK

    call = stage.drive(answer, attempts=6, timeout=10.0)
    assert outcome_of(call) is Outcome.SUCCESS
    assert sum(moment < 2.0 for moment in sent) <= 3
    assert sent[-1] == pytest.approx(2.0, abs=0.05)


def test_r8_a_wait_beyond_the_deadline_is_not_begun_and_names_the_time() -> None:
    stage = Stage(3)
    for state in stage.pool.snapshot.states:
        state.pause(stage.clock() + 30)
    with pytest.raises(NoEndpointAvailable) as caught:
        stage.drive(lambda _: OK, timeout=2.0)
    assert caught.value.retry_after == 30.0
    assert stage.clock.slept == []


def test_r8_the_last_busy_answer_is_the_callers_when_no_pause_ends_in_time() -> None:
    """Its status and Retry-After say more than an error of ours would, and no budget is spent on it."""
    stage = Stage(2)
    before = stage.pool.budget.balance(stage.clock())
    call = stage.drive(lambda _: busy(30.0), attempts=5, timeout=2.0)
    assert outcome_of(call) is Outcome.OVERLOADED
    assert len(call.history) == 2
    assert before - stage.pool.budget.balance(stage.clock()) <= 1.0


def test_r8_affinity_does_not_hold_a_call_at_a_busy_host() -> None:
    stage, ask = Stage(4, policy="session"), Ask(key=12345)
    home = places(stage.drive(lambda _: OK, ask=ask))[0]
    call = stage.drive(only(home, busy(5.0)), ask=ask)
    assert places(call)[0] == home
    assert outcome_of(call) is Outcome.SUCCESS
    assert stage.clock.slept == []
    stage.clock.advance(5.0)
    assert places(stage.drive(lambda _: OK, ask=ask)) == [home]


# ---------------------------------------------------------------------------------------------- deadlines


def test_r9_no_attempt_begins_after_the_deadline_and_the_error_tells_each_one() -> None:
    stage = Stage(1, outliers=NO_EJECTION)
    start, begun = stage.clock(), []

    def slow(attempt: Attempt) -> Answer:
        begun.append(stage.clock() - start)
        stage.clock.advance(0.85)
        return Outcome.TIMED_OUT, {"reason": "slow"}

    stage.oversleep = 0.15  # a busy machine wakes late
    with pytest.raises(DeadlineExceeded, match=r"deadline exceeded after 2\.\d+ s \(2 attempts: .* slow, .* slow\)"):
        stage.drive(slow, timeout=2.0)
    assert len(begun) == 2
    assert all(moment < 2.0 for moment in begun)
    assert stage.residue() == {}


def test_r9_a_backoff_that_would_pass_the_deadline_ends_the_call_with_its_own_error() -> None:
    """What the server said, not that time ran out; a backoff that ends in time is waited for."""
    waited = set()
    for seed in range(40):
        stage = Stage(1, retry=RetryRules(base=1.0, cap=1.0, attempts=2), seed=seed)
        call = stage.drive(lambda _: ERROR_500, timeout=0.5)
        assert outcome_of(call) is Outcome.FAILED
        assert len(call.history) == 1 + bool(stage.clock.slept)
        waited.add(bool(stage.clock.slept))
    assert waited == {True, False}


@pytest.mark.parametrize("timeout", [0.0, 0.1, 1.0, 3.0])
def test_r9_whatever_fails_the_call_is_over_by_its_deadline(timeout: float) -> None:
    stage = Stage(3, breaker=NO_BREAKER, retry=RetryRules(attempts=50, base=0.2, cap=0.5))
    start, dice = stage.clock(), Random(3)
    for _ in range(50):
        start = stage.clock()

        def answer(attempt: Attempt, until: float = start + timeout) -> Answer:
            assert stage.clock() < until or timeout == 0.0
            stage.clock.advance(min(dice.random() * 0.3, max(0.0, until - stage.clock())))
            return dice.choice([REFUSED, ERROR_500, busy(0.3), busy(None)])

        try:
            stage.drive(answer, timeout=timeout)
        except (DeadlineExceeded, NoEndpointAvailable):
            pass
        assert stage.clock() <= start + timeout + 1e-6


def test_r9_without_a_deadline_there_is_none() -> None:
    assert Stage(1).call().time_left(FAR) == math.inf


# ---------------------------------------------------------------------------------------------- cancellation


@pytest.mark.parametrize("phase", [READY, SENT, STREAMING])
def test_r10_a_cancelled_attempt_is_nobodys_failure_and_ends_the_call(phase: int) -> None:
    stage = Stage(1)
    for _ in range(20):
        call = stage.call()
        attempt = call.next_attempt(stage.clock())
        if phase >= SENT:
            attempt.sent(stage.clock())
        if phase >= STREAMING:
            attempt.first_token(stage.clock())
        assert call.finish(attempt, Outcome.CANCELLED, stage.clock()) is False
    state = stage.state("gpu-0")
    assert state.breaker.failures == state.failed == 0
    assert state.breaker.state is BreakerState.CLOSED
    assert stage.pool.shared.signals.retries == 0
    assert stage.residue() == {}


def test_r10_cancelled_during_a_wait_nothing_more_is_sent() -> None:
    stage = Stage(1)
    call = stage.call()
    call.finish(call.next_attempt(stage.clock()), Outcome.FAILED, stage.clock())
    call.close(stage.clock())
    assert stage.pool.shared.signals.attempts == 1
    assert stage.residue() == {}


def test_r10_a_callers_own_mistake_is_final() -> None:
    call = Stage(3).drive(lambda _: BAD_REQUEST)
    assert len(call.history) == 1
    assert outcome_of(call) is Outcome.REJECTED


# ---------------------------------------------------------------------------------------------- hedges


def hedging(size: int = 3, **rules: object) -> Stage:
    return Stage(size, hedge=HedgeRules(hedge=True, hedge_share=1.0), outliers=NO_EJECTION, **rules)


def test_a_hedge_goes_elsewhere_and_its_loser_teaches_nothing() -> None:
    stage = hedging()
    call = stage.call()
    first = call.next_attempt(stage.clock())
    second = call.hedge(stage.clock.advance(0.1))
    assert second is not None
    assert second.state is not first.state
    assert call.finish(second, Outcome.SUCCESS, stage.clock()) is False
    call.close(stage.clock())
    assert first.outcome is Outcome.CANCELLED
    assert first.state.failed == 0
    assert stage.residue() == {}


def test_while_one_of_two_is_live_a_failure_is_not_retried() -> None:
    stage = hedging()
    call = stage.call()
    first = call.next_attempt(stage.clock())
    second = call.hedge(stage.clock())
    assert second is not None
    assert call.finish(first, Outcome.FAILED, stage.clock()) is False
    assert call.finish(second, Outcome.FAILED, stage.clock()) is True


def test_there_is_no_hedge_without_another_endpoint_that_may_take_it() -> None:
    """A second copy at the same endpoint would only lengthen the queue it waits in; nothing is paid for it."""
    alone = hedging(1)
    only_one = alone.call()
    only_one.next_attempt(alone.clock())
    assert only_one.hedge(alone.clock()) is None
    stage = hedging(2, max_in_flight=1)
    call, other = stage.call(), stage.call()
    call.next_attempt(stage.clock())
    other.next_attempt(stage.clock())
    before = stage.pool.hedges.balance(stage.clock())
    assert call.hedge(stage.clock()) is None
    assert stage.pool.hedges.balance(stage.clock()) == before


def test_a_hedge_that_the_common_budget_denies_costs_the_hedge_budget_nothing() -> None:
    stage = hedging(3, budget_ratio=0.0, budget_floor=0.0)
    call = stage.call()
    call.next_attempt(stage.clock())
    before = stage.pool.hedges.balance(stage.clock())
    assert call.hedge(stage.clock()) is None
    assert stage.pool.hedges.balance(stage.clock()) == before
    assert stage.pool.shared.signals.hedges_denied == 1


# ---------------------------------------------------------------------------------------------- outcomes


@pytest.mark.parametrize(
    ("status", "retry_after", "outcome"),
    [
        (200, False, Outcome.SUCCESS),
        (204, True, Outcome.SUCCESS),
        (307, False, Outcome.SUCCESS),
        (400, False, Outcome.REJECTED),
        (404, True, Outcome.REJECTED),
        (408, False, Outcome.FAILED),
        (409, False, Outcome.REJECTED),
        (409, True, Outcome.OVERLOADED),
        (422, False, Outcome.REJECTED),
        (429, False, Outcome.OVERLOADED),
        (500, False, Outcome.FAILED),
        (501, False, Outcome.REJECTED),
        (502, False, Outcome.FAILED),
        (503, False, Outcome.FAILED),
        (503, True, Outcome.OVERLOADED),
        (504, False, Outcome.FAILED),
        (529, False, Outcome.OVERLOADED),
    ],
)
def test_what_a_status_means(status: int, retry_after: bool, outcome: Outcome) -> None:
    assert http_outcome(status, retry_after=retry_after) is outcome


def test_backoff_is_full_jitter_that_doubles_to_its_cap() -> None:
    rules = RetryRules(base=0.1, cap=1.0)
    assert [rules.backoff(n, lambda: 1.0) for n in (1, 2, 3, 4, 5, 2_000)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert rules.backoff(3, lambda: 0.0) == 0.0


@pytest.mark.parametrize("wrong", [{"attempts": 0}, {"base": -1.0}, {"cap": 0.0}, {"max_pause": -1.0}])
def test_retry_rules_that_cannot_work_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="retry rules"):
        RetryRules(**wrong)  # type: ignore[arg-type]


def test_weights_and_names_of_the_stage_itself() -> None:
    assert [one.id for one in endpoints(2)] == ["gpu-0", "gpu-1"]
    assert [one.weight for one in endpoints({"a": 2.0})] == [2.0]
