"""The `gpuroute` command.

Every subcommand is a module of this package with two functions, `add_parser(subparsers)` and `run(args) -> int`.
Only `gpuroute COMMAND` imports what COMMAND needs, so that help and errors stay quick.

Exit codes: 0 done, 1 the command's own "no" or output that cannot be written, 2 wrong use or a `GpurouteError` (one line
on stderr), 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING

from gpuroute.errors import GpurouteError
from gpuroute.forms import parse_duration

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS = {
    "demo": "watch a small fleet lose, slow down, drain and gain endpoints under real traffic",
    "endpoints": "list what a router would see",
    "register": "keep an endpoint in the registry until SIGTERM",
    "config": "print the effective settings and where each comes from",
    "simulate": "judge policies on a simulated fleet",
    "agent": "report for the engine on this machine",
    "chaos": "break a fleet on purpose and count what callers notice",
    "bench": "measure what routing costs",
}
_OF_STDOUT = {errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
"""Without a file name these come from writing what a command says."""


def duration(text: str) -> float:
    """Seconds, as the type of an option: argparse puts the name of this function into its message."""
    return parse_duration(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; never raises but for `SystemExit` on wrong use."""
    argv = sys.argv[1:] if argv is None else argv
    _open_outputs()
    try:
        return _told(argv)
    except OSError as error:
        if error.filename is not None or error.errno not in _OF_STDOUT:
            raise
        # The interpreter must not flush at exit what nobody takes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 0  # the reader (`head`, `less`) has what it wanted
        print(f"gpuroute: standard output: {error.strerror}", file=sys.stderr)
        return 1


def _open_outputs() -> None:
    """Whoever starts a command may have closed its outputs, or given it one that cannot write all letters."""
    sys.stdout = sys.stdout or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
    sys.stderr = sys.stderr or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _told(argv: Sequence[str]) -> int:
    """Run it, and have its output written when it is over, however it ends."""
    try:
        code = _run(argv)
    except GpurouteError as error:
        print(f"gpuroute: {' '.join(str(error).split())}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = 130
    except SystemExit:  # --help
        sys.stdout.flush()
        raise
    sys.stdout.flush()
    return code


def _run(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="gpuroute", description="Client-side router for GPU inference.")
    parser.add_argument("--version", action="version", version=f"gpuroute {version('gpuroute')}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    chosen = next((word for word in argv if not word.startswith("-")), None)
    for name, summary in COMMANDS.items():
        if name != chosen:
            subparsers.add_parser(name, help=summary)
    if chosen in COMMANDS:
        command = importlib.import_module(f"gpuroute.cli.{chosen}")
        command.add_parser(subparsers)
        return int(command.run(parser.parse_args(argv)))
    parser.parse_args(argv)
    return 2
