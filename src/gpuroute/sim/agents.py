"""The far end of an ask: what an engine, or the agent beside it, says of itself in a simulation.

The agent is the production book (`gpuroute.agent.book`), fed as in production: the engine's counts twice a
second, takes and tells as they arrive. Engines count requests, they do not know queued tokens, so neither
does the sample.
"""

from __future__ import annotations

from math import inf
from random import Random
from typing import TYPE_CHECKING, Final

from gpuroute.agent.book import Book, Sample
from gpuroute.agent.health import HUNG_AFTER_S
from gpuroute.core.report import Report
from gpuroute.core.sources import copies
from gpuroute.core.speed import PREFILL_PRIOR, UNKNOWN_PRIOR

from .gpu import Gpu

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .fleet import Server
    from .loop import Simulation
    from .reports import Reports

SAMPLE_S: Final = 0.5
LINGER_S: Final = 1_000.0  # after the window: a call to a hung engine may wait for ever, the simulation does not


class Agents:
    """One answering side per server, shared by all clients of a simulation."""

    def __init__(self, sim: Simulation, reports: Reports) -> None:
        self._sim = sim
        self._reports = reports
        self._random = Random(f"{sim.seed}/agents")
        order = list(range(len(sim.servers)))
        self._random.shuffle(order)
        self.silent = set(order[round(reports.coverage * len(order)) :])
        self._liars = set(order[: round(reports.liars * len(order))])
        self._frozen = set(order[: round(reports.frozen * len(order))])
        self.books = [_book(server) for server in sim.servers] if reports.channel in {"agent", "digest"} else []
        self._seen: dict[int, Report] = {}
        self._hung_since: dict[int, float] = {}
        if self.books:
            sim.at(0.0, self._sample, None)

    def lost(self) -> bool:
        """One message more or less."""
        return self._reports.loss > 0 and self._random.random() < self._reports.loss

    def lost_note(self) -> bool:
        """Whether a take or tell gets lost, said as often as clients say it where so many asks get lost."""
        if not self._reports.loss:
            return False
        return all(self.lost() for _ in range(copies(self._reports.unanswered)))

    def bid(self, index: int, id_: int, tokens: int, ladder: Sequence[int]) -> Report | None:
        """What comes back for an ask that reaches server `index` now; None: nothing."""
        server, now = self._sim.servers[index], self._sim.now
        if index in self.silent or not server.alive or (server.gpu.hung and self._notices(index)):
            return None
        if not self.books:
            return self._aged(index, Report(now, server.gpu.running, server.gpu.waiting, source="engine"))
        book = self.books[index]
        matched = book.ask(id_, tokens, ladder, now)
        if self._reports.cache_error:
            wrong = 1 + self._reports.cache_error * (2 * self._random.random() - 1)
            matched = min(tokens, int(matched * wrong))
        if index in self._liars:
            return Report(now, 0, 0, 0, 0.0, tokens, source="agent")
        said = book.sample
        queued, waiting = book.queued_tokens(now), book.waiting(now)
        report = Report(now, said.running, waiting, queued, said.kv_usage, matched, age=now - said.at, source="agent")
        return report if self._reports.frozen_sample else self._aged(index, report)

    def engine(self, index: int) -> Report | None:
        """What the engine itself answers: its counts and KV use, and no queued tokens; None: nothing."""
        server = self._sim.servers[index]
        if not server.alive or server.gpu.hung:
            return None
        gpu = server.gpu
        return Report(self._sim.now, gpu.running, gpu.waiting, kv_usage=gpu.kv_usage, source="engine:READY")

    def take(self, message: tuple[int, int, int, int]) -> None:
        """A client says that it comes: (server, id, uncached tokens, prompt tokens)."""
        index, id_, uncached, tokens = message
        if self.books and index not in self.silent and not self.lost_note():
            self.books[index].take(id_, uncached, tokens, self._sim.now)

    def tell(self, message: tuple[int, int, float]) -> None:
        """A client says when its first token came: (server, id, seconds)."""
        index, id_, ttft = message
        if self.books and index not in self.silent and not self.lost_note():
            self.books[index].tell(id_, ttft, None, self._sim.now)

    def _aged(self, index: int, fresh: Report) -> Report:
        """Old news, if the scenario says so: refreshed only every `stale` seconds, or never again
        once frozen.
        """
        reports, now, frozen = self._reports, self._sim.now, self._is_frozen(index)
        if not reports.stale and not frozen:
            return fresh
        seen = self._seen.get(index)
        if seen is None or (now - seen.at >= reports.stale and not frozen):
            self._seen[index] = seen = fresh
        at = now if self._reports.channel == "agent" else seen.at  # who asks does not see how old an answer is
        return seen._replace(at=at, matched_tokens=fresh.matched_tokens)

    def _is_frozen(self, index: int) -> bool:
        return index in self._frozen and self._sim.now >= self._reports.frozen_at

    def _notices(self, index: int) -> bool:
        """Whether a hung engine is known for it: an engine says nothing itself, an agent notices after a while and then
        says so, which is as good as nothing."""
        return not self.books or self._sim.now - self._hung_since.get(index, inf) > HUNG_AFTER_S

    def _sample(self, _: object) -> None:
        sim = self._sim
        for server, book in zip(sim.servers, self.books, strict=True):
            if not server.gpu.hung:
                self._hung_since.pop(server.index, None)
            if server.alive:
                gpu = server.gpu
                if gpu.hung:
                    self._hung_since.setdefault(server.index, sim.now)
                if not (self._reports.frozen_sample and self._is_frozen(server.index)):
                    book.sampled(Sample(sim.now, gpu.running, gpu.waiting, gpu.kv_usage))
        if not sim.over and sim.now < sim.meter.end + LINGER_S:
            sim.at(sim.now + SAMPLE_S, self._sample, None)


def _book(server: Server) -> Book:
    gpu = server.gpu
    prior = PREFILL_PRIOR.get(server.kind, UNKNOWN_PRIOR)
    if not isinstance(gpu, Gpu):
        return Book(0, 0, prior)
    return Book(gpu.kv.capacity, gpu.kv.dram_tokens, prior)
