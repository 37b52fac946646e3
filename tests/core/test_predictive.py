"""`predictive` learns: what the prior cannot express is found out from first tokens, and not before."""

from __future__ import annotations

import math
import time
from collections import Counter
from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage import OK, REFUSED, Stage, places

from gpuroute.core.candidates import Ask
from gpuroute.core.endpoint import Endpoint, Gpu
from gpuroute.core.outcome import Outcome
from gpuroute.core.predictive import DOUBT, PRIOR, Model, Predictive, prior_of
from gpuroute.core.report import Report
from gpuroute.core.seconds import Soonest

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuroute.core.predictive import Features

Truth = dict[str, "Callable[[int], float]"]
KINDS = ("H100", "L4")
# Not what the prior says: this H100 has something slow before it, and an L4 is slow with long prompts only.
TRUTH: Truth = {"H100": lambda tokens: 0.5 + tokens * 2e-5, "L4": lambda tokens: 0.01 + tokens * 3e-4}


def fleet() -> tuple[Endpoint, ...]:
    return tuple(
        Endpoint(f"{kind}-{n}", f"http://{kind}-{n}:8000", gpu=Gpu(kind=kind)) for kind in KINDS for n in range(4)
    )


def serve(stage: Stage, tokens: int, truth: Truth = TRUTH) -> str:
    """One call, alone; the kind of GPU it went to."""
    attempt = stage.call(ask=Ask(tokens=tokens)).next_attempt(stage.clock())
    attempt.sent(stage.clock())
    kind = attempt.endpoint.gpu.kind
    attempt.first_token(stage.clock.advance(truth[kind](tokens)))
    attempt.finish(Outcome.SUCCESS, stage.clock.advance(0.1))
    return kind


def right_share(stage: Stage, dice: Random, calls: int) -> float:
    """Of calls whose two kinds of candidates differ: how many went where the first token really comes sooner. Short and
    long prompts weigh the same."""
    right = Counter[bool]()
    seen = Counter[bool]()
    for _ in range(calls):
        is_long = dice.random() < 0.5
        tokens = 6_000 if is_long else 200
        best = min(KINDS, key=lambda kind: TRUTH[kind](tokens))
        right[is_long] += serve(stage, tokens) == best
        seen[is_long] += 1
    return min(right[each] / seen[each] for each in (True, False))


def without_learning(stage: Stage) -> None:
    """The same cost with what it has learned left out."""
    stage.pool.shared.speeds.models = _Nothing()


class _Nothing(dict):  # type: ignore[type-arg]
    def get(self, key: object, default: object = None) -> object:
        return default


def test_it_finds_out_what_the_prior_cannot_say() -> None:
    learned, prior = Stage(fleet(), policy="predictive"), Stage(fleet(), policy="predictive")
    without_learning(prior)
    for stage in (learned, prior):
        right_share(stage, Random(5), 600)
    assert right_share(learned, Random(6), 400) > 0.85
    assert right_share(prior, Random(6), 400) < 0.6, "else this test would pass without learning"


def test_it_follows_when_the_truth_changes() -> None:
    stage, dice = Stage(fleet(), policy="predictive"), Random(5)
    right_share(stage, dice, 600)
    swapped = {"H100": lambda tokens: 0.01 + tokens * 2e-5, "L4": lambda tokens: 0.5 + tokens * 3e-4}
    for _ in range(1_500):
        serve(stage, 200, swapped)
    seen = Counter(serve(stage, 200, swapped) for _ in range(200))
    assert seen["H100"] > 0.8 * 200


def test_without_evidence_it_costs_what_seconds_cost() -> None:
    stage = Stage(fleet(), policy="predictive")
    picker = stage.pool.snapshot.picker
    assert isinstance(picker, Predictive)
    ask = Ask(tokens=3_000)
    ask.now = stage.clock()
    stage.state("H100-1").acquire(stage.clock(), None, 2_000)
    for state in stage.pool.snapshot.states:
        assert picker.cost(state, ask) == Soonest.cost(picker, state, ask)
    stage.pool.shared.speeds.models["H100", ""] = Model()
    assert picker.cost(stage.state("H100-1"), ask) == pytest.approx(prior_cost(picker, stage, ask))


def prior_cost(picker: Predictive, stage: Stage, ask: Ask) -> float:
    models = stage.pool.shared.speeds.models
    stage.pool.shared.speeds.models = {}
    try:
        return picker.cost(stage.state("H100-1"), ask)
    finally:
        stage.pool.shared.speeds.models = models


def test_a_small_share_of_calls_explores() -> None:
    stage = Stage(fleet(), policy="predictive", seed=3)
    for _ in range(600):
        serve(stage, 200)
    seen = Counter(serve(stage, 200) for _ in range(2_000))
    assert 0 < seen["H100"] < 0.1 * 2_000, "the dear kind is seen now and then"


def test_no_call_explores_what_was_tried_or_is_in_trouble() -> None:
    for seed in range(40):
        stage = Stage(3, policy="predictive", seed=seed)
        call = stage.drive(lambda attempt: REFUSED if attempt.number < 3 else OK)
        assert len(set(places(call))) == 3


def test_a_failure_teaches_no_time() -> None:
    stage = Stage(fleet(), policy="predictive")
    stage.drive(lambda attempt: REFUSED if attempt.number == 1 else OK)
    assert sum(model.count for model in stage.pool.shared.speeds.models.values()) == 0


def test_bids_and_reports_are_features() -> None:
    stage = Stage(fleet(), policy="predictive")
    picker, state = stage.pool.snapshot.picker, stage.state("L4-0")
    assert isinstance(picker, Predictive)
    ask = Ask(tokens=1_000)
    ask.now = stage.clock()
    state.report = Report(ask.now, 40, 2, 5_000, 0.5)
    by_report = picker.features(state, ask)
    ask.bids = {state.id: state.report}
    assert picker.features(state, ask) == pytest.approx(by_report)
    assert by_report[2] > 0
    assert by_report[5] == pytest.approx(0.5 * by_report[1])
    assert by_report[6] == pytest.approx(0.4)
    ask.bids = {}
    ask.now += 60.0
    assert picker.features(state, ask)[5:] == (0.0, 0.0), "an old report is absent"


some = st.floats(0, 2)
feature_rows = st.tuples(st.just(1.0), some, some, some, st.integers(0, 9).map(float), some, some)
truths = st.tuples(*(st.floats(-2 * doubt, 2 * doubt) for doubt in DOUBT))


@settings(max_examples=25, deadline=None)
@given(off=truths, seed=st.integers(0, 999))
def test_any_linear_truth_is_learned(off: tuple[float, ...], seed: int) -> None:
    """Whatever the engine does with the features, within twice the doubt: 400 calls leave a third of the error."""
    dice, model = Random(seed), Model()

    def features() -> Features:
        return (1.0, *(dice.random() for _ in range(3)), float(dice.randrange(4)), dice.random(), dice.random())

    def truth(row: Features) -> float:
        return sum((prior + more) * each for prior, more, each in zip(PRIOR, off, row, strict=True))

    def error(rows: list[Features]) -> tuple[float, float]:
        prior = [abs(truth(row) - prior_of(row)) for row in rows]
        left = [abs(truth(row) - prior_of(row) - model.correction(row)) for row in rows]
        return sum(left) / len(rows), sum(prior) / len(rows)

    rows = [row for row in (features() for _ in range(500)) if truth(row) > 0.01]
    if len(rows) < 300:  # a world of negative times
        return
    for row in rows[100:]:
        model.learn(row, truth(row))
    left, prior = error(rows[:100])
    assert left < max(0.35 * prior, 0.02)


@settings(max_examples=25, deadline=None)
@given(
    samples=st.lists(
        st.tuples(feature_rows, st.one_of(st.floats(1e-9, 1e9), st.just(math.inf), st.just(math.nan), st.just(-1.0))),
        max_size=60,
    ),
    probe=feature_rows,
)
def test_no_sample_breaks_it(samples: list[tuple[Features, float]], probe: Features) -> None:
    model = Model()
    for row, seconds in samples:
        model.learn(row, seconds)
        assert math.isfinite(model.correction(probe))
        assert prior_of(probe) + model.correction(probe) >= -1e-12, "no first token comes before it was asked for"


def test_one_stuck_call_moves_it_little() -> None:
    model, row = Model(), (1.0, 0.1, 0.2, 0.0, 1.0, 0.0, 0.0)
    for _ in range(200):
        model.learn(row, 0.35)
    before = model.correction(row)
    model.learn(row, 3_600.0)
    assert abs(model.correction(row) - before) < 0.1


def test_ten_thousand_idle_samples_leave_the_rest_alone() -> None:
    """Forgetting must not blow up what was not seen for long."""
    model, idle = Model(), (1.0, 0.05, 0.0, 0.0, 0.0, 0.0, 0.0)
    for _ in range(10_000):
        model.learn(idle, 0.06)
    busy = (1.0, 0.05, 1.0, 0.5, 3.0, 0.02, 0.5)
    model.learn(busy, 2.0)
    assert 0.5 < prior_of(busy) + model.correction(busy) < 4.0
    assert abs(prior_of(idle) + model.correction(idle) - 0.06) < 0.1


def test_a_pick_costs_the_same_in_a_large_fleet() -> None:
    """Bounded work per call, counted: candidates are a handful in any fleet (time would depend on the machine)."""
    for size in (10, 5_000):
        stage = Stage(size, policy="predictive")
        for _ in range(50):
            serve_any(stage)
        assert all(len(stage.pool.snapshot.picker.candidates(Ask(tokens=9))) <= 6 for _ in range(50))  # type: ignore[attr-defined]


def serve_any(stage: Stage) -> None:
    attempt = stage.call(ask=Ask(tokens=500)).next_attempt(stage.clock())
    attempt.first_token(stage.clock.advance(0.02))
    attempt.finish(Outcome.SUCCESS, stage.clock.advance(0.1))


def test_a_lesson_is_cheap() -> None:
    """Generous: a lesson takes some 15 us; a growing one would take milliseconds after this many."""
    model, row = Model(), (1.0, 0.1, 0.2, 0.1, 2.0, 0.05, 0.3)
    for _ in range(20_000):
        model.learn(row, 0.5)
    best = min(_timed(lambda: model.learn(row, 0.5)) for _ in range(50))
    assert best < 0.002


def _timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
