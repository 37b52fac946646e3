"""Which endpoints the seconds cost compares for one call: a handful from sources that cost the same in any fleet.

Where the prompt went before, the homes of its prefix on the ring, who was calm lately, and two at random.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import TYPE_CHECKING

from gpuroute.core.candidates import UNKNOWN_LATENCY
from gpuroute.core.locality import random_few
from gpuroute.core.prefix import BLOCK_TOKENS, DEPTHS
from gpuroute.core.speed import shrunk

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpuroute.core.candidates import Ask
    from gpuroute.core.pickers import Kit
    from gpuroute.core.ring import Ring
    from gpuroute.core.seconds import SecondsRules
    from gpuroute.core.state import EndpointState

HOME = "home"
HOME_RUNG = 3  # a home is worth up to 2,048 tokens of its prefix
PART_RUNG = 2  # the shallowest with a home
MOST = 6  # candidates that are asked: more gain nothing
MAX_WALK = 32  # endpoints of another part on the way to a home: prefixes matter little to so small a part
DEFAULT_TOKENS = 256  # a prompt of unknown length
SESSION_TOKENS = 2_048  # the same, of a caller who named a session because it matters
WORTH = 5.0  # a call must be expected to last so many round trips to be asked for
SMALL_S, NEAR_S = 0.05, 0.001  # small jobs are not worth asking for; small prompts of unknown jobs only nearby
SMALL_LOG = math.log(SMALL_S)


class Sources:
    """Immutable, of one snapshot or a part of it. `asks`: its endpoints have agents."""

    __slots__ = ("_calm", "_few", "_kit", "_placed", "_ring", "_rungs", "asks", "by_id", "states")

    def __init__(self, kit: Kit, rules: SecondsRules, ring: Ring | None, *, asks: bool) -> None:
        self._kit = kit
        self._ring = ring
        self._few = random_few(kit)
        self.states = kit.states
        self.by_id = kit.by_id
        self.asks = asks
        self._rungs = rules.ask_rungs if asks else rules.blind_rungs
        self._calm = 0 if asks else rules.calm
        self._placed = 1 if asks else rules.placed

    def draw(self, ask: Ask) -> dict[EndpointState, str]:
        """Candidates, and why each is one; the first reason counts."""
        found: dict[EndpointState, str] = {}
        by_id, ring, asks = self._kit.by_id, self._ring, self.asks
        known = ring is not None and (ask.key is not None or bool(ask.ladder))
        if ring is not None and known:
            self._recall(ask)
            for owner in islice(filter(by_id.__contains__, ask.placed), self._placed):
                found[by_id[owner]] = "placed before"
            for key, count in self._home_keys(ask):
                for owner in self._homes(ring, key, count):
                    found.setdefault(by_id[owner], HOME)
        if self._calm and self._kit.states:
            self._draw_calm(found)
        for _ in range(1 if known or not asks else 2):  # four asks are enough for queues, more find prefixes
            for state in self._few(ask):
                if len(found) < MOST or not asks:
                    found.setdefault(state, "random")
        return found

    def _homes(self, ring: Ring, key: int, count: int) -> Iterable[str]:
        """The first owners of a key that are of this part."""
        by_id = self.by_id
        if len(by_id) < len(ring.shares):
            return islice(filter(by_id.__contains__, islice(ring.homes(key), MAX_WALK)), count)
        return (ring.home(key),) if count == 1 else islice(ring.homes(key), count)

    def _draw_calm(self, found: dict[EndpointState, str]) -> None:
        by_id, left = self._kit.by_id, self._calm
        for state in self._kit.states[0].pool.speeds.calm():
            if by_id.get(state.id) is state:
                found.setdefault(state, "calm")
                left -= 1
                if not left:
                    return

    def _home_keys(self, ask: Ask) -> Iterable[tuple[int, int]]:
        """Ring positions, and how many homes of each."""
        if ask.key is not None:
            return ((ask.key, 2),)
        ladder, deepest = ask.ladder, len(ask.ladder) - 1
        if len(self._rungs) == 1:
            rung, count = self._rungs[0]
            return ((ladder[min(deepest, rung)], count),)
        return {ladder[min(deepest, rung)]: count for rung, count in self._rungs}.items()

    def _recall(self, ask: Ask) -> None:
        """Put into the ask what this process has placed of its prompt, and where; the best place first."""
        placements = self._kit.placements
        depths = placements.depths(ask.ladder)
        placed = {owner: min(DEPTHS[index] * BLOCK_TOKENS, ask.tokens) for owner, index in depths.items()}
        if ask.key is not None and (owner := placements.owner(ask.key)) is not None:
            # A session's prompt is its last one and a new turn.
            placed = {owner: prompt_tokens(ask) * 3 // 4} | {it: tokens for it, tokens in placed.items() if it != owner}
        ask.placed = placed


def home_key(ask: Ask) -> int | None:
    """The ring position that says in which part of a pool a prompt belongs; None if nothing is known of it."""
    if ask.key is not None:
        return ask.key
    return ask.ladder[min(len(ask.ladder) - 1, PART_RUNG)] if ask.ladder else None


def prompt_tokens(ask: Ask) -> int:
    """The length of the prompt, guessed if it is not known."""
    return ask.tokens or (DEFAULT_TOKENS if ask.key is None else SESSION_TOKENS)


def worth_asking(ask: Ask, states: Sequence[EndpointState], round_trip: float) -> bool:
    """Whether a call is expected to last long enough for a round trip more not to matter: by the answers of late, or as
    long as there were none by its prompt.

    Where whole answers take less than `SMALL_S` no queue is long, and two choices are as good as any truth.
    """
    longest = max(state.latency for state in states)
    if longest > UNKNOWN_LATENCY:
        return longest >= max(SMALL_LOG, math.log(WORTH * round_trip))
    first = states[0]
    seconds = prompt_tokens(ask) * shrunk(first.speed, first.cohort) + first.pool.speeds.mean_wait
    return seconds >= WORTH * round_trip and (seconds >= SMALL_S or round_trip <= NEAR_S)
