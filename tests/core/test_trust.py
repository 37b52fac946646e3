"""Bids that are not kept, and endpoints that give none."""

from __future__ import annotations

import math
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from gpuroute.core.attempt import Attempt
from gpuroute.core.call import Call
from gpuroute.core.candidates import Ask
from gpuroute.core.endpoint import Endpoint
from gpuroute.core.fleet import PoolSpec
from gpuroute.core.hedge import HedgeRules
from gpuroute.core.learning import learn_bid
from gpuroute.core.outcome import Outcome
from gpuroute.core.pool import Pool, PoolRules
from gpuroute.core.report import Report
from gpuroute.core.trust import DOUBT_S, FADE_S, Trust, alarm, overdue, second_opinion, wants_second_opinion

if TYPE_CHECKING:
    from collections.abc import Callable

IDLE = Report(0.0, queued_tokens=0, matched_tokens=10_000)
BUSY = Report(0.0, queued_tokens=20_000, matched_tokens=0)


def make_pool(count: int = 2, random: Callable[[], float] = lambda: 0.3) -> Pool:
    endpoints = tuple(Endpoint(f"gpu-{n}", f"http://gpu-{n}") for n in range(count))
    return Pool(PoolSpec("p", endpoints), PoolRules(policy="predictive"), random=random)


def attempt_of(pool: Pool, now: float, **bids: Report) -> tuple[Call, Attempt]:
    """A call whose candidates, both endpoints, have bid like this."""
    call = Call(pool, now, ask=Ask(tokens=10_000))
    call.ask.bids = {name.replace("_", "-"): bid._replace(at=now) for name, bid in bids.items()}
    return call, call.next_attempt(now)


def test_a_promise_is_the_queue_and_the_prompt_at_the_learned_rate() -> None:
    pool = make_pool()
    _, attempt = attempt_of(pool, 0.0, gpu_0=BUSY, gpu_1=BUSY)
    assert attempt.promised == pytest.approx(30_000 * 50e-6, rel=0.01)
    assert attempt.queued == 20_000


def test_without_a_bid_there_is_no_promise() -> None:
    pool = make_pool()
    call, attempt = attempt_of(pool, 0.0)
    assert attempt.promised is None
    attempt.first_token(5.0)
    assert attempt.state.trust is None
    assert pool.shared.speeds.blind_wait > 0.1
    call.finish(attempt, Outcome.SUCCESS, 6.0)


def test_who_always_says_idle_is_found_out_before_its_first_token() -> None:
    pool = make_pool()
    places = []
    for second in range(10):  # nobody gets a first token
        _, attempt = attempt_of(pool, float(second), gpu_0=IDLE, gpu_1=BUSY)
        places.append(attempt.state.id)
    assert places[0] == "gpu-0"
    assert "gpu-0" not in places[3:], "one call that is overdue outweighs any number of kind words"


def test_a_broken_promise_is_remembered_and_fades() -> None:
    pool = make_pool()
    call, attempt = attempt_of(pool, 0.0, gpu_0=IDLE, gpu_1=BUSY)
    assert attempt.state.id == "gpu-0"
    attempt.first_token(30.0)
    call.finish(attempt, Outcome.SUCCESS, 31.0)
    assert attempt.state.trust.lateness(31.0) == pytest.approx(0.8 * 29.9, rel=0.02)
    assert attempt_of(pool, 31.0, gpu_0=IDLE, gpu_1=BUSY)[1].state.id == "gpu-1"
    late = 31.0 + 8 * FADE_S
    pool.shared.in_flight.clear()
    for state in pool.snapshot.states:
        state.in_flight.clear()
    assert attempt_of(pool, late, gpu_0=IDLE, gpu_1=BUSY)[1].state.id == "gpu-0", "it is tried again"


def test_liars_that_lie_alike_are_not_found_out_one_by_one() -> None:
    pool = make_pool(8, Random(1).random)
    bids = {f"gpu-{n}": IDLE for n in range(4)} | {f"gpu-{n}": BUSY for n in range(4, 8)}
    burnt = []
    for second in range(40):  # four that say "idle" never answer; the others do, in time
        call = Call(pool, float(second), ask=Ask(tokens=10_000))
        chosen = [state.id for state in call.pool.snapshot.picker.candidates(call.ask)]
        if max(chosen) < "gpu-4":
            continue  # nobody to prefer
        call.ask.bids = {name: bids[name]._replace(at=float(second)) for name in chosen}
        attempt = call.next_attempt(float(second))
        if attempt.state.id < "gpu-4":
            burnt.append(attempt.state.id)
        else:
            attempt.first_token(second + 0.5)
            call.finish(attempt, Outcome.SUCCESS, second + 0.6)
    assert len(burnt) <= 2, "the first one is warning enough of the others"


def test_an_idle_fleet_that_is_quick_is_believed() -> None:
    pool = make_pool()
    for second in range(20):
        call, attempt = attempt_of(pool, float(second), gpu_0=IDLE, gpu_1=IDLE)
        attempt.first_token(second + 0.05)
        call.finish(attempt, Outcome.SUCCESS, second + 0.5)
    assert pool.shared.speeds.words.lateness(20.0) == 0.0


def test_a_call_that_was_given_up_says_nothing_more_as_time_goes_by() -> None:
    pool = make_pool()
    call, attempt = attempt_of(pool, 0.0, gpu_0=IDLE, gpu_1=BUSY)
    assert attempt.state.id == "gpu-0"
    call.finish(attempt, Outcome.CANCELLED, 0.02)  # its caller lost interest, long before it was late
    words = pool.shared.speeds.words
    assert [words.lateness(now) for now in (0.03, 30.0, 1_000.0)] == [0.0, 0.0, 0.0]
    assert attempt_of(pool, 30.0, gpu_0=IDLE, gpu_1=BUSY)[1].state.id == "gpu-0"


def test_a_call_that_was_given_up_late_is_held_against_idle_words_and_fades() -> None:
    pool = make_pool()
    call, attempt = attempt_of(pool, 0.0, gpu_0=IDLE, gpu_1=BUSY)
    call.finish(attempt, Outcome.TIMED_OUT, 20.0)
    words = pool.shared.speeds.words
    assert 10.0 < words.lateness(20.0) < 20.0
    assert words.lateness(20.0 + 10 * FADE_S) < 0.01


@pytest.mark.parametrize(
    ("said", "believed"),
    [
        ({"running": 20, "kv_usage": 0.6123}, False),
        ({"running": 20, "kv_usage": round(0.61 * 0xFFFF) / 0xFFFF}, True),  # SGLang rounds to hundredths
        ({"running": 20, "kv_usage": 0.0}, True),  # an engine that does not say what is in use
        ({"running": 0, "kv_usage": 0.0}, True),  # idle
    ],
    ids=str,
)
def test_an_agent_that_says_the_same_for_seconds_while_calls_run_is_not_believed(
    said: dict[str, float], believed: bool
) -> None:
    pool = make_pool()
    state = pool.snapshot.by_id["gpu-0"]
    for second in range(8):  # each second, so that no two of them are far apart
        learn_bid(state, IDLE._replace(at=float(second), **said), 0.0)
    assert (state.trust is None or state.trust.lateness(8.0) <= DOUBT_S) is believed
    other = pool.snapshot.by_id["gpu-1"]
    for second in range(8):
        learn_bid(other, IDLE._replace(at=float(second), running=20, kv_usage=0.5 + second / 1000), 0.0)
    assert other.trust is None, "who moves is believed"
    assert other.report.at == 7.0


@pytest.mark.parametrize(
    ("running", "seconds", "age", "believed"),
    [
        (30, 1.9, 0.0, True),  # agents look twice a second, and a look may be late
        (30, 2.5, 0.0, False),
        (30, 2.5, 1.0, True),  # that look was 1.5 s after the other
        (2, 4.5, 0.0, True),  # two slow calls need not fill a block of the cache for that long
        (2, 5.5, 0.0, False),
    ],
)
def test_the_more_calls_run_the_sooner_an_agent_is_frozen_that_says_the_same(
    running: int, seconds: float, age: float, believed: bool
) -> None:
    state = make_pool().snapshot.by_id["gpu-0"]
    said = IDLE._replace(running=running, kv_usage=0.6123)
    learn_bid(state, said, 0.0)
    learn_bid(state, said._replace(at=seconds, age=age), 0.0)
    assert (state.trust is None) is believed


def test_a_bid_that_is_not_believed_says_nothing_of_the_cache() -> None:
    pool = make_pool()
    state = pool.snapshot.by_id["gpu-0"]
    state.trust = Trust()
    state.trust.learn(0.0, 10.0, 0.0)
    assert state.trust.lateness(0.0) > DOUBT_S
    ask = Ask(tokens=10_000)
    ask.bids = {"gpu-0": IDLE, "gpu-1": IDLE}
    picker = pool.snapshot.picker
    assert picker.uncached(state, ask) == 10_000
    assert picker.uncached(pool.snapshot.by_id["gpu-1"], ask) == 1


def test_kept_promises_cost_nothing() -> None:
    trust = Trust()
    for second in range(10):
        trust.learn(1.0, 1.4, float(second))
    assert trust.lateness(10.0) == 0.0


def test_only_what_waits_and_was_promised_something_is_overdue() -> None:
    state = make_pool().snapshot.states[0]
    waiting, streaming, blind = (Attempt(state, 0.0) for _ in range(3))
    waiting.promised = streaming.promised = 1.0
    streaming.first = 1.0
    assert overdue((streaming, blind), 100.0) == 0.0
    assert overdue((waiting, streaming, blind), 100.0) == pytest.approx(96.9)
    assert overdue((waiting,), 1.0) == 0.0


def test_who_does_not_bid_is_expected_to_be_as_busy_as_the_others() -> None:
    """The waits that a client sees are those of winners; the mean of bids is not."""
    pool = make_pool()
    pool.shared.speeds.backlog = 60_000.0
    assert attempt_of(pool, 0.0, gpu_0=BUSY)[1].state.id == "gpu-0"
    pool = make_pool()
    pool.shared.speeds.backlog = 2_000.0
    assert attempt_of(pool, 0.0, gpu_0=BUSY)[1].state.id == "gpu-1", "and no busier: it is not excluded"


# ------------------------------------------------------------------------------------------ second opinions

AGENT = Report(0.0, running=20, waiting=1, queued_tokens=9_000, kv_usage=0.61, matched_tokens=4_000, source="agent:READY")
ENGINE = Report(0.0, running=22, waiting=2, kv_usage=0.6, source="engine:READY")


def make_asked(**rules: Any) -> Pool:
    endpoints = tuple(Endpoint(f"gpu-{n}", f"http://gpu-{n}", agent=f"udp://10.0.0.{n}:1") for n in range(2))
    return Pool(PoolSpec("p", endpoints), PoolRules(policy="auto", **rules), random=lambda: 0.3)


def test_where_all_is_well_no_engine_is_asked() -> None:
    pool = make_asked()
    state = pool.snapshot.states[0]
    assert not wants_second_opinion(state, 0.0)
    learn_bid(state, AGENT, 0.0)
    assert not wants_second_opinion(state, 1.0)


@pytest.mark.parametrize(
    ("said", "believed"),
    [(AGENT, True), (AGENT._replace(running=0, waiting=0), False), (AGENT._replace(waiting=30), False), (None, False)],
    ids=["agrees", "idle", "busier", "mute"],
)
def test_an_agent_and_its_engine_side_by_side(said: Report | None, believed: bool) -> None:
    state = make_asked().snapshot.states[0]
    counts = second_opinion(state, said, ENGINE, 5.0)
    assert counts is (AGENT if believed else ENGINE)
    assert wants_second_opinion(state, 6.0) is (said is not None and not believed and state.report is not None)
    if said is not None and not believed:
        learn_bid(state, said._replace(at=6.0), 0.0)
        assert wants_second_opinion(state, 6.0), "until they agree again"


def test_who_agrees_with_its_engine_is_believed_again() -> None:
    state = make_asked().snapshot.states[0]
    state.trust = Trust()
    state.trust.learn(0.0, 3.0, 0.0)
    said = [second_opinion(state, AGENT, ENGINE, float(second)) for second in range(6)]
    assert said[0] is ENGINE, "not at once"
    assert said[-1] is AGENT, "but soon, and not in a minute"


def test_once_somebody_was_found_out_everybody_is_checked_once() -> None:
    pool = make_asked()
    liar, other = pool.snapshot.states
    second_opinion(liar, AGENT._replace(running=0, waiting=0), ENGINE, 5.0)
    assert wants_second_opinion(other, 6.0)
    second_opinion(other, AGENT, ENGINE, 6.0)
    assert not wants_second_opinion(other, 7.0)
    alarm(pool.shared.speeds, 30.0)  # another one, in the same minute
    assert not wants_second_opinion(other, 31.0)
    alarm(pool.shared.speeds, 5.0 + FADE_S + 1)
    assert wants_second_opinion(other, 5.0 + FADE_S + 2)
    assert not wants_second_opinion(other, 5.0 + 2 * FADE_S + 2), "nobody has to be reachable for it"


def test_of_an_agent_that_has_not_looked_for_long_the_takes_count_and_the_engine_for_the_rest() -> None:
    pool = make_asked()
    state = pool.snapshot.states[0]
    old = AGENT._replace(age=9.0)
    for second in range(8):
        learn_bid(state, old._replace(at=float(second)), 0.0)
    assert state.trust is None, "it says itself that nothing moves"
    assert wants_second_opinion(state, 8.0)
    counts = second_opinion(state, old, ENGINE._replace(queued_tokens=20_000), 8.0)
    assert (counts.running, counts.waiting, counts.kv_usage) == (22, 2, 0.6)
    assert (counts.queued_tokens, counts.matched_tokens) == (20_000, 4_000)
    assert second_opinion(state, old, ENGINE, 8.0).queued_tokens == 9_000
    assert state.trust is None


def test_an_engine_that_stands_in_is_not_charged_for_its_agent_and_promises_nothing() -> None:
    pool = make_asked()
    for state in pool.snapshot.states:
        state.trust = Trust()
        state.trust.learn(0.0, 10.0, 0.0)
    call = Call(pool, 0.0, ask=Ask(tokens=1_000))
    call.ask.bids = {"gpu-0": ENGINE, "gpu-1": AGENT}
    attempt = call.next_attempt(0.0)
    assert attempt.state.id == "gpu-0"
    assert attempt.promised is None
    attempt.first_token(0.1)
    assert attempt.state.trust.lateness(0.1) > 7.0, "its agent is not forgiven for that"


def test_a_call_whose_promise_is_broken_is_moved_if_reroutes_are_on() -> None:
    pool = make_asked(hedge=HedgeRules(reroute=True))
    call = Call(pool, 0.0, ask=Ask(tokens=1_000))
    call.ask.bids = {"gpu-0": IDLE, "gpu-1": BUSY}
    attempt = call.next_attempt(0.0)
    assert attempt.state.id == "gpu-0"
    due = call.hedge_after(attempt)
    assert 1.0 < due < 2.0
    attempt.promised = 3.0
    assert call.hedge_after(attempt) > due + 8.0, "not before it is broken"
    attempt.promised = 0.001
    for second in range(200):
        pool.arrivals.add(second / 100, 1.0)  # calls that pay for it
    other = call.hedge(due)
    assert other is not None
    assert other.state.id == "gpu-1"
    attempt.finish(Outcome.CANCELLED, due)
    assert attempt.state.trust.lateness(due) > DOUBT_S
    assert wants_second_opinion(other.state, due)
    attempt.whole = True
    assert call.hedge_after(attempt) == math.inf, "nobody sees the first token of an answer in one piece"


@pytest.mark.parametrize(
    ("outcome", "after", "late"),
    [
        (Outcome.TIMED_OUT, 20.0, True),
        (Outcome.CANCELLED, 20.0, True),
        (Outcome.CANCELLED, 0.02, False),
        (Outcome.FAILED, 0.02, False),
    ],
    ids=str,
)
def test_a_call_that_was_given_up_in_vain_is_a_broken_promise(outcome: Outcome, after: float, late: bool) -> None:
    pool = make_asked()
    call = Call(pool, 0.0, ask=Ask(tokens=1_000))
    call.ask.bids = {"gpu-0": AGENT._replace(queued_tokens=0), "gpu-1": BUSY}
    attempt = call.next_attempt(0.0)
    assert attempt.state.id == "gpu-0"
    call.finish(attempt, outcome, after)
    assert (attempt.state.trust is not None and attempt.state.trust.lateness(after) > DOUBT_S) is late
