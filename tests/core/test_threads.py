"""Many threads on one pool: limits hold, counts return to zero, nothing is lost, nothing raises."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from random import Random
from typing import TYPE_CHECKING

import pytest
from stage import Stage

from gpuroute.core.breaker import BreakerRules, BreakerState
from gpuroute.core.candidates import Ask
from gpuroute.core.describe import describe_pool, explain
from gpuroute.core.hosts import Hosts
from gpuroute.core.outcome import Outcome
from gpuroute.core.outliers import OutlierRules
from gpuroute.errors import NoEndpointAvailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

THREADS = 8
NO_EJECTION = OutlierRules(interval_s=0)


@pytest.fixture(autouse=True)
def switch_often() -> Iterator[None]:
    """The interpreter changes threads some thousand times as often as usual, so that a race shows in a second."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(2e-6)
    yield
    sys.setswitchinterval(usual)


def together(work: Callable[[int], None]) -> None:
    """Run `work(0..7)` in threads that start at once; the first exception of any of them fails the test."""
    gate, errors = threading.Barrier(THREADS), []

    def run(number: int) -> None:
        gate.wait()
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_finite_limit_is_never_exceeded(limit: int) -> None:
    stage = Stage(2, max_in_flight=limit, threads=True)
    states, served, over = stage.pool.snapshot.states, [0] * THREADS, []

    def work(number: int) -> None:
        for _ in range(1_500):
            attempt = stage.pool.acquire(Ask(), 1.0)
            over.extend(state for state in states if len(state.in_flight) > limit)
            if attempt is not None:
                served[number] += 1
                attempt.finish(Outcome.SUCCESS, 1.0)

    together(work)
    assert not over
    assert stage.residue() == {}
    assert sum(served) == sum(state.served for state in states) > 0


def test_half_open_lets_one_probe_in_whoever_asks() -> None:
    stage = Stage(1, panic="fail_fast", threads=True, outliers=NO_EJECTION, breaker=BreakerRules(failures=1))
    state, most, lock = stage.state("gpu-0"), 0, threading.Lock()
    for _ in range(40):
        attempt = state.acquire_in_panic(stage.clock())
        assert attempt is not None
        attempt.finish(Outcome.FAILED, stage.clock())
        stage.clock.advance(400.0)
        started = []

        def work(number: int, started: list[object] = started) -> None:
            try:
                attempt = stage.call().next_attempt(stage.clock())
            except NoEndpointAvailable:
                return
            with lock:
                started.append(attempt)

        together(work)
        most = max(most, len(started))
        for probe in started:
            probe.finish(Outcome.SUCCESS, stage.clock())  # type: ignore[attr-defined]
        assert state.breaker.state is BreakerState.CLOSED
    assert most == 1
    assert stage.residue() == {}


def test_one_attempt_ends_once_however_many_end_it() -> None:
    stage = Stage(1, threads=True)
    for _ in range(200):
        attempt, wins = stage.start(), []
        together_now = threading.Barrier(2)

        def end(attempt: object = attempt, gate: threading.Barrier = together_now, wins: list[bool] = wins) -> None:
            gate.wait()
            wins.append(attempt.finish(Outcome.SUCCESS, 1.0))  # type: ignore[attr-defined]

        threads = [threading.Thread(target=end) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(wins) == [False, True]
    assert stage.state("gpu-0").served == 200


@pytest.mark.parametrize("policy", ["round_robin", "weighted_round_robin"])
def test_a_rotation_shared_by_threads_loses_nobody(policy: str) -> None:
    """Every endpoint keeps its turn, and none has been saved up: right after, each gets one in five."""
    stage = Stage(5, policy=policy, threads=True)

    def work(number: int) -> None:
        assert all(stage.pool.pick() is not None for _ in range(2_500))

    together(work)
    counts = Counter(stage.pool.pick().id for _ in range(500))  # type: ignore[union-attr]
    assert all(abs(count - 100) <= 2 for count in counts.values())
    assert len(counts) == 5


def test_everything_at_once_raises_nothing_and_leaves_nothing() -> None:
    """Calls that end in every way, pauses, breakers, updates, and people who look on."""
    stage = Stage(6, policy="prefix", threads=True, breaker=BreakerRules(failures=2, open_s=0.01), max_in_flight=4)
    fleets = [6, 5, {f"gpu-{n}": 1.0 + n % 2 for n in range(7)}, 6]
    clock = stage.clock
    allowed: list[NoEndpointAvailable] = []

    def call(dice: Random) -> None:
        call = stage.call(ask=Ask(ladder=(dice.randrange(50),)), attempts=3)
        try:
            for _ in range(3):
                attempt = call.next_attempt(clock())
                attempt.sent(clock())
                outcome = dice.choice(list(Outcome))
                if not call.finish(attempt, outcome, clock(), retry_after=dice.random() * 0.02, answered=True):
                    break
        except NoEndpointAvailable as error:
            allowed.append(error)
        finally:
            call.close(clock())

    def work(number: int) -> None:
        dice = Random(number)
        for turn in range(250):
            clock.advance(0.001)
            if number == 0:
                stage.update(fleets[turn % len(fleets)])
            elif number == 1:
                describe_pool(stage.pool, clock())
                explain(stage.pool, Ask(ladder=(turn,)))
                stage.pool.pause_left(clock())
            else:
                call(dice)

    together(work)
    assert stage.residue() == {}
    assert not stage.pool.shared.in_flight
    clock.advance(400.0)
    assert stage.call().next_attempt(clock()).finish(Outcome.SUCCESS, clock())
    stage.pool.tick(clock.advance(400.0))
    assert all(
        state.limit in (4, 5) or state.breaker.state is not BreakerState.CLOSED for state in stage.pool.snapshot.states
    )


def test_a_cap_that_expires_is_never_forgotten() -> None:
    """A pause begun while another thread recomputes the next moment to wake up at must still end."""
    stage = Stage(8, threads=True)
    states, clock = stage.pool.snapshot.states, stage.clock

    def work(number: int) -> None:
        for _ in range(400):
            states[number].pause(clock() + 0.002)
            clock.advance(0.001)
            stage.pool.pause_left(clock())
            if clock() >= stage.pool.shared.wake_at:
                stage.pool.tick(clock())

    together(work)
    clock.advance(1.0)
    if clock() >= stage.pool.shared.wake_at:
        stage.pool.tick(clock())
    assert all(state.admitted for state in states)


def test_an_interrupt_anywhere_in_admission_leaves_no_load_behind() -> None:
    """Between any two lines of `next_attempt`: whatever counts as load is known to the call, so its close ends it."""
    stage = Stage(2, max_in_flight=4, policy="least_request")
    line = 0
    while True:
        line += 1
        call = stage.call()
        left = line

        def interrupt(_frame: object, event: str, _argument: object) -> object:
            nonlocal left
            left -= event == "line"
            if not left:
                sys.settrace(None)
                raise KeyboardInterrupt
            return interrupt

        try:
            sys.settrace(interrupt)
            call.next_attempt(stage.clock())
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        call.close(stage.clock())
        assert not any(state.in_flight for state in stage.pool.snapshot.states), f"after line {line}"
        assert not stage.pool.shared.in_flight, f"after line {line}"
        if left > 0:
            break
    assert line > 15


def test_more_hosts_than_are_remembered_may_be_missed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuroute.core.hosts.MAX_HOSTS", 50)
    hosts = Hosts()

    def work(number: int) -> None:
        for again in range(6_000):
            assert hosts.missed(f"host-{number}-{again}", 0.0) == 1

    together(work)
    assert len(hosts._missed) < 50 + THREADS
