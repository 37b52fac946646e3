"""The policies by name (`GPUROUTE_POLICY`): a source of candidates times a cost, one line each.

How to choose: `docs/policies.md`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuroute.core.candidates import DRandom, Rotation, Smooth, TwoRandom, Weighted
from gpuroute.core.homes import Homes
from gpuroute.core.pickers import (
    Cheapest,
    Kit,
    LeastRequest,
    Nobody,
    Picker,
    PowerOfTwo,
    Single,
    peak_ewma,
    queue_depth,
)
from gpuroute.core.predictive import Predictive
from gpuroute.core.seconds import Soonest
from gpuroute.core.zones import zoned
from gpuroute.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

POLICIES: dict[str, Callable[[Kit], Picker]] = {
    "random": lambda kit: Single(kit, Weighted(kit.states, kit.random).one),
    "round_robin": lambda kit: Single(kit, Rotation(kit.states, kit.random).one),
    "weighted_round_robin": lambda kit: Single(kit, Smooth(kit.states, kit.random).one),
    "p2c": PowerOfTwo,
    "least_request": lambda kit: LeastRequest(kit, DRandom(kit.states, kit.random)),
    "least_latency": lambda kit: Cheapest(kit, TwoRandom(kit.states, kit.random), peak_ewma),
    "queue_depth": lambda kit: Cheapest(kit, TwoRandom(kit.states, kit.random), queue_depth),
    "prefix": lambda kit: Homes(kit, wants_ladder=True),
    "session": lambda kit: Homes(kit, wants_ladder=False),
    "predictive": Predictive,
    "auto": lambda kit: Soonest(kit, homes=True),
}

BY_SECONDS = frozenset({"predictive", "auto"})  # the way to an endpoint is among them
BY_LATENCY = BY_SECONDS | {"least_latency", "weighted_round_robin"}  # what answers took matters to these
READ_REPORTS = BY_SECONDS | {"queue_depth"}  # what endpoints say of their load matters to these


def build_picker(policy: str, kit: Kit) -> Picker:
    """The picker of a policy for one snapshot; ConfigError if the name is unknown."""
    try:
        build = POLICIES[policy]
    except KeyError:
        raise ConfigError(f"policy {policy!r} is unknown; accepted: {', '.join(POLICIES)}") from None
    if not kit.states:
        return Nobody()
    return build(kit) if policy in BY_SECONDS else zoned(kit, build)
