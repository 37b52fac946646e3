"""Hung is not busy: silence that is not normal ends an attempt, moves the call, and takes the endpoint out."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

import pytest
from fault_world import PATIENCE_S, TEXT, ask, experienced, signals, vllm, when
from stopwatch import Stopwatch

from gpuroute.core.outcome import Outcome
from gpuroute.errors import StreamStalled

if TYPE_CHECKING:
    from collections.abc import Callable

    from http_caller import Caller

    from gpuroute.testing import GpuServer

pytestmark = pytest.mark.real_time  # a machine that stands still is as silent as a server that hangs


@pytest.fixture
def call(call: Callable[..., Caller]) -> Callable[..., Caller]:
    """Callers that give up after a minute: what the watchdog does, it does well before."""
    return partial(call, patience=PATIENCE_S)


def test_a_hung_engine_is_left_and_after_two_in_a_row_it_is_out(
    gpus: Callable[..., list[GpuServer]], call: Callable[..., Caller], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuroute.core.watchdog.SUSPICIOUS_S", 1e9)  # all nine are on their way before
    servers = gpus(3)
    client = call(kind, vllm(servers))
    experienced(client, floor=2.0)
    servers[0].hang()  # its /health still says 200
    with Stopwatch() as watch:
        assert {answer.status_code for answer in client.many(9, TEXT, json=ask(stream=True))} == {200}
    assert watch.seconds < 4.5
    assert servers[0].state()["received"] == 3  # those that were on their way at once
    assert signals(client)["stalls"] == 3
    assert signals(client)["ejections"] == 1
    assert client.router.snapshot().pools["llama"].endpoints[0].limit == 0


def test_one_silent_call_is_enough_to_be_avoided(
    gpus: Callable[..., list[GpuServer]], call: Callable[..., Caller]
) -> None:
    servers = gpus(3)
    client = call("httpx2-sync", vllm(servers))
    experienced(client)
    servers[0].hang()
    for _ in range(9):
        assert client.post(TEXT, json=ask()).status_code == 200
    assert servers[0].state()["received"] == 1
    assert signals(client)["ejections"] == 0
    silent = client.router.pool("llama").snapshot.states[0]
    silent.silent_since -= 20  # long after that, one call may find out
    servers[0].resume()
    for _ in range(3):
        assert client.post(TEXT, json=ask()).status_code == 200
    assert servers[0].state()["received"] == 2
    assert silent.silent_since is None


def test_the_stalled_attempt_says_so_and_nothing_was_delivered_twice(
    gpus: Callable[..., list[GpuServer]], call: Callable[..., Caller], kind: str
) -> None:
    servers = gpus(2)
    client = call(kind, vllm(servers))
    experienced(client)
    servers[0].hang()
    with Stopwatch() as watch:
        response = client.open(TEXT, json=ask(), headers={"x-request-id": "one"})
        client.read(response)
    first, second = response.extensions["gpuroute"]["attempts"]
    assert (first["endpoint"], first["outcome"]) == ("gpu-0", Outcome.TIMED_OUT.label)
    silent = re.fullmatch(r"silent for ([\d.]+) s", first["reason"])
    assert silent is not None
    assert 0.3 <= float(silent[1]) < 0.3 + watch.taken + 1
    assert second["endpoint"] == "gpu-1"
    assert servers[1].last_request.header("x-gpuroute-attempt") == "2"
    assert servers[0].last_request.header("x-gpuroute-attempt") is None


def test_a_stream_that_falls_silent_is_stream_stalled_with_what_came(
    gpus: Callable[..., list[GpuServer]], call: Callable[..., Caller], kind: str
) -> None:
    servers = gpus(2)
    client = call(kind, vllm(servers))
    experienced(client, floor=0.6, first=30.0)
    servers[0].stall_mid_stream(3)
    with pytest.raises(StreamStalled) as caught:
        client.read(client.open(TEXT, json=ask(10)))
    assert isinstance(caught.value, client.library.HTTPError)
    assert (caught.value.endpoint, caught.value.events_received) == ("gpu-0", 3)
    assert len(caught.value.partial_text) == 3 * 4
    assert servers[1].state()["received"] == 0


def test_the_last_attempt_is_waited_for_longer(
    gpus: Callable[..., list[GpuServer]], call: Callable[..., Caller], kind: str
) -> None:
    """A late answer is better than none: 0.15 s of silence ends a first attempt here, but not one without successor."""
    servers = gpus(1)
    client = call(kind, vllm(servers))
    experienced(client, floor=0.15)
    servers[0].hang()
    with Stopwatch() as watch, pytest.raises(client.library.ReadTimeout):
        client.post(TEXT, json=ask(), extensions={"gpuroute": {"attempts": 1}})
    assert watch.wall > 0.55
    assert watch.seconds < 4


def test_who_nobody_would_take_over_is_not_given_up_in_a_hurry(
    gpus: Callable[..., list[GpuServer]], call: Callable[..., Caller], kind: str
) -> None:
    """Quick first bytes so far are no reason to end a call: the answer comes after many times the usual patience."""
    servers = gpus(1)
    client = call(kind, vllm(servers))
    experienced(client, floor=0.05, last=60.0)
    servers[0].hang()
    clock, live = client.router.clock, client.router.pool("llama").shared.in_flight
    with when(lambda: any(clock() - attempt.started > 0.5 for attempt in tuple(live)), servers[0].resume):
        assert client.post(TEXT, json=ask(), extensions={"gpuroute": {"attempts": 1}}).status_code == 200


def test_a_whole_answer_is_not_judged_by_the_first_bytes_of_streams(
    gpus: Callable[..., list[GpuServer]], call: Callable[..., Caller], kind: str
) -> None:
    servers = gpus(2, time_scale=0.2)
    client = call(kind, vllm(servers))
    experienced(client, floor=0.05)
    answer = client.post(TEXT, json=ask(200, stream=False))  # some 0.3 s before its first byte
    assert answer.json()["usage"]["completion_tokens"] == 200
    assert signals(client)["stalls"] == 0


def test_when_a_third_of_the_pool_is_silent_that_is_saturation(
    gpus: Callable[..., list[GpuServer]], call: Callable[..., Caller]
) -> None:
    servers = gpus(3)
    client = call("httpx2-sync", vllm(servers))
    experienced(client)
    pool = client.router.pool("llama")
    attempt = client.router.call("llama").next_attempt(client.router.clock())
    assert pool.rules.watchdog.first_byte(attempt, 3) < 1
    pool.shared.stalling.update(pool.snapshot.states[:2])
    assert pool.rules.watchdog.first_byte(attempt, 3) == float("inf")
    attempt.finish(Outcome.CANCELLED, client.router.clock())


def test_off_means_the_clients_own_timeouts(
    gpus: Callable[..., list[GpuServer]], call: Callable[..., Caller], kind: str
) -> None:
    servers = gpus(2)
    client = call(kind, vllm(servers), watchdog=False)
    experienced(client)
    servers[0].hang()
    with Stopwatch() as watch:
        answer = client.post(TEXT, json=ask(), timeout=0.6, extensions={"gpuroute": {"attempts": 20}})
        assert answer.status_code == 200
    assert watch.wall >= 0.6
    assert signals(client)["stalls"] == 0


def test_the_deadline_travels_in_a_header_if_it_has_a_name(
    gpus: Callable[..., list[GpuServer]], call: Callable[..., Caller], kind: str
) -> None:
    servers = gpus(1)
    client = call(kind, vllm(servers), deadline_header="x-request-timeout")
    client.post(TEXT, json=ask(), extensions={"gpuroute": {"timeout": 60.0}})
    assert 40_000 < int(servers[0].last_request.header("x-request-timeout")) <= 60_000
    client.post(TEXT, json=ask())
    assert servers[0].last_request.header("x-request-timeout") is None


def test_where_calls_were_overtaken_in_silence_is_avoided_even_when_nobody_waits_there(
    gpus: Callable[..., list[GpuServer]], call: Callable[..., Caller]
) -> None:
    """With hedging the loser leaves soon, so that nothing waits at a hung endpoint when the next call looks at it."""
    client = call("httpx2-sync", vllm(gpus(3)))
    experienced(client, ttft=0.01)
    pool, now = client.router.pool("llama"), client.router.clock()
    state, watchdog = pool.snapshot.states[0], pool.rules.watchdog
    for number in range(2):
        attempt = state.acquire(now + number)
        assert attempt is not None
        attempt.sent(now + number)
        attempt.awaited(now + number)
        pool.stalled(attempt, now + number + 0.2, outpaced=True)
        attempt.finish(Outcome.CANCELLED, now + number + 0.2)
        assert watchdog.suspects(state, now + number + 0.5)
        assert watchdog.suspects(state, now + number + 3) == (number == 1), "one may be chance, and is soon forgotten"
    assert not watchdog.suspects(state, now + 12), "after a while one call may find out"
    answered = state.acquire(now + 12)
    assert answered is not None
    answered.awaited(now + 12)
    answered.finish(Outcome.REJECTED, now + 12.01)  # it says no, but it says something
    assert not watchdog.suspects(state, now + 13)


def test_what_waits_decides_how_long_silence_is_usual(
    gpus: Callable[..., list[GpuServer]], call: Callable[..., Caller]
) -> None:
    client = call("httpx2-sync", vllm(gpus(2)))
    experienced(client, ttft=0.01)
    pool = client.router.pool("llama")
    for _ in range(50):
        pool.shared.history.whole.add(2.0)
    state, watchdog, now = pool.snapshot.states[0], pool.rules.watchdog, client.router.clock()
    whole, stream = state.acquire(now), state.acquire(now)
    assert whole is not None
    assert stream is not None
    whole.whole = True
    whole.awaited(now)
    stream.awaited(now)
    assert not watchdog.suspects(state, now + 0.05)
    assert watchdog.suspects(state, now + 1)
    stream.finish(Outcome.SUCCESS, now + 1)  # a sign of life
    assert not watchdog.suspects(state, now + 3)  # only the whole answer is waited for now
    assert watchdog.suspects(state, now + 8)
    whole.finish(Outcome.SUCCESS, now + 8)
    assert state.silent_since is None


def test_who_waits_at_an_endpoint_that_is_found_to_hang_waits_no_longer(
    gpus: Callable[..., list[GpuServer]], call: Callable[..., Caller], kind: str
) -> None:
    servers = gpus(2)
    client = call(kind, vllm(servers))
    experienced(client)
    pool = client.router.pool("llama")
    servers[0].hang()
    pool.snapshot.states[0].stalls = 2.0  # as two streams have found out meanwhile
    with Stopwatch() as watch:
        assert client.post(TEXT, json=ask(stream=False)).status_code == 200
    assert watch.seconds < 4
    assert servers[0].state()["received"] == 1


def test_streams_cut_at_a_hung_engine_do_not_teach_the_others_there_to_wait_for_ever(
    gpus: Callable[..., list[GpuServer]], call: Callable[..., Caller]
) -> None:
    """Silence is a sample, so five streams that are given up at once would make hours of silence look usual."""
    client = call("httpx2-sync", vllm(gpus(2)))
    pool, now = client.router.pool("llama"), client.router.clock()
    state, watchdog = pool.snapshot.states[0], pool.rules.watchdog
    streams = [state.acquire(now) for _ in range(6)]
    for attempt in streams:
        assert attempt is not None
        attempt.first_token(now + 0.05)
        for piece in range(1, 6):
            attempt.chunk(now + 0.05 + piece * 0.01)
    for attempt in streams[:5]:
        pool.stalled(attempt, now + 5.2)
        attempt.finish(Outcome.TIMED_OUT, now + 5.2)
    assert watchdog.gap(streams[5]) == watchdog.gap_floor_s
    state.stalls = 0.0
    assert watchdog.gap(streams[5]) > 30, "what they taught, which is for a pool that has become slow"
    streams[5].finish(Outcome.SUCCESS, now + 6)
