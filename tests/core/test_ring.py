"""The ring: one endpoint leaving moves only its own keys, whatever the order, and weights are proportional."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage import Stage
from xxhash import xxh3_64_intdigest

from gpuroute.core.candidates import Ask
from gpuroute.core.outcome import Outcome
from gpuroute.core.ring import MAX_POINTS, POINTS, Ring, session_key, weights_of

KEYS = [xxh3_64_intdigest(f"key {n}".encode()) for n in range(10_000)]
TEN = {f"gpu-{n}": 1.0 for n in range(10)}

names = st.lists(st.text("abcdefgh0123456789-", min_size=1, max_size=8), min_size=1, max_size=12, unique=True)


def owners(ring: Ring) -> list[str]:
    return [ring.home(key) for key in KEYS]


def moved(before: list[str], after: list[str]) -> list[tuple[str, str]]:
    return [(old, new) for old, new in zip(before, after, strict=True) if old != new]


def test_a3_a_removal_moves_only_the_removed_hosts_keys_and_they_come_back() -> None:
    full = Ring(TEN)
    before, fractions = owners(full), []
    for name in TEN:
        smaller = full.extended({other: 1.0 for other in TEN if other != name})
        changes = moved(before, owners(smaller))
        assert {old for old, _ in changes} == {name}
        assert len({new for _, new in changes}) == 9  # spread over all that stay
        assert owners(smaller.extended(TEN)) == before
        fractions.append(len(changes) / len(KEYS))
    assert sum(fractions) == pytest.approx(1.0)
    # A share of 1/n made of 160 points has a standard deviation of share x 1/sqrt(160): three of them here.
    assert all(abs(fraction - 0.1) <= 3 * 0.1 / math.sqrt(POINTS) for fraction in fractions)


def test_a3_an_eleventh_takes_its_share_from_everybody() -> None:
    before = owners(Ring(TEN))
    changes = moved(before, owners(Ring(TEN).extended({**TEN, "gpu-10": 1.0})))
    assert {new for _, new in changes} == {"gpu-10"}
    assert len({old for old, _ in changes}) == 10
    assert len(changes) / len(KEYS) == pytest.approx(1 / 11, abs=0.015)


def test_a3_a_changed_weight_moves_keys_to_or_from_that_host_only() -> None:
    before = owners(Ring(TEN))
    heavier = moved(before, owners(Ring(TEN).extended({**TEN, "gpu-3": 2.0})))
    assert {new for _, new in heavier} == {"gpu-3"}
    lighter = moved(before, owners(Ring(TEN).extended({**TEN, "gpu-3": 0.5})))
    assert {old for old, _ in lighter} == {"gpu-3"}


@settings(max_examples=40, deadline=None)
@given(names, st.randoms(use_true_random=False), st.integers(0, 2**64 - 1))
def test_a3_the_order_of_the_registry_is_irrelevant(ids: list[str], dice: object, key: int) -> None:
    shuffled = list(ids)
    dice.shuffle(shuffled)  # type: ignore[attr-defined]
    one = Ring(weights_of([(name, 1.0) for name in ids]))
    other = Ring(weights_of([(name, 1.0) for name in shuffled]))
    assert list(one.homes(key)) == list(other.homes(key))


@settings(max_examples=40, deadline=None)
@given(names, st.data())
def test_a3_however_it_grew_it_is_the_same_ring(ids: list[str], data: st.DataObject) -> None:
    grown = Ring()
    for _ in range(data.draw(st.integers(0, 5))):
        grown = grown.extended(weights_of([(n, 1.0) for n in data.draw(st.lists(st.sampled_from(ids), unique=True))]))
    target = weights_of([(name, data.draw(st.sampled_from([0.5, 1.0, 3.0]))) for name in ids])
    grown, fresh = grown.extended(target), Ring(target)
    assert (grown._points, grown._owners, grown.shares) == (fresh._points, fresh._owners, fresh.shares)


@settings(max_examples=60, deadline=None)
@given(names, st.integers(0, 2**64 - 1), st.data())
def test_a3_the_homes_of_a_key_are_everybody_once_and_a_removal_closes_the_gap(
    ids: list[str], key: int, data: st.DataObject
) -> None:
    ring = Ring(weights_of([(name, 1.0) for name in ids]))
    homes = list(ring.homes(key))
    assert sorted(homes) == sorted(ids)
    assert homes[0] == ring.home(key)
    gone = data.draw(st.sampled_from(ids))
    rest = ring.extended(weights_of([(name, 1.0) for name in ids if name != gone]))
    assert list(rest.homes(key)) == [name for name in homes if name != gone]


def test_a3_an_ejection_by_the_breaker_behaves_as_a_removal() -> None:
    stage = Stage(10, policy="session")
    asks = [Ask(key=key) for key in KEYS[:2_000]]
    before = [stage.pool.pick(ask).id for ask in asks]  # type: ignore[union-attr]
    for _ in range(5):
        attempt = stage.state("gpu-4").acquire(stage.clock())
        assert attempt is not None
        attempt.finish(Outcome.FAILED, stage.clock())
    without = Ring({name: 1.0 for name in TEN if name != "gpu-4"})
    assert [stage.pool.pick(ask).id for ask in asks] == [without.home(ask.key) for ask in asks]  # type: ignore[union-attr, arg-type]
    stage.clock.advance(7.0)
    probe = stage.start(ask=Ask(key=next(ask.key for ask, name in zip(asks, before, strict=True) if name == "gpu-4")))
    assert probe.state.id == "gpu-4"
    probe.finish(Outcome.SUCCESS, stage.clock())
    assert [stage.pool.pick(ask).id for ask in asks] == before  # type: ignore[union-attr]


@pytest.mark.parametrize("unit", [1.0, 8.0, 0.05, 1e-6, 1e12])
def test_weights_are_proportional_in_any_unit(unit: float) -> None:
    """Weights of 1/n, as some registries write them, once left a single point to each endpoint."""
    weights = {f"gpu-{n}": unit * (1.0 + n % 3) for n in range(12)}
    ring, total = Ring(weights), sum(weights.values())
    counts = Counter(owners(ring))
    for name, weight in weights.items():
        share = weight / total
        spread = share / math.sqrt(ring.shares[name])  # of the ring itself; and the sample of keys adds its own
        deviation = math.hypot(spread, math.sqrt(share * (1 - share) / len(KEYS)))
        assert abs(counts[name] / len(KEYS) - share) <= 4 * deviation
        assert spread <= 0.25 * share


@pytest.mark.parametrize("size", [1, 100, 312, 313, 10_000])
def test_a_ring_is_bounded(size: int) -> None:
    ring = Ring({f"gpu-{n}": 1.0 for n in range(size)})
    assert len(ring) <= max(MAX_POINTS, size)
    assert len(ring.shares) == size


@pytest.mark.parametrize("size", [300, 311, 312, 313, 320, 624, 625, 1_249, 5_000])
def test_a3_at_no_size_does_one_more_move_more_than_twice_its_share(size: int) -> None:
    """The points of everybody were once halved from 312 to 313: half of all keys moved."""
    ring = Ring({f"gpu-{n}": 1.0 for n in range(size)})
    larger = ring.extended({f"gpu-{n}": 1.0 for n in range(size + 1)})
    share = 1 / (size + 1)
    changes = moved(owners(ring), owners(larger))
    # Twice its share, and five standard deviations of the sample of keys and of the points that one endpoint has.
    spread = math.hypot(math.sqrt(2 * share / len(KEYS)), 2 * share / math.sqrt(min(larger.shares.values())))
    assert len(changes) / len(KEYS) <= 2 * share + 5 * spread
    assert larger.shares.keys() - ring.shares.keys() == {f"gpu-{size}"}
    assert all(0 <= ring.shares[name] - larger.shares[name] <= 1 for name in ring.shares)


def test_a3_one_changed_weight_among_thousands_moves_little() -> None:
    weights = {f"gpu-{n}": 1.0 for n in range(2_000)}
    before = owners(Ring(weights))
    after = owners(Ring(weights).extended({**weights, "gpu-7": 3.0}))
    assert len(moved(before, after)) / len(KEYS) <= 0.01
    assert Ring({"tiny": 5e-324, "tinier": 5e-324}).shares.keys() == {"tiny", "tinier"}
    assert len(Ring({"drained": 0.0})) == 0


def test_a_heavy_endpoint_does_not_blow_up_the_ring() -> None:
    ring = Ring({"small": 1.0, "huge": 1e6})
    assert len(ring) <= MAX_POINTS + 1
    assert ring.shares["small"] >= 1


def test_the_hash_is_fixed_for_all_clients_and_versions() -> None:
    """A different number here moves every session of every deployment: a planned event, never an accident."""
    assert session_key("user-1") == 7_181_912_508_254_722_155
    assert session_key("user-1", "tenant") != session_key("user-1")
    assert isinstance(session_key("\udcff"), int)
    assert Ring(TEN).home(session_key("user-1")) == "gpu-9"
