"""KV cache events: both layouts that engines send, what is concluded from them, and every way in which they can fail."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
from typing import TYPE_CHECKING, Any, Self

import msgpack
import pytest
import zmq
from agent.process import AgentProcess
from hypothesis import given
from hypothesis import strategies as st

from gpuroute.agent import kv_feed
from gpuroute.agent.desk import Desk
from gpuroute.agent.kv_events import MAX_TIERS, Batch, Blocks, Cleared, Garbled, Removed, Stored, read_batch
from gpuroute.agent.kv_feed import END, Feed, FeedState, Source
from gpuroute.testing import GpuServer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

pytestmark = pytest.mark.real_time

NOW = 1_000.0
EPOCH = 1_700_000_000.0
HASHES = (11, 22, 33)


def stored(*hashes: int | bytes, parent: int | bytes | None = None, size: int = 16, **more: object) -> dict[str, Any]:
    event = {"type": "BlockStored", "block_hashes": list(hashes), "parent_block_hash": parent}
    return {**event, "token_ids": [0] * size * len(hashes), "block_size": size, "medium": "GPU", **more}


def removed(*hashes: int | bytes, **more: object) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", **more}


def message(*events: object, at: float = EPOCH) -> bytes:
    return bytes(msgpack.packb([at, list(events), 0]))


class Bench:
    """A feed on a desk, and a clock."""

    def __init__(self) -> None:
        self.desk = Desk("gpu-0", kv_tokens=100_000)
        self.feed = Feed(Source(events="ipc:///nowhere"), self.desk)
        self.number = -1
        self.now = NOW

    def hear(self, *events: object, after: float = 1.0, number: int | None = None) -> None:
        self.now += after
        self.number = self.number + 1 if number is None else number
        self.feed.heard(self.number, message(*events, at=EPOCH + self.now), self.now, EPOCH + self.now)

    def use(self, id_: int, hashes: Sequence[int] = HASHES) -> None:
        """A call asks, is taken and told now."""
        self.desk.bid(id_, 1_000, hashes, self.now)
        self.desk.take(id_, 1_000, 1_000, self.now)
        self.desk.tell(id_, 0.1, None, self.now)

    def matched(self, hashes: Sequence[int] = HASHES) -> int:
        matched = self.desk.bid(999, 100_000, hashes, self.now).matched_tokens
        assert matched is not None
        return matched


# ------------------------------------------------------------------------------------------ layouts


def test_both_layouts_say_the_same() -> None:
    arrays = [
        5.0,
        [
            ["BlockStored", [1, 2], 9, [0] * 32, 16, None, "CPU"],
            ["BlockStored", [b"h"], None, [0], 1, None],
            ["BlockRemoved", [1], "CPU"],
            ["BlockRemoved", [2]],
            ["AllBlocksCleared"],
            ["BlockDreamt", [1]],
        ],
    ]
    maps = [
        5.0,
        [
            stored(1, 2, parent=9, medium="CPU", lora_name=None, group_idx=0, kv_cache_spec_kind="full_attention"),
            {"type": "BlockStored", "block_hashes": [b"h"], "parent_block_hash": None, "token_ids": [0], "block_size": 1},
            removed(1, medium="CPU", group_idx=0),
            {"type": "BlockRemoved", "block_hashes": [2], "medium": None},
            {"type": "AllBlocksCleared"},
            {"type": "BlockDreamt"},
            stored(7, locality="REMOTE"),
        ],
        3,
    ]
    expected = (
        Stored(((0, 1), (0, 2)), (0, 9), 16, "CPU"),
        Stored(((0, b"h"),), None, 1, "GPU"),
        Removed(((0, 1),), "CPU"),
        Removed(((0, 2),), "GPU"),
        Cleared(),
    )
    assert read_batch(arrays) == read_batch(maps) == Batch(5.0, expected)


@pytest.mark.parametrize(
    "data",
    [None, 7, "text", [], [1.0], [None, []], ["x", []], [float("nan"), []], [1.0, 7], [1.0, [{}]], [1.0, [[]]],
     [1.0, [{"type": "BlockStored"}]], [1.0, [["BlockRemoved", [[1]]]]], [1.0, [["BlockRemoved", 7]]],
     [1.0, [stored(1, group_idx=[1])]], [1.0, [removed(1, group_idx={"a": 1})]],
     [1.0, [stored(1) | {"block_size": math.inf}]]],
)  # fmt: skip
def test_what_is_no_batch_is_garbled(data: object) -> None:
    with pytest.raises(Garbled):
        read_batch(data)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=20), inner, max_size=4),
    max_leaves=20,
)
KINDS = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"])
EVENTS = st.lists(st.lists(VALUES, max_size=6).map(lambda tail: tail), max_size=4)


@given(
    st.one_of(
        st.binary(max_size=200),
        VALUES.map(msgpack.packb),
        st.tuples(st.floats(), st.lists(st.tuples(KINDS, VALUES, VALUES, VALUES, VALUES), max_size=3)).map(msgpack.packb),
        st.tuples(
            st.floats(),
            st.lists(st.fixed_dictionaries({"type": KINDS, "block_hashes": VALUES, "group_idx": VALUES}), max_size=3),
        ).map(msgpack.packb),
    )
)
def test_garbage_never_ends_a_feed(data: bytes) -> None:
    bench = Bench()
    bench.feed.heard(0, data, NOW, EPOCH)
    bench.number = 0
    bench.hear(stored(1, 2, 3))
    assert bench.feed.state is FeedState.FOLLOWING
    assert bench.feed.garbled + bench.feed.batches == 2


# ------------------------------------------------------------------------------------------ conclusions


def test_a_prefix_is_gone_when_younger_blocks_leave() -> None:
    bench = Bench()
    bench.hear(stored(*range(8)))
    bench.use(1)
    bench.hear(stored(*range(100, 108)), after=10.0)
    bench.hear(removed(*range(8)))
    assert bench.matched() == 1_024, "what left came before the prefix was used"
    bench.hear(removed(*range(100, 108)))
    assert bench.matched() == 0


def test_a_prefix_that_is_used_again_stays() -> None:
    bench = Bench()
    bench.hear(stored(1, 2))
    bench.use(1)
    bench.hear(stored(*range(100, 108)), after=10.0)
    bench.use(2)
    bench.hear(removed(*range(100, 108)))
    assert bench.matched() == 1_024


def test_a_told_first_token_is_a_use() -> None:
    bench = Bench()
    bench.hear(stored(1, 2))
    bench.desk.bid(1, 1_000, HASHES, bench.now)
    bench.desk.take(1, 1_000, 1_000, bench.now)
    bench.hear(stored(*range(100, 108)), after=1.0)
    bench.now += 1.0
    bench.desk.tell(1, 2.0, None, bench.now)
    bench.hear(removed(*range(100, 108)))
    assert bench.matched() == 1_024, "it waited in the queue while these came"


def test_while_events_are_followed_our_own_count_forgets_nothing() -> None:
    bench = Bench()
    bench.hear(stored(1))
    for number in range(150):
        bench.use(number, (1_000 + number,))
    assert bench.matched((1_000,)) > 0, "150,000 tokens by our count, in a cache that forgot none of them"
    for number in range(150, 500):
        bench.use(number, (1_000 + number,))
    assert bench.matched((1_000,)) == 0, "but memory is bounded"


def test_blocks_of_generation_do_not_count() -> None:
    """They come long after their prompt and leave before it."""
    bench = Bench()
    bench.hear(stored(1, 2, 3, 4, 5))
    bench.use(1)
    for number in range(10):
        bench.hear(stored(50 + number, parent=49 + number if number else 5), after=5.0)
    bench.hear(removed(*range(50, 60)))
    assert bench.matched() == 1_024
    pages = [stored(70 + number, parent=69 + number if number else None) for number in range(8)]
    bench.hear(*pages, after=5.0)
    bench.hear(removed(*range(70, 78)))
    assert bench.matched() == 0, "but a prompt whose pages are events of their own does"


def test_single_strays_mean_nothing() -> None:
    bench = Bench()
    bench.hear(stored(*range(20)))
    bench.use(1)
    bench.hear(stored(100, 101, 102, 103), after=10.0)
    bench.hear(removed(*range(13)))
    bench.hear(removed(101, 102, 103))
    assert bench.matched() == 1_024


def test_what_is_still_in_another_tier_is_not_gone() -> None:
    bench = Bench()
    bench.hear(stored(1, 2))
    bench.use(1)
    blocks = range(100, 108)
    bench.hear(stored(*blocks), stored(*blocks, medium="CPU"), after=10.0)
    bench.hear(removed(*blocks))
    assert bench.matched() == 1_024
    bench.hear(removed(*blocks, medium="CPU"))
    assert bench.matched() == 0


def test_tiers_without_end_are_not_kept() -> None:
    blocks = Blocks()
    for number in range(100):
        blocks.apply(read_batch([1.0, [stored(number, medium=f"tier-{number}"), stored(number + 1_000)]]), 1.0)
    assert len(blocks) == 100, "those of the GPU are"
    assert len(blocks._tiers) <= MAX_TIERS


def test_windows_and_states_that_are_used_up_are_not_forgetting() -> None:
    bench = Bench()
    bench.hear(stored(1, 2))
    bench.use(1)
    bench.hear(stored(*range(100, 108), group_idx=1, kv_cache_spec_kind="sliding_window"), after=10.0)
    bench.hear(removed(*range(100, 108), group_idx=1))
    assert bench.matched() == 1_024
    assert len(bench.feed.blocks) == 2


def test_a_cleared_cache_is_empty() -> None:
    bench = Bench()
    bench.hear(stored(1, 2))
    bench.use(1)
    bench.hear({"type": "AllBlocksCleared"})
    assert (bench.matched(), len(bench.feed.blocks)) == (0, 0)


def test_numbers_that_begin_again_are_a_new_engine() -> None:
    bench = Bench()
    bench.hear(stored(1, 2), number=40)
    bench.use(1)
    bench.hear(stored(5), number=0)
    assert (bench.matched(), bench.feed.restarts, len(bench.feed.blocks)) == (0, 1, 1)


@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=200))
def test_blocks_are_counted_as_they_come_and_go(steps: list[tuple[int, bool]]) -> None:
    blocks, held = Blocks(), set()
    for moment, (number, comes) in enumerate(steps):
        event = Stored(((0, number),), None, 16, "GPU") if comes else Removed(((0, number),), "GPU")
        blocks.apply(Batch(0.0, (event,)), float(moment))
        held.add(number) if comes else held.discard(number)
        assert len(blocks) == len(held)
        assert blocks.gone_before <= moment


# ------------------------------------------------------------------------------------------ failures


def test_lost_events_end_the_trust_until_all_that_is_older_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.hear(stored(1, 2))
    assert bench.desk.book.prefixes.followed
    bench.feed.gap(3, bench.now)
    assert (bench.feed.state, bench.feed.lost) == (FeedState.GAP, 3)
    assert not bench.desk.book.prefixes.followed
    assert "gap" in bench.feed.trouble
    assert "3 messages are lost" in caplog.text
    bench.hear(stored(*range(10, 18)), number=9)
    assert bench.feed.state is FeedState.GAP
    bench.hear(removed(*range(10, 18)))
    assert (bench.feed.state, bench.feed.trouble) == (FeedState.FOLLOWING, "")


def test_an_engine_that_computes_and_publishes_nothing_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    feed = bench.feed
    feed._heard_at = NOW
    feed.looked({"prompt_tokens": 50_000.0}, NOW + 1)
    feed.looked({"prompt_tokens": 55_000.0}, NOW + 60)
    assert feed.state is FeedState.WAITING, "that was little work"
    feed.looked({"prompt_tokens": 61_000.0}, NOW + 61)
    assert feed.state is FeedState.SILENT
    assert "silent" in feed.trouble
    assert "prefixes are counted from takes" in caplog.text
    bench.now = NOW + 62
    bench.hear(stored(1))
    assert feed.state is FeedState.FOLLOWING
    feed.looked({"prompt_tokens": 99_000.0}, NOW + 70)
    feed.looked({"prompt_tokens": 120_000.0}, NOW + 71)
    assert feed.state is FeedState.FOLLOWING, "the last event is not long ago"
    feed.looked({}, NOW + 100)
    assert feed.state is FeedState.FOLLOWING, "an engine that counts nothing is not judged"


def test_a_missing_package_is_said_and_not_fatal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench()
    monkeypatch.setitem(sys.modules, "zmq", None)
    asyncio.run(bench.feed.run())
    assert bench.feed.state is FeedState.UNAVAILABLE
    assert "gpuroute[kv-events]" in caplog.text


def test_an_address_that_cannot_be_is_said_and_not_fatal(caplog: pytest.LogCaptureFixture) -> None:
    feed = Feed(Source(events="listen=ipc:///no/such/directory/kv.sock"), Desk("gpu-0"))
    asyncio.run(feed.run())
    assert feed.state is FeedState.UNAVAILABLE
    assert "/no/such/directory" in caplog.text


# ------------------------------------------------------------------------------------------ over real sockets


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who replays may be held up by a busy machine."""
    monkeypatch.setattr(kv_feed, "REPLAY_S", 60.0)


class Publisher:
    """What vLLM does: numbered messages on PUB, and on ROUTER those of the past. `topics`: newer versions repeat it."""

    def __init__(self, directory: Path, *, topics: bool = True) -> None:
        self.source = Source(events=f"ipc://{directory}/kv", replay=f"ipc://{directory}/replay", topic="kv")
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.XPUB)
        self._pub.bind(self.source.events)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(self.source.replay)
        self._topics = topics
        self.sent: list[bytes] = []
        self.first_kept = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve)

    def wait_for_subscriber(self) -> None:
        assert self._pub.poll(60_000), "nobody subscribes"
        self._pub.recv()

    def publish(self, *events: object, lose: bool = False) -> None:
        data = message(*events)
        if not lose:
            self._pub.send_multipart([b"kv", len(self.sent).to_bytes(8, "big"), data])
        self.sent.append(data)

    def _serve(self) -> None:
        while not self._stop.is_set():
            if self._router.poll(50):
                client, _, first = self._router.recv_multipart()
                for number in range(max(self.first_kept, int.from_bytes(first, "big")), len(self.sent)):
                    frames = [b"kv"] * self._topics + [number.to_bytes(8, "big"), self.sent[number]]
                    self._router.send_multipart([client, b"", *frames])
                self._router.send_multipart([client, b"", *[b""] * self._topics, END.to_bytes(8, "big"), b""])

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)


class Follower:
    """A feed on a loop of its own."""

    def __init__(self, source: Source) -> None:
        self.feed = Feed(source, Desk("gpu-0"))
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))

    async def _main(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.ensure_future(self.feed.run())
        await asyncio.wait([self._task])

    def __enter__(self) -> Feed:
        self._thread.start()
        return self.feed

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()


@pytest.mark.parametrize("topics", [True, False])
def test_missed_events_are_had_again(topics: bool, tmp_path: Path, eventually: Callable[..., None]) -> None:
    with Publisher(tmp_path, topics=topics) as publisher:
        for number in range(3):
            publisher.publish(stored(number), lose=True)  # before the agent was there
        with Follower(publisher.source) as feed:
            publisher.wait_for_subscriber()
            publisher.publish(stored(3))
            eventually(lambda: len(feed.blocks) == 4, "the past is known")
            assert (feed.state, feed.replayed, feed.lost) == (FeedState.FOLLOWING, 3, 0)
            publisher.publish(stored(4), lose=True)
            publisher.publish(removed(0), lose=True)
            publisher.publish(stored(5))
            eventually(lambda: (feed.batches, len(feed.blocks)) == (7, 5), "the gap is filled")
            assert (feed.replayed, feed.lost) == (5, 0)
            assert feed.state is FeedState.FOLLOWING


def test_what_is_not_kept_for_replay_is_lost(tmp_path: Path, eventually: Callable[..., None]) -> None:
    with Publisher(tmp_path) as publisher, Follower(publisher.source) as feed:
        publisher.wait_for_subscriber()
        publisher.publish(stored(0))
        eventually(lambda: feed.state is FeedState.FOLLOWING, "it follows")
        publisher.first_kept = 9
        publisher.publish(stored(1), lose=True)
        publisher.publish(stored(2))
        eventually(lambda: feed.state is FeedState.GAP, "the gap is seen")
        assert feed.lost == 1


def test_an_engine_that_dies_and_returns_is_followed_again(tmp_path: Path, eventually: Callable[..., None]) -> None:
    with Publisher(tmp_path) as publisher, Follower(publisher.source) as feed:
        publisher.wait_for_subscriber()
        for number in range(3):
            publisher.publish(stored(number))
        eventually(lambda: len(feed.blocks) == 3, "it follows")
        feed._desk.book.prefixes.add([1], 1_000)
        publisher.__exit__()
        with Publisher(tmp_path) as successor:
            successor.wait_for_subscriber()
            successor.publish(stored(9))
            eventually(lambda: feed.restarts == 1, "numbers begin again")
            eventually(lambda: feed.state is FeedState.FOLLOWING and len(feed.blocks) == 1, "and are followed")
            assert len(feed._desk.book.prefixes) == 0, "its cache is empty"


def test_a_replay_that_nobody_serves_is_not_waited_for_long(
    tmp_path: Path, eventually: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_feed, "REPLAY_S", 0.2)
    with Publisher(tmp_path) as publisher:
        source = Source(events=publisher.source.events, replay=f"ipc://{tmp_path}/nobody")
        with Follower(source) as feed:
            publisher.wait_for_subscriber()
            publisher.publish(stored(0), lose=True)
            publisher.publish(stored(1))
            eventually(lambda: feed.batches == 1, "events go on")
            publisher.publish(stored(2), lose=True)
            publisher.publish(stored(3))
            eventually(lambda: feed.state is FeedState.GAP, "the gap is seen")


def test_the_command_follows_events_and_says_when_it_does_not(tmp_path: Path, eventually: Callable[..., None]) -> None:
    options = ["--warmup", "1", "--id", "gpu-0", "--kv-events-topic", "kv"]
    with GpuServer(time_scale=0.02) as server, Publisher(tmp_path) as publisher:
        source = publisher.source
        events = ["--kv-events", source.events, "--kv-events-replay", source.replay]
        with AgentProcess("--url", server.url, *options, *events) as agent:
            publisher.wait_for_subscriber()
            eventually(lambda: agent.load().get("kv_events"), "the engine is known")
            assert agent.load()["kv_events"]["state"] == "waiting"
            publisher.publish(stored(1, 2, 3))
            eventually(lambda: agent.load()["kv_events"]["state"] == "following", "events are followed")
            assert 'gpuroute_agent_kv_events_followed{endpoint="gpu-0"} 1' in agent.page("/metrics").splitlines()
            assert agent.page("/healthz") == "ok\n"
            publisher.first_kept = 9
            publisher.publish(stored(4), lose=True)
            publisher.publish(stored(5))
            eventually(lambda: agent.load()["kv_events"]["state"] == "gap", "the gap is seen")
            assert 'gpuroute_agent_kv_events_followed{endpoint="gpu-0"} 0' in agent.page("/metrics").splitlines()
            assert agent.page("/healthz") == "ok\ngpu-0: KV cache events: gap\n"
            agent.terminate()
            _, err = agent.process.communicate(timeout=90)
            assert "1 messages are lost; prefixes are counted from takes" in err
