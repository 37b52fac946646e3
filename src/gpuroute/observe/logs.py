"""Log lines under the logger `gpuroute`: a failed attempt is told once per endpoint and outcome in ten seconds.

A dead endpoint under load fails a thousand times a second; the line says how many were left out. Of a whole fleet that
is ill, two hundred are named in that time. Records carry their facts as `record.gpuroute` (a dict). Never bodies, headers
or credentials.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from gpuroute.core.attempt import Attempt
    from gpuroute.core.call import Call

LOGGER = logging.getLogger("gpuroute")
EVERY_S = 10.0
MAX_KEYS = 200
_OTHERS = object()
_limits: weakref.WeakSet[RateLimit] = weakref.WeakSet()


class RateLimit:
    """Lets one event per key through in `every` seconds, for `MAX_KEYS` keys and one of all others, and counts what it
    leaves out. Any thread."""

    def __init__(self, every: float = EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._every = every
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[Hashable, tuple[float, int]] = {}
        _limits.add(self)

    def admit(self, key: Hashable) -> int | None:
        """How many were left out since the last one that passed; None if this one is left out too."""
        now = self._clock()
        with self._lock:
            if key not in self._seen and len(self._seen) >= MAX_KEYS:
                self._make_room(now)
                key = _OTHERS if len(self._seen) > MAX_KEYS else key
            opens_at, left_out = self._seen.get(key, (now, 0))
            if now < opens_at:
                self._seen[key] = (opens_at, left_out + 1)
                return None
            self._seen[key] = (now + self._every, 0)
            return left_out

    def _make_room(self, now: float) -> None:
        """Forget the keys that may speak again; what they left out is told with the next of the others."""
        opens_at, left_out = self._seen.pop(_OTHERS, (now, 0))
        if now >= opens_at:
            left_out += sum(count for moment, count in self._seen.values() if now >= moment)
            self._seen = {key: entry for key, entry in self._seen.items() if now < entry[0]}
        self._seen[_OTHERS] = (opens_at, left_out)


def _renew_locks() -> None:
    """In a forked child: a thread of the parent may have held one."""
    for limit in _limits:
        limit._lock = threading.Lock()  # noqa: SLF001


_limit = RateLimit()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)


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
