"""Affinity without a map: the home of a session or prefix on the ring, unless it is over the load bound."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from gpuroute.core.pickers import Kit, PowerOfTwo, in_flight

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from gpuroute.core.candidates import Ask
    from gpuroute.core.ring import Ring
    from gpuroute.core.state import EndpointState

LOAD_FACTOR = 1.25  # consistent hashing with bounded loads (Mirrokni et al. 2018) at the c that Google and Vimeo use
MAX_WALK = 32  # when most are closed or full, a longer walk costs more than two random choices lose
LOAD_FLOOR = 2.0  # below that many above the mean it is noise: without a floor every second call would spill
HOME_DEPTHS = 4  # homes are those of 1, 2, 4 or 8 KiB of prompt: deeper keys are unique to one conversation


class Homes:
    """The home of a key on the ring, walked on while it is over the load bound; without a key, two random."""

    def __init__(self, kit: Kit, *, wants_ladder: bool) -> None:
        self.wants_ladder = self.remembers = wants_ladder
        self._ring = kit.ring()
        self.ring: Ring | None = self._ring
        self._kit = kit
        self._by_id = kit.by_id
        self._deepest = kit.placements.deepest
        self._by_point = self._ring.laid_out(kit.by_id)
        self._miss = PowerOfTwo(kit)
        self._mean_share = 1.0 / max(1e-300, sum(state.endpoint.weight for state in kit.states))

    def pick(self, ask: Ask, tried: Container[EndpointState] = ()) -> EndpointState | None:
        key, owner = self._home(ask)
        if key is None or not self._by_point:
            return self._miss.pick(ask, tried)
        if owner is not None:
            state = self._by_id.get(owner)
            if state is not None and state not in tried and ((not state.in_flight and state.limit) or self._fits(state)):
                return state
        return self._walk(key, tried) or self._miss.pick(ask, tried)

    def consider(self, ask: Ask) -> Iterable[tuple[EndpointState, float, str]]:
        key, owner = self._home(ask)
        if key is None or not self._kit.states:
            return self._miss.consider(ask)
        placed = [self._kit.by_id[owner]] if owner in self._kit.by_id else []
        homes = [self._kit.by_id[home] for home, _ in zip(self._ring.homes(key), range(4), strict=False)]
        rows = [(state, in_flight(state, ask), "placed before") for state in placed]
        return rows + [(state, in_flight(state, ask), "home") for state in homes if state not in placed]

    def _home(self, ask: Ask) -> tuple[int | None, str | None]:
        """The ring position of the call, and the endpoint that had its longest prefix before."""
        if ask.key is not None:
            return ask.key, None
        ladder = ask.ladder
        if not self.wants_ladder or not ladder:
            return None, None
        return ladder[HOME_DEPTHS - 1 if len(ladder) > HOME_DEPTHS else -1], self._deepest(ladder)

    def _walk(self, key: int, tried: Container[EndpointState]) -> EndpointState | None:
        state, by_id = self._by_point[self._ring.place(key)], self._kit.by_id
        if state not in tried and self._fits(state):
            return state
        for owner in islice(self._ring.homes(key), MAX_WALK):
            state = by_id[owner]
            if state not in tried and self._fits(state):
                return state
        return None

    def _fits(self, state: EndpointState) -> bool:
        """Admitted, and one more call keeps it within max(1.25 x mean, mean + 2) of its share."""
        load = len(state.in_flight)
        if load >= state.limit:
            return False
        if load + 1 <= LOAD_FLOOR:
            return True
        total = len(state.pool.in_flight)
        mean = (total + 1) * state.endpoint.weight * self._mean_share
        return load + 1 <= mean + LOAD_FLOOR or load + 1 <= LOAD_FACTOR * mean
