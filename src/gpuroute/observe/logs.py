"""Log lines under the logger `gpuroute`: a failed attempt is told once per endpoint and reason in ten seconds.

A dead endpoint under load fails a thousand times a second; the line says how many were left out. Records carry their
facts as `record.gpuroute` (a dict). Never bodies, headers or credentials.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from gpuroute.core.attempt import Attempt
    from gpuroute.core.call import Call

LOGGER = logging.getLogger("gpuroute")
EVERY_S = 10.0
MAX_KEYS = 1_000


class RateLimit:
    """Lets one event per key through in `every` seconds and counts the others. Any thread."""

    def __init__(self, every: float = EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._every = every
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[Hashable, tuple[float, int]] = {}

    def admit(self, key: Hashable) -> int | None:
        """How many were left out since the last one that passed; None if this one is left out too."""
        now = self._clock()
        with self._lock:
            opens_at, left_out = self._seen.get(key, (now, 0))
            if now < opens_at:
                self._seen[key] = (opens_at, left_out + 1)
                return None
            if len(self._seen) >= MAX_KEYS:
                self._seen.clear()
            self._seen[key] = (now + self._every, 0)
            return left_out


_limit = RateLimit()


def log_failure(call: Call, attempt: Attempt) -> None:
    """Warn that an attempt failed, unless that was said a moment ago."""
    left_out = _limit.admit((call.pool.name, attempt.endpoint.id, attempt.outcome))
    if left_out is None or not LOGGER.isEnabledFor(logging.WARNING):
        return
    facts = {
        "pool": call.pool.name,
        "endpoint": attempt.endpoint.id,
        "attempt": attempt.number,
        "outcome": str(attempt.outcome),
        "reason": attempt.reason,
        "left_out": left_out,
    }
    more = f" (and {left_out} more since the last line)" if left_out else ""
    LOGGER.warning(
        "pool %s: attempt %d at %s: %s%s",
        facts["pool"], attempt.number, facts["endpoint"], attempt.reason or attempt.outcome, more,
        extra={"gpuroute": facts},
    )  # fmt: skip
