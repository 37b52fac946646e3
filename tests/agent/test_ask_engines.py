"""Engines that are asked themselves, where there is no agent."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from agent.stage import AgentThread, call_of, desks, router_of
from ports import closed_udp_port

from gpuroute.agent.desk import Desk
from gpuroute.core.asking import Kind
from gpuroute.core.endpoint import Endpoint
from gpuroute.core.trust import alarm
from gpuroute.transports import ask_engines
from gpuroute.transports.ask_peers import SILENT_AFTER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gpuroute.core.asking import BidBody
    from gpuroute.core.call import Call
    from gpuroute.router import Router
    from gpuroute.transports.ask_call import Asking
    from gpuroute.transports.asking import Asker

pytestmark = pytest.mark.real_time

ENGINES = {"asks": "engines", "ask_timeout": "60s"}


class Engine(ThreadingHTTPServer):
    """Says the load of SGLang (`/v1/loads`), or whatever `body` holds."""

    daemon_threads = True

    def __init__(self) -> None:
        self.asked = 0
        self.body = b""
        self.path = "/v1/loads"
        super().__init__(("127.0.0.1", 0), Answer)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def says(self, running: int, waiting: int, tokens: int) -> None:
        load = {"num_running_reqs": running, "num_waiting_reqs": waiting, "num_waiting_uncached_tokens": tokens}
        self.body = json.dumps({"loads": [load]}).encode()

    def endpoint(self, name: str, **record: Any) -> Endpoint:
        return Endpoint(name, f"http://127.0.0.1:{self.server_address[1]}", **{"engine": "sglang", **record})


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Engine

    def do_GET(self) -> None:
        self.server.asked += 1
        self.send_response(200 if self.path == self.server.path else 404)
        self.send_header("Content-Length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Engine]]:
    monkeypatch.setattr(ask_engines, "TIMEOUT_S", 60.0)  # who is late on a busy machine would be left alone for a minute
    made = [Engine(), Engine()]
    yield made
    for engine in made:
        engine.shutdown()
        engine.server_close()


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n", b"HTTP/1.1 "])
def test_who_drips_does_not_keep_the_threads(head: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of them, where two threads ask for all calls: each byte came in time, and so they were read for hours."""
    monkeypatch.setattr(ask_engines, "TIMEOUT_S", 0.3)
    met, stop = threading.Semaphore(0), threading.Event()

    def drip(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            met.release()
            connection.recv(4_096)
            connection.sendall(head)
            while not stop.wait(0.1):
                connection.sendall(b"0")

    asked = ask_engines.Engines(b"")
    with ExitStack() as listeners:
        for name in "abc":
            listener = listeners.enter_context(socket.create_server(("127.0.0.1", 0)))
            threading.Thread(target=drip, args=(listener,), daemon=True).start()
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            asked.say(bytes([0, 0, 0, Kind.ASK]), f"{name} sglang {url}", lambda bid: None)
        for _ in "abc":
            assert met.acquire(timeout=60)
        stop.set()


@pytest.mark.parametrize("how", ["sync", "async"])
def test_engines_bid_for_themselves(engines: list[Engine], how: str) -> None:
    engines[0].says(running=3, waiting=9, tokens=80_000)
    engines[1].says(running=1, waiting=0, tokens=0)
    router, asker = router_of([engines[0].endpoint("a"), engines[1].endpoint("b")], **ENGINES)
    call = call_of(router)
    asking = asker.ask(call) if how == "sync" else asyncio.run(asker.ask_async(call))
    assert asking.bids
    for name, queued in (("a", 80_000), ("b", 0)):
        if name in asking.bids:
            assert asking.bids[name].queued_tokens == queued
            assert asking.bids[name].matched_tokens == -1
            assert asking.bids[name].source == "engine:READY"
    attempt = call.next_attempt(router.clock())
    asking.take(attempt)
    asking.tell(attempt, 0.1)
    if len(asking.bids) == 2:
        assert attempt.state.id == "b"


def test_one_look_serves_many_calls(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None]
) -> None:
    monkeypatch.setattr(ask_engines, "FRESH_S", 60.0)
    for engine in engines:
        engine.says(1, 0, 0)
    router, asker = router_of([engines[0].endpoint("a"), engines[1].endpoint("b")], **ENGINES)
    for _ in range(20):
        assert asker.ask(call_of(router)).bids
    eventually(lambda: min(engine.asked for engine in engines), "both were asked")
    assert [engine.asked for engine in engines] == [1, 1]


def test_who_says_nothing_is_left_alone(engines: list[Engine], eventually: Callable[..., None]) -> None:
    engines[0].body = b"not what was expected"
    engines[1].says(1, 0, 0)
    router, asker = router_of([engines[0].endpoint("a"), engines[1].endpoint("b")], **{**ENGINES, "ask_timeout": "200ms"})
    for _ in range(5):
        asker.ask(call_of(router))
    eventually(lambda: engines[1].asked >= 1, "the talkative one was asked")
    assert engines[0].asked <= 1


@pytest.mark.parametrize(
    "record",
    [{"engine": "tgi"}, {"headers": {"authorization": "x"}}, {"engine": ""}],
    ids=["no load", "secret", "unknown"],
)
def test_others_are_not_asked(engines: list[Engine], record: dict[str, Any]) -> None:
    router, asker = router_of([engines[0].endpoint("a", **record), engines[1].endpoint("b", **record)], **ENGINES)
    assert not asker.covers(router.pool("p"))
    assert asker.ask(call_of(router)) is None


def test_it_is_opt_in_and_agents_come_first(engines: list[Engine]) -> None:
    for engine in engines:
        engine.says(1, 0, 0)
    router, asker = router_of([engines[0].endpoint("a"), engines[1].endpoint("b")], asks="on")
    assert asker.ask(call_of(router)) is None
    with AgentThread(desks(1)) as agent:
        mixed = [agent.endpoints(engines[0].endpoint("x").url)[0], engines[1].endpoint("b")]
        router, asker = router_of(mixed, **ENGINES)
        asking = asker.ask(call_of(router))
        assert asking.bids
        assert engines[0].asked == 0


class Liar(Desk):
    """Always idle."""

    def bid(self, id_: int, tokens: int, hashes: Sequence[int], now: float) -> BidBody:
        return super().bid(id_, tokens, hashes, now)._replace(queued_tokens=0, running=0, waiting=0, age=0.0)


def beside(agent: AgentThread, engines: list[Engine]) -> list[Endpoint]:
    return [engine.endpoint(one.id, agent=one.agent) for one, engine in zip(agent.endpoints(), engines, strict=True)]


def alarmed(router: Router) -> None:
    """Somebody was found out just now."""
    alarm(router.pool("p").shared.speeds, router.clock())


def asked(router: Router, asker: Asker, how: str, heard: int) -> tuple[Call, Asking]:
    """The first call for which so many engines and all agents were heard: the last answer is not waited for long."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        call = call_of(router)
        asking = asker.ask(call) if how == "sync" else asyncio.run(asker.ask_async(call))
        bids = call.ask.bids
        if len(bids) == 2 and sum(bid.source == "engine:READY" for bid in bids.values()) == heard:
            return call, asking
    raise TimeoutError(f"{heard} engines were not heard")


@pytest.mark.parametrize("how", ["sync", "async"])
def test_an_engine_is_asked_beside_an_agent_that_is_not_believed(
    engines: list[Engine], how: str, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None]
) -> None:
    monkeypatch.setattr(ask_engines, "FRESH_S", 60.0)
    engines[0].says(running=30, waiting=20, tokens=80_000)
    with AgentThread([Liar("gpu-0"), Liar("gpu-1")]) as agent:
        endpoints = beside(agent, engines)
        router, asker = router_of(endpoints, asks="on", ask_timeout="5s")
        asker.ask(call_of(router))
        assert engines[0].asked == engines[1].asked == 0, "where all is well engines are left alone"
        alarmed(router)
        call, asking = asked(router, asker, how, heard=1)
        assert engines[0].asked == 1
        assert call.ask.bids["gpu-0"].queued_tokens == 80_000
        assert call.ask.bids["gpu-1"].source == "agent:READY", "its engine says nothing useful: that costs nothing"
        attempt = call.next_attempt(router.clock())
        assert attempt.state.id == "gpu-1"
        asking.take(attempt)
        eventually(lambda: engines[1].asked == 1, "it was asked, too")
        for _ in range(3):
            asked(router, asker, how, heard=1)
        assert engines[1].asked == 1, "and is left alone for a minute"


def test_an_engine_that_confirms_its_agent_changes_nothing(
    engines: list[Engine], eventually: Callable[..., None]
) -> None:
    for engine in engines:
        engine.says(running=0, waiting=0, tokens=0)
    with AgentThread([Liar("gpu-0"), Liar("gpu-1")]) as agent:
        endpoints = beside(agent, engines)
        router, asker = router_of(endpoints, asks="on", ask_timeout="5s")
        alarmed(router)

        def heard_all() -> bool:
            call = call_of(router)
            asking = asker.ask(call)
            assert asking is not None
            if asking.missing:
                return False
            assert {bid.source for bid in call.ask.bids.values()} == {"agent:READY"}
            return True

        eventually(heard_all, "agents and engines have answered")
        counts = [engine.asked for engine in engines]
        assert min(counts) >= 1
        for _ in range(3):
            eventually(heard_all, "they answer again")
        assert [engine.asked for engine in engines] == counts, "once is enough"


def test_an_engine_stands_in_for_an_agent_that_is_gone(engines: list[Engine], eventually: Callable[..., None]) -> None:
    for engine in engines:
        engine.says(running=3, waiting=0, tokens=7)
    gone = f"udp://127.0.0.1:{closed_udp_port()}"
    router, asker = router_of(
        [engine.endpoint(f"gpu-{n}", agent=gone) for n, engine in enumerate(engines)], asks="on", ask_timeout="300ms"
    )

    def stand_in() -> bool:
        call = call_of(router)
        asker.ask(call)
        return any(bid.source == "engine:READY" and bid.queued_tokens == 7 for bid in call.ask.bids.values())

    eventually(stand_in, "the engine speaks for itself")


def test_engines_that_count_in_their_metrics_are_asked_for_these(engines: list[Engine]) -> None:
    page = "vllm:num_requests_running 30\nvllm:num_requests_waiting 20\nvllm:kv_cache_usage_perc 0.5\n"
    with AgentThread([Liar("gpu-0"), Liar("gpu-1")]) as agent:
        endpoints = [replace(one, engine="vllm") for one in beside(agent, engines)]
        router, asker = router_of(endpoints, asks="on", ask_timeout="5s")
        for engine in engines:
            engine.body, engine.path = page.encode(), "/metrics"
        alarmed(router)
        call, _ = asked(router, asker, "sync", heard=2)
        assert {(bid.running, bid.waiting) for bid in call.ask.bids.values()} == {(30, 20)}


def test_agents_only(engines: list[Engine]) -> None:
    engines[0].says(running=30, waiting=20, tokens=80_000)
    with AgentThread([Liar("gpu-0"), Liar("gpu-1")]) as agent:
        endpoints = beside(agent, engines)
        router, asker = router_of(endpoints, asks="agents", ask_timeout="5s")
        alarmed(router)
        asker.ask(call_of(router))
        assert engines[0].asked == 0


def test_agents_that_are_gone_are_no_reason_to_read_pages_of_metrics(engines: list[Engine]) -> None:
    gone = f"udp://127.0.0.1:{closed_udp_port()}"
    for engine in engines:
        engine.body, engine.path = b"vllm:num_requests_running 30\n", "/metrics"
    endpoints = [engine.endpoint(f"gpu-{n}", agent=gone, engine="vllm") for n, engine in enumerate(engines)]
    router, asker = router_of(endpoints, asks="on", ask_timeout="20ms")
    for _ in range(2 * SILENT_AFTER):
        asker.ask(call_of(router))
    assert engines[0].asked == engines[1].asked == 0


@pytest.mark.parametrize(
    ("url", "host", "port"), [("http://[::1]", "::1", 80), ("http://[::1]:94", "::1", 94), ("http://h/base", "h", 80)]
)
def test_where_an_engine_is_asked(url: str, host: str, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(connection: HTTPConnection) -> None:
        asked.append((connection.host, connection.port))
        raise ConnectionRefusedError

    monkeypatch.setattr(HTTPConnection, "connect", refuse)
    assert ask_engines._look(f"gpu-0 sglang {url}", ask_engines.Kept()) is None
    assert set(asked) == {(host, port)}
