"""Subsets by ordinal: even, the same everywhere, and steady when the fleet changes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuroute.core.subset import CLIENTS_EACH, LEAST, subset, subset_size

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
