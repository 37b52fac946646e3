"""One send of a call to one endpoint: READY -> SENT -> STREAMING -> DONE.

The attempt itself is the lease on the endpoint: while it is a member of `state.in_flight` it counts as load, and leaving
that set is what ends it. So a second release is a no-op and a leak has an owner and an age.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import TYPE_CHECKING

from gpuroute.core.outcome import Outcome
from gpuroute.core.trust import learn_broken

if TYPE_CHECKING:
    from gpuroute.core.endpoint import Endpoint
    from gpuroute.core.predictive import Features, Model
    from gpuroute.core.state import EndpointState


class Phase(IntEnum):
    """How far an attempt got; it only ever rises."""

    READY = 0
    SENT = 1
    STREAMING = 2
    DONE = 3


READY, SENT, STREAMING, DONE = Phase
BATCH = 16  # answers of which nothing was learned yet
INF = math.inf
CANCELLED, SUCCESS = Outcome.CANCELLED, Outcome.SUCCESS


class Attempt:
    """A live or finished send. Times are monotonic seconds. Methods are safe from any thread and never raise.

    `whole`: the answer comes in one piece when all of it is generated, so its first byte says little about the prompt.
    """

    # What is not yet, or what few attempts have, is looked up in the class until it is set.
    number = 1
    tokens = 0
    uncached = 0
    queued = 0.0
    promised: float | None = None
    """Seconds to the first token, by its bid."""
    lesson: tuple[Model, Features] | None = None
    """What its first token teaches `predictive`."""
    whole = False
    reached: Phase = READY
    first: float | None = None
    ended: float | None = None
    outcome: Outcome | None = None
    reason = ""
    misfit = False
    """It failed by its endpoint's record (TLS files, names), which says nothing about the host."""

    def __init__(self, state: EndpointState, now: float, tokens: int = 0) -> None:
        self.state = state
        self.started = self.last = now
        if tokens > 0:
            self.tokens = self.uncached = tokens

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint this attempt goes to."""
        return self.state.endpoint

    @property
    def phase(self) -> Phase:
        """How far it is; `reached` says how far it got before it was done."""
        return self.reached if self.outcome is None else DONE

    def sent(self, now: float) -> None:  # noqa: ARG002
        """The request has been written completely: the endpoint may be acting on it."""
        if self.phase is READY:
            self.reached = SENT

    def awaited(self, now: float) -> None:
        """Its first byte is waited for: the endpoint's silence counts from now on, if it does not already."""
        if self.state.silent_since is None or len(self.state.in_flight) < 2:
            self.state.silent_since = now

    def first_token(self, now: float) -> None:
        """The first byte of the answer has been handed to the caller: this attempt cannot be repeated."""
        if self.phase < STREAMING:
            self.reached = STREAMING
            self.first = self.last = now
            state = self.state
            state.silent_since = now if state.in_flight else None
            state.first_token(self, now)

    def chunk(self, now: float) -> None:
        """One more piece of a stream reached the caller."""
        self.state.chunk(now - self.last)
        self.state.alive(now)
        self.last = now

    def finish(self, outcome: Outcome, now: float, reason: str = "") -> bool:
        """Leave the endpoint and teach it; False if this attempt was finished before."""
        state = self.state
        in_flight = state.in_flight
        try:
            in_flight.remove(self)
        except KeyError:
            return False
        state.pool.in_flight.discard(self)
        if outcome.health > 0 or (outcome.health == 0 and not in_flight and not self._unheard(outcome)):
            state.silent_since = now if in_flight else None
        self.outcome = outcome
        self.ended = now
        if reason:
            self.reason = reason
        if self.first is None and self.promised is not None and outcome is not SUCCESS:
            learn_broken(self, now)
        state.teach(self, outcome, now)
        return True

    def succeed(self, now: float) -> bool:
        """The whole answer is here, at once: `first_token` and `finish(SUCCESS)` in one step."""
        state = self.state
        pool = state.pool
        if (
            (pool.ranks or state.troubled or state.stalls or not self.whole)  # somebody wants to know at once
            or state.limit != INF
            or state.ramp_at is not None
        ):
            self.first_token(now)
            return self.finish(SUCCESS, now)
        try:
            state.in_flight.remove(self)
        except KeyError:
            return False
        pool.in_flight.discard(self)
        state.silent_since = now if state.in_flight else None
        self.outcome = SUCCESS
        self.first = self.ended = now
        state.served += 1
        answered = pool.answered  # what else there is to learn can wait
        answered.append((state, now - self.started))
        if len(answered) >= BATCH:
            pool.learn()
        return True

    def _unheard(self, outcome: Outcome) -> bool:
        """Who is overtaken in silence leaves, and must not take along what makes the next call look twice."""
        return outcome is CANCELLED and self.first is None and self.state.stalls > 0

    def __repr__(self) -> str:
        result = self.outcome.label if self.outcome else self.phase.name.lower()
        return f"<Attempt {self.number} {self.state.id} {result}>"
