"""Slow start: what is new, was long away or has just recovered looks dear at first, and less so call by call.

Cold caches and lazy kernels make its first calls slow, and a burst would crash it (TensorFlow Serving and Triton warm up
within 50-100 passes). The ramp multiplies the cost, it does not cap: when the others are worse, a cold one still helps.
Seconds times ten would never win, so policies that compare seconds take the ramp as a chance: at three tenths of it, an
endpoint is compared as what it is by three calls in ten, and as ten times dearer by the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuroute.core.report import Queue

if TYPE_CHECKING:
    from gpuroute.core.state import EndpointState

RAMP_S, RAMP_CALLS, RAMP_FLOOR = 30.0, 50, 0.1


def start_ramp(state: EndpointState, now: float) -> None:
    """Begin at a tenth of the weight."""
    if state.endpoint.takes_calls:
        state.ramp_at, state.ramp_from = now, state.served - state.failed
        if not state.served and state.pool.speeds.usual_latency is not None:  # else it would look infinitely fast
            state.latency, state.latency_at = state.pool.speeds.usual_latency, now
        with state.pool.lock:
            state.pool.ramping.add(state)
            state.pool.wake_at = min(state.pool.wake_at, now + 1.0)
        climb(state, now)


def join(state: EndpointState, now: float) -> None:
    """It is new, or came back empty: nothing waits there yet."""
    state.queue = Queue()
    state.queue.learn(0.0, now)
    start_ramp(state, now)


def dearer(state: EndpointState) -> float:
    """The factor of a call's seconds by weight and ramp. While it ramps, chance decides."""
    factor, weight = state.inverse_weight, state.endpoint.weight
    if state.ramp_at is None or weight <= 0:
        return factor
    return 1.0 / weight if state.pool.random() * factor * weight < 1 else factor


def climb(state: EndpointState, now: float) -> None:
    """Rise as time passes and calls are answered, whichever is further."""
    since, weight = state.ramp_at, state.endpoint.weight
    if since is None:
        return
    progress = max((now - since) / RAMP_S, (state.served - state.failed - state.ramp_from) / RAMP_CALLS)
    if weight > 0:  # else it was drained meanwhile
        state.inverse_weight = 1.0 / (weight * min(1.0, max(RAMP_FLOOR, progress)))
    if progress >= 1 or weight <= 0:
        state.ramp_at = None
        state.pool.ramping.discard(state)
