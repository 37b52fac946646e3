"""Calls that do not block their caller (futures and streams), over as many attempts as it takes.

Three parts, so that a dropped iterator is noticed: `RoutedCall` is what the user holds; `Flight` is the state it shares
with grpcio's callbacks, which must not keep the user's object alive; the inner call is grpcio's own, of one attempt.

Who learns of an attempt's end first, the reader or grpcio's event thread, settles it under the flight's lock; a retry
then replaces the inner call, and readers go on with the new one. Once a message was delivered there is no retry.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
from grpc import StatusCode

from gpuroute.errors import DeadlineExceeded, NoEndpointAvailable
from gpuroute.transports.grpc_errors import LOCALLY_CANCELLED, EndedCall, ended

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from gpuroute.transports.grpc_peers import Peer
    from gpuroute.transports.grpc_rpc import Rpc

    Start = Callable[[Peer, Rpc], Any]


class Requests:
    """The caller's one-shot request iterator, of which the first message can be sent again if it never left.

    grpcio takes the second message only after the first was accepted by a connection, so one message is all to keep.
    """

    __slots__ = ("_first", "_iterator", "_lock", "_taken", "sent")

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._lock = threading.Lock()
        self._first: Any = None
        self._taken = False
        self.sent = False

    def view(self) -> Iterator[Any]:
        """All messages from the first, for one attempt. The thread of an earlier attempt may still be waiting."""
        with self._lock:
            if not self._taken:
                self._first = next(self._iterator, self)
                self._taken = True
        if self._first is self:
            return
        yield self._first
        self.sent = True
        self._first = None
        yield from self._iterator


class Flight:
    """What one RPC's user, its attempts and its timers share. Safe from any thread."""

    __slots__ = ("_callbacks", "_cancelled", "_changed", "_requests", "_start", "_timer", "inner", "over", "rpc",
                 "streaming")  # fmt: skip

    def __init__(self, rpc: Rpc, start: Start, requests: Requests | None = None) -> None:
        self.rpc = rpc
        self.inner: Any = None
        self.over = False
        self.streaming = False
        self._start = start
        self._requests = requests
        # Re-entrant: the collector may end a dropped call in a thread that holds this very lock.
        self._changed = threading.Condition()
        self._callbacks: list[Callable[[], None]] = []
        self._cancelled = False
        self._timer: threading.Timer | None = None

    def launch(self) -> None:
        """Begin the next attempt, now or when its delay has passed. Never blocks; raises only for the first attempt."""
        with self._changed:
            if self.over:
                return
            inner = self._cancelled_call() if self._cancelled else self._attempt()
            if inner is None:
                return
            self.inner = inner
            self._changed.notify_all()
        inner.add_done_callback(self.settle)

    def _attempt(self) -> Any:
        """The inner call of a new attempt, or of how it failed to begin; None if a timer will begin it."""
        rpc = self.rpc
        try:
            peer = rpc.next()
            if peer is not None:
                return self._start(peer, rpc)
        except (NoEndpointAvailable, DeadlineExceeded) as error:
            return rpc.cause if isinstance(error, NoEndpointAvailable) and rpc.cause else ended(error)
        except Exception as error:
            rpc.cancelled()
            if len(rpc.call.history) <= 1:
                raise  # to who began the call; a later attempt has nobody to raise to
            return EndedCall(StatusCode.INTERNAL, f"the attempt could not begin: {error}")
        self._timer = threading.Timer(rpc.wait, self.launch)
        self._timer.daemon = True
        self._timer.start()
        return None

    @staticmethod
    def _cancelled_call() -> EndedCall:
        return EndedCall(StatusCode.CANCELLED, LOCALLY_CANCELLED)

    def settle(self, inner: Any) -> None:
        """Learn from the end of `inner`, and retry or conclude. Idempotent; only the present inner call counts."""
        with self._changed:
            if inner is not self.inner or self.over:
                return
            if not self._conclude(inner):
                self.inner = None
                again = True
            else:
                again = False
                self.over = True
                self._changed.notify_all()
                callbacks, self._callbacks = self._callbacks, []
        if again:
            self.launch()
            return
        for callback in callbacks:
            callback()

    def _conclude(self, inner: Any) -> bool:
        rpc = self.rpc
        if self._cancelled or inner.cancelled() or rpc.hub.closed:
            rpc.cancelled()
            return True
        code = inner.code()
        if code is StatusCode.OK:
            rpc.succeeded(inner.trailing_metadata)
            return True
        sent = self._requests is not None and self._requests.sent
        if not rpc.failed(code, inner.details(), inner.trailing_metadata(), sent=sent):
            rpc.note(inner)
            return True
        rpc.cause = inner
        return False

    def current(self, until: float | None = None) -> Any:
        """The call of the present attempt; waits while a retry is due. Raises grpc.FutureTimeoutError."""
        inner = self.inner
        if inner is not None:
            return inner
        with self._changed:
            while self.inner is None:
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    raise grpc.FutureTimeoutError
                self._changed.wait(left)
            return self.inner

    def last(self, inner: Any) -> bool:
        """Settle an inner call that has ended; True if no other one follows it."""
        self.settle(inner)
        return self.over and self.inner is inner

    def cancel(self) -> bool:
        """Give up; True if that changed anything."""
        with self._changed:
            if self.over:
                return False
            self._cancelled = True
            inner = self.inner
            if inner is None:
                if self._timer is not None:
                    self._timer.cancel()
                inner = self.inner = self._cancelled_call()
                self._changed.notify_all()
                done = True
            else:
                done = inner.cancel()
        self.settle(inner)
        return bool(done)

    def drop(self) -> None:
        """The caller dropped its call. The collector may run this at any moment, in a thread that holds any lock, so it
        does what grpcio's own calls do there, cancel; grpcio's event thread settles the rest."""
        if not self.over:
            self._cancelled = True
            inner = self.inner
            if inner is not None:
                inner.cancel()

    def when_over(self, callback: Callable[[], None]) -> bool:
        """Call back once it is over; False if it is over already."""
        with self._changed:
            if self.over:
                return False
            self._callbacks.append(callback)
            return True

    def headers_shown(self) -> None:
        """The caller has seen an attempt's initial metadata: no other attempt may contradict them."""
        self.rpc.call.replayable = False


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
            try:
                message = next(inner)
            except (StopIteration, grpc.RpcError):
                if flight.last(inner):
                    raise
            else:
                if not flight.streaming:
                    flight.streaming = True
                    flight.rpc.first()
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
            if not inner.done():
                flight.headers_shown()
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
