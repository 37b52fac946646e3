"""What an agent does beside its answers never holds them up for long, counted in turns of its loop and not in seconds."""

from __future__ import annotations

import asyncio
import ssl
import threading
from typing import TYPE_CHECKING

import pytest
import trustme
import zmq
from agent.test_kv_events import message, stored

from gpuroute.agent import fetch as fetching
from gpuroute.agent.desk import Desk
from gpuroute.agent.fetch import Reply, fetch
from gpuroute.agent.kv_feed import END, Feed, Source
from gpuroute.agent.watch import Watch
from gpuroute.engines import metrics
from gpuroute.engines.catalog import engine_of
from gpuroute.engines.metrics import PIECE, read_metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    Work = Callable[[int], Coroutine[object, object, None]]

pytestmark = pytest.mark.real_time

REPLAYED = 300


class Turns:
    """Counts how often a loop came back to its other work, and what was done between two times at most."""

    def __init__(self, done: Callable[[], int]) -> None:
        self._done = done
        self._last = 0
        self.longest = 0

    async def count(self) -> None:
        self._last = self._done()
        while True:
            await asyncio.sleep(0)
            now = self._done()
            self.longest, self._last = max(self.longest, now - self._last), now

    def during(self, work: Coroutine[object, object, None]) -> None:
        async def main() -> None:
            counting = asyncio.ensure_future(self.count())
            await work
            counting.cancel()

        asyncio.run(main())


def served(body: bytes, context: ssl.SSLContext | None = None) -> Callable[[Work], Coroutine[object, object, None]]:
    """A server of that page, and what is done meanwhile with its port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        writer.close()

    async def run(work: Work) -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
        try:
            await work(server.sockets[0].getsockname()[1])
        finally:
            server.close()

    return run


def test_no_authorities_are_read_to_look_at_an_engine_over_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some hundred certificates took 10 to 30 ms of the loop, up to eight times a second."""
    context, replies = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), list[Reply]()
    trustme.CA().issue_cert("gpu-7.example").configure_cert(context)

    async def look(port: int) -> None:
        for _ in range(2):
            replies.append(await fetch(f"https://127.0.0.1:{port}", "/health", timeout=60.0))

    def read(*_: object, **__: object) -> None:
        raise AssertionError("authorities that nobody asks for")

    for name in ("load_default_certs", "set_default_verify_paths", "load_verify_locations"):
        monkeypatch.setattr(fetching.ssl.SSLContext, name, read)
    asyncio.run(served(b"fine", context)(look))
    assert [(reply.status, reply.body) for reply in replies] == [(200, b"fine")] * 2


def test_a_long_page_of_metrics_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an engine with many ranks or models: up to 8 MiB, which took 30 ms in a row."""
    lines = [f'vllm:num_requests_running{{engine="{n}",model_name="m"}} 1.0' for n in range(4 * PIECE // 40)]
    page, scanned = "\n".join(["# HELP x", *lines, ""]).encode(), []
    whole, scan = read_metrics(engine_of("vllm"), page), metrics.scan
    monkeypatch.setattr(metrics, "scan", lambda piece, names: scanned.append(len(piece)) or scan(piece, names))
    turns = Turns(lambda: sum(scanned))
    watch = Watch("", engine_of("vllm"), Desk("gpu-0"))

    async def look(port: int) -> None:
        watch.url = f"http://127.0.0.1:{port}"
        await watch.look()

    turns.during(served(page)(look))
    assert whole is not None
    assert watch.report == whole.report
    assert watch.report.running == len(lines)
    assert sum(scanned) == len(page)
    assert turns.longest <= PIECE


def test_events_are_followed_and_had_again_one_by_one(tmp_path: Path) -> None:
    """An engine replays its last 10,000 steps to an agent that comes later: a second without an answer."""
    feed = Feed(Source(events=f"ipc://{tmp_path}/kv", replay=f"ipc://{tmp_path}/replay"), Desk("gpu-0"))
    sent = [message(stored(number)) for number in range(REPLAYED)]
    stop, more = threading.Event(), threading.Event()

    def publish() -> None:
        with zmq.Context() as context, context.socket(zmq.XPUB) as events, context.socket(zmq.ROUTER) as replay:
            events.bind(feed.source.events)
            replay.bind(feed.source.replay)
            assert events.poll(60_000), "nobody subscribes"
            events.recv()
            events.send_multipart([b"", REPLAYED.to_bytes(8, "big"), message(stored(REPLAYED))])
            assert replay.poll(60_000), "nobody wants a replay"
            client = replay.recv_multipart()[0]
            for number, data in [*enumerate(sent), (END, b"")]:
                replay.send_multipart([client, b"", number.to_bytes(8, "big"), data])
            more.wait(60)
            for number in range(1, REPLAYED):
                events.send_multipart([b"", (REPLAYED + number).to_bytes(8, "big"), message(stored(REPLAYED + number))])
            stop.wait(60)

    async def follow() -> None:
        following = asyncio.ensure_future(feed.run())
        async with asyncio.timeout(60):
            while feed.batches < 2 * REPLAYED:
                if feed.batches > REPLAYED:
                    more.set()
                await asyncio.sleep(0)
        following.cancel()
        await asyncio.wait([following])

    publishing, turns = threading.Thread(target=publish), Turns(lambda: feed.batches)
    publishing.start()
    try:
        turns.during(follow())
    finally:
        more.set()
        stop.set()
        publishing.join()
    assert (feed.replayed, feed.lost) == (REPLAYED, 0)
    assert turns.longest <= 2
