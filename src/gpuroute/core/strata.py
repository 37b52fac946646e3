"""Pools where some endpoints can be asked and others cannot: each part has its share of the calls.

Bids are fresh truth and memories are not, so comparing one with the other fails either way: the asked look busy because
one sees their queues, or idle because one does not see the others'. Nothing is compared across. A call goes to the part
that holds the home of its prefix, so that the parts get their shares of the ring and prompts that begin alike meet; the
covered part is asked, the other one is routed as in a pool without agents. A blind choice waits longer at the same load,
so some prefixes of the other part belong to the covered one as long as its own bids say that there is room.
Where no agent was heard for a while (asks are off, a firewall, jobs too small to ask for) the whole pool is routed so.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from gpuroute.core.pickers import Kit
from gpuroute.core.sources import Sources, home_key
from gpuroute.core.speed import shrunk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuroute.core.candidates import Ask
    from gpuroute.core.ring import Ring
    from gpuroute.core.seconds import SecondsRules
    from gpuroute.core.state import EndpointState

LOOK = 16  # draws of the covered part in a row without any bid: nobody is taken to answer
ROOM, FULL = 0.6, 0.85  # mean queue in bids, in `alpha_tokens`: up to there there is room, and from there on none
SHIFT = 0.6  # so much of the calls of the part without agents goes to the other one while there is room
EXTRA = 0.2  # but no more than this times its share, of its calls, is added: a small part is full before its bids say so
TELLING_BIDS = 64  # nothing is known of its queues before
SCATTER = 0x9E3779B97F4A7C15  # near on the ring is not near in whose turn it is
SLACK = 8.0
"""Calls that one part may be ahead of its share: chance needs room, and a prompt that everybody sends must not skew."""


class Strata:
    """The sources of a pool with agents. Built once per snapshot; its counters are single stores, any thread may draw."""

    __slots__ = (
        "_ahead",
        "_all",
        "_blind",
        "_covered",
        "_heard",
        "_kit",
        "_near",
        "_ring",
        "_rules",
        "_share",
        "_silence",
        "_turn",
    )

    def __init__(self, kit: Kit, rules: SecondsRules, ring: Ring | None) -> None:
        self._kit = kit
        self._ring = ring
        self._rules = rules
        locality = kit.states[0].pool.locality
        near = [state for state in kit.states if locality.place_of(state.endpoint) == locality.place] if locality else []
        near = near or list(kit.states)
        covered = [state for state in near if state.endpoint.agent]
        self._blind: Sources | None = None
        if 1 < len(covered) < len(near):
            self._covered = Sources(part(kit, asked=True), rules, ring, asks=True)
            self._blind = Sources(part(kit, asked=False), rules, ring, asks=False)
        else:  # what is far is compared all the same, for when everything near is busy; one alone is no choice
            self._covered = Sources(kit, rules, ring, asks=len(covered) == len(near))
        self._all = Sources(kit, rules, ring, asks=False)
        self._turn = count(1)
        self._heard = kit.states[0].pool.speeds.bids
        self._silence = 0
        self._ahead = 0.0  # calls of the covered part beyond its share
        self._near = near
        self._share = share_of(covered, near)

    def draw(self, ask: Ask) -> dict[EndpointState, str]:
        """Candidates from one part, and why each is one."""
        heard, silence = self._kit.states[0].pool.speeds.bids, self._silence
        if heard != self._heard:
            silence = 0
        if not ask.looks:
            self._heard, self._silence = heard, silence
        if silence >= LOOK:
            return self._all.draw(ask)
        if self._blind is not None and not self._goes_to_covered(ask):
            return self._blind.draw(ask)
        if not ask.looks:
            self._silence = silence + 1
        return self._covered.draw(ask)

    def _goes_to_covered(self, ask: Ask) -> bool:
        if not ask.looks and next(self._turn) % max(64, 4 * len(self._near)) == 0:
            self._share = share_of([state for state in self._near if state.endpoint.agent], self._near)
        own, ahead, key = self._share, self._ahead, home_key(ask)
        shift = self._shift(own)
        share = own + shift * (1 - own)
        if ahead > SLACK or ahead < -SLACK:
            covered = ahead < 0
        elif self._ring is not None and key is not None:
            covered = self._ring.home(key) in self._covered.by_id or (key * SCATTER >> 32 & 1023) < 1024 * shift
        else:
            covered = self._kit.random() < share
        if not ask.looks:
            self._ahead = ahead + (1 - share if covered else -share)
        return covered

    def _shift(self, share: float) -> float:
        """How much of the other part's calls the covered one takes, whose own share of the capacity is `share`."""
        speeds = self._kit.states[0].pool.speeds
        room = (FULL - speeds.backlog / self._rules.alpha_tokens) / (FULL - ROOM)
        if speeds.bids < TELLING_BIDS or room <= 0 or share >= 1:
            return 0.0
        return min(SHIFT * min(1.0, room), EXTRA * share * share / (1 - share))


def part(kit: Kit, *, asked: bool) -> Kit:
    """The same kit, for its endpoints with an agent or for the others."""
    states = [state for state in kit.states if bool(state.endpoint.agent) is asked]
    return Kit(states, kit.random, kit.placements, kit.previous_ring)


def share_of(some: Sequence[EndpointState], states: Sequence[EndpointState]) -> float:
    """Their part of the capacity that takes calls now: weights over seconds per token."""
    theirs, whole = _capacity(some), _capacity(states)
    return theirs / whole if whole else 0.0


def _capacity(states: Sequence[EndpointState]) -> float:
    return sum(state.endpoint.weight / shrunk(state.speed, state.cohort) for state in states if state.admitted)
