"""What the endpoints of one pool share, and what the core needs of a lock."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from gpuroute.core.breaker import BreakerRules
from gpuroute.core.history import History, learn_wholes
from gpuroute.core.hosts import Hosts
from gpuroute.core.locality import NOWHERE
from gpuroute.core.signals import Signals
from gpuroute.core.speed import Speeds

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from gpuroute.core.attempt import Attempt
    from gpuroute.core.state import EndpointState

INF = math.inf


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

    __slots__ = (
        "answered",
        "breaker_rules",
        "hosts",
        "in_flight",
        "known",
        "limited",
        "locality",
        "lock",
        "make_lock",
        "predicts",
        "ramping",
        "random",
        "ranks",
        "signals",
        "speeds",
        "stalling",
        "wake_at",
    )

    def __init__(
        self,
        random: Callable[[], float],
        breaker_rules: BreakerRules | None = None,
        make_lock: Callable[[], Lock] = NoLock,
    ) -> None:
        self.random = random
        self.hosts = Hosts()  # a router has its pools share one
        self.breaker_rules = breaker_rules or BreakerRules()
        self.make_lock = make_lock
        self.lock = make_lock()
        self.in_flight: set[Attempt] = set()
        self.limited: set[EndpointState] = set()
        self.ramping: set[EndpointState] = set()
        self.stalling: set[EndpointState] = set()
        self.known = History()
        self.answered: deque[tuple[EndpointState, float]] = deque()  # seconds of whole answers, not learned from yet
        self.ranks = True  # picks compare what answers took
        self.speeds = Speeds()
        self.locality = NOWHERE
        self.predicts = True  # whether anybody asks `speeds`: counting policies do not
        self.wake_at = INF
        self.signals = Signals()

    @property
    def history(self) -> History:
        """What is normal in this pool, and by then also at its endpoints."""
        if self.answered:
            self.learn()
        return self.known

    def learn(self) -> None:
        """Learn from the answers put off: after a wait for a server all code runs cold, and a dozen lessons in a row cost
        little more than one."""
        times: defaultdict[EndpointState, list[float]] = defaultdict(list)
        answered = self.answered
        with suppress(IndexError):  # no more, or another thread was here too
            while True:
                state, seconds = answered.popleft()
                times[state].append(seconds)
        for state, some in times.items():
            learn_wholes(state, some)

    def note_limits(self, state: EndpointState) -> None:
        """Its caps have changed: the pool wakes up when the next one expires."""
        moments = state.until.values()
        with self.lock:
            if any(until < INF for until in moments):
                self.limited.add(state)
                self.wake_at = min(self.wake_at, *moments)
            else:
                self.limited.discard(state)

    def forget(self, state: EndpointState) -> None:
        """An endpoint is gone for good; what runs there ends by itself."""
        with self.lock:
            for group in (self.limited, self.ramping, self.stalling):
                group.discard(state)
