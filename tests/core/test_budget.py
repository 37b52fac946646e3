"""The retry budget: never negative, never exceeded over any window, indifferent to idle hours and clock steps."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuroute.core.budget import Budget
from gpuroute.errors import ConfigError


class Step(NamedTuple):
    what: str
    amount: float
    wait: float


steps = st.lists(
    st.builds(
        Step,
        st.sampled_from(["deposit", "withdraw"]),
        st.sampled_from([0.1, 0.5, 1.0, 3.0, 10.0]),
        st.sampled_from([0.0, 0.0, 0.3, 1.0, 4.0, 9.9, 10.0, 3_600.0]),
    ),
    max_size=80,
)


@settings(max_examples=150, deadline=None)
@given(steps, st.sampled_from([0.0, 0.2, 1.0]), st.sampled_from([0.0, 0.1, 10.0]), st.sampled_from([1, 10, 60]))
def test_never_negative_and_never_exceeded(script: list[Step], ratio: float, floor: float, window: int) -> None:
    """At each withdrawal, what was taken within the window is covered by what was put in within it, and the floor."""
    budget, now, ledger = Budget(ratio, floor, window), 1_000.0, []
    for step in script:
        now += step.wait
        slot = int(now)
        if step.what == "deposit":
            budget.deposit(now, step.amount)
            ledger.append((slot, step.amount * ratio))
        elif budget.try_withdraw(now, step.amount):
            ledger.append((slot, -step.amount))
            assert sum(amount for when, amount in ledger if when > slot - window) + floor * window >= -1e-6
        assert budget.balance(now) >= 0.0


@settings(max_examples=100, deadline=None)
@given(steps)
def test_a_refusal_takes_nothing(script: list[Step]) -> None:
    budget, now = Budget(0.2, 0.0), 0.0
    for step in script:
        now += step.wait
        before = budget.balance(now)
        if step.what == "deposit":
            budget.deposit(now, step.amount)
            assert budget.balance(now) >= before
        elif budget.try_withdraw(now, step.amount):
            assert budget.balance(now) == pytest.approx(max(0.0, before - step.amount), abs=1e-6)
        else:
            assert budget.balance(now) == before < step.amount


@pytest.mark.parametrize(("ratio", "calls"), [(0.1, 10), (0.2, 5), (0.05, 20), (1 / 3, 3)])
def test_a_tenth_of_ten_calls_is_one_retry(ratio: float, calls: int) -> None:
    budget = Budget(ratio, floor=0.0)
    for _ in range(calls - 1):
        budget.deposit(1.0)
    assert not budget.try_withdraw(1.0)
    budget.deposit(1.0)
    assert budget.try_withdraw(1.0)
    assert not budget.try_withdraw(1.0)


def test_t4_an_idle_hour_leaves_the_floor_and_no_more() -> None:
    budget = Budget(0.2, floor=10.0)
    for _ in range(10_000):
        budget.deposit(50.0)
    budget.deposit(53_600.0, 0.0)
    granted = sum(budget.try_withdraw(53_600.0) for _ in range(1_000))
    assert granted == 100  # 10 a second over 10 s


def test_t4_the_first_call_may_come_at_time_zero_or_before() -> None:
    for now in (0.0, -5.0):
        budget = Budget(1.0, floor=0.0)
        budget.deposit(now)
        assert budget.try_withdraw(now)
        assert not budget.try_withdraw(now)


def test_t4_a_clock_that_steps_back_grants_nothing_twice() -> None:
    budget = Budget(0.0, floor=1.0)
    granted = sum(budget.try_withdraw(5_000.0) for _ in range(100))
    for step in (4_999.0, 1_400.0, 5_000.0):
        granted += sum(budget.try_withdraw(step) for _ in range(100))
    assert granted == 10


def test_t4_a_hundred_thousand_steps_do_not_drift() -> None:
    """0.1 per step, in floats that are not exact: passed within one of the ideal at the end of every window."""
    budget, passed, now = Budget(0.1, floor=0.0), 0, 0.0
    for number in range(1, 100_001):
        now = number * 0.001
        budget.deposit(now)
        passed += budget.try_withdraw(now)
    assert abs(passed - 10_000) <= 1


@pytest.mark.parametrize("wrong", [{"ratio": -0.1}, {"ratio": 11.0}, {"floor": -1.0}, {"window": 0}, {"window": 3_600}])
def test_impossible_budgets_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="retry budget"):
        Budget(**wrong)
