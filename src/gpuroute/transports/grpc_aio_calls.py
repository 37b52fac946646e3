"""What an asyncio channel's users hold: calls of the four kinds, over as many attempts as it takes.

They share a `Flight` with grpcio's callbacks, which must not keep them alive: a dropped stream is cancelled.
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

from gpuroute.transports.grpc_aio_flight import Flight
from gpuroute.transports.grpc_errors import FINISHED, LOCALLY_CANCELLED

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator


class _Routed(grpc.aio.Call):
    """Call methods common to the four kinds."""

    _flight: Flight
    _channel = None
    """grpcio before 1.83 looks for it, in the calls of all tasks, whenever a channel is closed, and raises without it."""

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
        return None if flight.until is None else max(0.0, flight.until - time.monotonic())

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
            except (AioRpcError, asyncio.CancelledError):
                if flight.error is None:
                    raise
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

    flight = None
    """It is its own."""

    @property
    def _flight(self) -> Flight:  # type: ignore[override]
        return self

    def __await__(self) -> Generator[Any, None, Any]:
        while True:
            inner = self.inner
            if inner is None:
                inner = yield from self.following().__await__()
            try:
                return (yield from inner.__await__())
            except AioRpcError as error:
                if self.last(inner, error):
                    raise
            except asyncio.CancelledError:
                if not self.replaced(inner):
                    self.give_up()
                    raise
            except Exception:
                self.broke(inner)
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
            inner = flight.inner or await flight.following()
            flight.reads()
            try:
                async for message in inner:
                    if not flight.delivered(inner):
                        break
                    yield message
                    flight.reads()
                else:
                    return
            except AioRpcError as error:
                if flight.last(inner, error):
                    raise
            except asyncio.CancelledError:
                if not flight.replaced(inner):
                    flight.give_up()
                    raise
            except Exception:
                flight.broke(inner)
                raise

    async def read(self) -> Any:
        """The next message, or grpc.aio.EOF."""
        flight = self._flight
        while True:
            inner = await flight.following()
            flight.reads()
            try:
                message = await inner.read()
            except AioRpcError as error:
                if flight.last(inner, error):
                    raise
            except asyncio.CancelledError:
                if not flight.replaced(inner):
                    flight.give_up()
                    raise
            else:
                if message is grpc.aio.EOF or flight.delivered(inner):
                    return message


class _Writable(_Routed):
    """A stream of requests that the caller may write itself."""

    async def write(self, request: Any) -> None:
        """Send one message. Raises AioRpcError, asyncio.InvalidStateError."""
        flight = self._flight
        while True:
            if isinstance(flight.error, asyncio.CancelledError):
                raise asyncio.InvalidStateError(FINISHED)
            inner = await flight.following()
            try:
                await inner.write(request)
            except (AioRpcError, asyncio.InvalidStateError) as error:
                if flight.last(inner, error):
                    raise
            except asyncio.CancelledError:
                flight.give_up()
                raise
            else:
                flight.wrote = True
                return

    async def done_writing(self) -> None:
        """End the requests. Idempotent."""
        flight = self._flight
        while not flight.over:
            inner = await flight.following()
            try:
                await inner.done_writing()
            except grpc.aio.InternalError:  # grpcio's way to say that it is over, for a reason that the status tells
                await inner.code()
            if flight.inner is inner or flight.last(inner):
                flight.wrote = True
                return


class RoutedUnaryUnaryCall(_Answered, grpc.aio.UnaryUnaryCall):  # type: ignore[type-arg]
    """One request, one response: await it."""


class RoutedUnaryStreamCall(_Streamed, grpc.aio.UnaryStreamCall):  # type: ignore[type-arg]
    """One request, many responses: iterate over it, or `read`."""


class RoutedStreamUnaryCall(_Writable, _Answered, grpc.aio.StreamUnaryCall):  # type: ignore[type-arg]
    """Many requests, one response: `write`, then await it."""


class RoutedStreamStreamCall(_Writable, _Streamed, grpc.aio.StreamStreamCall):  # type: ignore[type-arg]
    """Many requests, many responses."""
