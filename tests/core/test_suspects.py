"""Where calls wait for longer than is usual is avoided, while there is anybody else."""

from __future__ import annotations

import pytest
from stage import Stage

from gpuroute.core.candidates import Ask


def silent(stage: Stage, *numbers: int) -> None:
    """Calls wait at these endpoints, and have for longer than any first byte took so far."""
    for _ in range(50):
        stage.pool.shared.history.ttft.add(0.01)
    for number in numbers:
        attempt = stage.pool.snapshot.states[number].acquire(stage.clock())
        assert attempt is not None
        attempt.sent(stage.clock())
        attempt.awaited(stage.clock())
    stage.clock.advance(5.0)


@pytest.mark.parametrize("policy", ["p2c", "auto", "prefix", "random"])
@pytest.mark.parametrize("hung", [(0,), (0, 1), (0, 1, 2)])
def test_the_one_that_answers_gets_every_call(policy: str, hung: tuple[int, ...]) -> None:
    stage = Stage(4, policy=policy)
    silent(stage, *hung)
    for number in range(200):
        attempt = stage.pool.acquire(Ask(None, (number,), 100), stage.clock())
        assert attempt is not None
        assert attempt.endpoint.id not in {f"gpu-{each}" for each in hung}
        attempt.first_token(stage.clock())


def test_where_all_are_silent_one_is_taken() -> None:
    stage = Stage(3)
    silent(stage, 0, 1, 2)
    assert stage.pool.acquire(Ask(), stage.clock()) is not None
