"""Whom calls ask: the agent beside each endpoint (or the engine itself), where it listens, and how it answered of late.

Who is silent time and again is left alone for longer and longer; names are looked up beside the calls.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import socket
import threading
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from gpuroute.core.asking import EngineState, identity_of
from gpuroute.core.endpoint import engine_of_agent
from gpuroute.core.seal import addressee_of
from gpuroute.core.sources import MOST
from gpuroute.core.trust import wants_second_opinion
from gpuroute.engines.catalog import engine_of
from gpuroute.transports.ask_lines import RELAY, Place

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping

    from gpuroute.core.endpoint import Endpoint
    from gpuroute.core.pool import Pool
    from gpuroute.core.snapshot import Snapshot
    from gpuroute.core.state import EndpointState
    from gpuroute.transports.ask_lines import Address, Origin

    Asked = tuple[EndpointState, "Peer", Place]

log = logging.getLogger("gpuroute")

SILENT_AFTER = 5  # asks in a row without an answer; then it is left alone, for longer each time
MUTE_S, MAX_MUTE_S = 0.5, 30.0
SCHEME = "engine"  # of an engine that is asked itself: its id, its dialect and its URL follow
SOURCES = tuple(f"agent:{state.name}" for state in EngineState)
ENGINE_SOURCES = tuple(f"{SCHEME}:{state.name}" for state in EngineState)
ROUGH = frozenset({"vllm"})  # whose load endpoint says one number: who waits is not told from who runs
COVERED = 0.95  # a pool with fewer agents is worth a word in the log
MAX_PEERS = 20_000
MAX_POOLS = 4_000
RESOLVE_S = 60.0


class Peer:
    """The agent of one endpoint, as this process knows it. `place`: None while that is not known."""

    __slots__ = (
        "agent", "backs_up", "endpoint", "identity", "misses", "muted_until", "place", "resolve_at", "second", "sources",
    )  # fmt: skip

    def __init__(self, endpoint: Endpoint, agent: str, *, backs_up: bool = False) -> None:
        self.endpoint = endpoint
        self.agent = agent
        self.backs_up = backs_up  # an engine that is asked beside its agent
        self.second: Peer | None = None  # who backs this one up
        is_engine = agent.startswith(f"{SCHEME}:")
        self.sources = ENGINE_SOURCES if is_engine else SOURCES
        self.identity = identity_of(agent.removeprefix(f"{SCHEME}:") if is_engine else endpoint.id)
        self.place: Place | None = None
        self.resolve_at = 0.0 if agent else math.inf
        self.misses = 0
        self.muted_until = 0.0

    @property
    def is_cheap(self) -> bool:
        """True unless an engine is asked for its metrics, which no call without a doubt is worth."""
        return self.agent.count(" ") < 3

    def answered(self) -> None:
        """It lives."""
        self.misses = 0
        self.muted_until = 0.0

    def missed(self, now: float) -> None:
        """A call waited for it in vain."""
        self.misses += 1
        if self.misses >= SILENT_AFTER:
            self.muted_until = now + min(MAX_MUTE_S, MUTE_S * 2.0 ** (self.misses - SILENT_AFTER))


class Peers:
    """Everybody that one process may ask. `engines`: those without an agent too. `doubts`: engines whose agent is not
    believed, unless they `rest`. Any thread."""

    def __init__(self, *, engines: bool, doubts: bool = False, rests: Callable[[str], bool] = bool) -> None:
        self._engines = engines
        self._doubts = doubts
        self._rests = rests
        self._known: dict[EndpointState, Peer] = {}
        self._pools: dict[int, tuple[Snapshot, bool]] = {}  # by id: two protocols may be two pools of one name

    def covers(self, pool: Pool) -> bool:
        """True if any endpoint of the pool has an agent: else there is nothing to do here."""
        snapshot = pool.snapshot
        known = self._pools.get(id(pool))
        if known is None or known[0] is not snapshot:
            count, size = sum(bool(self._agent(s.endpoint)) for s in snapshot.routable), len(snapshot.routable)
            if count and count < COVERED * size and (known is None or not known[1]):
                log.info("pool %s: %d of %d endpoints have an agent, the others are guessed at", pool.name, count, size)
            if len(self._pools) >= MAX_POOLS:  # of pools that are gone
                self._pools.clear()
            known = self._pools[id(pool)] = (snapshot, count > 0)
        return known[1]

    def place(self, state: EndpointState, now: float) -> Place | None:
        """Where the agent of an endpoint listens, if it has one and that is known."""
        peer = self._known.get(state)
        if peer is None or now >= peer.resolve_at or peer.endpoint is not state.endpoint:
            peer = self._meet(state, peer, now)
        return peer.place

    def answering(
        self, states: Iterable[EndpointState], tried: Container[EndpointState], now: float
    ) -> Mapping[Origin, Asked]:
        """Those of the endpoints that may take a call and whose agents may be asked, by where their bids come from."""
        found: dict[Origin, Asked] = {}
        seconds: list[tuple[EndpointState, Peer]] = []
        known = self._known
        if tried:
            states = [state for state in states if state not in tried]
        for state in states:
            if len(state.in_flight) < state.limit:
                peer = known.get(state)
                if peer is None or now >= peer.resolve_at or peer.endpoint is not state.endpoint:
                    peer = self._meet(state, peer, now)
                place, second = peer.place, peer.second
                if place is not None and peer.muted_until <= now:
                    found[place.origin] = state, peer, place
                    if second is not None and wants_second_opinion(state, now):
                        seconds.append((state, second))
                elif second is not None and (second.is_cheap or wants_second_opinion(state, now)):
                    seconds.append((state, second))
        asked = found if len(found) <= MOST else dict(islice(found.items(), MOST))
        for state, second in seconds[:MOST]:
            place = second.place
            if place is not None and second.muted_until <= now and not self._rests(second.agent):
                asked[place.origin] = state, second, place
        return asked

    def forget(self) -> None:
        """Know nobody: in a forked child, whose threads that look up names are the parent's."""
        self._known = {}

    def all(self) -> list[Peer]:
        """Who was met so far."""
        return list(self._known.values())

    def _meet(self, state: EndpointState, known: Peer | None, now: float) -> Peer:
        """Who answers for an endpoint, from now on; the same as before, if only other things of its record changed."""
        endpoint = state.endpoint
        agent = self._agent(endpoint)
        if known is not None and known.agent == agent:
            peer = known
            peer.endpoint = endpoint
        else:
            if len(self._known) >= MAX_PEERS:  # of endpoints that left long ago; the others are found again at once
                self._known.clear()
            peer = self._known[state] = Peer(endpoint, agent)
            if self._doubts and endpoint.agent and endpoint.engine and (engine := _engine_itself(endpoint, whole=True)):
                peer.second = Peer(endpoint, engine, backs_up=True)
                _resolve(peer.second)
        if now >= peer.resolve_at:
            _resolve(peer)
            peer.resolve_at = now + RESOLVE_S  # not before: another thread would find it without its place
        return peer

    def _agent(self, endpoint: Endpoint) -> str:
        """The address of who answers for an endpoint: its agent, or the engine itself."""
        return endpoint.agent if endpoint.agent or not self._engines else _engine_itself(endpoint)


def _engine_itself(endpoint: Endpoint, *, whole: bool = False) -> str:
    """The address of an engine that can be asked for its load; `whole`: by its metrics too, which are no small page."""
    engine = engine_of(endpoint.engine)
    if endpoint.protocol != "http" or not endpoint.url.startswith("http://") or endpoint.headers:
        return ""
    if whole and engine.metrics and not engine.metrics_port and (not engine.read_load or engine.name in ROUGH):
        return f"{SCHEME}:{endpoint.id} {engine.name} {endpoint.url} {engine.metrics}"
    return f"{SCHEME}:{endpoint.id} {engine.name} {endpoint.url}" if engine.read_load else ""


def _resolve(peer: Peer) -> None:
    """Find the place of `udp://host:port/engine`: at once if the host is a number, else without waiting for it."""
    agent = peer.agent
    if agent.startswith(f"{SCHEME}:"):
        peer.place = _place(peer, RELAY, (SCHEME, agent.removeprefix(f"{SCHEME}:")), 0)
        return
    try:
        parts = urlsplit(agent)
        host, port, engine = parts.hostname, parts.port, engine_of_agent(parts.path)
    except ValueError:  # of a registry of one's own: ours refuses such a record
        return
    if not host or not port:
        return
    if parts.scheme != "udp":
        peer.place = _place(peer, RELAY, (parts.scheme, parts.netloc), engine)
        return
    try:
        ipaddress.ip_address(host)
    except ValueError:
        with suppress(RuntimeError):  # no more threads, or the interpreter is about to end
            threading.Thread(target=_look_up, args=(peer, host, port, engine), daemon=True).start()
    else:
        _look_up(peer, host, port, engine)


def _look_up(peer: Peer, host: str, port: int, engine: int) -> None:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    except (OSError, UnicodeError):  # the latter: no name that could be one
        return  # stays unknown, or as it was, until the next look
    peer.place = _place(peer, found[0], found[4], engine)


def _place(peer: Peer, family: int, address: Address, engine: int) -> Place:
    origin = peer.identity, engine, None if family == RELAY else address
    return Place(family, address, engine, addressee_of(peer.identity), origin)
