"""Messages that nobody should send, to everything that reads messages: decoders, agents over both transports, clients.

Forged, replayed, truncated, oversized, amplified; the rules of one agent hold for whichever way a message came.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from agent.stage import AgentThread, call_of, desks, router_of
from agent.test_agent_grpc import GrpcAgent
from hypothesis import example, given
from hypothesis import strategies as st

from gpuroute.core.asking import (
    GRPC_METHOD,
    MAX_HASHES,
    UNKNOWN,
    AskBody,
    BidBody,
    EngineState,
    Garbled,
    Kind,
    TakeBody,
    TellBody,
    decode_ask,
    decode_bid,
    decode_take,
    decode_tell,
    encode_ask,
    encode_bid,
    encode_take,
    encode_tell,
    open_message,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gpuroute.agent.answers import Answers
    from gpuroute.agent.desk import Desk
    from gpuroute.transports.asking import Asking

KEY = b"secret-of-the-test"
U16, U32, U64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))
DECODERS = (decode_ask, decode_bid, decode_take, decode_tell)


def now_ms() -> int:
    return int(time.time() * 1000)


# ------------------------------------------------------------------------------------------ decoders


@given(st.binary(max_size=300), st.sampled_from([(), (KEY,), (KEY, b"next")]))
@example(b"GR\x01\x01" + bytes(40), ())
@example(b"GR\x01\x07" + bytes(40), ())
@example(b"GR\x02\x01" + bytes(40), ())
@example(b"GR\x01\x01\xff" + bytes(40), (KEY,))
def test_envelopes_of_garbage_are_garbled_or_well_formed(data: bytes, secrets: tuple[bytes, ...]) -> None:
    try:
        header, body = open_message(data, secrets)
    except Garbled:
        return
    assert not secrets, "nobody guesses a tag"
    assert isinstance(header.kind, Kind)
    assert len(body) == len(data) - 40


@pytest.mark.parametrize("decode", DECODERS)
@given(data=st.binary(max_size=120))
def test_bodies_of_garbage_are_garbled_or_in_range(decode: Callable[[bytes], Any], data: bytes) -> None:
    try:
        body = decode(data)
    except Garbled:
        return
    numbers = [n for value in body for n in (value if isinstance(value, tuple) else (value,)) if n is not None]
    assert all(0 <= number < 2**64 for number in numbers)
    if isinstance(body, AskBody):
        assert len(body.hashes) <= MAX_HASHES
    if isinstance(body, BidBody):
        assert 0 <= body.kv_usage <= 1


@given(U32, st.lists(U64, max_size=12), U64, U64, U16)
def test_asks_come_out_as_they_went_in(tokens: int, hashes: list[int], id_: int, sent_ms: int, engine: int) -> None:
    header, body = open_message(encode_ask(AskBody(tokens, tuple(hashes)), id_, sent_ms, engine, 0, KEY), (KEY,))
    assert header == (Kind.ASK, 0, engine, sent_ms, id_, 0)
    assert decode_ask(body) == (min(tokens, UNKNOWN - 1), tuple(hashes[:MAX_HASHES]))


@given(
    st.builds(
        BidBody,
        U32,
        U32,
        U32,
        st.floats(-1, 2),
        st.sampled_from(EngineState),
        st.none() | U32,
        U32,
        U32,
        U32,
        st.floats(0, 1e9),
    )
)
def test_bids_come_out_as_they_went_in_as_far_as_they_fit(bid: BidBody) -> None:
    header, body = open_message(encode_bid(bid, 7, 8, 9))
    out = decode_bid(body)
    assert (header.kind, header.engine) == (Kind.BID, 9)
    assert (out.state, out.identity, out.epoch) == (bid.state, bid.identity, bid.epoch)
    assert (out.running, out.waiting) == (min(bid.running, 65_535), min(bid.waiting, 65_535))
    assert out.kv_usage == pytest.approx(min(1.0, max(0.0, bid.kv_usage)), abs=1e-4)
    assert out.age == pytest.approx(min(25.5, bid.age), abs=0.1)
    assert out.matched_tokens == (None if bid.matched_tokens is None else min(bid.matched_tokens, UNKNOWN - 1))


@given(U32, U32, st.none() | U32)
def test_takes_and_tells_come_out_as_they_went_in(one: int, other: int, cached: int | None) -> None:
    most = UNKNOWN - 1
    assert decode_take(open_message(encode_take(TakeBody(one, other), 1, 2))[1]) == (min(one, most), min(other, most))
    told = decode_tell(open_message(encode_tell(TellBody(one, cached), 1, 2))[1])
    assert told == (min(one, most), None if cached is None else min(cached, most))


# ------------------------------------------------------------------------------------------ agents, over both transports


class Door:
    """A way to an agent: say a message, hear the answer (b"" for none)."""

    def __init__(self, kind: str, given: list[Desk], answers: Answers, say: Callable[[bytes], bytes]) -> None:
        self.kind, self.desks, self.answers, self.say = kind, given, answers, say

    def ask(self, number: int = 1, secret: bytes = KEY) -> bytes:
        return encode_ask(AskBody(5_000, (1, 2)), number, now_ms(), 0, 0, secret)

    def queued(self) -> int:
        """What an honest client is told."""
        return decode_bid(open_message(self.say(self.ask()), (KEY,))[1]).queued_tokens


@pytest.fixture(params=["udp", "grpc"])
def door(request: pytest.FixtureRequest) -> Iterator[Door]:
    if request.param == "grpc":
        with GrpcAgent(desks(1), (KEY,)) as agent, grpc.insecure_channel(f"127.0.0.1:{agent.port}") as channel:
            method = channel.unary_unary(GRPC_METHOD)
            yield Door("grpc", agent.desks, agent.answers, lambda data: bytes(method(data, timeout=60)))
        return
    with AgentThread(desks(1)) as agent, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(("127.0.0.1", agent.port))

        def say(data: bytes) -> bytes:
            """The agent reads in order, so an answer to an honest ask behind a message means that it has been read."""
            sock.settimeout(60)
            probe = encode_ask(AskBody(1, ()), 0xBEEF, now_ms(), 0, 0, KEY)
            sock.send(data)
            sock.send(probe)
            heard = b""
            while True:
                answer = sock.recv(65_535)
                if open_message(answer, (KEY,))[0].id == 0xBEEF:
                    return heard
                heard = answer

        yield Door("udp", list(agent.desks), agent.answers, say)


def test_forged_messages_are_not_answered_and_change_nothing(door: Door) -> None:
    for secret in (b"", b"foreign"):
        assert door.say(door.ask(secret=secret)) == b""
        assert door.say(encode_take(TakeBody(9_000, 9_000), 5, now_ms(), 0, 0, secret)) == b""
        assert door.say(encode_tell(TellBody(1, None), 5, now_ms(), 0, 0, secret)) == b""
    honest = encode_take(TakeBody(9_000, 9_000), 5, now_ms(), 0, 0, KEY)
    for place in range(len(honest)):
        changed = bytearray(honest)
        changed[place] ^= 0x40
        assert door.say(bytes(changed)) == b""
    assert door.queued() == 0
    assert (door.desks[0].takes, door.desks[0].tells) == (0, 0)
    assert (door.answers.dropped["key"], door.answers.dropped["garbled"]) == (6 + len(honest) - 3, 3), "magic, version"


def test_replayed_messages_count_once(door: Door) -> None:
    take = encode_take(TakeBody(4_000, 5_000), 5, now_ms(), 0, 0, KEY)
    for _ in range(4):
        door.say(take)
    assert (door.desks[0].takes, door.answers.dropped["replayed"]) == (1, 3)
    tell = encode_tell(TellBody(100_000, None), 5, now_ms(), 0, 0, KEY)
    for data in (tell, tell, take):
        door.say(data)
    assert (door.desks[0].takes, door.desks[0].tells, door.queued()) == (1, 1, 0)
    old = encode_take(TakeBody(4_000, 5_000), 6, now_ms() - 120_000, 0, 0, KEY)
    door.say(old)
    assert door.desks[0].takes == 1, "recorded long ago"


def test_truncated_messages_are_not_answered(door: Door) -> None:
    whole = door.ask()
    assert [door.say(whole[:size]) for size in range(len(whole))] == [b""] * len(whole)
    assert door.say(whole)


@pytest.mark.parametrize("size", [257, 600, 1_000])
def test_oversized_messages_are_not_answered(door: Door, size: int) -> None:
    assert door.say(door.ask().ljust(size, b"\0")) == b""
    assert door.queued() == 0


def test_no_answer_is_more_than_twice_its_question(door: Door) -> None:
    for count in range(MAX_HASHES + 1):
        question = encode_ask(AskBody(1, tuple(range(count))), 1, now_ms(), 0, 0, KEY)
        assert 0 < len(door.say(question)) <= 2 * len(question)
    assert door.say(encode_take(TakeBody(1, 1), 9, now_ms(), 0, 0, KEY)) == b""
    assert door.say(encode_tell(TellBody(1, None), 9, now_ms(), 0, 0, KEY)) == b""


def test_one_host_cannot_use_up_the_agent(door: Door, eventually: Callable[..., None]) -> None:
    """Its messages of the next second are taken again; another host is not concerned (test_answers)."""
    door.answers._rates.limit = 3

    def is_refused() -> bool:
        for number in range(8):
            door.answers.answer(door.ask(number), SOURCES[door.kind], time.monotonic(), now_ms())
        return door.answers.dropped["rate"] > 0

    eventually(is_refused, "it was refused")
    door.answers._rates.limit = 1e6
    assert door.queued() == 0
    assert list(door.answers._rates._counts) == [SOURCES[door.kind]], "a host is one source, whatever its ports"


SOURCES = {"udp": "127.0.0.1", "grpc": "ipv4:127.0.0.1"}


def test_what_was_recorded_on_one_transport_is_a_replay_on_the_other() -> None:
    with GrpcAgent(desks(1), (KEY,)) as agent, grpc.insecure_channel(f"127.0.0.1:{agent.port}") as channel:
        take = encode_take(TakeBody(4_000, 5_000), 5, now_ms(), 0, 0, KEY)
        agent.answers.answer(take, "10.0.0.9", time.monotonic(), now_ms())
        channel.unary_unary(GRPC_METHOD)(take, timeout=60)
        assert (agent.desks[0].takes, agent.answers.dropped["replayed"]) == (1, 1)


# ------------------------------------------------------------------------------------------ clients


@pytest.fixture(scope="module")
def listening() -> Iterator[Asking]:
    """An ask of two agents that has been answered, and hears what comes late."""
    with AgentThread(desks(2)) as agent:
        router, asker = router_of(agent.endpoints())
        asking = asker.ask(call_of(router))
        assert asking is not None
        yield asking
        router.close()


@given(tail=st.binary(max_size=200), headed=st.booleans())
def test_garbage_never_makes_a_bid(listening: Asking, tail: bytes, headed: bool) -> None:
    listening.bids.clear()
    head = struct.pack("!2sBBBxHQQ", b"GR", 1, Kind.BID, 0, 0, 0, listening.id) if headed else b""
    listening.unread.append((head + tail, ("127.0.0.1", 1), time.monotonic()))
    listening.heard()
    assert listening.bids == {}
