"""Ask before sending: the few candidates of this very call say how long their queue is and what they have cached.

`ask` goes to the agents beside at most six candidates, `bid` comes back, the cheapest is picked by the cost of the core,
`take` tells its agent at once, so that the next ask already sees this call, and `tell` says at the first token how it
went. One datagram each (layout: `core.asking`). Whatever is lost, late, forged or garbled is "no report": the endpoint
is compared by this process's own memory, it is never excluded and nothing raises.

A call waits `ask_timeout` at most, or until all have answered, for the last as long again as for the others; late bids
still teach. An agent that is silent time and again is asked more and more rarely. Nothing of this happens, and nothing
is paid for it, where no endpoint of the pool has an agent, where the policy does not compare seconds, or where asks are
off.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import random
import socket
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from gpuroute.core.asking import (
    AskBody,
    EngineState,
    Garbled,
    TakeBody,
    TellBody,
    copies,
    encode_ask,
    encode_take,
    encode_tell,
    identity_of,
    read_bid,
)
from gpuroute.core.endpoint import engine_of_agent
from gpuroute.core.learning import learn_bid
from gpuroute.core.locality import learn_round_trip
from gpuroute.core.prefix import seed
from gpuroute.core.report import Report
from gpuroute.core.seconds import Soonest
from gpuroute.core.sources import NEAR_S, prompt_tokens, worth_asking
from gpuroute.engines.catalog import engine_of
from gpuroute.engines.usage import read_usage
from gpuroute.transports.ask_lines import RELAY, Line, LoopLine, Place, ThreadLine

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from gpuroute.config import Settings
    from gpuroute.core.attempt import Attempt
    from gpuroute.core.call import Call
    from gpuroute.core.endpoint import Endpoint
    from gpuroute.core.pool import Pool
    from gpuroute.core.snapshot import Snapshot
    from gpuroute.core.state import EndpointState
    from gpuroute.router import Router
    from gpuroute.transports.ask_engines import Engines
    from gpuroute.transports.ask_grpc import Channels
    from gpuroute.transports.ask_lines import Address

    Asked = tuple[EndpointState, "Peer"]

log = logging.getLogger("gpuroute")

MOST = 6
"""Asks of one call: 4-6 are the knee, more gain nothing (docs/asking.md)."""

SILENT_AFTER = 5  # asks in a row without an answer; then it is left alone, for longer each time
MUTE_S, MAX_MUTE_S = 0.5, 30.0
NOT_READY_TOKENS = 1_000_000  # what an engine that takes no calls is charged: dearer than any queue, but not excluded
AGAIN_S = 0.001
MOST_AGAIN = 2
MOST_SLOWER = 4.0  # one round trip counts for at most so many usual ones
RARE = 0.002  # where fewer asks are lost of late, nobody is asked again: a short timer costs as much as a datagram
SCHEME = "engine"  # of an engine that is asked itself: its id, its dialect and its URL follow
SOURCES = tuple(f"agent:{state.name}" for state in EngineState)
ENGINE_SOURCES = tuple(f"{SCHEME}:{state.name}" for state in EngineState)
COVERED = 0.95  # a pool with fewer agents is worth a word in the log
MAX_PEERS = 20_000
MAX_POOLS = 4_000
RESOLVE_S = 60.0


class Counts:
    """What happened to asks, for people. Single stores of ints; close enough under threads."""

    __slots__ = ("again", "answers", "asks", "calls", "garbled", "late", "strangers", "timeouts")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Start again from zero."""
        self.again = self.calls = self.asks = self.answers = self.late = self.timeouts = self.garbled = self.strangers = 0

    def as_dict(self) -> dict[str, int]:
        """All counts by name."""
        return {name: getattr(self, name) for name in self.__slots__}


class Peer:
    """The agent of one endpoint, as this process knows it."""

    __slots__ = ("agent", "endpoint", "epoch", "identity", "misses", "muted_until", "place", "resolve_at", "sources")

    def __init__(self, endpoint: Endpoint, agent: str) -> None:
        self.endpoint = endpoint
        self.agent = agent
        self.sources = ENGINE_SOURCES if agent.startswith(f"{SCHEME}:") else SOURCES
        self.identity = identity_of(endpoint.id)
        self.place: Place | None = None
        self.resolve_at = 0.0 if agent else math.inf
        self.misses = 0
        self.muted_until = 0.0
        self.epoch = 0

    @property
    def may_lose(self) -> bool:
        """True if messages to it can get lost."""
        return self.place is not None and self.place.family != RELAY

    def answered(self) -> None:
        """It lives."""
        self.misses = 0
        self.muted_until = 0.0

    def missed(self, now: float) -> None:
        """A call waited for it in vain."""
        self.misses += 1
        if self.misses >= SILENT_AFTER:
            self.muted_until = now + min(MAX_MUTE_S, MUTE_S * 2.0 ** (self.misses - SILENT_AFTER))


class Asker:
    """The asks of one router. Safe from any thread and any loop; opens nothing before the first ask."""

    def __init__(self, settings: Settings, clock: Callable[[], float]) -> None:
        self.timeout = settings.ask_timeout
        self.clock = clock
        self.secret = settings.agent_key.reveal().encode() if settings.agent_key else b""
        self.counts = Counts()
        self.round_trip = NEAR_S / 2
        self.loss = 5 * RARE  # until some 30 calls have shown that it is less
        self._always = settings.asks == "on"
        self._hashes = settings.ask_hashes
        self._forbids = not settings.ask_hashes and settings.source("ask_hashes") != "default"
        self._tenant = seed(f"tenant/{settings.tenant}") if settings.tenant else 0
        self._pools: dict[int, tuple[Snapshot, bool]] = {}  # by id: two protocols may be two pools of one name
        self._files = settings.agent_ca, settings.agent_cert, settings.agent_cert_key
        self._channels: Channels | None = None
        self._engines = settings.asks == "engines"
        self._asked_engines: Engines | None = None
        self._arrange()

    def _arrange(self) -> None:
        """What a process needs of its own: also run in a forked child."""
        self._peers: dict[EndpointState, Peer] = {}
        self._lines: deque[ThreadLine] = deque()
        self._loops: dict[asyncio.AbstractEventLoop, LoopLine] = {}

    def after_fork(self) -> None:
        """Sockets of the parent are not the child's."""
        for line in self._loops.values():
            line.sockets = {}  # of the parent's loop, whose selector must not hear of it
        if self._channels is not None:
            self._channels.abandon()
        self._asked_engines = None
        self._arrange()

    @property
    def patience(self) -> float:
        """Seconds without an answer after which an ask is sent again, where messages get lost at all: never so early that
        answers are on their way, nor so late that none can come in time."""
        return min(max(AGAIN_S, 3 * self.round_trip), self.timeout / 2)

    # ------------------------------------------------------------------------------------------ for drivers

    def ask(self, call: Call) -> Asking | None:
        """Ask, and wait (blocking) for answers: `call.ask.bids` has them. None if this call is not asked for."""
        asked = self.worth_asking(call)
        if not asked:
            return None
        line = self._thread_line()
        try:
            asking = Asking(self, call, asked, line)
            asking.send()
            line.wait(asking)
        finally:
            self.give_back(line)
        asking.conclude()
        return asking

    async def ask_async(self, call: Call) -> Asking | None:
        """Like `ask`, without blocking the event loop."""
        asked = self.worth_asking(call)
        if not asked:
            return None
        line = self._line()
        asking = Asking(self, call, asked, line)
        asking.send()
        await line.wait(asking)
        asking.conclude()
        return asking

    # ------------------------------------------------------------------------------------------ whom, and whether

    def worth_asking(self, call: Call) -> Sequence[Asked]:
        """The candidates to ask for this call; none if asking would not pay."""
        picker = call.pool.snapshot.picker
        if not isinstance(picker, Soonest):
            return ()
        candidates = picker.candidates(call.ask)
        if len(candidates) < 2:
            return ()
        now, tried = self.clock(), call.tried if call.history else ()
        asked = []
        for state in candidates:
            if len(state.in_flight) < state.limit and state not in tried:
                peer = self.peer(state, now)
                if peer is not None and peer.muted_until <= now:
                    asked.append((state, peer))
        if not asked or not (self._always or worth_asking(call.ask, [state for state, _ in asked], self.round_trip)):
            return ()
        return asked[:MOST]

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

    def peer(self, state: EndpointState, now: float) -> Peer | None:
        """The agent of an endpoint, if it has one whose address is known."""
        peer = self._peers.get(state)
        if peer is None or peer.endpoint is not state.endpoint:
            peer = self._meet(state, peer)
        if now >= peer.resolve_at:
            peer.resolve_at = now + RESOLVE_S
            _resolve(peer)
        return peer if peer.place is not None else None

    def _meet(self, state: EndpointState, known: Peer | None) -> Peer:
        """Who answers for an endpoint, from now on; the same as before, if only other things of its record changed."""
        endpoint = state.endpoint
        agent = self._agent(endpoint)
        if known is not None and known.agent == agent:
            known.endpoint = endpoint
            return known
        if len(self._peers) >= MAX_PEERS:  # of endpoints that left long ago; the others are found again at once
            self._peers.clear()
        peer = self._peers[state] = Peer(endpoint, agent)
        return peer

    def _agent(self, endpoint: Endpoint) -> str:
        """The address of who answers for an endpoint: its agent, or the engine itself."""
        if endpoint.agent or not self._engines:
            return endpoint.agent
        engine = engine_of(endpoint.engine)
        plain = endpoint.protocol == "http" and endpoint.url.startswith("http://") and not endpoint.headers
        return f"{SCHEME}:{endpoint.id} {engine.name} {endpoint.url}" if plain and engine.read_load else ""

    def hashes(self, call: Call) -> tuple[int, ...]:
        """The hashes of the call's prompt that its agents may see: none unless the pool or this process opts in, and
        none if either says no."""
        ladder = call.ask.ladder
        if not ladder or self._forbids:
            return ()
        stated = call.pool.spec.config.options.get("ask_hashes")
        if not (stated if isinstance(stated, bool) else self._hashes):
            return ()
        tenant = self._tenant
        return tuple(rung ^ tenant for rung in ladder)

    def give_back(self, line: ThreadLine) -> None:
        """Nobody waits on this line any more."""
        self._lines.append(line)

    def _thread_line(self) -> ThreadLine:
        try:
            return self._lines.pop()
        except IndexError:
            return ThreadLine(self._say)

    def _line(self) -> LoopLine:
        from asyncio import get_running_loop  # threads alone need none of it

        loop = get_running_loop()
        line = self._loops.get(loop)
        if line is None:
            for ended in [known for known in tuple(self._loops) if known.is_closed()]:
                self._loops.pop(ended).close()
            line = self._loops[loop] = LoopLine(loop, self._say)
        return line

    def _say(self, data: bytes, scheme: str, target: str, timeout: float, deliver: Callable[[bytes], None]) -> None:
        """Send a message that is no datagram."""
        if scheme == SCHEME:
            with _lock:
                if self._asked_engines is None:
                    from gpuroute.transports.ask_engines import Engines

                    self._asked_engines = Engines(self.secret)
            self._asked_engines.say(data, target, deliver)
            return
        with _lock:
            if self._channels is None:
                from gpuroute.transports.ask_grpc import Channels

                self._channels = Channels(*self._files)
        self._channels.say(data, scheme, target, timeout, deliver)


class Asking:
    """The asks of one call, and the take and tell that follow. Owned by the call's task or thread."""

    __slots__ = (
        "_again_at",
        "_asked",
        "_asked_again",
        "_asker",
        "_call",
        "_line",
        "_look_at",
        "_open",
        "_real_queue",
        "_rounds",
        "_unread",
        "_until",
        "_waits",
        "bids",
        "id",
        "started",
    )

    def __init__(self, asker: Asker, call: Call, asked: Sequence[Asked], line: Line) -> None:
        self.id = random.getrandbits(64)
        self.started = started = time.monotonic()
        self.bids: dict[str, Report] = {}
        self._asker = asker
        self._call = call
        self._line = line
        self._asked = {one[1].identity: one for one in asked}
        self._waits = True
        self._unread: list[tuple[bytes, Address, float]] = []
        self._until = started + asker.timeout
        patience, rare = asker.patience, asker.loss < RARE
        self._again_at = math.inf if rare else started + patience
        self._look_at = min(self._until, started + (3 * patience if rare else patience))
        self._rounds = 0
        self._asked_again = 0
        self._open: set[Attempt] = set()
        self._real_queue: dict[str, float] = {}

    def send(self) -> None:
        """Send the asks."""
        self._line.listen(self)
        self._send([peer for _, peer in self._asked.values()])
        counts = self._asker.counts
        counts.calls += 1
        counts.asks += len(self._asked)

    def _send(self, peers: Sequence[Peer]) -> None:
        asker, call, line = self._asker, self._call, self._line
        body = AskBody(call.ask.tokens, asker.hashes(call))
        messages: dict[int, bytes] = {}
        for peer in peers:
            place = peer.place
            assert place is not None
            message = messages.get(place.engine)
            if message is None:
                message = encode_ask(body, self.id, _now_ms(), place.engine, 0, asker.secret)
                messages[place.engine] = message
            line.send(message, place)

    # ------------------------------------------------------------------------------------------ bids

    @property
    def missing(self) -> int:
        """How many have not answered."""
        return len(self._asked) - len(self.bids)

    def step(self, now: float) -> float:
        """Seconds to wait on, 0.0 when the wait is over; asks again who is overdue.

        The last of the answers is waited for as long again as the others took, or until it can have answered when asked
        again. It may be lost; but without it the pick is worse (0.66 against 0.55 s mean TTFT live, when all but one were
        enough), so it is not given up at once.
        """
        if now < self._look_at and len(self.bids) + len(self._unread) < len(self._asked):
            return self._look_at - now
        latest = self._unread[-1][2] if self._unread else now
        self._read()
        missing, patience = self.missing, self._asker.patience
        if not missing:
            return 0.0
        if missing == 1 and self.bids:
            self._until = min(self._until, self.started + max(2 * (latest - self.started), 2 * patience))
        if now >= self._until:
            return 0.0
        if now >= self._again_at:
            self._rounds += 1
            self._again_at = now + patience if self._rounds < MOST_AGAIN else math.inf
            silent = [peer for state, peer in self._asked.values() if state.id not in self.bids and peer.may_lose]
            self._asked_again += len(silent)
            for _ in range(copies(self._asker.loss)):
                self._send(silent)
        return min(self._until, self._again_at) - now

    def heard(self, data: bytes, source: Address, now: float) -> bool:
        """A bid, perhaps. True if it is time to `step`: those that came one by one are read in a row, which takes a third
        of the time because a thread that was just woken up is slow."""
        unread = self._unread
        unread.append((data, source, now))
        if not self._waits:
            self._read()
        return len(self.bids) + len(unread) >= len(self._asked) or now >= self._look_at

    def _read(self) -> None:
        """Understand what has arrived."""
        asker, counts, secret, started = self._asker, self._asker.counts, self._asker.secret, self.started
        unread, self._unread = self._unread, []
        at, far, mean = asker.clock(), self._call.pool.shared.locality, self._call.pool.mean_tokens
        for data, source, now in unread:
            try:
                engine, queue, running, waiting, kv_usage, condition, matched, identity, epoch = read_bid(data, secret)
            except Garbled:
                counts.garbled += 1
                continue
            asked = self._asked.get(identity)
            if asked is None or not _is_from(asked[1].place, source, engine):
                counts.strangers += 1
                continue
            state, peer = asked
            if peer.misses:
                peer.answered()
            peer.epoch = epoch
            counts.answers += 1
            counts.late += not self._waits
            # A few that are very late say little of the others: most of a whole second would end all asking again.
            asker.round_trip += 0.05 * (min(now - started, MOST_SLOWER * asker.round_trip) - asker.round_trip)
            if far:
                learn_round_trip(state, now - started)
            ready = condition is EngineState.READY
            if not ready:
                self._real_queue[state.id] = queue
                queue += NOT_READY_TOKENS
            report = Report(at, running, waiting, queue, kv_usage, matched, epoch, peer.sources[condition])
            self.bids[state.id] = report
            if ready:
                learn_bid(state, report, mean)

    def conclude(self) -> None:
        """The wait is over: what was answered counts for the next pick."""
        if self._unread:
            self._read()
        self._waits = False
        self._call.ask.bids = self.bids
        asker, lost = self._asker, self._asked_again
        if self.missing and not lost:
            lost = sum(peer.may_lose for state, peer in self._asked.values() if state.id not in self.bids)
        asker.loss += 0.05 * (min(1.0, lost / len(self._asked)) - asker.loss)
        asker.counts.again += self._asked_again
        if self.missing > 1 or not self.bids or (self.missing and self._asked_again):
            now = asker.clock()
            asker.counts.timeouts += 1
            for state, peer in self._asked.values():
                if state.id not in self.bids:
                    peer.missed(now)

    # ------------------------------------------------------------------------------------------ take and tell

    def take(self, attempt: Attempt) -> None:
        """Tell the agent of the endpoint that was picked, asked or not, that the call comes."""
        asker = self._asker
        if self._real_queue:  # the charge for not being ready is no queue to learn from
            attempt.queued = self._real_queue.get(attempt.state.id, attempt.queued)
        place = self._place(attempt)
        if place is not None:
            self._open.add(attempt)
            body = TakeBody(attempt.uncached, prompt_tokens(self._call.ask))
            self._say(encode_take(body, self.id, _now_ms(), place.engine, 0, asker.secret), place)

    def began(self, attempt: Attempt, content_type: bytes, first: bytes | None) -> None:
        """The first bytes of the answer are here. Only those of an event stream are a first token; a whole body ends with
        its usage instead."""
        streams = content_type.startswith(b"text/event-stream")
        ttft = attempt.first - attempt.started if streams and attempt.first is not None else 0.0
        usage = read_usage(first) if first else None
        self.tell(attempt, ttft, usage.cached if usage is not None else None)

    def tell(self, attempt: Attempt, ttft: float = 0.0, cached: int | None = None) -> None:
        """Tell its agent that the first token came after `ttft` seconds; 0: it ended without one, or that is not known.

        Only the first of the tells of an attempt is sent.
        """
        if attempt not in self._open:
            return
        self._open.discard(attempt)
        place = self._place(attempt)
        if place is not None:
            body = TellBody(int(ttft * 1e6), cached)
            self._say(encode_tell(body, self.id, _now_ms(), place.engine, 0, self._asker.secret), place)

    def _say(self, data: bytes, place: Place) -> None:
        """Send what nobody answers: more than once, where messages get lost. Agents take no message twice."""
        for _ in range(copies(self._asker.loss)):
            self._line.send(data, place)

    def _place(self, attempt: Attempt) -> Place | None:
        peer = self._asker.peer(attempt.state, self._asker.clock())
        return None if peer is None else peer.place


_ASKERS: weakref.WeakKeyDictionary[Router, Asker] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def asker_of(router: Router) -> Asker | None:
    """The one asker of a router, None if asks are off."""
    if router.settings.asks == "off":
        return None
    with _lock:
        asker = _ASKERS.get(router)
        if asker is None:
            asker = _ASKERS[router] = Asker(router.settings, router.clock)
            router.on_fork(asker.after_fork)
        return asker


def _now_ms() -> int:
    return int(time.time() * 1000)


def _resolve(peer: Peer) -> None:
    """Find the place of `udp://host:port/engine`: at once if the host is a number, else without waiting for it."""
    agent = peer.agent
    if agent.startswith(f"{SCHEME}:"):
        peer.place = Place(RELAY, (SCHEME, agent.removeprefix(f"{SCHEME}:")), 0)
        return
    parts = urlsplit(agent)
    if not parts.hostname or not parts.port:
        return
    host, port, engine = parts.hostname, parts.port, engine_of_agent(parts.path)
    if parts.scheme != "udp":
        peer.place = Place(RELAY, (parts.scheme, parts.netloc), engine)
        return
    try:
        ipaddress.ip_address(host)
    except ValueError:
        threading.Thread(target=_look_up, args=(peer, host, port, engine), daemon=True).start()
    else:
        _look_up(peer, host, port, engine)


def _look_up(peer: Peer, host: str, port: int, engine: int) -> None:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    except (OSError, UnicodeError):  # the latter: no name that could be one
        return  # stays unknown, or as it was, until the next look
    peer.place = Place(found[0], found[4], engine)


def _is_from(place: Place | None, source: Address, engine: int) -> bool:
    """True if a bid came from where it was asked for. What came by gRPC was called for, and has no source."""
    return place is not None and engine == place.engine and (place.family == RELAY or source == place.address)
