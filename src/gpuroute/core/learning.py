"""What first tokens and bids teach about an endpoint's speed and queue."""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING

from gpuroute.core.report import CARRIED, Queue
from gpuroute.core.speed import TELLING_TOKENS, Rate, shrunk
from gpuroute.core.trust import Trust, alarm, learn_blind, learn_usual

CALM_S = 0.1  # a wait below that is none
UNHEARD_S = 5.0  # of who was silent for that long nothing is known
FROZEN_S = 5.0  # an engine that works does not say the same, to a part in 65,535 of its KV cache, for that long
FROZEN_SOON_S = 2.0  # nor for that long, if
STIRRING_S = 45.0  # its requests ran for so long together: each fills a block of KV cache in 0.2 to 6 s
LATENCY_FADE_S = 10.0  # what was slow or failed, and has had no call since, is tried again within some tens of seconds
SHORTEST_S = 1e-6
WORST = log(60.0)  # a failure counts as slower each time, up to this

if TYPE_CHECKING:
    from gpuroute.core.attempt import Attempt
    from gpuroute.core.report import Report
    from gpuroute.core.state import EndpointState


def learn_attempt(state: EndpointState, attempt: Attempt, now: float) -> None:
    """An attempt's first token: teaches what `learn_first_token` says, and how far the bid was true, if there was one."""
    seconds = now - attempt.started - state.way  # the way there is known, and no work
    wait = learn_first_token(state, attempt.uncached, attempt.queued, seconds, now, blind=attempt.promised is None)
    if attempt.promised is None:
        learn_blind(state.pool.speeds, wait)
        return
    if state.trust is None:
        state.trust = Trust()
    state.trust.learn(attempt.promised, seconds, now)
    state.pool.speeds.words.learn(attempt, attempt.promised, seconds, now)
    learn_usual(state.pool.speeds, attempt.promised, seconds, now)


def learn_first_token(
    state: EndpointState, uncached: int, queued: float, seconds: float, now: float, *, blind: bool = True
) -> float:
    """A first token after `seconds`: teaches the rate (if the queue ahead was known or short) and the wait it returns.
    `blind`: it was chosen without a bid."""
    speeds, cohort = state.pool.speeds, state.cohort
    if state.speed is None:
        state.speed = Rate(cohort.seconds)
    work = uncached + queued
    if work < 1.0:
        work = 1.0
    if seconds > 0:
        rate, weight = log(seconds / work), work / TELLING_TOKENS if work < TELLING_TOKENS else 1.0
        state.speed.learn(rate, weight)
        cohort.learn(rate, weight)
    wait = seconds - uncached * shrunk(state.speed, cohort)
    if wait < 0.0:
        wait = 0.0
    _learn_wait(state, wait, now - seconds, now, blind=blind)
    speeds.note(state, calm=wait < CALM_S or wait < speeds.mean_wait / 2)
    return wait


def learn_silence(state: EndpointState, started: float, now: float) -> None:
    """A call that began then was moved elsewhere without a first token: the queue there is at least that long."""
    _learn_wait(state, 2 * (now - started), started, now, blind=True)
    state.pool.speeds.note(state, calm=False)


def _learn_wait(state: EndpointState, wait: float, started: float, now: float, *, blind: bool) -> None:
    if state.queue is None:
        state.queue = Queue()
    # Only a blind choice shows what waits where nothing is known: those to calm endpoints would make it look short.
    if blind and started - state.queue.at > UNHEARD_S:
        state.pool.speeds.waited(wait)
    state.queue.learn(wait, now)


def learn_latency(state: EndpointState, seconds: float, now: float, *, failed: bool) -> None:
    """Peak EWMA: up at once, down slowly with samples, and with time. A failure is never fast: it counts as slower."""
    usual = state.latency - (now - state.latency_at) / LATENCY_FADE_S
    if seconds < SHORTEST_S:  # a `max` costs 100 ns
        seconds = SHORTEST_S
    found = log(seconds)
    if failed:
        found = max(found, min(usual + 1.0, WORST), 0.0)
    state.latency = found if found >= usual else usual + 0.1 * (found - usual)
    state.latency_at = now
    speeds = state.pool.speeds
    common = speeds.usual_latency
    speeds.usual_latency = found if common is None else common + 0.02 * (found - common)


def learn_bid(state: EndpointState, bid: Report, mean_tokens: float) -> None:
    """A bid teaches the backlog of the fleet and the queue of its endpoint, also when it lost or came late."""
    at, running, waiting, queued, kv_usage, _, _, _, source = bid
    speeds, last, agent = state.pool.speeds, state.report, state.endpoint.agent
    if agent and source != CARRIED:
        speeds.bids += 1
    speeds.backlog += 0.02 * ((queued if queued >= 0 else waiting * mean_tokens) - speeds.backlog)
    speeds.mean_requests += 0.02 * (running + waiting - speeds.mean_requests)
    if running and last is not None and bid[1:5] == last[1:5] and not bid.is_old and _is_fine(kv_usage):
        if _is_frozen(running, at - bid.age - (last.at - last.age)):
            state.trust = state.trust or Trust()
            state.trust.doubt(at)
            alarm(speeds, at)
        return  # the same again is no news
    if last is None or at >= last.at:
        state.report = bid
        if not agent:  # bids come by the hundred: they would leave no room for those that give none
            speeds.note(state, calm=not waiting)


def _is_frozen(running: int, seconds: float) -> bool:
    """True if so many requests cannot have run for that long without changing what the engine counts."""
    return seconds > FROZEN_S or (seconds > FROZEN_SOON_S and running * seconds > STIRRING_S)


def _is_fine(share: float) -> bool:
    """True if a share says more than whole hundredths: SGLang rounds to them, and says the same for minutes at work."""
    hundredths = 100 * share
    return abs(hundredths - round(hundredths)) > 0.001
