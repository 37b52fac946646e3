"""The gRPC drivers ask too, and wait for the answers in their own ways."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc
import pytest
from agent.stage import KEY, AgentThread, desks
from ports import closed_udp_port

import gpuroute.grpc
import gpuroute.grpc.aio
from gpuroute.core.prefix import Prompt
from gpuroute.router import Router
from gpuroute.transports.asking import asker_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.real_time


class Echo(grpc.GenericRpcHandler):
    """Answers every method: `/x/one` with its request, `/x/many` with three of them."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        if details.method == "/x/one":
            return grpc.unary_unary_rpc_method_handler(lambda request, _: request)
        return grpc.unary_stream_rpc_method_handler(lambda request, _: iter([request] * 3))


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(4), handlers=[Echo()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"grpc://127.0.0.1:{port}"
    server.stop(None)


def router_for(agent: AgentThread, url: str, **settings: object) -> Router:
    endpoints = [replace(endpoint, protocol="grpc") for endpoint in agent.endpoints(url)]
    given = {"asks": "on", "agent_key": KEY, "ask_timeout": "60s", **settings}
    return Router(endpoints={"p": endpoints}, **given)


def prompt(_: str, request: bytes) -> Prompt:
    return Prompt(request, 5_000)


def told(agent: AgentThread) -> tuple[int, int]:
    """Takes and tells; asks may have been sent again on a busy machine."""
    return tuple(sum(getattr(desk, name) for desk in agent.desks) for name in ("takes", "tells"))


def test_sync_calls_ask(server_url: str, eventually: Callable[..., None]) -> None:
    with AgentThread(desks(2)) as agent:
        router = router_for(agent, server_url)
        with gpuroute.grpc.channel(router, "p", prompt=prompt) as channel:
            assert channel.unary_unary("/x/one")(b"hello", timeout=60) == b"hello"
            assert channel.unary_unary("/x/one").future(b"hello", timeout=60).result() == b"hello"
            assert list(channel.unary_stream("/x/many")(b"hello", timeout=60)) == [b"hello"] * 3
        eventually(lambda: told(agent) == (3, 3), "three calls have asked two agents, taken and told")
        assert asker_of(router).counts.asks == 6
        assert all(desk.asks >= 3 for desk in agent.desks)
        assert sum(desk.book.rate.count > 0 for desk in agent.desks) == 1, "only the stream has a first token"


def test_async_calls_ask(server_url: str, eventually: Callable[..., None]) -> None:
    async def main(router: Router) -> None:
        async with gpuroute.grpc.aio.channel(router, "p", prompt=prompt) as channel:
            assert await channel.unary_unary("/x/one")(b"hello", timeout=60) == b"hello"
            assert [m async for m in channel.unary_stream("/x/many")(b"hello", timeout=60)] == [b"hello"] * 3

    with AgentThread(desks(2)) as agent:
        asyncio.run(main(router_for(agent, server_url)))
        eventually(lambda: told(agent) == (2, 2), "both calls have asked, taken and told")


def test_the_busy_one_is_avoided_and_silence_does_not_hurt(server_url: str, eventually: Callable[..., None]) -> None:
    with AgentThread(desks(2)) as agent:
        router = router_for(agent, server_url)
        asker_of(router).round_trip = 60.0  # so the last answer is waited for
        agent.desks[0].sampled(agent.desks[0].book.sample._replace(queued_tokens=500_000))
        with gpuroute.grpc.channel(router, "p", prompt=prompt) as channel:
            for _ in range(5):
                channel.unary_unary("/x/one")(b"hello", timeout=60)
        eventually(lambda: told(agent) == (5, 5), "all have taken and told")
        assert agent.desks[0].takes == 0
    agent.port = closed_udp_port()
    with gpuroute.grpc.channel(router_for(agent, server_url, ask_timeout="5ms"), "p") as channel:
        assert channel.unary_unary("/x/one")(b"hello", timeout=60) == b"hello"
