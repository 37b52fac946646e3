"""What first tokens and bids teach about an endpoint's speed and queue."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gpuroute.core.report import Queue
from gpuroute.core.speed import TELLING_TOKENS, Rate, shrunk
from gpuroute.core.trust import Trust, learn_blind

LATENCY_FADE_S = 10.0  # what was slow or failed, and has had no call since, is tried again within some tens of seconds
WORST = math.log(60.0)  # a failure counts as slower each time, up to this

if TYPE_CHECKING:
    from gpuroute.core.attempt import Attempt
    from gpuroute.core.report import Report
    from gpuroute.core.state import EndpointState


def learn_promise(state: EndpointState, attempt: Attempt, now: float) -> None:
    """A first token came at the time that a bid had promised, or later; or there was no bid."""
    seconds = now - attempt.started
    if attempt.promised is None:
        speeds = state.pool.speeds
        learn_blind(speeds, max(0.0, seconds - attempt.uncached * shrunk(state.speed, speeds.cohort(state.endpoint))))
        return
    if state.trust is None:
        state.trust = Trust()
    state.trust.learn(attempt.promised, seconds, now)


def learn_first_token(state: EndpointState, uncached: int, queued: float, seconds: float, now: float) -> None:
    """A first token after `seconds`: teaches the rate (if the queue ahead was known or short) and the wait."""
    speeds = state.pool.speeds
    cohort = speeds.cohort(state.endpoint)
    if state.speed is None:
        state.speed = Rate(math.exp(cohort.log))
    work = max(1.0, uncached + queued)
    weight = min(1.0, work / TELLING_TOKENS)
    state.speed.learn(seconds / work, weight)
    cohort.learn(seconds / work, weight)
    wait = max(0.0, seconds - uncached * shrunk(state.speed, cohort))
    if state.queue is None:
        state.queue = Queue()
    state.queue.learn(wait, now)
    speeds.waited(wait)


def learn_latency(state: EndpointState, seconds: float, now: float, *, failed: bool) -> None:
    """Peak EWMA: up at once, down slowly with samples, and with time. A failure is never fast: it counts as slower."""
    usual = state.latency - (now - state.latency_at) / LATENCY_FADE_S
    log = math.log(max(seconds, 1e-6))
    if failed:
        log = max(log, min(usual + 1.0, WORST), 0.0)
    state.latency = log if log >= usual else usual + 0.1 * (log - usual)
    state.latency_at = now


def learn_bid(state: EndpointState, bid: Report, mean_tokens: float) -> None:
    """A bid teaches the backlog of the fleet and the queue of its endpoint, also when it lost or came late."""
    speeds = state.pool.speeds
    queued = bid.queue_tokens(mean_tokens)
    speeds.backlog += 0.02 * (queued - speeds.backlog)
    if state.report is None or bid.at >= state.report.at:
        state.report = bid
