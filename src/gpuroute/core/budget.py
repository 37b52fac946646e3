"""One retry budget per pool: what retries and hedges may add to the load, whatever goes wrong.

Attempts alone do not bound a storm: three attempts against a dead fleet are three times the load. A budget bounds the
ratio instead (Finagle's RetryBudget: 20 % of the calls in the last 10 s, plus a floor so that quiet clients may retry).
It is withdrawn when a retry is *scheduled*, so that waiting retries cannot all fire at once.
"""

from __future__ import annotations

from gpuroute.errors import ConfigError

BUCKETS = 10
ROUNDING = 1e-9  # ten deposits of a tenth pay for one


class Budget:
    """A sliding window of deposits and withdrawals, in calls (or tokens: any one unit).

    `ratio` of what was deposited, plus `floor` per second, over `window` seconds. The caller locks.
    """

    __slots__ = ("_balance", "_index", "_sums", "_width", "floor", "ratio", "window")

    def __init__(self, ratio: float = 0.2, floor: float = 10.0, window: float = 10.0) -> None:
        if not 0 <= ratio <= 10 or floor < 0 or window <= 0:
            raise ConfigError(
                f"retry budget: need 0 <= ratio <= 10, floor >= 0, window > 0; got {ratio}, {floor}, {window}"
            )
        self.ratio = ratio
        self.floor = floor
        self.window = window
        self._width = window / BUCKETS
        self._sums = [0.0] * BUCKETS
        self._index = 0
        self._balance = 0.0

    def deposit(self, now: float, amount: float = 1.0) -> None:
        """Count a new call."""
        self._add(now, self.ratio * amount)

    def try_withdraw(self, now: float, amount: float = 1.0) -> bool:
        """Take `amount` for an extra attempt, or leave everything as it is and return False."""
        if self.balance(now) < amount - ROUNDING:
            return False
        self._add(now, -amount)
        return True

    def balance(self, now: float) -> float:
        """What could be withdrawn now; never negative. Forgets what has left the window, so it needs the lock too."""
        self._roll(now)
        return max(0.0, self._balance + self.floor * self.window)

    def _add(self, now: float, amount: float) -> None:
        self._roll(now)
        self._sums[self._index % BUCKETS] += amount
        self._balance += amount

    def _roll(self, now: float) -> None:
        index = int(now / self._width)
        if index <= self._index:
            return
        # A long idle gap clears each bucket once, not once per elapsed bucket.
        for passed in range(self._index + 1, min(index, self._index + BUCKETS) + 1):
            self._sums[passed % BUCKETS] = 0.0
        self._index = index
        # Summed afresh: subtracting expired buckets would let rounding errors drift for ever.
        self._balance = sum(self._sums)
