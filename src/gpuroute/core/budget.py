"""One retry budget per pool: what retries and hedges may add to the load, whatever goes wrong.

Attempts alone do not bound a storm: three attempts against a dead fleet are three times the load. A budget bounds the
ratio instead (Finagle's RetryBudget: 20 % of the calls in the last 10 s, plus a floor so that quiet clients may retry).
It is withdrawn when a retry is *scheduled*, so that waiting retries cannot all fire at once.
"""

from __future__ import annotations

from gpuroute.errors import ConfigError

SECONDS = 64
ROUNDING = 1e-9  # ten deposits of a tenth pay for one


class Recent:
    """Sums of the last minute, by second: adding is one store, so that a call which needs no budget pays for none.

    Calls do what `add` does by themselves. Not locked: an addition that gets lost under a race is one call that earned
    nothing.
    """

    __slots__ = ("_second", "_sums", "sum", "until")

    def __init__(self) -> None:
        self.sum = 0.0  # of the present second
        self.until = 1.0  # when that is over
        self._second = 0
        self._sums = [0.0] * SECONDS

    def add(self, now: float, amount: float) -> None:
        """Count `amount`; a clock that stepped back counts for the latest second."""
        if now >= self.until:
            self.pass_to(now)
        self.sum += amount

    def within(self, now: float, seconds: int) -> float:
        """The sum of the present second and those before it, `seconds` in all (at most 64)."""
        self.add(now, 0.0)
        # Summed afresh: subtracting what expires would let rounding errors drift for ever.
        end, sums = self._second % SECONDS + 1, self._sums
        start = end - seconds
        return self.sum + (sum(sums[start:end]) if start >= 0 else sum(sums[:end]) + sum(sums[start:]))

    def pass_to(self, now: float) -> None:
        """Begin the second of this moment."""
        second, amount, self.sum = int(now), self.sum, 0.0
        self._sums[self._second % SECONDS] += amount
        # A long idle gap clears each second once, not once per elapsed second.
        for passed in range(self._second + 1, min(second, self._second + SECONDS) + 1):
            self._sums[passed % SECONDS] = 0.0
        self._second, self.until = second, second + 1.0


class Budget:
    """A sliding window of deposits and withdrawals, in calls (or tokens: any one unit).

    `ratio` of what was deposited, plus `floor` per second, over `window` whole seconds. Budgets of one pool share their
    `deposits`. The caller locks withdrawals.
    """

    __slots__ = ("_withdrawals", "deposits", "floor", "ratio", "window")

    def __init__(self, ratio: float = 0.2, floor: float = 10.0, window: int = 10, deposits: Recent | None = None) -> None:
        if not 0 <= ratio <= 10 or floor < 0 or not 0 < window <= SECONDS:
            raise ConfigError(
                f"retry budget: need 0 <= ratio <= 10, floor >= 0, 0 < window <= {SECONDS};"
                f" got {ratio}, {floor}, {window}"
            )
        self.ratio = ratio
        self.floor = floor
        self.window = window
        self.deposits = Recent() if deposits is None else deposits
        self._withdrawals = Recent()

    def deposit(self, now: float, amount: float = 1.0) -> None:
        """Count a new call."""
        self.deposits.add(now, amount)

    def try_withdraw(self, now: float, amount: float = 1.0) -> bool:
        """Take `amount` for an extra attempt, or leave everything as it is and return False."""
        if self.balance(now) < amount - ROUNDING:
            return False
        self._withdrawals.add(now, amount)
        return True

    def balance(self, now: float) -> float:
        """What could be withdrawn now; never negative."""
        earned = self.ratio * self.deposits.within(now, self.window) + self.floor * self.window
        return max(0.0, earned - self._withdrawals.within(now, self.window))
