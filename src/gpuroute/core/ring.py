"""A weighted consistent-hash ring: a sorted array and a table of where to look in it.

One endpoint leaving moves only its own keys, a short ejection behaves as a removal because the walk steps over endpoints
that are not admitted, and every client computes the same ring (xxh3_64, never `hash()`). Ranking 10,000 endpoints per
call (rendezvous) would cost 0.7 ms; a lookup here costs about 0.7 us.

Above 312 endpoints of weight 1 the points are as many as memory allows, shared out: an endpoint that joins takes its keys
from everybody, and each of the others gives up a fraction of a point, so that about as many keys again move between them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import TYPE_CHECKING, TypeVar

from xxhash import xxh3_64_intdigest

from gpuroute.core.lookup import Lookup

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

T = TypeVar("T")
TURN = 2.0**64
MAX_POINTS = 50_000
POINTS = 160  # per unit of weight: the share of an endpoint then varies by about 1/sqrt(160) = 8 %
FEW_CHANGES = 100  # up to there, points are cheaper moved one by one
FEW_POINTS = 60  # on average at least, so that weights may be shares of one


class Ring:
    """Immutable. Owners are ids; `extended` builds the next ring from this one and is cheap for small changes."""

    __slots__ = ("_fractions", "_lookup", "_owners", "_points", "_weights", "shares")

    def __init__(self, weights: dict[str, float] | None = None) -> None:
        self.shares: dict[str, int] = {}
        self._weights: dict[str, float] = {}
        self._fractions: dict[str, float] = {}
        self._points = array("Q")
        self._owners: list[str] = []
        self._lookup = Lookup(self._points, TURN)
        if weights:
            self._grow(Ring(), weights)

    def extended(self, weights: dict[str, float]) -> Ring:
        """The ring of another set of endpoints; the points of those that stay are reused."""
        if weights == self._weights:  # most changes of a large fleet are of states, labels and the like
            return self
        ring = Ring()
        ring._grow(self, weights)
        return self if ring.shares == self.shares else ring

    def homes(self, key: int) -> Iterator[str]:
        """The owners of a key in ring order: home first, each endpoint once."""
        owners, count = self._owners, len(self._owners)
        start = self._lookup.find(key)
        seen: set[str] = set()
        for index in range(start, start + count):
            owner = owners[index % count]
            if owner not in seen:
                seen.add(owner)
                yield owner
                if len(seen) == len(self.shares):
                    return

    def home(self, key: int) -> str:
        """The first owner of a key; the ring must not be empty."""
        return self._owners[self.place(key)]

    def place(self, key: int) -> int:
        """The number of the point that a key belongs to; the ring must not be empty."""
        index = self._lookup.find(key)
        return index if index < len(self._owners) else 0

    def laid_out(self, by_owner: Mapping[str, T]) -> list[T]:
        """What belongs to the owner of each point."""
        return [by_owner[owner] for owner in self._owners]

    def __len__(self) -> int:
        return len(self._points)

    def _grow(self, before: Ring, weights: dict[str, float]) -> None:
        self._weights, known = weights, before._fractions
        self._fractions = {owner: known.get(owner) or _fraction(owner) for owner, weight in weights.items() if weight > 0}
        self.shares = _shares(weights, self._fractions)
        old, new = before.shares, self.shares
        gone = {
            p
            for owner, share in old.items()
            if new.get(owner, 0) < share
            for p in _points(owner, new.get(owner, 0), share)
        }
        added = {
            p: owner
            for owner, share in new.items()
            if old.get(owner, 0) < share
            for p in _points(owner, old.get(owner, 0), share)
        }
        self._points, self._owners = before._points[:], before._owners.copy()
        if len(gone) + len(added) <= FEW_CHANGES:
            self._patch(gone, added)
        else:
            self._rebuild(gone, added)
        self._lookup = Lookup(self._points, TURN)

    def _patch(self, gone: set[int], added: dict[int, str]) -> None:
        points, owners = self._points, self._owners
        for point in gone:
            index = bisect_left(points, point)
            del points[index], owners[index]
        for point, owner in added.items():
            index = bisect_left(points, point)
            points.insert(index, point)
            owners.insert(index, owner)

    def _rebuild(self, gone: set[int], added: dict[int, str]) -> None:
        owner_of = dict(zip(self._points, self._owners, strict=True)) | added
        stay = [point for point in self._points if point not in gone]
        self._points = array("Q", sorted([*stay, *added]))
        self._owners = [owner_of[point] for point in self._points]


def _points(owner: str, first: int, end: int) -> list[int]:
    return [xxh3_64_intdigest(f"{owner}#{number}".encode()) for number in range(first, end)]


def _fraction(owner: str) -> float:
    """Where in 0..1 an owner rounds: all rounding at one place would take a point of everybody at once."""
    return float(xxh3_64_intdigest(f"{owner}#".encode())) / 2.0**64


def _shares(weights: dict[str, float], fractions: dict[str, float]) -> dict[str, int]:
    """Points of each owner. Their sum follows the weights without steps, and points are numbered, so that one endpoint
    more among thousands costs each of the others a point at most: as many keys move again as the newcomer takes."""
    total = sum(weights.values())
    points = min(MAX_POINTS, max(POINTS * total, FEW_POINTS * len(weights)))
    return {owner: max(1, int(weights[owner] / total * points + fraction)) for owner, fraction in fractions.items()}


def session_key(text: str, salt: str = "") -> int:
    """The ring position of a session id; equal for all clients that share the pool's salt."""
    return int(xxh3_64_intdigest(f"{salt}|{text}".encode("utf-8", "surrogatepass")))


def weights_of(owners: Sequence[tuple[str, float]]) -> dict[str, float]:
    """A mapping for `Ring`, in a canonical order, so that the order of the registry does not matter."""
    return dict(sorted(owners))
