"""`gpuroute bench overhead`: what a routed call costs beside the same call by the bare client (gRPC: `bench_grpc`).

The server runs in a process of its own. At concurrency 1, bare and routed calls take turns in random order, call by
call: on a shared machine, a block of one after a block of the other is off by 100 us. The A/A rows, bare against bare,
tell how much of a difference is noise. At concurrency 64 short rounds take turns. The TLS row has so many endpoints that
most calls find no connection, which is the bare client's fate too.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import random
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gpuroute.config import Settings
from gpuroute.core.endpoint import Endpoint, Tls
from gpuroute.registry.static import StaticRegistry
from gpuroute.router import Router

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

CLIENTS = ("httpx2", "httpx2-sync", "httpx", "httpx-sync")
GRPC_CLIENTS = ("grpc", "grpc-aio")
ENDPOINTS = 8
COLD_ENDPOINTS = 1_000
CONCURRENCY = 64
ROUNDS = 6
CALLS_PER_ROUND = 192
BODY = b'{"model":"bench","messages":[{"role":"user","content":"' + b"x" * 967 + b'"}]}'
PATH = "/v1/chat/completions"
NAME = "bench.gpuroute.test"
POOL = "bench"


class Target(NamedTuple):
    """What is called: the URLs for the bare client, the endpoints for ours, and the TLS context of both."""

    urls: list[str]
    endpoints: list[Endpoint]
    context: ssl.SSLContext | None = None


class Tally:
    """Seconds of the calls that succeeded, and the number of those that did not."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.errors = 0

    def note(self, seconds: float, error: Exception | None) -> None:
        """Count one call."""
        if error is None:
            self.seconds.append(seconds)
        else:
            self.errors += 1


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare `bench overhead`."""
    parser = kinds.add_parser("overhead", help="a routed call beside a bare one")
    parser.add_argument(
        "--client", action="append", choices=CLIENTS + GRPC_CLIENTS, help="only this one (may be repeated)"
    )
    parser.add_argument("--pairs", type=int, default=1_500, help="pairs at concurrency 1 (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON alone")


def run(args: argparse.Namespace) -> int:
    """Measure and print; 1 if a call failed."""
    rows = [row for client in args.client or CLIENTS if client in CLIENTS for row in measure(client, args.pairs)]
    if not args.client or set(args.client) & set(GRPC_CLIENTS):
        rows += importlib.import_module("gpuroute.cli.bench_grpc").add_rows(args)
    if args.json:
        print(json.dumps(rows))
    else:
        print_rows(rows)
    return 1 if any(row["errors"] for row in rows) else 0


def print_rows(rows: list[dict[str, Any]]) -> None:
    """The rows, for people."""
    widths = {name: max(18, len(name) + 2) for name in rows[0]}
    print("".join(f"{name:>{width}}" for name, width in widths.items()))
    for row in rows:
        said = {name: f"{row[name]:,.4g}" if isinstance(row[name], float) else row[name] for name in widths}
        print("".join(f"{said[name]:>{width}}" for name, width in widths.items()))


def measure(client: str, pairs: int) -> list[dict[str, Any]]:
    """The rows of one client."""
    with plain_fleet() as target:
        alone = Target(target.urls[:1], target.endpoints[:1])
        rows = [
            with_runner(client, alone, lambda bench: bench.turns(pairs, ("bare", "bare"), f"{client} A/A")),
            with_runner(client, alone, lambda bench: bench.turns(pairs, ("bare", "routed"), client)),
            with_runner(client, target, lambda bench: bench.turns(pairs, ("bare", "routed"), client)),
            with_runner(client, target, lambda bench: bench.rounds(client)),
        ]
    with cold_fleet() as cold:
        if cold is not None:
            count = max(20, pairs // 5)
            rows.append(with_runner(client, cold, lambda bench: bench.turns(count, ("bare", "routed"), client)))
    return rows


# ---------------------------------------------------------------------------------------------- the client


class Bench:
    """Both clients of one kind over one fleet."""

    _turns: Callable[..., Any]
    _rounds: Callable[..., Any]

    def __init__(self, kind: str, target: Target, runner: asyncio.Runner | None) -> None:
        name = kind.removesuffix("-sync")
        library, ours = importlib.import_module(name), importlib.import_module(f"gpuroute.{name}")
        settings = Settings(policy="p2c")
        self.router = Router(StaticRegistry({POOL: target.endpoints}), settings=settings)
        self.router.ready()
        self._runner = runner
        self._target = target
        verify = {"verify": target.context} if target.context is not None else {}
        client = "AsyncClient" if runner is not None else "Client"
        self._clients: dict[str, Any] = {
            "bare": getattr(library, client)(**verify),
            "routed": getattr(ours, client)(self.router, **verify),
        }
        self._extensions = {"sni_hostname": NAME} if target.context is not None else {}
        self._turn = 0

    def turns(self, pairs: int, names: tuple[str, str], label: str) -> dict[str, Any]:
        """Call by call in random order."""
        tallies = (Tally(), Tally())
        self._run(self._turns, min(50, pairs), names, (Tally(), Tally()))
        self._run(self._turns, pairs, names, tallies)
        return self._row(label, 1, *tallies)

    def rounds(self, label: str) -> dict[str, Any]:
        """Rounds of concurrent calls in random order."""
        tallies = {"bare": Tally(), "routed": Tally()}
        self._run(self._rounds, 1, {"bare": Tally(), "routed": Tally()})
        self._run(self._rounds, ROUNDS, tallies)
        return self._row(label, CONCURRENCY, tallies["bare"], tallies["routed"])

    def close(self) -> None:
        """Close the clients."""
        for client in self._clients.values():
            self._run(client.aclose if self._runner is not None else client.close)
        self.router.close()

    def _run(self, work: Callable[..., Any], *args: Any) -> Any:
        if self._runner is None:
            return work(*args)
        return self._runner.run(work(*args))

    def _row(self, label: str, concurrency: int, bare: Tally, routed: Tally) -> dict[str, Any]:
        bare_us, routed_us = (statistics.median(tally.seconds or [0.0]) * 1e6 for tally in (bare, routed))
        return {
            "client": label,
            "concurrency": concurrency,
            "endpoints": len(self._target.endpoints),
            "bare_us": round(bare_us, 1),
            "routed_us": round(routed_us, 1),
            "added_us": round(routed_us - bare_us, 1),
            "added_share": share(routed_us - bare_us, bare_us),
            "throughput_ratio": round(bare_us / routed_us if routed_us else 0.0, 3),
            "errors": bare.errors + routed.errors,
        }

    def _post(self, name: str) -> Any:
        """Begin a call: bare calls go over all endpoints in turn, as a client with a list of URLs does."""
        url = f"http://{POOL}{PATH}"
        if name == "bare":
            self._turn += 1
            url = self._target.urls[self._turn % len(self._target.urls)]
        return self._clients[name].post(url, content=BODY, extensions=self._extensions)


class SyncBench(Bench):
    """By threads."""

    def _turns(self, pairs: int, names: tuple[str, str], tallies: tuple[Tally, Tally]) -> None:
        for _ in range(pairs):
            for which in random.sample((0, 1), 2):
                tallies[which].note(*self._call(names[which]))

    def _rounds(self, rounds: int, tallies: dict[str, Tally]) -> None:
        with ThreadPoolExecutor(CONCURRENCY) as threads:
            for _ in range(rounds):
                for name in random.sample(sorted(tallies), 2):
                    began = time.perf_counter()
                    ends = list(threads.map(self._call, [name] * CALLS_PER_ROUND))
                    note_round(tallies[name], time.perf_counter() - began, ends)

    def _call(self, name: str) -> tuple[float, Exception | None]:
        began = time.perf_counter()
        try:
            self._post(name).raise_for_status()
        except Exception as error:
            return 0.0, error
        return time.perf_counter() - began, None


class AsyncBench(Bench):
    """By tasks."""

    async def _turns(self, pairs: int, names: tuple[str, str], tallies: tuple[Tally, Tally]) -> None:
        for _ in range(pairs):
            for which in random.sample((0, 1), 2):
                tallies[which].note(*await self._call(names[which]))

    async def _rounds(self, rounds: int, tallies: dict[str, Tally]) -> None:
        for _ in range(rounds):
            for name in random.sample(sorted(tallies), 2):
                began = time.perf_counter()
                per_task = CALLS_PER_ROUND // CONCURRENCY
                groups = await asyncio.gather(*(self._some(name, per_task) for _ in range(CONCURRENCY)))
                note_round(tallies[name], time.perf_counter() - began, [end for group in groups for end in group])

    async def _some(self, name: str, count: int) -> list[tuple[float, Exception | None]]:
        return [await self._call(name) for _ in range(count)]

    async def _call(self, name: str) -> tuple[float, Exception | None]:
        began = time.perf_counter()
        try:
            (await self._post(name)).raise_for_status()
        except Exception as error:
            return 0.0, error
        return time.perf_counter() - began, None


def share(added: float, bare: float) -> float:
    """What is added as a share of the bare call, which tells more than microseconds: on a slow machine both are more."""
    return round(added / bare, 3) if bare else 0.0


def note_round(tally: Tally, seconds: float, ends: list[tuple[float, Exception | None]]) -> None:
    """One round: its time per call, as throughput has it."""
    failed = [error for _, error in ends if error is not None]
    tally.errors += len(failed)
    tally.seconds.append(seconds / max(1, len(ends) - len(failed)))


def with_runner(kind: str, target: Target, work: Callable[[Bench], dict[str, Any]]) -> dict[str, Any]:
    """Run `work` with fresh clients."""
    with contextlib.ExitStack() as stack:
        runner = None if kind.endswith("-sync") else stack.enter_context(asyncio.Runner())
        bench = (SyncBench if runner is None else AsyncBench)(kind, target, runner)
        stack.callback(bench.close)
        return work(bench)


# ---------------------------------------------------------------------------------------------- the servers


@contextlib.contextmanager
def plain_fleet() -> Iterator[Target]:
    """A few endpoints: ports of one server process."""
    with server(["127.0.0.1"] * ENDPOINTS) as ports:
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        yield Target([url + PATH for url in urls], [Endpoint(f"e{n}", url) for n, url in enumerate(urls)])


@contextlib.contextmanager
def cold_fleet() -> Iterator[Target | None]:
    """Very many TLS endpoints: loopback addresses of one server process. None where that cannot be had."""
    with tempfile.TemporaryDirectory() as folder:
        context = certificate(Path(folder))
        if context is None or not sys.platform.startswith("linux"):
            print("the TLS row needs Linux and the package trustme: left out", file=sys.stderr)
            yield None
            return
        with server(["0.0.0.0"], folder) as (port,):
            hosts = [f"127.0.{n // 250 + 1}.{n % 250 + 1}" for n in range(COLD_ENDPOINTS)]
            urls = [f"https://{host}:{port}" for host in hosts]
            tls = Tls(server_name=NAME)
            endpoints = [Endpoint(f"e{n}", url, tls=tls) for n, url in enumerate(urls)]
            bare = [url + PATH for url in urls]
            random.shuffle(bare)
            yield Target(bare, endpoints, context)


def certificate(folder: Path) -> ssl.SSLContext | None:
    """Write the server's certificate and return the client's context, if that can be done here."""
    try:
        import trustme
    except ImportError:
        return None
    authority = trustme.CA()
    authority.issue_cert(NAME).private_key_and_cert_chain_pem.write_to_path(folder / "server.pem")
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


@contextlib.contextmanager
def server(hosts: list[str], folder: str = "") -> Iterator[list[int]]:
    """A server process listening once for each host; yields the ports. It ends when its standard input does."""
    command = [sys.executable, "-m", __name__, ",".join(hosts), folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield [int(port) for port in process.stdout.readline().split()]
        finally:
            process.stdin.close()
            process.wait(10)


class Answering(asyncio.Protocol):
    """The least that is an HTTP server: every request gets the same small answer."""

    ANSWER = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 11\r\n\r\n{"ok":true}'

    def __init__(self) -> None:
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client connected."""
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        """Answer what is complete."""
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            _, _, length = head.partition(b"content-length:")
            size = end + 4 + int(length.partition(b"\r\n")[0] or 0)
            if len(self._buffer) < size:
                return
            self._buffer = self._buffer[size:]
            self._transport.write(self.ANSWER)


async def serve(hosts: list[str], folder: str) -> None:
    """Listen, say where, and stay until standard input ends."""
    loop = asyncio.get_running_loop()
    context = None
    if folder:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(Path(folder) / "server.pem")
    servers = [await loop.create_server(Answering, host, 0, ssl=context, backlog=1024) for host in hosts]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1].split(","), sys.argv[2]))
