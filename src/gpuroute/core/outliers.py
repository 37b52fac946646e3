"""Outlier ejection: endpoints that are worse than their peers leave for a while.

Compared with the pool by median and MAD, not mean and standard deviation (gRFC A50, Envoy): with 30 % of a pool dead the
mean moves to the sick and sees nobody as an outlier. Endpoint latency is compared per unit of prompt and only with the
cohort of the same GPU and model, which finds a gray GPU and spares an honest slow one. What leaves at once is capped by
capacity, at least one may always leave a pool of two or more, and one always stays. What the cap forbade is counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from gpuroute.core.history import LogMean
from gpuroute.core.state import EJECTION
from gpuroute.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpuroute.core.shared import PoolState
    from gpuroute.core.state import EndpointState

MAD_TO_SIGMA = 1.4826


@dataclass(frozen=True, slots=True)
class OutlierRules:
    """Every `interval_s` compare; eject for `base_s` x times ejected, up to `max_s`; at most `max_share` of capacity.

    `min_calls` in an interval to be judged at all. `failure_share`: ejected from that share of failures on, whatever the
    peers do. `sigmas`: below the pool's median success rate. `slow_factor`: that many times slower than the median of
    its cohort in `slow_sweeps` sweeps in a row. `interval_s=0` switches ejection off.
    Defaults: gRFC A50 (10 s, 30 s, 300 s); share 33 % and the latency rule are ours, from `gpuroute chaos`.
    """

    interval_s: float = 10.0
    base_s: float = 30.0
    max_s: float = 300.0
    max_share: float = 1 / 3
    min_calls: int = 10
    failure_share: float = 0.5
    sigmas: float = 3.0
    slow_factor: float = 3.0
    slow_sweeps: int = 3

    def __post_init__(self) -> None:
        if self.interval_s < 0 or self.base_s <= 0 or self.max_s < self.base_s or not 0 <= self.max_share <= 1:
            raise ConfigError(
                f"outlier rules: need 0 < base_s <= max_s, interval_s >= 0, 0 <= max_share <= 1; got {self!r}"
            )


class Record:
    """What one endpoint had done at the last sweep (`timed`: first tokens), and its past ejections."""

    __slots__ = ("failed", "served", "slow", "timed", "times")

    def __init__(self) -> None:
        self.served = self.failed = self.timed = 0
        self.slow = 0
        self.times = 0


class Outliers:
    """Judges one pool, at most every `interval_s`. The pool locks."""

    __slots__ = ("_records", "_swept_at", "due_at", "rules")

    def __init__(self, rules: OutlierRules, now: float = 0.0) -> None:
        self.rules = rules
        self._swept_at = now
        self.due_at = now + rules.interval_s if rules.interval_s else math.inf
        self._records: dict[str, Record] = {}

    def sweep(self, states: Sequence[EndpointState], pool: PoolState, now: float) -> list[EndpointState]:
        """Eject the outliers among `states` and return them; O(number of endpoints)."""
        self.due_at = now + self.rules.interval_s
        pool.learn()
        self._records = {state.id: self._record(state) for state in states}
        self._swept_at = now
        suspects = self._unhealthy(states) | self._slow(states)
        return [state for state in sorted(suspects, key=lambda state: state.id) if self.eject(state, states, pool, now)]

    def eject(
        self, state: EndpointState, states: Sequence[EndpointState], pool: PoolState, now: float, seconds: float = 0.0
    ) -> bool:
        """Take one endpoint out if the cap leaves room, for `seconds` or as its history says; count it if not."""
        if EJECTION in state.caps:
            return False
        if not self._room_for(state, states):
            pool.signals.ejections_unenforced += 1
            return False
        record = self._records[state.id] = self._record(state)
        record.times += 1
        if record.slow >= self.rules.slow_sweeps and state.history is not None:
            state.history.ttft, record.timed = LogMean(), 0  # once it is back, only what it does then counts
        record.slow = 0
        spread = 0.9 + 0.2 * pool.random()
        seconds = seconds or min(self.rules.base_s * record.times, self.rules.max_s)
        state.set_cap(EJECTION, 0, now + seconds * spread)
        pool.signals.ejections += 1
        return True

    def _record(self, state: EndpointState) -> Record:
        """Its record. Who was here before but was not judged, drained or unlisted, is not judged by what it did then."""
        record = self._records.get(state.id)
        if record is None:
            record = Record()
            if state.joined_at < self._swept_at:
                record.served, record.failed = state.served, state.failed
                record.timed = state.history.ttft.count if state.history is not None else 0
        return record

    def _unhealthy(self, states: Sequence[EndpointState]) -> set[EndpointState]:
        rates: dict[EndpointState, float] = {}
        for state in states:
            record = self._records[state.id]
            served, failed = state.served - record.served, state.failed - record.failed
            record.served, record.failed = state.served, state.failed
            if served >= self.rules.min_calls:
                rates[state] = 1 - failed / served
            if served and not failed and record.times and EJECTION not in state.caps:
                record.times -= 1
        if not rates:
            return set()
        middle = median(rates.values())
        bound = middle - self.rules.sigmas * max(0.05, MAD_TO_SIGMA * _deviation(rates.values(), middle))
        enough = len(rates) >= 3
        return {
            state for state, rate in rates.items() if 1 - rate >= self.rules.failure_share or (enough and rate < bound)
        }

    def _slow(self, states: Sequence[EndpointState]) -> set[EndpointState]:
        cohorts: dict[tuple[str, str], dict[EndpointState, float]] = {}
        for state in states:
            if state.history is not None and state.history.ttft.count >= self.rules.min_calls:
                cohort = cohorts.setdefault((state.endpoint.gpu.kind, state.endpoint.model), {})
                cohort[state] = state.history.ttft.mean
        found = set()
        for cohort in cohorts.values():
            bound = median(cohort.values()) + math.log(self.rules.slow_factor)
            for state, mean in cohort.items():
                if not self._timed_since(state) or EJECTION in state.caps:
                    continue
                record = self._records[state.id]
                record.slow = record.slow + 1 if len(cohort) >= 3 and mean > bound else 0
                if record.slow >= self.rules.slow_sweeps:
                    found.add(state)
        return found

    def _timed_since(self, state: EndpointState) -> bool:
        """Whether it has had a first token since the last sweep; that is noted."""
        record, timed = self._records[state.id], state.history.ttft.count if state.history is not None else 0
        before, record.timed = record.timed, timed
        return timed != before

    def _room_for(self, state: EndpointState, states: Sequence[EndpointState]) -> bool:
        """One always stays; one may always go; beyond that, no more than `max_share` of the capacity."""
        out = [peer for peer in states if EJECTION in peer.caps]
        if len(out) + 1 >= len(states):
            return False
        if not out:
            return self.rules.max_share > 0
        gone = sum(peer.endpoint.weight for peer in (*out, state))
        return gone <= self.rules.max_share * sum(peer.endpoint.weight for peer in states)


def _deviation(values: Iterable[float], middle: float) -> float:
    return median(abs(value - middle) for value in values)
