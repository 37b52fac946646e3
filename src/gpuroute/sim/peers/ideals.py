"""Ideals that nobody can deploy: what could be had with more knowledge."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from gpuroute.sim.clients import TRACE_BLOCK
from gpuroute.sim.gpu import Gpu

from .caches import Index, matches
from .peer import Peer, cache_blocks, prefill_rate

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuroute.sim.fleet import Load, Server
    from gpuroute.sim.loop import Flight


class TokenQueue(Peer):
    """An ideal central router: exact own account of uncached prompt tokens ahead on each server, and of
    its cache.

    Cost: seconds of the queue plus those of the uncached tokens. It knows each GPU kind's prefill rate
    and the size of each cache, but not the engines' inner state.
    """

    central = True

    def set_up(self) -> None:
        servers = self.sim.servers
        self._index = Index(len(servers), [cache_blocks(server) for server in servers])
        self._queued = [0] * len(servers)
        self._price = [1 / prefill_rate(server) for server in servers]

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
