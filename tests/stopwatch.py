"""A stopwatch for promises about time, on machines that have other things to do as well.

A bound on a duration is a promise of the code. How long a busy machine leaves the process waiting for a CPU is not, and
it is measured beside: a thread that sleeps for 10 ms at a time notes by how much it is woken late. Schedulers prefer
who sleeps much: where the system (Linux) tells how long the threads of this process were ready to run and did not, that
counts if it is more. What the code itself sleeps, waits or computes is not taken off.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Self

_TICK_S = 0.01
_OWN_S = 0.01
"""As late as that a thread may be because of other threads of this very process: that is not the machine's doing."""


class Stopwatch:
    """`with Stopwatch() as watch: call()`, then `watch.seconds < 0.35` for what the code took, `watch.wall >= 0.2`."""

    def __init__(self) -> None:
        self.wall = 0.0
        self.taken = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="stopwatch", daemon=True)

    @property
    def seconds(self) -> float:
        """The time on the wall, less what the machine took."""
        return self.wall - self.taken

    def __enter__(self) -> Self:
        self._before = _kept_waiting()
        self.started = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended = time.monotonic()
        self.wall = self._ended - self.started
        waits = {thread: waited - self._before.get(thread, 0.0) for thread, waited in _kept_waiting().items()}
        self._over.set()
        self._thread.join()
        self.taken = max(self.taken, sum(waits.values()))

    def _sample(self) -> None:
        seen, over = self.started, False
        while not over:
            over = self._over.wait(_TICK_S)
            now = self._ended if over else time.monotonic()
            late = now - seen - _TICK_S
            self.taken += late if late > _OWN_S else 0.0
            seen = now


def _kept_waiting() -> dict[str, float]:
    """Seconds for which each thread of this process has waited for a CPU so far; {} where that is not told."""
    found = {}
    for file in Path("/proc/self/task").glob("*/schedstat"):
        try:
            found[file.parent.name] = int(file.read_text().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):  # it has ended
            continue
    return found
