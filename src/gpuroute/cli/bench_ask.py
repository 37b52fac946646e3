"""`gpuroute bench ask`: what asking costs. The agent: asks per second of one core, and how long an answer takes at a
steady rate, over loopback and with keys. The client: CPU of an asked call, beside that of one that is not asked, and of
bare sockets that send as many datagrams and wait for the answers (the floor: less is not possible here).

Agents run in processes of their own, as they do beside engines. Where all cores are busy the figures say so.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from gpuroute.agent.answers import Answers
from gpuroute.agent.desk import Desk
from gpuroute.agent.server import UdpServer, open_socket
from gpuroute.cli.bench_agent import KEY, ask, measure_agent, process
from gpuroute.core.endpoint import Endpoint
from gpuroute.core.outcome import Outcome
from gpuroute.core.sources import MOST
from gpuroute.router import Router
from gpuroute.transports.asking import Asker, asker_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection

    from gpuroute.core.call import Call
    from gpuroute.transports.asking import Asking

ENGINES = 48
ROUNDS = 15
PER_ROUND = 100

Address = tuple[str, int]


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


def measure_client() -> dict[str, float]:
    """CPU of one call from pick to tell, in microseconds: asked by a thread, asked by a task, and not asked; and of bare
    sockets, in the same rounds."""
    with process(agents, ENGINES) as (_, ports), asyncio.Runner() as runner:
        addresses = [("127.0.0.1", port) for port in ports]
        endpoints = [Endpoint(f"gpu-{port}", "http://127.0.0.1:1", agent=f"udp://127.0.0.1:{port}") for port in ports]
        router = Router(endpoints={"p": endpoints}, asks="on", ask_hashes=True, agent_key=KEY.decode(), ask_timeout=1.0)
        router.ready(5.0)
        asker = asker_of(router)
        assert asker is not None
        kinds: dict[str, Callable[[], None]] = {
            "floor_sync_us": partial(_bare_thread, addresses),
            "floor_async_us": lambda: runner.run(_bare_tasks(addresses)),
            "unasked_us": partial(_unasked, router),
            "asked_sync_us": partial(_by_thread, router, asker),
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
        shares = {"asks_per_call": counts.asks / counts.calls, "again_per_call": counts.again / counts.calls}
        return {**result, **best, **{name: round(share, 3) for name, share in shares.items()}}


def agents(pipe: Connection, count: int) -> None:
    """So many agents in one process, until it is ended. Says their ports."""

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        sockets = [open_socket("127.0.0.1", 0, authenticated=True) for _ in range(count)]
        for sock in sockets:
            port = sock.getsockname()[1]
            UdpServer(loop, sock, Answers([Desk(f"gpu-{port}")], (KEY,), rate=1e9))
        pipe.send([sock.getsockname()[1] for sock in sockets])
        await asyncio.Event().wait()

    asyncio.run(serve())


# ---------------------------------------------------------------------------------------------- the floor


def _bare(addresses: Sequence[Address]) -> Iterator[tuple[bytes, list[Address]]]:
    """An ask and whom to send it to, for each of the calls of one round."""
    message = ask(1)
    for _ in range(PER_ROUND):
        yield message, random.sample(addresses, MOST)


def _bare_thread(addresses: Sequence[Address]) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for message, asked in _bare(addresses):
            for address in asked:
                sock.sendto(message, address)
            for _ in asked:
                sock.recvfrom(512)


async def _bare_tasks(addresses: Sequence[Address]) -> None:
    loop = asyncio.get_running_loop()
    left, due = 0, loop.create_future()

    def read() -> None:
        nonlocal left
        try:
            while left:
                sock.recvfrom(512)
                left -= 1
        except BlockingIOError:
            return
        if not due.done():
            due.set_result(None)

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        loop.add_reader(sock, read)
        for message, asked in _bare(addresses):
            left, due = MOST, loop.create_future()
            for address in asked:
                sock.sendto(message, address)
            await due
        loop.remove_reader(sock)


# ---------------------------------------------------------------------------------------------- calls


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
