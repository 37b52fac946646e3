"""What an agent knows of one engine: its book, its state, and what a bid says beside the queue.

Who samples the engine writes here, who answers asks reads here; both live in the same loop, so nothing is locked.
`epoch` tells clients that the engine, with all it had cached, is a new one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gpuroute.agent.book import Book
from gpuroute.core.asking import BidBody, EngineState, identity_of
from gpuroute.core.seal import addressee_of
from gpuroute.core.speed import PREFILL_PRIOR, UNKNOWN_PRIOR, Rate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuroute.agent.book import Sample
    from gpuroute.agent.kv_feed import Feed


class Desk:
    """One engine behind an agent. Times in seconds of one monotonic clock, but `epoch`, in seconds since 1970."""

    def __init__(
        self,
        endpoint_id: str,
        *,
        epoch: int = 0,
        gpu: str = "",
        kv_tokens: int = 400_000,
        dram_tokens: int = 0,
        state: EngineState = EngineState.READY,
    ) -> None:
        self.id = endpoint_id
        self.identity = identity_of(endpoint_id)
        self.addressee = addressee_of(self.identity)
        self.epoch = epoch
        self.state = state
        self.dram_tokens = dram_tokens
        self.book = Book(kv_tokens, dram_tokens, PREFILL_PRIOR.get(gpu, UNKNOWN_PRIOR))
        self.feed: Feed | None = None  # the engine's KV cache events, if it publishes them
        self.told_at = -math.inf
        self.asks = self.takes = self.tells = 0

    def bid(self, id_: int, tokens: int, hashes: Sequence[int], now: float) -> BidBody:
        """The answer to an ask; `matched_tokens` is unknown if it names no hashes, or if there may be more than is known
        here: clients then go by what they have sent there."""
        book, self.asks = self.book, self.asks + 1
        matched = book.ask(id_, tokens, hashes, now)
        sample = book.sample
        return BidBody(
            book.queued_tokens(now),
            int(sample.running),
            int(book.waiting(now)),
            sample.kv_usage,
            self.state,
            matched if hashes and book.prefixes.knows(hashes) else None,
            self.identity,
            self.epoch,
            int(math.exp(book.rate.log) * 1e9),
            max(0.0, now - sample.at),
        )

    def take(self, id_: int, uncached: int, tokens: int, now: float) -> None:
        """The call of this id comes here."""
        self.takes += 1
        self.book.take(id_, uncached, tokens, now)

    def tell(self, id_: int, ttft: float, cached: int | None, now: float) -> None:
        """Its first token came after `ttft` seconds: proof that the engine works. 0: it ended without one."""
        self.tells += 1
        if ttft > 0:
            self.told_at = now
        self.book.tell(id_, ttft, cached, now)

    def sampled(self, sample: Sample) -> None:
        """The engine was asked for its own counts."""
        self.book.sampled(sample)

    def sized(self, kv_tokens: int) -> None:
        """The engine said how many tokens its KV cache holds."""
        self.book.prefixes.capacity = kv_tokens + self.dram_tokens

    def equipped(self, gpu: str) -> None:
        """The kind of its GPU is known by now: a better guess, as long as nothing is learned."""
        if not self.book.rate.count:
            self.book.rate = Rate(PREFILL_PRIOR.get(gpu, UNKNOWN_PRIOR))

    def met(self, epoch: int, now: float) -> None:
        """The engine was at work before we came. `epoch` 0: nobody knows since when."""
        self.epoch = epoch
        self.book.prefixes.met(now)

    def restarted(self, epoch: int) -> None:
        """Another process is the engine now; nothing of the old one is queued or cached."""
        self.epoch = epoch
        self.book.restarted()
