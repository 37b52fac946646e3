"""What a simulation reports: times of calls that arrived in the measured window, and how even the load was.

A call counts from its arrival at the client to the bytes it sees, so asks, retries and network are inside.
A failed call has no time to first token; it lowers `success` and `goodput` instead, which is why both stand
beside the means.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .fleet import Server
    from .job import Job
    from .loop import Flight


@dataclass(frozen=True, slots=True)
class Slo:
    """A call is good if its first token came within `ttft` and its later ones within `tpot` seconds on
    average.
    """

    ttft: float = 2.0
    tpot: float = 0.1


class Meter:
    """Collects one run. `window` seconds are measured after `warmup` seconds."""

    def __init__(self, warmup: float, window: float, *, slo: Slo | None = None, every: float = 1.0) -> None:
        self.warmup = warmup
        self.window = window
        self.end = warmup + window
        self.slo = slo or Slo()
        self.ttft = array("d")
        self.e2e = array("d")
        self.tpot = array("d")
        self.arrivals = self.failures = self.good = self.attempts = 0
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.samples: list[tuple[float, float, float]] = []  # time, mean and max jobs per server
        self.next_sample = warmup
        self.preemptions = 0
        self._every = every
        self._busy: list[float] | None = None
        self.utilisation = 0.0
        self._since = warmup
        self._peaks: list[float] = []

    def arrived(self, flight: Flight) -> None:
        """A call reached a client."""
        self.arrivals += self._measured(flight)

    def picked(self, server: Server, flight: Flight) -> None:
        """An attempt was sent."""
        if self._measured(flight):
            server.picked += 1
            server.picked_tokens += flight.request.prompt_tokens
            self.attempts += 1

    def succeeded(self, flight: Flight, job: Job, now: float) -> None:
        """The whole answer arrived."""
        if not self._measured(flight):
            return
        ttft, e2e = flight.first_at - flight.born, now - flight.born
        self.ttft.append(ttft)
        self.e2e.append(e2e)
        tpot = (e2e - ttft) / (job.output_tokens - 1) if job.output_tokens > 1 else 0.0
        if job.output_tokens > 1:
            self.tpot.append(tpot)
        self.good += ttft <= self.slo.ttft and tpot <= self.slo.tpot
        self.prompt_tokens += job.prompt_tokens
        self.cached_tokens += job.cached_tokens
        self.output_tokens += job.output_tokens

    def failed(self, flight: Flight, now: float) -> None:  # noqa: ARG002
        """The caller got an error."""
        self.failures += self._measured(flight)

    def sample(self, now: float, servers: Sequence[Server]) -> float:
        """Look at the fleet; gives the time of the next look."""
        if self._busy is None:
            self._since = now
            self._busy = [server.gpu.busy_at(now) for server in servers]
        if now <= self.end:
            loads = [server.live for server in servers if server.alive]
            mean = sum(loads) / len(loads) if loads else 0.0
            self.samples.append((now, mean, max(loads, default=0)))
            if mean:
                self._peaks.append(max(loads) / mean)
            spent = sum(server.gpu.busy_at(now) for server in servers) - sum(self._busy)
            self.utilisation = spent / (len(servers) * max(now - self._since, 1e-9))
            return now + self._every
        return inf

    def row(self) -> dict[str, float]:
        """The figures of this run."""
        ttft, tpot = sorted(self.ttft), sorted(self.tpot)
        return {
            "ttft_mean": mean_of(ttft),
            "ttft_p50": quantile(ttft, 0.50),
            "ttft_p95": quantile(ttft, 0.95),
            "ttft_p99": quantile(ttft, 0.99),
            "e2e_mean": mean_of(self.e2e),
            "tpot_p99": quantile(tpot, 0.99),
            "goodput": self.good / self.window,
            "success": len(self.ttft) / self.arrivals if self.arrivals else 0.0,
            "hit": self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0,
            "max_over_mean": mean_of(self._peaks),
        }

    def extra(self) -> dict[str, float]:
        """Figures beside the fixed ones: utilisation (0 to 1), attempts per call, requests and
        tokens per second.
        """
        return {
            "utilisation": self.utilisation,
            "attempts_per_call": self.attempts / self.arrivals if self.arrivals else 0.0,
            "requests_per_s": self.arrivals / self.window,
            "tokens_per_s": self.output_tokens / self.window,
            "good_share": self.good / self.arrivals if self.arrivals else 0.0,
        }

    def _measured(self, flight: Flight) -> bool:
        return self.warmup <= flight.born < self.end and not flight.foreign


def mean_of(values: Sequence[float]) -> float:
    """Mean; 0 for nothing. Summed exactly, so that it does not depend on the order."""
    return math.fsum(values) / len(values) if values else 0.0


def quantile(ordered: Sequence[float], q: float) -> float:
    """The value below which a share `q` lies (nearest rank); 0 for nothing."""
    return ordered[min(len(ordered) - 1, math.ceil(q * len(ordered)) - 1)] if ordered else 0.0


# Two-sided 95 % points of Student's t for 1, 2, ... degrees of freedom: a handful of seeds is far from normal.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def confidence(values: Sequence[float]) -> tuple[float, float]:
    """Mean over seeds and the half width of its 95 % confidence interval (0 for a single seed)."""
    mean, n = mean_of(values), len(values)
    if n < 2:
        return mean, 0.0
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    return mean, (_T95[n - 2] if n - 2 < len(_T95) else 1.96) * deviation / math.sqrt(n)
