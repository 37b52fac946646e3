"""The fleet that chaos breaks: stand-in processes, their records in the registry, and all that ever reached them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from dataclasses import dataclass, replace
from http.client import HTTPException
from typing import TYPE_CHECKING, Any

from gpuroute.cli.demo.books import EtcdBook, FileBook
from gpuroute.core.endpoint import Endpoint, State
from gpuroute.errors import RegistryUnavailable
from gpuroute.testing import GpuServer

from .etcd import Cluster, program
from .notes import Records
from .sends import LEFT

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuroute.cli.demo.books import Book
    from gpuroute.config import Settings
    from gpuroute.testing import GpuProcess

KINDS = ("H100", "H100", "L40S")
TIME_SCALE = 0.3


@dataclass
class Server:
    """One stand-in. `broken` names the fault it suffers now."""

    endpoint: Endpoint
    process: GpuProcess
    options: dict[str, Any]
    broken: str = ""
    gone: bool = False


class ChaosFleet:
    """Methods that are not `async` block for a moment; call them off the loop."""

    def __init__(self, count: int, *, etcd: bool, say: Callable[[str], None]) -> None:
        self.cluster = Cluster() if etcd and program("etcd") and program("etcdctl") else None
        self.servers: list[Server] = []
        self.wire = Records()  # what reached one process of an endpoint
        self._count = count
        self._say = say
        self._book: Book | None = None
        self._holes: dict[str, list[socket.socket]] = {}

    @property
    def pool(self) -> str:
        """The pool's name."""
        assert self._book is not None
        return self._book.pool

    @property
    def size(self) -> int:
        """How many are there, well or not."""
        return sum(not server.gone for server in self.servers)

    @property
    def most(self) -> int:
        """How many there may be."""
        return self._count + max(2, self._count // 4)

    @property
    def healthy(self) -> list[Server]:
        """Those that nothing was done to."""
        return [server for server in self.servers if not server.broken and not server.gone]

    async def start(self) -> None:
        """Start everything and write it into the registry."""
        if self.cluster is not None:
            await asyncio.to_thread(self.cluster.start)
            self._book = EtcdBook(self.cluster.url)
            self._say("registry: an etcd of three members")
        else:
            self._book = FileBook()
            self._say("registry: a file (no etcd program found, or --no-etcd); etcd's own faults are left out")
        kinds = [KINDS[number % len(KINDS)] for number in range(self._count)]
        started = [GpuServer.spawn(wait=False, **_options(kind)) for kind in kinds]
        for kind, process in zip(kinds, started, strict=True):
            await self._add(process, _options(kind))

    async def join(self) -> Server:
        """One more."""
        options = _options(KINDS[0])
        return await self._add(await asyncio.to_thread(GpuServer.spawn, **options), options)

    async def _add(self, process: GpuProcess, options: dict[str, Any]) -> Server:
        number = len(self.servers)
        url = await asyncio.to_thread(lambda: process.url)
        endpoint = Endpoint(f"gpu-{number}", url, engine="vllm", model="chaos")
        server = Server(endpoint, process, {**options, "port": process.port})
        self.servers.append(server)
        await self.put(endpoint)
        return server

    async def put(self, endpoint: Endpoint) -> None:
        """Write a record; without a quorum of etcd, as soon as there is one again."""
        assert self._book is not None
        with contextlib.suppress(RegistryUnavailable):
            await asyncio.to_thread(self._book.put, endpoint)

    async def remove(self, ident: str) -> None:
        """Remove a record."""
        assert self._book is not None
        await asyncio.to_thread(self._book.remove, ident)

    async def kill(self, server: Server) -> None:
        """kill -9; what it had counted is kept."""
        await self.harvest(server)
        await asyncio.to_thread(server.process.kill)

    async def restart(self, server: Server) -> None:
        """A fresh process at the same address: its record never left."""
        await asyncio.to_thread(server.process.stop)
        server.process = await asyncio.to_thread(GpuServer.spawn, **server.options)

    async def drain(self, server: Server) -> None:
        """As a deploy does: drained in the registry, then SIGTERM, which lets streams finish."""
        server.gone = True
        await self.put(replace(server.endpoint, state=State.DRAINING))
        await asyncio.sleep(1.5)
        await self.harvest(server)
        server.process.terminate()
        await asyncio.sleep(3)
        await self.remove(server.endpoint.id)
        with contextlib.suppress(TimeoutError):
            await asyncio.to_thread(server.process.wait, 10)
        await asyncio.to_thread(server.process.stop)  # its pipes too

    async def harvest(self, server: Server) -> None:
        """Keep what reached a server."""
        with contextlib.suppress(OSError, HTTPException):
            await asyncio.to_thread(self.wire.take, server.endpoint.id, server.endpoint.url)

    async def harvest_all(self) -> None:
        """Keep what reached all that still run."""
        for server in self.servers:
            if server.process.alive and not server.gone:
                await self.harvest(server)

    async def dig_hole(self) -> str:
        """An endpoint whose packets vanish: its queue of connections is full and nobody accepts."""
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        fillers = []
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(listening.getsockname())
            fillers.append(filler)
        ident = f"hole-{time.monotonic_ns()}"
        self._holes[ident] = [listening, *fillers]
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        await self.put(Endpoint(ident, url, engine="vllm", model="chaos"))
        return ident

    async def fill_hole(self, ident: str) -> None:
        """The record goes, and its sockets."""
        await self.remove(ident)
        for one in self._holes.pop(ident):
            one.close()

    def settings(self, policy: str, *, continuation: bool, hedge: bool) -> Settings:
        """Defaults but for what was asked."""
        assert self._book is not None
        return replace(self._book.settings(policy), continuation=continuation, hedge=hedge, deadline_header=LEFT)

    async def close(self) -> None:
        """End everything that was started."""
        for server in self.servers:
            with contextlib.suppress(ProcessLookupError):
                server.process.thaw()
            server.process.stop()
        for one in [one for sockets in self._holes.values() for one in sockets]:
            one.close()
        self.wire.close()
        if self.cluster is not None:
            await asyncio.to_thread(self.cluster.stop)  # the leases go with it
        elif self._book is not None:
            self._book.close()


def _options(kind: str) -> dict[str, Any]:
    return {"gpu": kind, "time_scale": TIME_SCALE}
