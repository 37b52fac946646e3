"""How many connections to one endpoint are in use at a time; callers beyond that wait for the client's pool timeout."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuroute.transports.wires import Core


class Gate:
    """At most about `size` holders at a time, for threads. Membership is the lease: leaving twice is harmless."""

    __slots__ = ("_core", "_freed", "_size", "_waiting", "holders")

    def __init__(self, core: Core, size: int) -> None:
        self._core = core
        self._size = size
        self._freed = threading.Condition()
        self._waiting = 0
        self.holders: set[object] = set()

    def enter(self, holder: object, timeout: float | None) -> None:
        """Take a place, waiting for one. Raises the core's PoolTimeout."""
        if len(self.holders) < self._size:
            self.holders.add(holder)
            return
        with self._freed:
            self._waiting += 1
            try:
                free = self._freed.wait_for(lambda: len(self.holders) < self._size, timeout)
            finally:
                self._waiting -= 1
            if not free:
                raise self._core.PoolTimeout(f"no connection to the endpoint became free within {timeout} s")
            self.holders.add(holder)

    def leave(self, holder: object) -> None:
        """Give the place back. Idempotent."""
        self.holders.discard(holder)
        if self._waiting:
            with self._freed:
                self._freed.notify()


class AsyncGate:
    """At most `size` holders at a time, for the tasks of one loop, first come first served. Leaving twice is harmless."""

    __slots__ = ("_core", "_size", "_waiting", "holders")

    def __init__(self, core: Core, size: int) -> None:
        self._core = core
        self._size = size
        self._waiting: dict[object, asyncio.Future[None]] = {}
        self.holders: set[object] = set()

    async def enter(self, holder: object, timeout: float | None) -> None:
        """Take a place, waiting for one. Raises the core's PoolTimeout."""
        if len(self.holders) < self._size:
            self.holders.add(holder)
            return
        given = self._waiting[holder] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout):
                await given
        except BaseException as error:
            self._waiting.pop(holder, None)
            self.leave(holder)  # a place that came in the same moment goes to the next one
            if isinstance(error, TimeoutError):
                late = f"no connection to the endpoint became free within {timeout} s"
                raise self._core.PoolTimeout(late) from None
            raise

    def leave(self, holder: object) -> None:
        """Give the place to who waits longest. Idempotent."""
        self.holders.discard(holder)
        while self._waiting and len(self.holders) < self._size:
            following = next(iter(self._waiting))
            given = self._waiting.pop(following)
            if not given.done():
                self.holders.add(following)
                given.set_result(None)
