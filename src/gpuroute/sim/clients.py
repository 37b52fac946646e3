"""Simulated processes that run the real core: one `Pool` and one random stream each, driven under virtual
time.

Five hundred clients of a thousand endpoints are half a million endpoint states, about 0.6 KiB each:
affordable, so each client has exactly what a real process has. Only the ring is shared, because it is
immutable and every client would compute the same one.
"""

from __future__ import annotations

from math import inf
from random import Random
from struct import pack
from typing import TYPE_CHECKING, Final, NamedTuple

from xxhash import xxh3_64_intdigest

from gpuroute.core.call import Call
from gpuroute.core.candidates import Ask
from gpuroute.core.fleet import PoolSpec
from gpuroute.core.hedge import HedgeRules
from gpuroute.core.learning import learn_bid
from gpuroute.core.outcome import Outcome
from gpuroute.core.pool import Pool, PoolRules
from gpuroute.core.prefix import BLOCK_TOKENS, DEPTHS
from gpuroute.core.report import CARRIED, Report
from gpuroute.core.seconds import Soonest
from gpuroute.core.sources import copies, worth_asking
from gpuroute.core.subset import subset
from gpuroute.core.trust import second_opinion, wants_second_opinion
from gpuroute.core.watchdog import WatchdogRules
from gpuroute.errors import DeadlineExceeded, NoEndpointAvailable

from .agents import Agents
from .digest import Digest
from .reports import Piggyback, Reports
from .silence import Silence

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from gpuroute.core.attempt import Attempt
    from gpuroute.core.ring import Ring
    from gpuroute.core.state import EndpointState

    from .fleet import Load, Server
    from .loop import Flight, Simulation
    from .traces import Request

TRACE_BLOCK: Final = 512
POOL: Final = "pool"
MOST_AGAIN: Final = 2  # an ask without an answer is sent again within the patience, as in transports.asking


def ladder_of(request: Request) -> tuple[int, ...]:
    """The hashes that the production code would compute from the prompt's text, made from the trace's
    block ids.
    """
    blocks = request.blocks
    if not blocks:
        return ()
    rungs = []
    for depth in DEPTHS:
        index = (depth * BLOCK_TOKENS - 1) // TRACE_BLOCK
        if index >= len(blocks) or depth * BLOCK_TOKENS > request.prompt_tokens:
            break
        rungs.append(xxh3_64_intdigest(pack("<qq", blocks[index], depth)))
    return tuple(rungs)


def session_of(request: Request) -> int | None:
    """The ring position of the request's conversation."""
    return None if request.session is None else xxh3_64_intdigest(pack("<q", request.session))


def index_of(state: EndpointState) -> int:
    """The number in an id like `gpu-7`."""
    return int(state.id[4:])


class CoreClient:
    """One process with the real core in it."""

    def __init__(
        self,
        sim: Simulation,
        pool: Pool,
        *,
        by_session: bool,
        reports: Reports,
        agents: Agents | None,
        piggyback: Piggyback | None,
        members: Members | None = None,
        digest: Digest | None = None,
        watchdog: bool = False,
    ) -> None:
        self.pool = pool
        self._members = members
        self._sim = sim
        self._by_session = by_session
        self._reports = reports
        self._agents = agents
        self._piggyback = piggyback
        self._digest = digest
        self._silence = Silence(sim, self._attempt) if watchdog else None
        self._warm: set[int] | None = set() if sim.network.handshake else None

    def arrive(self, flight: Flight, now: float) -> None:
        request, pool = flight.request, self.pool
        if self._digest is not None:
            self._digest.read(pool, now)
        ladder = ladder_of(request) if pool.wants_ladder else ()
        key = session_of(request) if self._by_session else None
        ask = Ask(key, ladder, request.prompt_tokens)
        flight.call = Call(pool, now, ask=ask)
        picker = pool.snapshot.picker
        if self._agents is None or not isinstance(picker, Soonest):
            self._attempt(flight)
            return
        ask.now = now
        asked = [state for state in picker.candidates(ask) if state.endpoint.agent]
        if not asked or not worth_asking(ask, asked, 2 * self._reports.delay):
            self._attempt(flight)
            return
        self._sim.at(now + self._reports.delay, self._asked, (flight, asked))

    def first(self, flight: Flight, now: float, load: Load) -> None:
        attempt: Attempt = flight.extra  # type: ignore[assignment]
        attempt.first_token(now)
        if self._silence is not None:
            self._silence.streams(flight, attempt)
        self._read(attempt.state, load)
        if self._agents is not None:
            message = (index_of(attempt.state), flight.number, now - attempt.started)
            self._sim.at(now + self._reports.delay, self._agents.tell, message)

    def _read(self, state: EndpointState, load: Load) -> None:
        """A load report that came with a response (piggyback)."""
        said = None if self._piggyback is None else self._piggyback.carried(state.id, load)
        if said is not None:
            report = Report(said.at, said.running, said.waiting, kv_usage=said.kv, source=CARRIED)
            learn_bid(state, report, self.pool.mean_tokens)

    def _asked(self, what: tuple[Flight, Sequence[EndpointState]]) -> None:
        """The asks are there; the answers come back together, or the client stops waiting for the
        missing ones.
        """
        flight, asked = what
        sim, agents, reports = self._sim, self._agents, self._reports
        assert agents is not None
        ask = flight.call.ask  # type: ignore[attr-defined]
        bids: dict[str, Report] = {}
        opinions: dict[str, Report] = {}
        for state in asked if reports.second_opinions else ():
            if wants_second_opinion(state, sim.now) and (counts := agents.engine(index_of(state))) is not None:
                opinions[state.id] = counts
        asks = 1 + MOST_AGAIN * copies(reports.unanswered)
        for state in asked:
            for _ in range(asks):
                bid = None if agents.lost() else agents.bid(index_of(state), flight.number, ask.tokens, ask.ladder)
                if bid is not None and not agents.lost():
                    bids[state.id] = bid
                if state.id in bids or not reports.loss:
                    break
        late = len(bids) < len(asked)
        wait = max(reports.delay, reports.patience - reports.delay) if late else reports.delay
        sim.at(sim.now + wait, self._bidden, (flight, bids, opinions))

    def _bidden(self, what: tuple[Flight, dict[str, Report], dict[str, Report]]) -> None:
        flight, bids, opinions = what
        pool = self.pool
        flight.call.ask.bids = bids  # type: ignore[attr-defined]
        for id_, bid in bids.items():
            state = pool.snapshot.by_id.get(id_)
            if state is not None:
                learn_bid(state, bid, pool.mean_tokens)
        for id_, counts in opinions.items():
            state = pool.snapshot.by_id.get(id_)
            if state is not None:
                bids[id_] = second_opinion(state, bids.get(id_), counts, self._sim.now)
        self._attempt(flight)

    def done(self, flight: Flight, now: float, load: Load) -> None:
        self._read(flight.extra.state, load)  # type: ignore[attr-defined]
        call: Call = flight.call  # type: ignore[assignment]
        if self._silence is not None:
            self._silence.over(flight)
        call.finish(flight.extra, Outcome.SUCCESS, now)  # type: ignore[arg-type]

    def error(self, flight: Flight, outcome: Outcome, now: float, retry_after: float | None) -> None:
        call: Call = flight.call  # type: ignore[assignment]
        attempt: Attempt = flight.extra  # type: ignore[assignment]
        if flight.reached:
            attempt.sent(now)
        if call.finish(attempt, outcome, now, retry_after=retry_after, answered=retry_after is not None):
            self._sim.at(now + call.delay(now), self._attempt, flight)
        else:
            self._sim.give_up(flight)

    def fleet_changed(self, states: Sequence[str | None], now: float) -> None:
        spec = spec_of(
            self._sim.servers,
            states,
            asks=self._agents is not None or self._digest is not None,
            without=self._agents.silent if self._agents else (),
        )
        self.pool.update(narrowed(spec, self._members), self.pool.rules, now)

    def _attempt(self, flight: Flight) -> None:
        sim, call = self._sim, flight.call
        assert isinstance(call, Call)
        if not flight.live:
            call.close(sim.now)
            return
        if (pause := call.delay(sim.now)) > 0:
            sim.at(sim.now + pause, self._attempt, flight)
            return
        try:
            attempt = call.next_attempt(sim.now)
        except (NoEndpointAvailable, DeadlineExceeded):
            sim.give_up(flight)
            return
        index = index_of(attempt.state)
        if self._agents is not None:
            message = (index, flight.number, attempt.uncached, attempt.tokens)
            sim.at(sim.now + self._reports.delay, self._agents.take, message)
        self._send(flight, attempt)

    def _send(self, flight: Flight, attempt: Attempt) -> None:
        sim, call, index = self._sim, flight.call, index_of(attempt.state)
        assert isinstance(call, Call)
        flight.extra = attempt
        sim.send(flight, index, cold=self._is_cold(index))
        if self._silence is not None:
            self._silence.sent(flight, attempt)
        if (due := call.hedge_after(attempt)) < inf:
            sim.at(sim.now + due, self._overdue, (flight, attempt))

    def _overdue(self, what: tuple[Flight, Attempt]) -> None:
        """No first token yet: the call leaves that queue for another, if the budget allows."""
        flight, attempt = what
        sim, call = self._sim, flight.call
        assert isinstance(call, Call)
        if not flight.live or attempt.first is not None or attempt.outcome is not None:
            return
        other = call.hedge(sim.now)
        if other is None:
            return
        sim.abandon(flight)
        attempt.finish(Outcome.CANCELLED, sim.now)
        self._send(flight, other)

    def _is_cold(self, index: int) -> bool:
        warm = self._warm
        if warm is None or index in warm:
            return False
        warm.add(index)
        return True


def spec_of(
    servers: Sequence[Server], states: Sequence[str | None], *, asks: bool = False, without: Container[int] = ()
) -> PoolSpec:
    """The pool as the registry lists it; `without`: servers beside which no agent runs."""
    listed = [(server, state) for server, state in zip(servers, states, strict=True) if state is not None]
    agent = "udp://127.0.0.1:7711" if asks else ""
    return PoolSpec(POOL, tuple(s.endpoint(state, "" if s.index in without else agent) for s, state in listed))


class Members(NamedTuple):
    """A client that talks to some endpoints only: its ordinal, and how many."""

    ordinal: int
    size: int


def narrowed(spec: PoolSpec, members: Members | None) -> PoolSpec:
    """What one client sees of the pool."""
    if members is None:
        return spec
    chosen = set(subset([endpoint.id for endpoint in spec.endpoints], *members))
    return PoolSpec(spec.name, tuple(endpoint for endpoint in spec.endpoints if endpoint.id in chosen))


def core_clients(
    sim: Simulation,
    count: int,
    policy: str,
    seed: int,
    *,
    reports: Reports | None = None,
    reroute: bool = True,
    size: int = 0,
    watchdog: bool = False,
) -> list[CoreClient]:
    """`count` processes with that policy, each with a subset of `size` endpoints (0: all). Raises ConfigError.

    `watchdog`: as in production; off it costs no events, and only a hang shows the difference.
    """
    reports = reports or Reports()
    asks = reports.channel in {"engine", "agent"}
    agents = Agents(sim, reports) if asks else None
    listed = asks or reports.channel == "digest"
    spec = spec_of(sim.servers, sim.start_view(), asks=listed, without=agents.silent if agents else ())
    hedge = HedgeRules(reroute=reroute and policy == "auto")
    rules = PoolRules(policy=policy, hedge=hedge, watchdog=WatchdogRules(enabled=watchdog))
    by_session = policy == "session"
    piggyback = Piggyback(reports, seed) if reports.channel == "piggyback" else None
    digest = Digest(sim, Agents(sim, reports)) if reports.channel == "digest" else None
    clients: list[CoreClient] = []
    ring: Ring | None = None
    for number in range(count):
        pool = Pool(PoolSpec(POOL), rules, random=Random(f"{seed}/client/{number}").random)
        members = Members(number, size) if size else None
        pool.snapshot.picker.ring = ring
        pool.update(narrowed(spec, members), rules, 0.0)
        ring = None if size else pool.snapshot.picker.ring
        clients.append(
            CoreClient(
                sim,
                pool,
                by_session=by_session,
                reports=reports,
                agents=agents,
                piggyback=piggyback,
                members=members,
                digest=digest,
                watchdog=watchdog,
            )
        )
    return clients


class Stranger:
    """Everybody who uses the fleet without this router: each call goes to a listed endpoint at random, without a report,
    an ask, or a second attempt."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._random = Random(f"{sim.seed}/strangers")
        self._listed: list[int] = []
        self.fleet_changed(sim.start_view(), 0.0)

    def arrive(self, flight: Flight, now: float) -> None:  # noqa: ARG002
        if self._listed:
            self._sim.send(flight, self._random.choice(self._listed))
        else:
            self._sim.give_up(flight)

    def first(self, flight: Flight, now: float, load: Load) -> None:
        """Nothing is learned."""

    def done(self, flight: Flight, now: float, load: Load) -> None:
        """Nothing is learned."""

    def error(self, flight: Flight, outcome: Outcome, now: float, retry_after: float | None) -> None:  # noqa: ARG002
        self._sim.give_up(flight)

    def fleet_changed(self, states: Sequence[str | None], now: float) -> None:  # noqa: ARG002
        self._listed = [index for index, state in enumerate(states) if state == "ready"]
