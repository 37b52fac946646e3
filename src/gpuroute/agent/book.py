"""What an agent believes of its engine between two samples: a virtual queue and a memory of prefixes. Pure.

The queue is the larger of two truths: what the engine said at the last sample, and the takes that were not yet told. A
`tell` (the client saw its first token) settles a take; silence expires it after `EXPIRE_S` unless the engine's own count
says that so many are still waiting: longer poisons the queue with calls that were cancelled or went elsewhere, shorter
forgets a real queue (0.54 against 0.48 s mean TTFT in the headline simulation). A queue drained by a clock drifts by 1.5-2x.
Told times calibrate the prefill rate for all clients, so an engine that is slower than it says is found out by anybody.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from gpuroute.core.prefix import BLOCK_TOKENS, DEPTHS
from gpuroute.core.speed import UNKNOWN_PRIOR, Rate

if TYPE_CHECKING:
    from collections.abc import Sequence

EXPIRE_S = 3.0
LOST_S = 10.0
IN_PREFILL = 2
MAX_ASKS = 20_000


class Sample(NamedTuple):
    """What the engine itself said: requests running and waiting, share of KV used; `queued_tokens` -1 if not said."""

    at: float
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    queued_tokens: int = -1


class Take(NamedTuple):
    """A call on its way or in the queue."""

    at: float
    uncached: int
    ahead: int


class Prefixes:
    """The prefixes that the engine probably has in its cache: an LRU of ladder hashes, bounded by tokens."""

    __slots__ = ("_held", "_tokens", "capacity")

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity = capacity_tokens
        self._held: OrderedDict[int, int] = OrderedDict()
        self._tokens = 0

    def matched(self, hashes: Sequence[int]) -> int:
        """Tokens of the deepest known hash; 0 if none is known. Changes nothing."""
        for index in range(min(len(hashes), len(DEPTHS)) - 1, -1, -1):
            if hashes[index] in self._held:
                return DEPTHS[index] * BLOCK_TOKENS
        return 0

    def add(self, hashes: Sequence[int], tokens: int) -> None:
        """A prompt of that many tokens with these hashes is being computed; its rungs become the newest."""
        before = 0
        for hash_, depth in zip(hashes, DEPTHS, strict=False):
            last = hash_ == hashes[-1]
            reach = max(tokens, depth * BLOCK_TOKENS) if last else depth * BLOCK_TOKENS
            self._tokens += reach - before - self._held.pop(hash_, 0)
            self._held[hash_] = reach - before
            before = reach
        while self._tokens > self.capacity and self._held:
            self._tokens -= self._held.popitem(last=False)[1]

    def clear(self) -> None:
        """The engine restarted: its cache is empty."""
        self._held.clear()
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._held)


class Book:
    """One engine's book. Times in seconds of one monotonic clock; not locked: one loop owns it."""

    def __init__(self, kv_tokens: int = 400_000, dram_tokens: int = 0, prior: float = UNKNOWN_PRIOR) -> None:
        self.prefixes = Prefixes(kv_tokens + dram_tokens)
        self.sample = Sample(0.0)
        self.rate = Rate(prior)
        self.mean_tokens = 0.0
        self._asks: OrderedDict[int, tuple[float, Sequence[int], int]] = OrderedDict()
        self._takes: OrderedDict[int, Take] = OrderedDict()
        self._untold = 0

    def ask(self, id_: int, tokens: int, hashes: Sequence[int], now: float) -> int:
        """Matched tokens of this prompt; the ask is remembered until its take, for `EXPIRE_S` at most."""
        self._asks[id_] = (now, hashes, tokens)
        while len(self._asks) > MAX_ASKS:
            self._asks.popitem(last=False)
        return min(tokens, self.prefixes.matched(hashes))

    def take(self, id_: int, uncached: int, tokens: int, now: float) -> None:
        """The call comes here; a second take of one id changes nothing."""
        if id_ in self._takes:
            return
        ask = self._asks.pop(id_, None)
        if ask is not None and ask[1]:
            self.prefixes.add(ask[1], tokens)
        self.mean_tokens += (tokens - self.mean_tokens) * (0.02 if self.mean_tokens else 1.0)
        self._takes[id_] = Take(now, uncached, self.queued_tokens(now))
        self._untold += uncached

    def tell(self, id_: int, ttft: float, cached: int | None, now: float) -> None:
        """Its first token came after `ttft` seconds: settles the take and calibrates the prefill rate."""
        take = self._takes.pop(id_, None)
        if take is None:
            return
        self._untold -= take.uncached
        work = take.ahead + take.uncached
        if work > 0 and ttft > 0 and now - take.at <= 60:
            self.rate.learn(ttft / work)
        _ = cached

    def sampled(self, sample: Sample) -> None:
        """The engine was asked for its own counts."""
        self.sample = sample

    def restarted(self) -> None:
        """The engine started anew: nothing of the old one is queued or cached."""
        self.prefixes.clear()
        self._takes.clear()
        self._asks.clear()
        self._untold = 0
        self.sample = Sample(self.sample.at)

    def queued_tokens(self, now: float) -> int:
        """Prompt tokens ahead of a newcomer."""
        self._expire(now)
        sample = self.sample
        said = sample.queued_tokens if sample.queued_tokens >= 0 else int(sample.waiting * self.mean_tokens)
        return max(said, self._untold)

    def waiting(self, now: float) -> int:
        """Requests ahead of a newcomer."""
        self._expire(now)
        return max(self.sample.waiting, len(self._takes))

    def _expire(self, now: float) -> None:
        while self._asks and now - next(iter(self._asks.values()))[0] > EXPIRE_S:
            self._asks.popitem(last=False)
        waiting = self.sample.waiting if now - self.sample.at < EXPIRE_S else 0
        while self._takes and self._is_lost(next(iter(self._takes.values())), waiting, now):
            self._untold -= self._takes.popitem(last=False)[1].uncached

    def _is_lost(self, take: Take, waiting: int, now: float) -> bool:
        """True if the oldest take is neither in the engine's own queue nor, by its age, in prefill."""
        age, beyond = now - take.at, len(self._takes) - waiting
        return (age > EXPIRE_S and beyond > IN_PREFILL) or (age > LOST_S and beyond > 0)
