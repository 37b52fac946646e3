"""Near and far: what another zone or region costs, in seconds.

Policies that compare seconds add those of the way. Policies that count calls have no such currency: `core.zones`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuroute.core.candidates import TwoRandom
from gpuroute.core.endpoint import State

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpuroute.core.candidates import Ask, Candidates
    from gpuroute.core.endpoint import Endpoint
    from gpuroute.core.pickers import Kit
    from gpuroute.core.shared import PoolState
    from gpuroute.core.state import EndpointState

NEAR, OTHER_ZONE, OTHER_REGION = 0, 1, 2

ROUND_TRIP_S = (0.0003, 0.001, 0.06)
"""Until a round trip was measured: within a data centre; between those of one region, which clouds keep some tens of
kilometres apart; between regions, where light takes 5 us for a kilometre of glass and neighbours are 5,000 apart."""


@dataclass(frozen=True, slots=True)
class Locality:
    """Where this process is, the price of leaving in seconds, and which shares of all clients live in its zone and its
    region (None: not known; then every zone is taken to have as many)."""

    zone: str = ""
    region: str = ""
    zone_price: float = 0.0
    region_price: float = 0.0
    zone_clients: float | None = None
    region_clients: float | None = None

    def __bool__(self) -> bool:
        return bool(self.zone or self.region)

    @property
    def place(self) -> tuple[str, str]:
        """This process's region and zone."""
        return self.region, self.zone

    def place_of(self, endpoint: Endpoint) -> tuple[str, str]:
        """An endpoint's region and zone, as far as they matter here. Without a region it is taken to be in this one."""
        region = (endpoint.region or self.region) if self.region else ""
        return region, endpoint.zone if self.zone else ""

    def way(self, endpoint: Endpoint, round_trip: float | None) -> float:
        """Seconds to an endpoint and back: as measured, else as is usual. Nothing where no place is set."""
        if not self:
            return 0.0
        return ROUND_TRIP_S[self._level(endpoint)] if round_trip is None else round_trip

    def price(self, endpoint: Endpoint) -> float:
        """What a call there costs beside work and way: for leaving, by the endpoint's record, for a cold start."""
        cold = endpoint.cold_start_s if endpoint.state is State.COLD else 0.0
        leaving = (0.0, self.zone_price, self.zone_price + self.region_price)[self._level(endpoint)] if self else 0.0
        return leaving + endpoint.price + cold

    def _level(self, endpoint: Endpoint) -> int:
        place = self.place_of(endpoint)
        return NEAR if place == self.place else OTHER_ZONE if place[0] == self.region else OTHER_REGION

    def clients(self, places: Sequence[tuple[str, str]]) -> list[float]:
        """Shares of all clients that live in these places, the own one first. Endpoints of no zone are nobody's home."""
        homes = [place for place in places if place == self.place or place[1] or not self.zone]
        near = sum(region == self.region for region, _ in homes)
        in_region = self.region_clients
        if in_region is None or near == len(homes):
            in_region = near / len(homes)
        in_zone = min(in_region, in_region / near if self.zone_clients is None else self.zone_clients)
        neighbour = (in_region - in_zone) / max(1, near - 1)
        stranger = (1 - in_region) / max(1, len(homes) - near)
        shares = dict.fromkeys(homes, stranger) | {place: neighbour for place in homes if place[0] == self.region}
        shares[self.place] = in_zone
        return [shares.get(place, 0.0) for place in places]


NOWHERE = Locality()


def relocate(pool: PoolState, states: Iterable[EndpointState], locality: Locality) -> None:
    """This process is there from now on: work out the way to every endpoint."""
    if locality != pool.locality:
        pool.locality = locality
        for state in states:
            measure(state)


def measure(state: EndpointState) -> None:
    """Work out the seconds of the way to an endpoint again."""
    locality, endpoint = state.pool.locality, state.endpoint
    state.way = locality.way(endpoint, state.round_trip)
    state.away = state.way + locality.price(endpoint)


def learn_round_trip(state: EndpointState, seconds: float) -> None:
    """A round trip took so long. Delays only add to it, so the shortest counts, and slower ones move it a little."""
    before = state.round_trip
    state.round_trip = seconds if before is None or seconds < before else before + 0.1 * (seconds - before)
    if state.pool.locality:
        measure(state)


class NearAndFar:
    """Two candidates that are near and two from elsewhere: a choice among neighbours, and a look at what is beyond."""

    __slots__ = ("_far", "_near")

    def __init__(self, near: Candidates, far: Candidates) -> None:
        self._near = near
        self._far = far

    def __call__(self, ask: Ask) -> Sequence[EndpointState]:
        return (*self._near(ask), *self._far(ask))


def random_few(kit: Kit) -> Candidates:
    """The random candidates of a policy that compares seconds: two; two and two if there are some near and some far."""
    locality = kit.states[0].pool.locality if kit.states else NOWHERE
    near = [state for state in kit.states if locality.place_of(state.endpoint) == locality.place] if locality else []
    if not 0 < len(near) < len(kit.states):
        return TwoRandom(kit.states, kit.random)
    far = [state for state in kit.states if locality.place_of(state.endpoint) != locality.place]
    return NearAndFar(TwoRandom(near, kit.random), TwoRandom(far, kit.random))
