"""What a process shows of its calls: log lines for failed attempts, and OpenTelemetry once an SDK is installed.

Drivers ask `observer()` once per call and tell it three things: an attempt starts, an attempt ended, the call ended.
Without an OpenTelemetry SDK that costs less than a microsecond per call, and a log line for failures only.
Nothing here raises into a call.
"""

from __future__ import annotations

import sys
import time
import weakref
from typing import TYPE_CHECKING, Protocol

from gpuroute.observe.logs import log_failure

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

    from gpuroute.core.attempt import Attempt
    from gpuroute.core.call import Call
    from gpuroute.core.pool import Pool

__all__ = ["Observer", "observer", "watch", "watched"]


class Observer:
    """Logs failures, measures nothing. Safe from any thread, never blocks on I/O, never raises."""

    def attempt_started(
        self,
        call: Call,  # noqa: ARG002
        attempt: Attempt,  # noqa: ARG002
        headers: MutableMapping[str, str],  # noqa: ARG002
    ) -> object:
        """Call before the request goes out. Puts trace headers into `headers`: send them instead of the caller's own.

        The result goes back into `attempt_ended`.
        """
        return None

    def attempt_ended(self, token: object, call: Call, attempt: Attempt) -> None:  # noqa: ARG002
        """Call once the attempt is finished, whatever its outcome."""
        if attempt.outcome is not None and attempt.outcome.health < 0:
            log_failure(call, attempt)

    def call_ended(self, call: Call, now: float) -> None:
        """Call once after the last attempt; `now` on the router's clock."""


class Watched(Protocol):
    """What gauges and counters read: a Router."""

    @property
    def clock(self) -> Callable[[], float]:
        """Its clock, in seconds."""

    @property
    def registry_age(self) -> float | None:
        """Seconds since its registry last confirmed the fleet, if it ever did."""

    def pools(self) -> tuple[Pool, ...]:
        """Its pools."""


LOOK_EVERY_S = 1.0
_SILENT = Observer()
_current: Observer = _SILENT
_look_at = 0.0
_routers: set[weakref.ref[Watched]] = set()  # not a WeakSet: that cannot be copied while another thread adds


def watch(router: Watched) -> None:
    """Show this router's endpoints in the gauges for as long as it lives."""
    _routers.add(weakref.ref(router, _routers.discard))


def watched() -> list[Watched]:
    """The routers that live."""
    return [router for reference in tuple(_routers) if (router := reference()) is not None]


def observer() -> Observer:
    """The observer for a new call. Asked each time, because an SDK may be installed after the client was made."""
    global _current, _look_at
    if _current is not _SILENT or "opentelemetry" not in sys.modules:
        return _current
    # Asking the API costs 3 us: do it when its SDK was imported, and now and then for implementations of other makers.
    now = time.monotonic()
    if now >= _look_at or "opentelemetry.sdk" in sys.modules:
        from gpuroute.observe.otel import installed

        _current, _look_at = installed() or _SILENT, now + LOOK_EVERY_S
    return _current
