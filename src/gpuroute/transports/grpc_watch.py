"""Finds hung streams: one thread that looks at the streams of this process while there are any.

grpcio lets nobody wait for a message with a limit, and its own pings stop after two without data. So silence is measured
from outside: a stream whose reader waits, and whose endpoint said nothing for longer than is normal, is given up. Started
with the first stream, ended when there is none; a forked child starts afresh.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuroute.transports.grpc_flight import Flight

LOOK_EVERY_S = 0.1


class StreamWatch:
    """Safe from any thread."""

    def __init__(self) -> None:
        self._arrange()

    def _arrange(self) -> None:
        self._lock = threading.Lock()
        self._flights: set[Flight] = set()
        self._thread: threading.Thread | None = None

    def add(self, flight: Flight) -> None:
        """Look at this stream until it is over."""
        with self._lock:
            self._flights.add(flight)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="gpuroute-grpc-watch", daemon=True)
                with suppress(RuntimeError):  # no more threads: the next stream tries again
                    thread.start()
                    self._thread = thread

    def after_fork(self) -> None:
        """The parent's thread is not the child's."""
        self._arrange()

    def _run(self) -> None:
        while True:
            time.sleep(LOOK_EVERY_S)
            with self._lock:
                self._flights = {flight for flight in self._flights if not flight.over}
                if not self._flights:
                    self._thread = None
                    return
                flights = list(self._flights)
            for flight in flights:
                flight.look()


STREAMS = StreamWatch()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=STREAMS.after_fork)
