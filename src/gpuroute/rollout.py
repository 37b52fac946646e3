"""Careful adoption: the kill switch, and the share of calls that is routed at all."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from gpuroute.core.breaker import BreakerRules
from gpuroute.core.call import Call
from gpuroute.core.endpoint import Endpoint
from gpuroute.core.fleet import PoolSpec
from gpuroute.core.outliers import OutlierRules
from gpuroute.core.pool import Pool, PoolRules
from gpuroute.core.retry import RetryRules
from gpuroute.core.ring import session_key
from gpuroute.core.watchdog import WatchdogRules
from gpuroute.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuroute.config import Settings

# Nobody else could take over, so nothing is found out about who is there; and who asks one caller to wait means that one.
UNROUTED = PoolRules(
    policy="random",
    retry=RetryRules(attempts=1, max_pause=0.0, overload_pause=0.0),
    breaker=BreakerRules(failures=0),
    outliers=OutlierRules(interval_s=0.0),
    watchdog=WatchdogRules(enabled=False),
)


class Rollout:
    """Safe from any thread."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._routed_share = 0.0
        self._pools: dict[str, Pool] = {}

    def call(self, url: str, now: float, timeout: float | None, random: Callable[[], float]) -> Call:
        """A call to the fallback URL: one attempt, no policy, the same driver; sent whatever came of others before."""
        pool = self._pools.get(url)
        if pool is None:
            spec = PoolSpec("fallback", (Endpoint("fallback", url),))
            pool = self._pools.setdefault(url, Pool(spec, UNROUTED, random=random, make_lock=threading.Lock))
        limit = self._settings.timeout if timeout is None else timeout
        return Call(pool, now, timeout=limit, replayable=False)

    def fallback(self, pool: Pool | None, key: str | None, *, inside: bool = False) -> str | None:
        """The URL to use instead of routing; else None. Raises ConfigError if a pool is off and has no such URL."""
        settings = self._settings
        if settings.disabled:
            return settings.fallback_url
        if pool is not None and pool.spec.config.disabled:
            url = pool.spec.config.fallback_url or settings.fallback_url
            if not url:
                raise ConfigError(f"pool {pool.name!r} is disabled in the registry but has no fallback_url")
            return url
        if settings.rollout < 1 and not inside and not self._rolled_in(key):
            return settings.fallback_url
        return None

    def early(self, key: str | None) -> str | None:
        """The URL for a call that needs no view of the fleet to be left unrouted; None: it is inside, and was counted."""
        settings = self._settings
        if settings.disabled:
            return settings.fallback_url
        return None if settings.rollout >= 1 or self._rolled_in(key) else settings.fallback_url

    def _rolled_in(self, key: str | None) -> bool:
        share = self._settings.rollout
        if key:
            return session_key(key) < share * 2.0**64
        # Without a key, an even spread: of any 10 calls in a row, 10 % are exactly one.
        with self._lock:
            self._routed_share += share
            routed = self._routed_share >= 1 - 1e-9  # ten times 0.1 is a little less than 1
            self._routed_share -= routed
        return routed
