"""What futures and streams of a synchronous channel return. It shares a `Flight` with grpcio's callbacks."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from grpc import StatusCode

    from gpuroute.transports.grpc_flight import Flight


class RoutedCall(grpc.Call, grpc.Future):  # type: ignore[type-arg]
    """What futures and streams return: call, future and iterator, like grpcio's own. Safe from any thread.

    Dropping it cancels the RPC, unless a done-callback keeps it, as with grpcio's.
    """

    def __init__(self, flight: Flight) -> None:
        self._flight = flight

    def __del__(self) -> None:
        self._flight.drop()

    def __iter__(self) -> RoutedCall:
        return self

    def __next__(self) -> Any:
        flight = self._flight
        while True:
            inner = flight.current()
            flight.reading_since = flight.rpc.hub.clock()
            try:
                message = next(inner)
            except (StopIteration, grpc.RpcError):
                if flight.last(inner):
                    raise
            else:
                if flight.delivered(inner):
                    return message

    def next(self) -> Any:
        """The next response message."""
        return self.__next__()

    def _ended(self, timeout: float | None = None) -> Any:
        """The inner call that concluded the RPC; waits for it."""
        flight, until = self._flight, None if timeout is None else time.monotonic() + timeout
        while True:
            inner = flight.current(until)
            left = None if until is None else max(0.0, until - time.monotonic())
            try:
                inner.exception(timeout=left)
            except grpc.FutureCancelledError:
                pass
            if flight.last(inner):
                return inner

    def result(self, timeout: float | None = None) -> Any:
        """The response. Raises the RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError."""
        return self._ended(timeout).result()

    def exception(self, timeout: float | None = None) -> Exception | None:
        """The RpcError, or None after success."""
        return self._ended(timeout).exception()  # type: ignore[no-any-return]

    def traceback(self, timeout: float | None = None) -> TracebackType | None:
        """The traceback of `exception`."""
        return self._ended(timeout).traceback()  # type: ignore[no-any-return]

    def code(self) -> StatusCode:
        """The final status; waits for it."""
        return self._ended().code()  # type: ignore[no-any-return]

    def details(self) -> str:
        """The final details; waits for them."""
        return self._ended().details()  # type: ignore[no-any-return]

    def debug_error_string(self) -> str:
        """grpcio's own story of the failure; waits for it."""
        return self._ended().debug_error_string()  # type: ignore[no-any-return]

    def trailing_metadata(self) -> Any:
        """The final trailing metadata; waits for them."""
        return self._ended().trailing_metadata()

    def initial_metadata(self) -> Any:
        """The initial metadata; waits for them. There is no retry afterwards."""
        flight = self._flight
        while True:
            inner = flight.current()
            metadata = inner.initial_metadata()
            if not inner.done() and flight.headers_shown(inner):
                return metadata
            if flight.last(inner):
                return metadata

    def done(self) -> bool:
        """True once it is over."""
        inner = self._flight.inner
        return self._flight.over or (inner is not None and inner.done() and self._flight.last(inner))

    def running(self) -> bool:
        """True until it is over."""
        return not self.done()

    def is_active(self) -> bool:
        """True until it is over."""
        return not self.done()

    def cancelled(self) -> bool:
        """True if the caller cancelled it."""
        inner = self._flight.inner
        return inner is not None and inner.cancelled()

    def cancel(self) -> bool:
        """Cancel; True if it was still running."""
        return self._flight.cancel()

    def time_remaining(self) -> Any:
        """Seconds until the deadline, None without one."""
        return self._flight.rpc.time_left()

    def add_done_callback(self, fn: Callable[[Any], None]) -> None:
        """Call `fn(self)` once it is over; now if it is."""
        if not self._flight.when_over(partial(fn, self)):
            fn(self)

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Call back once it is over; False if it is."""
        return self._flight.when_over(callback)

    def __repr__(self) -> str:
        return f"<RoutedCall {self._flight.inner!r}>"
