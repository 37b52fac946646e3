"""What a hostile or merely odd world does to the HTTP transports: servers, records, options, hosts that cannot be."""

from __future__ import annotations

import asyncio
import gzip
import importlib
import os
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest
from http_caller import Caller, attempts, endpoint, router_for
from http_stub import DONE, Exchange, Stage, sse, token

import gpuroute
from gpuroute import Endpoint
from gpuroute.core.endpoint import Tls

if TYPE_CHECKING:
    from collections.abc import Callable

    Make = Callable[..., Caller]

pytestmark = pytest.mark.real_time


def raw(*pieces: bytes, pause: float = 0.02, hang_up: bool = False) -> Any:
    """Answer with exactly these bytes, one piece after the other."""

    async def behave(exchange: Exchange) -> None:
        for piece in pieces:
            exchange.writer.write(piece)
            await exchange.writer.drain()
            await asyncio.sleep(pause)
        if hang_up:
            exchange.hang_up()

    return behave


# ------------------------------------------------------------------------------------------- answers


def test_chunks_win_over_a_content_length(stubs: Stage, caller: Make) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n"
    (a,) = stubs("a", behave=raw(head + b"5\r\nhello\r\n", b"5\r\nworld\r\n0\r\n\r\n"))
    assert caller([a]).post().content == b"helloworld"


def test_compressed_events_are_not_taken_for_a_cut_stream(stubs: Stage, caller: Make) -> None:
    plain = token("hi") + DONE
    packed = gzip.compress(plain)

    async def behave(exchange: Exchange) -> None:
        exchange.start(content_encoding="gzip")
        for piece in (packed[:12], packed[12:]):
            await exchange.chunk(piece, 0.01)
        exchange.end()

    (a,) = stubs("a", behave=behave)
    with_it = caller([a])
    assert with_it.post().content == plain
    assert with_it.router.snapshot().pools["llama"].endpoints[0].last_error == ""


def test_a_large_error_body_that_is_cut_is_a_protocol_error(stubs: Stage, caller: Make) -> None:
    head = b"HTTP/1.1 400 Bad\r\ncontent-length: 900000\r\n\r\n"
    (a,) = stubs("a", behave=raw(head + b"x" * 500_000, hang_up=True))
    with_it = caller([a])
    response = with_it.open()
    with pytest.raises(with_it.library.RemoteProtocolError):
        with_it.read(response)


def test_an_event_that_no_parser_can_read_is_passed_on(stubs: Stage, caller: Make) -> None:
    event = b'data: {"error":' + b"[" * 200_000 + b"\n\n"

    async def then(exchange: Exchange) -> None:
        await exchange.chunk(event)
        await exchange.chunk(DONE)
        exchange.end()

    (a,) = stubs("a", behave=sse("x", then=then))
    assert caller([a]).post().content == token("x") + event + DONE


# ------------------------------------------------------------------------------------------- places


@pytest.mark.parametrize("url", ["http://a..b:80", f"http://{'a' * 70}.test:80", "http://127.0.0.1:99999"])
def test_a_host_or_port_that_cannot_be_is_one_more_dead_endpoint(stubs: Stage, caller: Make, url: str) -> None:
    (b,) = stubs("b")
    with_it = caller([Endpoint("a", url), endpoint(b)])
    assert attempts(with_it.post()) == ["a ConnectError", "b success"]


def test_a_socket_option_that_is_refused_is_a_connect_error(stubs: Stage, caller: Make, eventually: Any) -> None:
    (a,) = stubs("a")
    with_it = caller([a], socket_options=[(socket.IPPROTO_TCP, 99_999, 1)])
    with pytest.raises(with_it.library.ConnectError):
        with_it.post()
    eventually(lambda: a.open == 0, "its connection is closed")


# ------------------------------------------------------------------------------------------- options


def test_no_time_to_connect_is_a_timeout_and_any_time_can_be_waited(stubs: Stage, caller: Make) -> None:
    (a,) = stubs("a")
    with_it = caller([a], settings={"attempts": 1})
    with pytest.raises(with_it.library.ConnectTimeout):
        with_it.post(timeout=0)
    assert with_it.post(timeout=1e15).status_code == 200


def test_options_that_are_no_mapping_or_no_names_say_so(stubs: Stage, caller: Make) -> None:
    (a,) = stubs("a")
    with_it = caller([a])
    for own in ("x", 5, {1: 2, "y": 3}):
        with pytest.raises(gpuroute.ConfigError, match="timeout"):
            with_it.post(extensions={"gpuroute": own})
    assert a.came == []


def test_a_gateway_may_pass_on_the_headers_that_it_got(stubs: Stage, caller: Make) -> None:
    (a,) = stubs("a")
    assert caller([a]).post(headers={"x-gpuroute-attempt": "2"}).status_code == 200
    assert a.came[0].header("x-gpuroute-attempt") is None


# ------------------------------------------------------------------------------------------- processes and loops


def test_an_endpoint_whose_tls_files_are_missing_here_is_left_for_another(stubs: Stage, caller: Make) -> None:
    (b,) = stubs("b")
    broken = Endpoint("a", "https://127.0.0.1:1", tls=Tls(ca="/nowhere/ca.pem"))
    with_it = caller([broken, endpoint(b)])
    for _ in range(4):
        assert attempts(with_it.post())[-1] == "b success"
    alone = caller([broken])
    with pytest.raises(gpuroute.ConfigError, match="TLS files of an endpoint"):
        alone.post()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_that_is_forked_while_a_tls_context_is_built_builds_its_own(stubs: Stage, kind: str) -> None:
    (a,) = stubs("a")
    with_it = Caller(kind, router_for([a]))
    way = with_it.transport()._way
    with way._lock:  # as if another thread held it at this moment
        child = os.fork()
        if not child:
            done = threading.Thread(target=way.shared, daemon=True)
            done.start()
            done.join(60)
            os._exit(done.is_alive())
    assert os.waitpid(child, 0)[1] == 0
    with_it.close()


@pytest.mark.parametrize("name", ["httpx2", "httpx"])
def test_closing_a_wrapped_client_closes_what_it_had_before(stubs: Stage, name: str, eventually: Any) -> None:
    (a,) = stubs("a")
    library = importlib.import_module(name)

    async def scenario() -> None:
        client = library.AsyncClient()
        assert (await client.get(a.url)).status_code == 200
        gpuroute.wrap(client, router_for([a]))
        await client.aclose()
        eventually(lambda: a.open == 0, "no connection is open")

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["httpx2", "httpx"])
def test_a_loop_may_begin_in_another_thread_while_this_one_looks_for_those_that_ended(stubs: Stage, name: str) -> None:
    (a,) = stubs("a")
    transport = importlib.import_module(f"gpuroute.{name}").AsyncTransport(router_for([a]))

    class Ended:
        """A loop that has ended; while it is asked, another thread adds one of its own and forgets this one."""

        def is_closed(self) -> bool:
            transport._by_loop[Ended()] = transport._by_loop.pop(self)
            return True

    async def use() -> None:
        transport._pools()
        assert len(transport._by_loop) == 2

    transport._by_loop = {Ended(): (transport._make_pools(None), None)}
    asyncio.run(use())
    transport._by_loop = {}
