"""Calls that are between two attempts, or before the first: who cancels or closes then finds what a plain call has."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from queue import Queue
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from world import PATIENCE_S, PATIENT, Server, drained, method, refused_url, router_of, servers, soon

import gpuroute
import gpuroute.grpc
import gpuroute.grpc.aio
from gpuroute.testing import FakeRegistry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.real_time

CODE = grpc.StatusCode
LONGER = (("grpc-retry-pushback-ms", "60000"),)
"""A pause that no test waits for: who is not let go of before it ends fails by its own patience."""


@contextmanager
def paused() -> Iterator[tuple[Server, gpuroute.Router]]:
    """A server that asks its first caller for a minute's pause, and a router that knows nobody else."""
    server = Server("s0")
    server.service.fail_next, server.service.trailing = [CODE.UNAVAILABLE], LONGER
    router = router_of(server.url)
    try:
        yield server, router
    finally:
        server.stop()
        router.close()


def asked_to_wait(server: Server, router: gpuroute.Router) -> bool:
    return soon(lambda: server.service.received == 1 and drained(router))


class Nothing:
    """A registry that never tells of any fleet."""

    name = "nothing"

    def subscribe(self, on_change: object) -> Nothing:
        return self

    error = None

    def close(self) -> None:
        pass

    def age(self, now: float) -> None:
        pass


# ------------------------------------------------------------------------------------------ closing the channel

SYNC = {
    "blocking": lambda channel: channel.unary_unary(method("Echo"))(b"x"),
    "future": lambda channel: channel.unary_unary(method("Echo")).future(b"x").result(timeout=2 * PATIENCE_S),
    "stream": lambda channel: list(channel.unary_stream(method("Count"))(b"1")),
}


@pytest.mark.parametrize("kind", SYNC)
def test_closing_the_channel_ends_a_call_that_waits_for_its_next_attempt(kind: str) -> None:
    with paused() as (server, router):
        channel = gpuroute.grpc.channel(router, "p")
        ends: Queue[Any] = Queue()

        def run() -> None:
            try:
                ends.put(SYNC[kind](channel))
            except grpc.RpcError as error:
                ends.put(error)

        threading.Thread(target=run, daemon=True).start()
        assert asked_to_wait(server, router)
        channel.close()
        end = ends.get(timeout=PATIENCE_S)
        assert end.code() is CODE.CANCELLED
        assert end.details() == "Channel closed!"
        assert server.service.received == 1, "it was sent once more by a closed channel"
        assert not list(channel._peers), "a closed channel opened a connection"


AIO = {
    "unary": lambda channel: channel.unary_unary(method("Echo"))(b"x"),
    "stream": lambda channel: channel.unary_stream(method("Count"))(b"1"),
}


async def use(call: Any) -> Any:
    """Wait for the first thing that a call gives."""
    return await (call.read() if hasattr(call, "read") else call)


async def iterate(call: Any) -> Any:
    return [message async for message in call]


@pytest.mark.parametrize("kind", AIO)
def test_closing_an_asyncio_channel_does_too(kind: str) -> None:
    async def run(server: Server, router: gpuroute.Router) -> Any:
        channel = gpuroute.grpc.aio.channel(router, "p")
        call = AIO[kind](channel)
        using = asyncio.create_task(use(call))
        assert await asyncio.to_thread(asked_to_wait, server, router)
        await channel.close()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(using, PATIENCE_S)
        return await call.code(), call.done(), [peer for peers in channel.by_loop.values() for peer in peers]

    with paused() as (server, router):
        assert asyncio.run(run(server, router)) == (CODE.CANCELLED, True, [])
        assert server.service.received == 1


def test_closing_ends_the_calls_of_other_loops_too() -> None:
    server = Server("s0")
    router = router_of(server.url)
    channel = gpuroute.grpc.aio.channel(router, "p")
    ends: Queue[Any] = Queue()

    async def called() -> None:
        call = channel.unary_stream(method("Count"))(b"1 wait")
        assert await call.read() == b"0"
        ends.put("begun")
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(call.read(), 2 * PATIENCE_S)
        ends.put(await call.code())

    try:
        elsewhere = threading.Thread(target=asyncio.run, args=(called(),), daemon=True)
        elsewhere.start()
        assert ends.get(timeout=PATIENCE_S) == "begun"
        asyncio.run(channel.close())
        assert ends.get(timeout=PATIENCE_S) is CODE.CANCELLED
        elsewhere.join(PATIENCE_S)
        assert drained(router)
    finally:
        server.stop()


def test_closing_ends_a_stream_whose_endpoint_has_left_the_registry() -> None:
    registry = FakeRegistry()

    async def run(channel: Any) -> Any:
        call = channel.unary_stream(method("Count"))(b"1 wait")
        assert await call.read() == b"0"
        registry.set({"p": [staying.url]})
        assert await channel.unary_unary(method("Who"))(b"") == b"s1"
        reading = asyncio.create_task(call.read())
        async with grpc.aio.insecure_channel(staying.target) as plain:  # grpcio before 1.83 looks at all tasks
            assert await plain.unary_unary(method("Who"))(b"") == b"s1"
        assert not reading.done()
        await channel.close()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(reading, PATIENCE_S)
        return await call.code()

    with servers(2) as (leaving, staying):
        registry.set({"p": [leaving.url]})
        with gpuroute.Router(registry, **PATIENT) as router:
            assert asyncio.run(run(gpuroute.grpc.aio.channel(router, "p"))) is CODE.CANCELLED


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_closing_ends_a_call_whose_endpoint_has_left_the_registry(kind: str) -> None:
    registry, slow, who = FakeRegistry(), method("Slow"), method("Who")

    def leave(leaving: Server, staying: Server) -> None:
        assert soon(lambda: leaving.service.received == 1)
        registry.set({"p": [staying.url]})

    def run(router: gpuroute.Router, leaving: Server, staying: Server) -> grpc.StatusCode:
        with gpuroute.grpc.channel(router, "p") as channel:
            call = channel.unary_unary(slow).future(b"")
            leave(leaving, staying)
            assert channel.unary_unary(who)(b"") == b"s1"
            assert not call.done()
        return call.exception(timeout=PATIENCE_S).code()

    async def run_there(router: gpuroute.Router, leaving: Server, staying: Server) -> grpc.StatusCode:
        async with gpuroute.grpc.aio.channel(router, "p") as channel:
            call = asyncio.ensure_future(use(channel.unary_unary(slow)(b"")))
            await asyncio.to_thread(leave, leaving, staying)
            assert await channel.unary_unary(who)(b"") == b"s1"
            assert not call.done()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(call, PATIENCE_S)
        return CODE.CANCELLED

    with servers(2) as (leaving, staying):
        registry.set({"p": [leaving.url]})
        with gpuroute.Router(registry, **PATIENT) as router:
            its = (router, leaving, staying)
            assert (run(*its) if kind == "blocking" else asyncio.run(run_there(*its))) is CODE.CANCELLED


# ------------------------------------------------------------------------------------------ cancelling, in asyncio


@pytest.mark.parametrize(("kind", "how"), [("unary", use), ("stream", use), ("stream", iterate)])
def test_a_task_that_is_cancelled_there_cancels_its_call(kind: str, how: Callable[[Any], Any]) -> None:
    async def run(server: Server, router: gpuroute.Router) -> Any:
        async with gpuroute.grpc.aio.channel(router, "p") as channel:
            call = AIO[kind](channel)
            using = asyncio.create_task(how(call))
            assert await asyncio.to_thread(asked_to_wait, server, router)
            using.cancel()
            with pytest.raises(asyncio.CancelledError):
                await using
            return call.cancelled(), call.done(), await call.code()

    with paused() as (server, router):
        assert asyncio.run(run(server, router)) == (True, True, CODE.CANCELLED)


def test_a_task_that_is_cancelled_while_it_asks_for_the_status_cancels_nothing() -> None:
    async def run(server: Server, router: gpuroute.Router) -> Any:
        async with gpuroute.grpc.aio.channel(router, "p") as channel:
            call = AIO["unary"](channel)
            asking = asyncio.create_task(call.code())
            assert await asyncio.to_thread(asked_to_wait, server, router)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            return call.done()

    with paused() as (server, router):
        assert asyncio.run(run(server, router)) is False


KINDS = {
    "unary_unary": lambda channel: channel.unary_unary(method("Echo"))(b"x"),
    "unary_stream": lambda channel: channel.unary_stream(method("Count"))(b"1"),
    "stream_unary": lambda channel: channel.stream_unary(method("Collect"))(),
    "stream_stream": lambda channel: channel.stream_stream(method("Chat"))(),
}


async def fate(awaitable: Any) -> Any:
    try:
        return await awaitable
    except asyncio.CancelledError:
        return "CancelledError"
    except Exception as error:
        return type(error).__name__, str(error)


async def remains(call: Any, kind: str) -> Any:
    """All that a cancelled call can be asked for."""
    found = [call.cancel(), call.cancelled(), call.done(), await call.code(), await call.details(), call.cancel()]
    found += [list(await call.initial_metadata()), list(await call.trailing_metadata())]
    if kind.startswith("stream"):
        found += [await fate(call.write(b"x")), await fate(call.done_writing())]
    found.append(await fate(use(call)))
    late: list[Any] = []
    call.add_done_callback(late.append)
    return [*found, late == [call]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_cancelled_before_its_first_attempt_leaves_what_a_plain_one_leaves(kind: str) -> None:
    async def on_plain() -> Any:
        async with grpc.aio.insecure_channel(f"ipv4:{refused_url().removeprefix('grpc://')}") as channel:
            return await remains(KINDS[kind](channel), kind)

    async def on_routed() -> Any:
        with gpuroute.Router(Nothing(), **PATIENT) as router:
            async with gpuroute.grpc.aio.channel(router, "p") as channel:
                return await remains(KINDS[kind](channel), kind)

    assert asyncio.run(on_routed()) == asyncio.run(on_plain())
