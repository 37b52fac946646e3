"""The answering side: what an agent says, and everything that it must not be talked into."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuroute.agent.answers import AHEAD_MS, BEHIND_MS, Answers, Replays
from gpuroute.agent.book import Sample
from gpuroute.agent.desk import Desk
from gpuroute.core.asking import (
    AskBody,
    EngineState,
    Kind,
    TakeBody,
    TellBody,
    decode_bid,
    encode_ask,
    encode_bid,
    encode_take,
    encode_tell,
    identity_of,
    open_message,
)

KEY, OLD, NEXT, FOREIGN = b"key", b"old", b"next", b"foreign"
HERE = "127.0.0.1"
NOW, NOW_MS = 100.0, 1_700_000_000_000
HASHES = (11, 22, 33)


def ask(
    number: int = 1, hashes: tuple[int, ...] = (), tokens: int = 5_000, *, engine: int = 0, key: bytes = KEY
) -> bytes:
    return encode_ask(AskBody(tokens, hashes), number, NOW_MS, engine, 0, key)


def take(number: int = 1, uncached: int = 4_000, *, sent_ms: int = NOW_MS, engine: int = 0, key: bytes = KEY) -> bytes:
    return encode_take(TakeBody(uncached, 5_000), number, sent_ms, engine, 0, key)


def tell(number: int = 1, *, key: bytes = KEY) -> bytes:
    return encode_tell(TellBody(200_000, None), number, NOW_MS, 0, 0, key)


class Bench:
    """An agent of two engines and a client that talks to it."""

    def __init__(self, *keys: bytes, rate: float = 1e6) -> None:
        self.desks = [Desk("gpu-0", epoch=7), Desk("gpu-1", epoch=8)]
        self.answers = Answers(self.desks, keys, rate=rate)

    def say(self, data: bytes, source: str = HERE, now: float = NOW, now_ms: int = NOW_MS) -> bytes:
        return self.answers.answer(data, source, now, now_ms)

    def bid(self, data: bytes, key: bytes = KEY) -> object:
        header, body = open_message(self.say(data), (key,) if key else ())
        assert header.kind is Kind.BID
        return decode_bid(body)


def test_a_bid_says_what_is_queued_cached_and_who_speaks() -> None:
    bench = Bench(KEY)
    bench.desks[0].sampled(Sample(NOW, running=3, kv_usage=0.5))
    bid = bench.bid(ask(1, HASHES))
    assert (bid.queued_tokens, bid.running, bid.matched_tokens) == (0, 3, 0)
    assert (bid.identity, bid.epoch, bid.state) == (identity_of("gpu-0"), 7, EngineState.READY)
    assert bid.kv_usage == pytest.approx(0.5, abs=1e-4)
    assert bench.say(take(1)) == b""
    bid = bench.bid(ask(2, HASHES))
    assert (bid.queued_tokens, bid.waiting, bid.matched_tokens) == (4_000, 1, 1_024), "the take is seen at once"
    bench.say(tell(1))
    assert bench.bid(ask(3)).queued_tokens == 0
    assert bench.bid(ask(4)).matched_tokens is None, "without hashes nothing is said of the cache"


def test_each_engine_has_a_book_of_its_own() -> None:
    bench = Bench(KEY)
    bench.say(take(1, engine=1))
    assert bench.bid(ask(2, engine=0)).queued_tokens == 0
    bid = bench.bid(ask(2, engine=1))
    assert (bid.queued_tokens, bid.identity) == (4_000, identity_of("gpu-1"))
    assert bench.say(ask(3, engine=2)) == b""
    assert bench.answers.dropped["engine"] == 1


def test_forged_messages_change_nothing() -> None:
    bench = Bench(KEY)
    unsigned = [ask(key=b""), take(key=b""), tell(key=b"")]
    for data in (*unsigned, ask(key=FOREIGN), take(key=FOREIGN), tell(key=FOREIGN)):
        assert bench.say(data) == b""
    signed = bytearray(take())
    signed[30] ^= 1
    assert bench.say(bytes(signed)) == b""
    assert bench.answers.dropped["key"] == 7
    assert bench.answers.last_from["key"]
    assert bench.bid(ask()).queued_tokens == 0


def test_a_key_is_rotated_without_a_gap() -> None:
    both = Bench(OLD, NEXT)
    assert both.bid(ask(1, key=OLD), OLD)
    assert both.bid(ask(2, key=NEXT), NEXT), "the answer is signed with the key of its question"
    assert both.say(ask(3, key=FOREIGN)) == b""
    assert Bench(NEXT).say(ask(4, key=OLD)) == b""


def test_a_replayed_take_or_tell_changes_nothing() -> None:
    bench = Bench(KEY)
    recorded = [take(1), tell(1)]
    for data in recorded:
        bench.say(data)
    desk = bench.desks[0]
    assert (desk.takes, desk.tells) == (1, 1)
    for data in recorded * 3:
        bench.say(data)
    assert (desk.takes, desk.tells) == (1, 1)
    assert bench.answers.dropped["replayed"] == 6
    assert bench.bid(ask(2)).queued_tokens == 0


@pytest.mark.parametrize("off_ms", [-BEHIND_MS - 1, AHEAD_MS + 1, -3_600_000, 3_600_000])
def test_t4_a_message_of_another_time_is_refused(off_ms: int) -> None:
    """And counted as what it is: an operator looks for clocks then, not for somebody who replays."""
    bench = Bench(KEY)
    bench.say(take(1, sent_ms=NOW_MS + off_ms))
    assert bench.desks[0].takes == 0
    assert (bench.answers.dropped["clock"], bench.answers.dropped["replayed"]) == (1, 0)
    bench.say(take(2, sent_ms=NOW_MS + 60_000 - BEHIND_MS + 1_000), now=NOW + 60, now_ms=NOW_MS + 60_000)
    assert bench.desks[0].takes == 1, "clocks may differ"


def test_what_was_recorded_at_one_agent_moves_no_other() -> None:
    """Else who can listen makes any engine look busy, and a hung one alive."""
    bench = Bench(KEY)
    to = bench.desks[0].addressee
    for number, somebody in enumerate((to, 0, 1 + to % 255), 1):
        bench.say(encode_take(TakeBody(4_000, 5_000), number, NOW_MS, 0, 0, KEY, somebody))
        bench.say(encode_tell(TellBody(200_000, None), number, NOW_MS, 0, 0, KEY, somebody))
    assert (bench.desks[0].takes, bench.desks[0].tells) == (2, 2), "its own, and those of older clients"
    assert bench.answers.dropped["addressee"] == 2
    assert len({Desk(f"gpu-{number}").addressee for number in range(1_000)}) > 200
    assert all(1 <= Desk(f"gpu-{number}").addressee <= 255 for number in range(1_000))


def test_what_was_recorded_before_a_restart_is_not_believed_by_the_successor() -> None:
    recorded = [take(1), tell(1)]
    successor = Bench(KEY)
    for data in recorded:
        successor.say(data, now=NOW + 5, now_ms=NOW_MS + 5_000)
    assert (successor.desks[0].takes, successor.desks[0].tells) == (0, 0)
    assert successor.answers.dropped["replayed"] == 2
    successor.say(take(2, sent_ms=NOW_MS + 4_500), now=NOW + 5, now_ms=NOW_MS + 5_000)
    assert successor.desks[0].takes == 1, "what is on its way is welcome"


@pytest.mark.parametrize("warm_ms", [0, 100_000])
def test_t4_a_clock_that_is_set_right_is_right_at_once(warm_ms: int) -> None:
    """An hour ahead, with clients that were ahead as well or not, then corrected."""
    bench = Bench(KEY)
    for at_ms in range(0, warm_ms + 1, 10_000):
        wrong = NOW_MS + 3_600_000 + at_ms
        bench.say(take(at_ms + 1, sent_ms=wrong), now=NOW + at_ms / 1000, now_ms=wrong)
    before = bench.desks[0].takes
    right = NOW_MS + warm_ms + 1_000
    bench.say(take(5, sent_ms=right), now=NOW + warm_ms / 1000 + 1, now_ms=right)
    assert bench.desks[0].takes == before + 1
    bench.say(take(5, sent_ms=right), now=NOW + warm_ms / 1000 + 1, now_ms=right + 1)
    assert bench.desks[0].takes == before + 1, "once"


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(-40_000, 10_000), st.integers(0, 30_000)), max_size=80))
def test_nothing_is_ever_believed_twice(messages: list[tuple[int, int, int]]) -> None:
    replays, clock, believed = Replays(), NOW_MS, set()
    for mark, offset, pause in messages:
        clock += pause
        message = (mark, clock + offset - (clock + offset) % 20_000)  # coarse stamps, so that messages recur
        if replays.fresh(mark << 64 | message[1], message[1], clock):
            assert message not in believed
            believed.add(message)


def test_a_flood_of_takes_shrinks_the_window_and_not_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuroute.agent.answers.REMEMBERED", 100)
    replays = Replays()
    stamps = [(number, NOW_MS + number) for number in range(1_000)]
    assert all(replays.fresh(number, stamp, NOW_MS + number) for number, stamp in stamps)
    assert not any(replays.fresh(number, stamp, NOW_MS + 1_000) for number, stamp in stamps)
    assert len(replays._new) + len(replays._old) <= 200


def test_one_source_cannot_use_up_the_agent() -> None:
    bench = Bench(KEY, rate=10)
    answered = [bool(bench.say(ask(number), "10.0.0.1")) for number in range(20)]
    assert answered == [True] * 10 + [False] * 10
    assert bench.say(ask(99), "10.0.0.2"), "others are served"
    assert bench.say(ask(99), "10.0.0.1", NOW + 1.0), "and the next second is another one"


def test_a_flood_of_forged_sources_costs_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuroute.agent.answers.MAX_SOURCES", 50)
    bench = Bench(KEY)
    for number in range(500):
        bench.say(b"", f"10.0.{number // 256}.{number % 256}")
    assert len(bench.answers._rates._counts) <= 50


@pytest.mark.parametrize("cut", range(len(encode_ask(AskBody(1, HASHES), 1, 1))))
def test_truncated_messages_are_dropped(cut: int) -> None:
    bench = Bench()
    assert bench.say(ask(1, HASHES, key=b"")[:cut]) == b""
    assert bench.answers.dropped["garbled"] == 1


@pytest.mark.parametrize("size", [257, 1_500, 65_507])
def test_oversized_messages_are_dropped(size: int) -> None:
    bench = Bench()
    assert bench.say(ask(1, HASHES, key=b"").ljust(size, b"\0")) == b""
    assert bench.answers.dropped["garbled"] == 1


def test_an_agent_does_not_answer_answers() -> None:
    bench = Bench()
    bid = Desk("gpu-0").bid(1, 100, (), NOW)
    assert bench.say(encode_bid(bid, 1, NOW_MS)) == b"", "two agents could answer each other for ever"


@settings(max_examples=400)
@given(st.one_of(st.binary(max_size=300), st.binary(max_size=60).map(lambda tail: b"GR\x01" + tail)), st.booleans())
def test_garbage_never_crashes_it_and_answers_are_small(data: bytes, keyed: bool) -> None:
    bench = Bench(*([KEY] if keyed else []))
    reply = bench.say(data)
    assert len(reply) <= 2 * len(data)
    assert not (reply and keyed)
    assert bench.bid(ask(1, key=KEY if keyed else b""), KEY if keyed else b"")


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 2**64 - 1), max_size=8), st.integers(0, 2**64 - 1))
def test_no_answer_is_more_than_twice_its_question(tokens: int, hashes: list[int], number: int) -> None:
    question = ask(number, tuple(hashes), tokens)
    answer = Bench(KEY).say(question)
    assert 0 < len(answer) <= 2 * len(question)


@given(st.integers(0, 47), st.integers(1, 255))
def test_any_changed_byte_of_a_signed_message_is_noticed(place: int, change: int) -> None:
    bench = Bench(KEY)
    data = bytearray(take())
    data[place % len(data)] ^= change
    assert bench.say(bytes(data)) == b""
    assert bench.desks[0].takes == 0


def test_answering_is_quick_enough() -> None:
    """A guard against an accident (a copy, a regex); the figure itself is `gpuroute bench ask`."""
    bench, asks = Bench(KEY), [ask(number, HASHES) for number in range(300)]
    best = min(_seconds(bench, asks) for _ in range(10)) / len(asks)
    assert best < 250e-6, f"{best * 1e6:.0f} us for one answer"


def _seconds(bench: Bench, asks: list[bytes]) -> float:
    started = time.thread_time()
    for data in asks:
        bench.say(data)
    return time.thread_time() - started
