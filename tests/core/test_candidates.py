"""Where candidates come from: weights as stated, no favourite among equals, nothing twice."""

from __future__ import annotations

import math
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stage import Stage

from gpuroute.core.candidates import NOTHING_ASKED, DRandom, Rotation, TwoRandom, Weighted, alias_table
from gpuroute.core.outcome import Outcome

PICKS = 20_000


def shares(stage: Stage, picks: int = PICKS) -> dict[str, float]:
    """The share of picks of each endpoint when nothing is in flight."""
    counts = Counter(state.id for _ in range(picks) if (state := stage.pool.pick()) is not None)
    return {name: count / picks for name, count in counts.items()}


def bound(share: float, picks: int = PICKS) -> float:
    """Four standard deviations of a share of independent picks: exceeded by chance once in 16,000."""
    return 4 * math.sqrt(share * (1 - share) / picks)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=60))
def test_an_alias_table_holds_exactly_the_weights(weights: list[float]) -> None:
    share, alias = alias_table(weights)
    size, total = len(weights), sum(weights)
    mass = list(share)
    for index, other in enumerate(alias):
        mass[other] += 1 - share[index]
    assert all(0 <= part <= 1 for part in share)
    assert [part / size for part in mass] == pytest.approx([weight / total for weight in weights], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    "weights",
    [
        {"a": 1.0, "b": 1.0},
        {"a": 1.0, "b": 2.0, "c": 5.0},
        {"a": 0.5, "b": 0.25, "c": 0.25},
        {f"gpu-{n}": 1.0 + n % 3 for n in range(20)},
    ],
)
def test_weight_shares_of_random(weights: dict[str, float]) -> None:
    found, total = shares(Stage(weights, policy="random")), sum(weights.values())
    for name, weight in weights.items():
        share = weight / total
        assert abs(found[name] - share) <= bound(share), name


def test_l8_shares_of_two_weights_are_within_five_percent() -> None:
    found = shares(Stage({"a": 1.0, "b": 3.0}, policy="random", seed=3))
    assert found["b"] / found["a"] == pytest.approx(3.0, rel=0.05)


def test_l8_a_thousandth_is_rare_but_not_never() -> None:
    share = 1 / 1001
    found = shares(Stage({"a": 1.0, "b": 1000.0}, policy="random"))
    assert abs(found["a"] - share) <= bound(share)
    assert found["a"] > 0


@pytest.mark.parametrize("policy", ["random", "round_robin", "p2c", "least_request", "prefix", "session", "auto"])
def test_l8_weight_zero_is_drained_and_its_streams_live_on(policy: str) -> None:
    stage = Stage({"a": 1.0}, policy=policy)
    stream = stage.start()
    stage.update({"a": 0.0, "b": 1.0})
    assert {stage.pool.pick().id for _ in range(200)} == {"b"}  # type: ignore[union-attr]
    assert stage.state("a").in_flight == {stream}
    assert stage.residue() == {"a": 1, "pool": 1}


@pytest.mark.parametrize("odd", [-1.0, math.nan, math.inf, -math.inf])
def test_l8_an_odd_weight_that_slipped_past_the_registry_counts_as_drained(odd: float) -> None:
    stage = Stage({"a": odd, "b": 1.0}, policy="auto")
    assert {stage.pool.pick().id for _ in range(100)} == {"b"}  # type: ignore[union-attr]


@pytest.mark.parametrize("policy", ["random", "p2c", "least_request", "session", "auto"])
@pytest.mark.parametrize("weight", [1e18, 1e-18])
def test_l8_huge_and_tiny_weights_are_only_ratios(policy: str, weight: float) -> None:
    stage = Stage(dict.fromkeys("abcd", weight), policy=policy)
    found = shares(stage, 4_000)
    assert set(found) == set("abcd")
    assert all(abs(share - 0.25) <= bound(0.25, 4_000) for share in found.values())


def test_l8_many_equal_hosts_are_equal() -> None:
    stage = Stage({f"gpu-{n}": 1 / 150 for n in range(150)}, policy="random")
    found = shares(stage, 30_000)
    assert len(found) == 150
    assert all(abs(share - 1 / 150) <= bound(1 / 150, 30_000) for share in found.values())


def test_two_random_are_distinct_and_every_pair_is_equally_likely() -> None:
    stage = Stage(4)
    two = TwoRandom(stage.pool.snapshot.routable, Random(2).random)
    pairs = Counter(tuple(state.id for state in two(NOTHING_ASKED)) for _ in range(PICKS))
    assert len(pairs) == 12
    assert all(one != other for one, other in pairs)
    assert all(abs(count / PICKS - 1 / 12) <= bound(1 / 12) for count in pairs.values())


def test_two_endpoints_at_rest_share_the_calls_evenly() -> None:
    """In a fixed order every client whose own count is 0 would choose the same one: the fleet's second half idles."""
    found = shares(Stage(2, policy="p2c"))
    assert all(abs(share - 0.5) <= bound(0.5) for share in found.values())


def test_two_by_weight_come_first_in_proportion() -> None:
    stage = Stage({"a": 1.0, "b": 2.0, "c": 1.0})
    found = shares(stage)
    assert abs(found["b"] - 0.5) <= bound(0.5)


def test_one_endpoint_with_nearly_all_the_weight_is_compared_with_itself() -> None:
    stage = Stage({"a": 1e-9, "b": 1e9})
    assert stage.pool.pick() is stage.state("b")


@given(st.integers(17, 60), st.integers(0, 2**32))
def test_d_random_gives_d_distinct_ones(size: int, seed: int) -> None:
    stage = Stage(size)
    found = tuple(DRandom(stage.pool.snapshot.routable, Random(seed).random)(NOTHING_ASKED))
    assert len(set(found)) == len(found) == 4


def test_a_small_pool_is_compared_whole_from_a_random_place() -> None:
    stage = Stage(16)
    source = DRandom(stage.pool.snapshot.routable, Random(5).random)
    seen = [source(NOTHING_ASKED) for _ in range(200)]
    assert all(len(set(found)) == 16 for found in seen)
    assert len({found[0].id for found in seen}) == 16


def test_rotation_gives_each_its_turn_from_a_random_start() -> None:
    stage = Stage(5)
    states = stage.pool.snapshot.routable
    turn = Rotation(states, Random(1).random)
    counts = Counter(turn.one(NOTHING_ASKED).id for _ in range(50))
    assert set(counts.values()) == {10}
    starts = {Rotation(states, Random(seed).random).one(NOTHING_ASKED).id for seed in range(40)}
    assert len(starts) == 5


def test_round_robin_goes_in_turn() -> None:
    stage = Stage(4, policy="round_robin")
    counts = Counter(stage.pool.pick().id for _ in range(40))  # type: ignore[union-attr]
    assert set(counts.values()) == {10}


def test_a_draw_reaches_the_last_endpoint_and_never_beyond() -> None:
    states = Stage(3).pool.snapshot.routable
    almost_one = 1 - 2**-53
    assert Weighted(states, lambda: almost_one).one(NOTHING_ASKED) is states[2]
    assert {state.id for state in TwoRandom(states, lambda: almost_one)(NOTHING_ASKED)} == {"gpu-2", "gpu-1"}


def test_weighted_round_robin_spreads_each_weight_evenly_in_time() -> None:
    """Any 8 turns in a row hold each endpoint's share of them to within one and a half; 800 turns to within two."""
    stage = Stage({"a": 1.0, "b": 2.0, "c": 5.0}, policy="weighted_round_robin")
    turns = [stage.pool.pick().id for _ in range(800)]  # type: ignore[union-attr]
    for start in range(793):
        window = Counter(turns[start : start + 8])
        assert all(abs(window[name] - weight) <= 1.5 for name, weight in (("a", 1), ("b", 2), ("c", 5)))
    assert all(abs(Counter(turns)[name] - 100 * weight) <= 2 for name, weight in (("a", 1), ("b", 2), ("c", 5)))


def test_weighted_round_robin_corrects_a_wrong_weight_by_what_it_observes() -> None:
    """Equal weights, but one takes ten times as long: it gets fewer turns, and still enough to be seen to recover."""
    stage = Stage(4, policy="weighted_round_robin")
    counts = Counter[str]()
    for number in range(2_000):
        attempt = stage.start()
        counts[attempt.state.id] += number >= 400
        stage.clock.advance(1.0 if attempt.state.id == "gpu-0" else 0.1)
        attempt.finish(Outcome.SUCCESS, stage.clock())
    ratio = counts["gpu-1"] / counts["gpu-0"]
    assert 4.0 <= ratio <= 10.0
