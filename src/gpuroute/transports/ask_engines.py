"""Asking engines themselves, where there is no agent: a GET of the few that say their load cheaply, as if they had bid.

Fresher than what comes with answers, and dearer than a datagram, so it is opt in (`GPUROUTE_ASKS=engines`), bounded and
shared: an answer serves all calls of `FRESH_S`, an engine that says nothing useful is left alone for `REST_S`. Two daemon
threads fetch; nobody waits for them longer than for any other bid. What engines say has no prefix cache and sees no call
that is still on its way. Engines whose agent is not believed are asked too, and if need be for their metrics.
"""

from __future__ import annotations

import http.client
import queue
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from gpuroute.bounded import get
from gpuroute.core.asking import BidBody, EngineState, Kind, decode_ask, encode_bid, identity_of, open_message
from gpuroute.engines.catalog import engine_of
from gpuroute.engines.metrics import read_metrics

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuroute.core.orca import LoadReport
    from gpuroute.engines.engine import Engine

FRESH_S = 0.1
REST_S = 60.0
UNUSED_S = 120.0  # what nobody asked for so long is forgotten: engines come and go for months
TIMEOUT_S = 0.5  # for each piece of an answer
WAITS = 4  # so many times as long for all of it: two that drip would else keep both threads
WORKERS = 2
MAX_BODY = 512 * 1024


class Waiting(NamedTuple):
    """An ask that a fetch will answer."""

    data: bytes
    deliver: Callable[[bytes], None]


class Entry:
    """What is known of one engine. Used under the lock of `Engines`."""

    __slots__ = ("at", "load", "rest_until", "waiting")

    def __init__(self) -> None:
        self.at = 0.0
        self.load: LoadReport | None = None
        self.rest_until = 0.0
        self.waiting: list[Waiting] = []


class Engines:
    """Asks engines for one process. Safe from any thread; starts its threads at the first ask."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        self._jobs: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._threads = 0

    def say(self, data: bytes, target: str, deliver: Callable[[bytes], None]) -> None:
        """Answer an ask from the last look at that engine, or when there is a new one. Takes and tells go nowhere."""
        if data[3] != Kind.ASK:
            return
        now = time.monotonic()
        with self._lock:
            entry = self._entries.get(target) or self._meet(target, now)
            fresh = entry.load if now - entry.at <= FRESH_S else None
            if fresh is None and now >= entry.rest_until:
                entry.waiting.append(Waiting(data, deliver))
                if len(entry.waiting) == 1:
                    self._jobs.put(target)
                self._start()
        if fresh is not None:
            deliver(self._bid(data, target, fresh))

    def _meet(self, target: str, now: float) -> Entry:
        """A new one; under the lock, as the oldest are forgotten for it."""
        while self._entries:
            oldest, entry = next(iter(self._entries.items()))
            if entry.waiting or now - entry.at <= UNUSED_S:
                break
            del self._entries[oldest]
        made = self._entries[target] = Entry()
        return made

    def rests(self, target: str) -> bool:
        """True if that engine said nothing useful a short while ago."""
        entry = self._entries.get(target)
        return entry is not None and entry.rest_until > time.monotonic()

    def _start(self) -> None:
        if self._threads < WORKERS:
            with suppress(RuntimeError):  # no more threads, or the interpreter is about to end: the next ask tries again
                threading.Thread(target=self._work, name="gpuroute-ask-engines", daemon=True).start()
                self._threads += 1

    def _work(self) -> None:
        kept = Kept()
        while True:
            target = self._jobs.get()
            load = _look(target, kept)
            now = time.monotonic()
            with self._lock:
                entry = self._entries[target] = self._entries.pop(target)  # as the last
                waiting, entry.waiting = entry.waiting, []
                entry.at, entry.load = now, load
                entry.rest_until = now + REST_S if load is None else 0.0
            if load is not None:
                for data, deliver in waiting:
                    deliver(self._bid(data, target, load))

    def _bid(self, data: bytes, target: str, load: LoadReport) -> bytes:
        header, body = open_message(data)
        waiting = int(load.waiting or 0)
        queued = waiting * decode_ask(body).tokens if load.queued_tokens is None else int(load.queued_tokens)
        running = load.in_flight if load.running is None else load.running
        ident = identity_of(target)
        bid = BidBody(
            queued, int(running or 0), waiting, load.kv_usage or 0.0, EngineState.READY, None, ident, 0, prefill_us=0
        )
        return encode_bid(bid, header.id, header.sent_ms, header.engine, 0, self._secret)


class Kept:
    """Connections of one thread that may serve again, oldest first. Those of engines that are gone nobody else closes."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[http.client.HTTPConnection, float]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def take(self, url: str) -> http.client.HTTPConnection | None:
        """The one to that engine, if there is one."""
        found = self._held.pop(url, None)
        return found[0] if found else None

    def keep(self, url: str, connection: http.client.HTTPConnection, now: float) -> None:
        """For the next look; others that were not used for long are closed."""
        self._held[url] = connection, now
        while now - (oldest := next(iter(self._held.items())))[1][1] > UNUSED_S:
            self._held.pop(oldest[0])[0].close()


def _look(target: str, connections: Kept) -> LoadReport | None:
    """What the engine says now; None if it says nothing. A kept connection that has died is replaced once."""
    _, name, url, *metrics = target.split(" ")
    engine, parts = engine_of(name), urlsplit(url)
    for _ in range(2):
        kept = connections.take(url)
        # Without a port http.client would look for one in the host, and find it in an IPv6 address.
        connection = kept or http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=TIMEOUT_S)
        try:
            path = parts.path.rstrip("/") + (metrics[0] if metrics else engine.load)
            answer = get(connection, path, {}, within=WAITS * TIMEOUT_S)
            body = answer.read(MAX_BODY)
        except (OSError, http.client.HTTPException):
            connection.close()
            if kept is None:
                return None
            continue
        if answer.isclosed() and not answer.will_close:
            connections.keep(url, connection, time.monotonic())
        else:
            connection.close()
        return _read(engine, body, metrics=bool(metrics)) if answer.status == 200 else None
    return None


def _read(engine: Engine, body: bytes, *, metrics: bool) -> LoadReport | None:
    if not metrics:
        return engine.read_load(body) if engine.read_load else None
    page = read_metrics(engine, body)
    return None if page is None or page.report.running is None else page.report
