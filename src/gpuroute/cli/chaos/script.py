"""What happens to the fleet, and when: seeded, so that a run can be had again."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .footprint import Footprints

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from random import Random

    from gpuroute.router import Router

    from .fleet import ChaosFleet, Server

CALM_S = 6.0
OUTAGE_S = 5.0
AFTER_S = 6.0
PROBE_S = 2.0
"""An attempt that comes so long after the one before is a probe of an endpoint that was out."""
FAULTS = (
    "kill", "freeze", "slow", "error", "busy", "reset", "cut", "hang", "hole", "join", "drain", "flap",
    "leader", "quorum", "compact", "outage",
)  # fmt: skip
OF_ETCD = frozenset({"leader", "quorum", "compact"})
SILENT = frozenset({"freeze", "hang"})
SECONDS = {"kill": 4.0, "freeze": 6.0, "slow": 6.0, "error": 4.0, "busy": 4.0, "reset": 4.0, "cut": 4.0, "hang": 6.0}


@dataclass
class Happened:
    """One fault: when it began and ended, when a call first could notice it, and how long calls were sent there since."""

    kind: str
    target: str
    began: float
    ended: float = 0.0
    noticed: float | None = None
    out_s: float | None = None
    share: float | None = None


@dataclass
class Script:
    """Plays itself once. At any time more than half of the servers are well, but in the outage at the end."""

    fleet: ChaosFleet
    router: Router
    random: Random
    seconds: float
    only: list[str] | None
    say: Callable[[str], None]
    happened: list[Happened] = field(default_factory=list)
    outage: tuple[float, float] | None = None
    calm_until: float = 0.0
    footprints: Footprints = field(default_factory=Footprints)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _started: float = 0.0
    _etcd: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def play(self) -> None:
        """All of it."""
        self._started = time.monotonic()
        pace = min(1.0, self.seconds / 60)  # a short run waits shortly
        kinds = [kind for kind in FAULTS if self.only is None or kind in self.only]
        if self.fleet.cluster is None:
            kinds = [kind for kind in kinds if kind not in OF_ETCD]
        with_outage = "outage" in kinds
        kinds = [kind for kind in kinds if kind != "outage"]
        await asyncio.sleep(CALM_S * pace)
        self.calm_until = time.monotonic()
        footprints = asyncio.create_task(self.footprints.watch())
        ends = self.calm_until + self.seconds - (OUTAGE_S * with_outage + AFTER_S * pace * (1 + with_outage))
        while kinds and time.monotonic() < ends:
            for kind in self.random.sample(kinds, len(kinds)):
                await asyncio.sleep(self.random.uniform(0.4, 1.2))
                if time.monotonic() >= ends:
                    break
                self._begin(kind)
        await asyncio.gather(*self._tasks)
        await asyncio.sleep(AFTER_S * pace)
        if with_outage:
            await self._everybody_gone()
            await asyncio.sleep(AFTER_S * pace)
        footprints.cancel()
        self.footprints.take()

    def _begin(self, kind: str) -> None:
        fleet = self.fleet
        if kind in SECONDS or kind in {"drain", "flap"}:
            here = [server for server in fleet.servers if not server.gone]
            if len(fleet.healthy) - 1 <= 0.6 * len(here):
                return
            server = self.random.choice(fleet.healthy)
            action = self._drain(server) if kind == "drain" else self._break(kind, server)
        else:
            action = getattr(self, f"_{kind}")()
        task = asyncio.create_task(self._quietly(action))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _quietly(self, action: Awaitable[None]) -> None:
        try:
            await action
        except Exception as error:
            self.say(f"{self._now():6.1f} s  the script itself failed: {type(error).__name__}: {error}")

    def _now(self) -> float:
        return time.monotonic() - self._started

    def _note(self, kind: str, target: str) -> Happened:
        self.say(f"{self._now():6.1f} s  {kind} {target}".rstrip())
        one = Happened(kind, target, time.monotonic())
        self.happened.append(one)
        return one

    async def _break(self, kind: str, server: Server) -> None:
        server.broken = kind
        one = self._note(kind, server.endpoint.id)
        watching = asyncio.create_task(self._until_out(one))
        try:
            await self._strike(kind, server)
            one.began = time.monotonic()
            await asyncio.sleep(SECONDS.get(kind, 0.5))
            await self._mend(kind, server)
        finally:
            watching.cancel()
            one.ended = time.monotonic()
            await asyncio.sleep(0.5)
            server.broken = ""

    async def _strike(self, kind: str, server: Server) -> None:
        process = server.process
        orders: dict[str, Callable[[], Any]] = {
            "slow": lambda: process.slow(8),
            "error": lambda: process.answer(500),
            "busy": lambda: process.answer(429, headers={"retry-after": "1"}),
            "reset": lambda: process.drop_mid_stream(0, count=20, reset=True),
            "cut": lambda: process.drop_mid_stream(5, count=3),
            "hang": process.hang,
            "freeze": process.freeze,
        }
        if kind == "kill":
            await self.fleet.kill(server)
        elif kind == "flap":
            await self.fleet.remove(server.endpoint.id)
        else:
            await asyncio.to_thread(orders[kind])

    async def _mend(self, kind: str, server: Server) -> None:
        if kind == "kill":
            await self.fleet.restart(server)
        elif kind == "flap":
            await self.fleet.put(server.endpoint)
        else:
            server.process.thaw()
            await asyncio.to_thread(server.process.resume)

    async def _until_out(self, one: Happened) -> None:
        """Note for how long calls were sent there, from the first that could notice: read off what is in flight."""
        while True:
            state = self.router.pool(self.fleet.pool).snapshot.by_id.get(one.target)
            flying = tuple(state.in_flight) if state is not None else ()
            if flying and one.noticed is None:
                one.noticed = max(one.began, min(attempt.started for attempt in flying))
            since = one.began if one.noticed is None else one.noticed
            latest = max(one.out_s or 0.0, *(attempt.started - since for attempt in flying), 0.0)
            if latest > (one.out_s or 0.0) + PROBE_S:
                return  # a probe: it was out in between
            one.out_s = latest
            await asyncio.sleep(0.02)

    async def _drain(self, server: Server) -> None:
        self._note("drain", server.endpoint.id)
        await self.fleet.drain(server)

    async def _join(self) -> None:
        if self.fleet.size >= self.fleet.most:
            return  # a long run must not start more and more processes
        server = await self.fleet.join()
        self._note("join", server.endpoint.id)

    async def _hole(self) -> None:
        ident = await self.fleet.dig_hole()
        one = self._note("hole", ident)
        await asyncio.sleep(2)
        before = self._served(ident)
        await asyncio.sleep(6)
        after = self._served(ident)
        one.share = (after[0] - before[0]) / max(1, after[1] - before[1])
        await self.fleet.fill_hole(ident)
        one.ended = time.monotonic()

    def _served(self, ident: str) -> tuple[int, int]:
        """Attempts to one endpoint, and to all."""
        pool = self.router.pool(self.fleet.pool)
        state = pool.snapshot.by_id.get(ident)
        return (state.served + len(state.in_flight) if state else 0), pool.shared.signals.attempts

    async def _leader(self) -> None:
        async with self._etcd:
            await self._kill_leader()

    async def _kill_leader(self) -> None:
        cluster = self.fleet.cluster
        assert cluster is not None
        number = await asyncio.to_thread(cluster.leader)
        if number is None:
            return
        one = self._note("leader", f"m{number} of etcd killed")
        await asyncio.to_thread(cluster.kill_member, number)
        await asyncio.sleep(4)
        await asyncio.to_thread(cluster.start_member, number)
        await asyncio.sleep(2)
        one.ended = time.monotonic()

    async def _quorum(self) -> None:
        async with self._etcd:
            await self._take_quorum()

    async def _take_quorum(self) -> None:
        cluster = self.fleet.cluster
        assert cluster is not None
        one = self._note("quorum", "two members of etcd frozen")
        cluster.freeze([0, 1])
        await asyncio.sleep(5)
        cluster.freeze([0, 1], thaw=True)
        one.ended = time.monotonic()

    async def _compact(self) -> None:
        assert self.fleet.cluster is not None
        self._note("compact", "etcd's history")
        await asyncio.to_thread(self.fleet.cluster.compact)

    async def _everybody_gone(self) -> None:
        """Nobody takes connections for five seconds, and then all do again."""
        here = [server for server in self.fleet.servers if not server.gone]
        began = time.monotonic()
        self._note("outage", "of everybody")
        await asyncio.gather(*(asyncio.to_thread(server.process.refuse) for server in here))
        await asyncio.sleep(OUTAGE_S - (time.monotonic() - began))
        await asyncio.gather(*(asyncio.to_thread(server.process.resume) for server in here))
        self.outage = (began, time.monotonic())
        self.say(f"{self._now():6.1f} s  everybody is back")
