"""Asks all agents of the fleet for their counts, round after round: over UDP or gRPC, spread out, bounded.

One ask without hashes for each agent and round, a second one if it is silent; answers are believed as a client believes
them: signed, from where was asked, by the engine that was meant.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import secrets
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from gpuroute.agent.server import netloc
from gpuroute.core.asking import (
    GRPC_METHOD,
    AskBody,
    Garbled,
    Kind,
    decode_bid,
    encode_ask,
    identity_of,
    open_message,
)
from gpuroute.core.digest import Entry
from gpuroute.core.endpoint import engine_of_agent
from gpuroute.forms import read_pem, stamps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuroute.agent.digest import Digest
    from gpuroute.core.asking import BidBody
    from gpuroute.core.digest import Key
    from gpuroute.core.fleet import Fleet

log = logging.getLogger("gpuroute.agent")

INTERVAL_S = 0.5
SLICE, PACE_S = 64, 0.01  # so many asks at a time: 6,400 a second
AGAIN_S = 0.1
GRPC_TIMEOUT_S = 0.4
RESOLVE_S = 60.0
RENEWED_S = 60.0
"""How often it is looked at whether the files of certificates were replaced."""
BUFFER = 1 << 20
ANYWHERE = {socket.AF_INET: ("0.0.0.0", 0), socket.AF_INET6: ("::", 0)}
NOTHING = AskBody(0, ())

Address = tuple[Any, ...]


class Target(NamedTuple):
    """One endpoint's agent: its scheme, where that is, and which of its engines is meant."""

    key: Key
    scheme: str
    host: str
    port: int
    engine: int


class Place(NamedTuple):
    """Where a name led, and until when that is believed."""

    family: int
    address: Address
    until: float


class Collector:
    """Keeps a digest up to date. Loop thread, but `adopt`, which any thread may call."""

    def __init__(self, digest: Digest, secret: bytes = b"", files: Sequence[str | None] = (None, None, None)) -> None:
        self.digest = digest
        self.rounds = self.asks = self.garbled = 0
        self.round_s = 0.0
        self.targets: tuple[Target, ...] = ()
        self._stamps: tuple[int, ...] = ()
        self._look_at = 0.0
        self._targets: tuple[Target, ...] = ()  # of the last round
        self.without = 0
        self._secret = secret
        self._files = files
        self._sockets: dict[int, socket.socket] = {}
        self._places: dict[tuple[str, int], Place] = {}
        self._looking: set[tuple[str, int]] = set()
        self._channels: dict[tuple[str, str], Any] = {}
        self._asked: dict[int, Target] = {}
        self._said: dict[Key, Entry] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._all_here = asyncio.Event()

    def adopt(self, fleet: Fleet) -> None:
        """Collect of this fleet from now on. Any thread."""
        found = [target_of((name, e.id), e.agent) for name, pool in fleet.pools.items() for e in pool.endpoints]
        self.targets = tuple(target for target in found if target is not None)
        self.without = len(found) - len(self.targets)

    async def run(self) -> None:
        """Collect until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                began = loop.time()
                await self.round()
                await asyncio.sleep(max(0.01, began + INTERVAL_S - loop.time()))
        finally:
            for sock in self._sockets.values():
                loop.remove_reader(sock)
                sock.close()
            for task in self._tasks:
                task.cancel()
            for channel, _ in self._channels.values():
                await channel.close()

    async def round(self) -> None:
        """One round of asks."""
        targets, as_of = self.targets, time.monotonic()
        start = secrets.randbits(63)
        if targets is not self._targets:
            self._forget_strangers(targets)
            self._targets = targets
        if as_of >= self._look_at:
            self._renew(as_of)
        self._asked = {start + number: target for number, target in enumerate(targets)}
        self._said = {}
        self._all_here.clear()
        for _ in range(2):
            waiting = [(id_, target) for id_, target in self._asked.items() if target.key not in self._said]
            for index in range(0, len(waiting), SLICE):
                for id_, target in waiting[index : index + SLICE]:
                    self._ask(id_, target)
                if index + SLICE < len(waiting):
                    await asyncio.sleep(PACE_S)
            if waiting:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._all_here.wait(), AGAIN_S)
        self.digest.update(self._said, {target.key for target in targets}, as_of)
        self.rounds += 1
        self.round_s = time.monotonic() - as_of

    def _forget_strangers(self, targets: Sequence[Target]) -> None:
        """Connections to agents that have left are closed, and where they were is forgotten: pods come and go."""
        places = {(target.host, target.port) for target in targets}
        for name in [name for name in self._places if name not in places]:
            del self._places[name]
        netlocs = {(target.scheme, netloc(target.host, target.port)) for target in targets} if self._channels else set()
        for known in [known for known in self._channels if known not in netlocs]:
            self._spawn(self._channels.pop(known)[0].close())

    def _renew(self, now: float) -> None:
        """Channels keep the certificates that they were opened with; those that were replaced end before long."""
        self._look_at = now + RENEWED_S
        with suppress(OSError):
            seen = stamps(*self._files)
            if seen != self._stamps:
                self._stamps = seen
                for known in [known for known in self._channels if known[0] == "grpcs"]:
                    self._spawn(self._channels.pop(known)[0].close())

    # ------------------------------------------------------------------------------------------ asking

    def _ask(self, id_: int, target: Target) -> None:
        self.asks += 1
        data = encode_ask(NOTHING, id_, int(time.time() * 1000), target.engine, 0, self._secret)
        if target.scheme != "udp":
            self._spawn(self._say(data, target))
            return
        place = self._place(target)
        if place is not None:
            with suppress(OSError):
                self._socket(place.family).sendto(data, place.address)

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _socket(self, family: int) -> socket.socket:
        sock = self._sockets.get(family)
        if sock is None:
            sock = self._sockets[family] = socket.socket(family, socket.SOCK_DGRAM)
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
            sock.bind(ANYWHERE[socket.AddressFamily(family)])
            asyncio.get_running_loop().add_reader(sock, self._read, sock)
        return sock

    def _place(self, target: Target) -> Place | None:
        """Where a target is, if that is known by now; a name is looked up beside the rounds."""
        name = (target.host, target.port)
        place = self._places.get(name)
        if (place is None or place.until < time.monotonic()) and name not in self._looking:
            try:
                number = ipaddress.ip_address(target.host)
                family = socket.AF_INET6 if number.version == 6 else socket.AF_INET
                place = self._places[name] = Place(family, (str(number), target.port), math.inf)
            except ValueError:
                self._looking.add(name)
                self._spawn(self._look_up(*name))
        return place

    async def _look_up(self, host: str, port: int) -> None:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_DGRAM)
            self._places[host, port] = Place(found[0][0], found[0][4], time.monotonic() + RESOLVE_S)
        except (OSError, UnicodeError) as error:
            log.debug("digest: %s cannot be looked up: %s", host, error)
        finally:
            self._looking.discard((host, port))

    async def _say(self, data: bytes, target: Target) -> None:
        """Ask over gRPC."""
        import grpc

        with suppress(grpc.RpcError, OSError, ValueError, asyncio.CancelledError):
            answer = await self._channel(target.scheme, netloc(target.host, target.port))(data, timeout=GRPC_TIMEOUT_S)
            if answer:
                self._heard(answer, target)

    def _channel(self, scheme: str, netloc: str) -> Any:
        import grpc.aio

        known = self._channels.get((scheme, netloc))
        if known is None:
            options = (("grpc.max_receive_message_length", 1024), ("grpc.enable_http_proxy", 0))
            if scheme == "grpc":
                channel = grpc.aio.insecure_channel(netloc, options)
            else:
                ca, cert, key = map(read_pem, self._files)
                channel = grpc.aio.secure_channel(netloc, grpc.ssl_channel_credentials(ca, key, cert), options)
            known = self._channels[scheme, netloc] = (channel, channel.unary_unary(GRPC_METHOD))
        return known[1]

    # ------------------------------------------------------------------------------------------ hearing

    def _read(self, sock: socket.socket) -> None:
        for _ in range(SLICE):
            try:
                data, source = sock.recvfrom(512)
            except BlockingIOError:
                return
            except OSError:
                continue  # an ICMP error of an earlier ask
            self._heard(data, None, source)

    def _heard(self, data: bytes, target: Target | None, source: Address = ()) -> None:
        """A bid, perhaps: for `target` if it came by a call, else for who was asked at that source."""
        try:
            header, body = open_message(data, (self._secret,) if self._secret else ())
            asked = self._asked.get(header.id)
            if header.kind is not Kind.BID or asked is None or header.engine != asked.engine:
                raise Garbled("nobody was asked for that")
            bid = decode_bid(body)
            if bid.identity != identity_of(asked.key[1]) or not self._is_from(asked, target, source):
                raise Garbled("another one answers")
        except Garbled:
            self.garbled += 1
            return
        self._said[asked.key] = entry_of(bid)
        if len(self._said) == len(self._asked):
            self._all_here.set()

    def _is_from(self, asked: Target, target: Target | None, source: Address) -> bool:
        if target is not None:
            return target == asked
        place = self._places.get((asked.host, asked.port))
        return asked.scheme == "udp" and place is not None and source[:2] == place.address[:2]


def target_of(key: Key, agent: str) -> Target | None:
    """The agent at `udp://host:port/engine` (or grpc, grpcs); None if there is none."""
    try:
        parts = urlsplit(agent)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    if parts.scheme not in {"udp", "grpc", "grpcs"} or not host or not port:
        return None
    return Target(key, parts.scheme, host, port, engine_of_agent(parts.path))


def entry_of(bid: BidBody) -> Entry:
    """A bid as a line of the digest. An agent that is not told of calls counts requests, but not their tokens."""
    queued = -1 if bid.waiting and not bid.queued_tokens else bid.queued_tokens
    return Entry(int(bid.state), bid.running, bid.waiting, queued, round(bid.kv_usage * 1000), bid.epoch)
