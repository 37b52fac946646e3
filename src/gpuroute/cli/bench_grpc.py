"""`gpuroute bench overhead --client grpc --client grpc-aio`: a routed channel beside one plain channel.

Bare and routed calls take turns, one by one (added cost) or in short rounds (throughput), so that both see the same
moments of a shared machine; the A/A rows, bare against bare, tell how much of a difference is noise. The server is a
process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import statistics
import subprocess
import sys
import time
from concurrent import futures
from typing import TYPE_CHECKING, Any

import grpc

from gpuroute.cli.bench_overhead import share
from gpuroute.core.endpoint import Endpoint
from gpuroute.grpc import aio, channel
from gpuroute.registry.static import StaticRegistry
from gpuroute.router import Router

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Coroutine, Iterator

CLIENTS = ("grpc", "grpc-aio")
METHOD = "/bench.Echo/Unary"
BODY = b"x" * 100
WARM_UP = 200
CONCURRENCY = 64
ROUNDS = 8
CALLS_PER_ROUND = 1_280
IDLE = 5_000
OPTIONS = (("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))


def add_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of the gRPC clients among `args.client` (none named: both), from `args.pairs` pairs of calls each."""
    rows = []
    idle = idle_bytes()
    for client in CLIENTS:
        if client in (args.client or CLIENTS):
            with server() as port:
                bench = _tasks if client == "grpc-aio" else _threads
                rows += [row | {"bytes_per_idle_endpoint": idle} for row in bench(port, args.pairs)]
    return rows


def _row(client: str, concurrency: int, bare: list[float], routed: list[float]) -> dict[str, Any]:
    """Medians of seconds, per call."""
    added = statistics.median(ours - theirs for theirs, ours in zip(bare, routed, strict=True))
    ratio = statistics.median(theirs / ours for theirs, ours in zip(bare, routed, strict=True))
    return {
        "client": client,
        "concurrency": concurrency,
        "endpoints": 1,
        "bare_us": round(statistics.median(bare) * 1e6, 1),
        "routed_us": round(statistics.median(routed) * 1e6, 1),
        "added_us": round(added * 1e6, 1),
        "added_share": share(added, statistics.median(bare)),
        "throughput_ratio": round(ratio, 3),
        "errors": 0,  # a call that fails ends the bench
    }


# ---------------------------------------------------------------------------------------------- the server


@contextlib.contextmanager
def server() -> Iterator[int]:
    """The port of an echo server in a process of its own."""
    command = [sys.executable, "-m", "gpuroute.cli.bench_grpc"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.terminate()


def serve() -> None:
    """Echo until standard input ends."""
    handler: Any = grpc.unary_unary_rpc_method_handler
    echo = handler(lambda request, _context: request)
    here = grpc.server(futures.ThreadPoolExecutor(8), options=(("grpc.so_reuseport", 0),))
    here.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Echo", {"Unary": echo}),))
    print(here.add_insecure_port("127.0.0.1:0"), flush=True)
    here.start()
    sys.stdin.read()


def _router(port: int) -> Router:
    endpoint = Endpoint("echo", f"grpc://127.0.0.1:{port}", protocol="grpc")
    return Router(StaticRegistry({"bench": [endpoint]}), policy="p2c")


def _target(port: int) -> str:
    return f"ipv4:127.0.0.1:{port}"


# ---------------------------------------------------------------------------------------------- threads


def _threads(port: int, pairs: int) -> list[dict[str, Any]]:
    with grpc.insecure_channel(_target(port), OPTIONS) as plain, channel(_router(port), "bench") as ours:
        bare: Any = plain.unary_unary(METHOD)
        routed: Any = ours.unary_unary(METHOD)
        _turns(bare, routed, WARM_UP)
        return [
            _row("grpc A/A", 1, *_turns(bare, bare, pairs)),
            _row("grpc", 1, *_turns(bare, routed, pairs)),
            _row("grpc", CONCURRENCY, *_rounds(bare, routed)),
        ]


def _turns(bare: Callable[..., Any], routed: Callable[..., Any], pairs: int) -> tuple[list[float], list[float]]:
    times: tuple[list[float], list[float]] = [], []
    for _ in range(pairs):
        for which in random.sample((0, 1), 2):
            call = routed if which else bare
            began = time.perf_counter()
            call(BODY, timeout=10)
            times[which].append(time.perf_counter() - began)
    return times


def _rounds(bare: Callable[..., Any], routed: Callable[..., Any]) -> tuple[list[float], list[float]]:
    times: tuple[list[float], list[float]] = [], []
    with futures.ThreadPoolExecutor(CONCURRENCY) as pool:
        for _ in range(ROUNDS):
            for which in random.sample((0, 1), 2):
                call = routed if which else bare
                began = time.perf_counter()
                list(pool.map(_repeat, [call] * CONCURRENCY))
                times[which].append((time.perf_counter() - began) / CALLS_PER_ROUND)
    return times


def _repeat(call: Callable[..., Any]) -> None:
    for _ in range(CALLS_PER_ROUND // CONCURRENCY):
        call(BODY, timeout=10)


# ---------------------------------------------------------------------------------------------- tasks


def _tasks(port: int, pairs: int) -> list[dict[str, Any]]:
    return asyncio.run(_in_loop(port, pairs))


async def _in_loop(port: int, pairs: int) -> list[dict[str, Any]]:
    plain, ours = grpc.aio.insecure_channel(_target(port), OPTIONS), aio.channel(_router(port), "bench")
    async with plain, ours:
        bare: Any = plain.unary_unary(METHOD)
        routed: Any = ours.unary_unary(METHOD)
        await _async_turns(bare, routed, WARM_UP)
        return [
            _row("grpc-aio A/A", 1, *await _async_turns(bare, bare, pairs)),
            _row("grpc-aio", 1, *await _async_turns(bare, routed, pairs)),
            _row("grpc-aio", CONCURRENCY, *await _async_rounds(bare, routed)),
        ]


async def _async_turns(
    bare: Callable[..., Any], routed: Callable[..., Any], pairs: int
) -> tuple[list[float], list[float]]:
    times: tuple[list[float], list[float]] = [], []
    for _ in range(pairs):
        for which in random.sample((0, 1), 2):
            call = routed if which else bare
            began = time.perf_counter()
            await call(BODY, timeout=10)
            times[which].append(time.perf_counter() - began)
    return times


async def _async_rounds(bare: Callable[..., Any], routed: Callable[..., Any]) -> tuple[list[float], list[float]]:
    times: tuple[list[float], list[float]] = [], []
    for _ in range(ROUNDS):
        for which in random.sample((0, 1), 2):
            tasks = [_async_repeat(routed if which else bare) for _ in range(CONCURRENCY)]
            began = time.perf_counter()
            await asyncio.gather(*tasks)
            times[which].append((time.perf_counter() - began) / CALLS_PER_ROUND)
    return times


def _async_repeat(call: Callable[..., Any]) -> Coroutine[Any, Any, None]:
    async def repeat() -> None:
        for _ in range(CALLS_PER_ROUND // CONCURRENCY):
            await call(BODY, timeout=10)

    return repeat()


# ---------------------------------------------------------------------------------------------- memory


def idle_bytes() -> int:
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
    """A channel over `IDLE` endpoints, after one call that was refused."""
    endpoints = [Endpoint(f"gpu-{n}", f"grpc://127.0.0.1:{1 + n % 1000}") for n in range(IDLE)]
    found = channel(Router(StaticRegistry({"bench": endpoints}), attempts=1), "bench")
    call: Any = found.unary_unary(METHOD)
    with contextlib.suppress(grpc.RpcError):
        call(BODY, timeout=1)
    return found


if __name__ == "__main__":
    serve()
