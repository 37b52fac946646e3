"""Telling hung from busy: how long silence is normal, per endpoint and pool.

A hung GPU answers `/health` with 200, so only missing progress shows it. An attempt may be silent for as long as its
endpoint (or the pool, whichever is slower) has rarely exceeded before. Two guards keep overload from looking like a hang:
what was waited for in vain is learned as a sample, so the limit grows with the queue; and when a third of the pool is
silent at once (ejected ones apart) the watchdog stands down, because that is saturation. An answer that comes in one
piece is as late as it is long, so it has a history of its own and the wider bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuroute.core.history import prompt_units
from gpuroute.core.state import EJECTION
from gpuroute.errors import ConfigError

if TYPE_CHECKING:
    from gpuroute.core.attempt import Attempt
    from gpuroute.core.state import EndpointState

INF = math.inf
SUSPICIOUS_S = 0.1


@dataclass(frozen=True, slots=True)
class WatchdogRules:
    """`first_spreads` and `gap_spreads`: mean absolute deviations of the logarithm above its mean; floors in seconds.

    4 spreads are about the p99.9 of a log-normal; `gap_spreads` is wider because a cut stream cannot be repeated.
    `eject_after` silent attempts in a row without a first token between them eject for `eject_s`. Whoever nobody would
    take over is waited for at least `last_floor_s`: giving it up is the end of its call.
    """

    enabled: bool = True
    first_spreads: float = 4.0
    first_floor_s: float = 0.5
    gap_spreads: float = 8.0
    gap_floor_s: float = 5.0
    last_floor_s: float = 10.0
    eject_after: int = 2
    eject_s: float = 10.0

    def __post_init__(self) -> None:
        if (
            min(self.first_spreads, self.gap_spreads) <= 0
            or min(self.first_floor_s, self.gap_floor_s, self.last_floor_s) < 0
        ):
            raise ConfigError(f"watchdog rules: spreads must be positive, floors not negative; got {self!r}")
        if self.eject_after < 1 or self.eject_s <= 0:
            raise ConfigError(f"watchdog rules: need eject_after >= 1 and eject_s > 0; got {self!r}")

    def first_byte(self, attempt: Attempt, endpoints: int) -> float:
        """Seconds from the start after which an attempt without a first byte is called hung; infinite: never."""
        state = attempt.state
        silent = sum(EJECTION not in other.caps for other in tuple(state.pool.stalling))
        if not self.enabled or silent > max(1, endpoints // 3):
            return INF
        if attempt.whole:
            return max(self.gap_floor_s, _high(state, "whole", self.gap_spreads))
        usual = _high(state, "ttft", self.first_spreads) * prompt_units(attempt.tokens)
        return max(self.first_floor_s, usual)

    def within(self, attempt: Attempt, seconds: float) -> float:
        """Patience with an attempt for which only `seconds` are left: half of them, if it usually takes less."""
        if attempt.whole:
            usual = _high(attempt.state, "whole", self.first_spreads)
        else:
            usual = _high(attempt.state, "ttft", 0.75 * self.first_spreads) * prompt_units(attempt.tokens)
        return max(self.first_floor_s, seconds / 2, usual)

    def suspects(self, state: EndpointState, now: float) -> bool:
        """True if calls have waited there for longer than is usual, though not yet long enough to give them up.

        Or have waited in vain: that is remembered for `eject_s`, or a quarter of it if one was merely overtaken, and then
        one call may find out.
        """
        since = state.silent_since
        if since is None or now - since < SUSPICIOUS_S or not self.enabled:
            return False
        waiting, history = tuple(state.in_flight), state.pool.history
        waits_for_wholes = bool(waiting) and all(attempt.whole for attempt in waiting)
        usual = (history.whole if waits_for_wholes else history.ttft).high(self.first_spreads / 2)
        remembered = self.eject_s / 4 if 0 < state.stalls < 1 else self.eject_s
        return now - since > usual and (bool(state.in_flight) or now - since < remembered)

    def gap(self, attempt: Attempt) -> float:
        """Seconds of silence within a stream after which it is called stalled; infinite: never."""
        if not self.enabled:
            return INF
        if attempt.state.stalls >= self.eject_after:  # it hangs, and streams cut for that have taught long silences
            return self.gap_floor_s
        return max(self.gap_floor_s, _high(attempt.state, "gap", self.gap_spreads))


def _high(state: EndpointState, kind: str, spreads: float) -> float:
    """What is rarely exceeded at this endpoint or in its pool, whichever is slower; infinite if nothing is known."""
    common: float = getattr(state.pool.history, kind).high(spreads)
    own: float = getattr(state.history, kind).high(spreads) if state.history else INF
    return common if own == INF else max(own, common)
