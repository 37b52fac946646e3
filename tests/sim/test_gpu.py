"""The step model: its formula, its two views, and what it must never lose."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuroute.sim.batcher import Batcher, BatcherSpec
from gpuroute.sim.gpu import Gpu
from gpuroute.sim.job import Job
from gpuroute.sim.spec import GpuSpec, gpu_kinds, gpu_spec

SMALL = GpuSpec("small", h=0.002, c0=0.001, w=0.004, a=2e-5, k=4e-8, q=7e-10, s=6e-6, kv_tokens=4096)

Plan = list[tuple[float, int, int, int]]
plans = st.lists(
    st.tuples(
        st.floats(0, 0.5),
        st.integers(1, 3000),
        st.integers(1, 500),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=15,
)


def jobs_of(plan: Plan) -> list[tuple[float, Job]]:
    at, out = 0.0, []
    for gap, prompt, output, group in plan:
        at += gap
        blocks = tuple(hash((group, depth)) for depth in range(prompt // 256)) if group else ()
        out.append((at, Job(prompt, output, blocks)))
    return out


def replay(gpu: Gpu | Batcher, arrivals: list[tuple[float, Job]]) -> list[tuple[Job, str, float]]:
    """Drive the event view to the end, checking the memory at every stop."""
    seen = []

    def settle(now: float) -> None:
        seen.extend((job, event, now) for job, event in gpu.advance(now))
        if isinstance(gpu, Gpu):
            assert 0 <= gpu.kv.active <= gpu.kv.held <= gpu.kv.capacity

    for at, job in arrivals:
        while gpu.next_at <= at:
            settle(gpu.next_at)
        if gpu.submit(job, at):
            settle(at)
    while gpu.next_at < inf:
        settle(gpu.next_at)
    return seen


def test_step_time_is_the_published_formula() -> None:
    spec = gpu_spec("H100")
    ms = 2.0 + 2.5862 + (3.937**6 + (0.020069 * 64) ** 6) ** (1 / 6) + 4.1465e-05 * 65536 + 0.0066788 * 64
    assert spec.seconds(64, 65536, 0, 64) == pytest.approx(ms / 1e3)


def test_unknown_gpu_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="H100"):
        gpu_spec("GTX1080")
    assert {gpu_spec(kind).kind for kind in gpu_kinds()} == set(gpu_kinds())


def test_a_lone_job_takes_prefill_plus_one_step_per_token() -> None:
    gpu, job = Gpu(SMALL), Job(1000, 11)
    replay(gpu, [(0.0, job)])
    prefill = SMALL.seconds(1000, 0, 1000 * 500, 1)
    steps = sum(SMALL.seconds(1, 1000 + i, 0, 1) for i in range(10))
    assert job.first_token_at == pytest.approx(prefill)
    assert job.done_at == pytest.approx(prefill + steps)
    assert job.generated == 11


def test_a_long_prompt_is_cut_in_chunks_beside_decodes() -> None:
    gpu = Gpu(gpu_spec("H100"), max_num_batched_tokens=2048)
    first, long = Job(100, 400), Job(20_000, 2)
    replay(gpu, [(0.0, first), (0.1, long)])
    chunked = long.first_token_at - 0.1
    assert chunked > 20_000 * gpu.spec.a  # ten steps, each with its fixed part
    assert first.generated == 400


def test_arrival_waits_for_the_step_under_way_only() -> None:
    gpu = Gpu(SMALL)
    old, new = Job(10, 900), Job(10, 1)
    replay(gpu, [(0.0, old), (0.5, new)])
    assert new.first_token_at - 0.5 < 3 * SMALL.seconds(20, 1000, 0, 2)
    assert old.done_at > 5


def test_shared_prefix_is_computed_once() -> None:
    gpu = Gpu(SMALL, block_tokens=256)
    blocks = (1, 2, 3, 4)
    a, b = Job(1100, 3, blocks), Job(1100, 3, blocks)
    replay(gpu, [(0.0, a), (1.0, b)])
    assert (a.cached_tokens, b.cached_tokens) == (0, 1024)
    assert b.first_token_at - 1.0 < a.first_token_at / 1.5


def test_a_full_hit_still_computes_the_last_token() -> None:
    gpu = Gpu(SMALL, block_tokens=256)
    a, b = Job(512, 2, (1, 2)), Job(512, 2, (1, 2))
    replay(gpu, [(0.0, a), (1.0, b)])
    assert b.cached_tokens == 511


def test_dram_tier_keeps_what_the_pool_throws_out() -> None:
    def hits(dram: int) -> int:
        gpu = Gpu(SMALL, dram_tokens=dram, block_tokens=256)
        first = Job(2048, 1, tuple(range(8)))
        flood = [(1.0 + i, Job(3000, 1, tuple(range(100 * i + 100, 100 * i + 111)))) for i in range(3)]
        again = Job(2048, 1, tuple(range(8)))
        replay(gpu, [(0.0, first), *flood, (9.0, again)])
        return again.cached_tokens

    assert hits(0) == 0
    assert hits(100_000) == 2047


def test_out_of_memory_preempts_the_newest_and_loses_nothing() -> None:
    gpu = Gpu(SMALL)
    jobs = [Job(800, 900) for _ in range(4)]
    replay(gpu, [(0.0, job) for job in jobs])
    assert gpu.preemptions > 0
    assert jobs[0].preempted == 0
    assert [job.generated for job in jobs] == [900] * 4


def test_a_job_larger_than_the_pool_is_refused() -> None:
    assert not Gpu(SMALL).submit(Job(4000, 200), 0.0)


def test_half_speed_doubles_the_time() -> None:
    fast, slow = Gpu(SMALL), Gpu(SMALL)
    slow.slowdown = 2.0
    a, b = Job(500, 50), Job(500, 50)
    replay(fast, [(0.0, a)])
    replay(slow, [(0.0, b)])
    assert b.done_at == pytest.approx(2 * a.done_at)


def test_hang_and_recovery() -> None:
    gpu, job = Gpu(SMALL), Job(10, 100)
    gpu.submit(job, 0.0)
    gpu.advance(0.0)
    gpu.hung = True
    gpu.interrupt(0.1)
    gpu.advance(5.0)
    assert gpu.next_at == inf
    stuck = job.generated
    assert 0 < stuck < 100
    gpu.hung = False
    gpu.advance(5.0)
    replay(gpu, [])
    assert job.generated == 100


def test_cancel_frees_memory_and_is_idempotent() -> None:
    gpu = Gpu(SMALL, max_num_seqs=1)
    running, waiting = Job(100, 900), Job(100, 900)
    for job in (running, waiting):
        gpu.submit(job, 0.0)
    gpu.advance(0.0)
    for job in (waiting, running, running):
        gpu.cancel(job, 0.2)
    replay(gpu, [])
    assert running.done
    assert waiting.done
    assert (gpu.running, gpu.waiting, gpu.kv.active, gpu.queued_tokens) == (0, 0, 0, 0)
    gpu.cancel(running, 9.0)


@settings(max_examples=30, deadline=None)
@given(plan=plans)
def test_everything_submitted_ends_once_with_all_its_tokens(plan: Plan) -> None:
    gpu = Gpu(SMALL, max_num_seqs=8, max_num_batched_tokens=512, dram_tokens=8192, block_tokens=256)
    arrivals = jobs_of(plan)
    taken = [job for _, job in arrivals if job.prompt_tokens + job.output_tokens <= SMALL.kv_tokens]
    seen = replay(gpu, arrivals)
    assert sorted(id(job) for job, event, _ in seen if event == "done") == sorted(map(id, taken))
    assert sum(job.generated for job in taken) == sum(job.output_tokens for job in taken)
    assert (gpu.kv.active, gpu.queued_tokens, gpu.decoding, gpu._kv_tokens) == (0, 0, 0, 0)


@settings(max_examples=20, deadline=None)
@given(plan=plans)
def test_step_view_and_event_view_agree(plan: Plan) -> None:
    lazy = jobs_of(plan)
    replay(Gpu(SMALL, max_num_seqs=8, max_num_batched_tokens=512, block_tokens=256), lazy)
    gpu = Gpu(SMALL, max_num_seqs=8, max_num_batched_tokens=512, block_tokens=256)
    stepped = jobs_of(plan)
    todo, now, tokens = list(stepped), 0.0, 0
    while todo or gpu.running or gpu.waiting:
        end = gpu.begin_step(now)
        if end is None:
            now, job = todo.pop(0)
            gpu.submit(job, now)
            continue
        while todo and todo[0][0] < end:
            gpu.submit(todo[0][1], todo.pop(0)[0])
        events = gpu.end_step(end)
        tokens += len({id(job) for job, _ in events})
        now = end
    for (_, a), (_, b) in zip(lazy, stepped, strict=True):
        assert b.done_at == pytest.approx(a.done_at)
    assert tokens == sum(job.output_tokens for _, job in stepped if job.done_at < inf)


@settings(max_examples=20, deadline=None)
@given(plan=plans, stop=st.floats(0, 3), data=st.data())
def test_cancels_and_death_leave_nothing_behind(plan: Plan, stop: float, data: st.DataObject) -> None:
    gpu = Gpu(SMALL, max_num_seqs=4, max_num_batched_tokens=512, block_tokens=256)
    live = []
    for at, job in jobs_of(plan):
        while gpu.next_at <= at:
            gpu.advance(gpu.next_at)
        if gpu.submit(job, at):
            live.append(job)
            gpu.advance(at)
        if live and data.draw(st.booleans()):
            gpu.cancel(live[data.draw(st.integers(0, len(live) - 1))], at)
            gpu.advance(at)
    lost = gpu.fail(stop + 100)
    assert all(job.done for job in [*live, *lost])
    assert (gpu.running, gpu.waiting, gpu.kv.held, gpu.queued_tokens) == (0, 0, 0, 0)


def test_batcher_waits_for_company_then_pads_to_the_longest() -> None:
    spec = BatcherSpec(window=0.01, max_batch=2, marginal=0.5)
    server = Batcher(spec)
    jobs = [Job(10, 1), Job(512, 1), Job(10, 1)]
    replay(server, [(0.0, jobs[0]), (0.001, jobs[1]), (0.002, jobs[2])])
    pair = 0.001 + spec.seconds(512, 2)
    assert jobs[0].done_at == jobs[1].done_at == pytest.approx(pair)
    assert jobs[2].done_at == pytest.approx(pair + spec.seconds(10))
    assert spec.seconds(10) == pytest.approx(0.005)
    assert spec.seconds(512) == pytest.approx(0.25, rel=0.01)


@settings(max_examples=20, deadline=None)
@given(plan=plans)
def test_batcher_answers_every_request_once(plan: Plan) -> None:
    server = Batcher(BatcherSpec(max_batch=4, instances=2))
    seen = replay(server, jobs_of(plan))
    assert sum(event == "done" for _, event, _ in seen) == len(plan)
    assert (server.running, server.waiting, server.queued_tokens) == (0, 0, 0)
