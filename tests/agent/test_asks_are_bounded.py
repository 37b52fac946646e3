"""How many are asked, how often, and from where an answer is taken: whatever the size of the fleet."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from itertools import groupby

import pytest
from agent.stage import KEY, AgentThread, call_of, desks, router_of
from agent.test_digest import fleet_of

from gpuroute.agent import collect
from gpuroute.agent.collect import Collector
from gpuroute.agent.desk import Desk
from gpuroute.agent.digest import Digest
from gpuroute.core.asking import encode_bid
from gpuroute.core.endpoint import Endpoint
from gpuroute.transports import ask_engines


def test_at_most_six_are_asked_for_one_call() -> None:
    made = [Endpoint(f"gpu-{n}", "http://127.0.0.1:1", agent=f"udp://127.0.0.1:{9_000 + n}") for n in range(64)]
    router, asker = router_of(made)
    counts = set()
    for number in range(200):
        ladder = tuple(hash((number // 3, rung)) & (2**64 - 1) for rung in range(8))
        for call in (call_of(router, ladder=ladder), call_of(router), router.call("p", key=f"session-{number}")):
            counts.add(len(asker.worth_asking(call)))
            call.close(router.clock())
    assert max(counts) == 6
    assert min(counts) >= 2


@pytest.mark.real_time
def test_a_bid_that_comes_from_elsewhere_is_not_taken() -> None:
    """It knows the key and the call: a recorded one, or an agent that answers from another address."""
    with AgentThread(desks(2), lose=lambda _: True) as agent:
        router, asker = router_of(agent.endpoints(), ask_timeout="5ms")
        asking = asker.ask(call_of(router))
        assert asking.bids == {}
        bid = encode_bid(Desk("gpu-0").bid(1, 100, (), 0.0), asking.id, 1, 0, 0, KEY.encode())
        elsewhere = [("127.0.0.2", agent.port), ("127.0.0.1", agent.port - 1)]
        asking.unread += [(bid, source, time.monotonic()) for source in elsewhere]
        asking.heard()
        assert (asking.bids, asker.counts.strangers) == ({}, 2)
        asking.unread.append((bid, ("127.0.0.1", agent.port), time.monotonic()))
        asking.heard()
        assert set(asking.bids) == {"gpu-0"}


def test_a_bid_that_comes_by_another_way_is_not_taken() -> None:
    """Datagrams are no answers of an agent that is asked by gRPC."""
    with AgentThread(desks(2), lose=lambda _: True) as agent:
        first, second = agent.endpoints()
        router, asker = router_of([replace(first, agent="grpc://127.0.0.1:1"), second], ask_timeout="5ms")
        asking = asker.ask(call_of(router))
        bid = encode_bid(Desk("gpu-0").bid(1, 100, (), 0.0), asking.id, 1, 0, 0, KEY.encode())
        asking.unread.append((bid, ("127.0.0.1", agent.port), time.monotonic()))
        asking.heard()
        assert (asking.bids, asker.counts.strangers) == ({}, 1)
        asking.unread.append((bid, None, time.monotonic()))
        asking.heard()
        assert set(asking.bids) == {"gpu-0"}


def test_an_engines_own_answer_serves_for_a_tenth_of_a_second_at_most() -> None:
    assert 0 < ask_engines.FRESH_S <= 0.1


def test_a_collector_asks_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    really, here = asyncio.sleep, threading.get_ident()

    async def sleep(seconds: float) -> None:
        is_ours = threading.get_ident() == here  # and not of a loop that another test has left behind
        if is_ours:
            events.append(f"sleep {seconds}")
        await really(0 if is_ours else seconds)

    async def round_of(collector: Collector) -> None:
        collector.adopt(
            fleet_of([Endpoint(f"gpu-{n}", "http://127.0.0.1:1", agent="udp://127.0.0.1:9") for n in range(200)])
        )
        await collector.round()

    monkeypatch.setattr(collect.asyncio, "sleep", sleep)
    monkeypatch.setattr(Collector, "_ask", lambda *_: events.append("ask"))
    monkeypatch.setattr(collect, "AGAIN_S", 0.01)
    asyncio.run(round_of(Collector(Digest("it"))))
    runs = [(what, len(list(run))) for what, run in groupby(events)]
    pause = ("sleep 0.01", 1)
    asked = [("ask", 64), pause, ("ask", 64), pause, ("ask", 64), pause]
    assert runs == [*asked, ("ask", 8 + 64), *asked[1:], ("ask", 8)]
