"""From a datagram to its answer: authentication, replay, rate, and what the desks say. No socket, no clock.

Rules: garbage is dropped and counted, whatever it is; an answer is never more than twice as large as its question, so a
forged source address gains nothing; without keys only loopback is answered unless the operator says otherwise (the
server's business: it binds no other address). A recorded `take` or `tell` that is sent again does nothing: ids are
remembered for as long as their time stamp is accepted. A repeated `ask` is answered again; that teaches nobody anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuroute.core.asking import Garbled, Kind, decode_ask, decode_take, decode_tell, encode_bid, open_message

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuroute.agent.desk import Desk
    from gpuroute.core.asking import Header

BEHIND_MS = 30_000
AHEAD_MS = 5_000
"""How far the time stamp of a take or tell may be from our clock."""

RESTART_MS = 1_000
"""What was stamped that long before the first message of all may have been heard by our predecessor."""

REMEMBERED = 50_000
"""Messages of one generation at most: if more arrive, the window in which messages are believed shrinks."""

MAX_SOURCES = 65_536
MAX_DATAGRAM = 256
OURS = b"GR\x01"  # magic and version

WHY = {
    "garbled": "no message of ours",
    "key": "signed with another key: GPUROUTE_AGENT_KEY differs there",
    "clock": f"takes and tells by a clock more than {BEHIND_MS // 1000} s behind or {AHEAD_MS // 1000} s ahead of ours",
    "rate": "more than --max-rate in a second",
    "replayed": "takes and tells that came before",
    "addressee": "takes and tells for another endpoint: an agent's address is wrong, or somebody replays",
    "engine": "for an engine that this agent does not have: a path in an agent's address is wrong",
}
"""Why messages are dropped, for people."""
RATE = 50_000.0


class Replays:
    """Remembers messages in two generations, so that forgetting the older half is one assignment."""

    __slots__ = ("_floor", "_new", "_newest", "_old", "_old_newest", "_since")

    def __init__(self) -> None:
        self._new: set[int] = set()
        self._old: set[int] = set()
        self._newest = self._old_newest = 0
        self._since = 0
        self._floor = 0

    def fresh(self, mark: int, sent_ms: int, now_ms: int) -> bool:
        """True if this message is of our time and comes for the first time."""
        if not self._since:
            self._old_newest = now_ms - RESTART_MS
        elif now_ms < self._since:  # our clock was set back: what is newest by the old one would refuse all of now
            self._newest = self._old_newest = self._since = 0
        if now_ms - self._since > BEHIND_MS + AHEAD_MS or len(self._new) >= REMEMBERED:
            self._forget(now_ms)
        if not is_of_our_time(sent_ms, now_ms) or sent_ms <= self._floor:
            return False
        if mark in self._new or mark in self._old:
            return False
        self._new.add(mark)
        self._newest = max(self._newest, sent_ms)
        return True

    def _forget(self, now_ms: int) -> None:
        """What the older generation knew is refused by its age from now on."""
        self._floor, self._old_newest, self._newest = self._old_newest, self._newest, 0
        self._old, self._new, self._since = self._new, set(), now_ms


class Rates:
    """How many messages each source sent in this second. Bounded: a flood of forged sources starts the count anew."""

    __slots__ = ("_counts", "_second", "limit")

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._counts: dict[str, int] = {}
        self._second = 0

    def allows(self, source: str, now: float) -> bool:
        """Count one message; False if it is one too many."""
        second = int(now)
        if second != self._second or len(self._counts) >= MAX_SOURCES:
            self._counts.clear()
            self._second = second
        count = self._counts[source] = self._counts.get(source, 0) + 1
        return count <= self.limit


class Answers:
    """What the agent does with a datagram. Owned by one loop.

    `keys`: accepted secrets, the present one first; a bid is signed with the one that signed its ask. `rate`: messages
    that are taken from one address in a second.
    """

    def __init__(self, desks: Sequence[Desk], keys: Sequence[bytes] = (), *, rate: float = RATE) -> None:
        self.desks = desks
        self._keys = tuple(keys)
        self._rates = Rates(rate)
        self._replays = Replays()
        self.dropped = dict.fromkeys(WHY, 0)
        self.last_from = dict.fromkeys(WHY, "")

    def answer(self, data: bytes, source: str, now: float, now_ms: int) -> bytes:
        """The reply to a datagram, b"" for none. Never raises. `now`: monotonic seconds; `now_ms`: since 1970."""
        if not self._rates.allows(source, now):
            return self._drop("rate", source)
        header = None
        try:
            header, body, secret = self._open(data)
            if header.engine >= len(self.desks):
                return self._drop("engine", source)
            desk = self.desks[header.engine]
            if header.kind is Kind.ASK:
                tokens, hashes = decode_ask(body)
                bid = desk.bid(header.id, tokens, hashes, now)
                return encode_bid(bid, header.id, now_ms, header.engine, header.key, secret)
            why = self._note(desk, header, body, now, now_ms)
        except Garbled:
            is_signed = header is None and self._keys and data[:3] == OURS and len(data) <= MAX_DATAGRAM
            return self._drop("key" if is_signed else "garbled", source)
        return self._drop(why, source) if why else b""

    def _open(self, data: bytes) -> tuple[Header, bytes, bytes]:
        if len(data) > MAX_DATAGRAM:
            raise Garbled(f"{len(data)} bytes are too many for a message")
        if not self._keys:
            return (*open_message(data), b"")
        for key in self._keys[:-1]:
            try:
                return (*open_message(data, (key,)), key)
            except Garbled:
                continue
        return (*open_message(data, self._keys[-1:]), self._keys[-1])

    def _note(self, desk: Desk, header: Header, body: bytes, now: float, now_ms: int) -> str:
        """Believe a take or a tell, or say why not."""
        if header.kind is Kind.TAKE:
            uncached, tokens = decode_take(body)
            if not (why := self._doubt(desk, header, now_ms)):
                desk.take(header.id, uncached, tokens, now)
        elif header.kind is Kind.TELL:
            ttft_us, cached = decode_tell(body)
            if not (why := self._doubt(desk, header, now_ms)):
                desk.tell(header.id, ttft_us / 1e6, cached, now)
        else:
            raise Garbled("agents are not sent bids")
        return why

    def _doubt(self, desk: Desk, header: Header, now_ms: int) -> str:
        if header.to and header.to != desk.addressee:
            return "addressee"
        # The engine is part of the mark: a call that is hedged or tried again takes two engines of one agent.
        mark = header.id << 18 | header.engine << 2 | header.kind & 3
        if self._replays.fresh(mark, header.sent_ms, now_ms):
            return ""
        return "replayed" if is_of_our_time(header.sent_ms, now_ms) else "clock"

    def _drop(self, why: str, source: str) -> bytes:
        self.dropped[why] += 1
        self.last_from[why] = source
        return b""


def is_of_our_time(sent_ms: int, now_ms: int) -> bool:
    """True if clocks that differ by no more than is usual explain that time stamp."""
    return -AHEAD_MS <= now_ms - sent_ms <= BEHIND_MS
