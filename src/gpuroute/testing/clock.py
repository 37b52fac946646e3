"""Time that a test moves by hand: give it to a Router as `clock` and nothing waits for real seconds."""

from __future__ import annotations

import threading


class FakeClock:
    """A monotonic clock in seconds that only moves when told. Any thread may call it.

    `clock()` reads it; `sleep` and `asleep` are drop-in sleeps that advance it at once.
    """

    __slots__ = ("_lock", "_now", "slept")

    def __init__(self, now: float = 1_000.0) -> None:
        self._now = now
        self._lock = threading.Lock()
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> float:
        """Move forward and return the new time. Raises ValueError for a negative step."""
        if seconds < 0:
            msg = f"a monotonic clock does not go back: advance({seconds})"
            raise ValueError(msg)
        with self._lock:
            self._now += seconds
            return self._now

    def sleep(self, seconds: float) -> None:
        """Advance instead of waiting; what was asked for is kept in `slept`."""
        self.slept.append(seconds)
        self.advance(max(0.0, seconds))

    async def asleep(self, seconds: float) -> None:
        """`sleep` for coroutines: gives other tasks one turn, never waits."""
        import asyncio

        self.sleep(seconds)
        await asyncio.sleep(0)
