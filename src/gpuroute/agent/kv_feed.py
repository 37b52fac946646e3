"""Follows the KV cache events of one engine over ZeroMQ, and falls back loudly to counting takes when they fail.

`following`: the engine's own words decide which prefixes are gone. In every other state they are counted as without
events (`waiting` for the first one; `silent`: the engine computes prompts and publishes nothing; `gap`: events were lost
and could not be had again, until all that is older than the gap is gone; `unavailable`: a package is missing). A state
is logged when it changes and shown in `/healthz`, `/metrics` and `/load`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from gpuroute.agent.kv_events import Blocks, Garbled, read_batch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuroute.agent.desk import Desk

log = logging.getLogger("gpuroute.agent")

SILENT_S = 10.0
SILENT_TOKENS = 10_000
"""An engine that has computed so many prompt tokens in so many seconds without an event does not publish."""

REPLAY_S = 2.0
LOOK_S = 0.5
MAX_MESSAGE = 64 * 1024 * 1024
MAX_LATE_S = 60.0
LISTEN = "listen="
END = (1 << 64) - 1
"""The sequence number that ends a replay: -1."""


class FeedState(StrEnum):
    """What the events are worth now."""

    WAITING = "waiting"
    FOLLOWING = "following"
    SILENT = "silent"
    GAP = "gap"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where an engine publishes: ZeroMQ addresses of events (`listen=` before it: the engine connects to us) and of their
    replay ("" for none), and the topic's prefix."""

    events: str
    replay: str = ""
    topic: str = ""


class Feed:
    """The events of one engine, and what they do to the prefixes on its desk. Loop thread."""

    def __init__(self, source: Source, desk: Desk) -> None:
        self.source = source
        self.state = FeedState.WAITING
        self.blocks = Blocks()
        self.batches = self.lost = self.replayed = self.garbled = self.restarts = 0
        self._desk = desk
        self._last = -1
        self._gap_at = 0.0
        self._heard_at = time.monotonic()
        self._heard_tokens = -1.0

    @property
    def trouble(self) -> str:
        """What is wrong, for people; "" if nothing is."""
        return "" if self.state in {FeedState.WAITING, FeedState.FOLLOWING} else f"KV cache events: {self.state}"

    async def run(self) -> None:
        """Follow until cancelled."""
        try:
            import msgpack  # noqa: F401
            import zmq
            import zmq.asyncio
        except ImportError as error:
            self._turn(FeedState.UNAVAILABLE, f"{error.name} is not installed (pip install 'gpuroute[kv-events]')")
            return
        context = zmq.asyncio.Context()
        try:
            await self._follow(context)
        except zmq.ZMQError as error:
            self._turn(FeedState.UNAVAILABLE, f"{self.source.events}: {error.strerror}")
        finally:
            context.destroy(linger=0)

    async def _follow(self, context: Any) -> None:
        import zmq

        socket = context.socket(zmq.SUB)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.SUBSCRIBE, self.source.topic.encode())
        where = self.source.events
        socket.bind(where.removeprefix(LISTEN)) if where.startswith(LISTEN) else socket.connect(where)
        while True:
            frames = await socket.recv_multipart()
            if len(frames) < 2 or len(frames[-2]) != 8:
                self.garbled += 1
                continue
            number = int.from_bytes(frames[-2], "big")
            if number > self._last + 1:
                await self._catch_up(context, number)
            self.heard(number, frames[-1], time.monotonic(), time.time())
            await asyncio.sleep(0)  # what has come by now is had without waiting: asks would

    async def _catch_up(self, context: Any, number: int) -> None:
        """Events before `number` were missed: have them again, or say that they are lost."""
        first, missed = self._last + 1, number - self._last - 1
        if self.source.replay:
            for had, data in await self._replay(context, first):
                if (had == self._last + 1 or self._last < 0) and had < number:
                    self.heard(had, data, time.monotonic(), time.time())
                    self.replayed += 1
                    await asyncio.sleep(0)
        if self._last + 1 < number and first > 0:
            self.gap(number - self._last - 1, time.monotonic())
        elif self._last + 1 < number:
            log.info("%s: %d events came before this agent; unknown blocks are left alone", self._desk.id, missed)

    async def _replay(self, context: Any, first: int) -> list[tuple[int, bytes]]:
        import zmq

        socket, found = context.socket(zmq.DEALER), []
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        socket.connect(self.source.replay)
        try:
            async with asyncio.timeout(REPLAY_S):
                await socket.send_multipart([b"", first.to_bytes(8, "big")])
                while True:
                    frames = await socket.recv_multipart()
                    number = int.from_bytes(frames[-2], "big") if len(frames) > 1 else END
                    if number == END:
                        break
                    found.append((number, frames[-1]))
                    await asyncio.sleep(0)
        except TimeoutError:
            log.warning("%s: %s does not replay events", self._desk.id, self.source.replay)
        finally:
            socket.close(linger=0)
        return found

    def heard(self, number: int, data: bytes, now: float, epoch: float) -> None:
        """One message: `now` by the agent's clock, `epoch` since 1970, both in seconds."""
        if number <= self._last:
            self._restarted()
        self._last = number
        try:
            batch = read_batch(_unpacked(data))
        except Garbled:
            self.garbled += 1
            return
        self.batches += 1
        self._heard_at, self._heard_tokens = now, -1.0
        late = epoch - batch.at
        at = now - late if 0 <= late <= MAX_LATE_S else now
        prefixes = self._desk.book.prefixes
        if self.blocks.apply(batch, at):
            prefixes.clear()
        if self.state is FeedState.GAP and self.blocks.gone_before < self._gap_at:
            return
        if self.state is not FeedState.FOLLOWING:
            self._turn(FeedState.FOLLOWING, "they are followed")
        prefixes.forget_before(self.blocks.gone_before)

    def gap(self, missed: int, now: float) -> None:
        """So many messages are lost: what has left since cannot be known."""
        self.lost += missed
        self._gap_at = now
        self.blocks.clear()
        self._turn(FeedState.GAP, f"{missed} messages are lost")

    def looked(self, counters: Mapping[str, float], now: float) -> None:
        """The engine's counters, now and then: they show whether it computes prompts without publishing."""
        tokens = counters.get("prompt_tokens")
        if tokens is None or self.state is FeedState.UNAVAILABLE:
            return
        if self._heard_tokens < 0 or tokens < self._heard_tokens:
            self._heard_tokens = tokens
        if tokens - self._heard_tokens >= SILENT_TOKENS and now - self._heard_at >= SILENT_S:
            self._turn(FeedState.SILENT, f"none in {now - self._heard_at:.0f} s, though the engine computes prompts")

    def _restarted(self) -> None:
        """Numbers that begin again are those of a new engine, whose cache is empty."""
        self.restarts += 1
        self.blocks = Blocks()
        self._desk.book.prefixes.clear()

    def _turn(self, state: FeedState, why: str) -> None:
        self._desk.book.prefixes.followed = state is FeedState.FOLLOWING
        if state is not self.state:
            level = logging.INFO if state is FeedState.FOLLOWING else logging.WARNING
            fallback = "" if state is FeedState.FOLLOWING else "; prefixes are counted from takes"
            log.log(level, "%s: KV cache events are %s: %s%s", self._desk.id, state, why, fallback)
            self.state = state


def _unpacked(data: bytes) -> Any:
    import msgpack

    try:
        return msgpack.unpackb(data, raw=False, unicode_errors="replace", strict_map_key=False)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise Garbled(f"not msgpack: {type(error).__name__}") from None
