"""What an endpoint's server said of itself, when, and how much that still says.

Load is `report (at time t) + own work sent since t`. A report ages: what it says beyond the pool's mean fades, because
queues mix, and past `MAX_AGE_S` it is absent: never zero and never "full" (case L7). An answer to an ask (a bid) is the
same thing, fresh, plus how many of this prompt's tokens are cached there.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from gpuroute.core.attempt import Attempt

FADE_S = 10.0  # a queue behind a full KV cache lasts as long as an answer: some ten seconds, not one
MAX_AGE_S = 10.0
OLD_S = 2.0  # agents look twice a second, and wait that long for an answer
CARRIED = "orca"  # the source of what came with an answer, unasked


class Report(NamedTuple):
    """Server truth. `queued_tokens`: prompt tokens waiting for prefill; -1 where the server only counts requests.

    `matched_tokens`: of the prompt that was asked about, -1 if unknown. `epoch` changes when the engine restarts.
    `age`: of the engine's own counts in a bid, in seconds; past `OLD_S` an agent goes by what clients told it since.
    """

    at: float
    running: int = 0
    waiting: int = 0
    queued_tokens: int = -1
    kv_usage: float = 0.0
    matched_tokens: int = -1
    epoch: int = 0
    age: float = 0.0
    source: str = ""

    @property
    def is_old(self) -> bool:
        """True if nobody has looked at the engine for a while."""
        return self.age > OLD_S

    def queue_tokens(self, mean_tokens: float) -> float:
        """Prompt tokens ahead of a newcomer, from requests if the server does not count tokens."""
        return float(self.queued_tokens) if self.queued_tokens >= 0 else self.waiting * mean_tokens


class Queue:
    """The last known seconds of waiting at one endpoint, faded towards the mean of its pool."""

    __slots__ = ("at", "seconds")

    def __init__(self) -> None:
        self.at = -math.inf
        self.seconds = 0.0

    def learn(self, seconds: float, now: float) -> None:
        """A newer value; older news that arrive late are ignored."""
        if now >= self.at:
            self.at, self.seconds = now, seconds

    def expected(self, now: float, mean: float) -> float:
        """Seconds of waiting expected now."""
        return faded(self.seconds, now - self.at, mean)


def faded(seconds: float, age: float, mean: float) -> float:
    """What an observation of that age says of now: its distance from the mean shrinks; past `MAX_AGE_S` it is absent."""
    if age > MAX_AGE_S or seconds == mean:
        return mean
    if age <= 0:  # a clock that stepped back makes nothing more than new
        return seconds
    return mean + (seconds - mean) * math.exp(-age / FADE_S)


def own_work(attempts: set[Attempt], since: float, now: float) -> tuple[int, int, float]:
    """What this process has sent and had no first token of: uncached tokens since that moment, and in all, and the age of
    the oldest."""
    tokens, whole, age = 0, 0, 0.0
    for attempt in tuple(attempts):
        if attempt.first is None:
            age = max(age, now - attempt.started)
            whole += attempt.uncached
            if attempt.started > since:
                tokens += attempt.uncached
    return tokens, whole, age
