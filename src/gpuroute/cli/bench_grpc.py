"""`gpuroute bench overhead --client grpc --client grpc-aio`: a routed channel beside one plain channel.

Bare and routed calls alternate, one by one (added cost) or in short rounds (throughput), so that both see the same
moments of a shared machine. The server is a process of its own.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import threading
import time
from concurrent import futures
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc

from gpuroute.core.endpoint import Endpoint
from gpuroute.grpc import aio, channel
from gpuroute.router import Router
from gpuroute.testing import FakeRegistry

if TYPE_CHECKING:
    import argparse
    from collections.abc import Awaitable, Callable, Iterator

Pair = tuple[Any, Any]
METHOD = "/bench.Echo/Unary"
BODY = b"x" * 100
CALLS = 3_000
CONCURRENT = 64
ROUNDS, ROUND_S = 8, 0.5
IDLE = 5_000
OPTIONS = (("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))


def add_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per gRPC client asked for (`args.client`; none named: both). Times in microseconds, medians."""
    asked = getattr(args, "client", None) or ["grpc", "grpc-aio"]
    calls = getattr(args, "calls", None) or CALLS
    rows = []
    with _server() as port:
        if "grpc" in asked:
            rows.append(_row("grpc", *_added_sync(port, calls), _throughput_sync(port)))
        if "grpc-aio" in asked:
            rows.append(_row("grpc-aio", *asyncio.run(_added_aio(port, calls)), asyncio.run(_throughput_aio(port))))
    for row in rows:
        row["bytes_per_idle_endpoint"] = _idle_bytes()
    return rows


def _row(client: str, bare: list[float], routed: list[float], throughput: float) -> dict[str, Any]:
    added = statistics.median(theirs - ours for ours, theirs in zip(bare, routed, strict=True))
    return {
        "client": client,
        "bare_us": round(statistics.median(bare) * 1e6, 1),
        "routed_us": round(statistics.median(routed) * 1e6, 1),
        "added_us": round(added * 1e6, 1),
        "throughput": round(throughput, 3),
    }


# ------------------------------------------------------------------------------------------ the server


@contextmanager
def _server() -> Iterator[int]:
    command = [sys.executable, "-m", "gpuroute.cli.bench_grpc"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.terminate()


def serve() -> None:
    """Echo until standard input ends."""
    server = grpc.server(futures.ThreadPoolExecutor(8), options=(("grpc.so_reuseport", 0),))
    echo: Any = grpc.unary_unary_rpc_method_handler(lambda request, _context: request)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Echo", {"Unary": echo}),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    sys.stdin.read()


def _router(port: int) -> Router:
    return Router(FakeRegistry({"bench": [Endpoint("echo", f"grpc://127.0.0.1:{port}", protocol="grpc")]}))


# ------------------------------------------------------------------------------------------ threads


def _added_sync(port: int, calls: int) -> tuple[list[float], list[float]]:
    with grpc.insecure_channel(f"ipv4:127.0.0.1:{port}", OPTIONS) as plain, channel(_router(port), "bench") as ours:
        pair: Pair = plain.unary_unary(METHOD), ours.unary_unary(METHOD)
        for call in pair * 100:
            call(BODY, timeout=10)
        return _timed(pair[0], calls, pair[1])


def _timed(bare: Callable[..., Any], calls: int, routed: Callable[..., Any]) -> tuple[list[float], list[float]]:
    times: tuple[list[float], list[float]] = [], []
    for n in range(calls * 2):
        # ABBA, so that neither always follows the other.
        which = (n ^ n >> 1) & 1
        call = routed if which else bare
        started = time.perf_counter()
        call(BODY, timeout=10)
        times[which].append(time.perf_counter() - started)
    return times


def _throughput_sync(port: int) -> float:
    with grpc.insecure_channel(f"ipv4:127.0.0.1:{port}", OPTIONS) as plain, channel(_router(port), "bench") as ours:
        pair: Pair = plain.unary_unary(METHOD), ours.unary_unary(METHOD)
        return _ratio([(_threads_round(pair[0]), _threads_round(pair[1])) for _ in range(ROUNDS)])


def _threads_round(call: Callable[..., Any]) -> int:
    until = time.perf_counter() + ROUND_S
    counts = [0] * CONCURRENT

    def work(n: int) -> None:
        while time.perf_counter() < until:
            call(BODY, timeout=10)
            counts[n] += 1

    threads = [threading.Thread(target=work, args=(n,)) for n in range(CONCURRENT)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts)


def _ratio(rounds: list[tuple[int, int]]) -> float:
    return statistics.median(routed / bare for bare, routed in rounds)


# ------------------------------------------------------------------------------------------ tasks


async def _added_aio(port: int, calls: int) -> tuple[list[float], list[float]]:
    async with (
        grpc.aio.insecure_channel(f"ipv4:127.0.0.1:{port}", OPTIONS) as plain,
        aio.channel(_router(port), "bench") as ours,
    ):
        pair: Pair = plain.unary_unary(METHOD), ours.unary_unary(METHOD)
        for call in pair * 100:
            await call(BODY, timeout=10)
        times: tuple[list[float], list[float]] = [], []
        for n in range(calls * 2):
            which = (n ^ n >> 1) & 1
            started = time.perf_counter()
            await pair[which](BODY, timeout=10)
            times[which].append(time.perf_counter() - started)
        return times


async def _throughput_aio(port: int) -> float:
    async with (
        grpc.aio.insecure_channel(f"ipv4:127.0.0.1:{port}", OPTIONS) as plain,
        aio.channel(_router(port), "bench") as ours,
    ):
        pair: Pair = plain.unary_unary(METHOD), ours.unary_unary(METHOD)
        return _ratio([(await _tasks_round(pair[0]), await _tasks_round(pair[1])) for _ in range(ROUNDS)])


async def _tasks_round(call: Callable[..., Awaitable[Any]]) -> int:
    until = time.perf_counter() + ROUND_S

    async def work() -> int:
        count = 0
        while time.perf_counter() < until:
            await call(BODY, timeout=10)
            count += 1
        return count

    return sum(await asyncio.gather(*(work() for _ in range(CONCURRENT))))


# ------------------------------------------------------------------------------------------ memory


def _idle_bytes() -> int:
    """Resident bytes of a router, its pool and a channel, for each endpoint that was never called."""
    code = (
        "import gpuroute.cli.bench_grpc as bench; before = bench.resident()\n"
        "kept = bench.idle_channel(); print((bench.resident() - before) // bench.IDLE)"
    )
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout)


def resident() -> int:
    """Resident memory of this process in bytes (Linux)."""
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123  (a path of the kernel's)
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def idle_channel() -> object:
    """A channel over `IDLE` endpoints, of which one refused a call."""
    endpoints = [Endpoint(f"gpu-{n}", f"grpc://127.0.0.1:{1 + n % 1000}") for n in range(IDLE)]
    router = Router(FakeRegistry({"bench": endpoints}), attempts=1)
    found = channel(router, "bench")
    call: Any = found.unary_unary(METHOD)
    try:
        call(BODY, timeout=1)
    except grpc.RpcError:
        pass
    return found


if __name__ == "__main__":
    serve()
