"""Calls that do not block their caller (futures and streams), over as many attempts as it takes.

Three parts, so that a dropped iterator is noticed: `RoutedCall` is what the user holds; `Flight` is the state it shares
with grpcio's callbacks, which must not keep the user's object alive; the inner call is grpcio's own, of one attempt.

Who learns of an attempt's end first, the reader or grpcio's event thread, settles it under the flight's lock; a retry
then replaces the inner call, and readers go on with the new one. Once a message was delivered there is no retry.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
from grpc import StatusCode

from gpuroute.errors import DeadlineExceeded, NoEndpointAvailable
from gpuroute.transports.grpc_errors import LOCALLY_CANCELLED, ClosedUnder, EndedCall, Stalled, ended

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gpuroute.transports.grpc_peers import Peer
    from gpuroute.transports.grpc_rpc import Rpc

    Start = Callable[[Peer, Rpc], Any]

_LOGGER = logging.getLogger("gpuroute")


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
        for message in self._iterator:  # noqa: UP028  (that would close it with this view; the caller may go on with it)
            yield message


class Flight:
    """What one RPC's user, its attempts and its timers share. Safe from any thread.

    `twin` is a second attempt beside the present one, for unary calls that may hedge.
    """

    __slots__ = ("_callbacks", "_cancelled", "_changed", "_requests", "_start", "_timer", "inner", "messages", "over",
                 "reading_since", "rpc", "twin")  # fmt: skip

    def __init__(self, rpc: Rpc, start: Start, requests: Requests | None = None) -> None:
        self.rpc = rpc
        self.inner: Any = None
        self.twin: tuple[Any, Rpc] | None = None
        self.over = False
        self.messages = 0
        self.reading_since: float | None = None
        self._start = start
        self._requests = requests
        # Re-entrant: the collector may end a dropped call in a thread that holds this very lock.
        self._changed = threading.Condition()
        self._callbacks: list[Callable[[], None]] = []
        self._cancelled = False
        self._timer: threading.Timer | None = None

    def launch(self, *, first: bool = False) -> None:
        """Begin the next attempt, now or when its delay has passed. Never blocks.

        `first`: who began the call is here, and an exception tells him why it cannot begin.
        """
        with self._changed:
            self.rpc.hub.asleep.discard(self)
            if self.over:
                return
            inner = self._cancelled_call() if self._cancelled else self._attempt(first)
            if inner is None:
                return
            self.inner = inner
            self._changed.notify_all()
            after = self.rpc.hedge_after
        inner.add_done_callback(self.settle)
        if after < math.inf:
            with suppress(RuntimeError):  # no more threads: it goes on alone
                self._later(after, partial(self._hedge, inner))

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self._timer = threading.Timer(seconds, action)
        self._timer.daemon = True
        self._timer.start()

    def _attempt(self, first: bool) -> Any:
        """The inner call of a new attempt, or of how it failed to begin; None if a timer will begin it."""
        rpc = self.rpc
        try:
            peer = rpc.next()
            if peer is not None:
                return self._start(peer, rpc)
            rpc.hub.asleep.add(self)
            self._later(0.0 if rpc.hub.closed else rpc.wait, self.launch)
        except (NoEndpointAvailable, DeadlineExceeded) as error:
            return rpc.cause if isinstance(error, NoEndpointAvailable) and rpc.cause else ended(error)
        except ClosedUnder as error:
            return error
        except Exception as error:
            rpc.hub.asleep.discard(self)
            rpc.cancelled()
            if first:
                raise
            return EndedCall(StatusCode.INTERNAL, f"the attempt could not begin: {error}")
        return None

    @staticmethod
    def _cancelled_call() -> EndedCall:
        return EndedCall(StatusCode.CANCELLED, LOCALLY_CANCELLED)

    def _hedge(self, inner: Any) -> None:
        """Begin a second attempt, if the first is still at it."""
        with self._changed:
            if self.over or self.inner is not inner or self.twin is not None or self._cancelled or inner.done():
                return
            other = self.rpc.second()
            if other is None or other.peer is None:
                return
            try:
                second = self._start(other.peer, other)
            except Exception:  # its channel was closed meanwhile: the first goes on alone
                other.lose()
                return
            self.twin = (second, other)
        second.add_done_callback(self.settle)

    def settle(self, inner: Any) -> None:
        """Learn from the end of an attempt, and retry, let its twin go on, or conclude. Idempotent."""
        loser = None
        with self._changed:
            rpc = self._rpc_of(inner)
            if rpc is None or self.over:
                return
            concluded = self._conclude(inner, rpc)
            if self.twin is not None:
                other = self.twin if inner is self.inner else (self.inner, self.rpc)
                self.twin = None
                if not concluded:
                    self.inner, self.rpc = other
                    return
                loser = other[0]
                other[1].lose()
            self.inner, self.rpc, self.over = (inner if concluded else None), rpc, concluded
            self._changed.notify_all()
            callbacks, self._callbacks = (self._callbacks, []) if concluded else ([], self._callbacks)
        if loser is not None:
            loser.cancel()
        if not concluded:
            self.launch()
        for callback in callbacks:
            try:
                callback()
            except Exception:  # as grpcio's own calls do: the next ones are called, and who ended the call goes on
                _LOGGER.exception("a callback of a call that is over raised")

    def _rpc_of(self, inner: Any) -> Rpc | None:
        if inner is self.inner:
            return self.rpc
        return self.twin[1] if self.twin is not None and inner is self.twin[0] else None

    def _conclude(self, inner: Any, rpc: Rpc) -> bool:
        """True if this end of an attempt is that of the call."""
        if self._cancelled or inner.cancelled() or rpc.hub.closed:
            rpc.cancelled()
            return True
        code = inner.code()
        if code is StatusCode.OK:
            rpc.succeeded(inner.trailing_metadata() if rpc.listens else None)
            return True
        sent = self._requests is not None and self._requests.sent
        again = rpc.failed(code, inner.details(), inner.trailing_metadata(), sent=sent)
        if not again and self.twin is None:
            rpc.note(inner)
            return True
        rpc.cause = inner
        return False

    def look(self) -> None:
        """Give up the present attempt of a stream if its endpoint is silent for longer than is normal."""
        with self._changed:
            inner, rpc = self.inner, self.rpc
            if self.over or inner is None or rpc.silence_left(self.reading_since) > 0:
                return
            attempt, now = rpc.attempt, rpc.hub.clock()
            assert attempt is not None
            message = f"silent for {now - attempt.last:.2f} s after {self.messages} messages"
            if rpc.stalled(now):
                self.inner = None
            else:
                self.inner = Stalled(f"{attempt.endpoint.id}: {message}", attempt.endpoint.id)
                rpc.note(self.inner)
            again = self.inner is None
            following = self.inner
            self._changed.notify_all()
        inner.cancel()
        if again:
            self.launch()
        else:
            self.settle(following)

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
                self.rpc.hub.asleep.discard(self)
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

    def delivered(self, inner: Any) -> bool:
        """A message is about to be handed out: there is no retry from here on. False if there was one already.

        grpcio's event thread may have heard of the attempt's failure while the reader was waking up with its first
        message; the call then began anew elsewhere, and that message is not the caller's any more.
        """
        self.reading_since = None
        if self.messages:
            self.messages += 1
            self.rpc.chunk()
            return True
        with self._changed:
            if self.inner is not inner:
                return False
            self.messages = 1
            self.rpc.first()
        return True

    def headers_shown(self, inner: Any) -> bool:
        """The caller sees an attempt's initial metadata: no other attempt may contradict them. False if one does."""
        with self._changed:
            if self.inner is not inner:
                return False
            self.rpc.call.replayable = False
        return True
