"""Telling hung from busy: how long silence is normal, per endpoint and pool.

A hung GPU answers `/health` with 200, so only missing progress shows it. An attempt may be silent for as long as its
endpoint (or the pool, whichever is slower) has rarely exceeded before. Two guards keep overload from looking like a hang:
what was waited for in vain is learned as a sample, so the limit grows with the queue; and when a third of the pool is
silent at once the watchdog stands down, because that is saturation. An answer that comes in one piece is as late as it
is long, so it has a history of its own and the wider bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuroute.core.history import prompt_units
from gpuroute.errors import ConfigError

if TYPE_CHECKING:
    from gpuroute.core.attempt import Attempt

INF = math.inf


@dataclass(frozen=True, slots=True)
class WatchdogRules:
    """`first_spreads` and `gap_spreads`: mean absolute deviations of the logarithm above its mean; floors in seconds.

    4 spreads are about the p99.9 of a log-normal; `gap_spreads` is wider because a cut stream cannot be repeated.
    `eject_after` silent attempts in a row without a first token between them eject for `eject_s`.
    """

    enabled: bool = True
    first_spreads: float = 4.0
    first_floor_s: float = 0.5
    gap_spreads: float = 8.0
    gap_floor_s: float = 5.0
    eject_after: int = 2
    eject_s: float = 10.0

    def __post_init__(self) -> None:
        if self.first_spreads <= 0 or self.gap_spreads <= 0 or self.first_floor_s < 0 or self.gap_floor_s < 0:
            raise ConfigError(f"watchdog rules: spreads must be positive, floors not negative; got {self!r}")
        if self.eject_after < 1 or self.eject_s <= 0:
            raise ConfigError(f"watchdog rules: need eject_after >= 1 and eject_s > 0; got {self!r}")

    def first_byte(self, attempt: Attempt, endpoints: int) -> float:
        """Seconds from the start after which an attempt without a first byte is called hung; infinite: never."""
        state = attempt.state
        if not self.enabled or len(state.pool.stalling) > max(1, endpoints // 3):
            return INF
        if attempt.whole:
            own = state.history.whole.high(self.gap_spreads) if state.history else INF
            common = state.pool.history.whole.high(self.gap_spreads)
            return max(self.gap_floor_s, common if math.isinf(own) else max(own, common))
        own = state.history.ttft.high(self.first_spreads) if state.history else INF
        common = state.pool.history.ttft.high(self.first_spreads)
        usual = common if math.isinf(own) else max(own, common)
        return max(self.first_floor_s, usual * prompt_units(attempt.tokens))

    def gap(self, attempt: Attempt) -> float:
        """Seconds of silence within a stream after which it is called stalled; infinite: never."""
        if not self.enabled:
            return INF
        state = attempt.state
        own = state.history.gap.high(self.gap_spreads) if state.history else INF
        common = state.pool.history.gap.high(self.gap_spreads)
        return max(self.gap_floor_s, common if math.isinf(own) else max(own, common))
