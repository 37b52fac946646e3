"""Is the engine busy, hung, gone, or another one than before? Judged from what it says of itself, sample by sample. Pure.

A hung engine answers `/health` with 200, takes requests and lets them wait; a busy one may be silent for seconds in a
long prefill. What tells them apart is work that stands still: nothing computed, nothing finished, no first token told by
a client, for `hung_after` seconds in which there was work. That more requests wait is no progress.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

HUNG_AFTER_S = 10.0
WOBBLE_S = 2.0
"""Some clients work out the start of their process anew each time, by a clock that is corrected meanwhile."""
SILENT_LIMIT = 4
"""Looks in a row that were connected and not answered."""


class Seen(NamedTuple):
    """One look at a working engine: requests, the counters that only grow, and since when its process runs (seconds since
    1970, 0.0: it does not say)."""

    running: float
    waiting: float
    kv_usage: float
    counters: Mapping[str, float]
    started: float = 0.0

    @property
    def is_new(self) -> bool:
        """It counts what it computes, and that is nothing yet: nothing is cached."""
        work = [self.counters[name] for name in ("prompt_tokens", "generated_tokens", "steps") if name in self.counters]
        return bool(work) and not any(work)


class Health:
    """The verdict so far. Times in seconds of one monotonic clock."""

    def __init__(self, hung_after: float = HUNG_AFTER_S) -> None:
        self.hung_after = hung_after
        self.gone = True
        self.silent = 0
        self.restarts = 0
        self._last: Seen | None = None
        self._progress_at = -math.inf
        self.was_gone = False

    @property
    def has_met(self) -> bool:
        """It has answered before."""
        return self._last is not None

    def answered(self, seen: Seen, now: float, told_at: float = -math.inf) -> bool:
        """The engine answered; `told_at`: when a client last told a first token. True if it is a new process."""
        before = self._last
        restarted = before is not None and (_replaced(before, seen, gone=self.was_gone) or _shrank(before, seen))
        idle = not (seen.running or seen.waiting) or not seen.counters  # who counts nothing cannot be judged
        if before is None or restarted or idle or _moved(before, seen):
            self._progress_at = now
        self._progress_at = max(self._progress_at, told_at)
        self._last, self.gone, self.was_gone, self.silent = seen, False, False, 0
        self.restarts += restarted
        return restarted

    def present(self, now: float) -> None:
        """It answered, and said nothing of its work: neither progress nor a standstill can be seen."""
        self.gone, self.silent = False, 0
        self._progress_at = max(self._progress_at, now)

    def refused(self) -> None:
        """Nothing listens there."""
        self.gone = self.was_gone = True

    def unanswered(self) -> None:
        """Something listens and says nothing."""
        self.silent += 1

    def hung(self, now: float) -> bool:
        """True if it is there and does not work."""
        if self.gone:
            return False
        return self.silent >= SILENT_LIMIT or now - self._progress_at > self.hung_after


def _replaced(before: Seen, seen: Seen, *, gone: bool) -> bool:
    """By its own word, or it was gone meanwhile. A connection that was refused once is no new process if it says so."""
    if before.started and seen.started:
        return abs(seen.started - before.started) > (0.0 if gone else WOBBLE_S)
    return gone


def _shrank(before: Seen, seen: Seen) -> bool:
    """Counters that count from the start are smaller than they were."""
    return any(
        seen.counters.get(name, value) < value for name, value in before.counters.items() if name != "cached_tokens"
    )


def _moved(before: Seen, seen: Seen) -> bool:
    """Anything was computed or finished."""
    if any(seen.counters.get(name) != value for name, value in before.counters.items() if name != "rejected"):
        return True
    return seen.running < before.running or seen.kv_usage != before.kv_usage


class Rates:
    """Tokens per second over the looks in which there was work: smoothed, and the best that was seen of prefill."""

    def __init__(self) -> None:
        self.prefill = 0.0
        self.best_prefill = 0.0
        self.generation = 0.0
        self._at = 0.0
        self._counters: Mapping[str, float] = {}

    def add(self, counters: Mapping[str, float], now: float) -> None:
        """Counters as they are now."""
        seconds, before = now - self._at, self._counters
        self._at, self._counters = now, counters
        if not before or not 0 < seconds < 10:
            return
        prompt = counters.get("prompt_tokens", 0.0) - before.get("prompt_tokens", 0.0)
        output = counters.get("generated_tokens", 0.0) - before.get("generated_tokens", 0.0)
        if prompt > 0:
            self.prefill += 0.2 * (prompt / seconds - self.prefill) if self.prefill else prompt / seconds
            self.best_prefill = max(0.999 * self.best_prefill, prompt / seconds)
        if output > 0:
            self.generation += 0.2 * (output / seconds - self.generation) if self.generation else output / seconds
