"""Runs the step model of a GPU in wall time: jobs in, tokens out, `time_scale` wall seconds per GPU second.

When the machine is too busy to wake up for every step, steps that are overdue run at once, so the average speed stays
true and tokens arrive in small bunches, as they do from a busy engine. `time_scale` 0 answers as fast as it can.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuroute.sim.gpu import Gpu
    from gpuroute.sim.job import Job

_STEPS_PER_TURN = 64


class Engine:
    """One GPU on one event loop; all methods belong to the loop's thread."""

    def __init__(self, gpu: Gpu, time_scale: float, on_job_done: Callable[[Job], None]) -> None:
        self.gpu = gpu
        self._scale = time_scale
        self._loop = asyncio.get_running_loop()
        self._epoch = self._loop.time()
        self._virtual = 0.0
        self._pending: asyncio.Handle | None = None
        self._sinks: dict[Job, Callable[[Job], None]] = {}
        self._on_job_done = on_job_done

    @property
    def now(self) -> float:
        """GPU seconds; not before the end of the last step."""
        if self._scale > 0:
            return max(self._virtual, (self._loop.time() - self._epoch) / self._scale)
        return self._virtual

    @property
    def jobs(self) -> int:
        """Jobs not yet done."""
        return len(self._sinks)

    def submit(self, job: Job, sink: Callable[[Job], None]) -> bool:
        """Queue a job; `sink(job)` runs whenever it got tokens. False if it can never fit."""
        if not self.gpu.submit(job, self.now):
            return False
        self._sinks[job] = sink
        self.kick()
        return True

    def cancel(self, job: Job) -> None:
        """Stop working on a job. Idempotent."""
        if self._sinks.pop(job, None) is not None:
            self.gpu.cancel(job, self.now)

    def slow(self, factor: float) -> None:
        """Every step from the next on takes `factor` times as long as the model says."""
        self.gpu.slowdown = factor

    def hang(self) -> None:
        """No progress after the present step; jobs are still taken."""
        self.gpu.hung = True

    def resume(self) -> None:
        """Full speed again."""
        self.gpu.hung = False
        self.gpu.slowdown = 1.0
        self.kick()

    def crash(self) -> None:
        """Lose every job, and the cache."""
        self.gpu.fail(self.now)
        self._sinks.clear()

    def kick(self) -> None:
        """Start stepping if there is work and no step is under way."""
        if self._pending is None:
            self._begin(self.now)

    def _begin(self, now: float) -> None:
        end = self.gpu.begin_step(now)
        self._pending = None if end is None else self._loop.call_at(self._wall(end), self._finish, end)

    def _finish(self, end: float) -> None:
        """End the step that is due, and those that became due meanwhile."""
        for _ in range(_STEPS_PER_TURN):
            self._virtual = end
            self._deliver(end)
            following = self.gpu.begin_step(end)
            if following is None:
                self._pending = None
                return
            end = following
            if self._wall(end) > self._loop.time():
                break
        self._pending = self._loop.call_at(self._wall(end), self._finish, end)

    def _deliver(self, end: float) -> None:
        for job, event in self.gpu.end_step(end):
            if event == "first" and job.done:
                continue  # "done" follows in the same step
            sink = self._sinks.get(job)
            if event == "done":
                self._on_job_done(job)
                self._sinks.pop(job, None)
            if sink is not None:
                sink(job)

    def _wall(self, virtual: float) -> float:
        return self._epoch + virtual * self._scale
