"""The asking side: what a call learns before it is sent, and what it never waits for or falls for."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest
from agent.stage import KEY, AgentThread, call_of, desks, hear, router_of
from ports import closed_udp_port
from stopwatch import Stopwatch

from gpuroute.agent import book
from gpuroute.agent.book import Sample
from gpuroute.agent.desk import Desk
from gpuroute.config import Settings
from gpuroute.core.asking import BidBody, EngineState, Kind, encode_bid, identity_of, open_message
from gpuroute.core.endpoint import Endpoint
from gpuroute.core.fleet import Fleet, PoolConfig, PoolSpec
from gpuroute.core.outcome import Outcome
from gpuroute.router import Router
from gpuroute.testing import FakeRegistry
from gpuroute.transports import ask_peers
from gpuroute.transports.ask_peers import SILENT_AFTER
from gpuroute.transports.asking import Asker, asker_of

pytestmark = pytest.mark.real_time

TWO = desks(2)


def asked(asker: Asker, call: object, how: str) -> object:
    return asker.ask(call) if how == "sync" else asyncio.run(asker.ask_async(call))


both = pytest.mark.parametrize("how", ["sync", "async"])


@both
def test_the_endpoint_that_says_less_is_picked(how: str) -> None:
    with AgentThread(desks(2)) as agent:
        router, asker = router_of(agent.endpoints(), ask_timeout="60s")
        asker.round_trip = 60.0  # so the last answer is waited for
        agent.desks[0].take(1, 90_000, 90_000, time.monotonic())
        for _ in range(5):
            call = call_of(router)
            asking = asked(asker, call, how)
            attempt = call.next_attempt(router.clock())
            assert attempt.state.id == "gpu-1"
            attempt.first_token(router.clock())
            asking.tell(attempt, 0.1)
            call.finish(attempt, Outcome.SUCCESS, router.clock())


@both
def test_bids_are_the_agents_own_words(how: str) -> None:
    with AgentThread(desks(2)) as agent:
        agent.desks[1].sampled(Sample(math.inf, running=7, waiting=2, kv_usage=0.25, queued_tokens=1_234))
        router, asker = router_of(agent.endpoints())
        call = call_of(router)
        asking = asked(asker, call, how)
        _wait(lambda: len(asking.bids) == 2, asker, how)
        bid = call.ask.bids["gpu-1"]
        assert (bid.running, bid.queued_tokens, bid.epoch, bid.matched_tokens) == (7, 1_234, 1, -1)
        assert call.pool.snapshot.by_id["gpu-1"].report == bid, "it also teaches the endpoint's state"


def _wait(condition: object, asker: Asker, how: str) -> None:
    """All but one answer is enough for a call; here the last one is waited for too."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        for line in (*asker._lines, *asker._loops.values()):
            hear(line)


@both
def test_take_and_tell_reach_the_agent(how: str, eventually: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book, "EXPIRE_S", 600.0)
    with AgentThread(desks(2)) as agent:
        router, asker = router_of(agent.endpoints())
        call = call_of(router, 6_000)
        asking = asked(asker, call, how)
        attempt = call.next_attempt(router.clock())
        asking.take(attempt)
        desk = next(desk for desk in agent.desks if desk.id == attempt.state.id)
        eventually(lambda: desk.takes == 1, "the take has arrived")
        assert attempt.uncached == 6_000
        assert 600 <= desk.book.queued_tokens(time.monotonic()) <= 6_000, "all of it but what was computed meanwhile"
        for _ in range(3):
            asking.tell(attempt, 0.25, 2_000)
        eventually(lambda: desk.tells == 1, "the tell has arrived")
        assert desk.book.queued_tokens(time.monotonic()) == 0
        other = next(desk for desk in agent.desks if desk.id != attempt.state.id)
        assert (other.takes, other.tells) == (0, 0)


@both
@pytest.mark.parametrize("agents", ["closed", "frozen"])
def test_agents_that_do_not_answer_cost_the_timeout_and_nothing_else(how: str, agents: str) -> None:
    with AgentThread(desks(2), lose=lambda _: True) as frozen:
        port = closed_udp_port() if agents == "closed" else frozen.port
        made = [Endpoint(f"gpu-{n}", "http://127.0.0.1:1", agent=f"udp://127.0.0.1:{port}/{n}") for n in range(2)]
        router, asker = router_of(made, ask_timeout="20ms")
        call = call_of(router)
        with Stopwatch() as watch:
            asking = asked(asker, call, how)
        assert watch.seconds < 5
        assert asking.bids == {}
        assert call.next_attempt(router.clock()).state.id in {"gpu-0", "gpu-1"}
        assert asker.counts.timeouts == 1


def test_silent_agents_are_asked_less_and_less_and_heard_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask_peers, "MUTE_S", ask_peers.MAX_MUTE_S)
    mute = [True]
    with AgentThread(desks(2), lose=lambda _: mute[0]) as agent:
        router, asker = router_of(agent.endpoints(), ask_timeout="1ms")
        for _ in range(SILENT_AFTER):
            assert asker.ask(call_of(router)) is not None
        assert asker.ask(call_of(router)) is None, "both are left alone for a while"
        for peer in asker.peers.all():
            assert peer.muted_until > router.clock()
            peer.muted_until = 0.0
        mute[0] = False
        asker.timeout = 60.0
        assert asker.ask(call_of(router)).bids
        assert {peer.misses for peer in asker.peers.all()} & {0}


@both
@pytest.mark.parametrize("loss", [0.0, 0.01], ids=["patient", "in a hurry"])
def test_the_last_answer_is_not_waited_for_long(how: str, loss: float) -> None:
    with AgentThread(desks(3)) as agent:
        dead = f"udp://127.0.0.1:{closed_udp_port()}"
        endpoints = [*agent.endpoints()[:1], replace(agent.endpoints()[1], agent=dead)]
        router, asker = router_of(endpoints, ask_timeout="90s")
        asker.loss = loss
        began = time.monotonic()
        asking = asked(asker, call_of(router), how)
        assert time.monotonic() - began < 60
        assert set(asking.bids) == {"gpu-0"}


@both
def test_an_asking_that_has_all_its_answers_is_forgotten(how: str) -> None:
    with AgentThread(desks(4)) as agent:
        router, asker = router_of(agent.endpoints())

        async def some() -> None:
            waiting = 0
            for _ in range(5):
                asking = asker.ask(call_of(router)) if how == "sync" else await asker.ask_async(call_of(router))
                waiting += asking.missing > 0
                (line,) = asker._lines if how == "sync" else asker._loops.values()
                assert len(line.listeners) <= waiting + asker.counts.again

        asyncio.run(some())


def test_threads_hear_bids_by_several_ways_at_once() -> None:
    """One socket is read by waiting for it, several are polled."""
    with AgentThread(desks(2)) as agent:
        first, second = agent.endpoints()
        router, asker = router_of([first, replace(second, agent="grpc://127.0.0.1:1")], ask_timeout="60s")
        asker.loss = 0.0
        assert set(asker.ask(call_of(router)).bids) == {"gpu-0"}
        (line,) = asker._lines
        assert len(line.sockets) == 2


def test_threads_hear_bids_where_sockets_know_no_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuroute.transports.ask_lines.TICK", b"")
    with AgentThread(desks(2)) as agent:
        router, asker = router_of(agent.endpoints())
        asker.loss = 0.0
        assert asker.ask(call_of(router)).bids
        (line,) = asker._lines
        assert all(sock.gettimeout() == 0 for sock in line.sockets.values())


def test_lost_answers_exclude_nobody() -> None:
    """One endpoint never answers; it still gets calls."""
    with AgentThread(desks(2), lose=lambda data: open_message(data)[0].engine == 0) as agent:
        router, asker = router_of(agent.endpoints(), ask_timeout="5ms")
        picked = set()
        for _ in range(200):
            call = call_of(router, 100)
            asking = asker.ask(call)
            attempt = call.next_attempt(router.clock())
            if asking is not None:
                asking.take(attempt)  # never told: the answering engine looks busier with each call
            picked.add(attempt.state.id)
        assert picked == {"gpu-0", "gpu-1"}


@both
def test_who_does_not_answer_is_asked_again_and_takes_are_said_twice_where_messages_get_lost(
    how: str, eventually: object
) -> None:
    lost: set[tuple[int, int]] = set()

    def first_time(data: bytes) -> bool:
        """Every message is lost once."""
        header = open_message(data)[0]
        mark = header.kind, header.id, header.engine
        fresh = mark not in lost
        lost.add(mark)
        return fresh

    with AgentThread(desks(2), lose=first_time) as agent:
        router, asker = router_of(agent.endpoints())
        for number in range(1, 9):
            call = call_of(router)
            asking = asked(asker, call, how)
            assert asking.bids, "the second ask was answered"
            attempt = call.next_attempt(router.clock())
            asking.take(attempt)
            asking.tell(attempt, 0.1)
            assert asker.counts.again >= 2 * number
        assert asker.loss > 0.15
        eventually(lambda: sum(desk.tells for desk in agent.desks) >= 3, "takes and tells arrive too")
        assert sum(desk.takes for desk in agent.desks) <= 8, "but none of them counts twice"


@both
def test_where_most_messages_get_lost_asks_are_repeated_too(how: str) -> None:
    heard: Counter[tuple[int, int]] = Counter()

    def three_times(data: bytes) -> bool:
        """The first three asks of a call are lost: an ask and two repetitions."""
        header = open_message(data)[0]
        heard[header.id, header.engine] += header.kind is Kind.ASK
        return header.kind is Kind.ASK and heard[header.id, header.engine] <= 3

    with AgentThread(desks(2), lose=three_times) as agent:
        router, asker = router_of(agent.endpoints())
        asker.loss = 1.0
        assert asked(asker, call_of(router), how).bids


def test_a_late_bid_still_teaches() -> None:
    with AgentThread(desks(2)) as agent:
        router, asker = router_of(agent.endpoints())
        call = call_of(router)
        asker.timeout = 0.0
        asking = asker.ask(call)
        assert asking.bids == {}
        _wait(lambda: len(asking.bids) == 2, asker, "sync")
        assert asker.counts.late == 2
        assert all(state.report is not None for state in call.pool.snapshot.states)


def test_what_is_late_was_not_lost() -> None:
    def slow(data: bytes) -> bool:
        time.sleep(0.02)
        return False

    with AgentThread(desks(2), lose=slow) as agent:
        router, asker = router_of(agent.endpoints())
        before, askings = asker.loss, []
        while not asker.counts.again:
            askings.append(asker.ask(call_of(router)))
        _wait(lambda: not any(asking._unanswered for asking in askings), asker, "sync")
        assert asker.loss <= before


def test_bids_that_are_very_late_do_not_end_asking_again() -> None:
    with AgentThread(desks(2)) as agent:
        router, asker = router_of(agent.endpoints())
        asking = asker.ask(call_of(router))
        _wait(lambda: len(asking.bids) == 2, asker, "sync")
        asker.timeout, asker.round_trip = 0.02, 0.0005
        bid = BidBody(0, 0, 0, 0.0, EngineState.READY, None, identity_of("gpu-0"), 1, 0)
        for _ in range(5):
            data = encode_bid(bid, asking.id, 0, 0, 0, KEY.encode())
            asking.unread.append((data, ("127.0.0.1", agent.port), asking.started + 0.9))
            asking.heard()
        assert asker.counts.late >= 5
        assert asker.round_trip < 0.0015
        assert asker.patience < 0.005
        asker.round_trip = 0.5
        assert asker.patience == 0.01, "an answer to the second ask can still come in time"


def test_a_wrong_port_is_noticed() -> None:
    with AgentThread(desks(2)) as agent:
        first, second = agent.endpoints()
        router, asker = router_of(
            [replace(first, agent=second.agent), replace(second, agent=first.agent)], ask_timeout="50ms"
        )
        asking = asker.ask(call_of(router))
        _wait(lambda: asker.counts.strangers >= 2, asker, "sync")
        assert asking.bids == {}


def test_a_forged_bid_is_ignored() -> None:
    with AgentThread(desks(2), key="another") as agent:
        router, asker = router_of(agent.endpoints(), agent_key="another")
        assert asker.ask(call_of(router)).bids
    forger = AgentThread(desks(2), key="")
    forger.answers._open = lambda data: (*open_message(data), b"")  # takes anything, signs nothing
    with forger:
        router, asker = router_of(forger.endpoints(), ask_timeout="50ms")
        asking = asker.ask(call_of(router))
        _wait(lambda: asker.counts.garbled >= 2, asker, "sync")
        assert asking.bids == {}


@pytest.mark.parametrize("state", [EngineState.WARMING, EngineState.DRAINING, EngineState.HUNG, EngineState.GONE])
def test_an_engine_that_takes_no_calls_is_the_last_choice_and_still_one(state: EngineState) -> None:
    with AgentThread(desks(2)) as agent:
        router, asker = router_of(agent.endpoints())
        agent.desks[0].state = state
        agent.desks[1].take(1, 100_000, 100_000, time.monotonic())
        call = call_of(router)
        asking = asker.ask(call)
        _wait(lambda: len(asking.bids) == 2, asker, "sync")
        assert call.next_attempt(router.clock()).state.id == "gpu-1"
        agent.desks[1].state = state
        call = call_of(router)
        asking = asker.ask(call)
        _wait(lambda: len(asking.bids) == 2, asker, "sync")
        attempt = call.next_attempt(router.clock())
        asking.take(attempt)
        assert attempt.queued <= 105_000, "the charge is no queue to learn a speed from"
        assert call.pool.shared.speeds.backlog < 200_000


def test_the_snapshot_shows_which_truth_is_in_use_and_how_old_it_is() -> None:
    with AgentThread(desks(2)) as agent:
        silent = Endpoint("silent", "http://127.0.0.1:1")
        router, asker = router_of([*agent.endpoints(), silent])
        calls = (call_of(router) for _ in range(200))  # some go to the part without agents, which is not asked
        call, asking = next((call, asking) for call in calls if (asking := asker.ask(call)) is not None)
        for state in call.pool.snapshot.states:
            if state.id in asking.bids:
                assert state.report.source == "agent:READY"
        pool = router.snapshot().pools["p"]
        assert pool.agents == pytest.approx(2 / 3)
        assert pool.reporting == pytest.approx(len(asking.bids) / 3)
        shown = {view.id: view.report for view in pool.endpoints}
        assert shown["silent"] is None
        reports = [report for report in shown.values() if report is not None]
        assert reports
        assert all(report.source == "agent:READY" and 0 <= report.age_s < 60 for report in reports)


# ---------------------------------------------------------------------------------------------- when not


def test_off_and_no_agents_cost_nothing() -> None:
    plain = [Endpoint("a", "http://127.0.0.1:1"), Endpoint("b", "http://127.0.0.1:2")]
    router, asker = router_of(plain)
    assert not asker.covers(router.pool("p"))
    assert asker.ask(call_of(router)) is None
    assert not asker._lines
    off = Router(endpoints={"p": plain}, asks="off")
    assert asker_of(off) is None


def test_policies_that_do_not_compare_seconds_do_not_ask() -> None:
    with AgentThread(desks(2)) as agent:
        router, asker = router_of(agent.endpoints(), policy="p2c")
        assert asker.ask(call_of(router)) is None
        assert asker.counts.asks == 0


def test_auto_asks_only_where_it_pays() -> None:
    with AgentThread(desks(2)) as agent:
        router, asker = router_of(agent.endpoints(), asks="auto")
        asker.round_trip = 0.0004
        assert asker.ask(call_of(router, 50_000)) is not None, "2.5 s of prefill for 0.4 ms"
        asker.round_trip = 0.004
        assert asker.ask(call_of(router, 200)) is None, "10 ms of work are not worth 4 ms"
        assert asker.ask(call_of(router, 50_000)) is not None


class Listening(Desk):
    """A desk that writes down the hashes that it is asked about."""

    def __init__(self, seen: set[tuple[int, ...]]) -> None:
        super().__init__("gpu-0")
        self.seen = seen

    def bid(self, id_: int, tokens: int, hashes: tuple[int, ...], now: float) -> object:
        self.seen.add(hashes)
        return super().bid(id_, tokens, hashes, now)


def test_hashes_are_sent_only_where_the_pool_opts_in_and_differ_between_tenants() -> None:
    by_setting: list[set[tuple[int, ...]]] = []
    ladder, opted = (1, 2, 3), {"ask_hashes": True}
    for settings in ({}, opted, {**opted, "tenant": "a"}, {**opted, "tenant": "b"}):
        seen: set[tuple[int, ...]] = set()  # an ask may be sent again, so a set
        with AgentThread([Listening(seen), Desk("gpu-1")]) as agent:
            router, asker = router_of(agent.endpoints(), **settings)
            asking = asker.ask(call_of(router, ladder=ladder))
            _wait(lambda asking=asking: len(asking.bids) == 2, asker, "sync")
        by_setting.append(seen)
    assert by_setting[:2] == [{()}, {ladder}]
    (first,), (second,) = by_setting[2:]
    assert len({ladder, first, second}) == 3
    assert not {*first} & {*second}


@pytest.mark.parametrize("pool", [None, True, False])
@pytest.mark.parametrize("client", [None, True, False])
def test_hashes_are_sent_where_somebody_says_yes_and_nobody_says_no(pool: bool | None, client: bool | None) -> None:
    config = PoolConfig(options={} if pool is None else {"ask_hashes": pool})
    registry = FakeRegistry()
    registry.set(Fleet({"p": PoolSpec("p", (Endpoint("gpu-0", "http://127.0.0.1:1"),), config)}))
    with Router(registry, **({} if client is None else {"ask_hashes": client})) as router:
        asker = asker_of(router)
        assert asker is not None
        said = [one for one in (pool, client) if one is not None]
        assert bool(asker.hashes(call_of(router, ladder=(1, 2, 3)))) is (bool(said) and all(said))


# ---------------------------------------------------------------------------------------------- threads, loops, forks


def test_threads_ask_side_by_side() -> None:
    with AgentThread(desks(4)) as agent:
        router, asker = router_of(agent.endpoints())
        answered: list[int] = []

        def work() -> None:
            askings = [asker.ask(call_of(router)) for _ in range(50)]
            answered.extend(len(asking.bids) if asking is not None else 0 for asking in askings)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(answered) == 400
        assert sum(map(bool, answered)) >= 396
        assert len(asker._lines) <= 8, "as many sockets as threads that ask at once"


def test_l1_tasks_share_one_socket_and_a_cancelled_one_leaves_nothing() -> None:
    with AgentThread(desks(4)) as agent:
        router, asker = router_of(agent.endpoints())
        asker.round_trip = 60.0  # nobody is asked again, and so taken for silent

        async def main() -> None:
            found = await asyncio.gather(*(asker.ask_async(call_of(router)) for _ in range(50)))
            assert all(asking.bids for asking in found)
            (line,) = asker._loops.values()
            assert len(line.sockets) == 1
            agent._lose = lambda _: True
            task = asyncio.create_task(asker.ask_async(call_of(router)))
            while not task.done() and not any(listener.due for listener in line.listeners.values()):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not any(listener.due for listener in line.listeners.values())

        asyncio.run(main())


def test_each_loop_has_a_socket_of_its_own() -> None:
    with AgentThread(desks(2)) as agent:
        router, asker = router_of(agent.endpoints())
        for _ in range(3):
            assert asyncio.run(asker.ask_async(call_of(router))).bids


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_g1_a_forked_child_asks_by_sockets_of_its_own() -> None:
    with AgentThread(desks(2)) as agent:
        router, asker = router_of(agent.endpoints())
        assert asker.ask(call_of(router)).bids
        (line,) = asker._lines
        child = os.fork()
        if child == 0:
            ok = False
            try:
                ok = not asker._lines and bool(asker.ask(call_of(router)).bids)
            finally:
                os._exit(0 if ok else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert asker._lines[0] is line
        assert asker.ask(call_of(router)).bids


# ---------------------------------------------------------------------------------------------- secrets


def test_c4_the_key_is_shown_nowhere(caplog: pytest.LogCaptureFixture, tmp_path: object) -> None:
    caplog.set_level(logging.DEBUG)
    with AgentThread(desks(2), key="other") as agent:
        router, asker = router_of(agent.endpoints(), ask_timeout="10ms")
        asking = asker.ask(call_of(router))
        shown = [repr(x) for x in (router, router.settings, router.snapshot(), asker, asking, agent.answers)]
        shown += [caplog.text, str(router.settings.effective()), str(asker.counts.as_dict())]
    assert not [text for text in shown if KEY in text]


def test_the_key_can_come_from_a_file(tmp_path: object) -> None:
    path = tmp_path / "key"
    path.write_text("from-file\n")
    settings = Settings.from_env({"GPUROUTE_AGENT_KEY_FILE": str(path)})
    assert Asker(settings, time.monotonic).secret == b"from-file"


def test_kinds_of_messages_are_the_documented_ones() -> None:
    assert [kind.name for kind in Kind] == ["ASK", "BID", "TAKE", "TELL"]


# ---------------------------------------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    ("agent", "found"),
    [
        ("udp://127.0.0.1:9401", (("127.0.0.1", 9401), 0)),
        ("udp://127.0.0.1:9401/3", (("127.0.0.1", 9401), 3)),
        ("udp://[::1]:9401/1", (("::1", 9401, 0, 0), 1)),
        ("grpcs://agent.internal:9402", (("grpcs", "agent.internal:9402"), 0)),
    ],
)
def test_addresses_of_agents(agent: str, found: object) -> None:
    router, asker = router_of([Endpoint("gpu-0", "http://127.0.0.1:1", agent=agent), Endpoint("b", "http://127.0.0.1:2")])
    place = asker.peers.place(router.pool("p").snapshot.by_id["gpu-0"], 0.0)
    assert (place.address, place.engine) == found
    assert place.to == Desk("gpu-0").addressee


def test_names_are_looked_up_beside_the_calls(eventually: object, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = threading.Event()
    real = socket.getaddrinfo

    def slow(host: str, *rest: object, **named: object) -> object:
        assert wait.wait(60)
        return real("127.0.0.1" if host == "agent.test" else host, *rest, **named)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    wait.set()
    with AgentThread(desks(2)) as agent:
        wait.clear()
        endpoints = [replace(e, agent=e.agent.replace("127.0.0.1", "agent.test")) for e in agent.endpoints()]
        router, asker = router_of(endpoints)
        began = time.monotonic()
        assert asker.ask(call_of(router)) is None, "nobody waits for the name"
        assert time.monotonic() - began < 50
        wait.set()
        eventually(lambda: all(p.place for p in asker.peers.all()) and asker.peers.all(), "the names are known")
        assert asker.ask(call_of(router)).bids


@both
def test_an_agent_that_cannot_be_costs_nobody_a_call(how: str) -> None:
    """A registry of one's own may say anything; ours refuses such a record."""
    made = [Endpoint(f"gpu-{n}", "http://127.0.0.1:1", agent=f"udp://127.0.0.1:1/{n + 70_000}") for n in range(2)]
    registry = FakeRegistry()
    registry.set(Fleet({"llm": PoolSpec("llm", tuple(made))}))
    router = Router(registry, ask_timeout="20ms", asks="on")
    asker = asker_of(router)
    assert asker is not None
    call = router.call("llm", tokens=6_000)
    assert asked(asker, call, how).bids == {}
    assert call.next_attempt(router.clock()).state.id in {"gpu-0", "gpu-1"}
    router.close()


def test_two_protocols_of_one_pool_are_looked_through_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [Endpoint(f"{scheme}-{n}", f"{scheme}://127.0.0.1:1") for scheme in ("http", "grpc") for n in range(3)]
    with Router(endpoints={"llm": made}) as router:
        router.start()
        asker = asker_of(router)
        assert asker is not None
        seen: list[Endpoint] = []
        monkeypatch.setattr(asker.peers, "_agent", lambda endpoint: seen.append(endpoint) or "")
        for _ in range(5):
            assert not any(asker.covers(router.pool("llm", protocol)) for protocol in ("http", "grpc"))
        assert len(seen) == len(made)
