"""Where calls wait for longer than is usual is avoided, while there is anybody else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from stage import Stage, endpoints

from gpuroute.core.candidates import Ask
from gpuroute.core.pool import Pool

if TYPE_CHECKING:
    from gpuroute.core.state import EndpointState


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


@pytest.mark.parametrize("hung", [200, 199])
def test_a_whole_silent_fleet_is_not_gone_through_one_by_one(hung: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(200)
    silent(stage, *range(hung))
    picks: list[object] = []
    pick = Pool.pick

    def counted(pool: Pool, *given: Any) -> EndpointState | None:
        picks.append(given)
        return pick(pool, *given)

    monkeypatch.setattr(Pool, "pick", counted)
    attempt = stage.pool.acquire(Ask(), stage.clock())
    assert attempt is not None
    assert len(picks) <= 5
    assert hung == 200 or attempt.endpoint.id == "gpu-199"


@pytest.mark.parametrize("how", ["drained", "unlisted"])
def test_silence_at_endpoints_that_have_left_does_not_count_as_saturation(how: str) -> None:
    """Two of five hang and are taken out; what ran there stalls only then. A third one that hangs must still be seen."""
    stage = Stage(5)
    silent(stage, 0, 1)
    waiting = [next(iter(state.in_flight)) for state in stage.pool.snapshot.states[:2]]
    stays = {f"gpu-{n}": float(n > 1) for n in range(5)}
    stage.update(endpoints(stays) if how == "drained" else [f"gpu-{n}" for n in range(2, 5)])
    for attempt in waiting:
        stage.pool.stalled(attempt, stage.clock())
    stage.clock.advance(60.0)
    stage.pool.wake(stage.clock())
    call = stage.call()
    assert call.patience(call.next_attempt(stage.clock())) < 60.0


def test_silence_before_an_endpoint_was_drained_does_not_count_as_saturation() -> None:
    stage = Stage(5)
    silent(stage, 0, 1)
    for state in stage.pool.snapshot.states[:2]:
        stage.pool.stalled(next(iter(state.in_flight)), stage.clock())
    stage.update(endpoints({f"gpu-{n}": float(n > 1) for n in range(5)}))
    stage.clock.advance(60.0)
    stage.pool.wake(stage.clock())
    call = stage.call()
    assert call.patience(call.next_attempt(stage.clock())) < 60.0
