"""One run of a scenario under one policy and seed, and sweeps of many, in processes of their own.

A run is a pure function of (scenario, policy, seed): the same three give the same bytes on any machine.
"""

from __future__ import annotations

import signal
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from math import inf
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, Final

from gpuroute.core.policies import POLICIES

from .clients import Stranger, core_clients
from .fleet import Engine, FleetEvent, parse_fleet
from .loop import Network, Simulation
from .measure import Meter, Slo
from .peers import PEERS, peer_clients
from .reports import CHANNELS, Reports
from .traces import load_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .fleet import Server

MOST_CALLS: Final = 1e8  # of one run: days of work
KEYS: Final = (
    "policy",
    "reports",
    "seed",
    "ttft_mean",
    "ttft_p50",
    "ttft_p95",
    "ttft_p99",
    *("e2e_mean", "tpot_p99", "goodput", "success", "hit", "max_over_mean"),
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that a run depends on but policy and seed. Seconds and tokens."""

    trace: str = "mooncake"
    fleet: str = "16xH100"
    clients: int = 32
    copies: int = 1
    window: float = 60.0
    warmup: float = 20.0
    common: int = 0
    sticky: bool = False
    reroute: bool = True
    watchdog: bool = False
    foreign: float = 0.0
    subset: int = 0
    timeout: float = inf
    engine: Engine = Engine()
    network: Network = Network()
    reports: Reports = Reports()
    events: tuple[FleetEvent, ...] = ()
    slo: Slo = Slo()


@dataclass(slots=True)
class Result:
    """One run: `row` has exactly `KEYS`; the rest is for people and plots."""

    row: dict[str, Any]
    extra: dict[str, float] = field(default_factory=dict)
    ttft: list[float] = field(default_factory=list)
    samples: list[tuple[float, float, float]] = field(default_factory=list)
    shares: list[int] = field(default_factory=list)


def check_policy(name: str) -> tuple[str, str]:
    """Split `auto+asks` into the policy and its report channel. ValueError with the known names."""
    policy, _, channel = name.partition("+")
    if name in PEERS:
        return name, "none"
    if policy not in POLICIES or (name != policy and channel not in CHANNELS):
        known = ", ".join((*POLICIES, *PEERS))
        raise ValueError(f"unknown policy {name!r}: known are {known}; core policies take +{', +'.join(CHANNELS)}")
    return policy, CHANNELS[channel] if channel else "none"


def simulate(scenario: Scenario, name: str, seed: int, progress: Callable[[float], None] | None = None) -> Result:
    """Run one policy with one seed. `progress` is told the share done, now and then."""
    policy, channel = check_policy(name)
    end = scenario.warmup + scenario.window
    servers = parse_fleet(scenario.fleet, scenario.engine)
    trace = load_trace(scenario.trace, seed=seed, seconds=end)
    if (calls := trace.rate * scenario.copies * end) > MOST_CALLS:
        raise ValueError(
            f"trace {trace.name} repeats {len(trace.rows)} calls every {trace.span:.3g} s: {calls:.3g} calls in "
            f"{scenario.copies} copies of {end:g} s, expected at most {MOST_CALLS:.0e}"
        )
    requests = trace.superpose(scenario.copies, seed, end, common=scenario.common)
    meter = Meter(scenario.warmup, scenario.window, slo=scenario.slo)
    sim = Simulation(
        servers,
        _watched(requests, end, progress) if progress else requests,
        meter=meter,
        network=scenario.network,
        events=scenario.events,
        seed=seed,
        timeout=scenario.timeout,
        sticky=scenario.sticky,
        foreign=scenario.foreign,
    )
    if scenario.foreign:
        sim.stranger = Stranger(sim)
    if name in PEERS:
        sim.clients = peer_clients(sim, scenario.clients, name, seed)
    else:
        reports = scenario.reports.of(channel)
        sim.clients = core_clients(
            sim,
            scenario.clients,
            policy,
            seed,
            reports=reports,
            reroute=scenario.reroute,
            size=scenario.subset,
            watchdog=scenario.watchdog,
        )
    sim.run()
    row = {"policy": name, "reports": channel, "seed": seed, **meter.row()}
    shares = [server.picked for server in servers]
    return Result(row, {**meter.extra(), **per_kind(servers)}, meter.ttft.tolist(), meter.samples, shares)


def per_kind(servers: Sequence[Server]) -> dict[str, float]:
    """What one server of each GPU kind was given: `calls_A100`, `prompts_A100` (tokens), in the measured window."""
    found: dict[str, float] = {}
    for kind in {server.kind: None for server in servers}:
        its = [server for server in servers if server.kind == kind]
        found[f"calls_{kind}"] = sum(server.picked for server in its) / len(its)
        found[f"prompts_{kind}"] = sum(server.picked_tokens for server in its) / len(its)
    return found


def _watched(requests: Iterator[Any], end: float, progress: Callable[[float], None]) -> Iterator[Any]:
    told = 0.0
    for request in requests:
        if request.at - told > end / 200:
            told = request.at
            progress(min(1.0, told / end))
        yield request


def sweep(
    scenario: Scenario,
    names: Sequence[str],
    seeds: Sequence[int],
    *,
    jobs: int = 1,
    engine: str = "local",
    on_result: Callable[[Result], None] | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> list[Result]:
    """All policies with all seeds, in that order. On Ctrl-C: what is done so far (at least the order is
    kept). `engine`: "local" (processes) or "ray" (a cluster); the rows are the same.
    """
    tasks = [(name, seed) for seed in seeds for name in names]
    for name in names:
        check_policy(name)
    found: dict[tuple[str, int], Result] = {}
    try:
        for task, result in _results(scenario, tasks, jobs, engine, on_progress):
            found[task] = result
            if on_result is not None:
                on_result(result)
    except KeyboardInterrupt:
        if not found:
            raise
    return [found[name, seed] for name in names for seed in seeds if (name, seed) in found]


def _results(
    scenario: Scenario,
    tasks: list[tuple[str, int]],
    jobs: int,
    engine: str,
    on_progress: Callable[[float], None] | None,
) -> Iterator[tuple[tuple[str, int], Result]]:
    if engine == "ray":
        from .cluster import spread

        for number, (task, result) in enumerate(spread(simulate, scenario, tasks, jobs), 1):
            if on_progress is not None:
                on_progress(number / len(tasks))
            yield task, result
        return
    if jobs <= 1:
        for number, task in enumerate(tasks):
            share = None if on_progress is None else _part(on_progress, number, len(tasks))
            yield task, simulate(scenario, *task, share)
        return
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_ignore_interrupt)
    try:
        running = {pool.submit(simulate, scenario, *task): task for task in tasks}
        for number, future in enumerate(as_completed(running), 1):
            if on_progress is not None:
                on_progress(number / len(tasks))
            yield running[future], future.result()
    except BaseException:  # a run may last minutes: whoever interrupts does not want to wait for it
        for process in tuple(pool._processes.values()):  # noqa: SLF001
            process.terminate()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def _part(tell: Callable[[float], None], number: int, of: int) -> Callable[[float], None]:
    return lambda share: tell((number + share) / of)


def _ignore_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
