"""Zones: traffic stays near as far as that overloads nobody, and a zone that dies is left bit by bit."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuroute.core.candidates import Ask
from gpuroute.core.endpoint import Endpoint, State
from gpuroute.core.fleet import PoolSpec
from gpuroute.core.locality import ROUND_TRIP_S, Locality, learn_round_trip, random_few, relocate
from gpuroute.core.outcome import Outcome
from gpuroute.core.pool import Pool, PoolRules
from gpuroute.core.report import Report
from gpuroute.core.zones import Place, Zoned, spread

COUNTING = [
    "random", "round_robin", "weighted_round_robin", "p2c", "least_request", "least_latency", "queue_depth", "prefix",
    "session",
]  # fmt: skip


def fleet(zones: dict[str, int], **fields: Any) -> tuple[Endpoint, ...]:
    """So many endpoints by zone; `eu/a` is zone a of region eu."""
    return tuple(
        Endpoint(
            f"{name}-{n}", f"http://{name.replace('/', '-')}-{n}:1", zone=name.split("/")[-1], region=region, **fields
        )
        for name, count in zones.items()
        for region in [name.split("/")[0] if "/" in name else ""]
        for n in range(count)
    )


def pool_in(locality: Locality, endpoints: tuple[Endpoint, ...], policy: str = "p2c", seed: int = 1) -> Pool:
    pool = Pool(PoolSpec("llm"), PoolRules(policy=policy), random=Random(seed).random)
    relocate(pool.shared, (), locality)
    pool.update(PoolSpec("llm", endpoints), pool.rules, 0.0)
    return pool


def went(pool: Pool, calls: int = 4_000, asks: Any = None) -> Counter[str]:
    """Shares of picks by zone."""
    made = asks or (Ask() for _ in range(calls))
    zones = Counter(state.id.rpartition("-")[0] for ask in made if (state := pool.pick(ask)) is not None)
    return Counter({zone: count / zones.total() for zone, count in zones.items()})


def shares(pool: Pool) -> dict[str, float]:
    picker = pool.snapshot.picker
    assert isinstance(picker, Zoned)
    return dict(zip((zone for _, zone in picker._names), picker.shares(), strict=True))


def kill(pool: Pool, prefix: str, count: int | None = None) -> None:
    for state in [state for state in pool.snapshot.states if state.id.startswith(prefix)][:count]:
        state.set_cap("ejection", 0, until=1e9)


# --------------------------------------------------------------------------------------------- the shares


@given(st.lists(st.tuples(st.sampled_from("uv"), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=6))
def test_if_everybody_does_this_load_is_even_and_nobody_sends_more_away_than_must_be(
    rows: list[tuple[str, float, float]],
) -> None:
    capacity, clients = sum(c for _, c, _ in rows), sum(d for *_, d in rows)
    if capacity < 1e-3 or clients < 1e-3:
        return
    places = [Place(region, c / capacity, d / clients) for region, c, d in rows]
    load = [0.0] * len(places)
    for own, place in enumerate(places):
        order = [place, *(other for other in places if other is not place)]
        parts = spread(order)
        assert sum(parts) == pytest.approx(1.0)
        assert min(parts) >= 0
        if place.clients > 1e-9:
            assert parts[0] == pytest.approx(min(1.0, place.capacity / place.clients))
        for other, part in zip(order, parts, strict=True):
            load[places.index(other)] += place.clients * part
        assert own == places.index(place)
    assert load == pytest.approx([place.capacity for place in places], abs=1e-6)


def test_a_spill_stays_in_its_region_as_far_as_that_has_room() -> None:
    """Own zone: half of what it needs. Its neighbour has room for half of the rest."""
    places = [Place("eu", 0.2, 0.4), Place("eu", 0.3, 0.2), Place("us", 0.5, 0.4)]
    assert spread(places) == pytest.approx([0.5, 0.25, 0.25])
    assert spread([Place("eu", 0.0, 0.5), Place("us", 1.0, 0.5)]) == pytest.approx([0.0, 1.0])
    assert spread([Place("eu", 1.0, 0.0)]) == [1.0]


# ----------------------------------------------------------------------------------------------- policies


@pytest.mark.parametrize("policy", COUNTING)
def test_a_zone_with_its_share_of_capacity_keeps_its_calls(policy: str) -> None:
    pool = pool_in(Locality(zone="a"), fleet({"a": 4, "b": 4, "c": 4}), policy)
    assert went(pool, 300) == {"a": 1.0}


@pytest.mark.parametrize("policy", COUNTING)
def test_a_small_zone_keeps_what_it_can_serve(policy: str) -> None:
    """A third of the clients, a sixth of the capacity: half of the calls leave, to the only zone with room."""
    pool = pool_in(Locality(zone="a"), fleet({"a": 2, "b": 4, "c": 6}), policy)
    assert shares(pool) == pytest.approx({"a": 0.5, "b": 0.0, "c": 0.5})
    found = went(pool)
    assert found["a"] == pytest.approx(0.5, abs=0.05)
    assert found["b"] == 0


@pytest.mark.parametrize("policy", ["p2c", "session", "round_robin"])
def test_a_dying_zone_is_left_bit_by_bit_and_taken_up_again(policy: str) -> None:
    pool = pool_in(Locality(zone="a"), fleet({"a": 4, "b": 4, "c": 4}), policy)
    pool.pick()
    kill(pool, "a", 2)  # 2 of 10 are left here for a third of the clients
    assert went(pool)["a"] == pytest.approx(0.6, abs=0.05)
    kill(pool, "a")
    found = went(pool)
    assert found["a"] == 0
    assert found["b"] == pytest.approx(0.5, abs=0.05)
    for state in pool.snapshot.states:
        state.set_cap("ejection", float("inf"))
    assert went(pool, 300) == {"a": 1.0}


def test_where_many_clients_live_fewer_calls_stay() -> None:
    """Eight of ten clients here, a third of the capacity: without this the zone would have 2.4 times its load."""
    endpoints = fleet({"a": 4, "b": 4, "c": 4})
    crowded = pool_in(Locality(zone="a", zone_clients=0.8, region_clients=1.0), endpoints)
    assert shares(crowded) == pytest.approx({"a": 5 / 12, "b": 7 / 24, "c": 7 / 24})
    quiet = pool_in(Locality(zone="b", zone_clients=0.1, region_clients=1.0), endpoints)
    assert shares(quiet)["b"] == 1.0
    relocate(quiet.shared, quiet.snapshot.states, Locality(zone="b", zone_clients=0.5, region_clients=1.0))
    assert shares(quiet)["b"] == pytest.approx(2 / 3)  # counted anew, with no new view of the fleet


def test_another_region_is_for_what_the_region_cannot_serve() -> None:
    endpoints = fleet({"eu/a": 2, "eu/b": 4, "us/a": 6})
    pool = pool_in(Locality(zone="a", region="eu"), endpoints)
    found = went(pool)
    assert found["eu/a"] == pytest.approx(0.5, abs=0.05)
    assert found["us/a"] == pytest.approx(0.5, abs=0.05)  # the neighbour has a third of both: nothing to spare
    kill(pool, "eu")
    assert went(pool, 200) == {"us/a": 1.0}
    by_region = pool_in(Locality(region="us"), endpoints)
    assert went(by_region, 200) == {"us/a": 1.0}


def test_a_zone_without_endpoints_uses_the_others() -> None:
    pool = pool_in(Locality(zone="z"), fleet({"a": 4, "b": 4}))
    assert went(pool)["a"] == pytest.approx(0.5, abs=0.05)


def test_endpoints_that_do_not_say_where_they_are_are_neither_near_nor_lost() -> None:
    nowhere = tuple(Endpoint(f"x-{n}", f"http://x-{n}:1") for n in range(4))
    assert went(pool_in(Locality(zone="a"), (*fleet({"a": 4}), *nowhere)), 200)["a"] == pytest.approx(0.5, abs=0.1)
    assert went(pool_in(Locality(zone="a"), nowhere), 50) == {"x": 1.0}


def test_without_a_zone_or_with_only_one_nothing_is_split() -> None:
    for locality, zones in ((Locality(), {"a": 2, "b": 2}), (Locality(zone="a"), {"a": 3})):
        assert not isinstance(pool_in(locality, fleet(zones)).snapshot.picker, Zoned)


def test_a_conversation_stays_in_its_zone_and_few_move_when_the_shares_do() -> None:
    pool = pool_in(Locality(zone="a"), fleet({"a": 2, "b": 4, "c": 6}), "session")
    keys = [Random(n).getrandbits(64) for n in range(2_000)]
    before = [pool.pick(Ask(key=key)) for key in keys]
    assert before == [pool.pick(Ask(key=key)) for key in keys]
    other = pool_in(Locality(zone="a"), fleet({"c": 6, "b": 4, "a": 2}), "session", seed=7)
    assert [state.id for state in before if state] == [other.pick(Ask(key=key)).id for key in keys]  # type: ignore[union-attr]
    kill(pool, "b", 1)
    after = [pool.pick(Ask(key=key)) for key in keys]
    moved = sum(one is not other for one, other in zip(before, after, strict=True))
    assert moved / len(keys) <= 0.15  # the shares changed by 0.05


def test_when_all_that_is_near_is_full_the_call_goes_elsewhere_at_once() -> None:
    pool = pool_in(Locality(zone="a"), fleet({"a": 1, "b": 1}))
    pool.snapshot.by_id["a-0"].set_cap("capacity", 1)
    first = pool.acquire(Ask(), 0.0)
    assert first is not None
    assert first.state.id == "a-0"
    second = pool.acquire(Ask(), 0.0)
    assert second is not None
    assert second.state.id == "b-0"
    first.finish(Outcome.SUCCESS, 0.1)
    again = pool.acquire(Ask(), 0.2)
    assert again is not None
    assert again.state.id == "a-0"


def test_panic_and_retries_still_reach_everybody() -> None:
    pool = pool_in(Locality(zone="a"), fleet({"a": 2, "b": 2}))
    kill(pool, "")
    attempt = pool.acquire(Ask(), 0.0)
    assert attempt is not None  # fail open, as without zones
    attempt.finish(Outcome.CANCELLED, 0.0)
    for state in pool.snapshot.states:
        state.set_cap("ejection", float("inf"))
    tried: set[Any] = {state for state in pool.snapshot.states if state.id.startswith("a")}
    assert {pool.pick(Ask(), tried).id for _ in range(50)} == {"b-0", "b-1"}  # type: ignore[union-attr]


def test_clients_of_all_zones_together_load_every_endpoint_alike() -> None:
    """Uneven clients, uneven capacity, a half-dead zone. Each knows how many live in its own zone, no more: what leaves
    is as it should be, where it goes is a guess."""
    zones, homes = {"a": 3, "b": 9, "c": 8}, {"a": 0.5, "b": 0.2, "c": 0.3}
    load: Counter[str] = Counter()
    for seed, (zone, share) in enumerate(homes.items()):
        pool = pool_in(Locality(zone=zone, zone_clients=share, region_clients=1.0), fleet(zones), seed=seed)
        kill(pool, "b", 4)
        for name, part in went(pool, 6_000).items():
            load[name] += share * part
    capacity = {"a": 3 / 16, "b": 5 / 16, "c": 8 / 16}
    assert load["a"] / capacity["a"] == pytest.approx(1.0, abs=0.1)
    assert max(load[name] / capacity[name] for name in zones) <= 1.2  # without zones known: 0.5 / (3 / 16) = 2.7


# ------------------------------------------------------------------------------------------------ seconds


def test_the_way_in_seconds_until_it_was_measured_and_afterwards() -> None:
    here = Locality("a", "eu", zone_price=0.2, region_price=1.0)
    pool = pool_in(here, fleet({"eu/a": 1, "eu/b": 1, "us/c": 1}), "auto")
    away = {state.id: state.away for state in pool.snapshot.states}
    near, zone, region = ROUND_TRIP_S
    assert away == pytest.approx({"eu/a-0": near, "eu/b-0": zone + 0.2, "us/c-0": region + 1.2})
    state = pool.snapshot.by_id["us/c-0"]
    learn_round_trip(state, 0.150)
    assert state.away == pytest.approx(0.150 + 1.2)
    learn_round_trip(state, 0.090)
    learn_round_trip(state, 0.190)  # one slow handshake says little
    assert state.away == pytest.approx(0.100 + 1.2)
    relocate(pool.shared, pool.snapshot.states, Locality())
    assert [state.away for state in pool.snapshot.states] == [0.0, 0.0, 0.0]


def test_a_price_and_a_cold_start_of_an_endpoint_are_seconds_too() -> None:
    cold = Endpoint("cold", "http://cold:1", state=State.COLD, cold_start_s=40.0, price=0.5)
    warm = Endpoint("warm", "http://warm:1", cold_start_s=40.0)
    pool = pool_in(Locality(), (cold, warm), "auto")
    assert {state.id: state.away for state in pool.snapshot.states} == {"cold": 40.5, "warm": 0.0}


def test_a_look_near_and_a_look_beyond() -> None:
    pool = pool_in(Locality(region="eu"), fleet({"eu/a": 3, "us/b": 30}), "auto")
    few = random_few(pool.snapshot.kit)
    draws = [few(Ask()) for _ in range(200)]
    assert all([state.id[:2] for state in draw] == ["eu", "eu", "us", "us"] for draw in draws)
    assert all(len(set(draw)) == 4 for draw in draws)
    assert {state.id for draw in draws for state in draw[:2]} == {"eu/a-0", "eu/a-1", "eu/a-2"}
    assert len(random_few(pool_in(Locality(), fleet({"a": 3}), "auto").snapshot.kit)(Ask())) == 2


@pytest.mark.parametrize("policy", ["auto", "predictive"])
def test_seconds_keep_a_call_near_until_the_queue_there_is_longer_than_the_way(policy: str) -> None:
    pool = pool_in(Locality(zone="a", region="eu"), fleet({"eu/a": 2, "us/b": 2}), policy)
    # `predictive` explores with a few of its calls.
    assert went(pool, asks=[Ask(tokens=100) for _ in range(400)])["eu/a"] >= 0.9
    for state in pool.snapshot.states:
        waiting = 50_000 if state.id.startswith("eu") else 0
        state.report = Report(1.0, running=1, waiting=waiting // 1_000, queued_tokens=waiting)
    asks = [Ask(tokens=100) for _ in range(400)]
    for ask in asks:
        ask.now = 1.0
    assert went(pool, asks=asks)["us/b"] >= 0.9


def test_what_the_way_takes_is_not_taken_for_a_slow_server() -> None:
    pool = pool_in(Locality(region="eu"), fleet({"eu/a": 1, "us/b": 1}), "auto")
    near, far = pool.snapshot.states
    learn_round_trip(near, 0.0)
    learn_round_trip(far, 0.2)
    for state, seconds in ((near, 0.05), (far, 0.25)):
        attempt = state.acquire(0.0, None, 500)
        assert attempt is not None
        attempt.uncached = 500
        attempt.first_token(seconds)
    assert near.speed is not None
    assert far.speed is not None
    assert far.speed.log == pytest.approx(near.speed.log, rel=0.02)
