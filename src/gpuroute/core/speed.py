"""How fast an endpoint is: seconds per prompt token and per output token, learned and shrunk to its cohort.

The registry's GPU kind is only the prior. Each first token that did not wait teaches the prefill rate; the mean of a
logarithm is robust to one slow call, and an endpoint with few samples leans on the cohort of the same GPU and model, so
that a thermally throttled GPU shows within some 50 calls and a single outlier shows nowhere.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gpuroute.core.trust import Words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuroute.core.endpoint import Endpoint
    from gpuroute.core.predictive import Model
    from gpuroute.core.state import EndpointState

# Seconds per prompt token of an 8B model in BF16, from public kernel measurements (docs/simulation.md).
PREFILL_PRIOR = {
    "H200": 19.9e-6,
    "H100": 20.1e-6,
    "A100": 55.9e-6,
    "L40S": 68.5e-6,
    "V100": 163e-6,
    "L4": 266e-6,
}
UNKNOWN_PRIOR = 50e-6
TELLING_TOKENS = 4_000  # less work than this is mostly the engine's step time, so it says less about the rate
CALM = 16  # endpoints remembered as calm
SLOW, FAST = 0.02, 0.12  # weight of the newest sample
TRACK = 0.06  # the same, for the means that tell drift from noise
SHRINK = 20.0  # samples at which own experience weighs as much as the cohort's


class Rate:
    """A learned log(seconds per token) that starts at a prior; `seconds` is what it means.

    It moves slowly while samples lie on both sides of it and up to six times as fast while they all lie on one, which is
    what a throttled GPU looks like (the tracking signal of Trigg and Leach, 1967: mean error over mean absolute error).
    """

    __slots__ = ("_bias", "_spread", "count", "log", "seconds")

    def __init__(self, prior: float) -> None:
        self.log = math.log(prior)
        self.seconds = prior
        self.count = 0.0
        self._bias = self._spread = 0.0

    def learn(self, log: float, weight: float = 1.0) -> None:
        """One sample, log(seconds per token); the newest weigh 2 to 12 % once there are fifty. `weight`: what it says."""
        self.count += weight
        off, step = log - self.log, TRACK * weight
        drift = self._bias / self._spread if self._spread else 0.0  # by those before it: one outlier is none
        drift = min(1.0, drift * drift)  # two threads in here may leave a bias above its spread
        self._bias += step * (off - self._bias)
        self._spread += step * (abs(off) - self._spread)
        self.log += off * weight * max(SLOW, 1.0 / (self.count + 1), FAST * drift)
        self.seconds = math.exp(self.log)


class Speeds:
    """What one pool has learned: prefill rates by cohort, what a wait is where nothing is known, and who was calm lately.

    Not locked: single stores of floats and single steps of a dict.
    """

    __slots__ = (
        "_calm",
        "_cohorts",
        "alarm_at",
        "backlog",
        "bids",
        "blind_wait",
        "mean_requests",
        "mean_wait",
        "models",
        "usual_late",
        "usual_latency",
        "words",
    )

    def __init__(self) -> None:
        self._calm: dict[EndpointState, None] = {}
        self._cohorts: dict[tuple[str, str], Rate] = {}
        self.models: dict[tuple[str, str], Model] = {}  # of the policy `predictive`, by cohort
        self.mean_wait = 0.0
        self.mean_requests = 0.0  # running and waiting, by reports
        self.alarm_at = -math.inf  # when somebody's bid was last found to be far from the truth
        self.backlog = 0.0  # moving mean of queued tokens in bids
        self.bids = 0  # heard of agents so far
        self.usual_late = 0.0  # median of seconds that first tokens come later than bids promise
        self.usual_latency: float | None = None  # moving mean of the logarithm of what calls took
        self.blind_wait = 0.0  # of the waits at endpoints that had given none
        self.words = Words()

    def cohort(self, endpoint: Endpoint) -> Rate:
        """The common experience with this GPU and model."""
        key = (endpoint.gpu.kind, endpoint.model)
        rate = self._cohorts.get(key)
        if rate is None:
            rate = self._cohorts[key] = Rate(PREFILL_PRIOR.get(endpoint.gpu.kind, UNKNOWN_PRIOR))
        return rate

    def note(self, state: EndpointState, *, calm: bool) -> None:
        """This endpoint answered without a wait, or not."""
        self._calm.pop(state, None)
        if calm:
            self._calm[state] = None
            if len(self._calm) > CALM:
                self._calm.pop(next(iter(tuple(self._calm))), None)

    def calm(self) -> Iterator[EndpointState]:
        """Endpoints that answered without a wait when they were last heard of, the latest first."""
        return reversed(tuple(self._calm))

    def waited(self, seconds: float) -> None:
        """One wait at an endpoint of which nothing was known, in seconds."""
        self.mean_wait += 0.02 * (seconds - self.mean_wait)


def shrunk(own: Rate | None, cohort: Rate) -> float:
    """Seconds per token: own experience and the cohort's, weighed by samples (in the log domain)."""
    if own is None:
        return cohort.seconds
    weight = own.count / (own.count + SHRINK)
    return math.exp(weight * own.log + (1 - weight) * cohort.log)
