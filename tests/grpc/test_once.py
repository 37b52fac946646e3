"""Whatever happens in the moment in which the first message arrives: its reader gets it once, from one endpoint.

grpcio hears of a failure in threads (or tasks) of its own, and may have had the call repeated before a reader that it
woke up with a message runs. So that moment is held open here until the other side has acted.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from world import Manner, Server, drained, in_flight, method, router_of, servers, soon

import gpuroute
import gpuroute.grpc
import gpuroute.grpc.aio
from gpuroute.errors import ConfigError
from gpuroute.transports.grpc_aio_flight import Flight as AioFlight
from gpuroute.transports.grpc_errors import ClosedUnder
from gpuroute.transports.grpc_flight import Flight
from gpuroute.transports.grpc_peers import Peers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BREAKS = b"1 UNAVAILABLE"
"""One message, and at once the end."""


@pytest.fixture
def three() -> Iterator[list[Server]]:
    with servers(3) as running:
        yield running


def received(running: list[Server]) -> int:
    return sum(server.service.received for server in running)


def router_to(running: list[Server], **settings: Any) -> gpuroute.Router:
    settings = {"watchdog": True, "retry_floor": "100000/s"} | settings
    return router_of(*(server.url for server in running), **settings)


def held_until(monkeypatch: pytest.MonkeyPatch, acted: Any) -> None:
    """Readers wake up with their first message only when `acted(flight, inner)` is true."""
    hand_out = Flight.delivered

    def late(flight: Flight, inner: Any) -> bool:
        if not flight.messages:
            assert soon(lambda: acted(flight, inner))
        return hand_out(flight, inner)

    monkeypatch.setattr(Flight, "delivered", late)


def test_a_stream_that_fails_as_its_first_message_arrives_is_told_once(
    three: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    held_until(monkeypatch, lambda flight, inner: flight.inner is not inner or flight.over)
    router = router_to(three)
    messages, error = Manner("blocking").stream(router, "Count", BREAKS, timeout=60)
    assert messages == [b"0"]
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert received(three) == 3, "the first two attempts ended before a message of theirs was handed out"
    assert drained(router)


def test_a_message_that_was_handed_out_is_the_last_chance(three: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    """The other order: the failure is heard after the message was handed out, so nobody else is asked."""
    settle, handed = Flight.settle, threading.Event()

    def late(flight: Flight, inner: Any) -> None:
        if not flight.over and flight.inner is inner:
            assert handed.wait(30)
        settle(flight, inner)

    monkeypatch.setattr(Flight, "settle", late)
    router = router_to(three)
    with gpuroute.grpc.channel(router, "p") as channel:
        stream = channel.unary_stream(method("Count"))(BREAKS, timeout=60)
        assert next(stream) == b"0"
        handed.set()
        with pytest.raises(grpc.RpcError) as error:
            next(stream)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert received(three) == 1
    assert drained(router)


def test_a_stream_given_up_as_its_first_message_arrives_is_told_once(
    three: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watchdog looks exactly between the arrival and the reader."""
    router = router_to(three)
    given_up: list[Any] = []

    def acted(flight: Flight, inner: Any) -> bool:
        if not given_up:
            given_up.append(inner)
            assert flight.rpc.attempt is not None
            monkeypatch.setattr(type(flight.rpc), "silence_left", lambda *_: 0.0)
            flight.look()
            monkeypatch.undo()
        return flight.inner is not None

    with pytest.MonkeyPatch.context() as patch:
        held_until(patch, acted)
        messages, error = Manner("blocking").stream(router, "Count", b"2", timeout=60)
    assert (messages, error) == ([b"0", b"1"], None)
    assert received(three) == 2
    assert router.snapshot().pools["p"].signals["stalls"] == 1
    assert drained(router)


def test_headers_of_an_attempt_that_was_given_up_are_not_shown(
    three: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    show, replaced = Flight.headers_shown, []

    def late(flight: Flight, inner: Any) -> bool:
        if not replaced:
            replaced.append(inner)
            with flight._changed:
                assert flight.rpc.stalled(router.clock())
                flight.inner = None
            inner.cancel()
            flight.launch()
        return show(flight, inner)

    monkeypatch.setattr(Flight, "headers_shown", late)
    router = router_to(three)
    with gpuroute.grpc.channel(router, "p") as channel:
        call = channel.unary_stream(method("Count"))(b"1 wait", timeout=60)
        assert call.initial_metadata()
        assert received(three) == 2
        assert call._flight.rpc.call.replayable is False
        assert call._flight.inner is not replaced[0]
        assert next(call) == b"0"
        call.cancel()
    assert drained(router)


class _Late(grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[type-arg]
    """Passes messages on when the end of their stream is known."""

    async def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        call = await continuation(details, request)

        async def messages() -> Any:
            found = []
            try:
                async for message in call:
                    found.append(message)  # noqa: PERF401  (what came before the error counts)
            except grpc.RpcError:
                pass
            for message in found:
                yield message
            await call.code()
            raise grpc.aio.AioRpcError(await call.code(), await call.initial_metadata(), await call.trailing_metadata())

        return messages()


@pytest.mark.parametrize("how", ["iterate", "read"])
def test_in_asyncio_too_what_comes_late_is_told_once(three: list[Server], how: str) -> None:
    router = router_to(three)

    async def run() -> tuple[list[bytes], grpc.StatusCode]:
        found = []
        async with gpuroute.grpc.aio.channel(router, "p", interceptors=[_Late()]) as channel:
            stream = channel.unary_stream(method("Count"))(BREAKS, timeout=60)
            try:
                if how == "iterate":
                    async for message in stream:
                        found.append(message)  # noqa: PERF401
                else:
                    while (message := await stream.read()) is not grpc.aio.EOF:
                        found.append(message)
            except grpc.RpcError as error:
                return found, error.code()
        raise AssertionError

    assert asyncio.run(run()) == ([b"0"], grpc.StatusCode.UNAVAILABLE)
    assert drained(router)


# ------------------------------------------------------------------------------------------ hedges


def racing(three: list[Server]) -> gpuroute.Router:
    """Every call may be hedged, but no timer fires: the tests are the timers."""
    router = router_to(three, hedge=True, watchdog=False)
    router.ready()
    pool = router.pool("p")
    pool.rules = replace(pool.rules, hedge=replace(pool.rules.hedge, hedge_share=1.0, min_delay_s=1000.0))
    pool.hedges.floor = 1e6
    for _ in range(100):
        pool.shared.history.whole.add(0.01)
    return router


@pytest.mark.parametrize("here", [True, False])
def test_no_hedge_begins_once_the_answer_is_here(
    three: list[Server], monkeypatch: pytest.MonkeyPatch, here: bool
) -> None:
    """The timer fires when grpcio has the answer, but nobody was told of it yet."""
    router = racing(three)
    for server in three:
        server.service.hang = not here
    settle, told = Flight.settle, threading.Event()
    monkeypatch.setattr(Flight, "settle", lambda flight, inner: told.wait(30) and settle(flight, inner))
    with gpuroute.grpc.channel(router, "p") as channel:
        call = channel.unary_unary(method("Who")).future(b"", timeout=60)
        flight = call._flight
        inner = flight.inner
        assert not here or soon(inner.done)
        flight._hedge(inner)
        assert (flight.twin is None) == here
        told.set()
        for server in three:
            server.service.release.set()
        assert call.result() in {b"s0", b"s1", b"s2"}
    assert router.snapshot().pools["p"].signals["hedges"] == (not here)
    assert received(three) == 1 or not here
    assert drained(router)


@pytest.mark.parametrize("here", [True, False])
def test_nor_in_asyncio(three: list[Server], monkeypatch: pytest.MonkeyPatch, here: bool) -> None:
    router = racing(three)
    for server in three:
        server.service.hang = not here
    settle, told = AioFlight.settle, []
    monkeypatch.setattr(AioFlight, "settle", lambda flight, inner: told and settle(flight, inner))

    async def run() -> bytes:
        async with gpuroute.grpc.aio.channel(router, "p") as channel:
            call = channel.unary_unary(method("Who"))(b"", timeout=60)
            flight = call._flight
            while flight.inner is None or (here and not flight.inner.done()):
                await asyncio.sleep(0.005)
            inner = flight.inner
            flight._hedge(inner)
            assert (flight.twin is None) == here
            told.append(True)
            for server in three:
                server.service.release.set()
            if here:
                flight.settle(inner)
            return await call

    assert asyncio.run(run()) in {b"s0", b"s1", b"s2"}
    assert router.snapshot().pools["p"].signals["hedges"] == (not here)
    assert received(three) == 1 or not here
    assert drained(router)


def closed(*_: Any) -> Any:
    raise ValueError("Cannot invoke RPC on closed channel!")


def hedged_in_vain(three: list[Server], spoil: Callable[[Any], None]) -> gpuroute.Router:
    """A call whose hedge is spoilt before it begins: it leaves nothing behind, and the call is answered."""
    router = racing(three)
    for server in three:
        server.service.hang = True
    with gpuroute.grpc.channel(router, "p") as channel:
        call = channel.unary_unary(method("Who")).future(b"", timeout=60)
        flight = call._flight
        spoil(flight)
        flight._hedge(flight.inner)
        assert (flight.twin, in_flight(router)) == (None, 1)
        for server in three:
            server.service.release.set()
        assert call.result() in {b"s0", b"s1", b"s2"}
    assert drained(router)
    return router


def test_a_hedge_that_cannot_begin_leaves_nothing_behind(three: list[Server]) -> None:
    router = hedged_in_vain(three, lambda flight: setattr(flight, "_start", closed))
    assert router.snapshot().pools["p"].signals["hedges"] == 1


NO_CHANNEL = [ConfigError("a record that cannot be dialled"), ClosedUnder()]


@pytest.mark.parametrize("error", NO_CHANNEL, ids=lambda error: type(error).__name__)
def test_a_hedge_that_gets_no_channel_is_none(
    three: list[Server], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def hold(*_: Any) -> Any:
        raise error

    hedged_in_vain(three, lambda _: monkeypatch.setattr(Peers, "hold", hold))


def test_nor_does_one_in_asyncio(three: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    router = racing(three)
    for server in three:
        server.service.hang = True

    async def run() -> bytes:
        async with gpuroute.grpc.aio.channel(router, "p") as channel:
            call = channel.unary_unary(method("Who"))(b"", timeout=60)
            flight = call._flight
            while flight.inner is None:
                await asyncio.sleep(0.005)
            monkeypatch.setattr(AioFlight, "send", closed)
            flight._hedge(flight.inner)
            assert (flight.twin, in_flight(router)) == (None, 1)
            for server in three:
                server.service.release.set()
            return await call

    assert asyncio.run(run()) in {b"s0", b"s1", b"s2"}
    assert router.snapshot().pools["p"].signals["hedges"] == 1
    assert drained(router)
