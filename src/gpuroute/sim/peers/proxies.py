"""Routers of counts: what proxies and their kin know of load, and none of caches."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from math import exp
from typing import TYPE_CHECKING

from .peer import Peer, prefill_rate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuroute.sim.fleet import Load
    from gpuroute.sim.loop import Flight


class EnvoyLeastRequest(Peer):
    """Two random, fewer active; when weights differ, earliest deadline first with weight / (active + 1).

    Envoy knows no GPU kinds: the weights are those of the registry, here the kinds' rough speeds.
    """

    _weights: list[float] | None = None

    def set_up(self) -> None:
        kinds = {server.kind for server in self.sim.servers}
        self._weights = [prefill_rate(server) for server in self.sim.servers] if len(kinds) > 1 else None
        self._queue: list[tuple[float, int, int]] = []
        self._turn, self._now = 0, 0.0
        self._queued: set[int] = set()
        self._enqueue()

    def fleet_changed(self, states: Sequence[str | None], now: float) -> None:
        super().fleet_changed(states, now)
        self._enqueue()

    def _enqueue(self) -> None:
        """Whoever is listed for the first time gets its first turn as if it had been there."""
        if self._weights is not None:
            for index in self.live:
                if index not in self._queued:
                    self._queued.add(index)
                    heappush(self._queue, (self._now + self.random.random() / self._weights[index], index, index))

    def pick(self, flight: Flight, now: float) -> int:  # noqa: ARG002
        if self._weights is None:
            a, b = self.two()
            return a if self.in_flight[a] <= self.in_flight[b] else b
        while True:
            self._now, _, index = heappop(self._queue)
            self._turn += 1
            weight = self._weights[index] / (self.in_flight[index] + 1)
            heappush(self._queue, (self._now + 1 / weight, len(self.in_flight) + self._turn, index))
            if index in self.live:
                return index


class PeakEwma(Peer):
    """Finagle / Linkerd: two random, latency average that jumps up at once and decays over 10 s, times
    (active + 1).
    """

    TAU = 10.0

    def set_up(self) -> None:
        self._cost = [0.0] * len(self.in_flight)
        self._stamp = [0.0] * len(self.in_flight)

    def pick(self, flight: Flight, now: float) -> int:  # noqa: ARG002
        a, b = self.two()
        return a if self._load(a, now) <= self._load(b, now) else b

    def ended(self, index: int, flight: Flight, now: float, load: Load | None) -> None:
        before = self._cost[index]
        spent = now - flight.born if load else max(5.0, before)  # a failure costs at least 5 s (Linkerd)
        weight = exp(-(now - self._stamp[index]) / self.TAU)
        self._cost[index] = spent if spent > before else before * weight + spent * (1 - weight)
        self._stamp[index] = now

    def _load(self, index: int, now: float) -> float:
        cost = self._cost[index] * exp(-(now - self._stamp[index]) / self.TAU)
        active = self.in_flight[index]
        return 1e9 + active if cost == 0.0 and active else cost * (active + 1)


class LeastConnections(Peer):
    """nginx least_conn: the fewest own connections per weight (the weights that Envoy gets), ties in turn."""

    def set_up(self) -> None:
        self._turn = self.random.randrange(1 << 20)
        self._weights = [prefill_rate(server) for server in self.sim.servers]

    def pick(self, flight: Flight, now: float) -> int:  # noqa: ARG002
        live, active, weights = self.live, self.in_flight, self._weights
        self._turn += 1
        start = self._turn % len(live)
        order = (*live[start:], *live[:start])
        return min(order, key=lambda index: active[index] / weights[index])


class LeastBusy(Peer):
    """LiteLLM least-busy: the fewest own calls in flight, the first listed on a tie."""

    def pick(self, flight: Flight, now: float) -> int:  # noqa: ARG002
        return min(self.live, key=self.in_flight.__getitem__)


class Prequal(Peer):
    """Prequal (NSDI 2024): three probes per call, a pool of 16 answers at most 1 s old, hot-cold
    lexicographic.

    A server answers with its requests in flight and the median latency of recent ones that began at
    about that many.
    """

    PROBES, POOL, AGE, HOT, REMOVE = 3, 16, 1.0, 2**-0.25, 1

    def set_up(self) -> None:
        self._probes: deque[list[float]] = deque()  # [in flight, latency, server, received, uses left]
        self._worst_next = False
        servers = self.sim.servers
        if "prequal" not in self.sim.shared:
            self.sim.shared["prequal"] = [deque(maxlen=32) for _ in servers]
        self._history: list[deque[tuple[int, float]]] = self.sim.shared["prequal"]

    def pick(self, flight: Flight, now: float) -> int:  # noqa: ARG002
        self._probe(now)
        pool = self._probes
        while pool and now - pool[0][3] > self.AGE:
            pool.popleft()
        fresh = [probe for probe in pool if int(probe[2]) in self.live]
        if len(fresh) < 2:
            return self.live[int(self.random.random() * len(self.live))]
        counts = sorted(probe[0] for probe in fresh)
        theta = counts[min(len(counts) - 1, int(self.HOT * len(counts)))]
        cold = [probe for probe in fresh if probe[0] <= theta]
        best = min(cold, key=lambda probe: probe[1]) if cold else min(fresh, key=lambda probe: probe[0])
        best[0] += 1
        best[4] -= 1
        if best[4] < 1:
            pool.remove(best)
        self._drop_one(theta)
        return int(best[2])

    def sent(self, index: int, flight: Flight, now: float) -> None:  # noqa: ARG002
        flight.call = self.sim.servers[index].live

    def ended(self, index: int, flight: Flight, now: float, load: Load | None) -> None:
        if load is not None:
            self._history[index].append((int(flight.call or 0), now - flight.born))  # type: ignore[call-overload]

    def _probe(self, now: float) -> None:
        live = self.live
        for _ in range(min(self.PROBES, len(live))):
            index = live[int(self.random.random() * len(live))]
            self.sim.at(now + self.sim.network.delay, self._answer, index)

    def _answer(self, index: int) -> None:
        server = self.sim.servers[index]
        if server.alive:
            near = sorted(self._history[index], key=lambda seen: abs(seen[0] - server.live))[:9]
            median = sorted(spent for _, spent in near)[len(near) // 2] if near else 0.0
            answer = [float(server.live), median, float(index), self.sim.now + self.sim.network.delay, self._uses()]
            self.sim.at(answer[3], self._receive, answer)

    def _receive(self, answer: list[float]) -> None:
        self._probes.append(answer)
        if len(self._probes) > self.POOL:
            self._probes.popleft()

    def _uses(self) -> float:
        share = 1 - self.POOL / max(len(self.live), self.POOL + 1)
        uses = max(1.0, 2 / max(0.01, share * self.PROBES - self.REMOVE))
        return int(uses) + (self.random.random() < uses % 1)

    def _drop_one(self, theta: float) -> None:
        pool = self._probes
        if len(pool) < 2:
            return
        if self._worst_next:
            hot = [probe for probe in pool if probe[0] > theta]
            pool.remove(max(hot, key=lambda probe: probe[0]) if hot else max(pool, key=lambda probe: probe[1]))
        else:
            pool.popleft()
        self._worst_next = not self._worst_next
