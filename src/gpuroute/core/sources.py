"""Which endpoints the seconds cost compares for one call: a handful from sources that cost the same in any fleet.

Where the prompt went before, the homes of its prefix on the ring, who was calm lately, and two at random.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import TYPE_CHECKING

from gpuroute.core.candidates import UNKNOWN_LATENCY, TwoRandom
from gpuroute.core.locality import random_few
from gpuroute.core.prefix import BLOCK_TOKENS, DEPTHS
from gpuroute.core.speed import shrunk

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gpuroute.core.candidates import Ask
    from gpuroute.core.pickers import Kit
    from gpuroute.core.ring import Ring
    from gpuroute.core.seconds import SecondsRules
    from gpuroute.core.speed import Speeds
    from gpuroute.core.state import EndpointState

HOME = "home"
HOME_RUNG = 3  # a home is worth up to 2,048 tokens of its prefix
PART_RUNG = 2  # the shallowest that one conversation, not everybody, has: 1,024 tokens
MOST = 6  # candidates that are asked: two more gain 4 % of the mean TTFT at 85 % load, and cost a third more messages
LATEST = 4  # placements of a prefix that tell whether its homes are crowded
MAX_WALK = 32  # endpoints of another part on the way to a home: prefixes matter little to so small a part
DEFAULT_TOKENS = 256  # a prompt of unknown length
SESSION_TOKENS = 2_048  # the same, of a caller who named a session because it matters
LOSSY, VERY_LOSSY = 0.15, 0.4  # asks that had to be sent again, as a share
WORTH = 5.0  # a call must be expected to last so many round trips to be asked for
SMALL_S, NEAR_S = 0.05, 0.001  # small jobs are not worth asking for; small prompts of unknown jobs only nearby
SMALL_LOG = math.log(SMALL_S)
DEPTH_TOKENS = tuple(blocks * BLOCK_TOKENS for blocks in DEPTHS)


class Sources:
    """Immutable, of one snapshot or a part of it. `asks`: its endpoints have agents."""

    __slots__ = (
        "_by_point",
        "_calm",
        "_few",
        "_kit",
        "_many",
        "_placed",
        "_ring",
        "_rungs",
        "_speeds",
        "asks",
        "by_id",
        "states",
    )

    def __init__(self, kit: Kit, rules: SecondsRules, ring: Ring | None, *, asks: bool) -> None:
        self._kit = kit
        self._ring = ring
        few = random_few(kit)
        self._few = few.__call__
        self._speeds = kit.states[0].pool.speeds if kit.states else None
        self.states = kit.states
        self.by_id = kit.by_id
        self._by_point = ring.laid_out(kit.by_id) if ring is not None and len(kit.by_id) == len(ring.shares) else ()
        self.asks = asks
        self._rungs = rules.ask_rungs if asks else rules.blind_rungs
        self._calm = 0 if asks else rules.calm
        self._placed = 1 if asks else rules.placed
        # Where some endpoints are near and some are not, most homes of a ring that all share are far.
        self._many = rules.ask_homes if asks and isinstance(few, TwoRandom) else 0

    def draw(self, ask: Ask) -> dict[EndpointState, str]:
        """Candidates, and why each is one; the first reason counts."""
        found: dict[EndpointState, str] = {}
        asks = self.asks
        known = self._ring is not None and (ask.key is not None or bool(ask.ladder))
        if known:
            self._draw_placed(found, ask)
            for state in self._homes(ask):
                if asks and len(found) == MOST - 1:
                    break  # one is random always: the way out of crowded homes
                found.setdefault(state, HOME)
        if self._calm and self._speeds is not None:
            self._draw_calm(found, self._speeds)
        # Four show where a queue is short, more find prefixes. Who asks draws until there are `MOST`.
        for _ in range(2 if asks or not (known or self._ring is None) else 1):
            for state in self._few(ask):
                if not asks or len(found) < MOST:
                    found.setdefault(state, "random")
        return found

    def _draw_placed(self, found: dict[EndpointState, str], ask: Ask) -> None:
        by_id, left, least = self.by_id, self._placed, 0
        placed = self._recall(ask)
        if self._many and ask.key is None and len(ask.ladder) > PART_RUNG:
            least = min(ask.tokens, DEPTH_TOKENS[PART_RUNG])  # what everybody's prompts begin with is everywhere
        for owner, tokens in placed.items():
            if tokens < least:
                return
            if (state := by_id.get(owner)) is not None:
                found[state] = "placed before"
                left -= 1
                if not left:
                    return

    def _homes(self, ask: Ask) -> Iterable[EndpointState]:
        """The first owners of the call's ring positions that are of this part."""
        ring, ladder = self._ring, ask.ladder
        assert ring is not None
        if self._by_point and ask.key is None and len(self._rungs) == 1:
            rung, count = self._rungs[0]
            if count == 1:
                return (self._by_point[ring.place(ladder[rung if rung < len(ladder) else -1])],)
        if self._many and (ask.key is not None or len(ladder) > PART_RUNG):
            owners: Iterable[str] = self._many_homes(ring, ladder[PART_RUNG:] if ask.key is None else (ask.key,))
        else:
            owners = (owner for key, count in self._home_keys(ask) for owner in self._owners(ring, key, count))
        return map(self.by_id.__getitem__, owners)

    def _many_homes(self, ring: Ring, ladder: Sequence[int]) -> Sequence[str]:
        """Where earlier prompts with this prefix probably are: its first homes, whichever of them was the calmest.

        A prefix that more calls have than these can take is crowded, its latest calls went elsewhere: two of its homes
        then, and those of the shallowest deeper prefix that is not.
        """
        few: list[str] = []
        for key in ladder:
            owners = list(self._owners(ring, key, self._many))
            latest = self._kit.placements.owners(key)[:LATEST]
            if len(latest) < LATEST or sum(owner in owners for owner in latest) > 1:
                return few + owners
            few = few or owners[:2]
        return few

    def _owners(self, ring: Ring, key: int, count: int) -> Iterable[str]:
        if self._by_point:
            return islice(ring.homes(key), count)
        return islice(filter(self.by_id.__contains__, islice(ring.homes(key), MAX_WALK)), count)

    def _draw_calm(self, found: dict[EndpointState, str], speeds: Speeds) -> None:
        by_id, left = self.by_id, self._calm
        for state in speeds.calm():
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
        return {ladder[min(deepest, rung)]: count for rung, count in self._rungs}.items()

    def _recall(self, ask: Ask) -> Mapping[str, int]:
        """Prompt tokens that this process has placed, and where, the best place first; put into the ask too."""
        placements, most = self._kit.placements, ask.tokens
        placed = placements.depths(ask.ladder)
        for owner, index in placed.items():
            tokens = DEPTH_TOKENS[index]
            if tokens > most:
                tokens = most
            placed[owner] = tokens
        if ask.key is not None and (last := placements.owner(ask.key)) is not None:
            # A session's prompt is its last one and a new turn.
            placed = {last: prompt_tokens(ask) * 3 // 4} | {it: tokens for it, tokens in placed.items() if it != last}
        ask.placed = placed
        return placed


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
        return longest >= SMALL_LOG and math.exp(longest) >= WORTH * round_trip
    first = states[0]
    seconds = prompt_tokens(ask) * shrunk(first.speed, first.cohort) + first.pool.speeds.mean_wait
    return seconds >= WORTH * round_trip and (seconds >= SMALL_S or round_trip <= NEAR_S)


def copies(unanswered: float) -> int:
    """How often a take or a tell is said, which nobody answers, where that share of asks had to be sent again: so that
    some 2 % are lost at 10 % loss of messages, and 3 % at 30 %. Agents count them once."""
    return 1 + (unanswered > LOSSY) + (unanswered > VERY_LOSSY)
