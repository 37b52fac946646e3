"""Whole answers end in one step, and teach what first bytes and ends teach, now or a little later."""

from __future__ import annotations

import math
import threading

import pytest
from stage import Stage

from gpuroute.core.attempt import BATCH, DONE, STREAMING
from gpuroute.core.candidates import NOTHING_ASKED, UNKNOWN_LATENCY
from gpuroute.core.outcome import Outcome


def answer(stage: Stage, seconds: float, *, whole: bool = True) -> None:
    attempt = stage.start()
    attempt.whole = whole
    stage.clock.advance(seconds)
    assert attempt.succeed(stage.clock())


@pytest.mark.parametrize("policy", ["p2c", "auto", "least_latency"])
@pytest.mark.parametrize("answers", [1, BATCH - 1, BATCH, 3 * BATCH + 5])
def test_one_step_or_two_teach_the_same(policy: str, answers: int) -> None:
    times = [0.01 * (1 + number % 7) for number in range(answers)]
    one, two = Stage(2, policy=policy), Stage(2, policy=policy)
    for seconds in times:
        answer(one, seconds)
        attempt = two.start()
        attempt.whole = True
        two.clock.advance(seconds)
        attempt.first_token(two.clock())
        attempt.finish(Outcome.SUCCESS, two.clock())
    for mine, theirs in zip(one.pool.snapshot.states, two.pool.snapshot.states, strict=True):
        assert (mine.served, mine.latency, mine.silent_since) == (theirs.served, theirs.latency, theirs.silent_since)
    ours, theirs_ = one.pool.shared.history.whole, two.pool.shared.history.whole
    assert ours.count == theirs_.count == answers
    assert ours.high() == pytest.approx(theirs_.high(), rel=0.5)  # endpoint by endpoint: in another order
    for mine, theirs in zip(one.pool.snapshot.states, two.pool.snapshot.states, strict=True):
        if mine.history is not None or theirs.history is not None:
            assert mine.history is not None
            assert theirs.history is not None
            assert mine.history.whole.typical == pytest.approx(theirs.history.whole.typical)


def test_what_is_put_off_is_bounded_and_learned_once_somebody_asks() -> None:
    stage = Stage(2)
    for _ in range(5 * BATCH - 1):
        answer(stage, 0.02)
        assert len(stage.pool.shared.answered) < BATCH
    assert stage.pool.shared.known.whole.count == 4 * BATCH
    assert stage.pool.shared.history.whole.count == 5 * BATCH - 1
    assert not stage.pool.shared.answered


def test_an_attempt_succeeds_once() -> None:
    stage = Stage(1)
    attempt = stage.start()
    attempt.whole = True
    assert attempt.succeed(stage.clock())
    assert not attempt.succeed(stage.clock())
    assert not attempt.finish(Outcome.FAILED, stage.clock())
    assert (attempt.outcome, attempt.phase, attempt.state.served) == (Outcome.SUCCESS, DONE, 1)
    assert not stage.pool.shared.in_flight


def test_what_comes_in_pieces_or_ends_a_trouble_is_learned_at_once() -> None:
    stage = Stage(1)
    (state,) = stage.pool.snapshot.states
    answer(stage, 0.02, whole=False)
    assert stage.pool.shared.known.ttft.count == 1
    stage.start().finish(Outcome.FAILED, stage.clock())
    assert state.troubled
    answer(stage, 0.02)
    assert stage.pool.shared.known.whole.count == 1
    state.stalls = 1.0
    answer(stage, 0.02)
    assert state.stalls == 0


def test_latencies_are_learned_where_picks_compare_them() -> None:
    stage = Stage(1)
    (state,) = stage.pool.snapshot.states
    answer(stage, 0.5)
    assert state.latency == UNKNOWN_LATENCY
    stage.rules = type(stage.rules)(policy="least_latency")
    stage.update(1)
    answer(stage, 0.5)
    assert state.latency == pytest.approx(math.log(0.5))


@pytest.mark.parametrize(
    ("policy", "shares"), [("p2c", True), ("session", True), ("auto", False), ("queue_depth", False)]
)
def test_calls_that_say_nothing_share_an_ask_where_picks_note_nothing_in_it(policy: str, shares: bool) -> None:
    stage = Stage(2, policy=policy)
    call, other = stage.call(), stage.call()
    assert (call.ask is other.ask) is shares
    assert (call.ask is NOTHING_ASKED) is shares
    assert (NOTHING_ASKED.now, NOTHING_ASKED.candidates) == (0.0, None)
    call.next_attempt(stage.clock())
    assert (NOTHING_ASKED.now, NOTHING_ASKED.candidates) == (0.0, None)


def test_threads_that_answer_at_once_leave_nothing_in_flight() -> None:
    stage = Stage(3, threads=True)

    def work() -> None:
        for _ in range(300):
            attempt = stage.call().next_attempt(stage.clock())
            attempt.whole = True
            attempt.succeed(stage.clock() + 0.01)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not stage.pool.shared.in_flight
    assert not any(state.in_flight for state in stage.pool.snapshot.states)
    assert stage.pool.shared.history.whole.count > 0
    assert not stage.pool.shared.answered


def test_the_phase_follows_how_far_it_got() -> None:
    attempt = Stage(1).start()
    attempt.first_token(1_000.1)
    assert (attempt.phase, attempt.reached) == (STREAMING, STREAMING)
