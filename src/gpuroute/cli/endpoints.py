"""`gpuroute endpoints`: the fleet as a router in this environment would see it now."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from gpuroute.config import Settings
from gpuroute.core.subset import Seat, Subsets
from gpuroute.errors import ConfigError, RegistryError
from gpuroute.registry import etcd_options, first_fleet, open_registry
from gpuroute.registry.schema import config_record, endpoint_record

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuroute.core.endpoint import Endpoint
    from gpuroute.core.fleet import Fleet, Registry
    from gpuroute.core.subset import SubsetView

HEAD = ("POOL", "ENDPOINT", "STATE", "AGE", "WEIGHT", "GPU", "ZONE", "MODEL", "URL")

NO_VIEWS: Mapping[str, SubsetView] = {}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("endpoints", help="list what a router would see")
    parser.add_argument("--registry", help="where the fleet is described (default: GPUROUTE_REGISTRY)")
    parser.add_argument(
        "--ordinal", type=_ordinal, help="of pools with subsets, list what the client of this ordinal uses"
    )
    parser.add_argument("--json", action="store_true", help="print JSON alone")


def run(args: argparse.Namespace) -> int:
    """List the fleet; 1 if it has no endpoint. RegistryUnavailable if there is no view of it in time."""
    settings = Settings.from_env(registry=args.registry)
    if not settings.registry:
        raise ConfigError("no registry: set --registry or GPUROUTE_REGISTRY")
    registry = open_registry(
        settings.registry,
        snapshot_path=settings.registry_snapshot,
        empty_grace=settings.empty_grace,
        **etcd_options(settings),
    )
    logging.getLogger("gpuroute.registry").addHandler(logging.NullHandler())  # it would say twice what is said below
    fleet = first_fleet(registry, settings.ready_timeout)
    fleet, views = _subsets(fleet, settings, registry, args.ordinal)
    if args.json:
        print(json.dumps(as_json(fleet, time.time(), views), indent=2))
    else:
        print(as_text(fleet, time.time(), views))
    for problem in () if args.json else fleet.problems:
        print(f"problem: {problem}", file=sys.stderr)
    return 0 if any(spec.endpoints for spec in fleet.pools.values()) else 1


def _ordinal(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least 0")
    return int(text)


def _subsets(
    fleet: Fleet, settings: Settings, registry: Registry, ordinal: int | None
) -> tuple[Fleet, dict[str, SubsetView]]:
    """The fleet as the client of an ordinal uses it (None: all of it), and which part of each pool a client uses."""
    stated = settings.subset if settings.source("subset") != "default" else None
    modes = {name: stated or spec.config.subset or "off" for name, spec in fleet.pools.items()}
    count = getattr(registry, "count_clients", None)
    if count is None or all(mode == "off" for mode in modes.values()):
        return fleet, {}
    subsets = Subsets()
    with contextlib.suppress(RegistryError):  # the fleet came from a snapshot: nobody has an ordinal now
        subsets.seat = Seat(ordinal or 0, max(count(), 0 if ordinal is None else ordinal + 1))
    pools = {name: subsets.narrowed(spec, modes[name]) for name, spec in fleet.pools.items()}
    if ordinal is None:
        return fleet, {name: replace(view, ordinal=None) for name, view in subsets.views.items()}
    return replace(fleet, pools=pools), subsets.views


def as_json(fleet: Fleet, now: float, views: Mapping[str, SubsetView] = NO_VIEWS) -> dict[str, Any]:
    """The fleet for programs. Ages in seconds, None where unknown; header values are masked."""
    return {
        "source": fleet.source,
        "stale": fleet.stale,
        "age_s": _age(fleet.as_of, now),
        "problems": list(fleet.problems),
        "pools": {
            name: {
                "config": config_record(spec.config, secrets=False),
                "endpoints": [_row(endpoint, now) for endpoint in spec.endpoints],
                "subset": asdict(views[name]) if name in views else None,
            }
            for name, spec in fleet.pools.items()
        },
    }


def as_text(fleet: Fleet, now: float, views: Mapping[str, SubsetView] = NO_VIEWS) -> str:
    """The fleet for people: a line about the view, one for each pool with subsets, then aligned columns."""
    view = f"{fleet.source}, {'STALE, ' if fleet.stale else ''}seen {_ago(_age(fleet.as_of, now))}"
    rows = [HEAD, *(_columns(name, item, now) for name, spec in fleet.pools.items() for item in spec.endpoints)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join([view, *(f"{name}: {part}" for name, part in views.items()), *lines])


def _row(endpoint: Endpoint, now: float) -> dict[str, Any]:
    shown = {"id": endpoint.id, "state": endpoint.state.value, "weight": endpoint.weight}
    extra = {"takes_calls": endpoint.takes_calls, "age_s": _age(endpoint.started_at or None, now)}
    return {**shown, **endpoint_record(endpoint, secrets=False), **extra}


def _columns(pool: str, endpoint: Endpoint, now: float) -> tuple[str, ...]:
    state = endpoint.state.value if endpoint.weight > 0 else f"{endpoint.state.value} (weight 0)"
    gpu = f"{endpoint.gpu.count}x{endpoint.gpu.kind}" if endpoint.gpu.kind else ""
    age = _ago(_age(endpoint.started_at or None, now)).removesuffix(" ago")
    cells = (pool, endpoint.id, state, age, f"{endpoint.weight:g}", gpu, endpoint.zone, endpoint.model, endpoint.url)
    return tuple(cell or "-" for cell in cells)


def _age(moment: float | None, now: float) -> float | None:
    return None if moment is None else round(max(0.0, now - moment), 3)


def _ago(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
