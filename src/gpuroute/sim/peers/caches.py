"""Routers that remember, or are told, which prefixes are where."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from gpuroute.sim.clients import TRACE_BLOCK

from .peer import Peer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpuroute.sim.loop import Flight


class SglangCacheAware(Peer):
    """SGLang's cache_aware (CLI defaults): the longest remembered prefix, unless the load is uneven or
    the match poor.

    Uneven: max - min > 64 and max > 1.5 min -> the shortest queue. Match of at most 30 % -> the least
    loaded.
    """

    central = True
    THRESHOLD, ABSOLUTE, RELATIVE = 0.3, 64, 1.5

    def set_up(self) -> None:
        self._owner: dict[int, int] = {}

    def pick(self, flight: Flight, now: float) -> int:  # noqa: ARG002
        live, load, blocks = self.live, self.in_flight, flight.request.blocks
        counts = [load[index] for index in live]
        low, high = min(counts), max(counts)
        if not (high - low > self.ABSOLUTE and high > self.RELATIVE * low):
            owner, depth = self._longest(blocks)
            if owner >= 0 and depth * TRACE_BLOCK > self.THRESHOLD * flight.request.prompt_tokens and owner in live:
                return owner
        start = int(self.random.random() * len(live))
        return min((*live[start:], *live[:start]), key=load.__getitem__)

    def sent(self, index: int, flight: Flight, now: float) -> None:  # noqa: ARG002
        for block in flight.request.blocks:
            self._owner[block] = index

    def _longest(self, blocks: tuple[int, ...]) -> tuple[int, int]:
        owner, depth = -1, 0
        for block in blocks:
            found = self._owner.get(block)
            if found is None:
                break
            owner, depth = found, depth + 1
        return owner, depth


class Index:
    """Which servers have which block: per server an LRU of `limit` blocks (0: unbounded), as placed."""

    def __init__(self, servers: int, limits: Sequence[int]) -> None:
        self.holders: dict[int, set[int]] = {}
        self._limits = limits
        self._recent: list[dict[int, None]] = [{} for _ in range(servers)]

    def add(self, index: int, blocks: Iterable[int]) -> None:
        """A prompt with these blocks went to the server."""
        recent, holders = self._recent[index], self.holders
        for block in blocks:
            recent.pop(block, None)
            recent[block] = None
            holders.setdefault(block, set()).add(index)
        while len(recent) > self._limits[index]:
            oldest = next(iter(recent))
            del recent[oldest]
            holders[oldest].discard(index)
            if not holders[oldest]:
                del holders[oldest]

    def drop(self, index: int) -> None:
        """The server lost everything."""
        for block in self._recent[index]:
            self.holders[block].discard(index)
        self._recent[index].clear()

    def matches(self, blocks: tuple[int, ...]) -> dict[int, int]:
        """Leading blocks per server that has any."""
        return matches(self.holders, blocks)


def matches(holders: dict[int, set[int]], blocks: tuple[int, ...]) -> dict[int, int]:
    """Leading blocks that each server holds; servers without any are left out."""
    found: dict[int, int] = {}
    alive: set[int] | None = None
    for depth, block in enumerate(blocks, 1):
        here = holders.get(block)
        alive = (here if alive is None else alive & here) if here else None
        if not alive:
            break
        for index in alive:
            found[index] = depth
    return found


class LlmdScorers(Peer):
    """llm-d / Gateway API: queue 2, KV use 2, prefix 3, best score wins; metrics 50 ms old, prefix
    index as placed.

    The index remembers 2 M tokens per server (31,250 blocks of 64).
    """

    central = True
    SCRAPE, INDEX_TOKENS = 0.05, 2_000_000

    def set_up(self) -> None:
        servers = self.sim.servers
        self._index = Index(len(servers), [self.INDEX_TOKENS // TRACE_BLOCK] * len(servers))
        self._queue = [0] * len(servers)
        self._kv = [0.0] * len(servers)
        self._scraped = -inf

    def pick(self, flight: Flight, now: float) -> int:
        if now - self._scraped >= self.SCRAPE:
            self._scrape(now)
        queue, kv, blocks, live = self._queue, self._kv, flight.request.blocks, self.live
        low, high = min(queue), max(queue)
        span = (high - low) or 1
        found = self._index.matches(blocks)
        size = max(1, flight.request.prompt_tokens // TRACE_BLOCK)
        start = int(self.random.random() * len(live))
        order = (*live[start:], *live[:start])
        scores = [2 * (high - queue[i]) / span + 2 * (1 - kv[i]) + 3 * found.get(i, 0) / size for i in order]
        return order[scores.index(max(scores))]

    def sent(self, index: int, flight: Flight, now: float) -> None:  # noqa: ARG002
        self._index.add(index, flight.request.blocks)

    def _scrape(self, now: float) -> None:
        self._scraped = now - now % self.SCRAPE
        for server in self.sim.servers:
            self._queue[server.index] = server.gpu.waiting
            self._kv[server.index] = server.gpu.kv_usage
