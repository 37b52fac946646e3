"""Named policies: a source of candidates times a cost.

A picker is immutable and built once per snapshot; `pick` never blocks, reads no clock and builds no object per candidate.
When none of its candidates is admitted it falls back to a scan, so it returns None only if the pool has nobody to offer.
"""

from __future__ import annotations

import math
from math import floor
from typing import TYPE_CHECKING, Protocol

from gpuroute.core.candidates import Ask, Candidates, TwoRandom
from gpuroute.core.learning import LATENCY_FADE_S
from gpuroute.core.placement import Placements
from gpuroute.core.report import MAX_AGE_S
from gpuroute.core.ring import Ring

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence

    from gpuroute.core.state import EndpointState

INF = math.inf
COUNTS_FADE_S = 1.0  # who believes a count for longer joins all others at the endpoint that was empty when it was made


class Cost(Protocol):
    """A comparable price of sending this call there; lower is better."""

    def __call__(self, state: EndpointState, ask: Ask) -> float: ...


class Picker(Protocol):
    """Chooses an endpoint for one attempt. Safe from any thread."""

    wants_ladder: bool
    remembers: bool  # whether what was placed where means something to it
    ring: Ring | None

    def pick(self, ask: Ask, tried: Container[EndpointState] = ()) -> EndpointState | None:
        """An admitted endpoint that is not in `tried`, or None."""

    def consider(self, ask: Ask) -> Iterable[tuple[EndpointState, float, str]]:
        """What a pick would compare now: endpoint, cost, and why it is a candidate. For people."""


class Kit:
    """What pickers are built from: the routable endpoints of one snapshot and what outlives it."""

    __slots__ = ("by_id", "placements", "previous_ring", "random", "ring_of", "states")

    def __init__(
        self,
        states: Sequence[EndpointState],
        random: Callable[[], float],
        placements: Placements | None = None,
        previous_ring: Ring | None = None,
    ) -> None:
        self.states = tuple(states)
        self.by_id = {state.id: state for state in states}
        self.random = random
        self.placements = Placements() if placements is None else placements  # an empty one is false
        self.previous_ring = Ring() if previous_ring is None else previous_ring

    def part(self, states: Sequence[EndpointState]) -> Kit:
        """The same for some of the endpoints."""
        return Kit(states, self.random, self.placements, self.previous_ring)

    def ring(self) -> Ring:
        """The ring of these endpoints, grown from the previous one."""
        weights = {state.id: state.endpoint.weight for state in sorted(self.states, key=lambda s: s.id)}
        return self.previous_ring.extended(weights)


def in_flight(state: EndpointState, ask: Ask) -> float:  # noqa: ARG001
    """Own attempts in flight per unit of weight."""
    return len(state.in_flight) * state.inverse_weight


def peak_ewma(state: EndpointState, ask: Ask) -> float:  # noqa: ARG001
    """Peak EWMA latency x (own attempts in flight + 1), as a logarithm.

    A latency fades with its age by e per `LATENCY_FADE_S`; "now" is the same for all candidates, so it needs no clock.
    A newcomer starts at the usual latency of its pool, and its ramp multiplies.
    """
    cost = state.latency + state.latency_at / LATENCY_FADE_S
    if state.in_flight:
        cost += math.log(len(state.in_flight) + 1)
    if state.ramp_at is None or state.ramp_from:  # who has recovered is dear enough by what its failure cost
        return cost
    return cost + math.log(max(1.0, state.inverse_weight * state.endpoint.weight))


def queue_depth(state: EndpointState, ask: Ask) -> float:
    """Requests at the endpoint by its last report, faded to the mean of all reports, plus own attempts since."""
    report, mean, since = state.report, state.pool.speeds.mean_requests, -INF
    load = mean
    if report is not None and ask.now - report.at <= MAX_AGE_S:
        since = report.at
        load += (report.running + report.waiting - mean) * math.exp(min(0.0, since - ask.now) / COUNTS_FADE_S)
    if state.in_flight:
        load += sum(attempt.started > since for attempt in tuple(state.in_flight))
    return load * state.inverse_weight


class Single:
    """Whoever a source names, without a comparison; a scan from a random place if that one may not take the call."""

    wants_ladder = False
    remembers = False
    ring: Ring | None = None

    def __init__(self, kit: Kit, one: Callable[[Ask], EndpointState]) -> None:
        self._kit = kit
        self._one = one

    def pick(self, ask: Ask, tried: Container[EndpointState] = ()) -> EndpointState | None:
        state = self._one(ask)
        if len(state.in_flight) < state.limit and state not in tried:
            return state
        return first_admitted(self._kit, tried)

    def consider(self, ask: Ask) -> Iterable[tuple[EndpointState, float, str]]:
        return [(self._one(ask), 1.0, "candidate")]


class Cheapest:
    """The cheapest admitted candidate; a scan from a random place when there is none."""

    wants_ladder = False
    remembers = False
    ring: Ring | None = None

    def __init__(self, kit: Kit, candidates: Candidates, cost: Cost) -> None:
        self._kit = kit
        self._candidates = candidates.__call__  # bound once: through its type each call costs 45 ns more
        self._cost = cost

    def pick(self, ask: Ask, tried: Container[EndpointState] = ()) -> EndpointState | None:
        best, best_cost, cost_of = None, INF, self._cost
        for state in self._candidates(ask):
            if len(state.in_flight) < state.limit and state not in tried:
                cost = cost_of(state, ask)
                if cost < best_cost:
                    best, best_cost = state, cost
        return best or first_admitted(self._kit, tried)

    def consider(self, ask: Ask) -> Iterable[tuple[EndpointState, float, str]]:
        return [(state, self._cost(state, ask), "candidate") for state in self._candidates(ask)]


class LeastRequest(Cheapest):
    """`Cheapest(candidates, in_flight)` written out, and done at the first idle endpoint: nothing is cheaper."""

    def __init__(self, kit: Kit, candidates: Candidates) -> None:
        super().__init__(kit, candidates, in_flight)

    def pick(self, ask: Ask, tried: Container[EndpointState] = ()) -> EndpointState | None:
        best, best_cost = None, INF
        for state in self._candidates(ask):
            load = len(state.in_flight)
            if load < state.limit and state not in tried:
                if not load:
                    return state
                cost = load * state.inverse_weight
                if cost < best_cost:
                    best, best_cost = state, cost
        return best or first_admitted(self._kit, tried)


class PowerOfTwo:
    """`Cheapest(TwoRandom, in_flight)` written out: the default miss path of every other policy, half the cost of
    the composed form (`gpuroute bench pick`)."""

    wants_ladder = False
    remembers = False
    ring: Ring | None = None

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self._random = kit.random
        self._two = TwoRandom(kit.states, kit.random)
        states = kit.states if len(kit.states) != 1 else kit.states * 2  # one alone is compared with itself
        self._even = states if self._two.even else ()

    def pick(self, ask: Ask, tried: Container[EndpointState] = ()) -> EndpointState | None:
        states, random = self._even, self._random
        size = len(states)
        if not size or tried:
            return self._pick_with_care(self._two(ask), ask, tried)
        first = floor(random() * size)
        second = floor(random() * (size - 1)) if size > 2 else 0
        a = states[first]
        load_a = len(a.in_flight)
        if not load_a and a.limit:  # nothing is cheaper: the other one is not even looked at
            return a
        b = states[second + (second >= first)]
        load_b = len(b.in_flight)
        if load_a < a.limit and load_b < b.limit:
            return a if load_a * a.inverse_weight <= load_b * b.inverse_weight else b
        return self._pick_with_care((a, b), ask, tried)

    def _pick_with_care(
        self, two: Sequence[EndpointState], ask: Ask, tried: Container[EndpointState]
    ) -> EndpointState | None:
        fit = [state for state in two if state.admitted and state not in tried]
        return min(fit, key=lambda state: in_flight(state, ask)) if fit else first_admitted(self._kit, tried)

    def consider(self, ask: Ask) -> Iterable[tuple[EndpointState, float, str]]:
        return [(state, in_flight(state, ask), "random") for state in self._two(ask)]


def first_admitted(kit: Kit, tried: Container[EndpointState]) -> EndpointState | None:
    """The first admitted endpoint from a random place on: the slow path when most are closed."""
    states, size = kit.states, len(kit.states)
    start = int(kit.random() * size)
    for offset in range(size):
        state = states[(start + offset) % size]
        if state.admitted and state not in tried:
            return state
    return None


class Nobody:
    """The picker of an empty pool."""

    wants_ladder = False
    remembers = False
    ring: Ring | None = None

    def pick(self, ask: Ask, tried: Container[EndpointState] = ()) -> EndpointState | None:  # noqa: ARG002
        return None

    def consider(self, ask: Ask) -> Iterable[tuple[EndpointState, float, str]]:  # noqa: ARG002
        return ()
