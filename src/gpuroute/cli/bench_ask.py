"""`gpuroute bench ask`: what asking costs. The agent: asks per second of one core, and how long an answer takes at a
steady rate, over loopback and with keys. The client: CPU of an asked call beside that of one that is not asked.

The agent runs in a process of its own, as it does beside an engine. Where all cores are busy the figures say so.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import select
import socket
import statistics
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuroute.agent.answers import Answers
from gpuroute.agent.desk import Desk
from gpuroute.agent.server import UdpServer, open_socket
from gpuroute.core.asking import AskBody, encode_ask
from gpuroute.core.endpoint import Endpoint
from gpuroute.core.outcome import Outcome
from gpuroute.router import Router
from gpuroute.transports.asking import Asker, asker_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

    from gpuroute.core.call import Call
    from gpuroute.transports.asking import Asking

KEY = b"bench"
BATCH = 32
HASHES = 4


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare `bench ask`."""
    parser = kinds.add_parser("ask", help="answers of an agent per second, and the CPU of an asked call")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each measurement (default: %(default)s)")
    parser.add_argument("--rate", type=int, default=5_000, help="asks per second for latencies (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON alone")


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    result: dict[str, Any] = {**measure_agent(args.seconds, args.rate), **measure_client()}
    if args.json:
        print(json.dumps(result))
        return 0
    for name, value in result.items():
        print(f"{name:<28}{value:>12,.6g}")
    return 0


# ---------------------------------------------------------------------------------------------- the agent


@contextmanager
def agent_process(engines: int) -> Iterator[tuple[int, list[int]]]:
    """Process id and ports of so many agents in one process, each beside an engine."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(there, engines), daemon=True)
    process.start()
    there.close()
    try:
        yield process.pid or 0, here.recv()
    finally:
        here.send("stop")
        process.join(5)


def measure_agent(seconds: float, rate: int) -> dict[str, float]:
    """Figures of one agent process over loopback."""
    with agent_process(1) as (pid, (port,)):
        address = ("127.0.0.1", port)
        _flood(address, 0.3)  # warm
        start = _cpu_of(pid)
        answered, took = _flood(address, seconds)
        busy = _cpu_of(pid) - start
        times = sorted(_paced(address, seconds, rate))
        resident = _resident(pid)
    return {
        "asks_per_s": round(answered / took),
        "asks_per_cpu_s": round(answered / max(busy, 0.01)),
        "rate": rate,
        "p50_ms": round(1e3 * statistics.median(times), 4),
        "p99_ms": round(1e3 * times[int(0.99 * len(times))], 4),
        "agent_rss_mib": round(resident, 1),
    }


def serve(pipe: Connection, engines: int) -> None:
    """The agent's side, until told to stop."""
    asyncio.run(_serve(pipe, engines))


async def _serve(pipe: Connection, engines: int) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    servers = []
    for number in range(engines):
        answers = Answers([Desk(f"gpu-{number}")], (KEY,), rate=1e9)
        servers.append(UdpServer(loop, open_socket("127.0.0.1", 0, authenticated=True), answers))
    loop.add_reader(pipe, stop.set)
    pipe.send([server.port for server in servers])
    await stop.wait()
    for server in servers:
        server.close()


def _ask(number: int) -> bytes:
    hashes = tuple(random.getrandbits(64) for _ in range(HASHES))
    return encode_ask(AskBody(4_000, hashes), number, int(time.time() * 1000), secret=KEY)


def _flood(address: tuple[str, int], seconds: float) -> tuple[int, float]:
    """As many as it can: BATCH asks are always under way. Answers, and the seconds they took."""
    sock = _client(address)
    asks = [_ask(number) for number in range(2_048)]
    sent = answered = 0
    started = time.perf_counter()
    until = started + seconds
    while time.perf_counter() < until:
        while sent - answered < BATCH:
            sock.send(asks[sent % len(asks)])
            sent += 1
        if not select.select([sock], [], [], 0.1)[0]:
            sent = answered  # lost
            continue
        answered += _drain(sock)
    sock.close()
    return answered, time.perf_counter() - started


def _drain(sock: socket.socket) -> int:
    count = 0
    try:
        while True:
            sock.recv(512)
            count += 1
    except BlockingIOError:
        return count


def _paced(address: tuple[str, int], seconds: float, rate: int) -> list[float]:
    """Seconds from ask to answer at a steady rate; an answer that never came took infinitely long."""
    sock = _client(address)
    count = int(seconds * rate)
    asks = [_ask(number) for number in range(count)]
    sent, times = [0.0] * count, [float("inf")] * count
    started, done = time.perf_counter(), 0
    while (now := time.perf_counter()) < started + seconds + 0.2:
        while done < count and started + done / rate <= now:
            sent[done] = time.perf_counter()
            sock.send(asks[done])
            done += 1
        if select.select([sock], [], [], 1 / rate)[0]:
            data = sock.recv(512)
            number = int.from_bytes(data[16:24], "big")
            times[number] = time.perf_counter() - sent[number]
    sock.close()
    return times


def _client(address: tuple[str, int]) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.connect(address)
    sock.setblocking(False)
    return sock


def _cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def _resident(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 2**20


# ---------------------------------------------------------------------------------------------- the client

ENGINES = 48
ROUNDS = 15
PER_ROUND = 100


def measure_client() -> dict[str, float]:
    """CPU of one call from pick to tell, in microseconds: asked by a thread, asked by a task, and not asked."""
    with agent_process(ENGINES) as (_, ports), asyncio.Runner() as runner:
        endpoints = [
            Endpoint(f"gpu-{n}", "http://127.0.0.1:1", agent=f"udp://127.0.0.1:{port}") for n, port in enumerate(ports)
        ]
        router = Router(endpoints={"p": endpoints}, asks="on", ask_hashes=True, agent_key=KEY.decode(), ask_timeout=1.0)
        router.ready(5.0)
        asker = asker_of(router)
        assert asker is not None
        kinds: dict[str, Callable[[], None]] = {
            "unasked_us": lambda: _unasked(router),
            "asked_sync_us": lambda: _by_thread(router, asker),
            "asked_async_us": lambda: runner.run(_by_tasks(router, asker)),
        }
        rounds: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(ROUNDS):
            for name, run_round in kinds.items():
                started = time.process_time()
                run_round()
                rounds[name].append((time.process_time() - started) / PER_ROUND * 1e6)
        counts = asker.counts
        result = {name: round(statistics.median(found), 1) for name, found in rounds.items()}
        best = {f"{name}_best": round(min(found), 1) for name, found in rounds.items()}
        return {**result, **best, "asks_per_call": round(counts.asks / counts.calls, 2)}


def _call(router: Router) -> Call:
    mixed = random.getrandbits(64)
    return router.call("p", ladder=tuple(mixed >> shift for shift in range(5)), tokens=9_000)


def _finish(router: Router, call: Call, asking: Asking | None) -> None:
    attempt = call.next_attempt(router.clock())
    if asking is not None:
        asking.take(attempt)
    attempt.first_token(router.clock())
    if asking is not None:
        asking.tell(attempt, 0.2)
    call.finish(attempt, Outcome.SUCCESS, router.clock())


def _unasked(router: Router) -> None:
    for _ in range(PER_ROUND):
        _finish(router, _call(router), None)


def _by_thread(router: Router, asker: Asker) -> None:
    for _ in range(PER_ROUND):
        call = _call(router)
        _finish(router, call, asker.ask(call))


async def _by_tasks(router: Router, asker: Asker) -> None:
    for _ in range(PER_ROUND):
        call = _call(router)
        _finish(router, call, await asker.ask_async(call))
