"""Asks for calls that must not block their caller (futures and streams): one thread waits for the bids of all of them.

It is an event loop, because waiting for many answers at once is what the asker's loop line does. It starts with the first
such call; a forked child starts afresh.
"""

from __future__ import annotations

import asyncio
import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
        with self._lock:
            loop = self._loop
            if loop is None:
                loop = self._loop = asyncio.new_event_loop()
                threading.Thread(target=loop.run_forever, name="gpuroute-grpc-ask", daemon=True).start()
        loop.call_soon_threadsafe(self._begin, flight, asker)

    def after_fork(self) -> None:
        """The parent's thread is not the child's, and its loop stays untouched."""
        _abandoned.append(self._loop)
        self._arrange()

    def _begin(self, flight: Flight, asker: Asker) -> None:
        task = asyncio.get_running_loop().create_task(_ask(flight, asker))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _ask(flight: Flight, asker: Asker) -> None:
    try:
        flight.rpc.asked = await asker.ask_async(flight.rpc.call)
    finally:
        flight.launch()


_abandoned: list[object] = []
ASIDE = Aside()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=ASIDE.after_fork)
