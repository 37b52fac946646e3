"""The rules of one pool: the user's settings, and what the registry says of this pool where the user said nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from gpuroute.core.fleet import PoolSpec
    from gpuroute.core.pool import PoolRules


def merge_rules(rules: PoolRules, spec: PoolSpec, explicit: Container[str] = ()) -> PoolRules:
    """Rules with the registry's pool config applied, except for the fields that were set explicitly by the user.

    Of the options, `hedge`, `reroute`, `continuation` and `watchdog` are read; they must be true or false.
    """
    config = spec.config
    found = {"policy": config.policy, "timeout": config.timeout, "max_in_flight": config.max_in_flight}
    changes: dict[str, Any] = {n: value for n, value in found.items() if value is not None and n not in explicit}
    if config.attempts is not None and "attempts" not in explicit:
        changes["retry"] = replace(rules.retry, attempts=config.attempts)
    changes |= _flags(rules, config.options, explicit)
    return replace(rules, **changes) if changes else rules


def _flags(rules: PoolRules, options: Mapping[str, object], explicit: Container[str]) -> dict[str, Any]:
    stated = {name: value for name, value in options.items() if isinstance(value, bool) and name not in explicit}
    changes: dict[str, Any] = {}
    hedging = {name: stated[name] for name in ("hedge", "reroute") if name in stated}
    if hedging:
        changes["hedge"] = replace(rules.hedge, **hedging)
    if "continuation" in stated:
        changes["continuation"] = stated["continuation"]
    if "watchdog" in stated:
        changes["watchdog"] = replace(rules.watchdog, enabled=stated["watchdog"])
    return changes
