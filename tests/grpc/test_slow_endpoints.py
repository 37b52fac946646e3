"""Endpoints that are slow or silent: hedged unary calls, and what is given up because it hangs."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from world import Manner, Server, drained, method, router_of, servers

import gpuroute
import gpuroute.grpc
import gpuroute.grpc.aio

if TYPE_CHECKING:
    from collections.abc import Iterator

WARM_UP = 40  # of each kind: what is usual is known after 20, and 5 % of all calls may be hedged


@pytest.fixture
def two() -> Iterator[list[Server]]:
    with servers(2) as running:
        yield running


@pytest.fixture(params=["blocking", "future", "asyncio"])
def manner(request: pytest.FixtureRequest) -> Manner:
    return Manner(request.param)


def experienced(
    two: list[Server], *, first_floor: float = 0.3, gap_floor: float = 0.3, **settings: Any
) -> gpuroute.Router:
    """A router that knows how quick both servers are, with a watchdog that is quick to bark."""
    router = router_of(*(server.url for server in two), policy="round_robin", **settings)
    router.ready()
    pool = router.pool("p")
    rules = replace(pool.rules.watchdog, first_floor_s=first_floor, gap_floor_s=gap_floor)
    pool.rules = replace(pool.rules, watchdog=rules)
    with gpuroute.grpc.channel(router, "p") as channel:
        who, count = channel.unary_unary(method("Who")), channel.unary_stream(method("Count"))
        for _ in range(WARM_UP):
            who(b"", timeout=5)
            list(count(b"3", timeout=5))
    return router


# ------------------------------------------------------------------------------------------ hedging


def test_a_slow_unary_call_is_hedged(manner: Manner, two: list[Server]) -> None:
    router = experienced(two, hedge=True, gap_floor=5.0)
    two[0].service.hang = True
    began = time.monotonic()
    for _ in range(4):
        assert manner.call(router, "Who", b"", timeout=10) == b"s1"
    assert time.monotonic() - began < 4
    assert two[0].service.cancelled.wait(5), "the loser was left running"
    assert drained(router)
    signals = router.snapshot().pools["p"].signals
    assert signals["hedges"] >= 1
    assert {view.last_error for view in router.snapshot().pools["p"].endpoints} == {""}, "losing was held against it"


def test_hedging_is_off_unless_asked_for(manner: Manner, two: list[Server]) -> None:
    router = experienced(two, gap_floor=5.0)
    received = sum(server.service.received for server in two)
    two[0].service.hang = two[1].service.hang = True
    with pytest.raises(grpc.RpcError) as error:
        manner.call(router, "Who", b"", timeout=0.4)
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert sum(server.service.received for server in two) == received + 1


def test_a_call_may_ask_for_hedging(manner: Manner, two: list[Server]) -> None:
    router = experienced(two, gap_floor=5.0)
    two[0].service.hang = True
    for _ in range(2):
        assert manner.call(router, "Who", b"", timeout=10, metadata=(("x-gpuroute-hedge", "true"),)) == b"s1"
    with gpuroute.grpc.options(hedge=True):
        for _ in range(2):
            assert manner.call(router, "Who", b"", timeout=10) == b"s1"


def test_a_failed_first_attempt_leaves_it_to_the_second(manner: Manner, two: list[Server]) -> None:
    """The slow attempt ends with an error while the hedge is still at work: the hedge decides."""
    router = experienced(two, hedge=True, gap_floor=5.0)
    two[0].service.hang = two[1].service.hang = True
    two[0].service.released_code = grpc.StatusCode.INTERNAL
    answers: list[Any] = []

    def ask() -> None:
        answers.append(manner.call(router, "Who", b"", timeout=10))

    import threading

    thread = threading.Thread(target=ask)
    thread.start()
    until = time.monotonic() + 5
    while router.snapshot().pools["p"].signals["hedges"] < 1 and time.monotonic() < until:
        time.sleep(0.01)
    two[0].service.release.set()
    time.sleep(0.2)
    two[1].service.release.set()
    thread.join()
    assert answers == [b"s1"]
    assert drained(router)


def test_cancelling_a_hedged_call_ends_both_attempts(two: list[Server]) -> None:
    router = experienced(two, hedge=True, gap_floor=5.0)
    two[0].service.hang = two[1].service.hang = True
    with gpuroute.grpc.channel(router, "p") as channel:
        call = channel.unary_unary(method("Who")).future(b"", timeout=20)
        until = time.monotonic() + 5
        while router.snapshot().pools["p"].signals["hedges"] < 1 and time.monotonic() < until:
            time.sleep(0.01)
        assert call.cancel()
        assert all(server.service.cancelled.wait(5) for server in two)
    assert drained(router)


# ------------------------------------------------------------------------------------------ hanging


def test_a_hung_unary_call_goes_elsewhere(manner: Manner, two: list[Server]) -> None:
    router = experienced(two)
    two[0].service.hang = True
    began = time.monotonic()
    for _ in range(2):
        assert manner.call(router, "Who", b"", timeout=20) == b"s1"
    assert time.monotonic() - began < 8
    assert router.snapshot().pools["p"].signals["stalls"] >= 1
    assert drained(router)


@pytest.mark.parametrize("name", ["blocking", "asyncio"])
def test_a_stream_that_does_not_begin_goes_elsewhere(name: str, two: list[Server]) -> None:
    router = experienced(two)
    two[0].service.hang = True
    began = time.monotonic()
    for _ in range(2):
        assert Manner(name).stream(router, "Count", b"3") == ([b"0", b"1", b"2"], None)
    assert time.monotonic() - began < 8
    assert router.snapshot().pools["p"].signals["stalls"] >= 1
    assert drained(router)


@pytest.mark.parametrize("name", ["blocking", "asyncio"])
def test_a_stream_that_falls_silent_is_cut(name: str, two: list[Server]) -> None:
    router = experienced(two)
    received = sum(server.service.received for server in two)
    began = time.monotonic()
    messages, error = Manner(name).stream(router, "Count", b"2 wait")
    assert time.monotonic() - began < 8
    assert messages == [b"0", b"1"]
    assert isinstance(error, gpuroute.StreamStalled)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "after 2 messages" in error.details()
    assert error.endpoint in {view.id for view in router.snapshot().pools["p"].endpoints}
    assert sum(server.service.received for server in two) == received + 1, "it was replayed"
    assert drained(router)


def test_a_slow_reader_is_no_silence(two: list[Server]) -> None:
    router = experienced(two)
    with gpuroute.grpc.channel(router, "p") as channel:
        call = channel.unary_stream(method("Count"))(b"3")
        found = []
        for message in call:
            found.append(message)
            time.sleep(0.5)
    assert found == [b"0", b"1", b"2"]


def test_a_slow_reader_is_no_silence_in_asyncio(two: list[Server]) -> None:
    router = experienced(two)

    async def run() -> list[bytes]:
        found = []
        async with gpuroute.grpc.aio.channel(router, "p") as channel:
            async for message in channel.unary_stream(method("Count"))(b"3"):
                found.append(message)
                await asyncio.sleep(0.5)
        return found

    assert asyncio.run(run()) == [b"0", b"1", b"2"]


def test_a_reader_that_is_cancelled_is_cancelled(two: list[Server]) -> None:
    """Not to be mistaken for the watchdog's own cancellation."""
    router = experienced(two, first_floor=5.0, gap_floor=5.0)

    async def run() -> bool:
        async with gpuroute.grpc.aio.channel(router, "p") as channel:

            async def read() -> None:
                async for _ in channel.unary_stream(method("Count"))(b"1 wait"):
                    pass

            task = asyncio.create_task(read())
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return await asyncio.to_thread(drained, router)

    assert asyncio.run(run())
