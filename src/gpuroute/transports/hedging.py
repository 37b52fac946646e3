"""Two attempts of one call side by side: the first answer wins, the other is hung up on.

When a second attempt is due, and whether it may start, is the core's decision (`Call.hedge_after`, `Call.hedge`). Here
are the two ways to wait for both: tasks, and threads for callers without an event loop. A call costs a task or a thread
only if its pool (or the call itself) has `hedge` or `reroute` on.

An attempt that fails while the other one is under way does not end the call; the other decides. Losing teaches nothing,
closes the socket, and counts for neither endpoint.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import queue
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from gpuroute.transports.trips import Trip


def patience_left(first: Trip) -> float | None:
    """Seconds until a second attempt is due beside this one; None: never."""
    after = first.call.hedge_after(first.attempt)
    if after == math.inf:
        return None
    return max(0.0, after - (first.settled.clock() - first.attempt.started))


def goes_on(last: Trip, *, again: bool) -> bool:
    """Whether another attempt follows a race, now that its last one is heard.

    Which of two failures ends the call is decided where they end (`Call.finish`); they may be heard the other way round.
    """
    return again and last.lost and len(last.call.history) < last.call.attempts


async def race_tasks(
    first: Trip, run: Callable[[Trip], Coroutine[Any, Any, Any]], second: Callable[[Trip], Trip | None]
) -> Any:
    """What `run(first)` gives, or `run` of a second attempt if that is quicker; `first.again` is then the winner's."""
    live, again = {asyncio.ensure_future(run(first)): first}, False
    timeout = patience_left(first)
    try:
        while True:
            done, _ = await asyncio.wait(live, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            timeout = None
            for task in done:
                trip = live.pop(task)
                again = again or trip.again
                if not (trip.lost and live):
                    first.again = goes_on(trip, again=again)
                    return task.result()
            if not done and (other := second(first)) is not None:
                live[asyncio.ensure_future(run(other))] = other
    finally:
        for task, trip in live.items():
            trip.lose()
            task.cancel()


def race_threads(first: Trip, run: Callable[[Trip], Any], second: Callable[[Trip], Trip | None]) -> Any:
    """The same for a thread: each attempt runs in one of its own, and the caller's thread waits."""
    ended: queue.SimpleQueue[tuple[Trip, Any, BaseException | None]] = queue.SimpleQueue()
    live, again = {first}, False
    try:
        _begin(first, run, ended)
    except RuntimeError:  # no more threads: this one will do
        return run(first)
    timeout = patience_left(first)
    try:
        while True:
            try:
                trip, result, error = ended.get(timeout=timeout)
            except queue.Empty:
                timeout = None
                if (other := second(first)) is not None:
                    live.add(other)
                    try:
                        _begin(other, run, ended)
                    except RuntimeError:
                        live.discard(other)
                        other.lose()
                continue
            live.discard(trip)
            again = again or trip.again
            if error is not None:
                raise error
            if not (trip.lost and live):
                first.again = goes_on(trip, again=again)
                return result
    finally:
        for trip in live:
            trip.lose()


def _begin(
    trip: Trip, run: Callable[[Trip], Any], ended: queue.SimpleQueue[tuple[Trip, Any, BaseException | None]]
) -> None:
    context = contextvars.copy_context()

    def work() -> None:
        try:
            ended.put((trip, context.run(run, trip), None))
        except BaseException as error:
            ended.put((trip, None, error))

    threading.Thread(target=work, name="gpuroute-hedge", daemon=True).start()
