"""The cost in seconds: what makes an endpoint dear, with bids and without."""

from __future__ import annotations

from typing import Any

import pytest
from stage import Stage

from gpuroute.core.candidates import Ask
from gpuroute.core.describe import explain
from gpuroute.core.endpoint import Endpoint, Gpu
from gpuroute.core.learning import learn_bid, learn_first_token
from gpuroute.core.outcome import Outcome
from gpuroute.core.policies import POLICIES
from gpuroute.core.report import MAX_AGE_S, Queue, Report, faded, own_work
from gpuroute.core.seconds import Soonest
from gpuroute.core.sources import MOST
from gpuroute.core.speed import shrunk
from gpuroute.core.trust import Trust

LADDER = (11, 12, 13, 14, 15, 16)
APART = tuple(rung * 0x9E3779B97F4A7C15 % 2**64 for rung in LADDER)  # on the ring


def stage(count: int = 8, *, agents: bool = True, kinds: dict[str, str] | None = None, **rules: Any) -> Stage:
    agent = "udp://127.0.0.1:7711" if agents else ""
    fleet = tuple(
        Endpoint(f"gpu-{n}", f"http://gpu-{n}:8000", agent=agent, gpu=Gpu(kind=(kinds or {}).get(f"gpu-{n}", "H100")))
        for n in range(count)
    )
    return Stage(fleet, policy="auto", **rules)


def picker(world: Stage) -> Soonest:
    found = world.pool.snapshot.picker
    assert isinstance(found, Soonest)
    return found


def ask_of(world: Stage, tokens: int = 8_000, ladder: tuple[int, ...] = LADDER, **bids: Report) -> Ask:
    ask = Ask(None, ladder, tokens)
    ask.now = world.clock()
    ask.bids = {name.replace("_", "-"): bid for name, bid in bids.items()}
    return ask


def cost(world: Stage, name: str, ask: Ask) -> float:
    return picker(world).cost(world.state(name), ask)


def bid(world: Stage, queued: int = 0, matched: int = 0, **more: Any) -> Report:
    return Report(world.clock(), 0, 0, queued, matched_tokens=matched, **more)


def test_a_bid_is_priced_by_its_queue_and_by_what_is_not_cached() -> None:
    world = stage()
    ask = ask_of(world, gpu_0=bid(world, 6_000), gpu_1=bid(world, 2_000), gpu_2=bid(world, 6_000, 7_000))
    assert cost(world, "gpu-2", ask) < cost(world, "gpu-1", ask) < cost(world, "gpu-0", ask)


def test_a_slow_gpu_pays_for_the_same_queue_in_its_own_seconds() -> None:
    world = stage(kinds={"gpu-1": "A100"})
    ask = ask_of(world, gpu_0=bid(world, 4_000), gpu_1=bid(world, 4_000))
    assert cost(world, "gpu-1", ask) == pytest.approx(cost(world, "gpu-0", ask) * 55.9 / 20.1)


@pytest.mark.parametrize("load", [{"kv_usage": 0.9}, {"running": 50}])
def test_decoding_neighbours_slow_the_prefill(load: dict[str, Any]) -> None:
    world = stage()
    ask = ask_of(world, gpu_0=bid(world, 4_000), gpu_1=bid(world, 4_000)._replace(**load))
    assert cost(world, "gpu-1", ask) > 1.3 * cost(world, "gpu-0", ask)


def test_in_a_backlog_cached_tokens_count_for_more_than_a_shorter_queue() -> None:
    world = stage()
    ask = ask_of(world, gpu_0=bid(world, 12_000, 7_900), gpu_1=bid(world, 2_000))
    assert cost(world, "gpu-1", ask) < cost(world, "gpu-0", ask), "a shorter wait for this call"
    world.pool.shared.speeds.backlog = 60_000.0
    assert cost(world, "gpu-0", ask) < cost(world, "gpu-1", ask), "a shorter wait for everybody"


def test_an_agent_that_does_not_know_what_is_cached_leaves_that_to_those_who_sent_it() -> None:
    """It was restarted beside an engine that was not. To say 0 is another thing: that engine is cold."""
    world = stage(2)
    world.pool.placements.remember(LADDER, "gpu-0")
    for said, best in ((-1, "gpu-0"), (0, "gpu-1")):
        ask = ask_of(world, gpu_0=bid(world, 1_000, said), gpu_1=bid(world, 1_000, 256))
        assert picker(world).pick(ask) is world.state(best)
    ask = ask_of(world, gpu_0=bid(world, 1_000, 7_900), gpu_1=bid(world, 1_000, -1))
    assert picker(world).pick(ask) is world.state("gpu-0"), "where nothing was sent nothing is hoped for"


@pytest.mark.parametrize("ladder", [(), LADDER[:1], LADDER])
def test_no_call_asks_more_than_a_handful_and_never_one_alone(ladder: tuple[int, ...]) -> None:
    world = stage(64)
    for _ in range(50):
        asked = picker(world).candidates(Ask(None, ladder, 8_000))
        assert 2 <= len(set(asked)) == len(asked) <= MOST


def homes_of(world: Stage, ladder: tuple[int, ...], key: int | None = None) -> list[str]:
    ask = Ask(key, ladder, 8_000)
    return [state.id for state, _, why in picker(world).consider(ask) if why == "home"]


def test_whoever_asks_for_a_prefix_asks_the_same_homes_and_one_at_random() -> None:
    one, other = stage(64), stage(64)
    homes = homes_of(one, LADDER)
    assert len(homes) == MOST - 1
    assert homes_of(other, LADDER) == homes == homes_of(one, LADDER[:3])
    assert homes_of(one, (), 13) == homes_of(other, (), 13) == homes, "a session is a key like any prefix"
    assert len(homes_of(one, LADDER[:2])) == 2, "of a short prompt little is to be found"
    assert len(picker(one).candidates(Ask(None, LADDER, 8_000))) == MOST


def test_a_crowded_prefix_keeps_two_homes_and_the_next_one_that_is_not_gets_its_own() -> None:
    world = stage(64)
    crowded, deeper = homes_of(world, APART), homes_of(world, (*APART[:2], APART[3]))
    elsewhere = [f"gpu-{n}" for n in range(64) if f"gpu-{n}" not in crowded][:4]
    for owner in elsewhere:
        world.pool.placements.remember(APART[:3], owner)
    found = homes_of(world, APART)
    assert found[:2] == crowded[:2]
    assert set(found) - set(crowded) <= set(deeper)
    assert set(found) & (set(deeper) - set(crowded)), "nobody looks where the rest of the prompt is"
    assert len(homes_of(world, APART[:3])) == 2, "the whole prompt is crowded: the others are drawn at random"
    for owner in crowded[:2]:
        world.pool.placements.remember(APART[:3], owner)
    assert homes_of(world, APART)[: MOST - 2] == [home for home in crowded if home != crowded[1]][: MOST - 2]


def test_what_every_prompt_begins_with_makes_nobody_a_candidate() -> None:
    world = stage(64)
    world.pool.placements.remember(LADDER[:2], "gpu-9")
    reasons = [why for _, _, why in picker(world).consider(Ask(None, LADDER, 8_000))]
    assert "placed before" not in reasons
    world.pool.placements.remember(LADDER[:3], "gpu-9")
    reasons = [why for state, _, why in picker(world).consider(Ask(None, LADDER, 8_000)) if state.id == "gpu-9"]
    assert reasons == ["placed before"]


def test_without_a_prefix_four_are_asked() -> None:
    world = stage(1_000)
    counts = set()
    for _ in range(50):
        counts.add(len(picker(world).candidates(Ask(None, (), 500))))
        learn_bid(world.state("gpu-0"), bid(world), 0.0)
    assert counts <= {3, 4}
    assert 4 in counts


def test_a_prompt_of_no_known_prefix_is_compared_more_widely_and_slow_gpus_are_dear_only_by_their_time() -> None:
    world = stage(1_000, agents=False, kinds={"gpu-1": "A100"})
    assert {why for _, _, why in picker(world).consider(ask_of(world, ladder=()))} == {"random"}
    assert max(len(picker(world).candidates(ask_of(world, ladder=()))) for _ in range(20)) == 4
    assert max(len(picker(world).candidates(ask_of(world))) for _ in range(20)) == 3, "a home, and two at random"
    known, unknown = ask_of(world), ask_of(world, ladder=())
    unknown.bids = known.bids = {}
    fast, slow = cost(world, "gpu-0", unknown), cost(world, "gpu-1", unknown)
    assert slow == pytest.approx(fast * 55.9 / 20.1)
    assert cost(world, "gpu-0", known) == pytest.approx(fast * picker(world).rules.blind_alpha), "a cache may be lost"


def test_who_answered_without_a_wait_lately_is_a_candidate_where_nobody_can_be_asked() -> None:
    world = stage(200, agents=False)
    calm, slow = world.state("gpu-7"), world.state("gpu-9")
    learn_first_token(calm, 8_000, 0.0, 0.16, world.clock())
    learn_first_token(slow, 8_000, 0.0, 9.0, world.clock())
    found = picker(world).consider(ask_of(world))
    assert [state.id for state, _, why in found if why == "calm"] == ["gpu-7"]
    learn_first_token(calm, 8_000, 0.0, 9.0, world.clock())
    assert not [state for state, _, why in picker(world).consider(ask_of(world)) if why == "calm"]


def test_own_work_without_a_first_token_makes_dear_and_its_age_counts() -> None:
    world = stage(4, agents=False)
    before = cost(world, "gpu-0", ask_of(world))
    attempt = world.state("gpu-0").acquire(world.clock(), None, 5_000)
    assert attempt is not None
    sent = cost(world, "gpu-0", ask_of(world))
    assert sent - before > 5_000 * 15e-6
    world.clock.advance(3.0)
    assert cost(world, "gpu-0", ask_of(world)) - before > 2.9, "who has kept a call waiting keeps the next one waiting"
    assert own_work(world.state("gpu-0").in_flight, world.clock(), world.clock()) == (0, 5_000, pytest.approx(3.0))


def test_in_overload_all_that_was_sent_is_ahead_not_only_what_was_sent_since_the_last_first_token() -> None:
    world = stage(4, agents=False)
    state = world.state("gpu-0")
    for _ in range(4):
        assert state.acquire(world.clock(), None, 100_000) is not None
    world.clock.advance(1.0)
    learn_first_token(state, 1_000, 0.0, 1.0, world.clock())  # of a call that met a short queue
    rate = shrunk(state.speed, state.cohort)
    assert cost(world, "gpu-0", ask_of(world)) > 400_000 * rate


def test_a_report_counts_without_a_bid_and_is_absent_when_it_is_old() -> None:
    world = stage(4, agents=False)
    plain = cost(world, "gpu-0", ask_of(world))
    learn_bid(world.state("gpu-0"), Report(world.clock(), 9, 5, 100_000), 0.0)
    assert cost(world, "gpu-0", ask_of(world)) > plain + 1.0
    world.clock.advance(MAX_AGE_S + 0.1)
    assert cost(world, "gpu-0", ask_of(world)) == pytest.approx(plain)


def test_an_observation_fades_to_the_mean_from_both_sides() -> None:
    assert faded(5.0, 0.0, 1.0) == 5.0
    assert 1.0 < faded(5.0, 5.0, 1.0) < 5.0
    assert 0.0 < faded(0.0, 5.0, 1.0) < 1.0
    assert faded(5.0, MAX_AGE_S + 1, 1.0) == 1.0


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_clock_that_steps_back_by_hours_ends_no_call(policy: str) -> None:
    stage = Stage(4, now=100_000.0, policy=policy)
    states = stage.pool.snapshot.states
    for state in states:
        state.report = Report(stage.clock(), 3, 4, 10_000, 0.5)
        state.trust = Trust()
        state.trust.learn(0.1, 5.0, stage.clock())
        state.queue = Queue()
        state.queue.learn(3.0, stage.clock() - 1)
        attempt = state.acquire(stage.clock())
        assert attempt is not None
        attempt.finish(Outcome.FAILED, stage.clock(), "reset")
    now = stage.clock() - 50_000.0
    ask = Ask(None, (7,), 1_000)
    ask.bids = {states[0].id: Report(now, 1, 1, 100, 0.5, 0)}
    assert stage.pool.acquire(ask, now) is not None
    assert explain(stage.pool, ask).winner
    assert faded(5.0, -1e9, 1.0) == 5.0
