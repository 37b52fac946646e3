"""The body of a response on its way to the caller, and the end of the attempt that brings it.

An attempt ends exactly once, by whichever comes first: the last byte, an error, `close`, a cancelled task, or the garbage
collector (a caller that breaks out of a loop and forgets the response tells nobody else). The sync and the async stream
differ in `await` only; a test holds them together.
"""

from __future__ import annotations

import _thread
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from gpuroute.core.outcome import Outcome
from gpuroute.transports.sse import StreamFailed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from gpuroute.transports.trips import Trip


BURST_S = 0.001
"""Pieces that follow each other more closely came in one packet: that says nothing of the endpoint's pace."""


class _Delivery:
    """What both streams share: the trip, the source, and the chunk that was read before the response was handed out."""

    def __init__(self, trip: Trip, source: Any, chunks: Any, first: bytes | None) -> None:
        self._trip = trip
        self._source = source
        self._chunks = chunks
        self._first = first
        self._open = True

    def _passed(self, chunk: bytes | None) -> bytes | None:
        """Note a chunk that came after the first, or the end."""
        trip = self._trip
        # An attempt that ended before its body (an error status) is not watched: the body is the message.
        if chunk is not None and trip.watch is not None and trip.attempt.outcome is None:
            trip.watch.add(chunk)
            now = trip.settled.clock()
            if now - trip.attempt.last > BURST_S:
                trip.attempt.chunk(now)
        return chunk

    # `_open` falls last: an interrupt on the way leaves the end to `close` or to the garbage collector.

    def _broken(self, error: Exception) -> Exception:
        trip = self._trip
        trip.drop()
        if isinstance(error, StreamFailed):
            trip.failed_inside(error)
        else:
            trip.failed(error)
        self._open = False
        return trip.interruption(error)

    def _finished(self) -> Exception | None:
        """The source ended: what is wrong with that, if anything."""
        trip, problem = self._trip, None
        if trip.watch is None or trip.watch.complete or trip.attempt.outcome is not None:
            trip.end(Outcome.SUCCESS)
        else:
            trip.end(Outcome.FAILED, "ended without its end marker", answered=True)
            problem = trip.interruption(StreamFailed("it ended without its end marker", b"", 0))
        trip.release()
        self._open = False
        return problem

    def _closed(self) -> None:
        trip = self._trip
        trip.drop()
        # An upgraded connection ends like this; and the SDKs hang up at the end marker, before the end of the body.
        if trip.watch is None or trip.watch.ended:
            trip.end(Outcome.SUCCESS)
        else:
            trip.cancelled()
        self._open = False

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self._open = False
            _abandon(self._trip)


def _abandon(trip: Trip) -> None:
    """Cancel a trip for the garbage collector: that runs in any thread at any moment, even while this very thread holds a
    lock that ending an attempt needs. So nothing is done here but to have it done elsewhere."""
    try:
        if trip.pools.loop is not None:
            trip.pools.loop.call_soon_threadsafe(trip.cancelled, "forgotten")
            return
    except RuntimeError:  # the loop has ended, and its connections with it
        trip.connection = None
    with suppress(RuntimeError):  # the interpreter is ending
        _thread.start_new_thread(trip.cancelled, ("forgotten",))


class Stream(_Delivery):
    """The body of a response, for threads."""

    def __iter__(self) -> Iterator[bytes]:
        chunk = self._first
        self._first = None
        try:
            while chunk is not None:
                yield chunk
                chunk = self._passed(next(self._chunks, None))
            self._source.close()
        except StreamFailed as failure:
            broken = self._broken(failure)
            if failure.before:
                yield failure.before
            raise broken from None
        except Exception as error:
            raise self._broken(error) from error
        except BaseException:
            self._closed()
            raise
        problem = self._finished()
        if problem is not None:
            raise problem

    def close(self) -> None:
        """Hang up if the body was not read to its end. Idempotent."""
        if self._open:
            self._closed()


class AsyncStream(_Delivery):
    """The body of a response, for tasks."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        chunk = self._first
        self._first = None
        try:
            while chunk is not None:
                yield chunk
                chunk = self._passed(await anext(self._chunks, None))
            await self._source.aclose()
        except StreamFailed as failure:
            broken = self._broken(failure)
            if failure.before:
                yield failure.before
            raise broken from None
        except Exception as error:
            raise self._broken(error) from error
        except BaseException:
            self._closed()
            raise
        problem = self._finished()
        if problem is not None:
            raise problem

    async def aclose(self) -> None:
        """Hang up if the body was not read to its end. Idempotent."""
        if self._open:
            self._closed()
