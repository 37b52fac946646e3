"""Everything that can happen to a Router, in any order: a model of it must agree at every step.

Whatever the interleaving of calls, retries, hedges, stalls, pauses, registry changes, waits and forks: what is in
flight is what the model says, limits hold, nobody who left is picked, and only documented exceptions come out.
"""

from __future__ import annotations

import json
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpuroute import Endpoint, Outcome, Router
from gpuroute.core.endpoint import State
from gpuroute.core.homes import HOME_DEPTHS
from gpuroute.core.policies import POLICIES
from gpuroute.errors import DeadlineExceeded, NoEndpointAvailable
from gpuroute.testing import FakeClock, FakeRegistry

if TYPE_CHECKING:
    from gpuroute.core.attempt import Attempt
    from gpuroute.core.call import Call
    from gpuroute.core.pool import Pool

pytestmark = pytest.mark.timeout(300)  # much to compute, on a machine that may be busy

NAMES = [f"gpu-{n}" for n in range(7)]
names, indices, outcomes = st.sampled_from(NAMES), st.integers(0, 10_000), st.sampled_from(list(Outcome))
waits = st.sampled_from([0.0, 0.01, 0.3, 1.0, 6.0, 31.0, 400.0])


class RouterMachine(RuleBasedStateMachine):
    """The model: the fleet as last announced, attempts that are live, calls that are to be retried."""

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        limit=st.sampled_from([None, 1, 2, 3]),
        panic=st.sampled_from(["fail_open", "fail_fast"]),
        panic_share=st.sampled_from(["0%", "50%"]),
        second=st.sampled_from(["hedge", "reroute"]),
        seed=st.integers(0, 2**32),
    )
    def begin(self, policy: str, limit: int | None, panic: str, panic_share: str, second: str, seed: int) -> None:
        self.clock, self.limit = FakeClock(), limit
        self.fleet: dict[str, Endpoint] = {name: Endpoint(name, f"http://{name}") for name in NAMES[:3]}
        self.registry = FakeRegistry()
        self.announce()
        options: dict[str, Any] = {"policy": policy, "max_in_flight": limit, "panic": panic, "panic_share": panic_share}
        options |= {"breaker_failures": 2, "eject_interval": 1.0, second: True}
        self.router = Router(self.registry, clock=self.clock, random=Random(seed).random, **options)
        self.live: list[tuple[Call, Attempt]] = []
        self.due: list[Call] = []
        self.ended: list[tuple[Call, Attempt]] = []

    def announce(self) -> None:
        self.registry.set({"llm": list(self.fleet.values())})

    @property
    def pool(self) -> Pool:
        return self.router.pool("llm")

    def take(self, found: list[Any], index: int) -> Any:
        return found.pop(index % len(found))

    # ------------------------------------------------------------------------------------------ the registry

    @rule(name=names, weight=st.sampled_from([0.0, 0.5, 1.0, 3.0]), state=st.sampled_from(list(State)))
    def add_or_change(self, name: str, weight: float, state: State) -> None:
        self.fleet[name] = Endpoint(name, f"http://{name}", weight=weight, state=state)
        self.announce()

    @rule(name=names)
    def move(self, name: str) -> None:
        self.fleet[name] = Endpoint(name, f"http://{name}:{len(self.ended)}")
        self.announce()

    @rule(name=names)
    def remove(self, name: str) -> None:
        self.fleet.pop(name, None)
        self.announce()

    # ------------------------------------------------------------------------------------------ calls

    @rule(
        key=st.sampled_from([None, "", "user-1", "user-2"]),
        ladder=st.sampled_from([(), (1,), (1, 2, 3), (1, 2, 4, 5)]),
        tokens=st.sampled_from([0, 100, 5_000]),
        timeout=st.sampled_from([None, 0.0, 0.5, 5.0]),
        attempts=st.sampled_from([None, 1, 4]),
        replayable=st.booleans(),
    )
    def start(self, **options: Any) -> None:
        self.attempt(self.router.call("llm", **options))

    def attempt(self, call: Call) -> None:
        try:
            attempt = call.next_attempt(self.clock())
        except (NoEndpointAvailable, DeadlineExceeded) as error:
            assert "llm" in str(error) or "deadline" in str(error)
            call.close(self.clock())
            return
        self.began(call, attempt)

    def began(self, call: Call, attempt: Attempt) -> None:
        stated = self.fleet[attempt.endpoint.id]
        assert attempt.endpoint == stated
        assert stated.takes_calls
        assert len(call.history) <= call.attempts
        self.live.append((call, attempt))

    @precondition(lambda self: self.live)
    @rule(index=indices, how=st.sampled_from(["sent", "first_token", "chunk"]))
    def progress(self, index: int, how: str) -> None:
        _, attempt = self.live[index % len(self.live)]
        getattr(attempt, how)(self.clock())

    @precondition(lambda self: self.live)
    @rule(
        index=indices,
        outcome=outcomes,
        retry_after=st.sampled_from([None, -1.0, 0.0, 0.2, 5.0, 1e9, float("nan")]),
        answered=st.booleans(),
    )
    def finish(self, index: int, outcome: Outcome, retry_after: float | None, answered: bool) -> None:
        call, attempt = self.take(self.live, index)
        again = call.finish(attempt, outcome, self.clock(), retry_after=retry_after, answered=answered)
        self.ended.append((call, attempt))
        if again:
            assert outcome.retryable
            assert not any(other is call for other, _ in self.live)
            self.due.append(call)

    @precondition(lambda self: self.live)
    @rule(index=indices)
    def stall(self, index: int) -> None:
        call, attempt = self.take(self.live, index)
        assert call.patience(attempt) > 0
        assert call.gap_patience(attempt) > 0
        if call.stalled(attempt, self.clock()):
            self.due.append(call)

    @precondition(lambda self: self.due)
    @rule(index=indices, waits_for_it=st.booleans())
    def retry(self, index: int, waits_for_it: bool) -> None:
        call = self.take(self.due, index)
        if waits_for_it:
            self.clock.advance(min(call.delay(self.clock()), 100.0))
        self.attempt(call)

    @precondition(lambda self: self.live)
    @rule(index=indices)
    def hedge(self, index: int) -> None:
        call, first = self.live[index % len(self.live)]
        attempt = call.hedge(self.clock())
        if attempt is not None:
            assert attempt.state is not first.state
            self.began(call, attempt)

    @precondition(lambda self: self.live)
    @rule(index=indices)
    def cancel(self, index: int) -> None:
        call, _ = self.live[index % len(self.live)]
        call.close(self.clock())
        self.ended += [pair for pair in self.live if pair[0] is call]
        self.live = [pair for pair in self.live if pair[0] is not call]

    @precondition(lambda self: self.ended)
    @rule(index=indices, outcome=outcomes)
    def end_again(self, index: int, outcome: Outcome) -> None:
        call, attempt = self.ended[index % len(self.ended)]
        was = attempt.outcome
        assert call.finish(attempt, outcome, self.clock()) is False
        assert attempt.outcome is was

    # ------------------------------------------------------------------------------------------ time, looks, forks

    @rule(seconds=waits)
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(key=st.sampled_from([None, "user-1"]), ladder=st.sampled_from([(), (1, 2, 3)]))
    def look(self, key: str | None, ladder: tuple[int, ...]) -> None:
        self.router.ready()
        json.dumps(self.router.snapshot().as_dict(), allow_nan=False)
        shown = self.router.explain("llm", key=key, ladder=ladder)
        assert shown.winner is None or self.fleet[shown.winner].takes_calls

    @rule()
    def fork(self) -> None:
        """As in a forked child: the load of the parent is not its own, though what was inherited may still end."""
        self.router.after_fork()
        assert self.pool.shared.in_flight == set()
        for call, attempt in self.live:
            call.close(self.clock())
            self.ended.append((call, attempt))
        self.live, self.due = [], []

    # ------------------------------------------------------------------------------------------ what always holds

    @invariant()
    def the_count_is_the_models(self) -> None:
        if hasattr(self, "router"):
            live = [attempt for _, attempt in self.live]
            assert self.pool.shared.in_flight == set(live)
            for state in self.pool.snapshot.states:
                assert state.in_flight == {attempt for attempt in live if attempt.state is state}

    @invariant()
    def limits_hold(self) -> None:
        if hasattr(self, "router"):
            for state in self.pool.snapshot.states:
                assert state.limit == min(state.caps.values(), default=float("inf"))
                assert state.breaker.cap(state.in_flight) == state.caps.get("breaker", float("inf"))
                assert len(state.in_flight) <= (self.limit or len(self.live))

    @invariant()
    def the_view_is_the_registrys(self) -> None:
        if hasattr(self, "router"):
            assert {state.id: state.endpoint for state in self.pool.snapshot.states} == self.fleet
            budgets = (self.pool.budget, self.pool.hedges, self.pool.reroutes)
            assert all(budget.balance(self.clock()) >= 0 for budget in budgets)
            assert len(self.pool.placements) <= 100 * HOME_DEPTHS

    def teardown(self) -> None:
        if not hasattr(self, "router"):
            return
        for call in [call for call, _ in self.live] + self.due:
            call.close(self.clock())
        assert self.pool.shared.in_flight == set()
        assert all(not attempt.state.in_flight for _, attempt in self.live + self.ended)
        self.clock.advance(1_000.0)
        self.fleet = {"gpu-0": Endpoint("gpu-0", "http://gpu-0")}
        self.announce()
        assert self.router.call("llm").next_attempt(self.clock()).endpoint.id == "gpu-0"
        self.router.close()


RouterMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestRouterMachine = RouterMachine.TestCase
