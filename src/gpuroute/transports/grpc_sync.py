"""`grpc.Channel` over a pool: every RPC goes to the endpoint that the router picks for it.

Blocking calls run the plain loop of `_Method._answer`; futures and streams are flown by `grpc_flight`. Both send through
the multicallables of one ordinary channel per endpoint.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import grpc

from gpuroute.errors import DeadlineExceeded, NoEndpointAvailable, RegistryUnavailable
from gpuroute.transports.grpc_aside import ASIDE
from gpuroute.transports.grpc_call import RoutedCall
from gpuroute.transports.grpc_connectivity import Connectivity
from gpuroute.transports.grpc_errors import SERIALIZING, EndedCall, ended
from gpuroute.transports.grpc_flight import Flight, Requests
from gpuroute.transports.grpc_hub import wire
from gpuroute.transports.grpc_method import Makers, Multicallable
from gpuroute.transports.grpc_peers import Peers
from gpuroute.transports.grpc_rpc import Rpc
from gpuroute.transports.grpc_watch import LOOK_EVERY_S, STREAMS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType
    from typing import Self

    from gpuroute.router import Router
    from gpuroute.transports.grpc_peers import Peer

_LOGGER = logging.getLogger("gpuroute")
CLOSED = "Cannot invoke RPC on closed channel!"  # grpcio's own words


class RoutedChannel(Makers, grpc.Channel):
    """A channel whose every RPC is routed. Safe from any thread; opens nothing before its first call."""

    def __init__(self, router: Router, pool: str, **how: Any) -> None:
        self._hub, dialer, self._reports = wire(router, pool, grpc.insecure_channel, grpc.secure_channel, **how)
        self._peers = Peers(dialer, _close_aside, how["idle_timeout"], self._reports)
        self._connectivity = Connectivity(self._hub, self._peers)
        router.on_fork(self._forked)

    def _make(self, kind: str, *method: Any) -> Any:
        return _KINDS[kind](self, self._peers, self._hub, kind, *method)

    def subscribe(
        self, callback: Callable[[grpc.ChannelConnectivity], None], try_to_connect: bool | None = False
    ) -> None:
        """Tell `callback` the pool's connectivity now and at every change: READY if any endpoint's channel is."""
        self._connectivity.subscribe(callback, connect=bool(try_to_connect))

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        """Stop telling `callback`."""
        self._connectivity.unsubscribe(callback)

    def close(self) -> None:
        """End every running call with CANCELLED and refuse new ones. Idempotent."""
        self._hub.close()
        self._connectivity.close()
        for peer in self._peers.close():
            peer.channel.close()
        for flight in tuple(self._hub.asleep):
            flight.launch()

    def _forked(self) -> None:
        self._peers.abandon()
        if self._reports is not None:
            self._reports.after_fork()
        self._connectivity = Connectivity(self._hub, self._peers)
        self._hub.asleep = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _close_aside(channel: grpc.Channel) -> None:
    """Close an unused channel in a thread of its own: in a callback of its own event thread, `close` never returns."""
    threading.Thread(target=channel.close, name="gpuroute-grpc-close", daemon=True).start()


class _Method(Multicallable):
    """What the four kinds have in common."""

    def __init__(self, channel: RoutedChannel, peers: Peers, *what: Any) -> None:
        super().__init__(*what)
        self._channel = channel  # often nobody else keeps it, and it must hear of forks
        self._peers = peers

    def _body(self, request: Any) -> Any:
        """What every attempt sends: bytes, or a view of the caller's iterator."""
        if not self._one:
            return Requests(request)
        try:
            return request if self._serializer is None else self._serializer(request)
        except Exception:
            _LOGGER.exception(SERIALIZING)
            raise EndedCall(grpc.StatusCode.INTERNAL, SERIALIZING) from None

    def _look(self, timeout: float | None, metadata: Any) -> tuple[float | None, tuple[Any, Any] | None]:
        """What is left of the timeout after the wait for a first view of the fleet; and the multicallable and metadata
        of a call that the kill switch or the rollout leaves unrouted."""
        hub = self.hub
        if hub.closed:
            raise ValueError(CLOSED)
        early = hub.may_leave and hub.waits
        found = hub.unrouted(self._peers, metadata) if early else None
        if found is None and hub.version != hub.router.version:
            try:
                timeout = hub.wait(timeout)
            except RegistryUnavailable as error:
                raise ended(error) from None
            hub.look()
        if found is None and hub.leaves:
            found = hub.unrouted(self._peers, metadata, inside=early)
        return timeout, found and (found[0].bind(self._whole), found[1])

    def _answer(
        self,
        wants_call: bool,
        request: Any,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Any:
        """The response; with the call that gave it, if that is wanted. Attempts in a row until one answers or no other is
        due."""
        hub, one, method = self.hub, self._one, self._method
        if hub.known != hub.router.version:
            timeout, plain = self._look(timeout, metadata)
            if plain is not None:
                how = timeout, plain[1], credentials, wait_for_ready, compression
                return plain[0].with_call(request, *how) if wants_call else plain[0](request, *how)
        body = request if one and self._plain else self._body(request)
        rpc = Rpc(self, self._peers, body if one else None, timeout, metadata, wait_for_ready)
        if hub.asker is not None:
            rpc.ask(hub.asker.ask(rpc.call))
        if rpc.races:
            return self._raced(wants_call, rpc, body, credentials, compression)
        try:
            while True:
                peer = rpc.next()
                if peer is None:
                    time.sleep(min(rpc.wait, LOOK_EVERY_S))
                    continue
                send, data = peer.methods.get(method) or peer.bind(method), body if one else body.view()
                try:
                    # A call object is asked for only where it is needed.
                    if peer.deaf and not wants_call:
                        answer = send(data, rpc.left, rpc.sending, credentials, None, compression)
                        rpc.succeeded(None)
                        return answer
                    answer = send.with_call(data, rpc.left, rpc.sending, credentials, None, compression)
                    rpc.succeeded(None if peer.deaf else answer[1].trailing_metadata())
                    return answer if wants_call else answer[0]
                except grpc.RpcError as error:
                    self._go_on(rpc, error, body)
        except BaseException as error:
            _leave(rpc, error)
            raise

    def _go_on(self, rpc: Rpc, error: grpc.RpcError, body: Any) -> None:
        """Learn from a failed attempt; raises its error if it was the last one."""
        trailing: Any = error.trailing_metadata()
        sent = not self._one and body.sent
        if self.hub.closed or not rpc.failed(error.code(), error.details(), trailing, sent):
            rpc.note(error)
            raise error
        rpc.cause = error

    def _fly(
        self,
        how: str,
        request: Any,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Any:
        """A call that is also a future or an iterator; `how` names the multicallable's way to begin one."""
        hub, one = self.hub, self._one
        if hub.known != hub.router.version:
            timeout, plain = self._look(timeout, metadata)
            if plain is not None:
                return getattr(plain[0], how)(request, timeout, plain[1], credentials, wait_for_ready, compression)
        body = self._body(request)
        rpc = Rpc(self, self._peers, body if one else None, timeout, metadata, wait_for_ready)
        flight = self._flight(how, rpc, body, credentials, compression)
        if hub.asker is not None and hub.asker.worth_asking(rpc.call):
            ASIDE.ask(flight, hub.asker)
        else:
            flight.launch(first=True)
        if one and self.streaming and rpc.call.pool.rules.watchdog.enabled:
            STREAMS.add(flight)
        return RoutedCall(flight)

    def _flight(self, how: str, rpc: Rpc, body: Any, credentials: Any, compression: Any) -> Flight:
        one, method = self._one, self._method

        def start(peer: Peer, rpc: Rpc) -> Any:
            send = getattr(peer.bind(method), how)
            return send(body if one else body.view(), rpc.left, rpc.sending, credentials, None, compression)

        return Flight(rpc, start, None if one else body)

    def _raced(self, wants_call: bool, rpc: Rpc, body: Any, credentials: Any, compression: Any) -> Any:
        """A blocking call that may have a second attempt beside its first."""
        flight = self._flight("future", rpc, body, credentials, compression)
        flight.launch(first=True)
        call = RoutedCall(flight)
        try:
            return (call.result(), call) if wants_call else call.result()
        finally:
            call.cancel()


def _leave(rpc: Rpc, error: BaseException) -> None:
    """End a call that ends by an error; raises what the last attempt said instead, if nobody is left to ask."""
    if rpc.attempt is not None:
        rpc.cancelled()
    if isinstance(error, DeadlineExceeded) or (isinstance(error, NoEndpointAvailable) and rpc.cause is None):
        raise ended(error) from None
    if isinstance(error, NoEndpointAvailable):
        assert rpc.cause is not None
        rpc.note(rpc.cause)
        raise rpc.cause from None


# Arguments and results of the four are those of their base classes in `grpc`; `how` is all but the request.


class UnaryUnary(_Method, grpc.UnaryUnaryMultiCallable):  # type: ignore[type-arg]
    """One request, one response."""

    def __call__(
        self,
        request: Any,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Any:
        """The response. Raises grpc.RpcError."""
        return self._answer(False, request, timeout, metadata, credentials, wait_for_ready, compression)

    def with_call(self, request: Any, *how: Any, **named: Any) -> tuple[Any, grpc.Call]:
        """The response and the call that gave it. Raises grpc.RpcError."""
        return self._answer(True, request, *how, **named)  # type: ignore[no-any-return]

    def future(self, request: Any, *how: Any, **named: Any) -> Any:
        """A call and future; its retries block nobody."""
        return self._fly("future", request, *how, **named)


class UnaryStream(_Method, grpc.UnaryStreamMultiCallable):  # type: ignore[type-arg]
    """One request, a stream of responses."""

    def __call__(self, request: Any, *how: Any, **named: Any) -> Any:
        """An iterator of responses that is also the call."""
        return self._fly("__call__", request, *how, **named)


class StreamUnary(_Method, grpc.StreamUnaryMultiCallable):  # type: ignore[type-arg]
    """A stream of requests, one response."""

    def __call__(self, request_iterator: Iterator[Any], *how: Any, **named: Any) -> Any:
        """The response. Raises grpc.RpcError."""
        return self._answer(False, request_iterator, *how, **named)

    def with_call(self, request_iterator: Iterator[Any], *how: Any, **named: Any) -> tuple[Any, grpc.Call]:
        """The response and the call that gave it. Raises grpc.RpcError."""
        return self._answer(True, request_iterator, *how, **named)  # type: ignore[no-any-return]

    def future(self, request_iterator: Iterator[Any], *how: Any, **named: Any) -> Any:
        """A call and future."""
        return self._fly("future", request_iterator, *how, **named)


class StreamStream(_Method, grpc.StreamStreamMultiCallable):  # type: ignore[type-arg]
    """A stream of requests, a stream of responses."""

    def __call__(self, request_iterator: Iterator[Any], *how: Any, **named: Any) -> Any:
        """An iterator of responses that is also the call."""
        return self._fly("__call__", request_iterator, *how, **named)


_KINDS: dict[str, type[_Method]] = {
    "unary_unary": UnaryUnary,
    "unary_stream": UnaryStream,
    "stream_unary": StreamUnary,
    "stream_stream": StreamStream,
}
