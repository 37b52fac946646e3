"""A pick that is explained is not done: it moves nobody's turn and no count, so the picks after it are the same."""

from __future__ import annotations

import pytest
from stage import Stage

from gpuroute.core.candidates import Ask
from gpuroute.core.describe import explain
from gpuroute.core.endpoint import Endpoint
from gpuroute.core.locality import Locality, relocate
from gpuroute.core.outcome import Outcome
from gpuroute.core.policies import POLICIES

CALLS = 200
ZONES = ("a", "b", "b")


def fleet(agents: int) -> tuple[Endpoint, ...]:
    """Twelve endpoints in two zones; the first have agents."""
    return tuple(
        Endpoint(
            f"gpu-{n}",
            f"http://gpu-{n}:8000",
            zone=ZONES[n % 3],
            weight=1.0 + n % 2,
            agent="udp://127.0.0.1:7711" if n < agents else "",
        )
        for n in range(12)
    )


def picks(policy: str, agents: int, zone: str, *, looks: bool) -> list[str]:
    """Where the calls of one process go, if somebody looks before each of them or not."""
    world, names = Stage(fleet(agents), policy=policy), []
    if zone:
        relocate(world.pool.shared, world.pool.snapshot.states, Locality(zone))
        world.update(fleet(agents)[:-1])
        world.update(fleet(agents))
    for n in range(CALLS):
        ladder = tuple((n % 40) * 1_000_003 + rung for rung in range(1, 5))
        if looks:
            chance = world.random.getstate()
            assert explain(world.pool, Ask(None, ladder, 3_000)).candidates
            world.random.setstate(chance)  # chance has no memory; whose turn it is does
        call = world.call(ask=Ask(None, ladder, 3_000))
        attempt = call.next_attempt(world.clock())
        attempt.first_token(world.clock() + 0.1)
        call.finish(attempt, Outcome.SUCCESS, world.clock() + 0.2)
        names.append(attempt.state.id)
    return names


@pytest.mark.parametrize("zone", ["", "a"])
@pytest.mark.parametrize("agents", [0, 5])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_look_changes_no_pick_after_it(policy: str, agents: int, zone: str) -> None:
    assert picks(policy, agents, zone, looks=True) == picks(policy, agents, zone, looks=False)


@pytest.mark.parametrize("policy", ["round_robin", "weighted_round_robin"])
def test_whose_turn_it_is_is_who_gets_the_call(policy: str) -> None:
    world = Stage(fleet(0), policy=policy)
    for _ in range(50):
        shown = explain(world.pool, Ask()).winner
        assert shown == explain(world.pool, Ask()).winner
        assert shown == world.start().state.id
