"""What a person or a status page may see of the core: typed, JSON-able, without secrets.

Reads never write: describing a pool changes nothing in it, and a pick that is explained is not done.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from gpuroute.core.candidates import Look
from gpuroute.core.report import MAX_AGE_S

if TYPE_CHECKING:
    from gpuroute.core.candidates import Ask
    from gpuroute.core.pool import Pool
    from gpuroute.core.state import EndpointState
    from gpuroute.core.subset import SubsetView


DRAWN = frozenset({"candidate", "random"})  # how candidates of chance are named


@dataclass(frozen=True, slots=True)
class ReportView:
    """What a server last said of itself, by which way (`agent:READY`, `digest:READY`, `orca`, ...), and how long ago.
    `late_s`: how much later than its bids promise first tokens come from it; beyond 0.2 s it is not believed."""

    source: str
    age_s: float
    running: int
    waiting: int
    queued_tokens: int | None
    kv_usage: float
    late_s: float


@dataclass(frozen=True, slots=True)
class EndpointView:
    """One endpoint as this process sees it. `limit` None = unlimited, `report` None = it never reported; ages in s."""

    id: str
    url: str
    state: str
    weight: float
    in_flight: int
    limit: float | None
    caps: dict[str, float]
    breaker: str
    served: int
    last_error: str
    last_error_age_s: float | None
    oldest_attempt_s: float | None
    zone: str = ""
    gpu: str = ""
    report: ReportView | None = None


@dataclass(frozen=True, slots=True)
class PoolView:
    """One pool: its policy, its endpoints, counters, and what is left of the retry budget. `agents`, `reporting`: shares
    of its endpoints that have an agent, and that reported their load within the last 10 s. `subset`: which part of
    the pool `endpoints` are, if this client uses only a part."""

    name: str
    policy: str
    disabled: bool
    in_flight: int
    budget: float
    signals: dict[str, int]
    endpoints: tuple[EndpointView, ...]
    agents: float = 0.0
    reporting: float = 0.0
    subset: SubsetView | None = None


@dataclass(frozen=True, slots=True)
class RouterView:
    """The whole router. `registry_age_s`: since the last good view; `registry_error`, `digest_error`: present trouble."""

    source: str
    stale: bool
    registry_age_s: float | None
    registry_error: str | None
    problems: tuple[str, ...]
    version: int
    pools: dict[str, PoolView] = field(default_factory=dict)
    digest_error: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain dictionaries and lists, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class CandidateView:
    """A candidate of one pick: its cost, why it was considered, and why it could not win ("" if it could)."""

    endpoint: str
    cost: float
    why: str
    in_flight: int
    excluded: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """One pick explained, not done. `excluded`: endpoints that may take nothing now, and the reason."""

    pool: str
    policy: str
    winner: str | None
    candidates: tuple[CandidateView, ...]
    excluded: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Plain dictionaries and lists, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        rows = [
            f"  {row.endpoint:<16} cost {row.cost:<10.4g} in flight {row.in_flight:<4} {row.why}"
            + (f"  (excluded: {row.excluded})" if row.excluded else "")
            for row in self.candidates
        ]
        out = [f"  {name:<16} out: {why}" for name, why in sorted(self.excluded.items())]
        return "\n".join([f"{self.pool} by {self.policy}: {self.winner or 'nobody'}", *rows, *out])


def describe_endpoint(state: EndpointState, now: float) -> EndpointView:
    """A copy of what is known of one endpoint."""
    endpoint = state.endpoint
    oldest = min((attempt.started for attempt in tuple(state.in_flight)), default=None)
    return EndpointView(
        id=state.id,
        url=endpoint.url,
        state=str(endpoint.state),
        weight=endpoint.weight,
        in_flight=len(state.in_flight),
        limit=None if math.isinf(state.limit) else state.limit,
        caps=dict(state.caps),
        breaker=str(state.breaker.state),
        served=state.served,
        last_error=state.last_error,
        last_error_age_s=_age(state.last_error_at, now),
        oldest_attempt_s=_age(oldest, now),
        zone=endpoint.zone,
        gpu=endpoint.gpu.kind,
        report=_report(state, now),
    )


def _report(state: EndpointState, now: float) -> ReportView | None:
    said, trust = state.report, state.trust
    if said is None:
        return None
    queued = said.queued_tokens if said.queued_tokens >= 0 else None
    late = 0.0 if trust is None else trust.lateness(now)
    return ReportView(said.source, now - said.at, said.running, said.waiting, queued, said.kv_usage, late)


def describe_pool(pool: Pool, now: float) -> PoolView:
    """A copy of what is known of one pool."""
    with pool.shared.lock:
        budget = pool.budget.balance(now)
    states = pool.snapshot.states
    fresh = sum(state.report is not None and now - state.report.at <= MAX_AGE_S for state in states)
    return PoolView(
        name=pool.name,
        policy=pool.rules.policy,
        disabled=pool.spec.config.disabled,
        in_flight=len(pool.shared.in_flight),
        budget=budget,
        signals=pool.shared.signals.as_dict(),
        endpoints=tuple(describe_endpoint(state, now) for state in states),
        agents=sum(bool(state.endpoint.agent) for state in states) / max(1, len(states)),
        reporting=fresh / max(1, len(states)),
    )


def explain(pool: Pool, ask: Ask) -> Explanation:
    """The candidates, their costs, the exclusions and the winner of a pick that is not done. It moves nobody's turn; but
    where chance decides, it is asked here too."""
    ask = _look(ask)
    rows = [
        CandidateView(state.id, cost, why, len(state.in_flight), _closed(state))
        for state, cost, why in pool.snapshot.picker.consider(ask)
    ]
    winner = _winner(pool, ask, rows)
    closed = {state.id: _closed(state) for state in pool.snapshot.states if _closed(state)}
    return Explanation(pool.name, pool.rules.policy, winner, tuple(rows), closed)


def _look(ask: Ask) -> Ask:
    look = Look(ask.key, ask.ladder, ask.tokens)
    look.now, look.mean_tokens, look.bids = ask.now, ask.mean_tokens, ask.bids
    return look


def _winner(pool: Pool, ask: Ask, rows: list[CandidateView]) -> str | None:
    fit = [row for row in rows if not row.excluded]
    if fit and all(row.why in DRAWN for row in rows):
        return min(fit, key=lambda row: row.cost).endpoint  # a second draw would compare others than those shown
    state = pool.pick(ask)  # a pick acquires nothing
    return state.id if state else None


def _closed(state: EndpointState) -> str:
    """Why an endpoint takes nothing now; "" if it does."""
    endpoint = state.endpoint
    if endpoint.weight == 0:
        return "drained by weight 0"
    if not endpoint.takes_calls:
        return str(endpoint.state)
    if state.admitted:
        return ""
    caps = tuple(state.caps.items())
    return ", ".join(f"{name} limit {cap:g}" for name, cap in caps if len(state.in_flight) >= cap)


def _age(moment: float | None, now: float) -> float | None:
    return None if moment is None else max(0.0, now - moment)
