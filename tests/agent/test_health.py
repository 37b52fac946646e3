"""Busy, hung, gone, or another engine than before."""

from __future__ import annotations

import asyncio
import time

import pytest

from gpuroute.agent.desk import Desk
from gpuroute.agent.fetch import GONE, Reply
from gpuroute.agent.health import SILENT_LIMIT, Health, Rates, Seen
from gpuroute.agent.warmup import warm_up
from gpuroute.agent.watch import UNSAID_S, Watch
from gpuroute.core.asking import EngineState
from gpuroute.engines.catalog import engine_of

NOW = 1_800_000_000
IDLE = Seen(0, 0, 0.0, {"steps": 5.0})


def seen(running: float = 1, waiting: float = 0, kv: float = 0.1, **counters: float) -> Seen:
    return Seen(running, waiting, kv, counters or {"steps": 5.0})


def watched(*looks: Seen, hung_after: float = 10.0) -> Health:
    """Health after these looks, two a second."""
    health = Health(hung_after)
    for number, look in enumerate(looks):
        health.answered(look, number / 2)
    return health


def test_an_engine_that_works_is_not_hung_however_long_it_is_busy() -> None:
    health = watched(*(seen(8, 90, steps=float(n)) for n in range(200)))
    assert not health.hung(100.0)


def test_work_that_stands_still_is_hung_after_a_while() -> None:
    health = watched(*(seen(8, 1) for _ in range(41)))
    assert health.hung(20.0)
    assert not watched(*(seen(8, 1) for _ in range(15))).hung(7.0)


def test_more_requests_that_wait_are_no_progress() -> None:
    assert watched(*(seen(8, n) for n in range(41))).hung(20.0)
    assert watched(*(seen(8, n, steps=1.0, rejected=float(n)) for n in range(41))).hung(20.0)


@pytest.mark.parametrize(
    "moving",
    [
        lambda n: seen(8, 0, kv=n / 100),
        lambda n: seen(50 - n, 0),
        lambda n: seen(8, 0, generated_tokens=float(n)),
    ],
    ids=["cache fills", "requests end", "tokens come"],
)
def test_any_sign_of_work_is_progress(moving: object) -> None:
    assert not watched(*(moving(n) for n in range(41))).hung(20.0)


def test_an_idle_engine_is_not_hung() -> None:
    assert not watched(*(IDLE for _ in range(100))).hung(50.0)


def test_an_engine_that_counts_nothing_is_not_judged() -> None:
    assert not watched(*(Seen(3, 1, 0.0, {}) for _ in range(100))).hung(50.0)


def test_a_first_token_that_a_client_told_is_progress() -> None:
    health = Health(10.0)
    for number in range(60):
        health.answered(seen(), number / 2, told_at=25.0)
    assert not health.hung(30.0)
    assert health.hung(36.0)


def test_silence_is_hung_and_a_closed_port_is_gone() -> None:
    health = watched(IDLE)
    for _ in range(SILENT_LIMIT):
        assert not health.hung(1.0)
        health.unanswered()
    assert health.hung(1.0)
    health.answered(IDLE, 2.0)
    assert not health.hung(2.0)
    health.refused()
    assert health.gone
    assert not health.hung(3.0)


def test_a_new_process_is_noticed_by_its_counters_or_by_its_absence() -> None:
    health = watched(seen(steps=100.0, cached_tokens=50.0))
    assert not health.answered(seen(steps=101.0, cached_tokens=0.0), 1.0)
    assert health.answered(seen(steps=3.0), 2.0)
    health.refused()
    assert health.answered(seen(steps=900.0), 3.0)
    assert health.restarts == 2
    assert not health.answered(seen(steps=901.0), 4.0)


def test_the_first_sight_of_an_engine_is_no_restart() -> None:
    health = Health()
    assert health.gone
    health.refused()
    assert not health.answered(IDLE, 0.0)


def test_rates_are_those_of_working_time() -> None:
    rates = Rates()
    for second in range(5):
        rates.add({"prompt_tokens": 50_000.0 * second, "generated_tokens": 800.0 * second}, float(second))
    rates.add({"prompt_tokens": 200_000.0, "generated_tokens": 3_200.0}, 9.0)
    assert rates.prefill == pytest.approx(50_000)
    assert rates.generation == pytest.approx(800)
    assert rates.best_prefill == pytest.approx(50_000, rel=0.01)


@pytest.mark.parametrize(
    ("health", "knock", "leaving"),
    [
        (200, (200, b"{}"), False),
        (503, (200, b"{}"), True),
        (200, (500, b"cannot schedule new futures after shutdown"), True),
        (200, (500, b"broken"), False),
        (200, (404, b"Not Found"), False),
        (599, (599, b""), None),
        (200, (599, b""), None),
        (0, (0, b""), None),
    ],
)
def test_an_engine_that_takes_no_more_calls_says_so_and_silence_says_nothing(
    health: int, knock: tuple[int, bytes], leaving: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    replies = {"/health": Reply(health), "/tokenize": Reply(*knock), "/metrics": Reply(200, b"vllm:x 1\n")}

    async def fetched(_: str, path: str, **__: object) -> Reply:
        return replies.get(path, Reply(404))

    monkeypatch.setattr("gpuroute.agent.watch.fetch", fetched)
    for before in (False, True):
        watch = Watch("http://engine", engine_of("vllm"), Desk("gpu-0"))
        watch.warm, watch.leaving = True, before
        asyncio.run(watch.look())
        assert watch.leaving is (before if leaving is None else leaving)
        assert (watch.desk.state is EngineState.DRAINING) is watch.leaving
    watch.warm = False
    asyncio.run(watch.look())
    assert not watch.leaving, "what was never ready is not leaving"


def test_an_engine_that_owes_its_page_of_metrics_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    page = b"vllm:num_requests_running 5\nvllm:num_requests_waiting 3\nvllm:generation_tokens_total 7\n"
    replies = {"/health": Reply(200), "/tokenize": Reply(200), "/metrics": Reply(200, page)}

    async def fetched(_: str, path: str, **__: object) -> Reply:
        return replies.get(path, Reply(404))

    monkeypatch.setattr("gpuroute.agent.watch.fetch", fetched)
    watch = Watch("http://engine", engine_of("vllm"), Desk("gpu-0"))
    watch.warm = True
    asyncio.run(watch.look())
    sample = watch.desk.book.sample
    assert (sample.running, sample.waiting) == (5, 3)
    replies["/metrics"] = Reply(599)
    for _ in range(SILENT_LIMIT + 1):
        asyncio.run(watch.look())
    assert watch.desk.book.sample is sample, "what it said last, and as old as that is"
    assert watch.desk.state is EngineState.READY, "its health check answers"
    assert not watch.idle, "draining waits for what ran"
    watch._said_at -= 2 * UNSAID_S
    asyncio.run(watch.look())
    assert not watch.counts, "it counts no longer: what clients announce is all that is known"
    assert not watch.idle
    assert (watch.desk.book.sample.running, watch.desk.book.sample.waiting) == (0, 0)
    assert watch.desk.bid(1, 100, (), time.monotonic()).age > UNSAID_S, "and bids say so"


def test_an_engine_that_comes_back_without_its_metrics_is_there() -> None:
    health = watched(seen())
    health.refused()
    health.present(60.0)
    assert not health.gone
    assert not health.hung(69.0)
    assert health.answered(seen(), 70.0), "and another process, as soon as it says so"


@pytest.mark.parametrize(
    ("before", "after", "gone", "restarted"),
    [
        (100.0, 160.0, False, True),  # too quick for a look between
        (100.0, 100.0, True, False),  # a connection was refused once
        (100.0, 101.0, False, False),  # worked out by a clock that was corrected
        (100.0, 101.0, True, True),
        (0.0, 100.0, False, False),
        (0.0, 100.0, True, True),
        (100.0, 0.0, True, True),
    ],
)
def test_an_engine_that_says_when_it_began_is_believed(before: float, after: float, gone: bool, restarted: bool) -> None:
    health = watched(IDLE._replace(started=before))
    if gone:
        health.refused()
    assert health.answered(IDLE._replace(started=after), 70.0) is restarted


def test_counters_that_shrink_are_a_restart_whatever_the_process_says() -> None:
    health = watched(IDLE._replace(started=100.0))
    assert health.answered(IDLE._replace(started=100.0, counters={"steps": 4.0}), 70.0)


IDLE_PAGE = "vllm:num_requests_running 0"
COLD, WARM = "vllm:prompt_tokens_total 0", "vllm:prompt_tokens_total 900"


@pytest.mark.parametrize(
    ("pages", "epoch", "known"),
    [
        ([COLD + "\nprocess_start_time_seconds 5e8"], 500_000_000, True),
        ([WARM + "\nprocess_start_time_seconds 5e8"], 500_000_000, False),
        (["", WARM + "\nprocess_start_time_seconds 5e8"], 500_000_000, False),
        ([WARM], 0, False),
        ([COLD], NOW, True),
        (["", WARM], NOW, True),  # it was seen to come
        ([IDLE_PAGE], 0, False),
        ([IDLE_PAGE, f"{IDLE_PAGE}\n{WARM}\nprocess_start_time_seconds 5e8"], 500_000_000, False),
        ([WARM, COLD], NOW, True),
        ([WARM + "\nprocess_start_time_seconds 5e8", COLD + "\nprocess_start_time_seconds 6e8"], 600_000_000, True),
        ([WARM + "\nprocess_start_time_seconds 5e8", COLD + "\nprocess_start_time_seconds 5e8"], NOW, True),
        ([WARM + "\nprocess_start_time_seconds 5e8", "", WARM + "\nprocess_start_time_seconds 5e8"], 500_000_000, False),
    ],
)
def test_what_an_agent_says_of_an_engine_that_it_meets(
    pages: list[str], epoch: int, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`known`: that nothing of a prompt is cached there, which is true of new engines only."""
    monkeypatch.setattr("gpuroute.agent.watch.time.time", lambda: float(NOW))
    watch = Watch("http://engine", engine_of("vllm"), Desk("gpu-0"))
    for page in pages:

        async def fetched(_: str, path: str, page: str = page, **__: object) -> Reply:
            return (Reply(200, f"{page}\n".encode()) if path == "/metrics" else Reply(404)) if page else GONE

        monkeypatch.setattr("gpuroute.agent.watch.fetch", fetched)
        asyncio.run(watch.look())
    bid = watch.desk.bid(1, 9_000, (1, 2, 3), 0.0)
    assert (bid.epoch, bid.matched_tokens) == (epoch, 0 if known else None)


def test_an_engine_behind_an_api_key_is_warmed_up_with_the_headers_of_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    key = {"authorization": "Bearer x"}
    asked: list[tuple[str, object]] = []

    async def fetched(_: str, path: str, *, body: object = None, headers: object = None, **__: object) -> Reply:
        asked.append((path, body["model"] if isinstance(body, dict) else None))
        if headers != key:
            return Reply(401)
        return Reply(200, b'{"data": [{"id": "llama"}]}')

    monkeypatch.setattr("gpuroute.agent.warmup.fetch", fetched)
    watch = Watch("http://engine", engine_of("vllm"), Desk("gpu-0"))
    assert asyncio.run(warm_up(watch, 2, "", key)) == ""
    assert asked == [("/v1/models", None), ("/v1/completions", "llama"), ("/v1/completions", "llama")]


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("http://[::1]:8000", "http://[::1]:8002"),
        ("http://127.0.0.1:8000/base", "http://127.0.0.1:8002"),
        ("https://gpu-7", "https://gpu-7:8002"),
    ],
)
def test_an_engine_that_counts_on_a_port_of_its_own_is_asked_there(
    url: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []

    async def fetched(where: str, path: str, **__: object) -> Reply:
        asked.append((where, path))
        return Reply(200, b"nv_inference_pending_request_count 4\n")

    monkeypatch.setattr("gpuroute.agent.watch.fetch", fetched)
    watch = Watch(url, engine_of("triton"), Desk("gpu-0"), model="m")
    asyncio.run(watch.look())
    assert asked == [(place, "/metrics")]
    assert watch.report.waiting == 4
