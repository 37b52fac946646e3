"""The agent's own pages: `/healthz` for the one who restarts it, `/metrics` for Prometheus, `/load` for people."""

from __future__ import annotations

import asyncio
import json
import math
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from gpuroute.agent.kv_feed import FeedState
from gpuroute.core.asking import EngineState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gpuroute.agent.answers import Answers
    from gpuroute.agent.kv_feed import Feed
    from gpuroute.agent.watch import Watch

TIMEOUT_S = 5.0


class Status:
    """A small HTTP server over what the agent knows. Loop thread."""

    def __init__(self, watches: Sequence[Watch], answers: Answers) -> None:
        self._watches = watches
        self._answers = answers
        self._server: asyncio.Server | None = None
        self._pages: dict[str, tuple[str, Callable[[], str]]] = {
            "/healthz": ("text/plain", self.health),
            "/metrics": ("text/plain; version=0.0.4", self.metrics),
            "/load": ("application/json", lambda: json.dumps(self.load(), indent=1) + "\n"),
        }

    async def listen(self, host: str, port: int) -> int:
        """Serve; the port. Raises OSError if it is taken."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=8192)
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._server is not None:
            self._server.close()

    def health(self) -> str:
        """ "ok", as long as it can say so; further lines name what it does without."""
        troubles = [(watch.desk.id, watch.desk.feed.trouble) for watch in self._watches if watch.desk.feed is not None]
        return "\n".join(["ok", *(f"{ident}: {trouble}" for ident, trouble in troubles if trouble), ""])

    def load(self) -> dict[str, Any]:
        """Everything about every engine, for people."""
        now = time.monotonic()
        return {"engines": [_engine(watch, now) for watch in self._watches], "dropped": self._answers.dropped}

    def metrics(self) -> str:
        """The same in Prometheus text form."""
        now = time.monotonic()
        figures = [(watch.desk.id, figure) for watch in self._watches for figure in _figures(watch, now)]
        lines, named = [], set()
        for ident, (name, kind, value) in sorted(figures, key=lambda item: item[1][0]):
            if name not in named:
                named.add(name)
                lines.append(f"# TYPE gpuroute_agent_{name} {kind}")
            lines.append(f'gpuroute_agent_{name}{{endpoint="{ident}"}} {value:g}')
        lines.append("# TYPE gpuroute_agent_dropped_total counter")
        lines += [f'gpuroute_agent_dropped_total{{why="{why}"}} {n}' for why, n in self._answers.dropped.items()]
        return "\n".join(lines) + "\n"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, TimeoutError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head))
                await writer.drain()
        writer.close()

    def _answer(self, head: bytes) -> bytes:
        target = head.split(b" ", 2)[1:2]
        page = self._pages.get(target[0].decode("latin-1").partition("?")[0]) if target else None
        status, kind, text = "200 OK", "text/plain", ""
        if page is None:
            status, text = "404 Not Found", "try /healthz, /metrics or /load\n"
        else:
            kind, text = page[0], page[1]()
        body = text.encode()
        lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(body)}", "Connection: close"]
        return "\r\n".join([*lines, "", ""]).encode() + body


def _engine(watch: Watch, now: float) -> dict[str, Any]:
    desk, book, report = watch.desk, watch.desk.book, watch.report
    return {
        "id": desk.id,
        "url": watch.url,
        "engine": watch.engine.name,
        "state": desk.state.name.lower(),
        "epoch": desk.epoch,
        "restarts": watch.health.restarts,
        "running": book.sample.running,
        "waiting": book.waiting(now),
        "queued_tokens": book.queued_tokens(now),
        "kv_usage": book.sample.kv_usage,
        "engine_says": {name: value for name, value in report._asdict().items() if value is not None},
        "sample_age_s": round(now - book.sample.at, 3) if watch.looks else None,
        "prefix_cache": {
            "prefixes": len(book.prefixes),
            "capacity_tokens": book.prefixes.capacity,
            "unseen_tokens": max(0, book.prefixes.unseen),
        },
        "kv_events": _events(desk.feed) if desk.feed is not None else None,
        "seconds_per_1000_prompt_tokens": round(math.exp(book.rate.log) * 1000, 6),
        "told": book.rate.count,
        "tokens_per_s": {"prefill": round(watch.rates.prefill), "generation": round(watch.rates.generation)},
        "asks": desk.asks,
        "takes": desk.takes,
        "tells": desk.tells,
    }


def _events(feed: Feed) -> dict[str, Any]:
    blocks = feed.blocks
    return {
        "state": str(feed.state),
        "batches": feed.batches,
        "lost": feed.lost,
        "replayed": feed.replayed,
        "garbled": feed.garbled,
        "blocks": len(blocks),
        "block_tokens": blocks.block_size,
        "stored": blocks.stored,
        "removed": blocks.removed,
    }


def _figures(watch: Watch, now: float) -> Iterator[tuple[str, str, float]]:
    desk, book = watch.desk, watch.desk.book
    yield "asks_total", "counter", desk.asks
    yield "takes_total", "counter", desk.takes
    yield "tells_total", "counter", desk.tells
    yield "engine_restarts_total", "counter", watch.health.restarts
    yield "looks_total", "counter", watch.looks
    yield "queued_tokens", "gauge", book.queued_tokens(now)
    yield "waiting", "gauge", book.waiting(now)
    yield "running", "gauge", book.sample.running
    yield "kv_usage", "gauge", book.sample.kv_usage
    yield "prefixes", "gauge", len(book.prefixes)
    yield "seconds_per_prompt_token", "gauge", math.exp(book.rate.log)
    yield "ready", "gauge", desk.state is EngineState.READY
    if desk.feed is not None:
        yield "kv_events_followed", "gauge", desk.feed.state is FeedState.FOLLOWING
        yield "kv_events_total", "counter", desk.feed.batches
        yield "kv_events_lost_total", "counter", desk.feed.lost
        yield "kv_blocks", "gauge", len(desk.feed.blocks)
