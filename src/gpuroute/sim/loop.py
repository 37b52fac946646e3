"""The event loop in virtual time: calls arrive, travel, wait in engines and come back; clients decide where
they go.

Everything random comes from streams named after the seed, every tie in time is broken by order of
scheduling, so one seed gives one result. The loop knows nothing of policies: a `Client` is told what a real
process would see (an arrival, the first token, the end, an error) and answers with `send`.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from gpuroute.core.outcome import Outcome

from .job import Job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .fleet import FleetEvent, Load, Server
    from .measure import Meter
    from .traces import Request


@dataclass(frozen=True, slots=True)
class Network:
    """One-way delay in seconds, and how news travel: a registry change takes `registry` seconds."""

    delay: float = 0.0005
    registry: float = 1.0
    handshake: float = 0.0  # first contact of a client with a server


class Flight:
    """One logical call from its arrival at a client to its end."""

    __slots__ = (
        "attempts",
        "born",
        "call",
        "client",
        "extra",
        "first_at",
        "foreign",
        "job",
        "live",
        "number",
        "reached",
        "request",
        "server",
    )

    def __init__(self, request: Request, client: Client, now: float) -> None:
        self.request = request
        self.client = client
        self.born = now
        self.number = 0
        self.first_at = inf
        self.attempts = 0
        self.server: Server | None = None
        self.job: Job | None = None
        self.call: object = None  # whatever the client keeps for it
        self.extra: object = None
        self.live = True
        self.foreign = False  # of somebody who does not use the router: load, but not measured
        self.reached = False  # the attempt under way got to a server that read it


class Client(Protocol):
    """A process that routes calls. Every method is told the virtual time."""

    def arrive(self, flight: Flight, now: float) -> None:
        """A new call: sooner or later `Simulation.send` or `Simulation.give_up`."""

    def first(self, flight: Flight, now: float, load: Load) -> None:
        """Its first token is here; `load` is what the response could carry."""

    def done(self, flight: Flight, now: float, load: Load) -> None:
        """The answer is complete."""

    def error(self, flight: Flight, outcome: Outcome, now: float, retry_after: float | None) -> None:
        """The attempt failed: send again, or give up."""

    def fleet_changed(self, states: Sequence[str | None], now: float) -> None:
        """The registry lists each server as ready, draining, ... or not at all (None)."""


class Simulation:
    """Runs calls through clients and servers. `run` may be called once."""

    def __init__(
        self,
        servers: Sequence[Server],
        requests: Iterator[Request],
        *,
        meter: Meter,
        network: Network | None = None,
        events: Sequence[FleetEvent] = (),
        seed: int = 0,
        timeout: float = inf,
        sticky: bool = False,
        foreign: float = 0.0,
    ) -> None:
        self.servers = servers
        self.network = network or Network()
        self.meter = meter
        self.now = 0.0
        self.timeout = timeout
        self.clients: Sequence[Client] = ()
        self.stranger: Client | None = None
        self._foreign = foreign  # share of calls that are the stranger's
        self._who = Random(f"{seed}/foreign")
        self.seed = seed
        self.over = False  # no more calls will come and none is under way
        self.shared: dict[str, Any] = {}  # what the instances of a peer have in common
        self._requests = requests
        self._sticky = sticky
        self._random = Random(f"{seed}/clients")
        self._trouble = Random(f"{seed}/trouble")
        self._heap: list[tuple[float, int, Callable[..., None], object]] = []
        self._order = 0
        self._flights = 0
        self._alive = 0  # flights under way
        self._listed: list[str | None] = ["ready"] * len(servers)
        self._outage_until = -inf
        for event in events:
            if event.kind == "join":
                self._absent(event)
            self.at(event.at, self._happen, event)

    def at(self, when: float, action: Callable[..., None], what: object) -> None:
        """Call `action(what)` at that virtual time."""
        self._order += 1
        heappush(self._heap, (when, self._order, action, what))

    def run(self) -> None:
        """Until every call has ended (or, with servers hung and no timeout, until nothing can
        happen any more).
        """
        heap, requests = self._heap, self._requests
        upcoming = next(requests, None)
        meter, tick = self.meter, self.meter.next_sample
        while heap or upcoming is not None:
            if upcoming is not None and (not heap or upcoming.at <= heap[0][0]):
                self.now = upcoming.at
                self._start(upcoming)
                upcoming = next(requests, None)
            elif upcoming is None and not self._alive:
                self.over = True
                break
            else:
                self.now, _, action, what = heappop(heap)
                action(what)
            if self.now >= tick:
                tick = meter.sample(self.now, self.servers)

    def send(self, flight: Flight, index: int, *, cold: bool = False) -> None:
        """Put a call on the wire to a server."""
        server = self.servers[index]
        flight.server = server
        flight.reached = False
        flight.attempts += 1
        server.taken += flight.request.prompt_tokens
        self.meter.picked(server, flight)
        wait = self.network.delay + (self.network.handshake if cold else 0.0)
        self.at(self.now + wait, self._deliver, (flight, server))

    def give_up(self, flight: Flight) -> None:
        """No answer for this call: it counts as failed."""
        if flight.live:
            flight.live = False
            self._alive -= 1
            self.meter.failed(flight, self.now)

    def abandon(self, flight: Flight) -> None:
        """Stop the attempt under way (a timeout, a reroute): the server hears of it after the
        network's delay.
        """
        if flight.job is not None and flight.server is not None:
            self.at(self.now + self.network.delay, self._cancel, (flight.job, flight.server))
        flight.job = None
        flight.server = None

    def watch(self, server: Server) -> None:
        """Look at a server again when its engine has something to tell."""
        when = server.gpu.next_at
        if when != server.scheduled:
            server.scheduled = when
            if when < inf:
                self.at(when, self._wake, server)

    def _start(self, request: Request) -> None:
        clients = self.clients
        if self._sticky and request.session is not None:
            index = Random(f"{self.seed}/{request.session}").randrange(len(clients))
        else:
            index = int(self._random.random() * len(clients))
        flight = Flight(request, clients[index], self.now)
        if self.stranger is not None and self._who.random() < self._foreign:
            flight.client, flight.foreign = self.stranger, True
        self._alive += 1
        self._flights += 1
        flight.number = self._flights
        self.meter.arrived(flight)
        if self.timeout < inf:
            self.at(self.now + self.timeout, self._time_out, flight)
        flight.client.arrive(flight, self.now)

    def _deliver(self, sent: tuple[Flight, Server]) -> None:
        flight, server = sent
        request, now = flight.request, self.now
        server.taken -= request.prompt_tokens
        if not flight.live or flight.server is not server:
            return
        flight.reached = server.alive
        if not server.alive or (server.errors and self._trouble.random() < server.errors):
            self._answer_error(flight, server, Outcome.FAILED)
        elif server.limit and server.live >= server.limit:
            self._answer_error(flight, server, Outcome.OVERLOADED)
        else:
            self._submit(flight, server, Job(request.prompt_tokens, request.output_tokens, request.blocks, tag=flight))
        self._settle(server, now)

    def _submit(self, flight: Flight, server: Server, job: Job) -> None:
        if not server.gpu.submit(job, self.now):
            self._answer_error(flight, server, Outcome.REJECTED)
            return
        flight.job = job
        server.live += 1

    def _answer_error(self, flight: Flight, server: Server, outcome: Outcome) -> None:
        self.at(self.now + self.network.delay, self._error_seen, (flight, server, outcome))

    def _wake(self, server: Server) -> None:
        if server.gpu.next_at <= self.now:
            self._settle(server, self.now)

    def _settle(self, server: Server, now: float) -> None:
        for job, event in server.gpu.advance(now):
            flight = job.tag
            if event == "done":
                server.live -= 1
            if isinstance(flight, Flight) and flight.job is job and event != "token":
                self._tell(flight, server, event)
        self.watch(server)

    def _tell(self, flight: Flight, server: Server, event: str) -> None:
        action = self._first_seen if event == "first" else self._done_seen
        self.at(self.now + self.network.delay, action, (flight, flight.job, server.report(self.now)))

    def _first_seen(self, news: tuple[Flight, Job, Load]) -> None:
        flight, job, load = news
        if flight.live and flight.job is job:
            flight.first_at = self.now
            flight.client.first(flight, self.now, load)

    def _done_seen(self, news: tuple[Flight, Job, Load]) -> None:
        flight, job, load = news
        if flight.live and flight.job is job:
            flight.live = False
            self._alive -= 1
            self.meter.succeeded(flight, job, self.now)
            flight.client.done(flight, self.now, load)

    def _error_seen(self, news: tuple[Flight, Server, Outcome]) -> None:
        flight, server, outcome = news
        if not flight.live or flight.server is not server:
            return
        flight.job = flight.server = None
        if flight.first_at < inf:  # the stream broke: no client may repeat what its caller has begun to read
            flight.client.error(flight, outcome, self.now, None)
            self.give_up(flight)
            return
        flight.client.error(flight, outcome, self.now, 1.0 if outcome is Outcome.OVERLOADED else None)

    def _time_out(self, flight: Flight) -> None:
        if flight.live:
            self.abandon(flight)
            if flight.attempts:  # else its candidates are still being asked, and nobody is late
                flight.client.error(flight, Outcome.TIMED_OUT, self.now, None)
            self.give_up(flight)

    def _cancel(self, what: tuple[Job, Server]) -> None:
        job, server = what
        if not job.done:
            server.gpu.cancel(job, self.now)
            server.live -= 1
            self._settle(server, self.now)

    def _absent(self, event: FleetEvent) -> None:
        for index in event.targets(len(self.servers), self.seed):
            self.servers[index].alive = False
            self._listed[index] = None

    def start_view(self) -> Sequence[str | None]:
        """What the registry lists at the start."""
        return tuple(self._listed)

    def _happen(self, event: FleetEvent) -> None:
        if event.kind == "outage":
            self._outage_until = self.now + event.value
            return
        for index in event.targets(len(self.servers), self.seed):
            self._befall(self.servers[index], event)
        if event.kind in {"join", "drain"}:
            self.at(max(self.now + self.network.registry, self._outage_until), self._announce, None)

    def _befall(self, server: Server, event: FleetEvent) -> None:
        gpu = server.gpu
        if event.kind == "die":
            server.alive = False
            for job in gpu.fail(self.now):
                server.live -= 1
                if isinstance(job.tag, Flight) and job.tag.job is job:
                    self._answer_error(job.tag, server, Outcome.FAILED)
        elif event.kind in {"restart", "join"}:
            server.alive = True
            self._listed[server.index] = "ready"
        elif event.kind in {"hang", "recover"}:
            gpu.hung = event.kind == "hang"
        elif event.kind == "throttle":
            gpu.slowdown = 1.0 / (server.speed * (1.0 - event.value))
        elif event.kind == "errors":
            server.errors = event.value
        elif event.kind == "overload":
            server.limit = int(event.value)
        elif event.kind == "drain":
            self._listed[server.index] = "draining"
        gpu.interrupt(self.now)
        self._settle(server, self.now)

    def _announce(self, _: object) -> None:
        for client in (*self.clients, *([] if self.stranger is None else [self.stranger])):
            client.fleet_changed(tuple(self._listed), self.now)
