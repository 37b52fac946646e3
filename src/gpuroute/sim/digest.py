"""The fleet digest in a simulation: all agents' counts, collected twice a second and read by clients twice
a second, each at moments of its own.

Clients that read a digest reach no agent: nothing is taken and told, so agents know what engines count.
"""

from __future__ import annotations

from collections import deque
from random import Random
from typing import TYPE_CHECKING, Final

from gpuroute.core.digest import SOURCES, learn_digest

if TYPE_CHECKING:
    from gpuroute.core.pool import Pool
    from gpuroute.core.report import Report

    from .agents import Agents
    from .loop import Simulation

EVERY_S: Final = 0.5


class Digest:
    """One digest, and when each client reads it. A client's reading is done when it has a call to place:
    what it has not read meanwhile changes nothing.
    """

    def __init__(self, sim: Simulation, agents: Agents) -> None:
        self._sim = sim
        self._agents = agents
        self._random = Random(f"{sim.seed}/digest")
        self._rounds: deque[tuple[float, dict[str, Report]]] = deque(maxlen=4)
        self._phases: dict[Pool, float] = {}
        sim.at(EVERY_S * self._random.random(), self._collect, None)

    def read(self, pool: Pool, now: float) -> None:
        """What the client knows of the digest at `now`."""
        phase = self._phases.get(pool)
        if phase is None:
            phase = self._phases[pool] = EVERY_S * self._random.random()
        read_at = now - (now - phase) % EVERY_S
        known = next((reports for at, reports in reversed(self._rounds) if at <= read_at), None)
        if known is not None:
            learn_digest(pool, known)

    def _collect(self, _: object) -> None:
        sim, agents = self._sim, self._agents
        reports = {}
        for index in range(len(sim.servers)):
            bid = None if agents.lost() else agents.bid(index, 0, 0, ())
            if bid is not None:
                queued = -1 if bid.waiting and not bid.queued_tokens else bid.queued_tokens
                reports[f"gpu-{index}"] = bid._replace(matched_tokens=-1, queued_tokens=queued, source=SOURCES[0])
        self._rounds.append((sim.now, reports))
        if not sim.over:
            sim.at(sim.now + EVERY_S, self._collect, None)
