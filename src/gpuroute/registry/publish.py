"""From a `View` to `on_change`: what every watching registry does alike.

Delivers a fleet when it differs from the last one delivered, guards the watch against a subscriber that raises, and
logs each trouble once: a bad record at most once a minute, a lost registry when it is lost and when it is back.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from gpuroute.core.fleet import Fleet

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuroute.registry.view import View

log = logging.getLogger("gpuroute.registry")

MAX_PROBLEMS = 100
LOG_INTERVAL_S = 60.0


class Publisher:
    """Owned by the thread of one subscription; `error`, `age` and `closed` may be used from any thread."""

    def __init__(self, on_change: Callable[[Fleet], None], source: str) -> None:
        self.error: str | None = None
        self.closed = False
        self.fleet: Fleet | None = None
        self.as_of: float | None = None
        self._on_change = on_change
        self._source = source
        self._logged: dict[str, tuple[float, str]] = {}

    def age(self, now: float) -> float:
        """Seconds at `now` (epoch) since the registry last confirmed the view; 0.0 before the first view."""
        return 0.0 if self.as_of is None else max(0.0, now - self.as_of)

    def publish(self, view: View, now: float, *, stale: bool = False) -> bool:
        """Deliver what the view shows, if that is news. `now` is monotonic."""
        if self.closed:
            return False
        pools, unread = view.pools(now), view.unread()
        self._log({key: f"bad record {text}" for key, text in view.problems.items()} | unread, now)
        problems = (*view.problems.values(), *view.warnings(), *unread.values())
        if len(problems) > MAX_PROBLEMS:
            problems = (*problems[:MAX_PROBLEMS], f"and {len(problems) - MAX_PROBLEMS} more")
        fleet, last = Fleet(pools, self._source, stale, self.as_of, problems), self.fleet
        if last and (last.pools, last.stale, last.problems) == (fleet.pools, fleet.stale, fleet.problems):
            return False
        self.fleet = fleet
        try:
            self._on_change(fleet)
        except Exception:
            log.exception("a subscriber of registry %s failed", self._source)
        return True

    def trouble(self, error: str | None) -> None:
        """Note what is wrong with the registry as a whole, or with None that it is well."""
        if self.closed:
            return
        if error and not self.error:
            log.warning("registry %s: %s", self._source, error)
        elif self.error and not error:
            log.info("registry %s is back", self._source)
        self.error = error

    def _log(self, problems: dict[str, str], now: float) -> None:
        for key, text in problems.items():
            moment, logged = self._logged.get(key, (-LOG_INTERVAL_S, ""))
            if text != logged and now - moment >= LOG_INTERVAL_S:
                self._logged[key] = now, text
                log.warning("registry %s: %s", self._source, text)
        for key in [key for key, item in self._logged.items() if key not in problems]:
            if now - self._logged[key][0] >= LOG_INTERVAL_S:
                del self._logged[key]
