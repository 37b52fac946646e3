"""One immutable view of a pool: the states, and the picker built for them.

A new view is made for every registry change and swapped by one reference, so a pick never sees half an update (grpc-go's
immutable Picker). Endpoints that stay keep their `EndpointState`, found by id; those that left are remembered for a
while, because a key that flaps must come back with its breaker, its load and its history (case E9).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from gpuroute.core.pickers import Kit, Picker
from gpuroute.core.policies import build_picker
from gpuroute.core.ramp import RAMP_S
from gpuroute.core.state import CAPACITY, INF, EndpointState

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable

    from gpuroute.core.endpoint import Endpoint
    from gpuroute.core.placement import Placements
    from gpuroute.core.ring import Ring
    from gpuroute.core.shared import PoolState

MAX_DEPARTED = 1_000


class Snapshot:
    """Immutable: `states` (all), `routable` (those that take new calls), `by_id`, `picker`."""

    __slots__ = ("by_id", "kit", "picker", "policy", "routable", "states")

    def __init__(
        self,
        states: Iterable[EndpointState],
        *,
        policy: str,
        random: Callable[[], float],
        placements: Placements | None = None,
        ring: Ring | None = None,
    ) -> None:
        self.states = tuple(states)
        self.by_id = {state.id: state for state in self.states}
        self.routable = tuple(state for state in self.states if state.endpoint.takes_calls)
        self.policy = policy
        self.kit = Kit(self.routable, random, placements, ring)
        self.picker: Picker = build_picker(policy, self.kit)


class Survivors:
    """Finds the state of an endpoint again across updates. The caller locks."""

    __slots__ = ("_departed", "_live", "_max_in_flight", "_pool", "elders")

    def __init__(self, pool: PoolState) -> None:
        self.elders: Container[str] = ()  # ids that served others before they came to this client's subset
        self._pool = pool
        self._max_in_flight: int | None = None
        self._live: dict[str, EndpointState] = {}
        self._departed: OrderedDict[str, tuple[EndpointState, float]] = OrderedDict()

    def adopt(
        self, endpoints: Iterable[Endpoint], now: float, max_in_flight: int | None
    ) -> tuple[list[EndpointState], list[EndpointState]]:
        """States for these endpoints, old ones where the id and the address are the same; and which of them are cold."""
        wanted = {endpoint.id: endpoint for endpoint in endpoints}
        for gone in [id_ for id_ in self._live if id_ not in wanted]:
            self._departed[gone] = self._live.pop(gone), now
        states, cold = [], []
        live, same = self._live, max_in_flight == self._max_in_flight
        self._max_in_flight = max_in_flight
        for endpoint in wanted.values():
            known = live.get(endpoint.id)
            if known is not None and same and known.endpoint is endpoint:  # nearly all, in a large fleet
                states.append(known)
                continue
            state, is_cold = self._state(endpoint, now)
            states.append(state)
            if is_cold:
                cold.append(state)
            cap = min(endpoint.capacity.max_in_flight or INF, max_in_flight or INF)
            if cap != state.caps.get(CAPACITY, INF):
                state.set_cap(CAPACITY, cap)
        while len(self._departed) > MAX_DEPARTED:
            _, (state, _) = self._departed.popitem(last=False)
            self._pool.forget(state)
        return states, cold

    def _state(self, endpoint: Endpoint, now: float) -> tuple[EndpointState, bool]:
        """The state of one endpoint, and whether its caches are cold: it is new, restarted, or was long without calls."""
        state, left_at = self._live.get(endpoint.id), now
        if state is None:
            state, left_at = self._departed.pop(endpoint.id, (None, now))
        # Another address under the same id is another server: nothing that was learned applies to it.
        if state is None or state.endpoint.url != endpoint.url:
            if state is not None:
                self._pool.forget(state)
            self._live[endpoint.id] = state = EndpointState(endpoint, self._pool, now)
            return state, endpoint.id not in self.elders
        before, same = state.endpoint, endpoint.started_at == state.warm > 0  # its agent was away, and not the engine
        if before is not endpoint:
            state.adopt(endpoint)
        self._live[endpoint.id] = state
        restarted = endpoint.started_at > before.started_at > 0
        long_away = now - left_at > RAMP_S and endpoint.id not in self.elders
        return state, not same and (restarted or long_away or not before.takes_calls)
