"""Where the system has no more threads to give, calls end or go on without; what needs a thread tries again later."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from world import PATIENCE_S, Server, drained, method, router_of, servers, soon

import gpuroute.grpc
import gpuroute.httpx2
from gpuroute.testing import GpuServer
from gpuroute.transports.grpc_aside import Aside
from gpuroute.transports.grpc_watch import StreamWatch

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.real_time


@contextmanager
def no_more_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For timers and for what is gpuroute's own."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if isinstance(thread, threading.Timer) or thread.name.startswith("gpuroute-"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        yield


def test_a_future_that_would_wait_for_its_next_attempt_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server("s0")
    server.service.fail_next = [grpc.StatusCode.UNAVAILABLE]
    server.service.trailing = (("grpc-retry-pushback-ms", "60000"),)
    with router_of(server.url) as router, gpuroute.grpc.channel(router, "p") as channel, no_more_threads(monkeypatch):
        future = channel.unary_unary(method("Echo")).future(b"x")
        with pytest.raises(grpc.RpcError) as caught:
            future.result(timeout=PATIENCE_S)
        assert (caught.value.code(), server.service.received) == (grpc.StatusCode.INTERNAL, 1)
        assert "can't start new thread" in caught.value.details()
        assert soon(lambda: drained(router))
    server.stop()


def test_a_future_goes_on_without_a_second_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        servers(2) as running,
        router_of(*(server.url for server in running), hedge=True) as router,
        gpuroute.grpc.channel(router, "p") as channel,
        no_more_threads(monkeypatch),
    ):
        assert channel.unary_unary(method("Echo")).future(b"x").result(timeout=PATIENCE_S)
        assert soon(lambda: drained(router))


def test_a_blocking_http_call_goes_on_without_a_second_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        GpuServer(time_scale=0.0) as server,
        gpuroute.Router(f"llama={server.url}", hedge=True) as router,
        gpuroute.httpx2.Client(router) as client,
        no_more_threads(monkeypatch),
    ):
        asked = {"model": "m", "prompt": "hello", "max_tokens": 3}
        assert client.post("http://llama/v1/completions", json=asked).status_code == 200


class Looked:
    over = False

    def look(self) -> None:
        self.over = True


def test_streams_are_looked_at_once_there_are_threads_again(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, flight = StreamWatch(), Looked()
    with no_more_threads(monkeypatch):
        watch.add(flight)  # type: ignore[arg-type]
    watch.add(Looked())  # type: ignore[arg-type]
    assert soon(lambda: flight.over)
    assert soon(lambda: watch._thread is None)


def test_what_waits_aside_waits_once_there_are_threads_again(monkeypatch: pytest.MonkeyPatch) -> None:
    aside, done = Aside(), Future[None]()

    async def work() -> None:
        done.set_result(None)

    with no_more_threads(monkeypatch), pytest.raises(RuntimeError, match="can't start new thread"):
        aside.run(work())
    aside.run(work())
    done.result(PATIENCE_S)
    assert aside._loop is not None
    aside._loop.call_soon_threadsafe(aside._loop.stop)


def test_a_call_whose_agents_cannot_be_asked_is_made_without(monkeypatch: pytest.MonkeyPatch) -> None:
    aside, launched = Aside(), []
    flight: Any = SimpleNamespace(launch=lambda *, first: launched.append(first))
    with no_more_threads(monkeypatch):
        aside.ask(flight, SimpleNamespace())  # type: ignore[arg-type]
    assert launched == [True]
