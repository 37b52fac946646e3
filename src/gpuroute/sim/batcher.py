"""A plain-inference server with dynamic batching, the Triton / TF Serving kind: one answer per request, no
tokens.

Requests wait up to `window` seconds for company, at most `max_batch` of them, and are padded to the
longest. A batch of one takes 5 ms at 10 input tokens and 250 ms at 512 (a BERT-like model); each further
member adds `marginal` of that. `instances` batches run side by side. The surface is that of `gpu.Gpu`, so
the fleet does not care.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf

from .job import DONE, Event, Job


@dataclass(frozen=True, slots=True)
class BatcherSpec:
    """Service model, in seconds: `base + per_token * longest`, times `1 + marginal * (members - 1)`."""

    kind: str = "batcher"
    base: float = 0.00012
    per_token: float = 0.000488
    marginal: float = 0.25
    max_batch: int = 8
    window: float = 0.002
    instances: int = 1

    def seconds(self, longest: int, members: int = 1) -> float:
        """Service time of a batch."""
        return (self.base + self.per_token * longest) * (1 + self.marginal * (members - 1))


class Batcher:
    """A dynamic-batching server in virtual seconds. Not thread-safe; time never goes back."""

    __slots__ = ("_batches", "_waiting", "busy", "hung", "next_at", "queued_tokens", "slowdown", "spec")

    def __init__(self, spec: BatcherSpec | None = None) -> None:
        self.spec = spec or BatcherSpec()
        self.slowdown = 1.0
        self.hung = False
        self.next_at = inf
        self.busy = 0.0
        self.queued_tokens = 0
        self._waiting: deque[Job] = deque()
        self._batches: list[tuple[float, float, list[Job]]] = []  # (ends, seconds, members)

    @property
    def waiting(self) -> int:
        """Requests not yet in a batch."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests in a batch."""
        return sum(len(members) for _, _, members in self._batches)

    @property
    def kv_usage(self) -> float:
        """Always 0: there is no KV cache."""
        return 0.0

    def matched(self, blocks: tuple[int, ...]) -> int:
        """Always 0: nothing is cached."""
        return 0 * len(blocks)

    def busy_at(self, now: float) -> float:
        """Seconds of work begun so far, at most one batch ahead of the clock."""
        return self.busy + sum(max(0.0, seconds - (ends - now)) for ends, seconds, _ in self._batches)

    def jobs(self) -> list[Job]:
        """Everything submitted and not ended."""
        return [*(job for _, _, members in self._batches for job in members), *self._waiting]

    def submit(self, job: Job, now: float) -> bool:
        """Queue a request."""
        job.submitted_at = now
        self.queued_tokens += job.prompt_tokens
        self._waiting.append(job)
        self._look(now)
        return True

    def cancel(self, job: Job, now: float) -> None:
        """Drop a waiting request; one in a batch is computed anyway, its answer unread. Idempotent."""
        if job in self._waiting:
            self._waiting.remove(job)
            self.queued_tokens -= job.prompt_tokens
            self._finish(job, now)
            self._look(now)

    def fail(self, now: float) -> list[Job]:
        """The process dies: all requests are lost (returned)."""
        lost = self.jobs()
        for job in lost:
            self._finish(job, now)
        self._waiting.clear()
        self._batches.clear()
        self.queued_tokens = 0
        self.next_at = inf
        return lost

    def interrupt(self, now: float) -> None:
        """Let a change of `hung` take effect."""
        self._look(now)

    def advance(self, now: float) -> list[tuple[Job, Event]]:
        """Finish and begin batches up to `now`. Events: `first` and `done` of each member."""
        events: list[tuple[Job, Event]] = []
        while self.next_at <= now:
            self._run(self.next_at, events)
        self._run(now, events)
        return events

    def _run(self, now: float, events: list[tuple[Job, Event]]) -> None:
        for batch in [each for each in self._batches if each[0] <= now]:
            self._batches.remove(batch)
            self.busy += batch[1]
            for job in batch[2]:
                job.first_token_at = now
                self._finish(job, now)
                events += [(job, "first"), (job, "done")]
        while self._due() <= now:
            self._begin(now)
        self._look(now)

    def _begin(self, now: float) -> None:
        spec = self.spec
        members = [self._waiting.popleft() for _ in range(min(spec.max_batch, len(self._waiting)))]
        self.queued_tokens -= sum(job.prompt_tokens for job in members)
        seconds = self.slowdown * spec.seconds(max(job.prompt_tokens for job in members), len(members))
        self._batches.append((now + seconds, seconds, members))

    def _due(self) -> float:
        """When the next batch may begin."""
        spec = self.spec
        if self.hung or not self._waiting or len(self._batches) >= spec.instances:
            return inf
        return 0.0 if len(self._waiting) >= spec.max_batch else self._waiting[0].submitted_at + spec.window

    def _look(self, now: float) -> None:
        ends = min((ends for ends, _, _ in self._batches), default=inf)
        self.next_at = min(ends, max(now, self._due()))

    def _finish(self, job: Job, now: float) -> None:
        job.phase = DONE
        job.before = 1
        job.done_at = now
