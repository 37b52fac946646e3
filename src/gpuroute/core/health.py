"""What active health checks may decide: hysteresis, and never against live traffic.

A check sees whether an engine's front answers, not whether its GPU works (a hung engine says 200), and from here only,
not for others. So it takes three failures in a row to take an endpoint out, within the cap of ejections, two successes to
bring it back on the ramp, and whatever served a call between two checks is not sick, whatever the check says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuroute.core.ramp import start_ramp
from gpuroute.core.state import EJECTION
from gpuroute.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuroute.core.pool import Pool
    from gpuroute.core.state import EndpointState


@dataclass(frozen=True, slots=True)
class HealthRules:
    """Every `interval_s`, +-`jitter` of it; `fall` failures in a row take out, `rise` successes bring back."""

    interval_s: float = 5.0
    timeout_s: float = 1.0
    jitter: float = 0.2
    fall: int = 3
    rise: int = 2

    def __post_init__(self) -> None:
        if self.interval_s <= 0 or self.timeout_s <= 0 or not 0 <= self.jitter < 1 or min(self.fall, self.rise) < 1:
            raise ConfigError(
                f"health rules: need interval_s > 0, timeout_s > 0, 0 <= jitter < 1, counts >= 1; got {self!r}"
            )


class Checked:
    """The checks of one endpoint: when the next is due, and what the last ones said. One thread."""

    __slots__ = ("_failures", "_served", "_successes", "_until", "due_at", "ejected", "rules")

    def __init__(self, rules: HealthRules, now: float, random: Callable[[], float]) -> None:
        self.rules = rules
        self.due_at = now + rules.interval_s * random()  # a thousand clients must not ask in step
        self.ejected = False
        self._failures = 0
        self._successes = 0
        self._served = -1
        self._until = -math.inf  # of the ejection by checks

    def begin(self, now: float, random: Callable[[], float]) -> None:
        """A check starts; note when the next is due."""
        spread = 1 + self.rules.jitter * (2 * random() - 1)
        self.due_at = now + self.rules.interval_s * spread

    def ended(self, pool: Pool, state: EndpointState, now: float, *, well: bool) -> None:
        """A check answered: count, and take the endpoint out or back when it is time."""
        served, before = state.served - state.failed, self._served
        self._served = served
        alive = well or 0 <= before < served
        self._failures = 0 if alive else self._failures + 1
        self._successes = self._successes + 1 if alive else 0
        if self._failures >= self.rules.fall:
            self._take_out(pool, state, now)
        elif self.ejected and self._successes >= self.rules.rise:
            self.ejected = False
            if self._is_out(state):
                state.set_cap(EJECTION, math.inf)
                start_ramp(state, now)

    def _is_out(self, state: EndpointState) -> bool:
        """True if it is out by the checks, and not by now for something else."""
        return state.until.get(EJECTION) == self._until

    def _take_out(self, pool: Pool, state: EndpointState, now: float) -> None:
        """Out for as long as checks go on failing; the cap on ejections holds for checks as for everything."""
        seconds = self.rules.interval_s * (self.rules.fall + 1)
        with pool.lock:
            if self.ejected and self._is_out(state):
                state.set_cap(EJECTION, 0, now + seconds)
            else:
                self.ejected = pool.outliers.eject(state, pool.snapshot.routable, pool.shared, now, seconds)
            if self.ejected:
                self._until = state.until.get(EJECTION, -math.inf)
