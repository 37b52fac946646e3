"""What reached the stand-in: the truth that a client's own bookkeeping is compared with."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .wire import Request

_KEPT_REQUESTS = 32
_KEPT_IDS = 200_000


@dataclass(frozen=True, slots=True)
class Received:
    """One request as it was on the wire."""

    method: str
    target: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    connection: int

    def header(self, name: str) -> str | None:
        """The first value of a header, by name in any case."""
        wanted = name.lower().encode()
        return next((value.decode("latin-1") for key, value in self.headers if key.lower() == wanted), None)


@dataclass(slots=True)
class Arrival:
    """One inference request on the wire; times from the machine's monotonic clock, comparable between processes.

    `attempt`: which one of its call it is (`x-gpuroute-attempt`); `left_ms`: what its deadline header says is left.
    """

    arrived: float
    attempt: int = 1
    left_ms: int | None = None
    first_byte: float | None = None
    ended: str = ""

    def row(self) -> list[Any]:
        """For JSON."""
        return [self.arrived, self.first_byte, self.ended, self.attempt, self.left_ms]


class Counters:
    """Totals, the last requests, and every arrival by its `x-request-id`. Loop thread only."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Start again from zero."""
        self.totals: Counter[str] = Counter()
        self.requests: deque[Received] = deque(maxlen=_KEPT_REQUESTS)
        self.wire: dict[str, list[Arrival]] = {}

    def arrive(self, request: Request) -> Arrival:
        """Note an inference request."""
        attempt, left = request.header("x-gpuroute-attempt"), request.header("x-request-timeout")
        arrival = Arrival(time.monotonic(), _number(attempt) or 1, _number(left))
        self.totals["received"] += 1
        self.requests.append(received(request))
        request_id = request.header("x-request-id")
        if request_id:
            arrivals = self.wire.setdefault(request_id, [])
            self.totals["resent"] += bool(arrivals)
            self.totals["resent_after_first_byte"] += any(earlier.first_byte is not None for earlier in arrivals)
            arrivals.append(arrival)
            if len(self.wire) > _KEPT_IDS:
                del self.wire[next(iter(self.wire))]
        return arrival

    def end(self, arrival: Arrival, how: str) -> None:
        """Note how it ended: finished, cancelled, answered, rejected, dropped. The first word counts."""
        if not arrival.ended:
            arrival.ended = how
            self.totals[how] += 1

    def as_json(self) -> dict[str, Any]:
        """Totals and the wire record."""
        names = ("received", "finished", "cancelled", "answered", "rejected", "dropped", "resent")
        totals = {name: self.totals[name] for name in (*names, "resent_after_first_byte")}
        wire = {key: [arrival.row() for arrival in arrivals] for key, arrivals in self.wire.items()}
        return {**totals, "wire": wire}


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


def received(request: Request) -> Received:
    """A request as a value that outlives its connection."""
    return Received(request.method, request.target, tuple(request.headers), request.body, request.connection)


def resent_after_first_byte(counters: Iterable[Mapping[str, Any]]) -> list[str]:
    """Request ids that reached any server of a fleet again after their first answer byte: must be none."""
    arrivals: dict[str, list[tuple[float, float | None]]] = {}
    for counted in counters:
        for request_id, rows in counted["wire"].items():
            arrivals.setdefault(request_id, []).extend((row[0], row[1]) for row in rows)
    return [request_id for request_id, rows in arrivals.items() if _overlaps(rows)]


def _overlaps(rows: list[tuple[float, float | None]]) -> bool:
    return any(first is not None and later > first for _, first in rows for later, _ in rows)
