"""`wrap` and `unwrap` on plain clients and on the SDKs, and the SDKs over a stand-in server."""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Any

import anthropic
import httpx
import httpx2
import openai
import pytest
import trustme
from http_caller import endpoint, in_flight, router_for
from http_stub import sse, status

import gpuroute
from gpuroute import Endpoint
from gpuroute.testing import GpuServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from http_stub import Stage

pytestmark = pytest.mark.real_time

LIBRARIES = (httpx2, httpx)


def post(client: Any, url: str = "http://llama/v1/x", **arguments: Any) -> Any:
    if not hasattr(client, "aclose"):
        return client.post(url, **arguments)

    async def call() -> Any:
        return await client.post(url, **arguments)

    return asyncio.run(call())


def make(library: Any, *, asynchronous: bool, **arguments: Any) -> Any:
    return (library.AsyncClient if asynchronous else library.Client)(**arguments)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.__name__)
class TestPlainClients:
    def test_wrap_routes_and_unwrap_restores(
        self, stubs: Stage, library: Any, *, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        a, b = stubs("a", "b")
        monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
        client = make(library, asynchronous=asynchronous)
        before, mounts = client._transport, client._mounts
        assert mounts
        router = router_for([a, b])
        assert gpuroute.wrap(client, router) is client
        assert {post(client).json()["endpoint"] for _ in range(2)} == {"a", "b"}
        routed = client._transport
        assert gpuroute.wrap(client, router)._transport is routed, "idempotent"
        assert gpuroute.unwrap(client) is client
        assert (client._transport, client._mounts) == (before, mounts)
        assert gpuroute.unwrap(client)._transport is before, "harmless"

    def test_a_pool_for_every_request(self, stubs: Stage, library: Any, *, asynchronous: bool) -> None:
        a, b = stubs("a", "b")
        router = router_for([a])
        router.registry.set({"llama": [endpoint(a)], "embed": [endpoint(b)]})
        client = gpuroute.wrap(make(library, asynchronous=asynchronous), router, pool="llama")
        assert post(client, "http://anything.example/v1/x").json()["endpoint"] == "a"
        gpuroute.wrap(client, router, pool="embed")
        assert post(client, "http://anything.example/v1/x").json()["endpoint"] == "b"
        gpuroute.unwrap(client)
        assert isinstance(client._transport, (library.HTTPTransport, library.AsyncHTTPTransport))

    def test_passthrough_uses_the_clients_own_transport(self, stubs: Stage, library: Any, *, asynchronous: bool) -> None:
        a, b = stubs("a", "b")
        client = gpuroute.wrap(make(library, asynchronous=asynchronous), router_for([a]), passthrough=True)
        assert post(client, f"{b.url}/x").json()["endpoint"] == "b"
        assert post(client).json()["endpoint"] == "a"

    def test_the_clients_tls_context_and_limits_are_kept(self, stubs: Stage, library: Any, *, asynchronous: bool) -> None:
        authority = trustme.CA()
        served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert("127.0.0.1").configure_cert(served)
        trust = ssl.create_default_context()
        authority.configure_trust(trust)
        (a,) = stubs("a", tls=served)
        limits = library.Limits(max_connections=7, max_keepalive_connections=3, keepalive_expiry=1.5)
        client = gpuroute.wrap(make(library, asynchronous=asynchronous, verify=trust, limits=limits), router_for([a]))
        assert post(client).status_code == 200
        kept = client._transport._limits
        assert (kept.in_use, kept.idle, kept.expiry) == (7, 3, 1.5)

    def test_unknown_transports_are_refused(self, stubs: Stage, library: Any, *, asynchronous: bool) -> None:
        (a,) = stubs("a")
        router = router_for([a])
        mock = library.MockTransport(lambda request: library.Response(200))
        with pytest.raises(gpuroute.ConfigError, match=r"custom transport httpx2?\.MockTransport"):
            gpuroute.wrap(make(library, asynchronous=asynchronous, transport=mock), router)
        own = library.AsyncHTTPTransport if asynchronous else library.HTTPTransport
        with pytest.raises(gpuroute.ConfigError, match="bound to a proxy or a Unix socket"):
            gpuroute.wrap(make(library, asynchronous=asynchronous, transport=own(uds="/tmp/x")), router)
        mounted = make(library, asynchronous=asynchronous, mounts={"http://x": mock})
        with pytest.raises(gpuroute.ConfigError, match="MockTransport"):
            gpuroute.wrap(mounted, router)

    def test_closing_closes_both_transports(self, stubs: Stage, library: Any, *, asynchronous: bool) -> None:
        a, b = stubs("a", "b")

        async def scenario() -> None:
            async with gpuroute.wrap(library.AsyncClient(), router_for([a]), passthrough=True) as client:
                await client.post("http://llama/x")
                await client.post(f"{b.url}/x")

        if asynchronous:
            asyncio.run(scenario())
        else:
            with gpuroute.wrap(library.Client(), router_for([a]), passthrough=True) as client:
                client.post("http://llama/x")
                client.post(f"{b.url}/x")
                plain = client._transport.replaced[0]
            assert plain._pool.connections == []


def test_what_is_no_client_is_refused() -> None:
    for thing in (object(), None, "client", httpx2):
        with pytest.raises(gpuroute.ConfigError, match=r"accepted: httpx2\.Client, .* openai or anthropic client"):
            gpuroute.wrap(thing)


def test_without_a_router_the_environment_makes_one_for_all(stubs: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuroute import wrapping

    wrapping._shared_router.cache_clear()
    (a,) = stubs("a")
    with pytest.raises(gpuroute.ConfigError, match="GPUROUTE_REGISTRY"):
        gpuroute.wrap(httpx2.Client())
    monkeypatch.setenv("GPUROUTE_REGISTRY", f"llama={a.url}")
    first, second = gpuroute.wrap(httpx2.Client()), gpuroute.wrap(httpx.Client(), "llama")
    assert post(first).json()["endpoint"] == "a"
    assert post(second, "http://x/y").json()["endpoint"] == "a", "a text is the pool"
    assert first._transport.router is second._transport.router
    wrapping._shared_router.cache_clear()


def test_a_client_of_ours_is_routed_already(stubs: Stage) -> None:
    import gpuroute.httpx2

    (a,) = stubs("a")
    router = router_for([a])
    client = gpuroute.httpx2.Client(router)
    transport = client._transport
    assert gpuroute.wrap(client, router)._transport is transport
    sdk = openai.OpenAI(api_key="-", base_url="http://llama/v1", http_client=client)
    gpuroute.wrap(sdk, router)
    assert (sdk.max_retries, client._transport) == (0, transport)
    gpuroute.unwrap(sdk)
    assert (sdk.max_retries, client._transport) == (2, transport)


# ------------------------------------------------------------------------------------------------ SDKs


@pytest.fixture(scope="module")
def gpus() -> Iterator[list[GpuServer]]:
    servers = [GpuServer(time_scale=0.0).start() for _ in range(2)]
    yield servers
    for server in servers:
        server.stop()


@pytest.fixture
def fleet(gpus: list[GpuServer], eventually: Any) -> Iterator[gpuroute.Router]:
    for gpu in gpus:
        gpu.resume()
    router = router_for([Endpoint(f"gpu-{n}", gpu.url) for n, gpu in enumerate(gpus)])
    yield router
    eventually(lambda: in_flight(router) == 0, "nothing is in flight")
    router.close()


CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


def test_openai(fleet: gpuroute.Router) -> None:
    client = gpuroute.wrap(openai.OpenAI(api_key="-", base_url="http://llama/v1"), fleet)
    assert client.max_retries == 0
    whole = client.chat.completions.create(**CHAT)
    assert whole.usage.completion_tokens == 5
    with client.chat.completions.create(**CHAT, stream=True) as stream:
        words = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(words) == whole.choices[0].message.content
    assert client.embeddings.create(model="m", input="text").data
    raw = client.with_raw_response.chat.completions.create(**CHAT, extra_headers={"x-gpuroute-attempts": "1"})
    assert raw.http_response.extensions["gpuroute"]["pool"] == "llama"
    gpuroute.unwrap(client)
    assert client.max_retries == 2


def test_async_openai(fleet: gpuroute.Router) -> None:
    async def scenario() -> None:
        async with gpuroute.wrap(
            openai.AsyncOpenAI(api_key="-", base_url="http://any/v1"), fleet, pool="llama"
        ) as client:
            answers = await asyncio.gather(*(client.chat.completions.create(**CHAT) for _ in range(8)))
            assert {answer.usage.completion_tokens for answer in answers} == {5}
            stream = await client.chat.completions.create(**CHAT, stream=True)
            count = 0
            async for chunk in stream:
                count += bool(chunk.choices)
            assert count >= 5
            broken = await client.chat.completions.create(**CHAT, stream=True)
            async for _ in broken:
                break
            await broken.close()

    asyncio.run(scenario())


def test_anthropic(fleet: gpuroute.Router) -> None:
    client = gpuroute.wrap(anthropic.Anthropic(api_key="-", base_url="http://llama"), fleet)
    message: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    assert client.messages.create(**message).usage.output_tokens == 5
    with client.messages.stream(**message) as stream:
        assert stream.get_final_message().usage.output_tokens == 5

    async def scenario() -> None:
        async with gpuroute.wrap(anthropic.AsyncAnthropic(api_key="-", base_url="http://llama"), fleet) as other:
            assert (await other.messages.create(**message)).usage.output_tokens == 5
            async with other.messages.stream(**message) as stream:
                assert (await stream.get_final_message()).usage.output_tokens == 5

    asyncio.run(scenario())


def test_sdk_retries_do_not_multiply_ours(stubs: Stage) -> None:
    """R1 with a real SDK, whether it was wrapped (its retries are off) or not (the header stops it)."""
    import gpuroute.httpx2

    servers = stubs("a", "b", "c", "d", behave=status(500, b"{}"))
    router = router_for(servers, retry_floor="1000/s", breaker_failures=1000)
    ours = gpuroute.httpx2.Client(router)
    wrapped = gpuroute.wrap(openai.OpenAI(api_key="-", base_url="http://llama/v1"), router)
    given = openai.OpenAI(api_key="-", base_url="http://llama/v1", http_client=ours)
    for client in (wrapped, given):
        before = sum(len(server.came) for server in servers)
        with pytest.raises(openai.InternalServerError):
            client.chat.completions.create(**CHAT)
        assert sum(len(server.came) for server in servers) == before + 3


def test_sdk_errors_tell_what_happened(stubs: Stage) -> None:
    (a,) = stubs("a")
    client = gpuroute.wrap(openai.OpenAI(api_key="-", base_url="http://llama/v1"), router_for([a]))
    with pytest.raises(gpuroute.UnknownPool):
        openai.OpenAI(api_key="-", base_url="http://lama/v1", http_client=client._client).models.list()
    router = router_for([Endpoint("x", "http://127.0.0.1:9")])
    lost = gpuroute.wrap(openai.OpenAI(api_key="-", base_url="http://llama/v1"), router)
    with pytest.raises(openai.APIConnectionError) as caught:
        lost.models.list()
    assert "3 attempts: x ConnectError" in caught.value.__cause__.__notes__[0]

    a.behave = sse("one ", "two", pause=0.02, then=lambda exchange: exchange.reset())
    stream = client.chat.completions.create(**CHAT, stream=True)
    with pytest.raises(openai.APIConnectionError) as caught:
        list(stream)
    interrupted = caught.value.__cause__
    assert isinstance(interrupted, gpuroute.StreamInterrupted), "the SDK wraps what its stream raises"
    assert "one two".startswith(interrupted.partial_text)


def test_keys_and_timeouts_by_extra_headers(stubs: Stage) -> None:
    servers = stubs("a", "b", "c", behave=status(200, {"object": "list", "data": []}))
    client = gpuroute.wrap(openai.OpenAI(api_key="-", base_url="http://llama/v1"), router_for(servers, policy="session"))
    for _ in range(4):
        client.models.list(extra_headers={"x-gpuroute-key": "u", "x-gpuroute-timeout": "30s"})
    assert sorted(len(server.came) for server in servers) == [0, 0, 4]
