"""The demo's GPU servers, each a process, and what happens to them while calls run."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from gpuroute.core.endpoint import Endpoint, Gpu, State
from gpuroute.testing import GpuServer

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from types import TracebackType
    from typing import Any, Self

    from gpuroute.testing import GpuProcess

    from .books import Book

TIME_SCALE = 0.3
LEASE_S = 3.0
"""A killed server stays in the registry for so long, as with a lease that nobody renews; less in a short replay."""
_SHUTDOWN_S = 1.5
_FAST, _SLOW = "L40S", "V100"
KINDS = (_FAST, _FAST, _FAST, _FAST, _SLOW, _SLOW)


@dataclass
class Member:
    """One server of the fleet and its record."""

    endpoint: Endpoint
    process: GpuProcess
    note: str = ""


class DemoFleet:
    """Six servers at first: four of one kind, two slower ones. `say` gets a line for people at every event."""

    def __init__(self, book: Book, say: Callable[[str], None]) -> None:
        self.book = book
        self.members: dict[str, Member] = {}
        self._say = say

    def __enter__(self) -> Self:
        processes = [_spawn(kind) for kind in KINDS]
        try:
            for number, (kind, process) in enumerate(zip(KINDS, processes, strict=True), 1):
                self._add(number, kind, process)
        except BaseException:
            for process in processes:
                process.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for ident, member in self.members.items():
            member.process.stop()
            self.book.remove(ident)

    async def play(self, seconds: float) -> None:
        """Everything that happens, spread over `seconds` of arrivals."""
        script: list[tuple[float, Callable[[], Coroutine[Any, Any, None]]]] = [
            (0.20, partial(self._kill, seconds)),
            (0.35, self._slow),
            (0.50, self._drain),
            (0.65, self._join),
        ]
        async with asyncio.TaskGroup() as events:
            passed = 0.0
            for share, event in script:
                await asyncio.sleep((share - passed) * seconds)
                passed = share
                events.create_task(event())

    async def _kill(self, seconds: float) -> None:
        member = self._note("gpu-2", "killed", "killed (SIGKILL)")
        await asyncio.to_thread(member.process.kill)
        await asyncio.sleep(min(LEASE_S, seconds / 4))
        await asyncio.to_thread(self.book.remove, "gpu-2")

    async def _slow(self) -> None:
        member = self._note("gpu-3", "half speed", "slowed to half its speed")
        await asyncio.to_thread(member.process.slow, 2.0)

    async def _drain(self) -> None:
        """As a deploy does: leave the registry's ready ones, then SIGTERM, which lets streams finish."""
        member = self._note("gpu-6", "draining", "drained")
        member.endpoint = replace(member.endpoint, state=State.DRAINING)
        await asyncio.to_thread(self.book.put, member.endpoint)
        await asyncio.sleep(_SHUTDOWN_S)
        member.process.terminate()

    async def _join(self) -> None:
        process = await asyncio.to_thread(_spawn, _FAST)
        await asyncio.to_thread(self._add, 7, _FAST, process)
        self._note("gpu-7", "new", "joined")

    def _add(self, number: int, kind: str, process: GpuProcess) -> None:
        ident = f"gpu-{number}"
        endpoint = Endpoint(ident, process.url, engine="vllm", model="demo", gpu=Gpu(kind))
        self.members[ident] = Member(endpoint, process)
        self.book.put(endpoint)

    def _note(self, ident: str, note: str, said: str) -> Member:
        member = self.members[ident]
        member.note = note
        self._say(f"{ident} ({member.endpoint.gpu.kind}) {said}")
        return member


def _spawn(kind: str) -> GpuProcess:
    return GpuServer.spawn(gpu=kind, time_scale=TIME_SCALE, stream_interval=32, wait=False)
