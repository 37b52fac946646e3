"""Yardsticks, NOT for production: the routers of the field, re-stated from their published behaviour.

Each peer decides from what its original would know and with the defaults its makers publish; where a
default is unknown the choice favours the peer. Central peers are one process that sees every call (no extra
hop is charged, no loss of the process is simulated); the others are one instance per client. Two are ideals
that nobody can deploy: `token-queue` accounts for every call of the fleet exactly, `oracle` reads the
engines' minds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from heapq import heappop, heappush
from math import exp, inf
from random import Random
from typing import TYPE_CHECKING, ClassVar

from xxhash import xxh3_64_intdigest

from gpuroute.core.outcome import Outcome

from .clients import TRACE_BLOCK
from .gpu import Gpu

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from .fleet import Load, Server
    from .loop import Flight, Simulation

ATTEMPTS = 3


class Peer:
    """A router of the field. Subclasses say `pick`; failed calls go to another server, three attempts
    in all.
    """

    central: ClassVar[bool] = False

    def __init__(self, sim: Simulation, random: Random) -> None:
        self.sim = sim
        self.random = random
        self.live: list[int] = []
        self.in_flight = [0] * len(sim.servers)
        self.fleet_changed(sim.start_view(), 0.0)
        self.set_up()

    def set_up(self) -> None:
        """What the subclass needs."""

    def pick(self, flight: Flight, now: float) -> int:
        """The server for this call."""
        raise NotImplementedError

    def sent(self, index: int, flight: Flight, now: float) -> None:
        """The call is on its way to the server."""

    def started(self, index: int, flight: Flight, now: float, load: Load) -> None:
        """Its first token came."""

    def ended(self, index: int, flight: Flight, now: float, load: Load | None) -> None:
        """It is over; `load` is None if it failed."""

    def arrive(self, flight: Flight, now: float) -> None:
        if not self.live:
            self.sim.give_up(flight)
            return
        index = self.pick(flight, now)
        flight.extra = index
        self.in_flight[index] += 1
        self.sent(index, flight, now)
        self.sim.send(flight, index)

    def first(self, flight: Flight, now: float, load: Load) -> None:
        self.started(_index(flight), flight, now, load)

    def done(self, flight: Flight, now: float, load: Load) -> None:
        self._over(flight, now, load)

    def error(self, flight: Flight, outcome: Outcome, now: float, retry_after: float | None) -> None:  # noqa: ARG002
        self._over(flight, now, None)
        if flight.attempts < ATTEMPTS and outcome is not Outcome.REJECTED and flight.first_at == inf:
            self.sim.at(now, self._again, flight)
        else:
            self.sim.give_up(flight)

    def fleet_changed(self, states: Sequence[str | None], now: float) -> None:  # noqa: ARG002
        self.live = [index for index, state in enumerate(states) if state == "ready"]

    def _again(self, flight: Flight) -> None:
        if flight.live:
            self.arrive(flight, self.sim.now)

    def _over(self, flight: Flight, now: float, load: Load | None) -> None:
        index = _index(flight)
        self.in_flight[index] -= 1
        self.ended(index, flight, now, load)

    def two(self) -> tuple[int, int]:
        """Two servers at random, distinct if there are two."""
        live, size = self.live, len(self.live)
        a = int(self.random.random() * size)
        b = int(self.random.random() * max(1, size - 1))
        return live[a], live[(b + (b >= a)) % size]


def _index(flight: Flight) -> int:
    index = flight.extra
    assert isinstance(index, int)
    return index


class EnvoyLeastRequest(Peer):
    """Two random, fewer active; when weights differ, earliest deadline first with weight / (active + 1).

    Envoy knows no GPU kinds: the weights are those of the registry, here the kinds' rough speeds.
    """

    _weights: list[float] | None = None

    def set_up(self) -> None:
        kinds = {server.kind for server in self.sim.servers}
        self._weights = [_rate(server) for server in self.sim.servers] if len(kinds) > 1 else None
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
        self._weights = [_rate(server) for server in self.sim.servers]

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


class BoundedHash(Peer):
    """KubeAI PrefixHash: consistent hashing with bounded load, 256 points each, bound 1.25 x mean.

    The key is the first 1,024 tokens: the original takes 100 characters of the first user message,
    which a trace of block hashes cannot show, and its first block alone is shared by all calls of a
    Mooncake copy.
    """

    def set_up(self) -> None:
        self._ring: list[tuple[int, int]] = self.sim.shared.setdefault("chwbl", [])
        if not self._ring:
            self._ring += sorted(
                (xxh3_64_intdigest(f"{index}/{point}".encode()), index)
                for index in range(len(self.in_flight))
                for point in range(256)
            )
        self._total = 0

    def pick(self, flight: Flight, now: float) -> int:  # noqa: ARG002
        blocks = flight.request.blocks
        if not blocks:
            a, b = self.two()
            return a if self.in_flight[a] <= self.in_flight[b] else b
        ring, live = self._ring, set(self.live)
        bound = 1.25 * (self._total + 1) / len(live)
        start = bisect_right(ring, (xxh3_64_intdigest(str(blocks[:2]).encode()), 0))
        home, seen = -1, set()
        for step in range(len(ring)):
            index = ring[(start + step) % len(ring)][1]
            if index in seen or index not in live:
                continue
            seen.add(index)
            home = index if home < 0 else home
            if self.in_flight[index] < bound:
                return index
            if len(seen) == len(live):
                break
        return home

    def sent(self, index: int, flight: Flight, now: float) -> None:  # noqa: ARG002
        self._total += 1

    def ended(self, index: int, flight: Flight, now: float, load: Load | None) -> None:  # noqa: ARG002
        self._total -= 1


class CentralBoundedHash(BoundedHash):
    """The same at one proxy that sees every call."""

    central = True


class SglangCacheAware(Peer):
    """SGLang's cache_aware (CLI defaults): the longest remembered prefix, unless the load is uneven or
    the match poor.

    Uneven: max - min > 64 and max > 1.5 min -> the shortest queue. Match of at most 30 % -> the least
    loaded.
    """

    central = True
    THRESHOLD, ABSOLUTE, RELATIVE = 0.3, 64, 1.5

    def set_up(self) -> None:
        self._owner: dict[int, int] = {}

    def pick(self, flight: Flight, now: float) -> int:  # noqa: ARG002
        live, load, blocks = self.live, self.in_flight, flight.request.blocks
        counts = [load[index] for index in live]
        low, high = min(counts), max(counts)
        if not (high - low > self.ABSOLUTE and high > self.RELATIVE * low):
            owner, depth = self._longest(blocks)
            if owner >= 0 and depth * TRACE_BLOCK > self.THRESHOLD * flight.request.prompt_tokens and owner in live:
                return owner
        start = int(self.random.random() * len(live))
        return min((*live[start:], *live[:start]), key=load.__getitem__)

    def sent(self, index: int, flight: Flight, now: float) -> None:  # noqa: ARG002
        for block in flight.request.blocks:
            self._owner[block] = index

    def _longest(self, blocks: tuple[int, ...]) -> tuple[int, int]:
        owner, depth = -1, 0
        for block in blocks:
            found = self._owner.get(block)
            if found is None:
                break
            owner, depth = found, depth + 1
        return owner, depth


class Index:
    """Which servers have which block: per server an LRU of `limit` blocks (0: unbounded), as placed."""

    def __init__(self, servers: int, limits: Sequence[int]) -> None:
        self.holders: dict[int, set[int]] = {}
        self._limits = limits
        self._recent: list[dict[int, None]] = [{} for _ in range(servers)]

    def add(self, index: int, blocks: Iterable[int]) -> None:
        """A prompt with these blocks went to the server."""
        recent, holders = self._recent[index], self.holders
        for block in blocks:
            recent.pop(block, None)
            recent[block] = None
            holders.setdefault(block, set()).add(index)
        while len(recent) > self._limits[index]:
            oldest = next(iter(recent))
            del recent[oldest]
            holders[oldest].discard(index)
            if not holders[oldest]:
                del holders[oldest]

    def drop(self, index: int) -> None:
        """The server lost everything."""
        for block in self._recent[index]:
            self.holders[block].discard(index)
        self._recent[index].clear()

    def matches(self, blocks: tuple[int, ...]) -> dict[int, int]:
        """Leading blocks per server that has any."""
        return matches(self.holders, blocks)


def matches(holders: dict[int, set[int]], blocks: tuple[int, ...]) -> dict[int, int]:
    """Leading blocks that each server holds; servers without any are left out."""
    found: dict[int, int] = {}
    alive: set[int] | None = None
    for depth, block in enumerate(blocks, 1):
        here = holders.get(block)
        alive = (here if alive is None else alive & here) if here else None
        if not alive:
            break
        for index in alive:
            found[index] = depth
    return found


class LlmdScorers(Peer):
    """llm-d / Gateway API: queue 2, KV use 2, prefix 3, best score wins; metrics 50 ms old, prefix
    index as placed.

    The index remembers 2 M tokens per server (31,250 blocks of 64).
    """

    central = True
    SCRAPE, INDEX_TOKENS = 0.05, 2_000_000

    def set_up(self) -> None:
        servers = self.sim.servers
        self._index = Index(len(servers), [self.INDEX_TOKENS // TRACE_BLOCK] * len(servers))
        self._queue = [0] * len(servers)
        self._kv = [0.0] * len(servers)
        self._scraped = -inf

    def pick(self, flight: Flight, now: float) -> int:
        if now - self._scraped >= self.SCRAPE:
            self._scrape(now)
        queue, kv, blocks, live = self._queue, self._kv, flight.request.blocks, self.live
        low, high = min(queue), max(queue)
        span = (high - low) or 1
        found = self._index.matches(blocks)
        size = max(1, flight.request.prompt_tokens // TRACE_BLOCK)
        start = int(self.random.random() * len(live))
        order = (*live[start:], *live[:start])
        scores = [2 * (high - queue[i]) / span + 2 * (1 - kv[i]) + 3 * found.get(i, 0) / size for i in order]
        return order[scores.index(max(scores))]

    def sent(self, index: int, flight: Flight, now: float) -> None:  # noqa: ARG002
        self._index.add(index, flight.request.blocks)

    def _scrape(self, now: float) -> None:
        self._scraped = now - now % self.SCRAPE
        for server in self.sim.servers:
            self._queue[server.index] = server.gpu.waiting
            self._kv[server.index] = server.gpu.kv_usage


class TokenQueue(Peer):
    """An ideal central router: exact own account of uncached prompt tokens ahead on each server, and of
    its cache.

    Cost: seconds of the queue plus those of the uncached tokens. It knows each GPU kind's prefill rate
    and the size of each cache, but not the engines' inner state.
    """

    central = True

    def set_up(self) -> None:
        servers = self.sim.servers
        self._index = Index(len(servers), [_cache_blocks(server) for server in servers])
        self._queued = [0] * len(servers)
        self._price = [1 / _rate(server) for server in servers]

    def pick(self, flight: Flight, now: float) -> int:  # noqa: ARG002
        request, price, queued = flight.request, self._price, self._queued
        size = request.prompt_tokens
        found = self._index.matches(request.blocks)
        start = int(self.random.random() * len(self.live))
        best, best_cost = -1, inf
        for index in (*self.live[start:], *self.live[:start]):
            cost = price[index] * (queued[index] + size - TRACE_BLOCK * found.get(index, 0))
            if cost < best_cost:
                best, best_cost = index, cost
        flight.call = size - TRACE_BLOCK * found.get(best, 0)
        return best

    def sent(self, index: int, flight: Flight, now: float) -> None:  # noqa: ARG002
        self._queued[index] += int(flight.call or 0)  # type: ignore[call-overload]
        self._index.add(index, flight.request.blocks)

    def started(self, index: int, flight: Flight, now: float, load: Load) -> None:  # noqa: ARG002
        self._release(index, flight)

    def ended(self, index: int, flight: Flight, now: float, load: Load | None) -> None:  # noqa: ARG002
        self._release(index, flight)

    def _release(self, index: int, flight: Flight) -> None:
        self._queued[index] -= int(flight.call or 0)  # type: ignore[call-overload]
        flight.call = 0


class Oracle(Peer):
    """Greedy with full knowledge: the server whose engine would produce this call's first token
    soonest.

    Reads queues, caches, decode batches and the step under way of every engine at the moment of the
    pick. It can be beaten: it minds only the call at hand, not what its choice costs the next ones.
    """

    central = True

    def set_up(self) -> None:
        self._holders: dict[int, set[int]] = {}
        for server in self.sim.servers:
            if isinstance(server.gpu, Gpu):
                server.gpu.kv.watch = self._watcher(server.index)

    def pick(self, flight: Flight, now: float) -> int:
        request, servers = flight.request, self.sim.servers
        found = matches(self._holders, request.blocks)
        start = int(self.random.random() * len(self.live))
        best, best_cost = -1, inf
        for index in (*self.live[start:], *self.live[:start]):
            server = servers[index]
            left = max(1, request.prompt_tokens - TRACE_BLOCK * found.get(index, 0))
            cost = _first_token_in(server, left, now)
            if cost < best_cost:
                best, best_cost = index, cost
        return best

    def _watcher(self, index: int) -> Callable[[int, bool], None]:
        holders = self._holders

        def watch(block: int, here: bool) -> None:
            if here:
                holders.setdefault(block, set()).add(index)
            elif block in holders:
                holders[block].discard(index)
                if not holders[block]:
                    del holders[block]

        return watch


def _first_token_in(server: Server, left: int, now: float) -> float:
    gpu = server.gpu
    if not server.alive or gpu.hung:
        return inf
    if not isinstance(gpu, Gpu):
        return gpu.slowdown * gpu.spec.per_token * (gpu.queued_tokens + server.taken + left)
    wait = max(0.0, gpu.step_ends_at - now)
    if gpu.running >= gpu.max_num_seqs or gpu.kv.free < left:
        wait += 1.0  # somebody has to finish first
    return wait + gpu.token_seconds * (gpu.queued_tokens + server.taken + left)


def _rate(server: Server) -> float:
    gpu = server.gpu
    return gpu.spec.prefill_rate if isinstance(gpu, Gpu) else 1 / gpu.spec.per_token


def _cache_blocks(server: Server) -> int:
    gpu = server.gpu
    return (gpu.kv.capacity + gpu.kv.dram_tokens) // gpu.kv.block if isinstance(gpu, Gpu) else 0


PEERS: dict[str, type[Peer]] = {
    "oracle": Oracle,
    "peer:token-queue": TokenQueue,
    "peer:sglang": SglangCacheAware,
    "peer:llm-d": LlmdScorers,
    "peer:kubeai": CentralBoundedHash,
    "peer:kubeai-per-client": BoundedHash,
    "peer:prequal": Prequal,
    "peer:envoy": EnvoyLeastRequest,
    "peer:peak-ewma": PeakEwma,
    "peer:least-conn": LeastConnections,
    "peer:litellm": LeastBusy,
}


def peer_clients(sim: Simulation, count: int, name: str, seed: int) -> list[Peer]:
    """Instances of a peer: one if it is central, else `count`. Raises ValueError with the known names."""
    kind = PEERS.get(name)
    if kind is None:
        raise ValueError(f"unknown peer {name!r}: known are {', '.join(PEERS)}")
    return [kind(sim, Random(f"{seed}/peer/{number}")) for number in range(1 if kind.central else count)]
