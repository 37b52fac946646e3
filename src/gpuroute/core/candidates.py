"""Where candidates come from: small sources, each O(1) in the size of the fleet, that compose with any cost.

A pick must cost the same at 10 and at 10,000 endpoints, so no source but `everyone` (small pools) looks at all of them.
"""

from __future__ import annotations

import math
from array import array
from itertools import accumulate, count
from math import floor  # of a float 40 ns cheaper than `int`
from typing import TYPE_CHECKING, Protocol

from gpuroute.core.lookup import Lookup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from gpuroute.core.report import Report
    from gpuroute.core.state import EndpointState


UNKNOWN_LATENCY = -30.0  # log of a latency that nothing has
MOST_OFF = math.log(4.0)
GOLDEN = (math.sqrt(5.0) - 1) / 2


class Ask:
    """What a pick may know of its call: `key` (session, ring position), `ladder` (prefix hashes, shallow to deep)
    and `tokens` (prompt tokens, an estimate). `now`, `mean_tokens` of the pool and `bids` by endpoint id are filled in
    by the call; `candidates` are drawn once, so that those that were asked are those that are compared, and with them
    `placed`: prompt tokens that this process has sent where, by endpoint id."""

    __slots__ = ("bids", "candidates", "drawn_by", "key", "ladder", "mean_tokens", "now", "placed", "tokens")

    looks = False
    """True if this is the ask of a look, and no call follows: whose turn it is stays as it was."""

    def __init__(self, key: int | None = None, ladder: Sequence[int] = (), tokens: int = 0) -> None:
        self.key = key
        self.ladder = ladder
        self.tokens = tokens
        self.now = 0.0
        self.mean_tokens = 0.0
        self.bids: Mapping[str, Report] = NO_BIDS
        self.candidates: dict[EndpointState, str] | None = None
        self.drawn_by: object = None
        self.placed: Mapping[str, int] = NOWHERE

    def keys(self) -> Sequence[int]:
        """What its placement is remembered by: prefixes from shallow to deep, and the session last."""
        return self.ladder if self.key is None else (*self.ladder, self.key)


class Look(Ask):
    """The ask of a pick that is explained, not done."""

    __slots__ = ()
    looks = True


NO_BIDS: Mapping[str, Report] = {}
NOWHERE: Mapping[str, int] = {}
NOTHING_ASKED = Ask()


class Candidates(Protocol):
    """A source: immutable, built once per snapshot, safe from any thread."""

    def __call__(self, ask: Ask) -> Iterable[EndpointState]:
        """The endpoints to compare for this call, in order of preference when costs are equal."""


class Weighted:
    """One endpoint at random, in proportion to weight (Vose's alias table: two comparisons, any number of endpoints)."""

    __slots__ = ("_alias", "_random", "_share", "states")

    def __init__(self, states: Sequence[EndpointState], random: Callable[[], float]) -> None:
        self.states = states
        self._random = random
        weights = [state.endpoint.weight for state in states]
        self._share, self._alias = alias_table(weights)

    def one(self, ask: Ask) -> EndpointState:  # noqa: ARG002
        """A draw; the pool must not be empty."""
        spot = self._random() * len(self.states)
        index = floor(spot)
        return self.states[index if spot - index < self._share[index] else self._alias[index]]


class TwoRandom:
    """Two distinct endpoints, without replacement; weighted only if the weights differ."""

    __slots__ = ("_mirrored", "_random", "_weighted", "even", "states")

    def __init__(self, states: Sequence[EndpointState], random: Callable[[], float]) -> None:
        self.states = states
        self._mirrored = states[1::-1]
        self._random = random
        self.even = len({state.endpoint.weight for state in states}) <= 1
        self._weighted = None if self.even else Weighted(states, random)

    def __call__(self, ask: Ask) -> Sequence[EndpointState]:
        states = self.states
        size = len(states)
        if self._weighted is not None:
            return self._two_by_weight(ask)
        random = self._random
        if size < 3:
            # Equal costs go to the first of the two: in a fixed order, a hundred idle clients would all choose one.
            return states if random() < 0.5 else self._mirrored
        first = floor(random() * size)
        second = floor(random() * (size - 1))
        return states[first], states[second + (second >= first)]

    def _two_by_weight(self, ask: Ask) -> Sequence[EndpointState]:
        assert self._weighted is not None
        first = self._weighted.one(ask)
        for _ in range(4):
            second = self._weighted.one(ask)
            if second is not first:
                return first, second
        # One endpoint holds nearly all the weight: comparing it with itself is what its weight asks for.
        return (first,)


class DRandom:
    """`d` distinct endpoints at random; everyone, from a random one on, when the pool has at most `all_up_to`."""

    __slots__ = ("_d", "_random", "_rotated", "states")

    def __init__(
        self, states: Sequence[EndpointState], random: Callable[[], float], d: int = 4, all_up_to: int = 16
    ) -> None:
        self.states = states
        self._random = random
        self._d = d
        starts = range(len(states) if len(states) <= all_up_to else 0)
        self._rotated = [(*states[start:], *states[:start]) for start in starts]

    def __call__(self, ask: Ask) -> Iterable[EndpointState]:  # noqa: ARG002
        states, random, size = self.states, self._random, len(self.states)
        if self._rotated:
            return self._rotated[floor(random() * size)]
        chosen: dict[int, None] = {}
        while len(chosen) < self._d:
            chosen[floor(random() * size)] = None
        return map(states.__getitem__, chosen)  # whoever stops early has not touched the others


class Rotation:
    """Everyone in turn. The counter is shared by all threads: `next()` on it is atomic."""

    __slots__ = ("_next", "_turn", "states")

    def __init__(self, states: Sequence[EndpointState], random: Callable[[], float]) -> None:
        self.states = states
        # A random start: a hundred processes that boot together must not walk in step.
        self._next = int(random() * len(states)) if states else 0
        self._turn = count(self._next)

    def one(self, ask: Ask) -> EndpointState:
        """Whose turn it is; the pool must not be empty."""
        if ask.looks:
            return self.states[self._next % len(self.states)]
        turn = next(self._turn)
        self._next = turn + 1
        return self.states[turn % len(self.states)]


class Smooth:
    """Weighted round robin that is spread evenly in time: turn n takes the point n x golden ratio (mod 1) of the weights
    laid end to end. Those points are even over any stretch of turns (a Weyl sequence), and there is no queue of turns
    that two threads could spoil.

    The weight is the registry's times the observed throughput: the inverse of the learned latency against the usual one,
    within a factor of four, so that a wrong prior is corrected and a lucky endpoint does not take all.
    """

    __slots__ = ("_ends", "_every", "_next", "_start", "_turn", "states")

    def __init__(self, states: Sequence[EndpointState], random: Callable[[], float]) -> None:
        self.states = states
        self._start = random()
        self._next = 1
        self._turn = count(1)
        self._every = max(64, 4 * len(states))
        self._ends = self._lay_out()

    def one(self, ask: Ask) -> EndpointState:
        """Whose turn it is; the pool must not be empty."""
        if ask.looks:
            turn = self._next
        else:
            turn = next(self._turn)
            self._next = turn + 1
            if turn % self._every == 0:
                self._ends = self._lay_out()
        ends = self._ends
        index = ends.find((self._start + turn * GOLDEN) % 1.0 * ends.end)
        return self.states[index if index < len(self.states) else -1]

    def _lay_out(self) -> Lookup:
        known = [state.latency for state in self.states if state.latency > UNKNOWN_LATENCY]
        usual = sum(known) / len(known) if known else 0.0
        weights = (_throughput(state.latency, usual) / state.inverse_weight for state in self.states)
        ends = array("d", accumulate(weights))
        return Lookup(ends, ends[-1])


def _throughput(latency: float, usual: float) -> float:
    if latency <= UNKNOWN_LATENCY:
        return 1.0
    return math.exp(max(-MOST_OFF, min(MOST_OFF, usual - latency)))


def alias_table(weights: Sequence[float]) -> tuple[list[float], list[int]]:
    """Vose's alias method: `(share, alias)` with which a weighted draw costs O(1). Weights must be positive."""
    size, total = len(weights), sum(weights)
    scaled = [weight * size / total for weight in weights]
    small = [i for i, share in enumerate(scaled) if share < 1]
    large = [i for i, share in enumerate(scaled) if share >= 1]
    share, alias = [1.0] * size, list(range(size))
    while small and large:
        low, high = small.pop(), large[-1]
        share[low], alias[low] = scaled[low], high
        scaled[high] -= 1 - scaled[low]
        if scaled[high] < 1:
            small.append(large.pop())
    return share, alias
