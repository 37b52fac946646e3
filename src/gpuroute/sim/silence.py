"""The watchdog of a simulated process: what a driver does when an endpoint says nothing for too long.

Production has it on. Its signs of life are the bytes of streams, and tokens are no events in a simulation: so the bytes
of what is streaming are looked at twice a second (a hung engine sends none), and a first byte is waited for as drivers
wait for it, with the core's patience.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

from .agents import LINGER_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuroute.core.attempt import Attempt
    from gpuroute.core.call import Call

    from .loop import Flight, Simulation

LOOK_S: Final = 0.5
LEAST_S: Final = 0.001  # below the resolution of the clock a wait would be for ever
AGAIN_S: Final = 1.0  # patience grows and shrinks: it is asked for again after that long, as in the drivers


class Silence:
    """Watches the attempts of one client. `again` is called with flights whose call goes on elsewhere."""

    def __init__(self, sim: Simulation, again: Callable[[Flight], None]) -> None:
        self._sim = sim
        self._again = again
        self._streams: dict[Flight, Attempt] = {}
        self._looks = False

    def sent(self, flight: Flight, attempt: Attempt) -> None:
        """An attempt is on the wire."""
        attempt.awaited(self._sim.now)
        self._wait(flight, attempt)

    def streams(self, flight: Flight, attempt: Attempt) -> None:
        """Its first byte is there."""
        self._streams[flight] = attempt
        if not self._looks:
            self._looks = True
            self._sim.at(self._sim.now + LOOK_S, self._look, None)

    def over(self, flight: Flight) -> None:
        """It ended; what its tokens took is the usual gap."""
        attempt = self._streams.pop(flight, None)
        made = 0 if flight.job is None else flight.job.output_tokens - 1
        if attempt is not None and made > 0:
            attempt.state.chunk((self._sim.now - flight.first_at) / made)

    def _wait(self, flight: Flight, attempt: Attempt) -> None:
        call: Call = flight.call  # type: ignore[assignment]
        if self._sim.now > self._sim.meter.end + LINGER_S:
            return
        left = call.patience(attempt) - (self._sim.now - attempt.started)
        self._sim.at(self._sim.now + min(max(left, LEAST_S), AGAIN_S), self._due, (flight, attempt))

    def _due(self, what: tuple[Flight, Attempt]) -> None:
        flight, attempt = what
        call: Call = flight.call  # type: ignore[assignment]
        if not flight.live or attempt.first is not None or attempt.outcome is not None:
            return
        if call.patience(attempt) > self._sim.now - attempt.started:
            self._wait(flight, attempt)
            return
        if flight.reached:
            attempt.sent(self._sim.now)
        self._stop(flight, attempt)

    def _look(self, _: object) -> None:
        """Whoever streams from an engine that works has had bytes."""
        sim, now = self._sim, self._sim.now
        for flight, attempt in tuple(self._streams.items()):
            call: Call = flight.call  # type: ignore[assignment]
            if not flight.live or attempt.outcome is not None:
                del self._streams[flight]
            elif flight.server is not None and not flight.server.gpu.hung:
                attempt.state.alive(now)
                attempt.last = now
            elif now - attempt.last >= call.gap_patience(attempt):
                self._stop(flight, attempt)
        self._looks = bool(self._streams) and now < sim.meter.end + LINGER_S
        if self._looks:
            sim.at(now + LOOK_S, self._look, None)

    def _stop(self, flight: Flight, attempt: Attempt) -> None:
        """Give the attempt up; the call goes elsewhere, or fails if its caller has begun to read."""
        sim, call = self._sim, flight.call
        self._streams.pop(flight, None)
        sim.abandon(flight)
        if call.stalled(attempt, sim.now) and flight.first_at == inf:  # type: ignore[attr-defined]
            sim.at(sim.now + call.delay(sim.now), self._again, flight)  # type: ignore[attr-defined]
        else:
            sim.give_up(flight)
