"""One pool: the long-lived object behind a name. Holds the current snapshot, the budget and what all endpoints share.

`acquire` is the whole admission path: pick, start the attempt, and when nobody is admitted decide between "wait, they
said when", "take a sick one rather than none" (panic, fail open) and "nobody".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuroute.core.breaker import BreakerRules
from gpuroute.core.budget import Budget
from gpuroute.core.candidates import NOTHING_ASKED, Ask
from gpuroute.core.fleet import PoolSpec
from gpuroute.core.hedge import HedgeRules
from gpuroute.core.outliers import OutlierRules, Outliers
from gpuroute.core.placement import Placements
from gpuroute.core.policies import BY_LATENCY, READ_REPORTS
from gpuroute.core.ramp import climb, join
from gpuroute.core.retry import RetryRules
from gpuroute.core.seconds import Soonest
from gpuroute.core.shared import Lock, NoLock, PoolState
from gpuroute.core.snapshot import Snapshot, Survivors
from gpuroute.core.state import INF, PAUSE, EndpointState
from gpuroute.core.tried import Tried
from gpuroute.core.watchdog import SUSPICIOUS_S, WatchdogRules

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from gpuroute.core.attempt import Attempt

    Tries = list[Attempt] | None


@dataclass(frozen=True, slots=True)
class PoolRules:
    """The effective settings of a pool: policy, retries, budget, breaker; durations in seconds.

    `panic` says what happens when the share of admitted endpoints is at or below `panic_share`: "fail_open" picks among
    the unhealthy too, "fail_fast" does not, and raises when nobody is admitted.
    """

    policy: str = "auto"
    timeout: float | None = None
    max_in_flight: int | None = None
    panic: str = "fail_open"
    panic_share: float = 0.0
    retry: RetryRules = RetryRules()
    breaker: BreakerRules = BreakerRules()
    budget_ratio: float = 0.2
    budget_floor: float = 10.0
    outliers: OutlierRules = OutlierRules()
    watchdog: WatchdogRules = WatchdogRules()
    hedge: HedgeRules = HedgeRules()
    continuation: bool = False


class Pool:
    """All that is known of one pool. Safe from any thread; `update` calls must not overlap each other."""

    __slots__ = (
        "__weakref__", "arrivals", "blank", "budget", "hedges", "late", "lock", "mean_tokens", "name", "outliers",
        "placements", "reroutes", "rules", "shared", "snapshot", "spec", "survivors",
    )  # fmt: skip

    def __init__(
        self,
        spec: PoolSpec,
        rules: PoolRules,
        *,
        random: Callable[[], float],
        now: float = 0.0,
        make_lock: Callable[[], Lock] = NoLock,
    ) -> None:
        self.name = spec.name
        self.shared = PoolState(random, rules.breaker, make_lock)
        self.lock = make_lock()
        self.budget = Budget(rules.budget_ratio, rules.budget_floor)
        self.arrivals = self.budget.deposits
        self.hedges = Budget(rules.hedge.hedge_share, floor=0.1, deposits=self.arrivals)
        self.reroutes = Budget(rules.hedge.reroute_share, 0.0, 60, self.arrivals)  # 10 s of a quiet client pay for none
        self.outliers = Outliers(rules.outliers, now)
        self.late = self.mean_tokens = 0.0  # the moving share of calls that were due for a reroute; of their prompts
        self.blank: Ask | None = None  # the ask of all calls that say nothing, if picks note nothing in it
        self.placements = Placements()
        self.survivors = Survivors(self.shared)
        self.snapshot = Snapshot((), policy=rules.policy, random=random)
        self.spec = PoolSpec(spec.name)
        self.rules = rules
        self.update(spec, rules, now)

    @property
    def wants_ladder(self) -> bool:
        """True if the policy can use prompt prefixes: otherwise bodies need not be read."""
        return self.snapshot.picker.wants_ladder

    def update(self, spec: PoolSpec, rules: PoolRules, now: float) -> None:
        """Adopt a new registry view; endpoints that stay keep their state. Nothing is rebuilt if nothing changed."""
        if spec == self.spec and rules == self.rules:
            return
        before = self.snapshot
        self.rules, self.spec = rules, spec
        states, cold = self.survivors.adopt(spec.endpoints, now, rules.max_in_flight)
        self.snapshot = Snapshot(
            states, policy=rules.policy, random=self.shared.random, placements=self.placements, ring=before.picker.ring
        )
        self.shared.predicts = isinstance(self.snapshot.picker, Soonest) or rules.hedge.reroute
        self.shared.learn()
        self.shared.ranks = self.shared.predicts or rules.policy in BY_LATENCY
        self.blank = None if rules.policy in READ_REPORTS else NOTHING_ASKED
        self.shared.stalling.intersection_update(self.snapshot.routable)
        self.shared.wake_at = min(self.shared.wake_at, self.outliers.due_at)
        if before.states:  # endpoints that were there before this process are as warm as they get
            for state in cold:
                join(state, now)

    def pick(self, ask: Ask = NOTHING_ASKED, tried: Container[EndpointState] = ()) -> EndpointState | None:
        """The endpoint for one attempt, or None; untried ones outside failed domains, then untried ones, then any."""
        if self._panics():
            return None
        picker = self.snapshot.picker
        state = picker.pick(ask, tried)
        if state is not None or not tried:
            return state
        state = picker.pick(ask, tried.states) if isinstance(tried, Tried) else None
        return state or picker.pick(ask)

    def acquire(self, ask: Ask, now: float, tried: Container[EndpointState] = (), tries: Tries = None) -> Attempt | None:
        """Start an attempt on the best endpoint and add it to its call's history; None if no endpoint may take one."""
        if now >= self.shared.wake_at:
            self.tick(now)
        if ask is not NOTHING_ASKED:
            ask.now, ask.mean_tokens = now, self.mean_tokens
        picker = self.snapshot.picker
        state = self.pick(ask, tried) if tried or self.rules.panic_share else picker.pick(ask)
        if state is not None and (since := state.silent_since) is not None and now - since > SUSPICIOUS_S:
            state = self._unsuspected(state, ask, now, tried)
        while state is not None:
            attempt = (state.admit if state.limit == INF else state.acquire)(now, tries, ask.tokens)
            if attempt is not None:
                if picker.remembers:
                    self._placed(ask, attempt)
                return attempt
            state = self.pick(ask, tried)  # a limit was reached in between: that endpoint is not admitted now
        return self._acquire_in_panic(ask, now, tried, tries) if self.rules.panic == "fail_open" else None

    def _unsuspected(self, first: EndpointState, ask: Ask, now: float, tried: Container[EndpointState]) -> EndpointState:
        """Another one, if there is any, than where calls wait for longer than is usual: silence makes dear at once."""
        if not self.rules.watchdog.suspects(first, now):
            return first
        state: EndpointState | None = first
        avoided, suspects = tried.copy() if isinstance(tried, Tried) else Tried(), self.rules.watchdog.suspects
        for others in ((), (), (), self.snapshot.routable):  # a few one by one, a whole silent fleet at once
            avoided.states.update(each for each in (state, *others) if each is not None and suspects(each, now))
            state = self.pick(ask, avoided)
            if state is None or state in avoided.states or not suspects(state, now):
                break
        return first if state is None or state in avoided.states else state

    def wake(self, now: float) -> None:
        """Do what has fallen due: for those who look at a pool that has had no call for a while."""
        if now >= self.shared.wake_at:
            self.tick(now)

    def tick(self, now: float) -> None:
        """Lift caps whose time has passed."""
        with self.lock:
            self.shared.wake_at = INF
            if now >= self.outliers.due_at:
                self.outliers.sweep(self.snapshot.routable, self.shared, now)
            for state in tuple(self.shared.limited):
                state.tick(now)
            for state in tuple(self.shared.ramping):
                climb(state, now)
            with self.shared.lock:
                moments = [until for state in self.shared.limited for until in tuple(state.until.values())]
                self.shared.wake_at = min(self.outliers.due_at, now + 1.0 if self.shared.ramping else INF, *moments)

    def stalled(self, attempt: Attempt, now: float, *, outpaced: bool = False) -> None:
        """An attempt was silent for too long: the second in a row ejects its endpoint, if the cap leaves room.

        `outpaced`: it was merely overtaken by a second attempt, which is half as telling.
        """
        state, rules = attempt.state, self.rules.watchdog
        self.shared.learn()
        stalls = state.outpaced() if outpaced else state.stalled(attempt, now)
        if self.snapshot.kit.by_id.get(state.id) is not state:  # it has left, or was drained
            self.shared.stalling.discard(state)
        elif stalls >= rules.eject_after and rules.enabled:
            with self.lock:
                self.outliers.eject(state, self.snapshot.routable, self.shared, now, rules.eject_s)

    def work(self, tokens: int) -> float:
        """How much a call of this size weighs in the budgets: 1 for the usual size, within 0.1 .. 10."""
        if tokens <= 0:
            return 1.0
        self.mean_tokens += (tokens - self.mean_tokens) * (0.01 if self.mean_tokens else 1.0)
        return min(10.0, max(0.1, tokens / self.mean_tokens))

    def _panics(self) -> bool:
        """Too few are admitted for the load of all: `panic_share` of 0 leaves it at "nobody is"."""
        if not self.rules.panic_share or not self.shared.limited or self.rules.panic != "fail_open":
            return False
        routable = self.snapshot.routable
        return sum(state.admitted for state in routable) <= self.rules.panic_share * len(routable)

    def pause_left(self, now: float) -> float:
        """Seconds until an endpoint takes calls again, if all that could are pausing on request; else 0."""
        if not self.shared.limited:
            return 0.0
        self.wake(now)
        soonest = INF
        for state in self.snapshot.routable:
            if state.admitted:
                return 0.0
            if PAUSE in state.until:
                soonest = min(soonest, state.until[PAUSE])
            elif state.admitted_in_panic and self.rules.panic == "fail_open":
                return 0.0
        return 0.0 if soonest == INF else max(0.0, soonest - now)

    def retry_after(self, now: float) -> float | None:
        """Seconds until the earliest closed endpoint may be tried again, for error messages; None if unknown."""
        moments = (until for state in self.snapshot.routable for until in tuple(state.until.values()))
        soonest = min(moments, default=INF)
        return max(0.0, soonest - now) if soonest < INF else None

    def _acquire_in_panic(self, ask: Ask, now: float, tried: Container[EndpointState], tries: Tries) -> Attempt | None:
        routable = self.snapshot.routable
        start = int(self.shared.random() * len(routable))
        been = tried.states if isinstance(tried, Tried) else tried
        for state in sorted((*routable[start:], *routable[:start]), key=lambda state: (state in been, state in tried)):
            attempt = state.acquire_in_panic(now, tries, ask.tokens)
            if attempt is not None:
                self.shared.signals.panic_picks += 1
                if self.snapshot.picker.remembers:
                    self._placed(ask, attempt)
                return attempt
        return None

    def _placed(self, ask: Ask, attempt: Attempt) -> None:
        picker = self.snapshot.picker
        if isinstance(picker, Soonest):
            attempt.uncached = picker.uncached(attempt.state, ask)
            attempt.queued, attempt.promised = picker.promised(attempt, ask)
        if picker.wants_ladder and (keys := ask.keys()):
            self.placements.remember(keys, attempt.state.id)
