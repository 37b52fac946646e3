"""The agent's half of `gpuroute bench ask`: a whole agent, beside an engine whose page of metrics is as long as vLLM's.

Agent and engine run in processes of their own, as they do on a GPU host, and the agent looks at its engine twice a second
while it is measured.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import random
import select
import socket
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuroute.agent.register import Rules
from gpuroute.agent.server import BUFFER, open_socket
from gpuroute.agent.service import Agent, Engine, Options
from gpuroute.core.asking import AskBody, encode_ask
from gpuroute.core.endpoint import Endpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

KEY = b"bench"
BATCH = 32
HASHES = 4
TURNS = 6
PAGE_BYTES = 54_000  # of vLLM 0.9 with one model, and of nearly as many lines


def measure_agent(seconds: float, rate: int) -> dict[str, float]:
    """Figures of one agent process over loopback, while it looks at its engine; and, in turns, how long a process takes
    that does nothing but answer."""
    times: dict[str, list[float]] = {"": [], "floor_": []}
    with process(engine) as (_, url), process(agent, url) as (pid, port), process(echo) as (_, bare):
        flood(port, 0.3)  # warm
        start = cpu_of(pid)
        answered, took = flood(port, seconds)
        busy = cpu_of(pid) - start
        for _ in range(TURNS):
            times[""] += paced(port, seconds / TURNS, rate)
            times["floor_"] += paced(bare, seconds / TURNS, rate)
        resident = resident_of(pid)
    quantiles = {"p50_ms": 0.5, "p99_ms": 0.99, "p999_ms": 0.999}
    return {
        "asks_per_s": round(answered / took),
        "asks_per_cpu_s": round(answered / max(busy, 0.01)),
        "rate": rate,
        **{f"{kind}{name}": at(share, found) for kind, found in times.items() for name, share in quantiles.items()},
        "agent_rss_mib": round(resident, 1),
    }


def at(share: float, times: list[float]) -> float:
    """What so many of them were within, in milliseconds."""
    return round(1e3 * sorted(times)[int(share * len(times))], 4)


@contextmanager
def process(target: Callable[..., None], *arguments: Any) -> Iterator[tuple[int, Any]]:
    """A process of this function, which gets a pipe and says by it when it is ready: its id, and what it said."""
    here, there = multiprocessing.Pipe()
    started = multiprocessing.get_context("spawn").Process(target=target, args=(there, *arguments), daemon=True)
    started.start()
    there.close()
    try:
        yield started.pid or 0, here.recv()
    finally:
        started.kill()
        started.join(5)


def agent(pipe: Connection, url: str) -> None:
    """An agent beside the engine there. Says its port."""
    options = Options(
        engines=[Engine(url=url, endpoint=Endpoint("gpu-0", url))],
        engine="vllm",
        keys=(KEY,),
        rate=1e9,
        rules=Rules(passes=0),
    )

    async def serve() -> None:
        await Agent(options, say=lambda line: pipe.send(int(str(line["agent"]).rpartition(":")[2]))).run()

    gc.freeze()  # as `gpuroute agent` does
    asyncio.run(serve())


def echo(pipe: Connection) -> None:
    """Who answers with the same at once. Says its port."""
    sock = open_socket("127.0.0.1", 0, authenticated=False)
    sock.setblocking(True)
    pipe.send(sock.getsockname()[1])
    while True:
        sock.sendto(*sock.recvfrom(512))


def engine(pipe: Connection) -> None:
    """What an agent asks of vLLM: health, a page of metrics, a letter to be tokenized. Says its URL."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, EOFError):
            head = await reader.readuntil(b"\r\n\r\n")
            body = page if b"/metrics" in head else b"{}"
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            await writer.drain()
        writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        pipe.send(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await server.serve_forever()

    page = _page()
    asyncio.run(serve())


def _page() -> bytes:
    """The counts that an agent reads, among a lot that it does not."""
    labels = 'engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"'
    read = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total")
    lines = [f"vllm:{name}{{{labels}}} 0.0" for name in read]
    size, number = 0, 0
    while size < PAGE_BYTES:
        number += 1
        lines.append(f'vllm:request_latency_{number // 20}_seconds_bucket{{{labels},le="{number % 20}"}} {number}.0')
        size += len(lines[-1]) + 1
    return "\n".join([*lines[4:], *lines[:4], ""]).encode()


def ask(number: int) -> bytes:
    """An ask with a key and hashes."""
    hashes = tuple(random.getrandbits(64) for _ in range(HASHES))
    return encode_ask(AskBody(4_000, hashes), number, int(time.time() * 1000), secret=KEY)


def flood(port: int, seconds: float) -> tuple[int, float]:
    """As many as it can: BATCH asks are always under way. Answers, and the seconds they took."""
    sock = _client(port)
    asks = [ask(number) for number in range(2_048)]
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


def paced(port: int, seconds: float, rate: int) -> list[float]:
    """Seconds from ask to answer at a steady rate; an answer that never came took infinitely long."""
    sock = _client(port)
    count = int(seconds * rate)
    asks = [ask(number) for number in range(count)]
    sent, times = [0.0] * count, [float("inf")] * count
    started, done, left = time.perf_counter(), 0, count
    while left and (now := time.perf_counter()) < started + seconds + 1.0:
        while done < count and started + done / rate <= now:
            sent[done] = time.perf_counter()
            sock.send(asks[done])
            done += 1
        if select.select([sock], [], [], 1 / rate)[0]:
            data = sock.recv(512)
            number = int.from_bytes(data[16:24], "big")
            times[number] = time.perf_counter() - sent[number]
            left -= 1
    sock.close()
    return times


def _client(port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)  # a pause of ours is no loss
    sock.connect(("127.0.0.1", port))
    sock.setblocking(False)
    return sock


def cpu_of(pid: int) -> float:
    """Seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def resident_of(pid: int) -> float:
    """MiB that a process holds."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 2**20
