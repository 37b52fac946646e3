"""The breaker: whose failures count, how many probes half-open admits, and that nothing is shut for ever."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage import BAD_REQUEST, ERROR_500, OK, REFUSED, Stage, busy, places

from gpuroute.core.breaker import Breaker, BreakerRules, BreakerState, Window
from gpuroute.core.outcome import Outcome, http_outcome
from gpuroute.core.outliers import OutlierRules
from gpuroute.errors import ConfigError, NoEndpointAvailable

CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN
NO_EJECTION = OutlierRules(interval_s=0)


def one_endpoint(**rules: object) -> Stage:
    """A pool of one that fails fast, so that the breaker alone decides."""
    return Stage(1, panic="fail_fast", outliers=NO_EJECTION, **rules)


def trip(stage: Stage, name: str = "gpu-0", failures: int = 5) -> None:
    """Fail in a row at one endpoint."""
    for _ in range(failures):
        attempt = stage.state(name).acquire(stage.clock())
        assert attempt is not None
        attempt.finish(Outcome.FAILED, stage.clock())


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422])
def test_b1_a_callers_mistakes_open_nothing(status: int) -> None:
    stage, sent = Stage(3), []

    def answer(attempt: object) -> tuple[Outcome, dict[str, object]]:
        sent.append(attempt)
        return http_outcome(status), {"reason": str(status), "answered": True}

    for _ in range(100):
        assert len(stage.drive(answer).history) == 1
        assert stage.drive(lambda _: OK).history[-1].outcome is Outcome.SUCCESS
    assert len(sent) == 100
    assert all(state.breaker.state is CLOSED and state.limit == float("inf") for state in stage.pool.snapshot.states)
    stage.clock.advance(60)  # sweeps for outliers come and go
    stage.drive(lambda _: OK)
    assert stage.pool.shared.signals.ejections == 0


def test_b3_busy_is_not_broken_and_service_resumes_when_the_queue_drains() -> None:
    stage = one_endpoint()
    drained_at = stage.clock() + 3.0
    for _ in range(200):
        stage.drive(lambda _: busy(1.0), attempts=1)
        assert stage.state("gpu-0").breaker.state is CLOSED
        if stage.clock() >= drained_at:
            break
    call = stage.drive(lambda _: OK)
    assert call.history[-1].outcome is Outcome.SUCCESS
    assert stage.clock() - drained_at <= 1.0 + 1.0


def test_b3_a_busy_one_of_three_is_left_alone_while_it_asks_for_it() -> None:
    stage, at_busy = Stage(3), 0

    def answer(attempt: object) -> tuple[Outcome, dict[str, object]]:
        nonlocal at_busy
        if attempt.state.id == "gpu-0":  # type: ignore[attr-defined]
            at_busy += 1
            return busy(2.0)
        return OK

    for _ in range(200):
        assert stage.drive(answer).history[-1].outcome is Outcome.SUCCESS
        stage.clock.advance(0.1)
    assert at_busy <= 20 / 2.0 + 1  # once per pause in 20 s
    assert stage.state("gpu-0").breaker.state is CLOSED


def test_b3_a_dead_application_that_answers_503_is_taken_out_in_the_end() -> None:
    stage = one_endpoint()
    assert http_outcome(503) is Outcome.FAILED
    assert http_outcome(503, retry_after=True) is Outcome.OVERLOADED
    for _ in range(5):
        stage.drive(lambda _: (http_outcome(503), {"answered": True}), attempts=1)
    assert stage.state("gpu-0").breaker.state is OPEN
    with pytest.raises(NoEndpointAvailable) as caught:
        stage.drive(lambda _: OK)
    assert caught.value.retry_after == pytest.approx(5.0, rel=0.2)


@pytest.mark.parametrize("probes", [1, 3])
def test_b4_half_open_lets_no_more_than_the_probes_through(probes: int) -> None:
    stage = one_endpoint(breaker=BreakerRules(probes=probes))
    trip(stage)
    stage.clock.advance(6.1)
    calls = [stage.call() for _ in range(200)]
    live, refused = [], 0
    for call in calls:
        try:
            live.append(call.next_attempt(stage.clock()))
        except NoEndpointAvailable:
            refused += 1
    assert (len(live), refused) == (probes, 200 - probes)
    assert stage.state("gpu-0").breaker.state is HALF_OPEN
    for attempt in live:
        attempt.finish(Outcome.SUCCESS, stage.clock.advance(3.0))
    assert stage.state("gpu-0").breaker.state is CLOSED
    assert stage.state("gpu-0").limit == float("inf")


def test_b4_with_healthy_peers_the_rest_goes_elsewhere() -> None:
    stage = Stage(3, outliers=NO_EJECTION)
    trip(stage)
    stage.clock.advance(6.1)
    started = [stage.start().state.id for _ in range(200)]
    assert started.count("gpu-0") == 1


def test_b4_a_cancelled_probe_frees_its_place_for_the_next() -> None:
    stage = one_endpoint()
    trip(stage)
    stage.clock.advance(6.1)
    call = stage.call()
    call.next_attempt(stage.clock())
    call.close(stage.clock())
    assert stage.state("gpu-0").breaker.state is HALF_OPEN
    assert stage.drive(lambda _: OK).history[-1].outcome is Outcome.SUCCESS


def test_b4_a_failed_probe_opens_for_twice_as_long() -> None:
    stage = one_endpoint(breaker=BreakerRules(jitter=0.0))
    trip(stage)
    opened = []
    for _ in range(8):
        breaker = stage.state("gpu-0").breaker
        opened.append(breaker.reopen_at - stage.clock())
        stage.clock.advance(opened[-1])
        stage.drive(lambda _: ERROR_500, attempts=1)
    assert opened == pytest.approx([5, 10, 20, 40, 80, 160, 300, 300])


def test_b4_open_times_are_jittered_across_processes() -> None:
    times = set()
    for seed in range(20):
        stage = Stage(1, seed=seed, outliers=NO_EJECTION)
        trip(stage)
        times.add(round(stage.state("gpu-0").breaker.reopen_at - stage.clock(), 3))
    assert len(times) == 20
    assert all(4.0 <= seconds <= 6.0 for seconds in times)


def test_streams_that_ran_before_it_opened_say_nothing_whenever_they_end() -> None:
    """A hundred of them may time out minutes after the endpoint has recovered, or end well while it is down."""
    stage = one_endpoint()
    state = stage.state("gpu-0")
    old = [state.acquire(stage.clock()) for _ in range(100)]
    trip(stage)
    assert state.breaker.state is OPEN
    for attempt in old[:5]:
        attempt.finish(Outcome.SUCCESS, stage.clock())  # type: ignore[union-attr]
    assert state.breaker.state is OPEN
    stage.clock.advance(6.1)
    probe = stage.start()
    assert stage.pool.pick() is None  # 95 old ones and the probe
    for attempt in old[5:10]:
        attempt.finish(Outcome.FAILED, stage.clock())  # type: ignore[union-attr]
    assert state.breaker.state is HALF_OPEN
    assert stage.pool.pick() is None
    probe.finish(Outcome.SUCCESS, stage.clock())
    for attempt in old[10:]:
        attempt.finish(Outcome.TIMED_OUT, stage.clock.advance(1.0))  # type: ignore[union-attr]
    assert state.breaker.state is CLOSED
    assert stage.residue() == {}


def test_an_endpoint_that_fails_every_second_call_is_seen_by_the_ratio() -> None:
    stage = one_endpoint()
    for number in range(30):
        stage.drive(lambda _, bad=number % 2: ERROR_500 if bad else OK, attempts=1)  # type: ignore[misc]
        if stage.state("gpu-0").breaker.state is OPEN:
            break
    assert stage.state("gpu-0").breaker.state is OPEN
    assert 20 <= number <= 22


def test_a_few_failures_among_many_successes_open_nothing() -> None:
    stage = one_endpoint()
    for number in range(400):
        stage.drive(lambda _, bad=number % 3 == 0: ERROR_500 if bad else OK, attempts=1)  # type: ignore[misc]
        stage.clock.advance(0.05)
    assert stage.state("gpu-0").breaker.state is CLOSED


def test_trips_are_forgiven_by_successes_not_by_time() -> None:
    stage = one_endpoint(breaker=BreakerRules(jitter=0.0))
    breaker = stage.state("gpu-0").breaker
    for _ in range(3):
        trip(stage) if breaker.state is CLOSED else stage.drive(lambda _: REFUSED, attempts=1)
        stage.clock.advance(breaker.reopen_at - stage.clock())
    assert breaker.trips == 3
    stage.clock.advance(10_000)
    stage.drive(lambda _: OK)
    assert breaker.trips == 3
    for _ in range(30):
        stage.drive(lambda _: OK)
    assert breaker.trips == 0
    assert not stage.state("gpu-0").troubled


def test_t4_an_hour_without_calls_neither_heals_nor_breaks() -> None:
    stage = one_endpoint()
    trip(stage, failures=4)
    stage.clock.advance(3_600)
    assert stage.state("gpu-0").breaker.state is CLOSED
    trip(stage, failures=1)  # the fifth in a row, though an hour later
    assert stage.state("gpu-0").breaker.state is OPEN
    stage.clock.advance(3_600)
    assert stage.drive(lambda _: OK).history[-1].outcome is Outcome.SUCCESS
    assert stage.state("gpu-0").breaker.state is CLOSED


def test_t4_a_window_forgets_exactly_what_is_older_than_it() -> None:
    window = Window(10.0)
    for second in range(100):
        window.add(float(second), failed=second % 2 == 0)
        calls, failures = window.totals(float(second))
        assert calls == min(second + 1, 10)
        assert abs(failures - calls / 2) <= 0.5
    assert window.totals(109.0) == (0, 0)
    window.add(1e9, failed=True)
    assert window.totals(1e9) == (1, 1)
    window.add(1e9 - 3_600, failed=True)  # a clock that steps back counts into the present slice
    assert window.totals(1e9) == (2, 2)


def test_no_failures_allowed_means_off() -> None:
    stage = one_endpoint(breaker=BreakerRules(failures=0))
    trip(stage, failures=200)
    assert stage.state("gpu-0").breaker.state is CLOSED


@pytest.mark.parametrize(
    "wrong",
    [
        {"failures": -1},
        {"probes": 0},
        {"open_s": 0.0},
        {"max_open_s": 1.0},
        {"ratio": 0.0},
        {"ratio": 1.1},
        {"min_calls": 0},
        {"window_s": 0.0},
    ],
)
def test_rules_that_cannot_work_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="breaker rules"):
        BreakerRules(**wrong)  # type: ignore[arg-type]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(["start", "ok", "fail", "cancel", "reject", "wait", "long wait"]), max_size=80),
    st.integers(1, 3),
    st.integers(0, 2**32),
)
def test_whatever_happens_the_breaker_admits_its_probes_and_reopens(steps: list[str], probes: int, seed: int) -> None:
    stage = one_endpoint(breaker=BreakerRules(failures=2, probes=probes), seed=seed)
    state, dice, live, refused = stage.state("gpu-0"), Random(seed), [], None
    ends = {"ok": "SUCCESS", "fail": "FAILED", "cancel": "CANCELLED", "reject": "REJECTED"}
    for step in steps:
        if step == "start":
            try:
                live.append(stage.call().next_attempt(stage.clock()))
            except NoEndpointAvailable as error:
                refused = state.breaker.state, error.retry_after is None
            assert refused in (None, (OPEN, False), (HALF_OPEN, True))
        elif step in ends and live:
            live.pop(dice.randrange(len(live))).finish(Outcome[ends[step]], stage.clock())
        else:
            stage.clock.advance(0.5 if step == "wait" else 400.0)
        breaker = state.breaker
        new = [attempt for attempt in live if attempt not in breaker.bystanders]
        assert breaker.state is CLOSED or len(new) <= probes
        assert state.limit == breaker.cap(state.in_flight)
        assert breaker.state is not OPEN or breaker.reopen_at < float("inf")
    for attempt in live:
        attempt.finish(Outcome.CANCELLED, stage.clock())
    stage.clock.advance(400.0)
    assert places(stage.drive(lambda _: OK)) == ["gpu-0"]
    assert state.breaker.state is CLOSED
    assert stage.residue() == {}


def test_a_breaker_alone_is_a_pure_machine() -> None:
    breaker = Breaker(BreakerRules(jitter=0.0))
    breaker.tick(1e9)
    assert breaker.state is CLOSED
    assert breaker.cap(()) == float("inf")


def test_a_rejected_probe_proves_nothing() -> None:
    stage = one_endpoint()
    trip(stage)
    stage.clock.advance(6.1)
    stage.drive(lambda _: BAD_REQUEST)
    assert stage.state("gpu-0").breaker.state is HALF_OPEN
    stage.drive(lambda _: OK)
    assert stage.state("gpu-0").breaker.state is CLOSED
