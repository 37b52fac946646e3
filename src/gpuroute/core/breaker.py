"""A circuit breaker for one endpoint: closed -> open -> half_open -> closed.

It trips on consecutive failures, the rule that needs no traffic volume (Finagle's failure accrual: 5), or on the share of
failures in a window of 10 buckets, which sees an endpoint that fails every second call. The open time
doubles with every trip in a row, is jittered so that many clients do not probe in step, and shrinks again by successes,
not by time: an endpoint that nobody calls has not got better. While open its cap is 0; half-open admits `probes` new
attempts beside those that were running when it opened. Those *bystanders* say nothing about what came after, whenever
they end; attempts that panic sends to an open breaker are probes like any other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from gpuroute.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from gpuroute.core.attempt import Attempt

INF = math.inf
BUCKETS = 10


class BreakerState(StrEnum):
    """The three states of the field; *closed* lets calls through."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerRules:
    """`failures` in a row open it for `open_s` seconds, doubling to `max_open_s`, +-`jitter`; `probes` when half open.

    `ratio` of at least `min_calls` within `window_s` opens it too. `forgive`: that many successes halve the next open
    time again. `failures=0` switches the breaker off.
    """

    failures: int = 5
    ratio: float = 0.5
    min_calls: int = 20
    window_s: float = 10.0
    open_s: float = 5.0
    max_open_s: float = 300.0
    jitter: float = 0.2
    probes: int = 1
    forgive: int = 10

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1 or self.min_calls < 1 or self.window_s <= 0:
            raise ConfigError(f"breaker rules: need 0 < ratio <= 1, min_calls >= 1, window_s > 0; got {self!r}")
        if self.failures < 0 or self.probes < 1 or self.open_s <= 0 or self.max_open_s < self.open_s:
            raise ConfigError(f"breaker rules: need failures >= 0, probes >= 1, 0 < open_s <= max_open_s; got {self!r}")


class Window:
    """Calls and failures of the last `BUCKETS` slices of time; long idle gaps cost one pass."""

    __slots__ = ("_calls", "_failures", "_index", "_width")

    def __init__(self, seconds: float) -> None:
        self._width = seconds / BUCKETS
        self._calls = [0] * BUCKETS
        self._failures = [0] * BUCKETS
        self._index = 0

    def add(self, now: float, *, failed: bool) -> None:
        """Count one call."""
        self._roll(now)
        self._calls[self._index % BUCKETS] += 1
        self._failures[self._index % BUCKETS] += failed

    def totals(self, now: float) -> tuple[int, int]:
        """Calls and failures in the window."""
        self._roll(now)
        return sum(self._calls), sum(self._failures)

    def _roll(self, now: float) -> None:
        index = int(now / self._width)
        for passed in range(max(self._index + 1, index - BUCKETS + 1), index + 1):
            self._calls[passed % BUCKETS] = self._failures[passed % BUCKETS] = 0
        self._index = max(self._index, index)


class Breaker:
    """Pure state machine; not locked: the endpoint state calls it under its own lock."""

    __slots__ = ("bystanders", "failures", "reopen_at", "rules", "state", "successes", "trips", "window")

    def __init__(self, rules: BreakerRules) -> None:
        self.rules = rules
        self.state = BreakerState.CLOSED
        self.failures = 0
        self.successes = 0
        self.trips = 0
        self.reopen_at = INF
        self.bystanders: set[Attempt] = set()
        self.window: Window | None = None  # exists from the first failure until none is left in it

    @property
    def troubled(self) -> bool:
        """True while successes still change something."""
        return self.state is not BreakerState.CLOSED or bool(self.trips or self.failures or self.window)

    def succeeded(self, attempt: Attempt, now: float) -> None:
        """A success: closes an open or half-open breaker if it was a probe, else forgives past trips one by one."""
        if attempt in self.bystanders:
            return
        self.state = BreakerState.CLOSED
        self.reopen_at = INF
        self.failures = 0
        self.successes += 1
        if self.window is not None:
            self.window.add(now, failed=False)
            if not self.window.totals(now)[1]:
                self.window = None
        if self.trips and self.successes >= self.rules.forgive:
            self.successes = 0
            self.trips -= 1

    def failed(
        self,
        attempt: Attempt,
        now: float,
        random: Callable[[], float],
        in_flight: Collection[Attempt] = (),
        missed: int = 0,
    ) -> None:
        """A failure: may open it. `in_flight`: the endpoint's other attempts, which then become bystanders; `missed`: how
        often in a row its host could not be reached, by other pools too."""
        if attempt in self.bystanders:
            return
        self.successes = 0
        if self.state is BreakerState.OPEN or not self.rules.failures:
            return
        if self.state is BreakerState.HALF_OPEN:
            self._open(now, random, in_flight)
            return
        self.failures += 1
        if self.window is None:
            self.window = Window(self.rules.window_s)
        self.window.add(now, failed=True)
        calls, failures = self.window.totals(now)
        if max(self.failures, missed) >= self.rules.failures or self._mostly_fails(calls, failures):
            self._open(now, random, in_flight)

    def tick(self, now: float) -> None:
        """An open time that has passed lets the probes in."""
        if self.state is BreakerState.OPEN and now >= self.reopen_at:
            self.state = BreakerState.HALF_OPEN
            self.reopen_at = INF

    def cap(self, in_flight: Collection[Attempt]) -> float:
        """How many attempts the breaker allows in flight, given those that are."""
        if self.state is BreakerState.CLOSED:
            return INF
        if self.state is BreakerState.OPEN:
            return 0
        return self.rules.probes + len(self.bystanders.intersection(tuple(in_flight)))

    def _mostly_fails(self, calls: int, failures: int) -> bool:
        return calls >= self.rules.min_calls and failures >= self.rules.ratio * calls

    def _open(self, now: float, random: Callable[[], float], in_flight: Collection[Attempt]) -> None:
        rules = self.rules
        spread = 1 + rules.jitter * (2 * random() - 1)
        self.state = BreakerState.OPEN
        self.reopen_at = now + min(rules.open_s * 2.0**self.trips, rules.max_open_s) * spread
        self.trips = min(self.trips + 1, 30)
        self.failures = 0
        self.window = None
        self.bystanders = set(in_flight)
