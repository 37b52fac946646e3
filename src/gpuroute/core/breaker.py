"""A circuit breaker for one endpoint: closed -> open -> half_open -> closed.

It trips on consecutive failures, the rule that needs no traffic volume (Finagle's failure accrual: 5). The open time
doubles with every trip in a row, is jittered so that many clients do not probe in step, and shrinks again by successes,
not by time: an endpoint that nobody calls has not got better. While open its cap is 0; half-open admits `probes` new
attempts beside those that were already running.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from gpuroute.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gpuroute.core.attempt import Attempt

INF = math.inf


class BreakerState(StrEnum):
    """The three states of the field; *closed* lets calls through."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerRules:
    """`failures` in a row open it for `open_s` seconds, doubling to `max_open_s`, +-`jitter`; `probes` when half open.

    `forgive`: that many successes in a row halve the next open time again. `failures=0` switches the breaker off.
    """

    failures: int = 5
    open_s: float = 5.0
    max_open_s: float = 300.0
    jitter: float = 0.2
    probes: int = 1
    forgive: int = 10

    def __post_init__(self) -> None:
        if self.failures < 0 or self.probes < 1 or self.open_s <= 0 or self.max_open_s < self.open_s:
            raise ConfigError(f"breaker rules: need failures >= 0, probes >= 1, 0 < open_s <= max_open_s; got {self!r}")


class Breaker:
    """Pure state machine; not locked: the endpoint state calls it under its own lock."""

    __slots__ = ("failures", "half_open_at", "reopen_at", "rules", "state", "successes", "trips")

    def __init__(self, rules: BreakerRules) -> None:
        self.rules = rules
        self.state = BreakerState.CLOSED
        self.failures = 0
        self.successes = 0
        self.trips = 0
        self.reopen_at = INF
        self.half_open_at = -INF

    def succeeded(self, attempt: Attempt) -> None:
        """A success: closes a half-open breaker if it was a probe, else forgives past trips one by one."""
        if self.state is BreakerState.OPEN:
            return
        if self.state is BreakerState.HALF_OPEN:
            if attempt.started < self.half_open_at:
                return
            self.state = BreakerState.CLOSED
        self.failures = 0
        self.successes += 1
        if self.trips and self.successes >= self.rules.forgive:
            self.successes = 0
            self.trips -= 1

    def failed(self, attempt: Attempt, now: float, random: Callable[[], float]) -> None:
        """A failure: may open it. Attempts older than the current state say nothing new about it."""
        self.successes = 0
        if self.state is BreakerState.OPEN or not self.rules.failures:
            return
        if self.state is BreakerState.HALF_OPEN:
            if attempt.started >= self.half_open_at:
                self._open(now, random)
            return
        self.failures += 1
        if self.failures >= self.rules.failures:
            self._open(now, random)

    def tick(self, now: float) -> None:
        """An open time that has passed lets the probes in."""
        if self.state is BreakerState.OPEN and now >= self.reopen_at:
            self.state = BreakerState.HALF_OPEN
            self.half_open_at = now
            self.reopen_at = INF

    def cap(self, in_flight: Iterable[Attempt]) -> float:
        """How many attempts the breaker allows in flight, given those that are."""
        if self.state is BreakerState.CLOSED:
            return INF
        if self.state is BreakerState.OPEN:
            return 0
        earlier = sum(attempt.started < self.half_open_at for attempt in tuple(in_flight))
        return self.rules.probes + earlier

    def _open(self, now: float, random: Callable[[], float]) -> None:
        rules = self.rules
        spread = 1 + rules.jitter * (2 * random() - 1)
        self.state = BreakerState.OPEN
        self.reopen_at = now + min(rules.open_s * 2.0**self.trips, rules.max_open_s) * spread
        self.trips = min(self.trips + 1, 30)
        self.failures = 0
