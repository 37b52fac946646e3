"""How an attempt ended, and what that teaches: a closed vocabulary of six words and one table.

Whose fault it was decides everything else. An overloaded endpoint is not a broken one, a caller's own mistake says
nothing about the endpoint, and a cancelled attempt teaches nothing (Netflix concurrency-limits calls these *success*,
*ignore* and *dropped*; here the last is split by who must act).
"""

from __future__ import annotations

from enum import Enum


class Outcome(Enum):
    """The result of one attempt; the columns say what it teaches.

    `retryable`: another endpoint may do better. `health`: +1 or -1 feeds breaker and ejection, 0 is neutral.
    """

    #             label         retryable  health
    SUCCESS = ("success", False, 1)
    REJECTED = ("rejected", False, 0)
    OVERLOADED = ("overloaded", True, 0)
    FAILED = ("failed", True, -1)
    TIMED_OUT = ("timed_out", True, -1)
    CANCELLED = ("cancelled", False, 0)

    label: str
    retryable: bool
    health: int

    def __init__(self, label: str, retryable: bool, health: int) -> None:
        self.label = label
        self.retryable = retryable
        self.health = health

    def __str__(self) -> str:
        return self.label


# 501 and 505 describe the request, not the endpoint's health: another endpoint of the pool would answer the same.
_CALLER_5XX = frozenset({501, 505})
_OVERLOAD = frozenset({429, 529})


def http_outcome(status: int, *, retry_after: bool = False) -> Outcome:
    """Classify an HTTP status when the engine has no rule of its own.

    A 503 is overload only when it names a time to come back; without one it is how a dead application answers.
    """
    if status < 400:
        return Outcome.SUCCESS
    if status in _OVERLOAD or (status in {409, 503} and retry_after):
        return Outcome.OVERLOADED
    if status == 408 or (status >= 500 and status not in _CALLER_5XX):
        return Outcome.FAILED
    return Outcome.REJECTED
