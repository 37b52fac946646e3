"""A stopwatch for promises about time, on machines that have other things to do as well.

A bound on a duration is a promise of the code. How long a busy machine leaves the process waiting for a CPU is not, and
it is measured beside: a thread that sleeps for 10 ms at a time notes by how much it is woken late. Schedulers prefer
who sleeps much: where the system (Linux) tells how long the threads of this process were ready to run and did not, that
counts if it is more. What the code itself sleeps, waits or computes is not taken off. How long processes below this one
were kept waiting is told apart, and not taken off: they may wait for each other.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_TICK_S = 0.01
_OWN_S = 0.01
"""As late as that a thread may be because of other threads of this very process: that is not the machine's doing."""
_LOOK_S = 0.2
"""How often processes below are looked at: what one has waited is told no longer when it has ended."""


class Stopwatch:
    """`with Stopwatch() as watch: call()`, then `watch.seconds < 0.35` for what the code took, `watch.wall >= 0.2`.

    With `below`, `watch.elsewhere` is how long the machine let processes wait that this one has started.
    """

    def __init__(self, *, below: bool = False) -> None:
        self.wall = 0.0
        self.taken = 0.0
        self._below = below
        self._waits: dict[str, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="stopwatch", daemon=True)

    @property
    def seconds(self) -> float:
        """The time on the wall, less what the machine took."""
        return self.wall - self.taken

    @property
    def elsewhere(self) -> float:
        return sum(waited - self._waits_before.get(thread, 0.0) for thread, waited in self._waits.items())

    def __enter__(self) -> Self:
        self._before = _kept_waiting(["self"])
        self._waits_before = _kept_waiting(_below()) if self._below else {}
        self.started = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended = time.monotonic()
        self.wall = self._ended - self.started
        waits = {t: waited - self._before.get(t, 0.0) for t, waited in _kept_waiting(["self"]).items()}
        self._over.set()
        self._thread.join()
        self.taken = max(self.taken, sum(waits.values()))

    def _sample(self) -> None:
        seen, over, look_at = self.started, False, self.started
        while not over:
            over = self._over.wait(_TICK_S)
            now = self._ended if over else time.monotonic()
            late = now - seen - _TICK_S
            self.taken += late if late > _OWN_S else 0.0
            seen = now
            if self._below and (over or now >= look_at):
                self._waits |= _kept_waiting(_below())
                seen = time.monotonic()
                look_at = seen + _LOOK_S


def _kept_waiting(processes: Iterable[str]) -> dict[str, float]:
    """Seconds for which each thread of these has waited for a CPU so far; {} where that is not told."""
    found = {}
    for process in processes:
        for file in Path(f"/proc/{process}/task").glob("*/schedstat"):
            with suppress(OSError, ValueError, IndexError):  # it has ended
                found[file.parent.name] = int(file.read_text().split()[1]) / 1e9
    return found


def _below(process: str = "self") -> Iterator[str]:
    """The processes that this one has started, and those that they have."""
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        children: list[str] = []
        with suppress(OSError):
            children = file.read_text().split()
        for child in children:
            yield child
            yield from _below(child)
