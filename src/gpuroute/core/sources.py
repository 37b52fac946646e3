"""Which endpoints the seconds cost compares for one call: a handful from sources that cost the same in any fleet.

Where the prompt went before, the homes of its prefix on the ring, who was calm lately, and two at random.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from gpuroute.core.locality import random_few
from gpuroute.core.prefix import BLOCK_TOKENS, DEPTHS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuroute.core.candidates import Ask
    from gpuroute.core.pickers import Kit
    from gpuroute.core.ring import Ring
    from gpuroute.core.seconds import SecondsRules
    from gpuroute.core.state import EndpointState

HOME = "home"
HOME_RUNG = 3  # a home is worth up to 2,048 tokens of its prefix
MOST = 6  # candidates that are asked: more gain nothing
SOME = 64  # endpoints that are looked at for an agent
DEFAULT_TOKENS = 256  # a prompt of unknown length
SESSION_TOKENS = 2_048  # the same, of a caller who named a session because it matters


class Sources:
    """Immutable, of one snapshot. `asks`: some of its endpoints have agents."""

    __slots__ = ("_calm", "_few", "_kit", "_ring", "_rungs", "asks")

    def __init__(self, kit: Kit, rules: SecondsRules, ring: Ring | None) -> None:
        self._kit = kit
        self._ring = ring
        self._few = random_few(kit)
        self.asks = any(state.endpoint.agent for state in kit.states[:SOME])
        self._rungs = rules.ask_rungs if self.asks else rules.blind_rungs
        self._calm = 0 if self.asks else rules.calm

    def draw(self, ask: Ask) -> dict[EndpointState, str]:
        """Candidates, and why each is one; the first reason counts."""
        found: dict[EndpointState, str] = {}
        by_id, ring, asks = self._kit.by_id, self._ring, self.asks
        known = ring is not None and (ask.key is not None or bool(ask.ladder))
        if ring is not None and known:
            last = self._recall(ask)
            if last in by_id:
                found[by_id[last]] = "placed before"
            for key, count in self._home_keys(ask):
                for owner in (ring.home(key),) if count == 1 else islice(ring.homes(key), count):
                    found.setdefault(by_id[owner], HOME)
        if self._calm and self._kit.states:
            self._draw_calm(found)
        for _ in range(1 if known or not asks else 2):  # four asks are enough for queues, more find prefixes
            for state in self._few(ask):
                if len(found) < MOST or not asks:
                    found.setdefault(state, "random")
        return found

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

    def _recall(self, ask: Ask) -> str | None:
        """Put into the ask what this process has placed of its prompt, and where; returns its last placement."""
        placements = self._kit.placements
        depths = placements.depths(ask.ladder)
        placed = {owner: min(DEPTHS[index] * BLOCK_TOKENS, ask.tokens) for owner, index in depths.items()}
        last = next(iter(placed), None)
        if ask.key is not None and (owner := placements.owner(ask.key)) is not None:
            placed[owner] = prompt_tokens(ask) * 3 // 4  # a session's prompt is its last one and a new turn
            last = owner
        ask.placed = placed
        return last


def prompt_tokens(ask: Ask) -> int:
    """The length of the prompt, guessed if it is not known."""
    return ask.tokens or (DEFAULT_TOKENS if ask.key is None else SESSION_TOKENS)
