"""Consistent hashing with bounded load."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from .peer import Peer

if TYPE_CHECKING:
    from gpuroute.sim.fleet import Load
    from gpuroute.sim.loop import Flight


class BoundedHash(Peer):
    """KubeAI PrefixHash: consistent hashing with bounded load, 256 points each, bound 1.25 x mean.

    The key is the first 1,024 tokens: the original takes 100 characters of the first user message,
    which a trace of block hashes cannot show, and its first block alone is shared by all calls of a
    Mooncake copy.
    """

    def set_up(self) -> None:
        self._ring: list[tuple[int, int]] = self.sim.shared.setdefault("chwbl", [])
        if not self._ring:
            self._ring += sorted(
                (xxh3_64_intdigest(f"{index}/{point}".encode()), index)
                for index in range(len(self.in_flight))
                for point in range(256)
            )
        self._total = 0

    def pick(self, flight: Flight, now: float) -> int:  # noqa: ARG002
        blocks = flight.request.blocks
        if not blocks:
            a, b = self.two()
            return a if self.in_flight[a] <= self.in_flight[b] else b
        ring, live = self._ring, set(self.live)
        bound = 1.25 * (self._total + 1) / len(live)
        start = bisect_right(ring, (xxh3_64_intdigest(str(blocks[:2]).encode()), 0))
        home, seen = -1, set()
        for step in range(len(ring)):
            index = ring[(start + step) % len(ring)][1]
            if index in seen or index not in live:
                continue
            seen.add(index)
            home = index if home < 0 else home
            if self.in_flight[index] < bound:
                return index
            if len(seen) == len(live):
                break
        return home

    def sent(self, index: int, flight: Flight, now: float) -> None:  # noqa: ARG002
        self._total += 1

    def ended(self, index: int, flight: Flight, now: float, load: Load | None) -> None:  # noqa: ARG002
        self._total -= 1


class CentralBoundedHash(BoundedHash):
    """The same at one proxy that sees every call."""

    central = True
