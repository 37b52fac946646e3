"""Calls of the asyncio channel, over as many attempts as it takes. Everything here runs in one event loop.

As in `grpc_flight`, the user holds a `Routed...Call`, which shares a `Flight` with grpcio's callbacks; a dropped call is
cancelled by its `__del__`. grpcio runs done-callbacks the moment a status arrives, before any awaiting task wakes up, so
when a reader sees an attempt end, its successor has already been decided on.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

from grpc import StatusCode
from grpc.aio import AioRpcError

from gpuroute.errors import DeadlineExceeded, NoEndpointAvailable
from gpuroute.transports.grpc_errors import AioStalled, aio_ended
from gpuroute.transports.grpc_watch import LOOK_EVERY_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from gpuroute.transports.grpc_method import Method
    from gpuroute.transports.grpc_peers import Peer
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


def _is_cancelled_here(inner: Any) -> bool:
    """True if a call that has ended was cancelled on this side; `cancelled()` is true of a server's CANCELLED, too."""
    below = getattr(inner, "_cython_call", None)
    return bool(inner.cancelled() if below is None else below.is_locally_cancelled())


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
    """The state machine of one RPC: what its attempts send, its timers, and who waits for it.

    `twin` is a second attempt beside the present one, for unary calls that may hedge.
    """

    # What is not yet, or what few calls need, is looked up in the class until it is set.
    rpc: Rpc | None = None
    inner: Any = None
    twin: tuple[Any, Rpc] | None = None
    over = False
    wrote = False
    messages = 0
    until: float | None = None  # the deadline of a call that waits for the first view of the fleet
    reading_since: float | None = None
    error: BaseException | None = None  # the end, where there is no inner call to tell it
    _cancelled = False
    _awaited = False
    _changed: asyncio.Event | None = None
    _callbacks: list[Callable[[], None]] | None = None
    _timer: asyncio.TimerHandle | asyncio.Task[None] | None = None

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        method: Method,
        body: Any,
        requests: Requests | None,
        credentials: Any,
        compression: Any,
    ) -> None:
        self.loop = loop
        self.method = method
        self.body = body
        self.requests = requests
        self.credentials = credentials
        self.compression = compression

    def launch(self, *, first: bool = False) -> None:
        """Begin the next attempt, now or when its delay has passed.

        `first`: who began the call is here, and an exception tells him why it cannot begin.
        """
        if self.over:
            return
        rpc: Any = self.rpc
        try:
            peer = rpc.next()
            if peer is None:
                rpc.hub.asleep.add(self)
                self._timer = self.loop.call_later(0.0 if rpc.hub.closed else rpc.wait, self.wake)
                return
            inner = self.send(peer, rpc.left, rpc.sending)
        except (NoEndpointAvailable, DeadlineExceeded) as error:
            cause = rpc.cause if isinstance(error, NoEndpointAvailable) else None
            self.end(cause or aio_ended(error))
            return
        except Exception as error:
            if rpc.hub.closed:
                self.give_up()
                return
            rpc.cancelled()
            self.end(error)
            if first:
                raise
            return
        self.inner = inner
        if self._awaited:
            self._wake()
        inner.add_done_callback(self.settle)
        if rpc.races:
            self._hedge_later(inner, rpc)

    def wake(self) -> None:
        """The wait for the next attempt is over."""
        if self.rpc is not None:
            self.rpc.hub.asleep.discard(self)
        self.launch()

    def send(self, peer: Peer, timeout: float | None, metadata: Any, patient: bool | None = None) -> Any:
        """grpcio's own call, begun there."""
        send = peer.methods.get(self.method) or peer.bind(self.method)
        return send(
            self.body if self.requests is None else self.requests.view(),
            timeout=timeout,
            metadata=metadata,
            credentials=self.credentials,
            wait_for_ready=patient,
            compression=self.compression,
        )

    def launch_later(self, begin: Coroutine[Any, Any, None]) -> None:
        """Let a task begin the first attempt."""
        self._timer = self.loop.create_task(begin)

    def adopt(self, inner: Any) -> None:
        """Follow this call from now on."""
        self.inner = inner
        self._wake()
        inner.add_done_callback(self.settle)

    def _hedge_later(self, inner: Any, rpc: Rpc) -> None:
        after = rpc.hedge_after
        if after < math.inf:
            self._timer = self.loop.call_later(after, self._hedge, inner)

    def _hedge(self, inner: Any) -> None:
        """Begin a second attempt, if the first is still at it."""
        if self.over or self.inner is not inner or self.twin is not None or self.rpc is None or inner.done():
            return
        other = self.rpc.second()
        if other is not None and other.peer is not None:
            try:
                second = self.send(other.peer, other.left, other.sending)
            except Exception:  # its channel was closed meanwhile: the first goes on alone
                other.lose()
                return
            self.twin = (second, other)
            second.add_done_callback(self.settle)

    def settle(self, inner: Any) -> None:
        """Learn from the end of an attempt, and retry, let its twin go on, or conclude."""
        twin = self.twin
        if self.over or (inner is not self.inner and (twin is None or inner is not twin[0])):
            return
        if twin is not None:
            self._settle_race(inner, twin)
        elif self._conclude(inner, self.rpc):
            self.over = True
            if self._awaited or self._callbacks is not None:
                self._land()
        else:
            self.inner = None
            self.launch()

    def _settle_race(self, inner: Any, twin: tuple[Any, Rpc]) -> None:
        assert self.rpc is not None
        first = self.inner, self.rpc
        (_, rpc), (other, other_rpc) = (first, twin) if inner is self.inner else (twin, first)
        concluded = self._conclude(inner, rpc)
        self.twin = None
        if not concluded:
            self.inner, self.rpc = other, other_rpc
            return
        other_rpc.lose()
        self.inner, self.rpc = inner, rpc
        self._land()
        other.cancel()

    def _conclude(self, inner: Any, rpc: Rpc | None) -> bool:
        """True if this end of an attempt is that of the call."""
        if rpc is None:  # it was not routed
            return True
        try:
            below = getattr(inner, "_cython_call", None)  # grpcio tells only who awaits it; this asks where it knows
            if (at_once(inner.code()) is StatusCode.OK if below is None else below.is_ok()) and not self._cancelled:
                rpc.succeeded(at_once(inner.trailing_metadata()) if rpc.listens else None)
                return True
            if self._cancelled or _is_cancelled_here(inner) or rpc.hub.closed:
                rpc.cancelled()
                return True
            code, details = at_once(inner.code()), at_once(inner.details())
            trailing = at_once(inner.trailing_metadata())
            sent = self.wrote or (self.requests is not None and self.requests.sent)
            if not rpc.failed(code, details, trailing, sent) and self.twin is None:
                return True
            rpc.cause = AioRpcError(code, at_once(inner.initial_metadata()), trailing, details)
            return False
        except Exception:  # an interceptor's: whoever awaits the inner call gets it
            rpc.cancelled()
            return True

    def watch(self) -> None:
        """Look, until the end, whether the endpoint of a stream is silent for longer than is normal; then give it up."""
        inner, rpc = self.inner, self.rpc
        if self.over or rpc is None:
            return
        left = rpc.silence_left(self.reading_since) if inner is not None else math.inf
        if left <= 0:
            self._give_up_silent(inner, rpc)
            left = math.inf
        self.loop.call_later(min(max(left, LOOK_EVERY_S), 10 * LOOK_EVERY_S), self.watch)

    def _give_up_silent(self, inner: Any, rpc: Rpc) -> None:
        attempt, now = rpc.attempt, rpc.hub.clock()
        assert attempt is not None
        message = f"{attempt.endpoint.id}: silent for {now - attempt.last:.2f} s after {self.messages} messages"
        again = rpc.stalled(now)
        self.inner = None
        if again:
            self.launch()
        else:
            self.end(AioStalled(message, attempt.endpoint.id))
        inner.cancel()

    def replaced(self, inner: Any) -> bool:
        """True if a reader was cancelled because its attempt was given up, not because somebody cancelled the reader."""
        task = asyncio.current_task()
        return self.inner is not inner and not self._cancelled and (task is None or not task.cancelling())

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
        self._awaited = False
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
                self._awaited = True
            await self._changed.wait()
        return self.inner

    async def following(self) -> Any:
        """Like `current`, for those whose cancellation ends the call."""
        try:
            return self.inner or await self.current()
        except asyncio.CancelledError:
            self.give_up()
            raise

    def last(self, inner: Any, error: BaseException | None = None) -> bool:
        """True if no other attempt follows this one, which has ended (with `error`)."""
        self.settle(inner)
        if self.inner is not inner:
            return False
        if error is not None and self.rpc is not None:
            self.rpc.note(error)
        return True

    def reads(self) -> None:
        """The reader begins to wait for a message."""
        if self.rpc is not None:
            self.reading_since = self.rpc.hub.clock()

    def delivered(self, inner: Any) -> bool:
        """A message is about to be handed out: there is no retry from here on. False if there was one already."""
        if self.inner is not inner and not self.messages:
            return False
        self.reading_since = None
        self.messages += 1
        if self.rpc is None:
            return True
        if self.messages == 1:
            self.rpc.first()
        else:
            self.rpc.chunk()
        return True

    def broke(self, inner: Any) -> None:
        """Something that is no RPC error came out of the present attempt: an interceptor's, a deserializer's."""
        if inner is self.inner and not self.over:
            if self.rpc is not None:
                self.rpc.cancelled()
            self._land()

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
            self.rpc.hub.asleep.discard(self)
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
