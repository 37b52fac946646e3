"""The default policy: sessions and prefixes stay where they are while that is cheap, and nobody who left is picked."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from stage import OK, REFUSED, Stage, places

from gpuroute.core.breaker import BreakerRules
from gpuroute.core.candidates import Ask
from gpuroute.core.outcome import Outcome

POLICIES = ["auto", "predictive"]


def serve(stage: Stage, ask: Ask, seconds: float) -> str:
    """One call whose first token comes after so many seconds."""
    attempt = stage.call(ask=ask).next_attempt(stage.clock())
    attempt.sent(stage.clock())
    attempt.first_token(stage.clock.advance(seconds))
    attempt.finish(Outcome.SUCCESS, stage.clock.advance(0.1))
    return attempt.state.id


@pytest.mark.parametrize("asked", [{"key": 77}, {"key": 77, "tokens": 4_000}, {"ladder": (1, 2, 3), "tokens": 4_000}])
def test_a6_a_session_or_a_prefix_stays_although_others_look_a_little_faster(asked: dict[str, object]) -> None:
    stage, dice = Stage(8, policy="auto"), Random(3)
    for _ in range(400):
        serve(stage, Ask(tokens=1_000), 0.02 + 0.02 * dice.random())
    stage.clock.advance(20.0)
    seen = Counter(serve(stage, Ask(**asked), 0.02 + 0.02 * dice.random()) for _ in range(50))  # type: ignore[arg-type]
    assert seen.most_common(1)[0][1] == 50


def test_a6_sessions_are_spread_over_their_homes() -> None:
    """Concurrent new sessions: none of eight endpoints is given more than twice its share."""
    stage = Stage(8, policy="auto")
    live = [stage.start(ask=Ask(key=number * 0x9E3779B97F4A7C15 % 2**64, tokens=1_000)) for number in range(160)]
    seen = Counter(attempt.state.id for attempt in live)
    assert len(seen) == 8
    assert max(seen.values()) <= 2 * 20


def test_a_popular_session_spills_when_its_home_has_a_queue() -> None:
    stage = Stage(8, policy="auto")
    live = [stage.start(ask=Ask(key=5, tokens=2_000)) for _ in range(64)]
    assert len({attempt.state.id for attempt in live}) >= 3


@pytest.mark.parametrize("policy", POLICIES)
def test_a_retry_after_an_update_does_not_go_to_who_has_left(policy: str) -> None:
    """The candidates of a call are drawn once; what the registry has removed or drained since is none of them."""
    for seed in range(30):
        stage = Stage(6, policy=policy, seed=seed, breaker=BreakerRules(failures=0))
        call = stage.call(ask=Ask(ladder=(1, 2, 3), tokens=3_000))
        first = call.next_attempt(stage.clock())
        assert call.finish(first, REFUSED[0], stage.clock())
        stays = [name for name in ("gpu-4", "gpu-5") if name != first.state.id]
        stage.update({**{f"gpu-{n}": 0.0 for n in range(4)}, **dict.fromkeys(stays, 1.0)})
        stage.clock.advance(1.0)
        assert call.next_attempt(stage.clock()).state.id in stays


@pytest.mark.parametrize("policy", POLICIES)
def test_who_failed_is_avoided_while_it_is_fresh(policy: str) -> None:
    stage = Stage(2, policy=policy)
    stage.drive(lambda attempt: REFUSED if attempt.state.id == "gpu-0" else OK)
    failed = [state.id for state in stage.pool.snapshot.states if state.failed]
    after = Counter(places(stage.drive(lambda _: OK))[0] for _ in range(20))
    assert not failed or after[failed[0]] == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_no_candidate_of_a_large_fleet_is_looked_at_twice_or_all(policy: str) -> None:
    stage = Stage(500, policy=policy)
    for number in range(50):
        rows = list(stage.pool.snapshot.picker.consider(Ask(ladder=(number, 2 * number, 3 * number, 9), tokens=9_000)))
        assert len({state for state, _, _ in rows}) == len(rows) <= 6
