"""`grpc.aio.Channel` over a pool: the asyncio twin of `grpc_sync`.

A real asyncio channel belongs to the loop it was made in. This one does not: it keeps one set of endpoint channels per
running loop, so one object serves several loops, one after the other or in several threads.

Interceptors given here are those of the endpoints' channels: they see every attempt, not the logical call.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import get_running_loop
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc

from gpuroute.errors import RegistryUnavailable
from gpuroute.transports.grpc_aio_calls import (
    RoutedStreamStreamCall,
    RoutedStreamUnaryCall,
    RoutedUnaryStreamCall,
    RoutedUnaryUnaryCall,
)
from gpuroute.transports.grpc_aio_flight import Requests
from gpuroute.transports.grpc_connectivity import READY, aggregate, untried
from gpuroute.transports.grpc_errors import SERIALIZING, aio_ended
from gpuroute.transports.grpc_hub import wire
from gpuroute.transports.grpc_method import Makers, Multicallable
from gpuroute.transports.grpc_peers import Peers
from gpuroute.transports.grpc_rpc import Rpc

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Self

    from gpuroute.router import Router
    from gpuroute.transports.asking import Asker
    from gpuroute.transports.grpc_aio_flight import Flight

_LOGGER = logging.getLogger("gpuroute")
CLOSED = "Channel is closed."  # grpcio's own words
_CLOSING: set[asyncio.Future[None]] = set()  # a loop alone does not keep its tasks
_POLL = 0.05  # seconds between looks at a pool that has no channel yet


class RoutedAioChannel(Makers, grpc.aio.Channel):
    """A channel whose every RPC is routed. Made anywhere, used in any event loop; opens nothing before its first call."""

    def __init__(
        self, router: Router, pool: str, *, interceptors: Sequence[grpc.aio.ClientInterceptor] = (), **how: Any
    ) -> None:
        self._idle = how["idle_timeout"]
        self._intercepted = bool(interceptors)
        extra = {"interceptors": tuple(interceptors)} if interceptors else {}
        dialers = grpc.aio.insecure_channel, grpc.aio.secure_channel
        self._hub, self._dial, self._reports = wire(router, pool, *dialers, extra, **how)
        self.by_loop: dict[asyncio.AbstractEventLoop, Peers] = {}
        router.on_fork(self._forked)

    def peers(self, loop: asyncio.AbstractEventLoop) -> Peers:
        """The endpoint channels of this loop."""
        found = self.by_loop.get(loop)
        if found is None:
            for other in [other for other in tuple(self.by_loop) if other.is_closed()]:
                self.by_loop.pop(other, None)
            found = self.by_loop[loop] = Peers(self._dial, _leave, self._idle, self._reports)
        return found

    def _make(self, kind: str, *method: Any) -> Any:
        return _KINDS[kind](self, self._hub, kind, *method, not self._intercepted)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """READY if any endpoint's channel is (in this loop); `try_to_connect` opens one if none is on its way."""
        if self._hub.closed:
            return grpc.ChannelConnectivity.SHUTDOWN
        peers = self.peers(get_running_loop())
        state = aggregate(peer.channel.get_state(try_to_connect) for peer in peers)
        if try_to_connect and state in {grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.TRANSIENT_FAILURE}:
            endpoint = untried(self._hub, peers)
            if endpoint is not None:
                peer = peers.hold(endpoint, self, self._hub.clock())
                peers.release(peer, self)
                state = aggregate(peer.channel.get_state(try_to_connect) for peer in peers)
        return state

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait until `get_state` differs from what was observed."""
        while self.get_state() is last_observed_state:
            watched = [peer.channel for peer in self.peers(get_running_loop())]
            waits = [asyncio.ensure_future(one.wait_for_state_change(one.get_state())) for one in watched]
            waits.append(asyncio.ensure_future(asyncio.sleep(_POLL)))
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()

    async def channel_ready(self) -> None:
        """Wait until an endpoint's channel is ready."""
        await self._hub.router.aready()
        while (state := self.get_state(try_to_connect=True)) is not READY:
            await self.wait_for_state_change(state)

    async def close(self, grace: float | None = None) -> None:
        """Refuse new calls, and end running ones after `grace` seconds; those of this loop are waited for. Idempotent."""
        self._hub.close()
        here, closing = get_running_loop(), []
        for loop, peers in tuple(self.by_loop.items()):
            channels = [peer.channel for peer in peers.close()]
            if loop is here:
                closing.append(_end(peers, channels, grace))
            else:
                _tell(loop, _end_there, peers, channels, grace)
        for flight in tuple(self._hub.asleep):
            _tell(flight.loop, flight.wake)
        await asyncio.gather(*closing)

    def _forked(self) -> None:
        for peers in tuple(self.by_loop.values()):
            peers.abandon()
        if self._reports is not None:
            self._reports.after_fork()
        self.by_loop = {}
        self._hub.asleep = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        await self.close()
        return None


def _tell(loop: asyncio.AbstractEventLoop, *what: Any) -> None:
    with suppress(RuntimeError):  # it is closed
        loop.call_soon_threadsafe(*what)


async def _end(peers: Peers, channels: list[Any], grace: float | None) -> None:
    """End what runs in this loop, streams too: older releases of grpcio leave those running, and wait for none."""
    closing = asyncio.gather(*(channel.close(grace) for channel in channels))
    running = [stream for stream in peers.streams if not stream.over]
    if grace and running:
        ended = asyncio.Event()
        for stream in running:
            stream.when_over(lambda: ended.set() if all(one.over for one in running) else None)
        with suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), grace)
    await closing
    for stream in running:
        stream.give_up()


def _end_there(*what: Any) -> None:
    """In another loop than that which closed the routed channel."""
    task = asyncio.ensure_future(_end(*what))
    _CLOSING.add(task)
    task.add_done_callback(_CLOSING.discard)


def _leave(channel: object) -> None:
    """Nothing to do: a channel closes itself when its last reference goes, and its `close()` would want awaiting."""


class _Method(Multicallable):
    """What the four kinds have in common."""

    kind: type[Any]
    """What its calls are."""

    def __init__(self, channel: RoutedAioChannel, *what: Any) -> None:
        super().__init__(*what)
        self._channel = channel

    def _fly(
        self,
        request: Any,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Any:
        """A call of this kind, begun: await it, or iterate over it, as grpcio's own. Raises grpc.aio.UsageError."""
        hub, loop = self.hub, get_running_loop()
        known = hub.known == hub.router.version
        if not known and hub.closed:
            raise grpc.aio.UsageError(CLOSED)
        body = request if self._plain or not self._early else self._serialized(request)
        requests = None if self._one or request is None else Requests(request)
        call = self.kind(loop, self._method, body, requests, credentials, compression)
        flight = call.flight or call
        if known:
            self._begin(flight, timeout, metadata, wait_for_ready)
            return call
        early = hub.may_leave and hub.waits
        if early and self._left(flight, timeout, metadata, wait_for_ready):
            return call
        if hub.version < 0 and hub.waits:
            flight.until = None if timeout is None else hub.clock() + timeout
            flight.launch_later(self._begin_later(flight, timeout, metadata, wait_for_ready, inside=early))
        else:
            self._look(flight, timeout, metadata, wait_for_ready, inside=early)
        return call

    def _look(self, flight: Flight, timeout: float | None, metadata: Any, patient: bool | None, *, inside: bool) -> None:
        """Begin a call after a look at the pool, which may say that it is not to be routed."""
        hub = self.hub
        if hub.version != hub.router.version:
            hub.look()
        if not (hub.leaves and self._left(flight, timeout, metadata, patient, inside=inside)):
            self._begin(flight, timeout, metadata, patient)

    def _left(
        self, flight: Flight, timeout: float | None, metadata: Any, patient: bool | None, *, inside: bool = False
    ) -> bool:
        """Begin a call that is not to be routed, over a plain channel; False if it is."""
        peers = self._channel.peers(flight.loop)
        plain = self.hub.unrouted(peers, metadata, inside=inside)
        if plain is not None:
            peers.streams.add(flight)
            flight.adopt(flight.send(plain[0], timeout, plain[1], patient))
        return plain is not None

    def _begin(self, flight: Flight, timeout: float | None, metadata: Any, patient: bool | None) -> None:
        data = flight.body if self._early else self._serialized(flight.body) if self._one else None
        peers, asker = self._channel.by_loop.get(flight.loop), self.hub.asker
        if peers is None:
            peers = self._channel.peers(flight.loop)
        flight.rpc = rpc = Rpc(self, peers, data, timeout, metadata, patient)
        if asker is not None and asker.worth_asking(rpc.call):
            flight.launch_later(_ask(flight, rpc, asker))
        else:
            flight.launch(first=True)
        if self.streaming:
            peers.streams.add(flight)
            if self._one and rpc.call.pool.rules.watchdog.enabled:
                flight.watch()

    async def _begin_later(
        self, flight: Flight, timeout: float | None, metadata: Any, patient: bool | None, *, inside: bool
    ) -> None:
        """Begin once the first view of the fleet is here; the wait for it counts."""
        try:
            timeout = await self.hub.await_view(timeout)
            if not flight.over:
                self._look(flight, timeout, metadata, patient, inside=inside)
        except Exception as error:
            flight.end(aio_ended(error) if isinstance(error, RegistryUnavailable) else error)

    def _serialized(self, request: Any) -> bytes:
        if self._serializer is None:
            return request  # type: ignore[no-any-return]
        try:
            return self._serializer(request)
        except Exception:
            _LOGGER.exception(SERIALIZING)
            raise


async def _ask(flight: Flight, rpc: Rpc, asker: Asker) -> None:
    """Launch a call when those that could take it have said how busy they are."""
    rpc.ask(await asker.ask_async(rpc.call))
    flight.launch()


class UnaryUnary(_Method, grpc.aio.UnaryUnaryMultiCallable):  # type: ignore[type-arg]
    """One request, one response. Awaiting the call raises grpc.aio.AioRpcError."""

    kind = RoutedUnaryUnaryCall
    __call__ = _Method._fly  # noqa: SLF001


class UnaryStream(_Method, grpc.aio.UnaryStreamMultiCallable):  # type: ignore[type-arg]
    """One request, a stream of responses: iterate over the call, or `read`."""

    kind = RoutedUnaryStreamCall
    __call__ = _Method._fly  # noqa: SLF001


class StreamUnary(_Method, grpc.aio.StreamUnaryMultiCallable):  # type: ignore[type-arg]
    """A stream of requests, one response."""

    kind = RoutedStreamUnaryCall

    def __call__(self, request_iterator: Any = None, *how: Any, **named: Any) -> Any:
        """The call: `write` to it unless an iterator was given, then await it."""
        return self._fly(request_iterator, *how, **named)


class StreamStream(_Method, grpc.aio.StreamStreamMultiCallable):  # type: ignore[type-arg]
    """A stream of requests, a stream of responses."""

    kind = RoutedStreamStreamCall

    def __call__(self, request_iterator: Any = None, *how: Any, **named: Any) -> Any:
        """The call: `write` to it unless an iterator was given; iterate over it, or `read`."""
        return self._fly(request_iterator, *how, **named)


_KINDS: dict[str, type[_Method]] = {
    "unary_unary": UnaryUnary,
    "unary_stream": UnaryStream,
    "stream_unary": StreamUnary,
    "stream_stream": StreamStream,
}
