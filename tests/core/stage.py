"""What the tests of the core share: pools without a router, time moved by hand, and a driver that sends nothing."""

from __future__ import annotations

import threading
from random import Random
from typing import TYPE_CHECKING, Any

from gpuroute.core.call import Call
from gpuroute.core.endpoint import Endpoint
from gpuroute.core.fleet import PoolSpec
from gpuroute.core.outcome import Outcome
from gpuroute.core.pool import Pool, PoolRules
from gpuroute.testing import FakeClock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from gpuroute.core.attempt import Attempt
    from gpuroute.core.state import EndpointState

Answer = tuple[Outcome, dict[str, Any]]
OK: Answer = (Outcome.SUCCESS, {})
REFUSED: Answer = (Outcome.FAILED, {"reason": "connection refused"})  # the request never left
ERROR_500: Answer = (Outcome.FAILED, {"reason": "500", "answered": True})
BAD_REQUEST: Answer = (Outcome.REJECTED, {"reason": "400", "answered": True})


def busy(seconds: float | None = None) -> Answer:
    """A 429 that asks for so many seconds."""
    return Outcome.OVERLOADED, {"reason": "429", "retry_after": seconds, "answered": True}


def endpoints(fleet: int | Iterable[str] | Mapping[str, float]) -> tuple[Endpoint, ...]:
    """`3` -> gpu-0..2; names; or names with weights."""
    names = [f"gpu-{n}" for n in range(fleet)] if isinstance(fleet, int) else fleet
    weights = fleet if not isinstance(fleet, int) and hasattr(fleet, "keys") else {}
    return tuple(Endpoint(name, f"http://{name}:8000", weight=weights.get(name, 1.0)) for name in names)  # type: ignore[union-attr]


class Stage:
    """One pool, a clock and a seeded source of chance."""

    def __init__(
        self,
        fleet: int | Iterable[str] | Mapping[str, float] | tuple[Endpoint, ...] = 3,
        *,
        seed: int = 1,
        now: float = 1_000.0,
        threads: bool = False,
        **rules: Any,
    ) -> None:
        self.clock = FakeClock(now)
        self.oversleep = 0.0
        self.random = Random(seed)
        self.rules = PoolRules(**{"policy": "p2c", **rules})
        make_lock = {"make_lock": threading.Lock} if threads else {}
        self.pool = Pool(self.spec(fleet), self.rules, random=self.random.random, now=now, **make_lock)  # type: ignore[arg-type]

    @staticmethod
    def spec(fleet: Any) -> PoolSpec:
        """The pool as a registry would state it."""
        is_built = isinstance(fleet, tuple) and all(isinstance(one, Endpoint) for one in fleet)
        return PoolSpec("llm", fleet if is_built else endpoints(fleet))

    def update(self, fleet: Any) -> None:
        """A new view from the registry."""
        self.pool.update(self.spec(fleet), self.rules, self.clock())

    def state(self, name: str) -> EndpointState:
        return self.pool.snapshot.by_id[name]

    def call(self, **options: Any) -> Call:
        return Call(self.pool, self.clock(), **options)

    def start(self, **options: Any) -> Attempt:
        """One attempt of a call of its own, left in flight."""
        attempt = self.call(**options).next_attempt(self.clock())
        attempt.sent(self.clock())
        return attempt

    def drive(self, answer: Callable[[Attempt], Answer], **options: Any) -> Call:
        """A whole call, as a transport drives it; raises what `next_attempt` raises. Waits move the clock."""
        call, clock = self.call(**options), self.clock
        while True:
            while (pause := call.delay(clock())) > 0:
                clock.sleep(pause + self.oversleep)
            attempt = call.next_attempt(clock())
            outcome, how = answer(attempt)
            if how.get("answered") or outcome is Outcome.SUCCESS:
                attempt.sent(clock())
            if not call.finish(attempt, outcome, clock(), **how):
                return call

    def residue(self) -> dict[str, int]:
        """What is still in flight; {} when all came back."""
        left = {state.id: len(state.in_flight) for state in self.pool.snapshot.states if state.in_flight}
        return left | ({"pool": len(self.pool.shared.in_flight)} if self.pool.shared.in_flight else {})


def outcome_of(call: Call) -> Outcome | None:
    """How the last attempt of a call ended."""
    return call.history[-1].outcome


def places(call: Call) -> list[str]:
    """Where a call's attempts went."""
    return [attempt.state.id for attempt in call.history]
