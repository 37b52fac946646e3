"""What all routers of the field have in common: where calls go, and how they are tried again."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, ClassVar

from gpuroute.core.outcome import Outcome
from gpuroute.sim.gpu import Gpu

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from gpuroute.sim.fleet import Load, Server
    from gpuroute.sim.loop import Flight, Simulation

ATTEMPTS = 3


class Peer:
    """A router of the field. Subclasses say `pick`; failed calls go to another server, three attempts
    in all.
    """

    central: ClassVar[bool] = False

    def __init__(self, sim: Simulation, random: Random) -> None:
        self.sim = sim
        self.random = random
        self.live: list[int] = []
        self.in_flight = [0] * len(sim.servers)
        self.fleet_changed(sim.start_view(), 0.0)
        self.set_up()

    def set_up(self) -> None:
        """What the subclass needs."""

    def pick(self, flight: Flight, now: float) -> int:
        """The server for this call."""
        raise NotImplementedError

    def sent(self, index: int, flight: Flight, now: float) -> None:
        """The call is on its way to the server."""

    def started(self, index: int, flight: Flight, now: float, load: Load) -> None:
        """Its first token came."""

    def ended(self, index: int, flight: Flight, now: float, load: Load | None) -> None:
        """It is over; `load` is None if it failed."""

    def arrive(self, flight: Flight, now: float) -> None:
        if not self.live:
            self.sim.give_up(flight)
            return
        index = self.pick(flight, now)
        flight.extra = index
        self.in_flight[index] += 1
        self.sent(index, flight, now)
        self.sim.send(flight, index)

    def first(self, flight: Flight, now: float, load: Load) -> None:
        self.started(index_of(flight), flight, now, load)

    def done(self, flight: Flight, now: float, load: Load) -> None:
        self._over(flight, now, load)

    def error(self, flight: Flight, outcome: Outcome, now: float, retry_after: float | None) -> None:  # noqa: ARG002
        self._over(flight, now, None)
        if flight.attempts < ATTEMPTS and outcome is not Outcome.REJECTED and flight.first_at == inf:
            self.sim.at(now, self._again, flight)
        else:
            self.sim.give_up(flight)

    def fleet_changed(self, states: Sequence[str | None], now: float) -> None:  # noqa: ARG002
        self.live = [index for index, state in enumerate(states) if state == "ready"]

    def _again(self, flight: Flight) -> None:
        if flight.live:
            self.arrive(flight, self.sim.now)

    def _over(self, flight: Flight, now: float, load: Load | None) -> None:
        index = index_of(flight)
        self.in_flight[index] -= 1
        self.ended(index, flight, now, load)

    def two(self) -> tuple[int, int]:
        """Two servers at random, distinct if there are two."""
        live, size = self.live, len(self.live)
        a = int(self.random.random() * size)
        b = int(self.random.random() * max(1, size - 1))
        return live[a], live[(b + (b >= a)) % size]


def index_of(flight: Flight) -> int:
    index = flight.extra
    assert isinstance(index, int)
    return index


def prefill_rate(server: Server) -> float:
    gpu = server.gpu
    return gpu.spec.prefill_rate if isinstance(gpu, Gpu) else 1 / gpu.spec.per_token


def cache_blocks(server: Server) -> int:
    gpu = server.gpu
    return (gpu.kv.capacity + gpu.kv.dram_tokens) // gpu.kv.block if isinstance(gpu, Gpu) else 0
