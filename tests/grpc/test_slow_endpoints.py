"""Endpoints that are slow or silent: hedged unary calls, and what is given up because it hangs."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from world import Manner, Server, drained, in_flight, method, router_of, servers, soon, undisturbed

import gpuroute
import gpuroute.grpc
import gpuroute.grpc.aio

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.real_time

WARM_UP = 100  # what is usual is known after 20 calls; these outweigh the few real ones


@pytest.fixture
def two() -> Iterator[list[Server]]:
    with servers(2) as running:
        yield running


@pytest.fixture(params=["blocking", "future", "asyncio"])
def manner(request: pytest.FixtureRequest) -> Manner:
    return Manner(request.param)


def experienced(two: list[Server], *, floor: float = 1.5, **settings: Any) -> gpuroute.Router:
    """A router that knows both servers as quick (whatever this machine is), with a watchdog that barks after `floor`."""
    router = router_of(*(server.url for server in two), policy="round_robin", watchdog=True, **settings)
    router.ready()
    pool = router.pool("p")
    rules = replace(pool.rules.watchdog, first_floor_s=floor, gap_floor_s=floor)
    pool.rules = replace(pool.rules, watchdog=rules)
    with gpuroute.grpc.channel(router, "p") as channel:
        who = channel.unary_unary(method("Who"))
        assert {who(b"", timeout=30) for _ in range(4)} == {b"s0", b"s1"}
    for history in (pool.shared.history, *(state.history for state in pool.snapshot.states)):
        for kind in (history.whole, history.ttft, history.gap):
            for n in range(WARM_UP):
                kind.add(0.04 + 0.001 * (n % 5))
    pool.hedges.floor = 1e6  # any call may be hedged
    return router


# ------------------------------------------------------------------------------------------ hedging


def _hedges(router: gpuroute.Router) -> int:
    return router.snapshot().pools["p"].signals["hedges"]


def test_a_slow_unary_call_is_hedged(manner: Manner, two: list[Server]) -> None:
    router = experienced(two, hedge=True, floor=60.0)
    two[0].service.hang = True
    for _ in range(4):
        assert manner.call(router, "Who", b"", timeout=30) == b"s1"
    assert two[0].service.cancelled.wait(30), "the loser was left running"
    assert drained(router)
    signals = router.snapshot().pools["p"].signals
    assert signals["hedges"] >= 1
    assert {view.last_error for view in router.snapshot().pools["p"].endpoints} == {""}, "losing was held against it"


def test_hedging_is_off_unless_asked_for(manner: Manner, two: list[Server]) -> None:
    router = experienced(two, floor=60.0)
    received = sum(server.service.received for server in two)
    two[0].service.hang = two[1].service.hang = True
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(manner.call, router, "Who", b"", timeout=90)
        arrived = soon(lambda: sum(server.service.received for server in two) > received)
        time.sleep(0.4)  # ten times what is usual
        sent = sum(server.service.received for server in two) - received
        for server in two:
            server.service.release.set()
        assert (arrived, sent) == (True, 1)
        assert call.result() in {b"s0", b"s1"}


def test_a_call_may_ask_for_hedging(manner: Manner, two: list[Server]) -> None:
    router = experienced(two, floor=60.0)
    two[0].service.hang = True
    for _ in range(2):
        assert manner.call(router, "Who", b"", timeout=30, metadata=(("x-gpuroute-hedge", "true"),)) == b"s1"
    with gpuroute.grpc.options(hedge=True):
        for _ in range(2):
            assert manner.call(router, "Who", b"", timeout=30) == b"s1"


def test_a_failed_first_attempt_leaves_it_to_the_second(manner: Manner, two: list[Server]) -> None:
    """The slow attempt ends with an error while the hedge is still at work: the hedge decides."""
    router = experienced(two, hedge=True, floor=60.0)
    two[0].service.hang = two[1].service.hang = True
    two[0].service.released_code = grpc.StatusCode.INTERNAL
    answers: list[Any] = []

    def ask() -> None:
        answers.append(manner.call(router, "Who", b"", timeout=90))

    import threading

    thread = threading.Thread(target=ask)
    thread.start()
    assert soon(lambda: _hedges(router)), router.snapshot().pools["p"].signals
    two[0].service.release.set()
    assert soon(lambda: in_flight(router) == 1), "the first attempt's failure was not heard"
    two[1].service.release.set()
    thread.join()
    assert answers == [b"s1"]
    assert drained(router)


def test_cancelling_a_hedged_call_ends_both_attempts(two: list[Server]) -> None:
    router = experienced(two, hedge=True, floor=60.0)
    before = [server.service.received for server in two]
    two[0].service.hang = two[1].service.hang = True
    with gpuroute.grpc.channel(router, "p") as channel:
        call = channel.unary_unary(method("Who")).future(b"", timeout=90)
        both = [count + 1 for count in before]
        assert soon(lambda: [server.service.received for server in two] == both), router.snapshot().pools["p"].signals
        assert call.cancel()
        assert all(server.service.cancelled.wait(30) for server in two)
    assert drained(router)


# ------------------------------------------------------------------------------------------ hanging


def test_a_hung_unary_call_goes_elsewhere(manner: Manner, two: list[Server]) -> None:

    def it_does() -> bool:
        two[0].service.hang = False
        router = experienced(two)
        two[0].service.hang = True
        answers = [manner.call(router, "Who", b"", timeout=15) for _ in range(2)]  # it is not waited for until then
        assert drained(router)
        return answers == [b"s1"] * 2 and router.snapshot().pools["p"].signals["stalls"] >= 1

    assert undisturbed(it_does)


@pytest.mark.parametrize("name", ["blocking", "asyncio"])
def test_a_stream_that_does_not_begin_goes_elsewhere(name: str, two: list[Server]) -> None:

    def it_does() -> bool:
        two[0].service.hang = False
        router = experienced(two)
        two[0].service.hang = True
        streams = [Manner(name).stream(router, "Count", b"3", timeout=60) for _ in range(2)]
        assert drained(router)
        return streams == [([b"0", b"1", b"2"], None)] * 2 and router.snapshot().pools["p"].signals["stalls"] >= 1

    assert undisturbed(it_does)


@pytest.mark.parametrize("name", ["blocking", "asyncio"])
def test_a_stream_that_falls_silent_is_cut(name: str, two: list[Server]) -> None:
    found: list[tuple[Any, ...]] = []

    def it_begins() -> bool:
        """Before the watchdog barks, which is a matter of the machine."""
        router = experienced(two)
        received = sum(server.service.received for server in two)
        messages, error = Manner(name).stream(router, "Count", b"2 wait", timeout=60)
        received = sum(server.service.received for server in two) - received
        assert drained(router)
        found[:] = [(router, error, received)]
        return messages == [b"0", b"1"]

    assert undisturbed(it_begins)
    ((router, error, received),) = found
    assert isinstance(error, gpuroute.StreamStalled), "it was waited for until the deadline"
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "after 2 messages" in error.details()
    assert error.endpoint in {view.id for view in router.snapshot().pools["p"].endpoints}
    assert received == 1, "it was replayed"


def test_a_slow_reader_is_no_silence(two: list[Server]) -> None:
    def it_is_whole() -> bool:
        found = []
        with gpuroute.grpc.channel(experienced(two), "p") as channel:
            for message in channel.unary_stream(method("Count"))(b"3"):
                found.append(message)
                if len(found) == 1:
                    time.sleep(2.0)
        return found == [b"0", b"1", b"2"]

    assert undisturbed(it_is_whole)


def test_a_slow_reader_is_no_silence_in_asyncio(two: list[Server]) -> None:
    async def run() -> list[bytes]:
        found = []
        async with gpuroute.grpc.aio.channel(experienced(two), "p") as channel:
            async for message in channel.unary_stream(method("Count"))(b"3"):
                found.append(message)
                if len(found) == 1:
                    await asyncio.sleep(2.0)
        return found

    assert undisturbed(lambda: asyncio.run(run()) == [b"0", b"1", b"2"])


def test_a_reader_that_is_cancelled_is_cancelled(two: list[Server]) -> None:
    """Not to be mistaken for the watchdog's own cancellation."""
    router = experienced(two, floor=60.0)

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
