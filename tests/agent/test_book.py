"""The agent's book: a queue that is neither forgotten nor imagined."""

from __future__ import annotations

import math
import tracemalloc

import pytest

from gpuroute.agent.answers import Replays
from gpuroute.agent.book import EXPIRE_S, OVERTAKEN_S, Book, Prefixes, Sample
from gpuroute.agent.desk import Desk
from gpuroute.core.prefix import BLOCK_TOKENS

RATE = 20e-6


def book_with(*works: int, at: float = 100.0) -> Book:
    book = Book(prior=RATE)
    for id_, work in enumerate(works):
        book.take(id_, work, work, at)
    return book


def test_the_prompt_under_way_counts_for_what_is_left_of_it() -> None:
    book = book_with(50_000, 10_000)
    assert book.queued_tokens(100.0) == 60_000
    assert book.queued_tokens(100.5) == pytest.approx(35_000, rel=0.01)
    assert book.queued_tokens(103.0) == 15_000, "what was not told is not done: a tenth of it stays"


def test_a_tell_starts_the_next_prompt() -> None:
    book = book_with(50_000, 10_000)
    book.tell(0, 1.2, None, 101.2)
    assert book.queued_tokens(101.2) == 10_000
    assert book.waiting(101.2) == 1
    book.tell(1, 1.5, None, 101.5)
    assert book.queued_tokens(101.5) == 0


def test_told_times_teach_the_rate_by_the_prompt_that_was_under_way() -> None:
    book = Book(prior=RATE)
    for number in range(30):
        at = 100.0 + number
        book.take(number, 8_000, 8_000, at)
        book.tell(number, 0.3, None, at + 8_000 * 2 * RATE)
    assert book.prefill_s == pytest.approx(2 * RATE, rel=0.1)


def test_who_came_long_before_a_told_one_is_through() -> None:
    book = book_with(1_000)
    book.take(7, 2_000, 2_000, 100.0 + OVERTAKEN_S + 0.1)
    book.tell(7, 0.1, None, 101.5)
    assert (book.queued_tokens(101.5), book.waiting(101.5)) == (0, 0), "its tell was lost"


def test_a_lost_take_expires_and_a_long_queue_does_not() -> None:
    lost, long = book_with(1_000), book_with(*[100_000] * 5)
    late = 100.0 + EXPIRE_S + 1.0
    assert lost.waiting(late) == 0
    assert long.waiting(late) == 5


def test_waiting_requests_that_nobody_announced_count_as_well() -> None:
    book = book_with(4_000, 4_000)
    book.sampled(Sample(100.0, running=3, waiting=2))
    assert book.queued_tokens(100.0) == 8_000, "those are the ones that were taken"
    book.sampled(Sample(100.0, running=3, waiting=5))
    assert book.queued_tokens(100.0) == 8_000 + 3 * 4_000


def test_who_waited_when_the_engine_was_last_seen_is_not_waited_for_for_ever() -> None:
    book = Book(prior=1e-3)
    book.take(1, 2_000, 2_000, 100.0)
    book.sampled(Sample(100.5, running=3, waiting=9, queued_tokens=50_000))
    assert (book.waiting(101.0), book.queued_tokens(101.0)) == (9, 50_000)
    assert book.waiting(103.0) == 1, "nobody has looked for a while: what clients said since is all that is known"
    assert 0 < book.queued_tokens(103.0) <= 2_000
    book.sampled(Sample(103.5, running=3, waiting=9, queued_tokens=50_000))
    assert book.waiting(103.6) == 9


def test_a_bid_says_how_old_the_engines_own_counts_are() -> None:
    desk = Desk("gpu-0")
    desk.sampled(Sample(100.0, running=3))
    assert desk.bid(1, 100, (), 100.4).age == pytest.approx(0.4)
    assert desk.bid(2, 100, (), 130.0).age == pytest.approx(30.0)


def test_asks_that_are_never_taken_and_a_flood_of_takes_leave_an_agent_small() -> None:
    """Its 60 MiB have room for 16 beside what a process takes in any case: asks hold hashes, takes are remembered."""
    book, replays = Book(), Replays()
    tracemalloc.start()
    for number in range(21_000):
        book.ask(number << 40, 5_000, tuple(range(number << 40, (number << 40) + 8)), 1.0)
    for number in range(110_000):
        replays.fresh(number << 50, 1_000_000 + number // 50, 1_000_000 + number // 50)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 16 * 2**20, f"{held / 2**20:.1f} MiB"


def test_a7_the_memory_of_prefixes_is_as_large_as_the_cache_with_its_second_tier() -> None:
    desk = Desk("gpu-0", kv_tokens=100_000, dram_tokens=50_000)
    prefixes = desk.book.prefixes
    for number in range(200_000):
        prefixes.add((number * 3, number * 3 + 1), 500, 1.0)
        assert len(prefixes) <= 2 * 150_000 // 500
    assert 550 <= len(prefixes) <= 600
    assert len(prefixes._used) == len(prefixes), "nothing is left of what was forgotten"
    assert prefixes.matched((3 * 199_999, 0)) > 0
    assert prefixes.matched((3 * 199_000, 0)) == 0
    desk.sized(200_000)
    assert prefixes.capacity == 250_000, "what the engine says, and the tier that it does not count"
    desk.restarted(2)
    assert (len(prefixes), desk.epoch) == (0, 2)


def test_tokens_that_the_engine_queues_and_takes_count_once() -> None:
    """By the larger of both: a take that the engine has seen is in its count already."""
    book = Book()
    for id_ in range(3):
        book.take(id_, 1_000, 1_000, 100.0)
    for said, queued in ((500, 3_000), (9_000, 9_000)):
        book.sampled(Sample(100.0, waiting=1, queued_tokens=said))
        assert book.queued_tokens(100.0) == queued
    book.sampled(Sample(100.0, waiting=1))
    assert book.waiting(100.0) == 3
    book.sampled(Sample(100.0, waiting=8))
    assert book.waiting(100.0) == 8


def test_a_bid_says_the_rate_that_clients_told() -> None:
    desk, now = Desk("gpu-0", gpu="H100"), 100.0
    before = desk.bid(1_000, 1, (), now).prefill_us
    for id_ in range(60):
        desk.take(id_, 10_000, 10_000, now)
        desk.tell(id_, 2.0, None, now + 2.0)
        now += 10.0
    assert before < 100_000
    assert desk.bid(1_001, 1, (), now).prefill_us == pytest.approx(200_000, rel=0.2)


def test_what_an_engine_had_before_we_came_is_not_known_until_it_must_be_gone() -> None:
    prefixes = Prefixes(20_000)
    assert prefixes.knows((1, 2, 3)), "of a new engine all is known"
    prefixes.met(100.0)
    assert not prefixes.knows((1, 2, 3))
    prefixes.add((1, 2), 2_048, 101.0)
    assert prefixes.knows((1, 2)), "no more of this can be cached"
    assert not prefixes.knows((1, 2, 3)), "of that there may be"
    others = 0
    while not prefixes.knows((1, 2, 3)):
        others += 1
        prefixes.add((1, 2), 2_048, 102.0)  # the same again takes no room
        prefixes.add((1, 10 + others), 2_048, 102.0)
    assert others == math.ceil((20_000 - 2_048) / (2_048 - BLOCK_TOKENS))


@pytest.mark.parametrize("way", ["cleared", "forgotten", "too little"])
def test_what_an_engine_says_itself_of_its_cache_counts_at_once(way: str) -> None:
    prefixes = Prefixes(20_000)
    prefixes.met(100.0)
    if way == "cleared":
        prefixes.clear()
    else:
        prefixes.forget_before(100.0 if way == "forgotten" else 99.0)
    assert prefixes.knows((1,)) is (way != "too little")
