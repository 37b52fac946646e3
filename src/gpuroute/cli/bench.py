"""`gpuroute bench KIND`: what routing costs. Each kind is a module `bench_KIND` with `add_parser` and `run`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

KINDS = ("pick", "overhead", "ask", "live")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its kinds."""
    parser = subparsers.add_parser("bench", help="measure what routing costs")
    kinds = parser.add_subparsers(metavar="KIND", dest="kind", required=True)
    for kind in KINDS:
        import_module(f"gpuroute.cli.bench_{kind}").add_parser(kinds)


def run(args: argparse.Namespace) -> int:
    """Run the chosen kind."""
    return int(import_module(f"gpuroute.cli.bench_{args.kind}").run(args))
