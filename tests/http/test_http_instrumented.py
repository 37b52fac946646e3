"""What instruments (of OpenTelemetry, say) put in the place of a transport's methods is not lost in silence."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx
import httpx2
import pytest
from http_caller import router_for

import gpuroute

if TYPE_CHECKING:
    from http_stub import Stage

pytestmark = [
    pytest.mark.real_time,
    pytest.mark.parametrize("asynchronous", [False, True]),
    pytest.mark.parametrize("library", [httpx2, httpx], ids=lambda library: library.__name__),
]


def instrument(transport: Any, *, asynchronous: bool) -> list[str]:
    """Replace the method that sends, as instruments of one client do. The hosts that it then sees."""
    seen: list[str] = []
    name = "handle_async_request" if asynchronous else "handle_request"
    original = getattr(transport, name)

    def handle(request: Any) -> Any:
        seen.append(request.url.host)
        return original(request)

    setattr(transport, name, handle)
    return seen


def make(library: Any, *, asynchronous: bool, **arguments: Any) -> Any:
    return (library.AsyncClient if asynchronous else library.Client)(**arguments)


def test_a_client_that_is_instrumented_is_not_wrapped(stubs: Stage, library: Any, *, asynchronous: bool) -> None:
    (a,) = stubs("a")
    client = make(library, asynchronous=asynchronous)
    before = client._transport
    instrument(client._transport, asynchronous=asynchronous)
    with pytest.raises(gpuroute.ConfigError, match="instrument the client after"):
        gpuroute.wrap(client, router_for([a]))
    assert client._transport is before


def test_nor_one_with_an_instrumented_mount(stubs: Stage, library: Any, *, asynchronous: bool) -> None:
    (a,) = stubs("a")
    mount = (library.AsyncHTTPTransport if asynchronous else library.HTTPTransport)()
    client = make(library, asynchronous=asynchronous, mounts={"http://other": mount})
    instrument(mount, asynchronous=asynchronous)
    with pytest.raises(gpuroute.ConfigError, match="instrument the client after"):
        gpuroute.wrap(client, router_for([a]))


def test_a_client_that_is_wrapped_can_be_instrumented(stubs: Stage, library: Any, *, asynchronous: bool) -> None:
    (a,) = stubs("a")
    router = router_for([a])
    client = gpuroute.wrap(make(library, asynchronous=asynchronous), router)
    seen = instrument(client._transport, asynchronous=asynchronous)
    assert gpuroute.wrap(client, router) is client

    async def post() -> Any:
        async with client:
            return await client.post("http://llama/v1/x")

    answer = asyncio.run(post()) if asynchronous else client.post("http://llama/v1/x")
    assert answer.json()["endpoint"] == "a"
    assert seen == ["llama"]
