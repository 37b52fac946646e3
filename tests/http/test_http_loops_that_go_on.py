"""A loop whose async generators were shut down may go on: so do frameworks that offer synchronous runs on one loop."""

from __future__ import annotations

import asyncio
import importlib
from typing import TYPE_CHECKING, Any

import pytest
from http_caller import endpoint, in_flight, router_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from http_stub import Stage

pytestmark = [
    pytest.mark.real_time,
    pytest.mark.filterwarnings("ignore:asynchronous generator .* was scheduled after loop.shutdown_asyncgens"),
]


@pytest.fixture(params=["httpx2", "httpx"])
def library(request: pytest.FixtureRequest) -> Any:
    return importlib.import_module(f"gpuroute.{request.param}")


@pytest.fixture
def run() -> Iterator[Callable[[Any], Any]]:
    """Run on one loop, and shut down its async generators after each run."""
    loop = asyncio.new_event_loop()

    def run(awaitable: Any) -> Any:
        try:
            return loop.run_until_complete(awaitable)
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())

    yield run
    loop.close()


async def post(client: Any, times: int = 1) -> None:
    for _ in range(times):
        assert (await client.post("http://llama/v1/x")).status_code == 200


def test_connections_are_kept_in_each_run(stubs: Stage, library: Any, run: Callable[[Any], Any]) -> None:
    (a,) = stubs("a")
    router = router_for([a])
    client = library.AsyncClient(router)
    for _ in range(3):
        before = a.connections
        run(post(client, 5))
        assert a.connections == before + 1
    run(client.aclose())
    assert in_flight(router) == 0


def test_connections_end_with_the_client_after_a_shutdown(
    stubs: Stage, library: Any, run: Callable[[Any], Any], eventually: Callable[..., None]
) -> None:
    (a,) = stubs("a")
    client = library.AsyncClient(router_for([a]))
    run(post(client))

    async def call_and_close() -> None:
        await post(client)
        await client.aclose()

    run(call_and_close())
    eventually(lambda: a.open == 0, "the server sees all connections closed")


def test_hosts_that_are_no_pools_are_let_go_with_the_loop(
    stubs: Stage, library: Any, run: Callable[[Any], Any], eventually: Callable[..., None]
) -> None:
    a, outside = stubs("a", "outside")
    client = library.AsyncClient(router_for([a]), passthrough=True)
    url = f"{endpoint(outside).url}/v1/x"

    async def call() -> int:
        return int((await client.post(url)).status_code)

    assert run(call()) == 200
    eventually(lambda: outside.open == 0, "the connection is closed")
    assert run(call()) == 200
    run(client.aclose())
    eventually(lambda: outside.open == 0, "the connection is closed")
