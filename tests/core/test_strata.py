"""Pools where only some endpoints have agents: each part has its share, nobody is compared across."""

from __future__ import annotations

from random import Random

import pytest
from stage import Stage

from gpuroute.core.candidates import Ask
from gpuroute.core.endpoint import Endpoint, Gpu
from gpuroute.core.learning import learn_bid
from gpuroute.core.report import CARRIED, Report
from gpuroute.core.seconds import Soonest
from gpuroute.core.sources import PART_RUNG
from gpuroute.core.strata import LOOK, SLACK, TELLING_BIDS

AGENT = "udp://127.0.0.1:7711"
BUSY = 20_000  # tokens queued everywhere: there is no room for what belongs to the other part


def stage(covered: int, of: int, kinds: tuple[str, str] = ("H100", "H100"), policy: str = "auto") -> Stage:
    """The first `covered` endpoints have agents; the kinds are of those with and of those without."""
    fleet = tuple(
        Endpoint(
            f"gpu-{n}", f"http://gpu-{n}:8000", agent=AGENT if n < covered else "", gpu=Gpu(kind=kinds[n >= covered])
        )
        for n in range(of)
    )
    return Stage(fleet, policy=policy)


def draw(world: Stage, ladder: tuple[int, ...] = (), *, answers: bool = True, queued: int = BUSY) -> bool:
    """Candidates of one call, all of one part: True if they have agents; then they answer that so much is queued."""
    picker = world.pool.snapshot.picker
    assert isinstance(picker, Soonest)
    states = picker.candidates(Ask(None, ladder, 5_000))
    covered = {bool(state.endpoint.agent) for state in states}
    assert len(covered) == 1, "asked and unasked are compared with each other"
    if covered == {True} and answers:
        for state in states:
            learn_bid(state, Report(world.clock(), 1, 0, queued, matched_tokens=0, source="agent:READY"), 0.0)
    return covered == {True}


def ladders(seed: int = 5) -> tuple[int, ...]:
    chance = Random(seed)
    return tuple(chance.getrandbits(64) for _ in range(5))


@pytest.mark.parametrize("policy", ["auto", "predictive"])
def test_each_part_keeps_its_share_of_the_calls(policy: str) -> None:
    world = stage(5, 20, policy=policy)
    hits = sum(draw(world, ladders(n)) for n in range(1_000))
    assert abs(hits - 250) <= SLACK + 1


@pytest.mark.parametrize(("covered", "of", "calls"), [(45, 50, 960), (10, 20, 550), (4, 40, 102)])
def test_while_agents_say_that_there_is_room_their_part_takes_some_of_the_others_calls(
    covered: int, of: int, calls: int
) -> None:
    """A blind choice waits longer. But a small part would be full before its bids say so."""
    world = stage(covered, of)
    for n in range(1_000):
        draw(world, ladders(n), queued=0)
    hits = sum(draw(world, ladders(n), queued=0) for n in range(1_000, 2_000))
    assert abs(hits - calls) <= 2 * SLACK + 2


def test_room_that_is_gone_is_given_back() -> None:
    world = stage(45, 50)
    for n in range(200):
        draw(world, ladders(n), queued=0)
    for n in range(200, 400):
        draw(world, ladders(n), queued=BUSY)
    hits = sum(draw(world, ladders(n), queued=BUSY) for n in range(400, 1_400))
    assert abs(hits - 900) <= 2 * SLACK + 1


def at_home(world: Stage, *, asked: bool) -> list[tuple[int, ...]]:
    """Prompts whose home has an agent, or has none."""
    ring = world.pool.snapshot.picker.ring
    assert ring is not None
    prompts = map(ladders, range(400))
    return [ladder for ladder in prompts if bool(world.state(ring.home(ladder[PART_RUNG])).endpoint.agent) is asked]


def hear(world: Stage, bids: int) -> None:
    for _ in range(bids):
        learn_bid(world.state("gpu-3"), Report(world.clock(), 1, 0, 0, source="agent:READY"), 0.0)


def test_nothing_is_moved_before_the_queues_are_known() -> None:
    world = stage(45, 50)
    prompts = at_home(world, asked=False)
    hear(world, TELLING_BIDS - 1)
    assert not any(draw(world, ladder, answers=False) for ladder in prompts[:8])
    hear(world, 1)
    assert any(draw(world, ladder, answers=False) for ladder in prompts[8:16])


def test_all_processes_move_the_same_prefixes() -> None:
    moved = []
    for step in (1, -1):
        world = stage(10, 20)
        hear(world, TELLING_BIDS)
        prompts = at_home(world, asked=False)[::step]
        everything = [ladder for pair in zip(prompts, at_home(world, asked=True), strict=False) for ladder in pair]
        moved.append({ladder for ladder in everything if draw(world, ladder, queued=0)} & set(prompts))
    assert 10 < len(moved[0]) < 60, "a tenth of some 200"
    assert len(moved[0] & moved[1]) > len(moved[0]) / 2


def test_shares_are_of_capacity_not_of_counts() -> None:
    world = stage(10, 20, kinds=("H200", "A100"))
    hits = sum(draw(world, ladders(n)) for n in range(1_000))
    assert 700 < hits < 780, "an H200 prefills 2.8 times as fast as an A100"


def test_what_takes_no_calls_has_no_share() -> None:
    world = stage(10, 20)
    for n in range(5):
        world.state(f"gpu-{n}").set_cap("pause", 0)
    hits = [draw(world, ladders(n)) for n in range(1_000)]
    assert 300 < sum(hits[-900:]) < 360, "five of fifteen"


def test_prompts_that_begin_alike_meet_in_one_part() -> None:
    world = stage(10, 20)
    parts = {n: draw(world, ladders(n)) for n in range(12)}
    world = stage(10, 20)  # another process
    again = {n: draw(world, ladders(n)) for n in reversed(range(12))}
    assert sum(parts[n] == again[n] for n in parts) >= 10
    assert set(parts.values()) == {True, False}


def test_a_prompt_that_everybody_sends_does_not_fill_one_part() -> None:
    world = stage(5, 20)
    hits = sum(draw(world, ladders()) for _ in range(1_000))
    assert abs(hits - 250) <= SLACK + 1


def test_agents_that_nobody_hears_are_none() -> None:
    world, beside = stage(1_000, 1_000), ladders()
    state = world.state("gpu-3")

    def candidates() -> int:
        picker = world.pool.snapshot.picker
        assert isinstance(picker, Soonest)
        return len(picker.candidates(Ask(None, beside, 5_000)))

    assert min(candidates() for _ in range(LOOK)) > 3, "homes of two depths, and two at random"
    learn_bid(state, Report(world.clock(), 1, source=CARRIED), 0.0)
    assert candidates() == 3, "one home and two at random; what comes unasked is no answer"
    learn_bid(state, Report(world.clock(), 1, source="agent:READY"), 0.0)
    assert candidates() > 3


def test_engines_that_answer_for_themselves_are_no_agents_that_are_heard() -> None:
    """Else a pool whose agents are all silent would be taken for one that can be asked."""
    world = stage(5, 20)
    picker = world.pool.snapshot.picker
    assert isinstance(picker, Soonest)
    alike = []
    for n in range(40 * LOOK):
        states = picker.candidates(Ask(None, ladders(n), 5_000))
        for state in states:
            if not state.endpoint.agent:
                learn_bid(state, Report(world.clock(), 1, 0, 0, source="engine:READY"), 0.0)
        alike.append(len({bool(state.endpoint.agent) for state in states}) == 1)
    assert not all(alike[-LOOK:]), "the pool is routed as one without agents"


def test_where_everybody_is_closed_in_one_part_the_other_one_serves() -> None:
    world = stage(2, 8)
    for n in range(2):
        world.state(f"gpu-{n}").set_cap("pause", 0)
    places = {world.start(ask=Ask(None, ladders(n), 5_000)).state.id for n in range(50)}
    assert places
    assert not places & {"gpu-0", "gpu-1"}
