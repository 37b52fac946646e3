"""`gpuroute bench live`: policies on a live fleet: stand-in GPUs, agents and client processes, over loopback sockets.

A slice of a recorded trace is replayed open loop. Its prefix blocks become real text, so that what is cached is what the
engines really share; lengths are the trace's. Policies take turns on the same fleet with the same slice; the text of each
turn is its own, so nobody profits from the cache of another. `time_scale` wall seconds are one GPU second, in arrivals
and engines alike; times are reported in GPU seconds. On few cores a larger scale keeps the machine's own noise small;
`machine_load` (runnable tasks for each core) tells how small: above 1 the engines themselves run late, and it lies.

Trouble can be asked for: `auto+asks+loss` (30 % of all messages vanish), `+liars` (10 % of the agents, one at least, say
that they are idle and have everything cached), `+repeats` (so many say the same moderate queue for ever), `+frozen` (so
many are stopped), `+closed` (nobody listens where so many are said to be). `+agents` asks no engine, whatever its agent
says; `+reroute` moves calls whose promise was broken. With `--rounds` policies take turns, and `times_first` is the
median over the rounds of what a policy's mean was of the first one's in the same round: a busy moment hits both.
"""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from gpuroute.cli import duration
from gpuroute.core.asking import Kind
from gpuroute.core.endpoint import Endpoint, Gpu
from gpuroute.transports.ask_lines import Line, Place

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from multiprocessing.connection import Connection

    from gpuroute.core.asking import BidBody
    from gpuroute.router import Router
    from gpuroute.sim.traces import Request
    from gpuroute.transports.ask_peers import Asked

POOL = "live"
KEY = "bench-live"
BLOCK_TOKENS = 512
TOKEN_BYTES = 4
START_S = 60.0
LEAD_S = 1.0
POLICIES = "p2c,prefix,auto,auto+asks"


class Turn(NamedTuple):
    """One policy's turn: what clients are told. `kind` as on the command line: policy and what is added to it."""

    number: int
    kind: str
    endpoints: list[Endpoint]
    start: float

    @property
    def policy(self) -> str:
        """The policy's name."""
        return self.kind.partition("+")[0]

    def has(self, word: str) -> bool:
        """Whether that is added to it."""
        return word in self.kind.split("+")[1:]


class Call(NamedTuple):
    """One measured call, in wall seconds; `ttft` None: it failed."""

    at: float
    ttft: float | None
    prompt: int = 0
    cached: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The fleet and its load. `warmup` and `window` in GPU seconds."""

    servers: int
    agents: int
    clients: int
    gpu: str
    time_scale: float
    copies: int
    trace: str
    warmup: float
    window: float
    common: int
    ask_timeout: float
    seed: int


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare `bench live`."""
    parser = kinds.add_parser("live", help="policies on a live fleet of stand-in GPUs with agents")
    add = parser.add_argument
    add(
        "--policies",
        default=POLICIES,
        help="comma-separated; +asks, and +loss, +liars, +repeats, +frozen or +closed (default: %(default)s)",
    )
    add("--servers", type=int, default=12, help="GPU processes (default: %(default)s)")
    add("--agents", type=int, default=0, help="agent processes (default: one for each server)")
    add("--clients", type=int, default=32, help="client processes (default: %(default)s)")
    add("--gpu", default="H100", help="kind of GPU (default: %(default)s)")
    add("--trace", default="mooncake", help="mooncake, or a file that has prefix blocks (default: %(default)s)")
    add("--copies", type=int, default=4, help="copies of the trace laid over each other (default: %(default)s)")
    add("--common-blocks", type=int, default=0, help="block ids below this are common to all copies")
    add("--time-scale", type=float, default=0.5, help="wall seconds per GPU second (default: %(default)s)")
    add("--warmup", type=float, default=60.0, help="GPU seconds before measuring (default: %(default)s)")
    add("--window", type=float, default=120.0, help="GPU seconds measured in each turn (default: %(default)s)")
    add("--rounds", type=int, default=1, help="turns of each policy (default: %(default)s)")
    add("--ask-timeout", type=duration, default=0.003, help="wall seconds (default: 3ms)")
    add("--seed", type=int, default=0, help="which slice (default: %(default)s)")
    add("--json", action="store_true", help="print JSON alone")


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    scene = Scene(
        servers=args.servers,
        agents=args.agents or args.servers,
        clients=args.clients,
        gpu=args.gpu,
        time_scale=args.time_scale,
        copies=args.copies,
        trace=args.trace,
        warmup=args.warmup,
        window=args.window,
        common=args.common_blocks,
        ask_timeout=args.ask_timeout,
        seed=args.seed,
    )
    rows = measure(scene, list(dict.fromkeys(args.policies.split(","))), args.rounds)
    if args.json:
        print(json.dumps(rows))
        return 0
    print(
        f"{'policy':<12}{'asks':>6}{'trouble':>16}{'mean':>9}{'x first':>9}{'p50':>9}{'p95':>9}{'p99':>9}{'cached':>9}"
        f"{'failed':>8}{'calls':>7}"
    )
    for row in rows:
        names = ("ttft_mean", "times_first", "ttft_p50", "ttft_p95", "ttft_p99")
        times = "".join(f"{row[name]:>9.3f}" for name in names)
        rest = f"{row['cached_share']:>9.3f}{row['failed']:>8}{row['calls']:>7}"
        print(f"{row['policy']:<12}{row['asks']!s:>6}{row['trouble']:>16}{times}{rest}")
    return 0


def measure(scene: Scene, names: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """One row for each policy; they take turns `rounds` times."""
    found: dict[str, list[list[Call]]] = {name: [] for name in names}
    asked: dict[str, Counter[str]] = {name: Counter() for name in names}
    loads: dict[str, list[float]] = {name: [] for name in names}
    with ExitStack() as stack:
        clients = _start_clients(scene, stack)
        fleet = _start_fleet(scene, stack)
        for number in range(rounds * len(names)):
            name = names[number % len(names)]
            with _trouble(name, fleet) as endpoints:
                turn = Turn(number, name, endpoints, time.monotonic() + LEAD_S)
                for pipe in clients:
                    pipe.send(turn)
                found[name].append([])
                for pipe in clients:
                    calls, counts = pipe.recv()
                    found[name][-1] += calls
                    asked[name].update(counts)
            loads[name].append(os.getloadavg()[0] / (os.cpu_count() or 1))
            turn_of = f"turn {number + 1} of {rounds * len(names)}"
            print(f"{turn_of}: {name}: mean TTFT {_mean(found[name][-1], scene):.3f} s", file=sys.stderr, flush=True)
    rows = []
    for name, turns in found.items():
        row = _row(name, [call for calls in turns for call in calls], asked[name], scene)
        means, firsts = ([_mean(calls, scene) for calls in its] for its in (turns, found[names[0]]))
        row["times_first"] = round(median(mean / first for mean, first in zip(means, firsts, strict=True)), 3)
        rows.append({**row, "means": means, "machine_load": round(sum(loads[name]) / rounds, 2)})
    return rows


def _mean(calls: list[Call], scene: Scene) -> float:
    """Mean TTFT of one turn's measured calls, in GPU seconds."""
    ttfts = [call.ttft / scene.time_scale for call in calls if call.at >= scene.warmup and call.ttft is not None]
    return round(sum(ttfts) / len(ttfts), 4) if ttfts else math.nan


def _row(name: str, calls: list[Call], counts: Counter[str], scene: Scene) -> dict[str, Any]:
    policy, *added = name.split("+")
    counted = [call for call in calls if call.at >= scene.warmup]
    ttfts = sorted(call.ttft / scene.time_scale for call in counted if call.ttft is not None) or [0.0]
    prompt = sum(call.prompt for call in counted)

    def quantile(share: float) -> float:
        return round(ttfts[min(len(ttfts) - 1, int(share * len(ttfts)))], 4)

    return {
        "policy": policy,
        "asks": "asks" in added,
        "trouble": "+".join(word for word in added if word != "asks"),
        "ttft_mean": round(sum(ttfts) / len(ttfts), 4),
        "ttft_p50": quantile(0.5),
        "ttft_p95": quantile(0.95),
        "ttft_p99": quantile(0.99),
        "cached_share": round(sum(call.cached for call in counted) / prompt, 4) if prompt else 0.0,
        "failed": sum(call.ttft is None for call in counted),
        "calls": len(counted),
        "answered_share": _share(counts["answers"] - counts["late"], counts["asks"] + counts["again"]),
        "timeout_share": _share(counts["timeouts"], counts["calls"]),
    }


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


# ---------------------------------------------------------------------------------------------- the fleet


@dataclass(frozen=True, slots=True)
class LiveFleet:
    """The endpoints, the same with liars or closed ports in place of some agents, and the processes of those agents."""

    endpoints: list[Endpoint]
    lying: list[Endpoint]
    repeating: list[Endpoint]
    closed: list[Endpoint]
    agents: list[subprocess.Popen[bytes]]


@contextmanager
def _trouble(kind: str, fleet: LiveFleet) -> Iterator[list[Endpoint]]:
    """The endpoints of a turn, with its trouble for as long as it lasts."""
    words = kind.split("+")[1:]
    stopped = fleet.agents[: _few(len(fleet.endpoints))] if "frozen" in words else []
    for agent in stopped:
        agent.send_signal(signal.SIGSTOP)
    try:
        bad = {"liars": fleet.lying, "repeats": fleet.repeating, "closed": fleet.closed}
        yield next((endpoints for word, endpoints in bad.items() if word in words), fleet.endpoints)
    finally:
        for agent in stopped:
            agent.send_signal(signal.SIGCONT)


def _few(count: int) -> int:
    return max(1, round(0.1 * count))


def _start_fleet(scene: Scene, stack: ExitStack) -> LiveFleet:
    """Servers and agents, once every agent has called its engines ready."""
    from gpuroute.testing import GpuServer

    options = {"gpu": scene.gpu, "time_scale": scene.time_scale, "stream_interval": 32}
    servers = [stack.enter_context(GpuServer.spawn(wait=False, **options)) for _ in range(scene.servers)]
    urls = [server.url for server in servers]
    made: list[Endpoint] = []
    agents: list[subprocess.Popen[bytes]] = []
    for number in range(scene.agents):
        beside = list(range(number, scene.servers, scene.agents))
        process = _start_agent([urls[index] for index in beside], [f"gpu-{index}" for index in beside], scene.gpu, stack)
        agents.append(process)
        lines = _when_ready(process, len(beside))
        for place, index in enumerate(beside):
            agent = f"{lines['agent']}/{place}"
            made.append(Endpoint(f"gpu-{index}", urls[index], engine="vllm", gpu=Gpu(scene.gpu), agent=agent))
    few = _few(len(made))
    names = [endpoint.id for endpoint in made[:few]]
    lying, repeating = (_moved(made, _start_liars(names, repeats, stack)) for repeats in (False, True))
    return LiveFleet(made, lying, repeating, _moved(made, [_closed_port(stack) for _ in range(few)]), agents)


def _moved(endpoints: list[Endpoint], ports: list[int]) -> list[Endpoint]:
    """The endpoints, with the agents of the first of them said to be at these ports."""
    moved = [replace(one, agent=f"udp://127.0.0.1:{port}") for one, port in zip(endpoints, ports, strict=False)]
    return moved + endpoints[len(ports) :]


def _closed_port(stack: ExitStack) -> int:
    """A UDP port where nobody reads, and nobody else can: what is sent there is refused, as the socket only talks to
    itself."""
    sock = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    sock.bind(("127.0.0.1", 0))
    sock.connect(sock.getsockname())
    port: int = sock.getsockname()[1]
    return port


def _start_agent(urls: list[str], names: list[str], gpu: str, stack: ExitStack) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "gpuroute", "agent", "--listen", "127.0.0.1:0", "--status", "127.0.0.1:0"]
    command += ["--warmup", "2", "--gpu", gpu, "--drain", "1s"]
    for url, name in zip(urls, names, strict=True):
        command += ["--url", url, "--id", name]
    environ = {**os.environ, "GPUROUTE_AGENT_KEY": KEY, "GPUROUTE_LOG_LEVEL": "warning"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environ)
    stack.callback(_end, process)
    return process


def _when_ready(process: subprocess.Popen[bytes], count: int) -> dict[str, str]:
    """What the agent said of itself, once all its engines are ready."""
    assert process.stdout is not None
    lines: dict[str, str] = json.loads(process.stdout.readline())
    until = time.monotonic() + START_S
    while not _all_ready(lines["status"], count):
        if time.monotonic() > until:
            raise TimeoutError(f"an agent did not find its engines ready within {START_S:g} s")
        time.sleep(0.1)
    return lines


def _all_ready(status: str, count: int) -> bool:
    with urllib.request.urlopen(f"{status}/load", timeout=START_S) as answer:
        engines = json.load(answer)["engines"]
    return len(engines) == count and all(engine["state"] == "ready" for engine in engines)


def _start_liars(idents: list[str], repeats: bool, stack: ExitStack) -> list[int]:
    """Agents that always say that they are idle and have everything cached, or always the same; their ports."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_lie, args=(there, idents, repeats), daemon=True)
    process.start()
    there.close()
    stack.callback(process.kill)
    ports: list[int] = here.recv()
    return ports


def _lie(pipe: Connection, idents: list[str], repeats: bool) -> None:
    from gpuroute.agent.answers import Answers
    from gpuroute.agent.desk import Desk
    from gpuroute.agent.server import UdpServer, open_socket

    class Liar(Desk):
        def bid(self, id_: int, tokens: int, hashes: Sequence[int], now: float) -> BidBody:
            said = super().bid(id_, tokens, hashes, now)
            if repeats:
                return said._replace(queued_tokens=2_000, running=12, waiting=0, kv_usage=0.5123, age=0.0)
            return said._replace(queued_tokens=0, running=0, waiting=0, kv_usage=0.0, matched_tokens=tokens, age=0.0)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        answers = [Answers([Liar(ident)], [KEY.encode()]) for ident in idents]
        servers = [UdpServer(loop, open_socket("127.0.0.1", 0, authenticated=True), one) for one in answers]
        pipe.send([server.port for server in servers])
        await asyncio.Event().wait()

    asyncio.run(main())


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


# ---------------------------------------------------------------------------------------------- the clients


def _start_clients(scene: Scene, stack: ExitStack) -> list[Connection]:
    from gpuroute.sim.traces import load_trace

    until = scene.warmup + scene.window
    trace = load_trace(scene.trace, seed=scene.seed)
    rows = list(trace.superpose(scene.copies, scene.seed, until, common=scene.common))
    # Not forked from here: this process may hold gRPC objects as garbage, and a child that collects them never ends.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gpuroute.httpx2", __name__])
    pipes = []
    for number in range(scene.clients):
        here, there = context.Pipe()
        process = context.Process(target=_client, args=(there, rows[number :: scene.clients], scene), daemon=True)
        process.start()
        there.close()
        stack.callback(process.kill)
        pipes.append(here)
    return pipes


def _client(pipe: Connection, rows: list[Request], scene: Scene) -> None:
    """One client process: its own routers, one for each policy, that live through all its turns."""
    with asyncio.Runner() as runner:
        runner.run(_serve(pipe, rows, scene))


async def _serve(pipe: Connection, rows: list[Request], scene: Scene) -> None:
    from gpuroute.httpx2 import AsyncClient
    from gpuroute.router import Router

    clients: dict[str, AsyncClient] = {}
    routers: dict[str, Router] = {}
    while True:
        try:
            turn: Turn = await asyncio.to_thread(pipe.recv)
        except EOFError:
            return
        kind, asks = turn.kind, turn.has("asks")
        if kind not in clients:
            how: dict[str, Any] = {"asks": "on" if asks else "off", "ask_hashes": asks, "agent_key": KEY}
            if asks and turn.has("agents"):
                how["asks"] = "agents"
            how |= {"ask_timeout": scene.ask_timeout, "reroute": turn.has("reroute")}
            router = Router(endpoints={POOL: turn.endpoints}, policy=turn.policy, **how)
            clients[kind], routers[kind] = AsyncClient(router, timeout=300.0), router
        Line.send, Line.send_all = LOSSY if turn.has("loss") else WHOLE  # type: ignore[method-assign,assignment]
        calls = await _replay(clients[kind], rows, scene.time_scale, turn)
        pipe.send((calls, _counts(routers[kind])))


LOSS = 0.3
WHOLE = Line.send, Line.send_all


def _losing(line: Line, data: bytes, place: Place) -> None:
    """Every message is lost with a chance of LOSS; an ask also for the bid that would have come back."""
    lost = 1 - (1 - LOSS) ** 2 if data[3] == Kind.ASK else LOSS
    if random.random() >= lost:
        WHOLE[0](line, data, place)


def _losing_any(line: Line, asked: Iterable[Asked], message: Callable[[int], bytes]) -> None:
    for _, _, place in asked:
        _losing(line, message(place.engine), place)


LOSSY = _losing, _losing_any


def _counts(router: Router) -> dict[str, int]:
    """What its asks came to since the last time."""
    from gpuroute.transports.asking import asker_of

    asker = asker_of(router)
    if asker is None:
        return {}
    counts = asker.counts.as_dict()
    asker.counts.clear()
    return counts


async def _replay(client: Any, rows: list[Request], scale: float, turn: Turn) -> list[Call]:
    tasks = []
    for row in rows:
        await asyncio.sleep(turn.start + row.at * scale - time.monotonic())
        tasks.append(asyncio.create_task(_call(client, row, turn)))
    return list(await asyncio.gather(*tasks))


async def _call(client: Any, row: Request, turn: Turn) -> Call:
    from gpuroute.engines.usage import read_usage

    body = {
        "model": "m",
        "prompt": prompt_of(row, turn.number),
        "max_tokens": max(1, row.output_tokens),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began, ttft, tail = time.monotonic(), None, b""
    try:
        async with client.stream("POST", f"http://{POOL}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for chunk in response.aiter_bytes():
                if ttft is None:
                    ttft = time.monotonic() - began
                tail = (tail + chunk)[-4096:]
    except Exception:
        return Call(row.at, None)
    usage = read_usage(tail)
    if usage is None:
        return Call(row.at, ttft)
    return Call(row.at, ttft, usage.prompt or 0, usage.cached or 0)


def prompt_of(row: Request, turn: int) -> str:
    """Text of the request's length whose shared blocks are shared text: equal in all clients, different in each turn."""
    from xxhash import xxh3_128_hexdigest

    size = BLOCK_TOKENS * TOKEN_BYTES
    blocks = [xxh3_128_hexdigest(f"{turn}/{block}".encode()) * (size // 32) for block in row.blocks]
    rest = row.prompt_tokens * TOKEN_BYTES - len(blocks) * size
    own = xxh3_128_hexdigest(f"{turn}/{row.at}/{row.blocks[-1:]}".encode()) * (rest // 32 + 1) if rest > 0 else ""
    return ("".join(blocks) + own)[: row.prompt_tokens * TOKEN_BYTES]
