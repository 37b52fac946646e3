"""What first tokens and bids teach about an endpoint's speed and queue."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gpuroute.core.report import Queue
from gpuroute.core.speed import TELLING_TOKENS, Rate, shrunk

if TYPE_CHECKING:
    from gpuroute.core.report import Report
    from gpuroute.core.state import EndpointState


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


def learn_bid(state: EndpointState, bid: Report, mean_tokens: float) -> None:
    """A bid teaches the backlog of the fleet and the queue of its endpoint, also when it lost or came late."""
    speeds = state.pool.speeds
    queued = bid.queue_tokens(mean_tokens)
    speeds.backlog += 0.02 * (queued - speeds.backlog)
    if state.report is None or bid.at >= state.report.at:
        state.report = bid
