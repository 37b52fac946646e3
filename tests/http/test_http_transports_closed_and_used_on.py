"""A transport that several clients share, one after the other: each closes it, and the next one keeps connections."""

from __future__ import annotations

import asyncio
import importlib
from typing import TYPE_CHECKING, Any

import pytest
from http_caller import in_flight, router_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from http_stub import Stage

pytestmark = pytest.mark.real_time

URL = "http://llama/v1/x"


@pytest.mark.parametrize("name", ["httpx2", "httpx"])
def test_threads(stubs: Stage, name: str, eventually: Callable[..., None]) -> None:
    (a,) = stubs("a")
    library, ours = importlib.import_module(name), importlib.import_module(f"gpuroute.{name}")
    router = router_for([a])
    transport = ours.Transport(router)
    for number in range(1, 4):
        client = library.Client(transport=transport)
        for _ in range(4):
            assert client.post(URL).status_code == 200
        assert a.connections == number
        client.close()
        eventually(lambda: a.open == 0, "the server sees all connections closed")
    assert in_flight(router) == 0


@pytest.mark.parametrize("name", ["httpx2", "httpx"])
def test_tasks(stubs: Stage, name: str, eventually: Callable[..., None]) -> None:
    (a,) = stubs("a")
    library, ours = importlib.import_module(name), importlib.import_module(f"gpuroute.{name}")
    router = router_for([a])
    transport = ours.AsyncTransport(router)

    async def one_client(number: int) -> None:
        async with library.AsyncClient(transport=transport) as client:
            for _ in range(4):
                assert (await client.post(URL)).status_code == 200
            assert a.connections == number

    async def clients() -> None:
        for number in range(1, 4):
            await one_client(number)

    asyncio.run(clients())
    eventually(lambda: a.open == 0, "the server sees all connections closed")
    assert in_flight(router) == 0


@pytest.mark.parametrize("name", ["httpx2", "httpx"])
def test_a_loop_whose_connections_are_closed_from_another_one(
    stubs: Stage, name: str, eventually: Callable[..., None]
) -> None:
    (a,) = stubs("a")
    library, ours = importlib.import_module(name), importlib.import_module(f"gpuroute.{name}")
    transport: Any = ours.AsyncTransport(router_for([a]))

    async def posts(times: int) -> None:
        client = library.AsyncClient(transport=transport)
        for _ in range(times):
            assert (await client.post(URL)).status_code == 200

    async def close() -> None:
        await transport.aclose()

    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(posts(3))
        asyncio.run(close())
        loop.run_until_complete(asyncio.sleep(0))
        eventually(lambda: a.open == 0, "the server sees the connection closed")
        loop.run_until_complete(posts(3))
        assert a.connections == 2
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
    eventually(lambda: a.open == 0, "the server sees all connections closed")
