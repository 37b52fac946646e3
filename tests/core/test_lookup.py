"""A lookup finds what a bisection finds, whatever the numbers."""

from __future__ import annotations

from array import array
from bisect import bisect_right

from hypothesis import given
from hypothesis import strategies as st

from gpuroute.core.lookup import Lookup

TURN = 2.0**64
keys = st.integers(0, 2**64 - 1)
shares = st.floats(0, 1e6, allow_nan=False)


@given(st.lists(keys), keys)
def test_positions_on_a_ring(points: list[int], key: int) -> None:
    points.sort()
    lookup = Lookup(array("Q", points), TURN)
    for number in (key, 0, 2**64 - 1, 2**64, 2**70 + key, 2**200, *points):  # the last ones are callers' own hashes
        assert lookup.find(number) == bisect_right(points, number)


@given(st.lists(shares, min_size=1), st.floats(0, 1))
def test_shares_laid_end_to_end(ends: list[float], part: float) -> None:
    ends.sort()
    lookup = Lookup(array("d", ends), ends[-1])
    for number in (part * ends[-1], 0.0, *ends):
        assert lookup.find(number) == bisect_right(ends, number)


def test_shares_that_are_all_nothing() -> None:
    assert Lookup(array("d", [0.0, 0.0]), 0.0).find(0.0) == 2
