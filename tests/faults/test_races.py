"""Two attempts of one call, and everything that may happen in the moment in which one of them answers.

Timers, first bytes and failures meet here in every order, held where they must be held, not by chance: no attempt may be
sent once another one answers, and what ends a race is not who is heard first.
"""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from fault_world import TEXT, ask, experienced, signals, vllm

from gpuroute.core.attempt import STREAMING, Attempt
from gpuroute.core.outcome import Outcome
from gpuroute.observe import Observer
from gpuroute.transports.hedging import race_tasks, race_threads
from gpuroute.transports.trips import Trip

if TYPE_CHECKING:
    from collections.abc import Callable

    from http_caller import Caller

    from gpuroute.testing import GpuServer

PATIENCE_S = 30.0


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the attempts that were sent, in that order."""
    numbers: list[int] = []
    request = Trip.request

    def noted(trip: Trip) -> Any:
        numbers.append(trip.attempt.number)
        return request(trip)

    monkeypatch.setattr(Trip, "request", noted)
    return numbers


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """What is called in the very step in which a first byte arrives, before anybody else hears of it."""
    heard: list[Callable[[], object]] = []
    first_token = Attempt.first_token

    def told(attempt: Attempt, now: float) -> None:
        first_token(attempt, now)
        for hear in heard:
            hear()

    monkeypatch.setattr(Attempt, "first_token", told)
    return heard


@pytest.mark.parametrize("stream", [True, False])
def test_a_hedge_that_is_connecting_when_the_first_byte_arrives_is_not_sent(
    gpus: Callable[..., list[GpuServer]],
    call: Callable[..., Caller],
    kind: str,
    stream: bool,
    sent: list[int],
    answered: list[Callable[[], object]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The hedge goes on after the first byte, and before the race hears of it."""
    servers = gpus(2)
    client = call(kind, vllm(servers), hedge=True)
    used_to_speed(client)
    for server in servers:  # both have a connection that waits: a task sends without a pause then
        client.post(TEXT, json=ask(stream=False), headers={"x-gpuroute-hedge": "no"})
        server.reset_counters()
    sent.clear()
    servers[0].answer(200, body='{"from": "first"}')
    hold = _hold_tasks if client.is_async else _hold_threads
    hold(client.transport(), answered, monkeypatch)
    assert client.post(TEXT, json=ask(stream=stream)).json() == {"from": "first"}
    assert signals(client)["hedges"] == 1, "it was picked"
    assert sent == [1]
    assert (servers[0].state()["received"], servers[1].state()["received"]) == (1, 0)


def used_to_speed(client: Caller) -> None:
    """Any first byte is late by what has been seen, and the watchdog sleeps."""
    experienced(client, floor=PATIENCE_S)
    for _ in range(50):
        client.router.pool("llama").shared.history.whole.add(0.01)


def _hold_tasks(transport: Any, answered: list[Callable[[], object]], patch: pytest.MonkeyPatch) -> None:
    connect, accepted, hedging = transport._connection, transport._accepted, asyncio.Event()

    async def held(trip: Trip) -> Any:
        if trip.attempt.number == 2:
            arrived = asyncio.get_running_loop().create_future()
            answered.append(lambda: arrived.done() or arrived.set_result(None))
            hedging.set()
            await arrived  # this task is woken before the one that waits for the first attempt's
        return await connect(trip)

    async def late(trip: Trip, *what: Any) -> Any:
        async with asyncio.timeout(PATIENCE_S):
            await hedging.wait()
        return await accepted(trip, *what)

    patch.setattr(transport, "_connection", held)
    patch.setattr(transport, "_accepted", late)


def _hold_threads(transport: Any, answered: list[Callable[[], object]], patch: pytest.MonkeyPatch) -> None:
    connect, accepted = transport._connection, transport._accepted
    hedging, arrived, tried = threading.Event(), threading.Event(), threading.Event()

    def until_tried() -> None:
        arrived.set()
        assert tried.wait(PATIENCE_S)  # in the first one's thread, so the caller has not heard of it

    def held(trip: Trip) -> Any:
        if trip.attempt.number == 1:
            return connect(trip)
        hedging.set()
        assert arrived.wait(PATIENCE_S)
        try:
            return connect(trip)
        finally:
            tried.set()

    def late(trip: Trip, *what: Any) -> Any:
        assert hedging.wait(PATIENCE_S)
        return accepted(trip, *what)

    answered.append(until_tried)
    patch.setattr(transport, "_connection", held)
    patch.setattr(transport, "_accepted", late)


@pytest.mark.parametrize("kind", ["httpx2-sync", "httpx-sync"])
def test_a_timer_that_fires_when_the_first_byte_is_here_starts_nothing(
    gpus: Callable[..., list[GpuServer]],
    call: Callable[..., Caller],
    kind: str,
    sent: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In threads the timer may fire between the first byte and its way to the caller; tasks have no such moment."""
    servers = gpus(2)
    client = call(kind, vllm(servers), hedge=True)
    used_to_speed(client)
    servers[0].answer(200, body='{"from": "first"}')
    transport, asked, respond = client.transport(), threading.Event(), Trip.respond
    second = transport._hedge

    def late(first: Trip) -> Trip | None:
        try:
            while first.attempt.phase < STREAMING:
                time.sleep(0.001)
            return second(first)
        finally:
            asked.set()

    def slow(trip: Trip, *what: Any) -> Any:
        assert asked.wait(PATIENCE_S)
        return respond(trip, *what)

    monkeypatch.setattr(transport, "_hedge", late)
    monkeypatch.setattr(Trip, "respond", slow)
    assert client.post(TEXT, json=ask()).json() == {"from": "first"}
    assert (sent, signals(client)["hedges"]) == ([1], 0)


def test_the_core_starts_nothing_beside_an_attempt_that_answers_or_has_ended(call: Callable[..., Caller]) -> None:
    client = call("httpx2-sync", vllm([SimpleNamespace(url=f"http://127.0.0.1:{n}") for n in (1, 2, 3)]), hedge=True)
    experienced(client)

    def hedged(before: Callable[[Attempt], object]) -> bool:
        one = client.router.call("llama")
        attempt = one.next_attempt(now)
        before(attempt)
        other = one.hedge(now)
        one.close(now)
        return other is not None

    now = client.router.clock()
    client.router.pool("llama").hedges.floor = 1e6
    assert hedged(lambda attempt: None)
    assert hedged(lambda attempt: attempt.sent(now))
    assert not hedged(lambda attempt: attempt.first_token(now))
    assert not hedged(lambda attempt: attempt.finish(Outcome.SUCCESS, now))
    assert not hedged(lambda attempt: attempt.finish(Outcome.FAILED, now))


# ------------------------------------------------------------------------------------------ who is heard first


class Runner:
    """An attempt as a race sees it."""

    def __init__(self, call: Any, *, lost: bool, again: bool = False) -> None:
        self.call = call
        self.attempt = SimpleNamespace(started=0.0)
        self.settled = SimpleNamespace(clock=lambda: 0.0)
        self.lost = lost
        self.ends_with = again
        self.again = False
        self.hung_up = False

    def lose(self) -> None:
        self.hung_up = True


def race(kind: str, first: Runner, other: Runner, order: list[Runner]) -> Any:
    """Race two; both end at once, and are heard in this order. The runner that was handed out."""
    if kind == "threads":
        return _race_threads(first, other, order)
    return asyncio.run(_race_tasks(first, other, order))


def _race_threads(first: Runner, other: Runner, order: list[Runner]) -> Any:
    threads: dict[Runner, threading.Thread] = {}

    def run(runner: Runner) -> Runner:
        threads[runner] = threading.current_thread()
        runner.again = runner.ends_with
        while len(threads) < 2:
            time.sleep(0.001)
        if runner is order[1]:
            threads[order[0]].join(PATIENCE_S)  # its end was told
        return runner

    return race_threads(first, run, lambda _: other)  # type: ignore[arg-type]


async def _race_tasks(first: Runner, other: Runner, order: list[Runner]) -> Any:
    started: list[Runner] = []
    gate = asyncio.get_running_loop().create_future()

    async def run(runner: Runner) -> Runner:
        started.append(runner)
        if len(started) == 2:
            gate.set_result(None)
        await gate  # both end in one step of the loop
        runner.again = runner.ends_with
        return runner

    return await race_tasks(first, run, lambda _: other)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["threads", "tasks"])
@pytest.mark.parametrize("heard", [0, 1])
@pytest.mark.parametrize("ended_last", [0, 1])
def test_when_both_fail_at_once_the_call_goes_on_whoever_is_heard_first(kind: str, heard: int, ended_last: int) -> None:
    """Who ended last was told that another attempt is due. He may be heard first."""
    for _ in range(20 if kind == "tasks" else 1):  # tasks that end in one step are heard in any order
        one = SimpleNamespace(hedge_after=lambda attempt: 0.0, history=[1, 2], attempts=3)
        runners = [Runner(one, lost=True, again=n == ended_last) for n in (0, 1)]
        race(kind, *runners, [runners[heard], runners[1 - heard]])
        assert runners[0].again, "another attempt was due, and paid for"


@pytest.mark.parametrize("kind", ["threads", "tasks"])
def test_attempts_that_are_used_up_are_used_up(kind: str) -> None:
    one = SimpleNamespace(hedge_after=lambda attempt: 0.0, history=[1, 2], attempts=2)
    runners = [Runner(one, lost=True, again=n == 0) for n in (0, 1)]
    race(kind, *runners, runners)
    assert not runners[0].again


@pytest.mark.parametrize("kind", ["threads", "tasks"])
@pytest.mark.parametrize("heard", [0, 1])
@pytest.mark.parametrize("winner", [0, 1])
def test_who_answers_wins_whoever_is_heard_first(kind: str, heard: int, winner: int) -> None:
    """Who was beaten while it connected may be heard before the one that answers: its end is not the call's."""
    for _ in range(20 if kind == "tasks" else 1):
        one = SimpleNamespace(hedge_after=lambda attempt: 0.0, history=[1, 2], attempts=3)
        runners = [Runner(one, lost=n != winner, again=n != winner) for n in (0, 1)]
        assert race(kind, *runners, [runners[heard], runners[1 - heard]]) is runners[winner]
        assert not runners[0].again


def test_who_was_beaten_is_not_heard_as_the_end_of_the_call(
    gpus: Callable[..., list[GpuServer]], call: Callable[..., Caller]
) -> None:
    servers = gpus(2)
    client = call("httpx2-sync", vllm(servers))
    transport = client.transport()
    request = client.client.build_request("POST", TEXT, json=ask())
    route = transport._begin(request)
    assert transport._find_pool(route)
    transport._open(route)
    trip = transport._depart(route, transport._pools())
    assert not trip.lost
    trip.cancelled()
    assert not trip.lost, "a caller that leaves ends its call"
    route.call.finish(trip.attempt, Outcome.CANCELLED, 0.0)
    again = transport._depart(route, transport._pools())
    again.lose()
    assert again.lost


# ------------------------------------------------------------------------------------------ the end of the call


class Ends(Observer):
    """Counts the calls that are told to have ended."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def call_ended(self, call: Any, now: float) -> None:
        self.calls.append(call)


@pytest.mark.parametrize("cut_after", [2, 4])
def test_a_continued_call_ends_once_also_if_nothing_but_its_end_was_lost(
    gpus: Callable[..., list[GpuServer]],
    call: Callable[..., Caller],
    kind: str,
    cut_after: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = Ends()
    monkeypatch.setattr("gpuroute.transports.routes.observer", lambda: ends)
    servers = gpus(2)
    client = call(kind, vllm(servers), continuation=True)
    servers[0].drop_mid_stream(cut_after, count=1)
    assert client.read(client.open(TEXT, json=ask(4))).endswith(b"data: [DONE]\n\n")
    assert servers[1].state()["received"] == (cut_after < 4)
    assert len(ends.calls) == 1
