"""`gpuroute simulate`: judge routing policies on a simulated GPU fleet under real traces, on the very core
that routes.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuroute.cli.values import count, number, typed
from gpuroute.errors import ConfigError
from gpuroute.forms import DURATION, DURATION_OR_ZERO, parse_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gpuroute.sim.measure import Slo
    from gpuroute.sim.run import Result, Scenario

_EPILOG = """policies: those of the core (p2c, prefix, auto, ...), with a report channel auto+piggyback, auto+digest,
auto+engine or auto+asks; oracle; peer:token-queue, peer:sglang, peer:llm-d, peer:kubeai, peer:kubeai-per-client,
peer:prequal, peer:envoy, peer:peak-ewma, peer:least-conn, peer:litellm.
events: AT:KIND:SERVERS[:VALUE], e.g. 300:throttle:5%:0.2, 300:die:3, 300:join:0-9, 300:outage::60."""


class _Help(argparse.RawDescriptionHelpFormatter):
    """Adds the defaults that say something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        said = isinstance(action.default, str | int | float) and action.default not in {0, inf, argparse.SUPPRESS}
        return f"{action.help} (default: %(default)s)" if said else action.help


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "simulate",
        help="judge policies on a simulated fleet",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=_Help,
    )
    _add_scenario(parser)
    _add_trouble(parser)
    _add_output(parser)


SECONDS, SECONDS_OR_NONE = typed(DURATION), typed(DURATION_OR_ZERO)
SHARE = typed(number(0, 1))
FACTOR = typed(number(0, 1_000, above=True))


def _add_scenario(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--trace", default="mooncake", help="mooncake, azure-conv, synthetic:rate=5,prompt=1000,..., or a file; repeats")
    add("--fleet", default="16xH100", help="e.g. 256xH100 or 40xH100*2,10xL40S@0.5 (@: relative speed, *: weight)")
    add("--policy", default="p2c,auto,oracle", help="comma-separated, see below")
    add("--clients", type=typed(count(1, 100_000)), default=32, help="independent client processes")
    add(
        "--copies",
        type=typed(count(1, 100_000)),
        default=5,
        help="shifted, re-salted copies of the trace laid over each other",
    )
    add("--window", type=SECONDS, default=60.0, help="seconds measured")
    add("--warmup", type=SECONDS_OR_NONE, default=20.0, help="seconds before that")
    add("--dram-tokens", type=typed(count(0)), default=0, help="second cache tier per GPU")
    add("--max-num-seqs", type=typed(count(1, 65_536)), default=256)
    add("--max-num-batched-tokens", type=typed(count(1, 1_048_576)), default=2048)
    add("--common-blocks", type=typed(count(0)), default=0, help="block ids below this are common to all copies")
    add("--subset", type=typed(count(0)), default=0, help="each client sees only so many endpoints (0: all)")
    add("--no-reroute", action="store_true", help="auto without asks never moves a queued call")
    add("--watchdog", action="store_true", help="core policies give up silent attempts, as production does")
    add("--foreign", type=SHARE, default=0.0, help="share of calls of clients without a router, spread at random")
    add("--sticky", action="store_true", help="a conversation stays with one client")
    add("--seeds", type=typed(count(1, 10_000)), default=1, help="number of seeds, from --seed on")
    add("--seed", type=int, default=1)


def _add_trouble(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--event", action="append", default=[], metavar="AT:KIND:SERVERS[:VALUE]")
    add("--timeout", type=SECONDS, default=inf, help="seconds per call")
    add("--network-delay", type=SECONDS_OR_NONE, default=0.0005, help="one way, seconds")
    add("--handshake", type=SECONDS_OR_NONE, default=0.0, help="seconds for a client's first contact with a server")
    add("--report-delay", type=SECONDS_OR_NONE, default=0.0005, help="one way, seconds")
    add("--report-loss", type=SHARE, default=0.0, help="share of reports and asks that get lost")
    add("--report-stale", type=SECONDS_OR_NONE, default=0.0, help="age of a report when it leaves, seconds")
    add(
        "--report-frozen-at",
        type=SECONDS_OR_NONE,
        default=inf,
        help="from then on reports repeat what was true at that time",
    )
    add("--report-frozen-share", type=SHARE, default=1.0, help="share of servers whose agents freeze then")
    add("--coverage", type=SHARE, default=1.0, help="share of servers that answer asks")
    add(
        "--report-frozen-sample",
        action="store_true",
        help="only their look at the engine freezes, and they say how old it is",
    )
    add("--liars", type=SHARE, default=0.0, help="share of agents that always say idle")
    add(
        "--second-opinions",
        action="store_true",
        help="where an agent is not believed, its engine is asked for its counts",
    )
    add("--cache-error", type=SHARE, default=0.0, help="agents misjudge the cached prefix by up to that share")
    add("--scale-h", type=FACTOR, default=1.0, help="factor on the step model's h; --scale-a, --scale-k likewise")
    add("--scale-a", type=FACTOR, default=1.0)
    add("--scale-k", type=FACTOR, default=1.0)


def _add_output(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--jobs", type=typed(count(1, 1_000)), default=1, help="runs side by side, each in a process of its own")
    add("--engine", choices=["local", "ray"], default="local", help="where the runs go; ray needs gpuroute[ray]")
    add("--json", nargs="?", const="-", metavar="FILE", help="rows as JSON (to stdout without FILE)")
    add("--csv", metavar="FILE", help="rows as CSV")
    add("--plot", metavar="FILE", help="PNG or SVG; needs gpuroute[plot]")
    add("--slo", default="2,0.1", metavar="TTFT,TPOT", help="seconds; what goodput counts")
    add("--quiet", action="store_true", help="no progress bar")
    add(
        "--suite",
        choices=["headline"],
        help="all claims of docs/simulation.md, each against its bar (--jobs 2: a quarter of an hour or more)",
    )
    add("--only", default="", metavar="CASES", help="of the suite, only these cases, comma-separated")
    add("--validate", action="store_true", help="replay recorded vLLM runs on the step model and print the errors")


def run(args: argparse.Namespace) -> int:
    """Run the sweep that `args` describe."""
    _check_files(args)
    if args.validate:
        return _validate(args)
    if args.engine == "ray" and not find_spec("ray"):
        raise ConfigError("--engine ray needs Ray: pip install 'gpuroute[ray]'")
    if args.suite:
        return _suite(args)
    from gpuroute.sim.run import sweep

    names = list(dict.fromkeys(name for part in args.policy.split(",") if (name := part.strip())))
    seeds = range(args.seed, args.seed + args.seeds)
    if not names:
        raise ConfigError(f"--policy={args.policy!r}: expected names of policies, such as p2c,auto+asks")
    if args.only:
        raise ConfigError("--only names cases of a suite: expected --suite")
    try:
        scenario = _scenario(args)
        with _progress(quiet=args.quiet) as tell:
            results = sweep(scenario, names, seeds, jobs=args.jobs, engine=args.engine, on_progress=tell)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    _show(args, results, scenario)
    return 0 if len(results) == len(names) * len(seeds) else 130


def _check_files(args: argparse.Namespace) -> None:
    """What is to be written can be, as far as one can tell before the work."""
    for option, name in (("--json", args.json), ("--csv", args.csv), ("--plot", args.plot)):
        if name and name != "-" and (Path(name).is_dir() or not Path(name).absolute().parent.is_dir()):
            raise ConfigError(f"{option}={name!r}: expected a file in a directory that exists")
    if args.plot and not find_spec("matplotlib"):
        raise ConfigError("--plot needs matplotlib: pip install 'gpuroute[plot]'")
    if args.plot and Path(args.plot).suffix not in {".png", ".svg", ".pdf"}:
        raise ConfigError(f"--plot={args.plot!r}: expected a file name that ends in .png, .svg or .pdf")
    if (args.suite or args.validate) and (args.csv or args.plot):
        raise ConfigError("--suite and --validate print a table or --json: --csv and --plot are of single sweeps")


def _suite(args: argparse.Namespace) -> int:
    """Run the cases of a suite and hold their figures against the bars; 1 if a bar is missed."""
    from gpuroute.sim import output
    from gpuroute.sim.run import sweep
    from gpuroute.sim.suite import CASES, SUITES, cases_of, judged

    parser = argparse.ArgumentParser()
    _add_scenario(parser)
    _add_trouble(parser)
    _add_output(parser)
    rows, found = SUITES[args.suite], {}
    wanted = [name for part in args.only.split(",") if (name := part.strip())]
    if unknown := [name for name in wanted if name not in cases_of(rows)]:
        raise ConfigError(f"--only={unknown[0]!r}: expected cases of the suite, of {', '.join(cases_of(rows))}")
    cases = [case for case in cases_of(rows) if not wanted or case in wanted]
    try:
        for case in cases:
            its = parser.parse_args(CASES[case].split())
            seeds = range(args.seed, args.seed + max(args.seeds, its.seeds))
            names = its.policy.split(",")
            found[case] = sweep(_scenario(its), names, seeds, jobs=args.jobs, engine=args.engine)
            if len(found[case]) < len(names) * len(seeds):
                raise KeyboardInterrupt
            if not args.quiet:
                print(f"{case}: gpuroute simulate {CASES[case]}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("interrupted: what is done", file=sys.stderr)
    table = judged(rows, found)
    if args.json:
        _write(args.json, json.dumps(table, indent=1) + "\n")
    if args.json != "-":
        output.print_claims(table)
    return 1 if any(row["met"] is False for row in table) else 0


def _scenario(args: argparse.Namespace) -> Scenario:
    from gpuroute.sim.fleet import Engine, parse_event
    from gpuroute.sim.loop import Network
    from gpuroute.sim.reports import Reports
    from gpuroute.sim.run import Scenario

    engine = Engine(args.max_num_seqs, args.max_num_batched_tokens, args.dram_tokens)
    return Scenario(
        trace=args.trace,
        fleet=args.fleet,
        clients=args.clients,
        copies=args.copies,
        window=args.window,
        warmup=args.warmup,
        common=args.common_blocks,
        sticky=args.sticky,
        reroute=not args.no_reroute,
        watchdog=args.watchdog,
        foreign=args.foreign,
        subset=args.subset,
        timeout=args.timeout,
        engine=replace(engine, h=args.scale_h, a=args.scale_a, k=args.scale_k),
        network=Network(delay=args.network_delay, handshake=args.handshake),
        reports=Reports(
            delay=args.report_delay,
            loss=args.report_loss,
            stale=args.report_stale,
            frozen_at=args.report_frozen_at,
            frozen=args.report_frozen_share,
            coverage=args.coverage,
            frozen_sample=args.report_frozen_sample,
            liars=args.liars,
            second_opinions=args.second_opinions,
            cache_error=args.cache_error,
        ),
        events=tuple(parse_event(text) for text in args.event),
        slo=_slo(args.slo),
    )


def _slo(text: str) -> Slo:
    from gpuroute.sim.measure import Slo

    try:
        ttft, tpot = map(parse_duration, text.split(","))
    except ValueError:
        raise ConfigError(f"--slo={text!r}: expected TTFT,TPOT in seconds, such as 2,0.1") from None
    return Slo(ttft, tpot)


def _show(args: argparse.Namespace, results: list[Result], scenario: Scenario) -> None:
    from gpuroute.sim import output

    if args.json:
        _write(args.json, output.as_json(results))
    if args.csv:
        _write(args.csv, output.as_csv(results))
    if args.plot:
        output.plot(results, Path(args.plot))
    if args.json != "-" and args.csv != "-":
        title = f"{scenario.trace} x {scenario.copies} on {scenario.fleet}, {scenario.clients} clients, "
        output.print_table(results, title + f"{scenario.window:g} s after {scenario.warmup:g} s")


def _write(target: str, text: str) -> None:
    if target == "-":
        sys.stdout.write(text)
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{target!r} cannot be written: {error.strerror}") from None


def _validate(args: argparse.Namespace) -> int:
    from gpuroute.sim.validate import validate

    if args.json:
        rows = [{**asdict(row), "error": row.error} for row in validate()]
        _write(args.json, json.dumps(rows, indent=1) + "\n")
    if args.json == "-":
        return 0
    print(f"{'run':28} {'metric':8} {'':5} {'measured s':>11} {'simulated s':>11} {'error':>7}")
    for row in validate():
        print(
            f"{row.run:28} {row.metric:8} {row.statistic:5} {row.measured:11.4f} {row.simulated:11.4f} {row.error:+7.1%}"
        )
    return 0


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[float], None] | None]:
    """A bar on stderr while a person watches."""
    if quiet or not sys.stderr.isatty() or not find_spec("rich"):
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("simulating", total=1.0)
        yield lambda share: bar.update(task, completed=share)
