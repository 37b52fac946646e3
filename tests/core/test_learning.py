"""What first tokens teach: a throttled GPU shows soon, an outlier nowhere, and silence at once."""

from __future__ import annotations

import math

import pytest
from stage import Stage

from gpuroute.core.candidates import Ask
from gpuroute.core.learning import UNHEARD_S, learn_bid, learn_first_token, learn_latency, learn_silence
from gpuroute.core.pickers import queue_depth
from gpuroute.core.report import Report
from gpuroute.core.sources import copies, worth_asking
from gpuroute.core.speed import Rate, shrunk

RATE = 27e-6


def learned(world: Stage, name: str) -> float:
    state = world.state(name)
    return shrunk(state.speed, state.pool.speeds.cohort(state.endpoint))


def serve(world: Stage, name: str, count: int, slower: float = 1.0, tokens: int = 6_000) -> None:
    for _ in range(count):
        noise = math.exp(0.3 * (2 * world.random.random() - 1))
        learn_first_token(world.state(name), tokens, 0.0, tokens * RATE * slower * noise, world.clock())


def test_a_gpu_that_is_a_fifth_slower_shows_within_fifty_calls() -> None:
    world = Stage(8, policy="auto")
    for _ in range(5):
        for number in range(8):
            serve(world, f"gpu-{number}", 10)
    before = learned(world, "gpu-3") / learned(world, "gpu-0")
    assert before == pytest.approx(1.0, abs=0.1)
    for _ in range(5):  # throttled: 1 / 0.8
        serve(world, "gpu-3", 10, 1.25)
        serve(world, "gpu-0", 10)
    assert before * 1.14 < learned(world, "gpu-3") / learned(world, "gpu-0") < before * 1.33
    assert world.state("gpu-3").admitted, "dearer, not ejected"


def test_one_slow_call_shows_nowhere() -> None:
    world = Stage(2, policy="auto")
    serve(world, "gpu-0", 50)
    serve(world, "gpu-1", 50)
    before = learned(world, "gpu-0")
    serve(world, "gpu-0", 1, 20.0)
    assert learned(world, "gpu-0") < before * 1.1


def test_noise_alone_moves_a_rate_no_more_than_before() -> None:
    """The newest sample weighs more only while errors lie on one side."""
    world = Stage(1, policy="auto")
    serve(world, "gpu-0", 50)
    seen = []
    for _ in range(400):
        serve(world, "gpu-0", 1)
        seen.append(learned(world, "gpu-0") / RATE)
    assert max(seen) < 1.06
    assert min(seen) > 0.94


def test_short_prompts_say_little_about_the_rate() -> None:
    long, short = Stage(1, policy="auto"), Stage(1, policy="auto")
    start = learned(long, "gpu-0")
    serve(long, "gpu-0", 5, 10.0)
    serve(short, "gpu-0", 5, 10.0, tokens=100)
    assert learned(long, "gpu-0") > learned(short, "gpu-0") > start


def test_a_call_that_left_without_a_first_token_teaches_at_least_its_wait() -> None:
    world = Stage(2, policy="auto")
    state, started = world.state("gpu-0"), world.clock()
    world.clock.advance(1.5)
    learn_silence(state, started, world.clock())
    assert state.queue is not None
    assert state.queue.seconds >= 1.5
    assert state not in tuple(state.pool.speeds.calm())


def test_the_usual_wait_is_learned_where_nothing_was_known() -> None:
    world = Stage(2, policy="auto")
    state, speeds = world.state("gpu-0"), world.pool.shared.speeds
    learn_first_token(state, 100, 0.0, 5.0, world.clock())
    blind = speeds.mean_wait
    assert blind > 0
    world.clock.advance(UNHEARD_S / 2)
    learn_first_token(state, 100, 0.0, 0.003, world.clock())
    assert speeds.mean_wait == blind, "an informed choice says nothing about the others"
    world.clock.advance(2 * UNHEARD_S)
    learn_first_token(state, 100, 0.0, 0.003, world.clock())
    assert speeds.mean_wait < blind


def test_counts_fade_to_the_mean_of_all_reports_and_own_calls_are_added() -> None:
    world = Stage(3, policy="queue_depth")
    for _ in range(300):
        for name, running in (("gpu-0", 0), ("gpu-1", 60)):
            learn_bid(world.state(name), Report(world.clock(), running), 0.0)
    ask = Ask()
    ask.now = world.clock()
    assert queue_depth(world.state("gpu-0"), ask) == 0
    assert queue_depth(world.state("gpu-1"), ask) == 60
    assert queue_depth(world.state("gpu-2"), ask) == pytest.approx(30, abs=2), "unheard of: neither empty nor full"
    world.clock.advance(5.0)
    ask.now = world.clock()
    assert world.state("gpu-0").acquire(ask.now) is not None
    assert [queue_depth(world.state(f"gpu-{n}"), ask) for n in range(3)] == pytest.approx([31, 30, 30], abs=2)
    assert queue_depth(world.state("gpu-0"), ask) > queue_depth(world.state("gpu-1"), ask), "own calls outweigh old news"


def test_small_answers_are_not_worth_asking_for_and_long_ones_are_from_afar() -> None:
    world = Stage(2, policy="auto")
    state, ask = world.state("gpu-0"), Ask(None, (), 10)
    assert not worth_asking(ask, [state], 0.004), "nothing is known, and the prompt is small"
    for seconds, round_trip, worth in ((0.01, 0.0002, False), (2.0, 0.05, True), (2.0, 0.5, False)):
        world = Stage(2, policy="auto")
        state = world.state("gpu-0")
        learn_latency(state, seconds, world.clock(), failed=False)
        assert worth_asking(ask, [state], round_trip) is worth
    assert worth_asking(ask, [state], 0.0), "a coarse clock measures round trips of nothing"


@pytest.mark.parametrize(("lost", "at_most"), [(0.0, 0.0), (0.1, 0.02), (0.3, 0.03)])
def test_takes_and_tells_are_said_so_often_that_few_are_lost(lost: float, at_most: float) -> None:
    asked_again = 1 - (1 - lost) ** 2
    assert lost ** copies(asked_again) <= at_most


def test_a_rate_that_two_threads_spoilt_stays_between_its_samples() -> None:
    rate = Rate(RATE)
    rate.learn(math.log(RATE) + 1e-9)
    rate._bias = 0.3  # stored by another thread, whose spread is still to come
    rate.learn(math.log(2 * RATE))
    assert RATE < rate.seconds < 2 * RATE
