"""The policy `least_latency`: fast ones first, failures are never fast, and nothing is avoided for ever."""

from __future__ import annotations

from collections import Counter

import pytest
from stage import Stage

from gpuroute.core.outcome import Outcome


def serve(stage: Stage, seconds: dict[str, float], *failing: str) -> str:
    """One call: how long each endpoint takes, and which ones fail, in no time at all."""
    attempt = stage.start()
    name = attempt.state.id
    stage.clock.advance(0.001 if name in failing else seconds[name])
    attempt.finish(Outcome.FAILED if name in failing else Outcome.SUCCESS, stage.clock())
    return name


TEN_TIMES = {"gpu-0": 1.0, "gpu-1": 0.1, "gpu-2": 0.1}
EQUAL = dict.fromkeys(TEN_TIMES, 0.1)


def test_the_fast_ones_are_preferred() -> None:
    stage = Stage(3, policy="least_latency")
    counts = Counter(serve(stage, TEN_TIMES) for _ in range(500))
    assert counts["gpu-0"] <= 500 / 10


def test_everybody_unknown_is_tried_before_anybody_twice() -> None:
    stage = Stage(2, policy="least_latency")
    assert {serve(stage, EQUAL), serve(stage, EQUAL)} == {"gpu-0", "gpu-1"}


def test_what_fails_at_once_does_not_look_fast() -> None:
    stage = Stage(3, policy="least_latency")
    counts = Counter(serve(stage, EQUAL, "gpu-0") for _ in range(200))
    assert counts["gpu-0"] <= 200 / 20


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("failures", [1, 30])
def test_what_failed_once_comes_back_when_it_is_well(size: int, failures: int) -> None:
    """In a pool of two it would otherwise lose every comparison from its first failure on."""
    stage = Stage(size, policy="least_latency")
    while stage.state("gpu-0").failed < failures:
        state = stage.state("gpu-0")
        attempt = state.acquire_in_panic(stage.clock())
        assert attempt is not None
        attempt.finish(Outcome.FAILED, stage.clock())
    start, back = stage.clock(), None
    while back is None and stage.clock() < start + 600:
        back = stage.clock() - start if serve(stage, EQUAL) == "gpu-0" else None
    assert back is not None
    assert back <= (40.0 if failures == 1 else 80.0)  # 10 s per factor of e: from 1 s or 60 s down to 0.1 s
    counts = Counter(serve(stage, EQUAL) for _ in range(400))
    assert counts["gpu-0"] >= 0.7 * 400 / size


def test_a_load_in_flight_counts_like_latency() -> None:
    stage = Stage(2, policy="least_latency")
    for _ in range(40):
        serve(stage, EQUAL)
    live = [stage.start() for _ in range(20)]
    assert all(abs(count - 10) <= 2 for count in Counter(attempt.state.id for attempt in live).values())
