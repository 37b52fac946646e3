"""What a router knows of one endpoint, and the only thing in the core that changes.

Every mechanism that can close an endpoint (breaker, ejection, a pause it asked for, capacity) keeps a cap of its own in
`caps`; admission is one comparison, `len(in_flight) < limit`, with `limit = min(caps)` (linkerd's gate is this number).
While the limit is infinite nothing locks: `set.add` and `set.remove` are atomic. A finite limit is acquired under the
state's own lock (8 threads over an unlocked limit of 1 exceeded it 511 times in 1.2 M tries).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gpuroute.core.attempt import READY, Attempt
from gpuroute.core.breaker import Breaker, BreakerState
from gpuroute.core.candidates import UNKNOWN_LATENCY
from gpuroute.core.history import learn_first_byte
from gpuroute.core.hosts import host_of
from gpuroute.core.learning import learn_attempt, learn_latency
from gpuroute.core.locality import measure
from gpuroute.core.ramp import climb, start_ramp

if TYPE_CHECKING:
    from gpuroute.core.endpoint import Endpoint
    from gpuroute.core.history import History
    from gpuroute.core.outcome import Outcome
    from gpuroute.core.report import Queue, Report
    from gpuroute.core.shared import PoolState
    from gpuroute.core.speed import Rate
    from gpuroute.core.trust import Trust

INF = math.inf
BREAKER = "breaker"
CAPACITY = "capacity"
PAUSE = "pause"
EJECTION = "ejection"
HEALTH_CAPS = frozenset({BREAKER, EJECTION})
DOMAINS = ("node", "rack", "zone")  # labels that name what fails together


class EndpointState:
    """Live knowledge of one endpoint, shared by successive snapshots and found again by id. Safe from any thread."""

    __slots__ = (
        "__weakref__", "away", "breaker", "caps", "cohort", "domains", "endpoint", "failed", "history", "host", "id",
        "in_flight", "inverse_weight", "joined_at", "last_error", "last_error_at", "latency", "latency_at", "limit",
        "lock", "pool", "queue", "ramp_at", "ramp_from", "report", "round_trip", "served", "silent_since", "speed",
        "stalls", "troubled", "trust", "until", "warm", "way",
    )  # fmt: skip

    away: float  # what the way there costs, in seconds
    way: float  # that without prices: what it takes

    def __init__(self, endpoint: Endpoint, pool: PoolState, now: float = 0.0) -> None:
        self.pool, self.joined_at = pool, now
        self.in_flight: set[Attempt] = set()
        self.caps: dict[str, float] = {}  # by reason
        self.until: dict[str, float] = {}
        self.limit: float = INF
        self.lock = pool.make_lock()
        self.breaker = Breaker(pool.breaker_rules)
        self.history: History | None = None
        self.speed: Rate | None = None
        self.queue: Queue | None = None
        self.trust: Trust | None = None
        self.report: Report | None = None
        self.round_trip: float | None = None
        self.latency, self.latency_at = UNKNOWN_LATENCY, 0.0  # peak EWMA, log of seconds, and when it was learned
        self.served = self.failed = self.ramp_from = 0
        self.stalls = 0.0
        self.silent_since: float | None = None  # calls wait for a sign of life since then
        self.troubled = False
        self.warm = 0.0  # since when the engine is up that took calls last, as its agent says
        self.ramp_at: float | None = None
        self.last_error = ""
        self.last_error_at: float | None = None
        self.adopt(endpoint)

    def adopt(self, endpoint: Endpoint) -> None:
        """Take over a new registry record of the same endpoint; load and history stay."""
        self.endpoint = endpoint
        self.id = endpoint.id
        self.host = host_of(endpoint.url)
        self.cohort = self.pool.speeds.cohort(endpoint)
        if endpoint.takes_calls:
            self.warm = endpoint.started_at if endpoint.agent else 0.0
        self.domains = tuple((name, endpoint.labels[name]) for name in DOMAINS if name in endpoint.labels)
        self.inverse_weight = 1.0 / endpoint.weight if endpoint.weight > 0 else INF
        measure(self)

    @property
    def admitted(self) -> bool:
        """True if one more attempt may start now."""
        return len(self.in_flight) < self.limit

    def acquire(self, now: float, history: list[Attempt] | None = None, tokens: int = 0) -> Attempt | None:
        """Start an attempt here, the next one of the call with this history, or None if the limit is reached."""
        if self.limit == INF:
            return self.admit(now, history, tokens)
        with self.lock:
            return self.admit(now, history, tokens) if len(self.in_flight) < self.limit else None

    def acquire_in_panic(self, now: float, history: list[Attempt] | None = None, tokens: int = 0) -> Attempt | None:
        """Start an attempt although the endpoint looks unhealthy; capacity and pauses still hold."""
        with self.lock:
            return self.admit(now, history, tokens) if self.admitted_in_panic else None

    @property
    def admitted_in_panic(self) -> bool:
        """Like `admitted`, with the caps that judge health left out."""
        hard = min((cap for name, cap in tuple(self.caps.items()) if name not in HEALTH_CAPS), default=INF)
        return len(self.in_flight) < hard

    def set_cap(self, name: str, cap: float, until: float = INF) -> None:
        """Limit attempts in flight to `cap` for the reason `name`, until a moment; `INF` lifts it."""
        with self.lock:
            self._set_cap(name, cap, until)

    def pause(self, until: float) -> None:
        """Give it nothing new until then, as it asked; a later moment wins."""
        with self.lock:
            if until > self.until.get(PAUSE, -INF):
                self.pool.signals.pauses += 1
                self._set_cap(PAUSE, 0, until)

    def tick(self, now: float) -> None:
        """Lift the caps whose time has passed; an open breaker becomes half open instead."""
        with self.lock:
            for name in [name for name, until in self.until.items() if now >= until]:
                if name == BREAKER:
                    self.breaker.tick(now)
                    self.pool.signals.breaker_half_opened += self.breaker.state is BreakerState.HALF_OPEN
                    self._set_cap(BREAKER, self.breaker.cap(self.in_flight))
                else:
                    self._set_cap(name, INF)
                    if name == EJECTION:
                        start_ramp(self, now)

    def alive(self, now: float) -> None:
        """A sign of life; what still waits is waited for from now on."""
        self.silent_since = now if self.in_flight else None

    def first_token(self, attempt: Attempt, now: float) -> None:
        """An attempt's first byte arrived: learn how long that takes here, per unit of prompt."""
        learn_first_byte(self, attempt, now - attempt.started)
        if self.pool.predicts:
            learn_attempt(self, attempt, now)
        if attempt.lesson is not None:
            model, features = attempt.lesson
            model.learn(features, now - attempt.started - self.way)
        if self.stalls:
            self.stalls = 0.0
            self.pool.stalling.discard(self)

    def chunk(self, gap: float) -> None:
        """A stream here went on after `gap` seconds."""
        if self.history is not None:
            self.history.gap.add(gap)
        self.pool.known.gap.add(gap)

    def stalled(self, attempt: Attempt, now: float) -> float:
        """An attempt here was silent for longer than is normal; how many in a row that makes."""
        # Silence is a sample too, at least this long: else a pool that slows down would look hung for ever.
        if attempt.first is None:
            learn_first_byte(self, attempt, 2 * (now - attempt.started))
        else:
            self.chunk(2 * (now - attempt.last))
        self.stalls += 1
        self.pool.stalling.add(self)
        self.pool.signals.stalls += 1
        return self.stalls

    def outpaced(self) -> float:
        """A second attempt elsewhere answered before one here had its first byte: half a stall."""
        self.stalls += 0.5
        self.pool.stalling.add(self)
        return self.stalls

    def teach(self, attempt: Attempt, outcome: Outcome, now: float) -> None:
        """Learn from a finished attempt. On success with nothing wrong before, this is all that is done."""
        self.served += 1
        if outcome.health and self.pool.ranks:
            learn_latency(self, now - attempt.started, now, failed=outcome.health < 0)
        if outcome.health < 0:
            self.failed += 1
            self.troubled = True
            self.last_error = attempt.reason or outcome.label
            self.last_error_at = now
            missed = self.pool.hosts.missed(self.host, now) if attempt.reached is READY and not attempt.misfit else 0
            with self.lock:
                self.breaker.failed(attempt, now, self.pool.random, self.in_flight, missed)
                self._follow_breaker()
        elif self.troubled or self.limit != INF:
            self._recover(attempt, outcome, now)
        if self.ramp_at is not None:
            climb(self, now)

    def _recover(self, attempt: Attempt, outcome: Outcome, now: float) -> None:
        if outcome.health > 0:
            self.pool.hosts.reached(self.host)
        with self.lock:
            if outcome.health > 0:
                was = self.breaker.state
                self.breaker.succeeded(attempt, now)
                if was is not BreakerState.CLOSED and self.breaker.state is BreakerState.CLOSED:
                    self.pool.signals.breaker_closed += 1
                    start_ramp(self, now)
                self.troubled = self.breaker.troubled
            self._follow_breaker()

    def _follow_breaker(self) -> None:
        cap = self.breaker.cap(self.in_flight)
        if cap != self.caps.get(BREAKER, INF):
            self.pool.signals.breaker_opened += cap == 0
            self._set_cap(BREAKER, cap, self.breaker.reopen_at)

    def admit(self, now: float, history: list[Attempt] | None, tokens: int) -> Attempt:
        """Start an attempt here, whatever the limit is."""
        attempt = Attempt(self, now, tokens)
        if history is not None:  # its call knows it before it counts: an interrupt leaves no load without owner
            if history:
                attempt.number = len(history) + 1
            history.append(attempt)
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
        self.pool.note_limits(self)

    def __repr__(self) -> str:
        return f"<EndpointState {self.id} in_flight={len(self.in_flight)} limit={self.limit}>"
