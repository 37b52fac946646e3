"""What this process keeps: memory and open files over a run, and whether they grow.

The first part of a run warms up: modules load, connections open, histories fill. After that a process that leaks nothing
stands still, so the middle of what was seen early is compared with the middle of what was seen late.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

EVERY_S = 5.0
WARM_UP = 0.3
"""Share of the run that is not judged."""


class Sample(NamedTuple):
    """Seconds from the start, resident memory in MiB, and open files."""

    at: float
    memory: float
    files: int


def footprint() -> tuple[float, int]:
    """This process's memory in MiB and its open files; zeros where /proc does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(list(Path("/proc/self/fd").iterdir()))
    except OSError:
        return 0.0, 0


def give_back() -> None:
    """Have the allocator return what nobody holds: its gaps grow with every burst of calls, and are no leak."""
    try:
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
    except (AttributeError, OSError, TypeError):  # not glibc
        return


class Footprints:
    """Samples of a whole run. Used by one loop."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        self.samples: list[Sample] = []
        self._every_s = every_s
        self._started = time.monotonic()

    async def watch(self) -> None:
        """Take samples until cancelled."""
        while True:
            self.take()
            await asyncio.sleep(self._every_s)

    def take(self) -> None:
        """One sample, of what is left when everything that can be collected has been, and given back."""
        gc.collect()
        give_back()
        self.samples.append(Sample(time.monotonic() - self._started, *footprint()))

    def growth(self) -> tuple[float, int] | None:
        """By which share the memory grew after the warm-up, and by how many the open files; None if too little was seen.

        The first and the last third of what came after the warm-up are compared by their medians.
        """
        judged = self.samples[int(WARM_UP * len(self.samples)) :]
        third = len(judged) // 3
        if not third or not judged[0].memory:
            return None
        early, late = judged[:third], judged[-third:]
        before, after = (median(sample.memory for sample in part) for part in (early, late))
        files = median(sample.files for sample in late) - median(sample.files for sample in early)
        return after / before - 1, round(files)

    def series(self, points: int = 20) -> str:
        """About so many of the samples, for people."""
        step = max(1, len(self.samples) // points)
        return ", ".join(f"{one.at:.0f} s {one.memory:.1f} MiB {one.files}" for one in self.samples[::step])
