"""The policy `predictive`: seconds until the first token, corrected by what calls to the same kind of GPU have taught.

The cost in seconds is physics with constants: a queue is its tokens, a prompt its prefill. What an engine really does
with them (steps, batching, decodes, a queue that nobody sees) differs by GPU kind, model and load. So one linear model
per cohort (GPU kind and model) learns the *difference*: recursive least squares with forgetting on what is known when a
call is placed, started at zero. Without evidence the cost is therefore exactly that of `seconds`, and each first token
moves it a little. Errors are relative and bounded, so that one stuck call cannot turn the model over.

A small share of calls goes to the dearer candidate: a cohort that once looked bad would else never be seen again.
"""

from __future__ import annotations

from operator import mul
from typing import TYPE_CHECKING

from gpuroute.core.candidates import NOTHING_ASKED, Ask
from gpuroute.core.report import MAX_AGE_S, faded
from gpuroute.core.seconds import Soonest
from gpuroute.core.speed import shrunk

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from gpuroute.core.attempt import Attempt
    from gpuroute.core.pickers import Kit
    from gpuroute.core.state import EndpointState

INF = float("inf")
EXPLORE = 0.01  # share of calls that go to a candidate that is not the cheapest
FORGET = 0.998  # per sample: 500 of them are remembered
FLOOR_S = 0.05  # errors are relative to the prediction and this
OUTLIER = 3.0  # an error counts for at most so many times the usual one
PRIOR = (0.0, 1.0, 1.0, 1.0, 0.0, 0.45, 0.1)  # seconds per unit of each feature by the cost in seconds
DOUBT = (0.5, 0.3, 0.3, 0.3, 0.05, 0.3, 0.3)  # how far each may be off, before any evidence
MOST_DOUBT = 4.0  # times that: unseen features must not grow wild by forgetting

Features = tuple[float, ...]


class Model:
    """Corrections to the prior, one per feature: recursive least squares. One sample costs some 50 multiplications.

    Not locked: two threads that learn at once may lose a sample, as with every other mean here.
    """

    __slots__ = ("_spread", "_weights", "count", "usual")

    def __init__(self) -> None:
        self._weights = [0.0] * len(PRIOR)
        self._spread = [[doubt * doubt if i == j else 0.0 for j in range(len(PRIOR))] for i, doubt in enumerate(DOUBT)]
        self.count = 0
        self.usual = 1.0  # mean relative error

    def correction(self, features: Features) -> float:
        """Seconds to add to the prior's prediction, which never becomes negative by it."""
        off: float = sum(map(mul, self._weights, features))
        return max(off, -prior_of(features))

    def learn(self, features: Features, seconds: float) -> None:
        """A first token came after `seconds`; anything that is no positive time is ignored."""
        if not 0 < seconds < INF:
            return
        expected = prior_of(features)
        scale = 1.0 / (FLOOR_S + expected)
        sample = [feature * scale for feature in features]
        known = sum(map(mul, self._weights, sample))
        error = (seconds - expected) * scale - known
        bound = OUTLIER * self.usual
        self.count += 1
        self.usual += (min(abs(error), bound) - self.usual) / min(self.count + 1, 100)
        self._step(sample, max(-bound, min(bound, error)))

    def _step(self, sample: Sequence[float], error: float) -> None:
        reach = [sum(map(mul, row, sample)) for row in self._spread]
        gain = 1.0 / (FORGET * max(self.usual, 0.1) ** 2 + sum(map(mul, reach, sample)))
        self._weights = [weight + gain * each * error for weight, each in zip(self._weights, reach, strict=True)]
        fade = [1.0 / FORGET if row[i] < MOST_DOUBT * DOUBT[i] ** 2 else 1.0 for i, row in enumerate(self._spread)]
        self._spread = [
            [(cell - gain * reach[i] * reach[j]) * (fade[i] * fade[j]) ** 0.5 for j, cell in enumerate(row)]
            for i, row in enumerate(self._spread)
        ]


class Predictive(Soonest):
    """Two random endpoints and four that were calm lately (four random ones where agents can be asked): the soonest one
    by the learned prediction."""

    def __init__(self, kit: Kit) -> None:
        super().__init__(kit, homes=False)

    def pick(self, ask: Ask, tried: Container[EndpointState] = ()) -> EndpointState | None:
        if ask is NOTHING_ASKED:
            ask = Ask()
        best = super().pick(ask, tried)
        return self._explored(best, ask, tried) if self._kit.random() < EXPLORE else best

    def _price(self, state: EndpointState, ask: Ask, why: str) -> float:
        seconds = super()._price(state, ask, why)
        model = state.pool.speeds.models.get(cohort_of(state))
        if model is None or not model.count:
            return seconds
        weight = state.endpoint.weight or 1.0  # 0: another thread drains it just now
        return seconds + model.correction(self.features(state, ask)) / weight

    def promised(self, attempt: Attempt, ask: Ask) -> tuple[float, float | None]:
        """Also notes what was known when the call was placed: its first token is a lesson."""
        state = attempt.state
        models, cohort = state.pool.speeds.models, cohort_of(state)
        model = models.get(cohort) or models.setdefault(cohort, Model())
        attempt.lesson = model, self.features(state, ask, attempt)
        return super().promised(attempt, ask)

    def features(self, state: EndpointState, ask: Ask, mine: Attempt | None = None) -> Features:
        """What is known of this call at this endpoint, in seconds; `mine` is the call itself, already placed.

        A constant; the own prompt; the wait by its bid, its last report or its last first token; own work since then;
        own calls in flight; the prompt again times the KV cache in use.
        """
        rate = shrunk(state.speed, state.cohort)
        prompt = self.uncached(state, ask) * rate
        bid = ask.bids.get(state.id)
        if bid is not None:
            return (
                1.0,
                prompt,
                bid.queue_tokens(ask.mean_tokens) * rate,
                0.0,
                0.0,
                prompt * bid.kv_usage,
                bid.running / 100,
            )
        since, wait, kv, running = self._last_seen(state, ask, rate)
        others = [attempt for attempt in tuple(state.in_flight) if attempt is not mine] if state.in_flight else ()
        sent = sum(a.uncached for a in others if a.first is None and a.started > since) if others else 0
        return 1.0, prompt, wait, sent * rate, float(len(others)), prompt * kv, running / 100

    def _last_seen(self, state: EndpointState, ask: Ask, rate: float) -> tuple[float, float, float, float]:
        """When something was last heard of its queue, the wait that this means now, and the KV cache in use."""
        queue, report, mean = state.queue, state.report, state.pool.speeds.mean_wait
        since = -INF if queue is None else queue.at
        if report is not None and report.at > since:
            age = ask.now - report.at
            wait = faded(report.queue_tokens(ask.mean_tokens) * rate, age, mean)
            return report.at, wait, *((report.kv_usage, report.running) if age < MAX_AGE_S else (0.0, 0.0))
        return since, mean if queue is None else queue.expected(ask.now, mean), 0.0, 0.0

    def _explored(self, best: EndpointState | None, ask: Ask, tried: Container[EndpointState]) -> EndpointState | None:
        for state in reversed(self.candidates(ask)):  # the random ones come last
            if state is not best and state.admitted and not state.troubled and state not in tried:
                return state
        return best


def prior_of(features: Features) -> float:
    """Seconds to the first token before anything was learned."""
    seconds: float = sum(map(mul, PRIOR, features))
    return seconds


def cohort_of(state: EndpointState) -> tuple[str, str]:
    """Endpoints that learn together: the same GPU kind and model."""
    return state.endpoint.gpu.kind, state.endpoint.model
