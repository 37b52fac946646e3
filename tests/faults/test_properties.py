"""Whatever attempts, outcomes, stalls, races, continuations, cancels and registry updates do in whatever order."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gpuroute import DeadlineExceeded, Endpoint, NoEndpointAvailable
from gpuroute.core.breaker import BreakerRules, BreakerState
from gpuroute.core.call import Call
from gpuroute.core.fleet import PoolSpec
from gpuroute.core.hedge import HedgeRules
from gpuroute.core.outcome import Outcome
from gpuroute.core.pool import Pool, PoolRules
from gpuroute.core.state import EJECTION

STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "call",
                "sent",
                "token",
                "chunk",
                "end",
                "resume",
                "stall",
                "hedge",
                "outpaced",
                "close",
                "wait",
                "leave",
                "join",
            ]
        ),
        st.integers(0, 7),
        st.sampled_from(list(Outcome)),
    ),
    max_size=120,
)


def spec(present: set[int]) -> PoolSpec:
    return PoolSpec("p", tuple(Endpoint(f"gpu-{n}", f"http://gpu-{n}") for n in sorted(present)))


class World:
    """One pool and the calls of its callers."""

    def __init__(self, rules: PoolRules) -> None:
        self.now = 100.0
        self.rules = rules
        self.present = set(range(5))
        self.pool = Pool(spec(self.present), rules, random=random.Random(1).random, now=self.now)
        self.calls: list[Call] = []
        self.everyone = set(self.pool.snapshot.states)
        self.settled = True

    def live(self) -> list[tuple[Call, Any]]:
        return [(call, attempt) for call in self.calls for attempt in call.history if attempt.outcome is None]

    def next_attempt(self, call: Call) -> None:
        try:
            call.next_attempt(self.now)
        except (NoEndpointAvailable, DeadlineExceeded):
            call.close(self.now)

    def step(self, do: str, index: int, outcome: Outcome) -> None:
        self.now += 0.05 * (index + 1) * (40 if do == "wait" else 1)
        if do == "call":
            self.calls.append(Call(self.pool, self.now, timeout=20.0 if index % 2 else None))
            self.next_attempt(self.calls[-1])
        elif do in {"leave", "join"}:
            self.settled = False
            (self.present.discard if do == "leave" else self.present.add)(index % 5)
            self.pool.update(spec(self.present), self.rules, self.now)
            self.everyone |= set(self.pool.snapshot.states)
        elif self.live():
            self.act(do, *self.live()[index % len(self.live())], outcome)
        self.check()

    def act(self, do: str, call: Call, attempt: Any, outcome: Outcome) -> None:
        again = False
        if do == "sent":
            attempt.awaited(self.now)
            attempt.sent(self.now)
        elif do == "token":
            attempt.first_token(self.now)
        elif do == "chunk" and attempt.first is not None:
            attempt.chunk(self.now)
        elif do == "end":
            again = call.finish(attempt, outcome, self.now)
        elif do == "resume":
            again = call.finish(attempt, outcome, self.now, resumable=attempt.first is not None)
        elif do == "stall":
            again = call.stalled(attempt, self.now)
        else:
            self.race(do, call, attempt)
        if again:
            self.next_attempt(call)

    def race(self, do: str, call: Call, attempt: Any) -> None:
        if do == "hedge":
            call.hedge(self.now)
        elif do == "outpaced":
            self.pool.stalled(attempt, self.now, outpaced=True)
            call.finish(attempt, Outcome.CANCELLED, self.now)
        elif do == "close":
            call.close(self.now)

    def check(self) -> None:
        pool, states = self.pool, self.pool.snapshot.states
        for budget in (pool.budget, pool.hedges, pool.reroutes):
            assert budget.balance(self.now) >= 0
            earned = budget.ratio * budget.deposits.within(self.now, budget.window) + budget.floor * budget.window
            assert budget._withdrawals.within(self.now, budget.window) <= earned + 1e-9  # what was taken was there
        if self.settled:  # endpoints that leave shrink the pool under those that are out already
            ejected = sum(EJECTION in state.caps for state in states)
            assert ejected <= max(1, len(states) / 3)
        in_flight = {attempt for state in self.everyone for attempt in state.in_flight}
        assert in_flight == {attempt for _, attempt in self.live()}


@given(STEPS, st.booleans(), st.sampled_from(["fail_open", "fail_fast"]))
@settings(max_examples=150, deadline=None)
def test_nothing_is_left_behind_no_budget_is_overdrawn_no_cap_is_passed(
    steps: list[tuple[str, int, Outcome]], hedge: bool, panic: str
) -> None:
    rules = PoolRules(
        policy="p2c",
        panic=panic,
        breaker=BreakerRules(failures=2, open_s=1.0),
        hedge=HedgeRules(hedge=hedge, reroute=not hedge, hedge_share=0.5),
        budget_floor=0.2,
    )
    world = World(rules)
    for do, index, outcome in steps:
        world.step(do, index, outcome)
    for call in world.calls:
        call.close(world.now)
    world.now += 400
    world.pool.tick(world.now)
    for state in world.everyone:
        assert state.in_flight == set()
        assert state.silent_since is None or not state.in_flight
    for state in world.pool.snapshot.states:
        assert EJECTION not in state.caps
        if state.breaker.state is BreakerState.HALF_OPEN:  # every probe slot is free
            attempt = state.acquire(world.now)
            assert attempt is not None
            attempt.finish(Outcome.SUCCESS, world.now)
        assert state.admitted
