"""How clients hear of the load of servers in a simulation, and what goes wrong with it.

`piggyback`: a response carries the server's load (with its first byte, and again at its end). `engine`:
before a call, a few candidates are asked for their running and waiting counts. `agent`: the process beside
the engine is asked, which also knows queued prompt tokens and how much of the prompt is cached. `digest`:
agents' counts are collected twice a second, and read by every client twice a second. News take
`delay` seconds one way, get lost with chance `loss`, and are `stale` seconds old when they leave.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .fleet import Load

CHANNELS: Final = {"piggyback": "piggyback", "engine": "engine", "asks": "agent", "agent": "agent", "digest": "digest"}


@dataclass(frozen=True, slots=True)
class Reports:
    """Settings of the report channel. Shares between 0 and 1, times in seconds."""

    channel: str = "none"
    delay: float = 0.0005
    loss: float = 0.0
    stale: float = 0.0
    frozen_at: float = float("inf")  # from then on every report repeats what was true at that time
    frozen: float = 1.0  # share of servers that this befalls
    frozen_sample: bool = False  # only the agent's look at the engine stops then, and it says how old that is
    coverage: float = 1.0  # share of servers that answer asks
    liars: float = 0.0  # share of agents that always say idle
    second_opinions: bool = False  # where an agent is not believed, its engine says its counts
    patience: float = 0.005  # an ask unanswered for that long counts as lost
    cache_error: float = 0.0  # agents misjudge the matched prefix by up to that share

    @property
    def unanswered(self) -> float:
        """Share of asks that get lost, or whose answer does."""
        return 1 - (1 - self.loss) ** 2

    def of(self, channel: str) -> Reports:
        """The same with another channel."""
        return replace(self, channel=channel)


class Piggyback:
    """Load that travels with responses: the truth when the bytes left, older or frozen if the scenario
    says so.
    """

    __slots__ = ("_random", "_reports", "_seen")

    def __init__(self, reports: Reports, seed: int) -> None:
        self._reports = reports
        self._random = Random(f"{seed}/piggyback")
        self._seen: dict[str, Load] = {}

    def carried(self, server: str, load: Load) -> Load | None:
        """What the client reads of the server's load, or None if this response does not say."""
        reports = self._reports
        if reports.loss and self._random.random() < reports.loss:
            return None
        if not reports.stale and load.at < reports.frozen_at:
            return load
        seen = self._seen.get(server)
        if seen is None or (load.at - seen.at >= reports.stale and load.at < reports.frozen_at):
            self._seen[server] = seen = load
        return seen
