"""Calls of the asyncio channel, over as many attempts as it takes. Everything here runs in one event loop.

As in `grpc_flight`, the user holds a `Routed...Call`, which shares a `Flight` with grpcio's callbacks; a dropped call is
cancelled by its `__del__`. grpcio runs done-callbacks the moment a status arrives, before any awaiting task wakes up, so
when a reader sees an attempt end, its successor has already been decided on.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
from grpc import StatusCode
from grpc.aio import AioRpcError

from gpuroute.errors import DeadlineExceeded, NoEndpointAvailable
from gpuroute.transports.grpc_errors import LOCALLY_CANCELLED, aio_ended

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Generator

    from gpuroute.transports.grpc_rpc import Rpc


def at_once(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that has nothing to wait for: the accessors of a call that has ended."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    msg = "the call has not ended"
    raise RuntimeError(msg)


class Requests:
    """The caller's request messages, of which the first can be sent again if it never left (see `grpc_flight`)."""

    __slots__ = ("_first", "_lock", "_messages", "_taken", "sent")

    def __init__(self, messages: Any) -> None:
        self._messages = messages if hasattr(messages, "__aiter__") else _as_async(messages)
        self._messages = aiter(self._messages)
        self._lock = asyncio.Lock()
        self._first: Any = None
        self._taken = False
        self.sent = False

    async def view(self) -> AsyncIterator[Any]:
        """All messages from the first, for one attempt. The task of an earlier attempt may still be waiting."""
        async with self._lock:
            if not self._taken:
                self._first = await anext(self._messages, self)
                self._taken = True
        if self._first is self:
            return
        yield self._first
        self.sent = True
        self._first = None
        async for message in self._messages:
            yield message


async def _as_async(messages: Any) -> AsyncIterator[Any]:
    for message in messages:
        yield message


class Flight:
    """The state machine of one RPC: what its attempts send, its timer, and who waits for it."""

    __slots__ = ("_callbacks", "_cancelled", "_changed", "_timer", "body", "compression", "credentials", "error",
                 "inner", "key", "loop", "over", "requests", "rpc", "streaming", "until", "wrote")  # fmt: skip

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        key: tuple[Any, ...],
        body: Any,
        requests: Requests | None,
        credentials: Any,
        compression: Any,
    ) -> None:
        self.loop = loop
        self.key = key
        self.body = body
        self.requests = requests
        self.credentials = credentials
        self.compression = compression
        self.rpc: Rpc | None = None
        self.inner: Any = None
        self.over = self.streaming = self.wrote = self._cancelled = False
        self._changed: asyncio.Event | None = None
        self._callbacks: list[Callable[[], None]] | None = None
        self._timer: asyncio.TimerHandle | asyncio.Task[None] | None = None
        self.error: BaseException | None = None  # the end, where there is no inner call to tell it

    def launch(self) -> None:
        """Begin the next attempt, now or when its delay has passed."""
        if self.over:
            return
        rpc = self.rpc
        assert rpc is not None
        try:
            peer = rpc.next()
            if peer is None:
                self._timer = self.loop.call_later(rpc.wait, self.launch)
                return
            inner = peer.bind(self.key)(
                self.body if self.requests is None else self.requests.view(),
                timeout=rpc.left,
                metadata=rpc.headers(),
                credentials=self.credentials,
                compression=self.compression,
            )
        except (NoEndpointAvailable, DeadlineExceeded) as error:
            cause = rpc.cause if isinstance(error, NoEndpointAvailable) else None
            self.end(cause or aio_ended(error))
            return
        except Exception as error:
            rpc.cancelled()
            self.end(error)
            return
        self.adopt(inner)

    def launch_later(self, begin: Coroutine[Any, Any, None]) -> None:
        """Let a task begin the first attempt."""
        self._timer = self.loop.create_task(begin)

    def adopt(self, inner: Any) -> None:
        """Follow this call from now on."""
        self.inner = inner
        if self._changed is not None:
            self._wake()
        inner.add_done_callback(self.settle)

    def settle(self, inner: Any) -> None:
        """Learn from the end of `inner`, and retry or conclude. Only the present inner call counts."""
        if inner is not self.inner or self.over:
            return
        try:
            concluded = self._conclude(inner)
        except Exception:  # an interceptor's: whoever awaits the inner call gets it
            concluded = True
            if self.rpc is not None:
                self.rpc.cancelled()
        if concluded:
            self._land()
        else:
            self.inner = None
            self.launch()

    def _conclude(self, inner: Any) -> bool:
        rpc = self.rpc
        if rpc is None:  # it was not routed
            return True
        if self._cancelled or inner.cancelled() or rpc.hub.closed:
            rpc.cancelled()
            return True
        code = at_once(inner.code())
        if code is StatusCode.OK:
            rpc.succeeded(lambda: at_once(inner.trailing_metadata()))
            return True
        trailing, details = at_once(inner.trailing_metadata()), at_once(inner.details())
        sent = self.wrote or (self.requests is not None and self.requests.sent)
        if not rpc.failed(code, details, trailing, sent):
            return True
        rpc.cause = AioRpcError(code, at_once(inner.initial_metadata()), trailing, details)
        return False

    def end(self, error: BaseException) -> None:
        """Conclude without an inner call."""
        if not self.over:
            self.inner = None
            self.error = error
            if self.rpc is not None:
                self.rpc.note(error)
            self._land()

    def _land(self) -> None:
        self.over = True
        self._wake()
        callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            callback()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    async def current(self) -> Any:
        """The call of the present attempt; waits while a retry is due. Raises how it ended without one."""
        while self.inner is None:
            if self.error is not None:
                raise self.error
            if self._changed is None:
                self._changed = asyncio.Event()
            await self._changed.wait()
        return self.inner

    def last(self, inner: Any, error: BaseException | None = None) -> bool:
        """True if no other attempt follows this one, which has ended (with `error`)."""
        self.settle(inner)
        if self.inner is not inner:
            return False
        if error is not None and self.rpc is not None:
            self.rpc.note(error)
        return True

    def delivered(self) -> None:
        """A message reached the caller: there is no retry from here on."""
        if not self.streaming and self.rpc is not None:
            self.streaming = True
            self.rpc.first()

    def drop(self) -> None:
        """The caller dropped its call. Any thread, any moment: what it entails runs later, in the loop."""
        if self.loop.is_closed():
            if self.rpc is not None:
                self.rpc.cancelled()
        else:
            self.loop.call_soon_threadsafe(self.give_up)

    def give_up(self) -> bool:
        """Cancel; True if that changed anything."""
        if self.over:
            return False
        self._cancelled = True
        inner = self.inner
        if inner is not None:
            done = inner.cancel()
            self.settle(inner)
            return bool(done)
        if self._timer is not None:
            self._timer.cancel()
        if self.rpc is not None:
            self.rpc.cancelled()
        self.end(asyncio.CancelledError())
        return True

    def when_over(self, callback: Callable[[], None]) -> None:
        """Call back once it is over, now if it is."""
        if self.over:
            callback()
        elif self._callbacks is None:
            self._callbacks = [callback]
        else:
            self._callbacks.append(callback)

    @property
    def was_cancelled(self) -> bool:
        """True if the caller cancelled it."""
        return self._cancelled or (self.inner is not None and bool(self.inner.cancelled()))


class _Routed(grpc.aio.Call):
    """Call methods common to the four kinds."""

    _flight: Flight

    def cancel(self) -> bool:
        """Cancel; True if it was still running."""
        return self._flight.give_up()

    def cancelled(self) -> bool:
        """True if the caller cancelled it."""
        return self._flight.was_cancelled

    def done(self) -> bool:
        """True once it is over."""
        return self._flight.over

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call `callback(self)` once it is over, now if it is."""
        self._flight.when_over(partial(callback, self))

    def time_remaining(self) -> float | None:
        """Seconds until the deadline, None without one."""
        flight = self._flight
        if flight.rpc is not None:
            return flight.rpc.time_left()
        if flight.inner is not None:
            return flight.inner.time_remaining()  # type: ignore[no-any-return]
        until: float | None = getattr(flight, "until", None)
        return None if until is None else max(0.0, until - time.monotonic())

    async def _ended(self) -> Any:
        """The inner call that concluded the RPC, or the error that did; waits for it."""
        flight = self._flight
        while True:
            try:
                inner = await flight.current()
            except (AioRpcError, asyncio.CancelledError):
                if flight.error is None:
                    raise
                return None
            await inner.code()
            if flight.last(inner):
                return inner

    async def code(self) -> StatusCode:
        """The final status."""
        inner = await self._ended()
        return await inner.code() if inner else _code(self._flight.error)

    async def details(self) -> str:
        """The final details."""
        inner = await self._ended()
        return await inner.details() if inner else _details(self._flight.error)

    async def debug_error_string(self) -> str:
        """grpcio's own story of the failure."""
        inner = await self._ended()
        return await inner.debug_error_string() if inner else _details(self._flight.error)

    async def trailing_metadata(self) -> Any:
        """The final trailing metadata."""
        inner = await self._ended()
        return await inner.trailing_metadata() if inner else grpc.aio.Metadata()

    async def initial_metadata(self) -> Any:
        """The initial metadata. There is no retry afterwards."""
        flight = self._flight
        while True:
            try:
                inner = await flight.current()
            except AioRpcError:
                return grpc.aio.Metadata()
            metadata = await inner.initial_metadata()
            if not inner.done():
                if flight.rpc is not None:
                    flight.rpc.call.replayable = False
                return metadata
            if flight.last(inner):
                return metadata

    async def wait_for_connection(self) -> None:
        """Wait until an endpoint took the call. Raises AioRpcError."""
        flight = self._flight
        while True:
            inner = await flight.current()
            try:
                await inner.wait_for_connection()
            except AioRpcError:
                if flight.last(inner):
                    raise
            else:
                return

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._flight.inner or self._flight.error!r}>"


def _code(error: BaseException | None) -> StatusCode:
    return error.code() if isinstance(error, grpc.RpcError) else StatusCode.CANCELLED


def _details(error: BaseException | None) -> str:
    return (error.details() or "") if isinstance(error, grpc.RpcError) else LOCALLY_CANCELLED


class _Answered(Flight, _Routed):
    """One response. grpcio's task keeps its inner call alive, so nobody can drop it: call and flight are one object."""

    @property
    def _flight(self) -> Flight:  # type: ignore[override]
        return self

    @property
    def flight(self) -> Flight:
        """Itself."""
        return self

    def __await__(self) -> Generator[Any, None, Any]:
        return self._answer().__await__()

    async def _answer(self) -> Any:
        flight = self._flight
        try:
            while True:
                inner = flight.inner or await flight.current()
                try:
                    return await inner
                except AioRpcError as error:
                    if flight.last(inner, error):
                        raise
        except asyncio.CancelledError:
            flight.give_up()
            raise


class _Streamed(_Routed):
    """A stream of responses."""

    def __init__(self, *what: Any) -> None:
        self._flight = self.flight = Flight(*what)

    def __del__(self) -> None:
        flight = self._flight
        if not flight.over:
            flight.drop()

    _messages: weakref.ref[AsyncIterator[Any]] | None = None

    def __aiter__(self) -> AsyncIterator[Any]:
        # The iterator keeps the call, never the other way round: dropping both must end the RPC at once.
        messages = self._messages() if self._messages is not None else None
        if messages is None:
            messages = self._iterate()
            self._messages = weakref.ref(messages)
        return messages

    async def _iterate(self) -> AsyncIterator[Any]:
        flight = self._flight
        while True:
            inner = flight.inner or await flight.current()
            try:
                async for message in inner:
                    if not flight.streaming:
                        flight.delivered()
                    yield message
            except AioRpcError as error:
                if flight.last(inner, error):
                    raise
            else:
                return

    async def read(self) -> Any:
        """The next message, or grpc.aio.EOF."""
        flight = self._flight
        while True:
            inner = await flight.current()
            try:
                message = await inner.read()
            except AioRpcError as error:
                if flight.last(inner, error):
                    raise
            else:
                if message is not grpc.aio.EOF:
                    flight.delivered()
                return message


class _Writable(_Routed):
    """A stream of requests that the caller may write itself."""

    async def write(self, request: Any) -> None:
        """Send one message. Raises AioRpcError, asyncio.InvalidStateError."""
        flight = self._flight
        while True:
            inner = await flight.current()
            try:
                await inner.write(request)
            except (AioRpcError, asyncio.InvalidStateError) as error:
                if flight.last(inner, error):
                    raise
            else:
                flight.wrote = True
                return

    async def done_writing(self) -> None:
        """End the requests. Idempotent."""
        inner = await self._flight.current()
        self._flight.wrote = True
        await inner.done_writing()


class RoutedUnaryUnaryCall(_Answered, grpc.aio.UnaryUnaryCall):  # type: ignore[type-arg]
    """One request, one response: await it."""


class RoutedUnaryStreamCall(_Streamed, grpc.aio.UnaryStreamCall):  # type: ignore[type-arg]
    """One request, many responses: iterate over it, or `read`."""


class RoutedStreamUnaryCall(_Writable, _Answered, grpc.aio.StreamUnaryCall):  # type: ignore[type-arg]
    """Many requests, one response: `write`, then await it."""


class RoutedStreamStreamCall(_Writable, _Streamed, grpc.aio.StreamStreamCall):  # type: ignore[type-arg]
    """Many requests, many responses."""
