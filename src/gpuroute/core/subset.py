"""Which endpoints a client talks to, when it should not talk to all: subsetting by leased ordinal.

Five hundred clients of a thousand endpoints each see a hundredth of a call in flight per endpoint, so their counters say
nothing; with fifty endpoints each they say more, and keep connections warm. The ordinal (0, 1, 2, ... from a lease) makes
it deterministic: endpoints stand in a circle in the order of their hashes, client n starts at the n-th point of a golden
ratio sequence, which is even for any number of clients, and takes its neighbours. An endpoint that comes or goes changes
at most two members of any subset; a client that comes or goes moves at most one other client (`repacked`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from xxhash import xxh3_64_intdigest

from gpuroute.core.candidates import GOLDEN

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Sequence

    from gpuroute.core.fleet import PoolSpec

LEAST = 20
"""Members of a subset at least: fewer make two choices poor and a failed rack fatal."""

CLIENTS_EACH = 8
"""Clients that each endpoint should have at least, so that their traffic evens out."""

SLACK = 1.25
"""A subset shrinks only when it is larger than wanted by this factor: a client that restarts changes nothing."""


class Seat(NamedTuple):
    """Which of how many clients this one is. `ordinal` counts from 0, and is below `clients` but for moments; None: it
    has none.

    `placed` clients say where they live; of those `in_zone` and `in_region` live where this one does. 0: not known.
    """

    ordinal: int | None
    clients: int
    in_zone: int = 0
    in_region: int = 0
    placed: int = 0

    @property
    def shares(self) -> tuple[float | None, float | None]:
        """The shares of all clients in this one's zone and region, where known."""
        if not self.placed or not self.in_zone:
            return None, None
        return min(1.0, self.in_zone / self.placed), min(1.0, self.in_region / self.placed)


def subset_size(endpoints: int, clients: int, *, least: int = LEAST) -> int:
    """Members for each of `clients`, so that each endpoint has `CLIENTS_EACH` of those at least."""
    wanted = math.ceil(CLIENTS_EACH * endpoints / max(1, clients))
    return min(endpoints, max(least, wanted))


def subset(ids: Sequence[str], ordinal: int, size: int) -> list[str]:
    """The members of one client's subset. The order of `ids` does not matter. ValueError for a negative ordinal."""
    if ordinal < 0 or size < 0:
        raise ValueError(f"subset: ordinal and size must not be negative; got {ordinal} and {size}")
    circle = sorted(ids, key=lambda id_: (xxh3_64_intdigest(id_.encode("utf-8", "surrogatepass")), id_))
    start = int(((ordinal + 0.5) * GOLDEN) % 1.0 * len(circle))
    return [circle[(start + step) % len(circle)] for step in range(min(size, len(circle)))]


def free_ordinal(taken: Container[int], skip: int = 0) -> int:
    """The lowest ordinal that nobody has, after `skip` others that nobody has either."""
    ordinal = 0
    while ordinal in taken or skip > 0:
        skip -= ordinal not in taken
        ordinal += 1
    return ordinal


def repacked(ordinal: int, taken: Collection[int]) -> int:
    """The ordinal that a client should move to, its own as a rule.

    Ordinals shall be 0 .. n-1. There are as many holes below n as ordinals from n on, so each client out there has a
    hole of its own: nobody else moves, and all of them compute the same without a word to each other.
    """
    count = len(taken)
    if ordinal < count:
        return ordinal
    outside = sorted(other for other in taken if other >= count)
    holes = [hole for hole in range(count) if hole not in taken]
    return holes[outside.index(ordinal)] if ordinal in outside else ordinal


@dataclass(frozen=True, slots=True)
class SubsetView:
    """The part of a pool that a client uses: `members` of `endpoints`. `ordinal` None: it has none yet, and uses all
    (`clients` 0), or any one of the clients is meant."""

    members: int
    endpoints: int
    ordinal: int | None
    clients: int

    def __str__(self) -> str:
        if self.ordinal is None and not self.clients:
            return f"all {self.endpoints}, no ordinal yet"
        if self.ordinal is None:
            return f"subset {self.members} of {self.endpoints} for each of {self.clients} clients"
        return f"subset {self.members} of {self.endpoints}, ordinal {self.ordinal} of {self.clients}"


class Subsets:
    """The subsets of one client, by pool. Remembers sizes, and who was there before. The caller locks."""

    __slots__ = ("_known", "_seen", "seat", "views", "warned")

    def __init__(self) -> None:
        self.seat: Seat | None = None
        self.views: dict[str, SubsetView] = {}
        self.warned = False
        self._known: dict[str, frozenset[str]] = {}
        self._seen: dict[str, frozenset[str]] = {}

    def narrowed(self, spec: PoolSpec, mode: str | int, part: str = "") -> PoolSpec:
        """The pool as this client sees it; `mode` is "off", "auto" or a number of members, `part` a name of its own for
        a part of a pool.

        Endpoints that take no calls (warming, drained) are in nobody's subset: they would only thin it out.
        """
        name = part or spec.name
        if mode == "off":
            self.forget(name)
            return spec
        ids = [endpoint.id for endpoint in spec.endpoints if endpoint.takes_calls]
        self._known[name] = self._seen.get(name, frozenset())
        self._seen[name] = frozenset(ids)
        if self.seat is None or self.seat.ordinal is None:
            self.views[name] = SubsetView(len(ids), len(ids), None, 0)
            return spec
        size = self._size(name, len(ids), mode, self.seat.clients)
        self.views[name] = SubsetView(size, len(ids), self.seat.ordinal, self.seat.clients)
        if size >= len(ids):
            return spec
        chosen = set(subset(ids, self.seat.ordinal, size))
        return replace(spec, endpoints=tuple(endpoint for endpoint in spec.endpoints if endpoint.id in chosen))

    def forget(self, name: str) -> None:
        """The pool, or part of one, is no longer narrowed, or is gone."""
        for memory in (self.views, self._known, self._seen):
            memory.pop(name, None)

    def elders(self, name: str) -> frozenset[str]:
        """Endpoints that the pool had before, in this client's subset or not: new to this client, they are not cold."""
        return self._known.get(name, frozenset())

    def _size(self, name: str, endpoints: int, mode: str | int, clients: int) -> int:
        if isinstance(mode, int):
            return min(mode, endpoints)
        wanted, before = subset_size(endpoints, clients), self.views.get(name)
        if before is None or before.ordinal is None or before.members >= before.endpoints:
            return wanted
        return min(endpoints, before.members) if wanted <= before.members <= SLACK * wanted else wanted
