"""Looks at one engine twice a second over loopback, and writes what it sees on the engine's desk.

What is read, and under which names, is in the engine's table (`gpuroute.engines`). One task for each engine, no thread.
Samples are the correction: the queue itself comes from takes and tells.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit, urlunsplit

from gpuroute.agent.book import Sample
from gpuroute.agent.fetch import GONE, SILENT, Reply, fetch
from gpuroute.agent.health import HUNG_AFTER_S, Health, Rates, Seen
from gpuroute.core.asking import EngineState
from gpuroute.core.orca import LoadReport
from gpuroute.engines.answers import judge
from gpuroute.engines.detect import PATHS, Probed, detect, ready
from gpuroute.engines.engine import Meaning
from gpuroute.engines.metrics import Reader, pieces

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuroute.agent.desk import Desk
    from gpuroute.engines.engine import Engine
    from gpuroute.engines.metrics import Metrics

INTERVAL_S = 0.5
TIMEOUT_S = 2.0
UNSAID_S = 10.0
"""An engine that is busy may owe its page of metrics for that long; what it said last grows old meanwhile."""


class Watch:
    """The eyes of an agent on one engine. Loop thread.

    `warm` and `draining` are set by who decides about them; together with the engine's health they make `desk.state`.
    `leaving`: the engine itself, once it was warm, says that it takes no calls.
    """

    def __init__(
        self, url: str, engine: Engine, desk: Desk, *, model: str = "", hung_after: float = HUNG_AFTER_S
    ) -> None:
        self.url = url
        self.engine = engine
        self.desk = desk
        self.model = model
        self.health = Health(hung_after)
        self.rates = Rates()
        self.report = LoadReport()
        self.warm = False
        self.draining = False
        self.leaving = False
        self.looks = 0
        self._said_at = -math.inf
        self._knock = engine.knock

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(INTERVAL_S)

    async def look(self) -> None:
        """One look: sample, verdict, state."""
        reply, report, counters, started = await self._read()
        now = time.monotonic()
        self.looks += 1
        if reply.status == GONE.status:
            self.health.refused()
        elif not reply.ok:
            self.health.unanswered()
        else:
            if report.requests is not None or now - self._said_at > UNSAID_S:
                self._saw(report, counters, started, now)
            else:  # to owe an answer is not to be idle
                self.health.present(now)
            said = await self._leaves() if self.warm else False
            self.leaving = self.leaving if said is None else said
        self.settle(now)

    def settle(self, now: float) -> None:
        """What bids say of the engine."""
        if self.draining:
            self.desk.state = EngineState.DRAINING
        elif self.health.gone:
            self.desk.state = EngineState.GONE
        elif self.leaving:
            self.desk.state = EngineState.DRAINING
        elif self.health.hung(now):
            self.desk.state = EngineState.HUNG
        else:
            self.desk.state = EngineState.READY if self.warm else EngineState.WARMING

    async def is_ready(self) -> bool:
        """Whether the engine says that it serves."""
        return ready(self.engine, await self._readiness())

    async def _readiness(self) -> Probed:
        reply = await fetch(self.url, self.engine.ready.replace("{model}", quote(self.model)), timeout=TIMEOUT_S)
        return Probed(reply.status, reply.body)

    async def _leaves(self) -> bool | None:
        """Whether the engine, told to stop by somebody else, takes no more calls while it ends those that it has; None if
        it was silent."""
        said: bool | None = None
        if not self.engine.queue_fails_health:
            health = await self._readiness()
            if health.status not in {GONE.status, SILENT.status}:
                said = not ready(self.engine, health)
        if said or self._knock is None:
            return said
        reply = await fetch(self.url, self._knock[0], body=self._knock[1], timeout=TIMEOUT_S)
        if reply.status in {401, 403, 404, 405}:
            self._knock = None  # another version, or locked: it need not hear that twice a second
        if reply.status in {GONE.status, SILENT.status}:
            return None
        return judge(self.engine, reply.status, reply.body).meaning is Meaning.DRAINING

    @property
    def counts(self) -> bool:
        """True if the engine says how many requests run."""
        return self.report.running is not None or self.report.in_flight is not None

    @property
    def idle(self) -> bool:
        """True if the engine says that nothing runs or waits, or is gone. To say nothing is not to be idle."""
        return self.health.gone or (self.counts and not self.report.requests)

    def _saw(self, report: LoadReport, counters: Mapping[str, float], started: float, now: float) -> None:
        if report.requests is not None:
            self._said_at = now
        running, waiting = report.running, report.waiting or 0.0
        if running is None:
            running = report.in_flight or 0.0
        if report.kv_tokens:
            self.desk.sized(int(report.kv_tokens))
        self._judge(Seen(running, waiting, report.kv_usage or 0.0, counters, started), now)
        self.rates.add(counters, now)
        self.report = report
        queued = -1 if report.queued_tokens is None else int(report.queued_tokens)
        if self.desk.feed is not None:
            self.desk.feed.looked(counters, now)
        # Who has counted before and does so no more is not idle: bids go by takes, and say how old the rest is.
        at = now if report.requests is not None or self._said_at == -math.inf else self._said_at
        self.desk.sampled(Sample(at, int(running), int(waiting), report.kv_usage or 0.0, queued))

    def _judge(self, seen: Seen, now: float) -> None:
        """Is it the one that we know, a new one, or one that was at work before we came?"""
        desk, health, began = self.desk, self.health, int(seen.started)
        is_known, is_new = health.has_met, seen.is_new or (health.was_gone and not began)
        if health.answered(seen, now, desk.told_at):
            same = began in {0, desk.epoch}  # counters that shrink are another cache, whatever the process says
            desk.restarted(int(time.time()) if same else began)
        elif not is_known and is_new:
            desk.epoch = began or int(time.time())
        elif not is_known:
            desk.met(began, now)
        elif not desk.epoch:
            desk.epoch = began

    async def _read(self) -> tuple[Reply, LoadReport, Mapping[str, float], float]:
        """The engine's answer, and what it says of load: from its metrics, and where it has one its load endpoint."""
        engine, report, counters, started = self.engine, LoadReport(), {}, 0.0
        reply = GONE
        if engine.metrics:
            reply = await fetch(self._metrics_url(), engine.metrics, timeout=TIMEOUT_S)
            metrics = await _understood(engine, reply.body) if reply.ok else None
            if metrics is not None:
                report, counters, started = metrics.report, dict(metrics.counters), metrics.started
        if reply.status != GONE.status and engine.load and engine.read_load is not None:
            answer = await fetch(self.url, engine.load, timeout=TIMEOUT_S)
            loaded = engine.read_load(answer.body) if answer.ok else None
            if loaded is not None:
                reply, report = answer, _merged(report, loaded)
        if not reply.ok:
            reply = await fetch(self.url, engine.live.replace("{model}", quote(self.model)), timeout=TIMEOUT_S)
        return reply, report, counters, started

    def _metrics_url(self) -> str:
        """Some engines count on a port of their own."""
        if not self.engine.metrics_port:
            return self.url
        parts = urlsplit(self.url)
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        return urlunsplit((parts.scheme, f"{host}:{self.engine.metrics_port}", "", "", ""))


async def _understood(engine: Engine, page: bytes) -> Metrics | None:
    """A page of metrics. Those of many ranks or models are long: asks are answered between the pieces."""
    reader = Reader(engine)
    for piece in pieces(page):
        reader.read(piece)
        await asyncio.sleep(0)
    return reader.metrics


def _merged(first: LoadReport, second: LoadReport) -> LoadReport:
    """All that either says; the first is believed where both do."""
    return LoadReport(*(b if a is None else a for a, b in zip(first, second, strict=True)))


async def recognised(url: str) -> Engine | None:
    """The engine that answers there; None if nothing known does."""
    replies = await asyncio.gather(*(fetch(url, path, timeout=TIMEOUT_S) for path in PATHS))
    return detect({path: Probed(r.status, r.body) for path, r in zip(PATHS, replies, strict=True) if r.status})
