"""Counters of what the core did, and of what it refrained from doing.

Plain integers: a lost increment under a race costs a unit in a graph, a lock on every call would cost all callers.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Signals:
    """Totals of one pool since the router started."""

    calls: int = 0
    attempts: int = 0
    retries: int = 0
    retries_denied: int = 0
    panic_picks: int = 0
    no_endpoint: int = 0
    deadlines: int = 0
    pauses: int = 0
    breaker_opened: int = 0
    breaker_half_opened: int = 0
    breaker_closed: int = 0
    ejections: int = 0
    ejections_unenforced: int = 0
    stalls: int = 0
    hedges: int = 0
    hedges_denied: int = 0
    reroutes: int = 0
    continuations: int = 0
    keyed: int = 0

    @property
    def keyless(self) -> int:
        """Calls with no session key and no known prompt: what most calls are is not counted, but what few are."""
        return self.calls - self.keyed

    def as_dict(self) -> dict[str, int]:
        """A copy, for JSON."""
        return {**asdict(self), "keyless": self.keyless}
