"""The messages between a client and an agent: ask -> bid -> take -> tell. One datagram each, fixed binary layout.

All integers big-endian. A message is header, body, and a 16-byte HMAC-SHA256 (truncated) over both; without a key the tag
is zero, which agents accept on loopback only unless told otherwise.

| part   | layout (bytes)                                                                                    |
|--------|---------------------------------------------------------------------------------------------------|
| header | magic "GR" 2, version 1, kind 1, key number (0) 1, addressee 1, engine 2, epoch ms 8, id 8        |
| ask    | prompt tokens 4, count of hashes 1, reserved 3, then 8 for each ladder hash, shallow to deep       |
| bid    | queued tokens 4, running 2, waiting 2, KV use / 65535 2, state 1, age of these counts in tenths of |
|        | a second 1, matched tokens 4 (0xffffffff: unknown), identity 4, epoch 4, us per 1,000 tokens 4     |
| take   | uncached tokens 4, prompt tokens 4                                                                 |
| tell   | TTFT in microseconds 4, cached tokens 4 (0xffffffff: unknown)                                      |

The id of a call is in all four of its messages. A bid (68 bytes) is never twice as large as an ask (48 at least), so a
forged source address gains nothing. The addressee of takes and tells is 1 + CRC-32 of the endpoint's id modulo 255: what
was recorded at one agent moves few others; 0 (asks, bids, older clients) is anybody. Malformed input raises Garbled,
nothing else. An age of 0 may be an older agent's.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from hmac import compare_digest
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from gpuroute.core.seal import TAG, tag
from gpuroute.errors import GpurouteError

if TYPE_CHECKING:
    from collections.abc import Sequence

VERSION, MAX_HASHES, UNKNOWN = 1, 8, 0xFFFFFFFF
GRPC_METHOD = "/gpuroute.Agent/Say"  # over gRPC the same messages are the payload of this one

_HEAD = "!2sBBBBHQQ"
_HEADER = struct.Struct(_HEAD)
_ASK = struct.Struct("!IB3x")
_BID = struct.Struct("!IHHHBBIIII")
_PAIR = struct.Struct("!II")
_WHOLE_ASKS = tuple(struct.Struct(f"{_HEAD}IB3x{count}Q") for count in range(MAX_HASHES + 1))
_WHOLE_BID = struct.Struct(f"{_HEAD}IHHHBBIIII")
_WHOLE_PAIR = struct.Struct(f"{_HEAD}II")
_BID_HEAD = b"GR\x01\x02\x00"  # magic, version, kind, key number: what bids to this process begin with
_unpack_bid = struct.Struct(f"!5sxH16xIHHHBBIII4x{TAG}s").unpack
_SIGNED = slice(0, -TAG)  # what the tag of a message is over
_NO_TAG = bytes(TAG)


class Kind(IntEnum):
    """What a message is."""

    ASK = 1
    BID = 2
    TAKE = 3
    TELL = 4


class EngineState(IntEnum):
    """What the agent thinks of its engine."""

    READY = 0
    WARMING = 1
    DRAINING = 2
    HUNG = 3
    GONE = 4


_STATES = tuple(EngineState)
_KINDS = {int(kind): kind for kind in Kind}
_KIND_ASK, _KIND_BID, _KIND_TAKE, _KIND_TELL = (int(kind) for kind in Kind)


class Garbled(GpurouteError, ValueError):
    """A datagram that is not a message of ours: wrong size, version, kind or tag."""


class Header(NamedTuple):
    """`engine`: which of the agent's (data-parallel ranks); `sent_ms`: sender's clock, epoch ms; `to`: addressee."""

    kind: Kind
    key: int
    engine: int
    sent_ms: int
    id: int
    to: int = 0


class AskBody(NamedTuple):
    """How long the prompt is, and the hashes of its prefix (empty unless the pool opts in)."""

    tokens: int
    hashes: tuple[int, ...]


class BidBody(NamedTuple):
    """`kv_usage` in 0..1; `identity`: hash of the endpoint's id, so that a wrong port is noticed; `epoch` counts engine
    starts; `prefill_us`: microseconds per 1,000 prompt tokens; `age`: seconds since the engine was last heard."""

    queued_tokens: int
    running: int
    waiting: int
    kv_usage: float
    state: EngineState
    matched_tokens: int | None
    identity: int
    epoch: int
    prefill_us: int
    age: float = 0.0


class TakeBody(NamedTuple):
    """The call comes here: how many of its prompt tokens must be computed, of how many."""

    uncached: int
    tokens: int


class TellBody(NamedTuple):
    """What the first token took, and how many prompt tokens the engine said were cached."""

    ttft_us: int
    cached_tokens: int | None


def identity_of(endpoint_id: str) -> int:
    """The `identity` in a bid: CRC-32 of the endpoint's id."""
    return crc32(endpoint_id.encode())


def encode_ask(body: AskBody, id_: int, sent_ms: int, engine: int = 0, key: int = 0, secret: bytes = b"") -> bytes:
    """An ask; at most MAX_HASHES hashes are sent."""
    hashes = body.hashes[:MAX_HASHES]
    head = b"GR", VERSION, _KIND_ASK, key, 0, engine, sent_ms, id_
    data = _WHOLE_ASKS[len(hashes)].pack(*head, _u32(body.tokens), len(hashes), *hashes)
    return data + (tag(data, secret) if secret else _NO_TAG)


def encode_bid(body: BidBody, id_: int, sent_ms: int, engine: int = 0, key: int = 0, secret: bytes = b"") -> bytes:
    """The answer to an ask."""
    queued, running, waiting, kv_usage, state, matched, identity, epoch, prefill_us, age = body
    data = _WHOLE_BID.pack(
        *(b"GR", VERSION, _KIND_BID, key, 0, engine, sent_ms, id_),
        _u32(queued),
        min(running, 0xFFFF),
        min(waiting, 0xFFFF),
        int(0xFFFF * kv_usage + 0.5) if 0.0 <= kv_usage < 1.0 else 0xFFFF * (kv_usage > 0.0),
        state,
        int(10 * age) if age < 25.5 else 0xFF,
        UNKNOWN if matched is None else _u32(matched),
        identity & UNKNOWN,
        epoch & UNKNOWN,
        _u32(prefill_us),
    )
    return data + (tag(data, secret) if secret else _NO_TAG)


def encode_take(
    body: TakeBody, id_: int, sent_ms: int, engine: int = 0, key: int = 0, secret: bytes = b"", to: int = 0
) -> bytes:
    """The call of this id comes to that engine."""
    return _pair((_KIND_TAKE, key, to, engine, sent_ms, id_, _u32(body.uncached), _u32(body.tokens)), secret)


def encode_tell(
    body: TellBody, id_: int, sent_ms: int, engine: int = 0, key: int = 0, secret: bytes = b"", to: int = 0
) -> bytes:
    """The first token of this id is here."""
    cached = UNKNOWN if body.cached_tokens is None else _u32(body.cached_tokens)
    return _pair((_KIND_TELL, key, to, engine, sent_ms, id_, _u32(body.ttft_us), cached), secret)


def open_message(data: bytes, secrets: Sequence[bytes] = ()) -> tuple[Header, bytes]:
    """Check size, version and tag; the header and the body's bytes. Raises Garbled.

    `secrets`: the accepted keys by number (two of them while a key is rotated); empty: tags are not checked.
    """
    if len(data) < _HEADER.size + TAG:
        raise Garbled(f"{len(data)} bytes are too few for a message")
    magic, version, kind, key, to, engine, sent_ms, id_ = _HEADER.unpack_from(data)
    if magic != b"GR" or version != VERSION:
        raise Garbled(f"not a message of version {VERSION}")
    if secrets and (key >= len(secrets) or not compare_digest(data[-TAG:], tag(data[_SIGNED], secrets[key]))):
        raise Garbled("the tag does not match")
    known = _KINDS.get(kind)
    if known is None:
        raise Garbled(f"kind {kind} is unknown")
    return Header(known, key, engine, sent_ms, id_, to), data[_HEADER.size : -TAG]


def decode_ask(body: bytes) -> AskBody:
    """The body of an ask. Raises Garbled."""
    if len(body) < _ASK.size:
        raise Garbled("an ask is longer")
    tokens, count = _ASK.unpack_from(body)
    if count > MAX_HASHES or len(body) != _ASK.size + 8 * count:
        raise Garbled("the count of hashes does not fit the size of the ask")
    return AskBody(tokens, struct.unpack_from(f"!{count}Q", body, _ASK.size))


def decode_bid(body: bytes) -> BidBody:
    """The body of a bid. Raises Garbled."""
    queued, running, waiting, kv, state, age, matched, ident, epoch, prefill = _fixed(_BID, body)
    if state >= len(_STATES):
        raise Garbled(f"state {state} is unknown")
    known = None if matched == UNKNOWN else matched
    return BidBody(queued, running, waiting, kv / 0xFFFF, _STATES[state], known, ident, epoch, prefill, age / 10)


def read_bid(data: bytes, secret: bytes = b"") -> tuple[int, int, int, int, int, int, float, int, int, float]:
    """`open_message` and `decode_bid` in one step: identity, engine number, state, and in the order of a report what it
    says: running, waiting, queued tokens, KV use, matched tokens or -1, epoch, age. Raises Garbled."""
    try:
        head, engine, queued, running, waiting, kv, state, age, matched, identity, epoch, seal = _unpack_bid(data)
    except struct.error:
        raise Garbled(f"a bid of {len(data)} bytes") from None
    if head != _BID_HEAD or state >= len(_STATES):
        raise Garbled(f"not a bid of version {VERSION}")
    if secret and not compare_digest(seal, tag(data[_SIGNED], secret)):
        raise Garbled("the tag does not match")
    matched = -1 if matched == UNKNOWN else matched
    return identity, engine, state, running, waiting, queued, kv / 0xFFFF, matched, epoch, age / 10


def decode_take(body: bytes) -> TakeBody:
    """The body of a take. Raises Garbled."""
    return TakeBody(*_fixed(_PAIR, body))


def decode_tell(body: bytes) -> TellBody:
    """The body of a tell. Raises Garbled."""
    ttft_us, cached = _fixed(_PAIR, body)
    return TellBody(ttft_us, None if cached == UNKNOWN else cached)


def _pair(fields: tuple[int, ...], secret: bytes) -> bytes:
    data = _WHOLE_PAIR.pack(b"GR", VERSION, *fields)
    return data + (tag(data, secret) if secret else _NO_TAG)


def _fixed(layout: struct.Struct, body: bytes) -> tuple[int, ...]:
    if len(body) != layout.size:
        raise Garbled(f"a body of {len(body)} bytes where {layout.size} belong")
    return layout.unpack(body)


def _u32(number: int) -> int:
    return number if 0 <= number < UNKNOWN else min(max(0, number), UNKNOWN - 1)
