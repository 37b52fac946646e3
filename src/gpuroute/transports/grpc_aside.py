"""What must wait beside a synchronous channel: for bids before a future or a stream begins, and for load reports.

One thread with an event loop, because that is what waits for many things at once. It starts when it is first needed; a
forked child starts afresh.
"""

from __future__ import annotations

import asyncio
import os
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from gpuroute.transports.asking import Asker
    from gpuroute.transports.grpc_flight import Flight


class Aside:
    """Safe from any thread."""

    def __init__(self) -> None:
        self._arrange()

    def _arrange(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self, flight: Flight, asker: Asker) -> None:
        """Ask for a call, and launch it when the wait is over."""
        try:
            self.run(_ask(flight, asker))
        except RuntimeError:
            flight.launch(first=True)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run this in the loop. RuntimeError if there can be no thread for it; the next one tries again."""
        with self._lock:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                try:
                    threading.Thread(target=loop.run_forever, name="gpuroute-grpc-aside", daemon=True).start()
                except RuntimeError:
                    loop.close()
                    work.close()
                    raise
                self._loop = loop
            loop = self._loop
        loop.call_soon_threadsafe(self._begin, work)

    def after_fork(self) -> None:
        """The parent's thread is not the child's, and its loop stays untouched."""
        _abandoned.append(self._loop)
        self._arrange()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _ask(flight: Flight, asker: Asker) -> None:
    try:
        flight.rpc.ask(await asker.ask_async(flight.rpc.call))
    finally:
        flight.launch()


_abandoned: list[object] = []
ASIDE = Aside()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=ASIDE.after_fork)
