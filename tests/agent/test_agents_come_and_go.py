"""A client process that lives for months, in a fleet whose pods come and go, keeps nothing of those that are gone."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from agent.stage import desks
from agent.test_agent_grpc import GrpcAgent
from agent.test_digest import SECRET, Collected, entries, fleet_of

from gpuroute.core.asking import AskBody, encode_ask
from gpuroute.transports import ask_engines, ask_grpc
from gpuroute.transports.ask_engines import Engines, Kept
from gpuroute.transports.ask_grpc import Channels

if TYPE_CHECKING:
    from collections.abc import Callable


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now


class Connection:
    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


def test_g3_channels_that_nobody_uses_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(ask_grpc, "time", clock)
    channels, made = Channels(None, None, None), {}
    opened = channels._channel

    def noted(scheme: str, target: str) -> Any:
        made[target] = opened(scheme, target)
        return made[target]

    monkeypatch.setattr(channels, "_channel", noted)
    for number in range(300):
        channels._say("grpc", f"127.0.0.1:{20_000 + number}")
        channels._say("grpc", "127.0.0.1:20000")
        clock.now += 10
    assert len(channels._open) <= 62
    with pytest.raises(ValueError, match="closed"):
        made["127.0.0.1:20001"].unary_unary("/a/b")(b"")
    assert ("grpc", "127.0.0.1:20000") in channels._open, "the oldest of all, and in use"


def test_connections_to_engines_that_are_gone_are_closed() -> None:
    kept, made = Kept(), [Connection() for _ in range(500)]
    for number, connection in enumerate(made):
        kept.keep(f"http://10.0.0.{number}:8000", connection, number * 10.0)  # type: ignore[arg-type]
    assert len(kept) == 13
    assert [connection.is_closed for connection in made] == [True] * 487 + [False] * 13
    assert kept.take("http://10.0.0.499:8000") is made[-1]
    assert kept.take("http://10.0.0.499:8000") is None


def test_engines_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(ask_engines, "time", clock)
    engines = Engines(b"")
    monkeypatch.setattr(engines, "_start", lambda: None)
    message = encode_ask(AskBody(1, ()), 1, 1)
    for number in range(400):
        target = f"gpu-{number} sglang http://10.0.0.1:{number + 1}"
        engines.say(message, target, lambda _: None)
        entry = engines._entries[target]
        entry.waiting.clear()
        entry.at = clock.now
        clock.now += 10
    assert len(engines._entries) <= 14


def test_a_thread_that_cannot_start_costs_nobody_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("gpuroute.transports.ask_engines.threading.Thread.start", refuse)
    Engines(b"").say(encode_ask(AskBody(1, ()), 1, 1), "gpu-0 sglang http://127.0.0.1:1", lambda _: None)


@pytest.mark.real_time
def test_a_collector_closes_what_leads_to_agents_that_left(eventually: Callable[..., None]) -> None:
    with GrpcAgent(desks(1), (SECRET,)) as one, GrpcAgent(desks(2)[1:], (SECRET,)) as other:
        endpoints = [one.endpoints()[0], other.endpoints()[0]]
        with Collected(fleet_of(endpoints)) as it:
            eventually(lambda: len(entries(it.digest)) == 2, "both have answered")
            assert len(it.collector._channels) == 2
            it.collector.adopt(fleet_of(endpoints[:1]))
            eventually(lambda: len(it.collector._channels) == 1, "one has left")
            before = it.collector.rounds
            eventually(lambda: it.collector.rounds > before + 1 and not it.digest.silent, "the other is asked on")


@pytest.mark.real_time
def test_a_collector_forgets_where_names_led() -> None:
    from gpuroute.agent.collect import Collector
    from gpuroute.agent.digest import Digest
    from gpuroute.core.endpoint import Endpoint

    async def rounds() -> int:
        collector = Collector(Digest("it"))
        for number in range(5):
            agent = f"udp://127.0.0.1:{9_000 + number}"
            collector.adopt(fleet_of([Endpoint("gpu-0", "http://127.0.0.1:1", agent=agent)]))
            await collector.round()
        for sock in collector._sockets.values():
            asyncio.get_running_loop().remove_reader(sock)
            sock.close()
        return len(collector._places)

    assert asyncio.run(rounds()) == 1
