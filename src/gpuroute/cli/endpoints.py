"""`gpuroute endpoints`: the fleet as a router in this environment would see it now."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TYPE_CHECKING, Any

from gpuroute.config import Settings
from gpuroute.errors import ConfigError
from gpuroute.registry import etcd_options, first_fleet, open_registry
from gpuroute.registry.schema import config_record, endpoint_record

if TYPE_CHECKING:
    import argparse

    from gpuroute.core.endpoint import Endpoint
    from gpuroute.core.fleet import Fleet

HEAD = ("POOL", "ENDPOINT", "STATE", "AGE", "WEIGHT", "GPU", "ZONE", "MODEL", "URL")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("endpoints", help="list what a router would see")
    parser.add_argument("--registry", help="where the fleet is described (default: GPUROUTE_REGISTRY)")
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
    print(json.dumps(as_json(fleet, time.time()), indent=2) if args.json else as_text(fleet, time.time()))
    for problem in () if args.json else fleet.problems:
        print(f"problem: {problem}", file=sys.stderr)
    return 0 if any(spec.endpoints for spec in fleet.pools.values()) else 1


def as_json(fleet: Fleet, now: float) -> dict[str, Any]:
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
            }
            for name, spec in fleet.pools.items()
        },
    }


def as_text(fleet: Fleet, now: float) -> str:
    """The fleet for people: a line about the view, then aligned columns."""
    view = f"{fleet.source}, {'STALE, ' if fleet.stale else ''}seen {_ago(_age(fleet.as_of, now))}"
    rows = [HEAD, *(_columns(name, item, now) for name, spec in fleet.pools.items() for item in spec.endpoints)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join([view, *lines])


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
