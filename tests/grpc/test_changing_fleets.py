"""What endpoints cost that nobody calls, and a fleet that changes under calls of every kind."""

from __future__ import annotations

import asyncio
import gc
import threading
import tracemalloc
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from world import PATIENT, Endpoint, Server, drained, method, router_of, servers, soon

import gpuroute
import gpuroute.grpc
import gpuroute.grpc.aio
from gpuroute.testing import FakeRegistry

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.real_time

MANY = 1_000
MOST_BYTES = 5_000


def test_an_endpoint_that_is_not_called_costs_less_than_five_kilobytes() -> None:
    endpoints = [Endpoint(f"gpu-{n}", f"grpc://10.0.{n // 250}.{n % 250}:8001") for n in range(MANY)]
    with gpuroute.Router(FakeRegistry({"p": endpoints[:1]})) as first, gpuroute.grpc.channel(first, "p") as channel:
        channel._hub.look()  # what is loaded once is loaded
    gc.collect()
    tracemalloc.start()
    try:
        with gpuroute.Router(FakeRegistry({"p": endpoints})) as router, gpuroute.grpc.channel(router, "p") as channel:
            channel._hub.look()
            gc.collect()
            each = tracemalloc.get_traced_memory()[0] / MANY
            assert len(router.pool("p").snapshot.states) == MANY
            assert not list(channel._peers)
    finally:
        tracemalloc.stop()
    assert each < MOST_BYTES


ROUNDS = 15
SYNC: list[Callable[[Any], Any]] = [
    lambda channel: channel.unary_unary(method("Echo"))(b"x"),
    lambda channel: channel.unary_unary(method("Echo")).future(b"x").result(),
    lambda channel: next(channel.unary_stream(method("Count"))(b"20")),  # and dropped
    lambda channel: channel.stream_unary(method("Collect"))(iter([b"x"] * 3)),
    lambda channel: b"".join(channel.stream_stream(method("Chat"))(iter([b"x"] * 3))),
]


async def first(call: Any) -> bytes:
    async for message in call:
        return message  # type: ignore[no-any-return]
    return b""


async def joined(call: Any) -> bytes:
    return b"".join([message async for message in call])


AIO: list[Callable[[Any], Any]] = [
    lambda channel: channel.unary_unary(method("Echo"))(b"x"),
    lambda channel: first(channel.unary_stream(method("Count"))(b"20")),
    lambda channel: channel.stream_unary(method("Collect"))([b"x"] * 3),
    lambda channel: joined(channel.stream_stream(method("Chat"))([b"x"] * 3)),
]


def test_a_fleet_that_changes_under_calls_costs_none_and_leaves_nothing() -> None:
    """Endpoints leave and come back while calls of all kinds run on them, in threads and in loops."""
    with servers(3) as running:
        registry = FakeRegistry({"p": [server.url for server in running]})
        router = gpuroute.Router(registry, **PATIENT)
        channel, there = gpuroute.grpc.channel(router, "p"), gpuroute.grpc.aio.channel(router, "p")
        answers: list[bytes] = []
        over = threading.Event()

        def call() -> None:
            for _ in range(ROUNDS):
                answers.extend(one(channel) for one in SYNC)

        async def call_there() -> None:
            for _ in range(ROUNDS):
                answers.extend(await asyncio.gather(*(one(there) for one in AIO)))

        def change() -> None:
            turn = 0
            while not over.wait(0.01):
                turn += 1
                staying: list[Server] = [running[turn % 3], *running[: turn % 2]]
                registry.set({"p": [server.url for server in staying]})

        threads = [threading.Thread(target=call) for _ in range(2)]
        threads += [threading.Thread(target=lambda: asyncio.run(call_there())) for _ in range(2)]
        changing = threading.Thread(target=change)
        for thread in (*threads, changing):
            thread.start()
        for thread in threads:
            thread.join()
        over.set()
        changing.join()
        assert len(answers) == 2 * ROUNDS * (len(SYNC) + len(AIO))
        assert all(answers)
        gc.collect()
        assert drained(router)
        assert soon(lambda: not [token for peer in channel._peers for token in peer.live])
        channel.close()
        router.close()


def test_a_loop_that_has_ended_leaves_its_connections_to_nobody() -> None:
    with servers(1) as (server,):
        channel = gpuroute.grpc.aio.channel(router_of(server.url), "p")

        async def call() -> bytes:
            return await channel.unary_unary(method("Who"))(b"")  # type: ignore[no-any-return]

        for _ in range(5):
            assert asyncio.run(call()) == b"s0"
        assert len(channel.by_loop) == 1, "loops that are closed are still remembered"
        with suppress(RuntimeError):
            asyncio.run(channel.close())
