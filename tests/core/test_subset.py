"""Subsets by ordinal: even, the same everywhere, and steady when the fleet changes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuroute.core.endpoint import Endpoint, State
from gpuroute.core.fleet import PoolSpec
from gpuroute.core.subset import CLIENTS_EACH, LEAST, Seat, Subsets, free_ordinal, repacked, subset, subset_size

IDS = [f"gpu-{n}" for n in range(200)]


def test_the_order_of_the_registry_does_not_matter() -> None:
    assert subset(IDS, 7, 20) == subset(IDS[::-1], 7, 20)
    assert subset(IDS, 7, 20) != subset(IDS, 8, 20)


@pytest.mark.parametrize("clients", [40, 100, 500])
def test_every_endpoint_has_about_as_many_clients(clients: int) -> None:
    size = subset_size(len(IDS), clients)
    seen = Counter(id_ for ordinal in range(clients) for id_ in subset(IDS, ordinal, size))
    mean = clients * size / len(IDS)
    assert set(seen) == set(IDS)
    assert mean >= CLIENTS_EACH
    assert 0.75 * mean <= min(seen.values()) <= max(seen.values()) <= 1.3 * mean


@given(st.integers(0, 1_000), st.integers(1, 200), st.sampled_from(IDS))
def test_one_endpoint_leaving_changes_at_most_two_members(ordinal: int, size: int, gone: str) -> None:
    before = subset(IDS, ordinal, size)
    after = subset([id_ for id_ in IDS if id_ != gone], ordinal, size)
    assert len(set(before) - set(after)) <= 2
    assert len(after) == min(size, len(IDS) - 1) == len(set(after))


@pytest.mark.parametrize(
    ("endpoints", "clients", "size"), [(10, 5, 10), (1_000, 500, LEAST), (1_000, 100, 80), (0, 9, 0)]
)
def test_the_size_follows_from_both_numbers(endpoints: int, clients: int, size: int) -> None:
    assert subset_size(endpoints, clients) == size


def test_nonsense_is_refused_and_nothing_of_nothing_is_nothing() -> None:
    with pytest.raises(ValueError, match="ordinal"):
        subset(IDS, -1, 5)
    assert subset([], 3, 5) == []


@given(st.sets(st.integers(0, 60), min_size=1, max_size=40))
def test_after_everybody_repacked_the_ordinals_are_dense_and_few_have_moved(taken: set[int]) -> None:
    after = {ordinal: repacked(ordinal, taken) for ordinal in taken}
    assert sorted(after.values()) == list(range(len(taken)))
    moved = [ordinal for ordinal, new in after.items() if new != ordinal]
    assert moved == [ordinal for ordinal in after if ordinal >= len(taken)]


@given(st.integers(2, 60), st.data())
def test_one_client_leaving_moves_at_most_one_other(clients: int, data: st.DataObject) -> None:
    taken = set(range(clients)) - {data.draw(st.integers(0, clients - 1))}
    assert sum(repacked(ordinal, taken) != ordinal for ordinal in taken) <= 1


def test_free_ordinals_in_order() -> None:
    assert [free_ordinal({0, 1, 3}, skip) for skip in range(4)] == [2, 4, 5, 6]


def spec(count: int, **fields: object) -> PoolSpec:
    return PoolSpec("llm", tuple(Endpoint(f"gpu-{n}", f"http://gpu-{n}:8000", **fields) for n in range(count)))


def test_a_client_sees_all_until_it_has_a_seat_then_its_part() -> None:
    subsets = Subsets()
    assert subsets.narrowed(spec(200), "auto") == spec(200)
    assert str(subsets.views["llm"]) == "all 200, no ordinal yet"
    subsets.seat = Seat(7, 40)
    narrowed = subsets.narrowed(spec(200), "auto")
    assert [endpoint.id for endpoint in narrowed.endpoints] == sorted(
        subset(IDS, 7, 40), key=lambda id_: int(id_.removeprefix("gpu-"))
    )
    assert str(subsets.views["llm"]) == "subset 40 of 200, ordinal 7 of 40"
    assert subsets.elders("llm") == set(IDS)
    assert len(subsets.narrowed(spec(200), 5).endpoints) == 5
    assert subsets.narrowed(spec(200), "off") == spec(200)
    assert subsets.views == {}


def test_the_size_is_steady_while_clients_come_and_go() -> None:
    """One more or less of a hundred clients must not change anybody's connections."""
    subsets, sizes = Subsets(), []
    for clients in (100, 101, 105, 99, 100, 124, 140, 100):
        subsets.seat = Seat(3, clients)
        sizes.append(len(subsets.narrowed(spec(1_000), "auto").endpoints))
    assert sizes == [80, 80, 80, 81, 81, 81, 58, 80]


def test_who_takes_no_calls_is_in_nobodys_subset() -> None:
    warming = spec(100, state=State.WARMING).endpoints
    ready = tuple(Endpoint(f"r{n}", f"http://r{n}:1") for n in range(30))
    subsets = Subsets()
    subsets.seat = Seat(0, 1_000)
    part = subsets.narrowed(PoolSpec("llm", (*warming, *ready)), "auto").endpoints
    assert len(part) == LEAST
    assert all(endpoint.takes_calls for endpoint in part)
