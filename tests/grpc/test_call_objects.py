"""What callers may do with calls as grpcio lets them: callbacks that raise, iterators used again, odd metadata."""

from __future__ import annotations

import asyncio
import gc
import queue
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from world import PATIENCE_S, Endpoint, Server, drained, method, refused_url, router_of, servers, soon

import gpuroute
import gpuroute.grpc
import gpuroute.grpc.aio

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.real_time


def compared(server: Server, behaviour: Callable[..., Any]) -> Any:
    """What a behaviour shows on a routed channel, which is what it shows on a plain one."""
    with grpc.insecure_channel(server.target, options=(("grpc.enable_retries", 0),)) as channel:
        expected = behaviour(channel, server.service)
    server.service.__init__("s0")
    router = router_of(server.url)
    with gpuroute.grpc.channel(router, "p") as channel:
        found = behaviour(channel, server.service)
    assert found == expected
    assert drained(router)
    return found


# ------------------------------------------------------------------------------------------ stubs that outlive channels


def test_a_stub_alone_starts_afresh_in_a_forked_child(server: Server) -> None:
    """Case G1: mostly nobody keeps the channel. Its parent's connections would hang in a child."""
    router = router_of(server.url)
    call = gpuroute.grpc.channel(router, "p").unary_unary(method("Who"))
    assert call(b"") == b"s0"
    gc.collect()
    (before,) = call._peers
    router.after_fork()  # what a child does first
    assert not list(call._peers)
    assert call(b"") == b"s0"
    (after,) = call._peers
    assert after.channel is not before.channel
    router.close()


def test_nor_does_a_router_keep_what_channels_were(server: Server) -> None:
    router = router_of(server.url)
    for _ in range(20):
        gpuroute.grpc.channel(router, "p").close()
    assert soon(lambda: gc.collect() >= 0 and len(router._fork_hooks) <= 2)  # of whom somebody keeps


# ------------------------------------------------------------------------------------------ callbacks


def raising(_call: Any) -> None:
    raise ValueError("a bug in the caller's callback")


def end_by_answer(call: Any, service: Any) -> Any:
    service.release.set()
    return call.result(timeout=PATIENCE_S)


def end_by_cancelling(call: Any, service: Any) -> Any:
    return call.cancel()


@pytest.mark.parametrize("end", [end_by_answer, end_by_cancelling])
def test_a_callback_that_raises_keeps_the_others_and_who_ended_the_call_from_nothing(
    server: Server, end: Callable[..., Any]
) -> None:
    def behaviour(channel: grpc.Channel, service: Any) -> Any:
        call = channel.unary_unary(method("Slow")).future(b"x")
        heard: queue.Queue[Any] = queue.Queue()
        call.add_done_callback(heard.put)
        call.add_done_callback(raising)
        call.add_done_callback(heard.put)
        return end(call, service), heard.get(timeout=PATIENCE_S) is call, heard.get(timeout=PATIENCE_S) is call

    assert compared(server, behaviour)[1:] == (True, True)


# ------------------------------------------------------------------------------------------ requests


def test_an_iterator_of_requests_stays_the_callers(server: Server) -> None:
    """A server that ends early leaves the rest of the messages to the caller's next call."""

    def behaviour(channel: grpc.Channel, service: Any) -> Any:
        messages = (b"%d" % n for n in range(1_000_000))
        with pytest.raises(grpc.RpcError) as error:
            channel.stream_unary(method("Refuse"))(messages)

        def next_is_there() -> bool:
            try:
                return bool(next(messages))
            except ValueError:  # the call's own thread is at it
                return False

        return error.value.code(), soon(next_is_there)

    assert compared(server, behaviour) == (grpc.StatusCode.FAILED_PRECONDITION, True)


@pytest.mark.parametrize("kind", ["sync", "asyncio"])
def test_requests_to_a_name_that_nobody_knows_never_left(kind: str, server: Server) -> None:
    """So that even a stream of them goes elsewhere, whole. This name is none, which no network need be asked about."""

    async def in_asyncio(router: gpuroute.Router) -> Any:
        async with gpuroute.grpc.aio.channel(router, "p") as channel:
            return await channel.stream_unary(method("Collect"))(iter([b"a", b"b"]))

    nobody = Endpoint("nobody", "grpc://no such name:1")
    for _ in range(6):  # whichever of them comes first
        router = router_of(nobody, server.url)
        if kind == "asyncio":
            assert asyncio.run(in_asyncio(router)) == b"a,b"
            continue
        with gpuroute.grpc.channel(router, "p") as channel:
            assert channel.stream_unary(method("Collect"))(iter([b"a", b"b"])) == b"a,b"


# ------------------------------------------------------------------------------------------ metadata

ODD: dict[str, Callable[[], Any]] = {
    "bytes": lambda: ((b"echo-a", b"1"), ("echo-b", "2")),
    "lists": lambda: [["echo-a", "1"], ["echo-b", "2"]],
    "a generator": lambda: (pair for pair in (("echo-a", "1"), ("echo-b", "2"))),
    "binary": lambda: (("echo-a-bin", b"\x00\xff"), ("echo-b", "2")),
    "nothing": tuple,
}


@pytest.mark.parametrize("odd", ODD)
def test_metadata_come_in_any_shape(server: Server, odd: str) -> None:
    def behaviour(channel: grpc.Channel, service: Any) -> Any:
        _, call = channel.unary_unary(method("Echo")).with_call(b"x", metadata=ODD[odd]())
        return [tuple(pair) for pair in call.initial_metadata()]

    assert len(compared(server, behaviour)) == (1 if odd == "nothing" else 3)


@pytest.mark.parametrize("odd", ODD)
def test_metadata_come_in_any_shape_in_asyncio(server: Server, odd: str) -> None:
    async def shown(channel: grpc.aio.Channel) -> Any:
        call = channel.unary_unary(method("Echo"))(b"x", metadata=ODD[odd]())
        return [tuple(pair) for pair in await call.initial_metadata()]

    async def on_plain() -> Any:
        async with grpc.aio.insecure_channel(server.target) as channel:
            return await shown(channel)

    async def on_routed() -> Any:
        async with gpuroute.grpc.aio.channel(router_of(server.url), "p") as channel:
            return await shown(channel)

    assert asyncio.run(on_routed()) == asyncio.run(on_plain())


# ------------------------------------------------------------------------------------------ misuse, in asyncio

KINDS: dict[str, Callable[..., Any]] = {
    "unary_unary": lambda channel, **how: channel.unary_unary(method("Echo"))(b"x", **how),
    "unary_stream": lambda channel, **how: channel.unary_stream(method("Count"))(b"1", **how),
    "stream_unary": lambda channel, **how: channel.stream_unary(method("Collect"))([b"1"], **how),
    "stream_stream": lambda channel, **how: channel.stream_stream(method("Chat"))([b"1"], **how),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_cannot_begin_says_so_to_who_begins_it(server: Server, kind: str) -> None:
    """As a plain channel does: call credentials want TLS."""

    async def misused(channel: grpc.aio.Channel) -> str:
        assert await channel.unary_unary(method("Who"))(b"") == b"s0"
        with pytest.raises(grpc.aio.UsageError) as error:
            KINDS[kind](channel, credentials=grpc.access_token_call_credentials("secret"))
        return str(error.value)

    async def on_plain() -> Any:
        async with grpc.aio.insecure_channel(server.target) as channel:
            return await misused(channel)

    async def on_routed() -> Any:
        async with gpuroute.grpc.aio.channel(router, "p") as channel:
            return await misused(channel)

    router = router_of(server.url)
    assert asyncio.run(on_routed()) == asyncio.run(on_plain())
    assert drained(router)


# ------------------------------------------------------------------------------------------ half-closing, in asyncio

WRITTEN = {"stream_unary": "Collect", "stream_stream": "Chat"}


async def ended_unwritten(channel: grpc.aio.Channel, kind: str) -> Any:
    """A call whose requests end before there was one, as whoever writes it sees it."""
    call = getattr(channel, kind)(method(WRITTEN[kind]))()
    await call.done_writing()
    await call.done_writing()
    answer = await (call if kind == "stream_unary" else call.read())
    return "end" if answer is grpc.aio.EOF else answer, await call.code()


async def on_routed(router: gpuroute.Router, kind: str) -> Any:
    async with gpuroute.grpc.aio.channel(router, "p") as channel:
        return await ended_unwritten(channel, kind)


@pytest.mark.parametrize("kind", WRITTEN)
def test_a_call_without_requests_moves_on_from_who_is_not_there(kind: str) -> None:
    with servers(1) as (server,):
        for _ in range(6):  # whichever of them comes first
            answer, code = asyncio.run(on_routed(router_of(refused_url(), refused_url(), server.url), kind))
            assert answer == (b"" if kind == "stream_unary" else "end")
            assert code is grpc.StatusCode.OK


@pytest.mark.parametrize("kind", WRITTEN)
def test_and_if_nobody_is_there_its_status_tells_so(kind: str) -> None:
    """Out of `done_writing` a plain call lets an internal error of grpcio, which is no RpcError."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        asyncio.run(on_routed(router_of(refused_url()), kind))
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
