"""Counting policies, zone by zone: most traffic stays in its zone, and no zone is overloaded by that.

Calls in flight cannot be compared with the way to another zone, so each call first draws its zone, then the policy picks
within it.

A zone must not be overloaded because many clients live in it. Of its traffic as much stays as the zone has of the
capacity in service, per share of the clients that live there (what Envoy calls zone-aware routing): a zone with a third
of both keeps everything, one with a third of the clients and a fifth of the capacity keeps three fifths. The rest goes to
zones that have more capacity than clients, in proportion to what they have left, those of the same region first. If
everybody knows where clients live, load is even over the pool, and no more traffic than necessary leaves its zone.
Capacity is the weight that is admitted now, so a dying zone is left bit by bit.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence

    from gpuroute.core.candidates import Ask
    from gpuroute.core.locality import Locality
    from gpuroute.core.pickers import Kit, Picker
    from gpuroute.core.ring import Ring
    from gpuroute.core.state import EndpointState

REFRESH = 64
"""Picks after which capacities are looked at again; as many more as keeps it below a quarter of an endpoint a pick."""

KEY_DEPTH = 4  # as deep as the homes of prompts are: what shares a home shares a level
_SPREAD = 0x9E3779B97F4A7C15


class Place:
    """One zone as `spread` sees it: its region, and its shares of the capacity and of the clients of the pool."""

    __slots__ = ("capacity", "clients", "region")

    def __init__(self, region: str, capacity: float, clients: float) -> None:
        self.region = region
        self.capacity = capacity
        self.clients = clients

    @property
    def left(self) -> float:
        """Capacity that its own clients do not need."""
        return max(0.0, self.capacity - self.clients)

    @property
    def lack(self) -> float:
        """What its own clients need beyond its capacity."""
        return max(0.0, self.clients - self.capacity)


def spread(places: Sequence[Place]) -> list[float]:
    """Where the calls of a client in the first place go: shares of the places, which add up to 1."""
    own = places[0]
    kept = min(1.0, own.capacity / own.clients) if own.clients > 0 else float(own.capacity > 0)
    regional = [place for place in places if place.region == own.region]
    lack, spill = sum(place.lack for place in regional), 1.0 - kept
    at_home = spill * min(1.0, sum(place.left for place in regional) / lack) if lack > 0 else 0.0
    shares = [kept] + [0.0] * (len(places) - 1)
    _add(shares, at_home, [place.left if place.region == own.region else 0.0 for place in places])
    _add(shares, spill - at_home, [_for_others(place, places) if place.region != own.region else 0.0 for place in places])
    _add(shares, 1.0 - sum(shares), [place.capacity for place in places])  # nobody has room: as capacity goes
    return shares


def _for_others(place: Place, places: Sequence[Place]) -> float:
    """What a place has left once its own region has been helped."""
    left = sum(other.left for other in places if other.region == place.region)
    lack = sum(other.lack for other in places if other.region == place.region)
    return place.left * max(0.0, 1.0 - lack / left) if left > 0 else 0.0


def _add(shares: list[float], part: float, weights: Sequence[float]) -> None:
    total = sum(weights)
    if part > 1e-12 and total > 0:
        for index, weight in enumerate(weights):
            shares[index] += part * weight / total


class Zoned:
    """A counting policy, zone by zone, the own one first. Immutable but for the shares, which follow what is admitted."""

    def __init__(self, kit: Kit, locality: Locality, build: Callable[[Kit], Picker]) -> None:
        zones = by_zone(kit.states, locality)
        self._zones = list(zones.values())
        self._names = list(zones)
        self._pickers = [build(kit.part(states)) if states else None for states in self._zones]
        self._pool = kit.states[0].pool
        self._random = kit.random
        self._every = max(REFRESH, 4 * len(kit.states))
        self._left, self._limited = 0, -1
        self._ends = list(accumulate(self.shares()))
        largest = max(range(len(self._zones)), key=lambda index: len(self._zones[index]))
        picker = self._pickers[largest]
        assert picker is not None
        self.wants_ladder: bool = picker.wants_ladder
        self.remembers: bool = picker.remembers
        self.ring: Ring | None = picker.ring

    def pick(self, ask: Ask, tried: Container[EndpointState] = ()) -> EndpointState | None:
        first = self._pickers[self._draw(ask)]
        state = first.pick(ask, tried) if first is not None else None
        if state is not None:
            return state
        others = (picker.pick(ask, tried) for picker in self._pickers if picker is not None and picker is not first)
        return next((state for state in others if state is not None), None)

    def consider(self, ask: Ask) -> Iterable[tuple[EndpointState, float, str]]:
        picker = self._pickers[self._draw(ask)]
        return () if picker is None else picker.consider(ask)

    def shares(self) -> list[float]:
        """The shares of calls of the zones now, the own one first; all 0 if no endpoint is admitted."""
        weights = [sum(state.endpoint.weight for state in states if state.limit > 0) for states in self._zones]
        total = sum(weights)
        if total <= 0:
            return [0.0] * len(weights)
        clients = self._pool.locality.clients(self._names)
        capacity = (weight / total for weight in weights)
        return spread([Place(name[0], *shares) for name, *shares in zip(self._names, capacity, clients, strict=True)])

    def _draw(self, ask: Ask) -> int:
        limited = len(self._pool.limited)
        if not ask.looks:
            self._left -= 1
        if self._left < 0 or limited != self._limited:
            self._ends = list(accumulate(self.shares()))  # first: other threads are here too
            self._limited, self._left = limited, self._every
        ends = self._ends
        if ends[0] >= 1.0 - 1e-9:
            return 0
        return min(bisect_right(ends, self._spot(ask)), len(ends) - 1)

    def _spot(self, ask: Ask) -> float:
        """Where in 0..1 a call falls: by its key if it has one, so that a conversation stays where it is."""
        key = ask.key
        if key is None and self.wants_ladder and ask.ladder:
            key = ask.ladder[min(len(ask.ladder), KEY_DEPTH) - 1]
        if key is None or self.ring is None:
            return self._random()
        return (key * _SPREAD & 0xFFFFFFFFFFFFFFFF) / 2.0**64


def by_zone(states: Iterable[EndpointState], locality: Locality) -> dict[tuple[str, str], list[EndpointState]]:
    """Endpoints by region and zone: the own zone first, even if nobody is there, the others in everybody's order."""
    zones: dict[tuple[str, str], list[EndpointState]] = {}
    for state in states:
        zones.setdefault(locality.place_of(state.endpoint), []).append(state)
    own = zones.pop(locality.place, [])
    return {locality.place: own, **dict(sorted(zones.items()))}


def zoned(kit: Kit, build: Callable[[Kit], Picker]) -> Picker:
    """The picker of a policy that counts: zone by zone, if this process has one and not all endpoints are in it."""
    locality = kit.states[0].pool.locality
    apart = locality and any(locality.place_of(state.endpoint) != locality.place for state in kit.states)
    return Zoned(kit, locality, build) if apart else build(kit)
