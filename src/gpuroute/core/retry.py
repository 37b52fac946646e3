"""Backoff of our own: full jitter, with chance injected.

`random() * min(cap, base * 2**n)` (AWS, "Exponential Backoff and Jitter", 2015). tenacity's jitter reads the process-wide
random source, which would break the simulator's byte-identical runs; see docs/decisions.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuroute.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class RetryRules:
    """How often and how far apart. `attempts` counts the first one too; times in seconds.

    `max_pause` clips what a server may ask for by Retry-After; `overload_pause` is used when it names no time.
    """

    attempts: int = 3
    base: float = 0.025
    cap: float = 1.0
    max_pause: float = 60.0
    overload_pause: float = 0.25

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.base < 0 or self.cap < self.base or self.max_pause < 0:
            raise ConfigError(f"retry rules: need attempts >= 1, 0 <= base <= cap, max_pause >= 0; got {self!r}")

    def backoff(self, failures: int, random: Callable[[], float]) -> float:
        """Seconds to wait after `failures` (>= 1) failed attempts."""
        return random() * min(self.cap, self.base * 2.0 ** min(failures - 1, 30))

    def pause(self, retry_after: float | None, random: Callable[[], float]) -> float:
        """Seconds for which an overloaded endpoint gets nothing new."""
        if retry_after is None or math.isnan(retry_after):
            return self.overload_pause * (0.5 + random())
        return min(max(retry_after, 0.0), self.max_pause)
