"""Which sends of a call left after its first byte was here: the router's own account, and what servers received.

When a server reads a request says little: a frozen or starved one reads long after the request was sent, given up, and
answered by another. So every request carries how much of its deadline was left when it left (`GPUROUTE_DEADLINE_HEADER`),
which is the moment, to a millisecond, by the clock of the process that sent it.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from gpuroute.core.outcome import Outcome
from gpuroute.router import Router

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuroute.core.call import Call

LEFT = "x-request-timeout"
"""The header that tells servers how many milliseconds a call has left."""
TOLD_S = 0.001
"""What it tells is rounded down by less than this."""
CALLS: ContextVar[list[Call] | None] = ContextVar("calls", default=None)
"""The router's calls for what a caller does now. More than one: somebody above the router repeats."""


class Followed(Router):
    """A router whose calls are kept for whoever made them."""

    def call(self, pool: str, **how: Any) -> Call:
        """Begin one logical call."""
        call = super().call(pool, **how)
        calls = CALLS.get()
        if calls is not None:
            calls.append(call)
        return call


class Send(NamedTuple):
    """One attempt, as the router saw it. Monotonic seconds; `broke`: when it failed, None if it did not."""

    endpoint: str
    number: int
    deadline: float
    first: float | None
    broke: float | None

    def answers_at(self, earliest: float, latest: float) -> bool:
        """True if it had brought a first byte before these moments, and had not broken by then."""
        return self.first is not None and self.first < earliest and (self.broke is None or self.broke > latest)


def sends(calls: Iterable[Call]) -> list[Send]:
    """All attempts of these calls, which have ended."""
    return [
        Send(
            attempt.state.id,
            attempt.number,
            call.deadline,
            attempt.first,
            None if attempt.outcome is Outcome.SUCCESS else attempt.ended,
        )
        for call in calls
        for attempt in call.history
    ]


def late(received: Iterable[tuple[str, list[Any]]], sent: list[Send]) -> int:
    """How many of the requests that servers received (endpoint and wire record) left while another attempt answered, or
    were no attempt of the router's at all."""
    return sum(all(_is_late(row, send, sent) for send in _those_of(endpoint, row, sent)) for endpoint, row in received)


def _those_of(endpoint: str, row: list[Any], sent: list[Send]) -> list[Send]:
    return [send for send in sent if (send.endpoint, send.number) == (endpoint, row[3])]


def _is_late(row: list[Any], send: Send, sent: list[Send]) -> bool:
    latest = row[0] if row[4] is None else send.deadline - row[4] / 1e3
    return any(other.answers_at(latest - TOLD_S, latest) for other in sent)
