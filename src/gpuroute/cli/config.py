"""`gpuroute config`: the effective settings, their sources, and every name that was not understood."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from gpuroute.config import Settings, unknown_variables

if TYPE_CHECKING:
    import argparse


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("config", help="print the effective settings and where each comes from")
    parser.add_argument("--json", action="store_true", help="print JSON alone")


def run(args: argparse.Namespace) -> int:
    """Print the settings of this environment; ConfigError if they are wrong."""
    rows = Settings.from_env().effective()
    if args.json:
        print(json.dumps({"settings": rows, "unknown": unknown_variables(os.environ)}, indent=2))
        return 0
    width = max(len(str(row["variable"])) for row in rows)
    for row in rows:
        value = "(not set)" if row["value"] is None else row["value"]
        print(f"{row['variable']:<{width}}  {value}  [{row['source']}]")
    return 0
