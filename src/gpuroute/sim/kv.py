"""The KV pool of one engine: what running sequences hold, and the prefix blocks left behind by earlier
ones.

Running sequences may use the whole pool. What they leave free is filled with prefix blocks that nobody
holds any more, least recently used first out, the tail of a prompt before its head (a head is useful to
more prompts). An optional second tier (host memory) takes what the pool throws out, and gives it back
without recomputation.

Accounting is by token, not by 16-token page: an engine loses about 8 tokens per sequence to rounding, 2,000
of 430,000 for a full batch.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class KvPool:
    """Tokens held (`active`) and blocks remembered. `active + idle blocks <= capacity` after every method."""

    __slots__ = ("_dram", "_dram_blocks", "_idle", "_refs", "active", "block", "capacity", "evictions", "watch")

    def __init__(self, capacity: int, *, block: int = 512, dram_tokens: int = 0) -> None:
        self.capacity = capacity
        self.block = block
        self.active = 0
        self.evictions = 0
        self.watch: Callable[[int, bool], None] | None = None  # told of blocks that come (True) and go
        self._refs: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # a plain dict pops its first item in O(n)
        self._dram: OrderedDict[int, None] = OrderedDict()
        self._dram_blocks = dram_tokens // block

    @property
    def dram_tokens(self) -> int:
        """Size of the second tier."""
        return self._dram_blocks * self.block

    @property
    def free(self) -> int:
        """Tokens a new sequence could get, idle blocks included."""
        return self.capacity - self.active

    @property
    def held(self) -> int:
        """Tokens of memory in use, idle blocks included."""
        return self.active + len(self._idle) * self.block

    def match(self, blocks: Sequence[int]) -> int:
        """How many leading blocks are here (either tier)."""
        refs, idle, dram = self._refs, self._idle, self._dram
        count = 0
        for key in blocks:
            if key not in refs and key not in idle and key not in dram:
                break
            count += 1
        return count

    def cost(self, blocks: Sequence[int], tokens: int) -> int:
        """Free tokens that `pin(blocks)` and `reserve(tokens)` together would take."""
        refs = self._refs
        return tokens + self.block * sum(key not in refs for key in blocks)

    def pin(self, blocks: Sequence[int]) -> None:
        """Hold blocks that `match` found."""
        refs, idle, dram = self._refs, self._idle, self._dram
        for key in blocks:
            if key in refs:
                refs[key] += 1
                continue
            if key in idle:
                del idle[key]
            else:
                dram.pop(key, None)
            refs[key] = 1
            self.active += self.block
        self._shrink()

    def reserve(self, tokens: int) -> None:
        """Take `tokens` for a sequence; idle blocks make room."""
        self.active += tokens
        if self.active + len(self._idle) * self.block > self.capacity:
            self._shrink()

    def commit(self, blocks: Sequence[int]) -> None:
        """Turn computed tokens into shared blocks. A block that another sequence computed meanwhile
        is kept once.
        """
        refs, idle = self._refs, self._idle
        for key in blocks:
            if key in refs:
                refs[key] += 1
                self.active -= self.block
                continue
            idle.pop(key, None)
            refs[key] = 1
            if self.watch is not None:
                self.watch(key, True)

    def release(self, blocks: Sequence[int], tokens: int) -> None:
        """Give back a sequence: `tokens` of its own, and its hold on `blocks` (tail first, so the
        head lives longer).
        """
        refs, idle = self._refs, self._idle
        self.active -= tokens
        for key in reversed(blocks):
            left = refs[key] - 1
            if left:
                refs[key] = left
                continue
            del refs[key]
            idle[key] = None
            self.active -= self.block

    def clear(self) -> None:
        """Forget everything: the engine restarted."""
        if self.watch is not None:
            for key in (*self._refs, *self._idle, *self._dram):
                self.watch(key, False)
        self.active = 0
        self._refs.clear()
        self._idle.clear()
        self._dram.clear()

    def _shrink(self) -> None:
        excess = self.active + len(self._idle) * self.block - self.capacity
        while excess > 0 and self._idle:
            self._spill(self._idle.popitem(last=False)[0])
            excess -= self.block

    def _spill(self, key: int) -> None:
        self.evictions += 1
        if not self._dram_blocks:
            self._gone(key)
            return
        dram = self._dram
        dram.pop(key, None)
        dram[key] = None
        if len(dram) > self._dram_blocks:
            self._gone(dram.popitem(last=False)[0])

    def _gone(self, key: int) -> None:
        if self.watch is not None and key not in self._refs and key not in self._idle:
            self.watch(key, False)
