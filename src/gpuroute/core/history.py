"""What is normal for an endpoint, kept in the log domain: a typical value and how far it strays.

Times of inference spread over orders of magnitude, so means and deviations of the values themselves are ruled by the
last outlier; of their logarithms they are not, and "ten times the usual" is one subtraction.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuroute.core.attempt import Attempt
    from gpuroute.core.state import EndpointState

SPREAD_FLOOR = 0.25  # e^0.25: even a steady endpoint varies by a quarter
ENOUGH = 20  # below that many samples nothing is called abnormal


class LogMean:
    """An EWMA of log(value) and of its absolute deviation; the first samples weigh equally. O(1), not locked."""

    __slots__ = ("_even", "alpha", "count", "mean", "spread")

    def __init__(self, alpha: float = 0.05) -> None:
        self.alpha = alpha
        self._even = 1.0 / alpha  # so many samples weigh alike
        self.count = 0
        self.mean = 0.0
        self.spread = 1.0

    def add(self, value: float) -> None:
        """Learn one sample (> 0; anything else is ignored)."""
        if 0 < value < math.inf:
            self.add_log(math.log(value))

    def add_log(self, log: float) -> None:
        """Learn one sample by its logarithm."""
        self.add_logs((log,))

    def add_logs(self, logs: Iterable[float]) -> None:
        """Learn samples by their logarithms, in this order."""
        count, mean, spread, alpha, even = self.count, self.mean, self.spread, self.alpha, self._even
        for log in logs:
            count += 1
            step = alpha if count > even else 1.0 / count
            off = log - mean
            mean += step * off
            if count > 1:
                spread += step * (abs(off) - spread)
        self.count, self.mean, self.spread = count, mean, spread

    @property
    def typical(self) -> float:
        """The geometric mean; 0 before the first sample."""
        return math.exp(self.mean) if self.count else 0.0

    def high(self, spreads: float = 4.0) -> float:
        """A value that is rarely exceeded (4 mean absolute deviations: about the p99.9 of a log-normal)."""
        if self.count < ENOUGH:
            return math.inf
        return math.exp(self.mean + spreads * max(self.spread, SPREAD_FLOOR))


class History:
    """Normal times of one endpoint or pool: `ttft` per unit of prompt, `whole` answers, `gap` between chunks; seconds."""

    __slots__ = ("gap", "ttft", "whole")

    def __init__(self) -> None:
        self.ttft = LogMean()
        self.whole = LogMean()
        self.gap = LogMean(0.01)


def learn_first_byte(state: EndpointState, attempt: Attempt, seconds: float) -> None:
    """The time to a first byte, for an endpoint and its pool."""
    if not 0 < seconds < math.inf:
        return
    own, common = state.history, state.pool.known
    if own is None:
        own = state.history = History()
    if attempt.whole:
        log = math.log(seconds)
        own.whole.add_log(log)
        common.whole.add_log(log)
    else:
        log = math.log(seconds / prompt_units(attempt.tokens))
        own.ttft.add_log(log)
        common.ttft.add_log(log)


def learn_wholes(state: EndpointState, times: Iterable[float]) -> None:
    """The times of several answers that each came in one piece."""
    if state.history is None:
        state.history = History()
    logs = [math.log(seconds) for seconds in times if seconds > 0]
    state.history.whole.add_logs(logs)
    state.pool.known.whole.add_logs(logs)


def prompt_units(tokens: int) -> float:
    """How much longer a first token takes for a longer prompt, roughly: one unit, and one per 1,000 tokens."""
    return 1.0 + tokens / 1_000.0
