"""What an agent believes of its engine between two samples: a virtual queue and a memory of prefixes. Pure.

The queue is what was taken and not yet told, less the progress of the prompt under way (since the last tell, at the
learned rate, never all of it: a queue drained by a clock alone drifts by 1.5-2x), plus the engine's waiting requests that
nobody announced. A `tell` (the client saw its first token) settles a take and those long before it; silence expires one
after `EXPIRE_S` and three times the work there was: a real queue is not forgotten, a lost one does not stay.
Told times calibrate the prefill rate for all clients, so an engine that is slower than it says is found out by anybody.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from gpuroute.core.prefix import BLOCK_TOKENS, DEPTHS
from gpuroute.core.report import OLD_S
from gpuroute.core.speed import TELLING_TOKENS, UNKNOWN_PRIOR, Rate

if TYPE_CHECKING:
    from collections.abc import Sequence

EXPIRE_S = 3.0
PATIENCE = 3.0  # a take waits for its tell that many times as long as its work and what was ahead should last
PROGRESS = 0.9  # of the prompt under way, at most: what was not told is not done
OVERTAKEN_S = 1.0  # more than messages overtake each other on the way
MAX_ASKS = 4_000  # a take follows its ask within milliseconds; each ask may hold half a KiB of hashes
FOLLOWED = 4
"""While the engine itself says what it forgets, our own count of what fits is only a bound of memory: that many times."""


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
    hashes: Sequence[int] = ()


class Prefixes:
    """The prefixes that the engine probably has in its cache: an LRU of ladder hashes.

    Bounded by tokens; or, while `followed`, by what the engine's own events say has left (`forget_before`). Of an engine
    that worked before us (`met`) nobody knows what else it has, until as much as it can hold has come since.
    """

    __slots__ = ("_held", "_met_at", "_tokens", "_used", "capacity", "followed", "unseen")

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity = capacity_tokens
        self.followed = False
        self._held: OrderedDict[int, int] = OrderedDict()
        self._used: dict[int, float] = {}
        self._tokens = self.unseen = 0
        self._met_at = 0.0

    def met(self, now: float) -> None:
        """The engine worked before we came: what it has cached of that time was not seen."""
        self.unseen, self._met_at = self.capacity, now

    def knows(self, hashes: Sequence[int]) -> bool:
        """Whether `matched` is all that can be cached of that prompt: else there may be more."""
        return self.unseen <= 0 or hashes[-1] in self._held

    def matched(self, hashes: Sequence[int]) -> int:
        """Tokens of the deepest known hash; 0 if none is known. Changes nothing."""
        for index in range(min(len(hashes), len(DEPTHS)) - 1, -1, -1):
            if hashes[index] in self._held:
                return DEPTHS[index] * BLOCK_TOKENS
        return 0

    def add(self, hashes: Sequence[int], tokens: int, now: float = 0.0) -> None:
        """A prompt of that many tokens with these hashes is being computed; its rungs become the newest."""
        before = 0
        for hash_, depth in zip(hashes, DEPTHS, strict=False):
            last = hash_ == hashes[-1]
            reach = max(tokens, depth * BLOCK_TOKENS) if last else depth * BLOCK_TOKENS
            more = reach - before - self._held.pop(hash_, 0)
            self._tokens += more
            self.unseen -= more
            self._held[hash_] = reach - before
            self._used[hash_] = now
            before = reach
        limit = self.capacity * (FOLLOWED if self.followed else 1)
        while self._tokens > limit and self._held:
            self._forget_oldest()

    def touch(self, hashes: Sequence[int], now: float) -> None:
        """A prompt with these hashes was still in use then."""
        for hash_ in hashes:
            if hash_ in self._held:
                self._held.move_to_end(hash_)
                self._used[hash_] = now

    def forget_before(self, moment: float) -> None:
        """What was last used before that is gone."""
        if moment >= self._met_at:
            self.unseen = 0
        while self._held and self._used[next(iter(self._held))] < moment:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        hash_, tokens = self._held.popitem(last=False)
        del self._used[hash_]
        self._tokens -= tokens

    def clear(self) -> None:
        """The engine restarted: its cache is empty."""
        self._held.clear()
        self._used.clear()
        self._tokens = self.unseen = 0

    def __len__(self) -> int:
        return len(self._held)


class Book:
    """One engine's book. Times in seconds of one monotonic clock; not locked: one loop owns it."""

    def __init__(self, kv_tokens: int = 400_000, dram_tokens: int = 0, prior: float = UNKNOWN_PRIOR) -> None:
        self.prefixes = Prefixes(kv_tokens + dram_tokens)
        self.sample = Sample(0.0)
        self.rate = Rate(prior)
        self.mean_tokens = 0.0
        self._asks: OrderedDict[int, tuple[float, Sequence[int]]] = OrderedDict()
        self._takes: OrderedDict[int, Take] = OrderedDict()
        self._untold = 0
        self._head_since = 0.0
        self._strangers = 0

    @property
    def prefill_s(self) -> float:
        """Seconds per uncached prompt token, learned."""
        return math.exp(self.rate.log)

    def ask(self, id_: int, tokens: int, hashes: Sequence[int], now: float) -> int:
        """Matched tokens of this prompt; the ask is remembered until its take, for `EXPIRE_S` at most."""
        self._asks[id_] = (now, hashes)
        while len(self._asks) > MAX_ASKS:
            self._asks.popitem(last=False)
        return min(tokens, self.prefixes.matched(hashes))

    def take(self, id_: int, uncached: int, tokens: int, now: float) -> None:
        """The call comes here; a second take of one id changes nothing."""
        if id_ in self._takes:
            return
        ask = self._asks.pop(id_, None)
        hashes = ask[1] if ask is not None else ()
        if hashes:
            self.prefixes.add(hashes, tokens, now)
        self.mean_tokens += (uncached - self.mean_tokens) * (0.02 if self.mean_tokens else 1.0)
        ahead = self.queued_tokens(now)
        if not self._takes:
            self._head_since = now
        self._takes[id_] = Take(now, uncached, ahead, hashes)
        self._untold += uncached

    def tell(self, id_: int, ttft: float, cached: int | None, now: float) -> None:  # noqa: ARG002
        """Its first token came (`ttft` 0: it ended without one): settles the take and calibrates the prefill rate."""
        take = self._takes.get(id_)
        if take is None:
            return
        if self.prefixes.followed and take.hashes:
            self.prefixes.touch(take.hashes, now)
        if ttft > 0 and take.uncached > 0 and now > self._head_since and next(iter(self._takes)) == id_:
            log = math.log((now - self._head_since) / take.uncached)
            self.rate.learn(log, min(1.0, take.uncached / TELLING_TOKENS))
        self._drop(id_, now)
        # Engines work in order of arrival: who came a second before this one is through, only its tell was lost.
        while self._takes and next(iter(self._takes.values())).at < take.at - OVERTAKEN_S:
            self._drop(next(iter(self._takes)), now)

    def sampled(self, sample: Sample) -> None:
        """The engine was asked for its own counts."""
        self.sample = sample
        self._strangers = max(0, sample.waiting - len(self._takes))

    def restarted(self) -> None:
        """The engine started anew: nothing of the old one is queued or cached."""
        self.prefixes.clear()
        self._takes.clear()
        self._asks.clear()
        self._untold = self._strangers = 0
        self.sample = Sample(self.sample.at)

    def queued_tokens(self, now: float) -> int:
        """Prompt tokens ahead of a newcomer."""
        self._expire(now)
        own = float(self._untold)
        if self._takes:
            head = next(iter(self._takes.values()))
            own -= min(PROGRESS * head.uncached, (now - self._head_since) / self.prefill_s)
        if now - self.sample.at > OLD_S:  # whoever waited then is served by now
            return int(own)
        if self.sample.queued_tokens >= 0:
            return max(self.sample.queued_tokens, int(own))
        return int(own + self._strangers * self.mean_tokens)

    def waiting(self, now: float) -> int:
        """Requests ahead of a newcomer."""
        self._expire(now)
        own = len(self._takes)
        return own if now - self.sample.at > OLD_S else max(self.sample.waiting, own)

    def _expire(self, now: float) -> None:
        while self._asks and now - next(iter(self._asks.values()))[0] > EXPIRE_S:
            self._asks.popitem(last=False)
        while self._takes:
            id_, take = next(iter(self._takes.items()))
            if now - take.at < EXPIRE_S + PATIENCE * self.prefill_s * (take.ahead + take.uncached):
                return
            self._drop(id_, now)

    def _drop(self, id_: int, now: float) -> None:
        """A take is settled: the next one is being computed from now on."""
        self._untold -= self._takes.pop(id_).uncached
        self._head_since = now
