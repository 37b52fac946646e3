"""Asks that are lost, agents that lie, endpoints without agents: worse than honest ones, never worse than not asking.

Short runs, so the bounds here are wide; the figures are in docs/asking.md.
"""

from __future__ import annotations

from functools import cache

import pytest

from gpuroute.sim.reports import Reports
from gpuroute.sim.run import Scenario, simulate


@cache
def mean_ttft(policy: str, **trouble: float) -> float:
    scenario = Scenario(
        trace="mooncake",
        fleet="12xH100",
        clients=32,
        copies=4,
        window=40.0,
        warmup=40.0,
        reports=Reports(**trouble),
    )
    return float(simulate(scenario, policy, 1).row["ttft_mean"])


@pytest.mark.parametrize("trouble", [{"loss": 0.3}, {"liars": 0.1}, {"coverage": 0.5}, {"coverage": 0.9}], ids=str)
def test_asking_in_trouble_beats_not_asking(trouble: dict[str, float]) -> None:
    assert mean_ttft("auto+asks", **trouble) < 0.95 * mean_ttft("p2c")


def test_liars_are_found_out() -> None:
    assert mean_ttft("auto+asks", liars=0.1) < 1.6 * mean_ttft("auto+asks")


@pytest.mark.parametrize(
    "trouble",
    [
        {"liars": 0.1, "second_opinions": True},
        {"frozen_at": 30.0, "frozen": 0.1, "second_opinions": True},
        {"frozen_at": 30.0, "frozen": 0.1, "frozen_sample": True},
    ],
    ids=str,
)
def test_engines_say_what_their_agents_do_not(trouble: dict[str, float]) -> None:
    assert mean_ttft("auto+asks", **trouble) < 1.3 * mean_ttft("auto+asks")


@pytest.mark.parametrize("trouble", [{}, {"loss": 0.3}, {"liars": 0.1}, {"coverage": 0.5}, {"frozen_at": 45.0}], ids=str)
def test_a_digest_that_all_share_is_better_than_none_and_herds_nobody(trouble: dict[str, float]) -> None:
    """News of 0.5 to 1.5 s, the same for everybody; some of it false, missing, or of long ago."""
    assert mean_ttft("auto+digest", **trouble) < mean_ttft("p2c")
    assert mean_ttft("auto+digest", **trouble) < 1.15 * mean_ttft("auto")
