"""One GPU engine with continuous batching, in virtual seconds: what the simulator routes to.

A step of the engine takes

    T = h + c0 + (w^6 + (a n)^6)^(1/6) + k KV + q PAIRS + s B

with n tokens computed (one per decoding sequence, plus prefill chunks), KV context tokens of the decoding
sequences, PAIRS the attention work of the chunks and B sequences. Decodes go first, then prefill chunks in
order of arrival up to `max_num_batched_tokens`; a prompt is admitted while sequences and KV tokens allow;
the first token appears at the end of the step that finishes the prefill; when the pool is full the newest
sequence is put back and recomputed.

Nothing happens per token. While only decodes run, all steps up to the next finish, arrival or lack of
memory are one *run* with a closed form for its length; a sequence is a single heap entry, the decode step
at which it ends. That makes a thousand GPUs affordable in pure Python. Two views share the model: `advance`
(virtual time, events only) and `begin_step` / `end_step` (one step at a time, for a stand-in server that
streams tokens).
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from math import ceil, inf, sqrt
from typing import Final

from .job import DECODE, DONE, PREFILL, WAITING, Event, Job
from .kv import KvPool
from .spec import GpuSpec, table_of

BLOCK_TOKENS: Final = 512


class Gpu:
    """A continuous-batching engine. Not thread-safe; time never goes back.

    Virtual time: `submit` and `cancel`, then `advance(now)`; look again at `next_at`.
    Step by step: `begin_step(now)` gives the end of the step, `end_step(now)` what came out of it.
    `slowdown` 2.0 is a GPU at half speed, `hung` one that makes no progress.
    """

    __slots__ = (
        "_chunks",
        "_dropped",
        "_fixed",
        "_growth",
        "_heap",
        "_kv_tokens",
        "_order",
        "_prefilling",
        "_seq",
        "_start",
        "_step",
        "_steps",
        "_waiting",
        "busy",
        "decode_steps",
        "decoding",
        "hung",
        "kv",
        "max_num_batched_tokens",
        "max_num_seqs",
        "next_at",
        "preemptions",
        "queued_tokens",
        "slowdown",
        "spec",
    )

    def __init__(
        self,
        spec: GpuSpec,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        dram_tokens: int = 0,
        *,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs")
        self.spec = spec
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.kv = KvPool(spec.kv_tokens, block=block_tokens, dram_tokens=dram_tokens)
        self.slowdown = 1.0
        self.hung = False
        self.next_at = inf
        self.decode_steps = 0
        self.decoding = 0
        self.queued_tokens = 0
        self.preemptions = 0
        self.busy = 0.0  # seconds of finished steps: utilisation
        self._fixed = table_of(spec, max_num_batched_tokens)
        self._waiting: deque[Job] = deque()
        self._prefilling: list[Job] = []
        self._order: dict[Job, None] = {}  # running jobs, oldest admission first
        self._heap: list[tuple[int, int, Job]] = []
        self._seq = 0
        self._kv_tokens = 0  # context tokens of the decoding sequences
        self._dropped: list[Job] = []
        self._chunks: list[tuple[Job, int]] = []
        self._start = 0.0
        self._steps = 0  # steps of the run under way, 0 = idle
        self._step = self._growth = 0.0  # seconds of its first step, and what each later one adds

    @property
    def token_seconds(self) -> float:
        """Seconds per prompt token of a full prefill step beside what decodes now: the price of
        queueing here.
        """
        spec, n, budget = self.spec, self.decoding, self.max_num_batched_tokens
        step = self._fixed[budget] + spec.k * self._kv_tokens + spec.s * n
        return self.slowdown * step / max(1, budget - n)

    @property
    def step_ends_at(self) -> float:
        """When the step under way ends and new work may begin; -inf when idle."""
        return self._start + self._step if self._steps else -inf

    @property
    def waiting(self) -> int:
        """Jobs not yet admitted."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Jobs admitted: prefilling or decoding."""
        return len(self._order)

    @property
    def kv_usage(self) -> float:
        """Share of the KV pool that running jobs hold, 0 to 1."""
        return self.kv.active / self.kv.capacity

    def busy_at(self, now: float) -> float:
        """Seconds it has worked so far, the run under way included."""
        return self.busy + (max(0.0, now - self._start) if self._steps else 0.0)

    def jobs(self) -> list[Job]:
        """Everything submitted and not ended."""
        return [*self._order, *self._waiting]

    def matched(self, blocks: tuple[int, ...]) -> int:
        """Tokens of a prompt with these blocks that need no prefill here."""
        return self.kv.match(blocks) * self.kv.block

    def submit(self, job: Job, now: float) -> bool:
        """Queue a job. False: it could never fit in the KV pool and is refused."""
        if job.prompt_tokens + job.output_tokens > self.kv.capacity:
            return False
        block = self.kv.block
        if len(job.blocks) * block > job.prompt_tokens:
            job.blocks = job.blocks[: job.prompt_tokens // block]
        job.gpu = self
        job.submitted_at = now
        job.left = job.prompt_tokens - (min(self.matched(job.blocks), job.prompt_tokens - 1) if job.blocks else 0)
        self.queued_tokens += job.left
        self._waiting.append(job)
        if len(self._waiting) == 1 and len(self._order) < self.max_num_seqs:
            self._cut(now)
        return True

    def cancel(self, job: Job, now: float) -> None:
        """End a job early; a running one leaves at the end of the step under way. Idempotent."""
        if job.gpu is not self or job.phase == DONE:
            return
        if job.phase == WAITING:
            self._waiting.remove(job)
            self.queued_tokens -= job.left
            self._end(job, now)
            return
        self._dropped.append(job)
        self._cut(now)

    def fail(self, now: float) -> list[Job]:
        """The process dies: all jobs are lost (returned), the cache with them."""
        lost = self.jobs()
        for job in lost:
            job.before = job.generated
            self._end(job, now)
        self._waiting.clear()
        self._prefilling.clear()
        self._order.clear()
        self._heap.clear()
        self._dropped.clear()
        self._chunks = []
        self.kv.clear()
        self.decoding = self.queued_tokens = self._kv_tokens = self._steps = 0
        self.next_at = inf
        return lost

    def advance(self, now: float) -> list[tuple[Job, Event]]:
        """Apply every run that ended by `now` and begin the next one. Events: `first` and `done`,
        at `next_at`.
        """
        events: list[tuple[Job, Event]] = []
        while self._steps and self.next_at <= now:
            ended = self.next_at
            self._apply(ended, events)
            self._plan(ended, self.decode_steps + (1 << 60))
        if not self._steps:
            self._plan(now, self.decode_steps + (1 << 60))
        return events

    def interrupt(self, now: float) -> None:
        """Let a change of `slowdown` or `hung` take effect at the end of the step under way."""
        self._cut(now)

    def begin_step(self, now: float) -> float | None:
        """Begin one step and say when it ends; None = nothing to do."""
        if not self._steps:
            self._plan(now, self.decode_steps + 1)
        return self.next_at if self._steps else None

    def end_step(self, now: float) -> list[tuple[Job, Event]]:
        """End the step: every job that got a token, `first`, `token` or (with the last one) `done`."""
        if not self._steps:
            return []
        decoding = [job for job in self._order if job.phase == DECODE]
        events: list[tuple[Job, Event]] = []
        self._apply(now, events)
        return events + [(job, "token") for job in decoding if job.phase == DECODE]

    def _cut(self, now: float) -> None:
        """Shorten the run to the step under way at `now`."""
        steps = self._steps
        if steps <= 1:
            return
        half = self._growth / 2
        linear = self._step - half
        elapsed = max(0.0, now - self._start)
        root = sqrt(linear * linear + 4 * half * elapsed)
        done = (root - linear) / (2 * half) if half > 0.0 else elapsed / linear
        self._steps = min(steps, max(1, ceil(done - 1e-9)))
        self.next_at = self._start + self._span(self._steps)

    def _span(self, steps: int) -> float:
        return steps * self._step + self._growth * steps * (steps - 1) / 2

    def _plan(self, now: float, last: int) -> None:
        """Choose the next run: chunks if there are any (one step), else decodes up to step `last`."""
        if self._dropped:
            self._sweep(now)
        if self.hung:
            self._idle()
            return
        if self.decoding > self.kv.free:
            self._preempt()
        decoding = self.decoding
        chunks, tokens, pairs = self._fill() if self._prefilling or self._waiting else ([], 0, 0.0)
        if not decoding and not chunks:
            self._idle()
            return
        spec, slow = self.spec, self.slowdown
        self._chunks = chunks
        self._start = now
        self._steps = 1 if chunks else min(self._first_end(), last) - self.decode_steps
        seqs = decoding + len(chunks)
        fixed = self._fixed[decoding + tokens]
        self._step = slow * (fixed + spec.k * self._kv_tokens + spec.q * pairs + spec.s * seqs)
        self._growth = slow * spec.k * decoding
        self.next_at = now + self._span(self._steps)

    def _idle(self) -> None:
        self._chunks = []
        self._steps = 0
        self.next_at = inf

    def _first_end(self) -> int:
        """Decode step at which a job ends or the memory does."""
        heap = self._heap
        while heap[0][2].last != heap[0][0]:
            heappop(heap)
        return min(heap[0][0], self.decode_steps + self.kv.free // self.decoding)

    def _fill(self) -> tuple[list[tuple[Job, int]], int, float]:
        """Prefill chunks for this step: those under way, then new admissions, in order of arrival."""
        budget = room = self.max_num_batched_tokens - self.decoding
        chunks: list[tuple[Job, int]] = []
        pairs = 0.0
        prefilling, waiting = self._prefilling, self._waiting
        at = 0
        while room > 0:
            if at == len(prefilling) and not (waiting and self._admit(waiting[0])):
                break
            job = prefilling[at]
            size = min(job.left, room)
            pairs += size * (job.context - job.left + size / 2)
            chunks.append((job, size))
            room -= size
            at += 1
        return chunks, budget - room, pairs

    def _admit(self, job: Job) -> bool:
        kv = self.kv
        if len(self._order) >= self.max_num_seqs:
            return False
        context = job.context
        hits = job.blocks[: kv.match(job.blocks)] if job.blocks else ()
        own = context - len(hits) * kv.block
        if kv.cost(hits, own) + self.decoding > kv.free and self._order:
            return False
        kv.pin(hits)
        kv.reserve(own)
        left = max(1, own)
        self.queued_tokens += left - job.left
        job.left, job.held, job.pinned, job.phase = left, own, len(hits), PREFILL
        if not job.preempted:
            job.cached_tokens = context - left
        self._waiting.popleft()
        self._prefilling.append(job)
        self._order[job] = None
        return True

    def _apply(self, now: float, events: list[tuple[Job, Event]]) -> None:
        """Account for the run that ends at `now`."""
        self.busy += now - self._start
        if self.decoding:
            self._decode(now, events)
        for job, size in self._chunks:
            job.left -= size
            self.queued_tokens -= size
            if not job.left:
                self._prefilled(job, now, events)
        self._steps = 0

    def _decode(self, now: float, events: list[tuple[Job, Event]]) -> None:
        grown = self.decoding * self._steps
        self.decode_steps += self._steps
        self._kv_tokens += grown
        self.kv.reserve(grown)
        heap, at = self._heap, self.decode_steps
        while heap and heap[0][0] <= at:
            last, _, job = heappop(heap)
            if job.last == last:
                self._leave(job)
                self._end(job, now)
                events.append((job, "done"))

    def _prefilled(self, job: Job, now: float, events: list[tuple[Job, Event]]) -> None:
        """Its prompt is computed: a token comes out, and its blocks can be shared from now on."""
        self._prefilling.remove(job)
        fresh = job.blocks[job.pinned :]
        self.kv.commit(fresh)
        job.pinned = len(job.blocks)
        job.held -= len(fresh) * self.kv.block
        job.phase = DECODE
        job.entered = self.decode_steps
        self._kv_tokens += job.context
        job.before += 1
        self.decoding += 1
        if job.first_token_at == inf:
            job.first_token_at = now
            events.append((job, "first"))
        else:
            events.append((job, "token"))
        job.last = self.decode_steps + job.output_tokens - job.before
        if job.last == self.decode_steps:
            self._leave(job)
            self._end(job, now)
            events.append((job, "done"))
            return
        self._seq += 1
        heappush(self._heap, (job.last, self._seq, job))

    def _leave(self, job: Job) -> None:
        """Take a running job out of the batch and give its memory back."""
        del self._order[job]
        grown = 0
        if job.phase == DECODE:
            grown = self.decode_steps - job.entered
            job.before += grown
            self.decoding -= 1
            self._kv_tokens -= job.prompt_tokens + job.before - 1
        else:
            self._prefilling.remove(job)
            self.queued_tokens -= job.left
        job.last = -1
        job.phase = WAITING
        self.kv.release(job.blocks[: job.pinned], job.held + grown)

    def _end(self, job: Job, now: float) -> None:
        job.phase = DONE
        job.last = -1
        job.done_at = now

    def _sweep(self, now: float) -> None:
        for job in self._dropped:
            if job.phase in (PREFILL, DECODE):
                self._leave(job)
                self._end(job, now)
            elif job.phase == WAITING:  # put back by a preemption since
                self._waiting.remove(job)
                self.queued_tokens -= job.left
                self._end(job, now)
        self._dropped.clear()

    def _preempt(self) -> None:
        """Put the newest jobs back until one more decode step fits."""
        while self.decoding > self.kv.free and len(self._order) > 1:
            job = next(reversed(self._order))
            self._leave(job)
            job.preempted += 1
            job.left = job.context
            self.queued_tokens += job.left
            self._waiting.appendleft(job)
            self.preemptions += 1
