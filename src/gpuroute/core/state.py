"""What a router knows of one endpoint, and the only thing in the core that changes.

Every mechanism that can close an endpoint (breaker, ejection, a pause it asked for, capacity) keeps a cap of its own in
`caps`; admission is one comparison, `len(in_flight) < limit`, with `limit = min(caps)` (linkerd's gate, Open / Shut /
Limited(n), is this number). While the limit is infinite nothing locks: `set.add` and `set.remove` are atomic. A finite
limit is acquired under the state's own lock (8 threads over an unlocked limit of 1 exceeded it 511 times in 1.2 M tries).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from gpuroute.core.attempt import Attempt
from gpuroute.core.breaker import Breaker, BreakerRules, BreakerState
from gpuroute.core.signals import Signals

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from gpuroute.core.endpoint import Endpoint
    from gpuroute.core.outcome import Outcome

INF = math.inf
BREAKER = "breaker"
CAPACITY = "capacity"
PAUSE = "pause"
HEALTH_CAPS = frozenset({BREAKER, "ejection", "probation"})


class Lock(Protocol):
    """What the core needs of a lock; the router injects `threading.Lock`."""

    def __enter__(self) -> object: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> object: ...


class NoLock:
    """For single-threaded use: the simulator and unit tests."""

    __slots__ = ()

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


class PoolState:
    """What the endpoints of one pool share: live attempts, the next moment something expires, counters, chance."""

    __slots__ = ("breaker_rules", "in_flight", "limited", "lock", "make_lock", "random", "signals", "wake_at")

    def __init__(
        self,
        random: Callable[[], float],
        breaker_rules: BreakerRules | None = None,
        make_lock: Callable[[], Lock] = NoLock,
    ) -> None:
        self.random = random
        self.breaker_rules = breaker_rules or BreakerRules()
        self.make_lock = make_lock
        self.lock = make_lock()
        self.in_flight: set[Attempt] = set()
        self.limited: set[EndpointState] = set()
        self.wake_at = INF
        self.signals = Signals()


class EndpointState:
    """Live knowledge of one endpoint, shared by successive snapshots and found again by id. Safe from any thread."""

    __slots__ = (
        "__weakref__",
        "breaker",
        "caps",
        "endpoint",
        "failures",
        "id",
        "in_flight",
        "inverse_weight",
        "joined_at",
        "last_error",
        "last_error_at",
        "limit",
        "lock",
        "pool",
        "served",
        "until",
    )

    def __init__(self, endpoint: Endpoint, pool: PoolState, now: float = 0.0) -> None:
        self.pool = pool
        self.in_flight: set[Attempt] = set()
        self.caps: dict[str, float] = {}
        self.until: dict[str, float] = {}
        self.limit: float = INF
        self.lock = pool.make_lock()
        self.breaker = Breaker(pool.breaker_rules)
        self.failures = 0
        self.served = 0
        self.joined_at = now
        self.last_error = ""
        self.last_error_at: float | None = None
        self.adopt(endpoint)

    def adopt(self, endpoint: Endpoint) -> None:
        """Take over a new registry record of the same endpoint; load and history stay."""
        self.endpoint = endpoint
        self.id = endpoint.id
        self.inverse_weight = 1.0 / endpoint.weight if endpoint.weight > 0 else INF

    @property
    def admitted(self) -> bool:
        """True if one more attempt may start now."""
        return len(self.in_flight) < self.limit

    def acquire(self, now: float, number: int = 1, tokens: int = 0) -> Attempt | None:
        """Start an attempt here, or None if the limit is reached."""
        if self.limit == INF:
            return self._admit(now, number, tokens)
        with self.lock:
            return self._admit(now, number, tokens) if len(self.in_flight) < self.limit else None

    def acquire_in_panic(self, now: float, number: int = 1, tokens: int = 0) -> Attempt | None:
        """Start an attempt although the endpoint looks unhealthy; capacity and pauses still hold."""
        with self.lock:
            return self._admit(now, number, tokens) if self.admitted_in_panic else None

    @property
    def admitted_in_panic(self) -> bool:
        """Like `admitted`, with the caps that judge health left out."""
        hard = min((cap for name, cap in self.caps.items() if name not in HEALTH_CAPS), default=INF)
        return len(self.in_flight) < hard

    def set_cap(self, name: str, cap: float, until: float = INF) -> None:
        """Limit attempts in flight to `cap` for the reason `name`, until a moment; `INF` lifts it."""
        with self.lock:
            self._set_cap(name, cap, until)

    def pause(self, until: float) -> None:
        """Give it nothing new until then, as it asked; a later moment wins."""
        if until > self.until.get(PAUSE, -INF):
            self.pool.signals.pauses += 1
            self.set_cap(PAUSE, 0, until)

    def tick(self, now: float) -> None:
        """Lift the caps whose time has passed; an open breaker becomes half open instead."""
        with self.lock:
            for name in [name for name, until in self.until.items() if now >= until]:
                if name == BREAKER:
                    self.breaker.tick(now)
                    self._set_cap(BREAKER, self.breaker.cap(self.in_flight))
                else:
                    self._set_cap(name, INF)

    def first_token(self, attempt: Attempt, now: float) -> None:
        """An attempt's first byte arrived."""

    def teach(self, attempt: Attempt, outcome: Outcome, now: float) -> None:
        """Learn from a finished attempt. On success with nothing wrong before, this is all that is done."""
        self.served += 1
        if outcome.health < 0:
            self.failures += 1
            self.last_error = attempt.reason or outcome.label
            self.last_error_at = now
            with self.lock:
                self.breaker.failed(attempt, now, self.pool.random)
                self._follow_breaker()
        elif self.failures or self.limit != INF:
            self._recover(attempt, outcome)

    def _recover(self, attempt: Attempt, outcome: Outcome) -> None:
        with self.lock:
            if outcome.health > 0:
                self.breaker.succeeded(attempt)
                if not self.breaker.trips and self.breaker.state is BreakerState.CLOSED:
                    self.failures = 0
            self._follow_breaker()

    def _follow_breaker(self) -> None:
        cap = self.breaker.cap(self.in_flight)
        if cap != self.caps.get(BREAKER, INF):
            self.pool.signals.breaker_opened += cap == 0
            self._set_cap(BREAKER, cap, self.breaker.reopen_at)

    def _admit(self, now: float, number: int, tokens: int) -> Attempt:
        attempt = Attempt(self, now, number, tokens)
        self.in_flight.add(attempt)
        self.pool.in_flight.add(attempt)
        return attempt

    def _set_cap(self, name: str, cap: float, until: float = INF) -> None:
        if cap == INF:
            self.caps.pop(name, None)
            self.until.pop(name, None)
        else:
            self.caps[name] = cap
            self.until[name] = until
        self.limit = min(self.caps.values(), default=INF)
        pool = self.pool
        with pool.lock:
            if any(until < INF for until in self.until.values()):
                pool.limited.add(self)
                pool.wake_at = min(pool.wake_at, *self.until.values())
            else:
                pool.limited.discard(self)

    def __repr__(self) -> str:
        return f"<EndpointState {self.id} in_flight={len(self.in_flight)} limit={self.limit}>"
