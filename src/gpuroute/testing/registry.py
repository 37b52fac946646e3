"""A registry that a test writes by hand: same protocol as the file and etcd ones, no I/O and no thread.

Everything arrives at the subscribers before `set` returns, so a test needs no waiting.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from gpuroute.core.endpoint import Endpoint
from gpuroute.core.fleet import Fleet, PoolSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    FleetLike = Fleet | Mapping[str, "PoolSpec | Iterable[Endpoint | str]"]


class FakeRegistry:
    """Implements `Registry`. Any thread may call it; subscribers run in the caller's thread.

    `set` takes a Fleet or `{pool: [endpoint or URL, ...]}`. A registry made without a fleet delivers nothing until
    the first `set`, which is how a test sees a router wait for its first view.
    """

    def __init__(self, fleet: FleetLike | None = None) -> None:
        self._lock = threading.RLock()
        self._subscriptions: list[FakeSubscription] = []
        self._error: str | None = None
        self.fleet = None if fleet is None else as_fleet(fleet)

    def subscribe(self, on_change: Callable[[Fleet], None]) -> FakeSubscription:
        """Deliver the present fleet, if there is one, and every later one."""
        subscription = FakeSubscription(self, on_change)
        with self._lock:
            self._subscriptions.append(subscription)
            if self.fleet is not None:
                on_change(self.fleet)
        return subscription

    def set(self, fleet: FleetLike) -> None:
        """Replace the whole fleet; ends a `fail` or `go_stale`."""
        with self._lock:
            self._error = None
            self._push(as_fleet(fleet))

    def fail(self, error: str = "registry unreachable") -> None:
        """From now on subscriptions report `error`; the last fleet stays, as with a lost watch."""
        self._error = error

    def go_stale(self) -> None:
        """Deliver the last fleet again, flagged stale. Raises ValueError if there was none."""
        with self._lock:
            if self.fleet is None:
                msg = "no fleet to go stale: call set() first"
                raise ValueError(msg)
            self._push(replace(self.fleet, stale=True))

    @property
    def subscribers(self) -> int:
        """How many subscriptions are open."""
        return len(self._subscriptions)

    def _push(self, fleet: Fleet) -> None:
        self.fleet = fleet
        for subscription in tuple(self._subscriptions):
            subscription.deliver(fleet)

    def _drop(self, subscription: FakeSubscription) -> None:
        with self._lock:
            if subscription in self._subscriptions:
                self._subscriptions.remove(subscription)


class FakeSubscription:
    """What `FakeRegistry.subscribe` returns."""

    def __init__(self, registry: FakeRegistry, on_change: Callable[[Fleet], None]) -> None:
        self._registry = registry
        self.deliver = on_change

    @property
    def error(self) -> str | None:
        """The text given to `fail`, or None."""
        return self._registry._error  # noqa: SLF001  (one class in two parts)

    def age(self, now: float) -> float:
        """Seconds between the fleet's `as_of` and `now` (epoch seconds); 0.0 before the first fleet."""
        fleet = self._registry.fleet
        return max(0.0, now - fleet.as_of) if fleet is not None and fleet.as_of is not None else 0.0

    def close(self) -> None:
        """Stop deliveries. Idempotent."""
        self._registry._drop(self)  # noqa: SLF001


def as_fleet(fleet: FleetLike) -> Fleet:
    """`{pool: [endpoint or URL, ...]}` as a Fleet; a Fleet is returned as it is."""
    if isinstance(fleet, Fleet):
        return fleet
    pools = {name: spec if isinstance(spec, PoolSpec) else as_pool(name, spec) for name, spec in fleet.items()}
    return Fleet(pools, source="fake", as_of=time.time())


def as_pool(name: str, endpoints: Iterable[Endpoint | str]) -> PoolSpec:
    """A pool from endpoints or URLs; a URL's endpoint has its host and port as id."""
    return PoolSpec(name, tuple(as_endpoint(endpoint) for endpoint in endpoints))


def as_endpoint(endpoint: Endpoint | str) -> Endpoint:
    """An endpoint from its URL; one that is already an Endpoint is returned as it is."""
    if isinstance(endpoint, Endpoint):
        return endpoint
    return Endpoint(id=endpoint.partition("://")[2].partition("/")[0] or endpoint, url=endpoint)
