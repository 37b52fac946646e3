"""Clients that exist already: generated stubs and what is built like Triton's client. The real ones: test_real_peers."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from world import Server, method, refused_url, router_of

import gpuroute
import gpuroute.triton

pytestmark = pytest.mark.real_time


class Stub:
    """What grpcio-tools generates for a service, with bytes for messages."""

    def __init__(self, channel: Any) -> None:
        self.Who = channel.unary_unary(method("Who"), None, None, _registered_method=True)
        self.Count = channel.unary_stream(method("Count"), None, None, _registered_method=True)


class TritonLike:
    """A client that keeps a channel and a stub, and closes the channel."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._client_stub = Stub(channel)

    def close(self) -> Any:
        return self._channel.close()


def nowhere() -> str:
    return refused_url().removeprefix("grpc://")


def test_a_generated_stub_is_routed_and_released(server: Server) -> None:
    stub = Stub(grpc.insecure_channel(nowhere()))
    original = stub.Who
    assert gpuroute.wrap(stub, router_of(server.url), pool="p") is stub
    assert stub.Who(b"") == b"s0"
    assert list(stub.Count(b"2")) == [b"0", b"1"]
    gpuroute.wrap(stub, router_of(server.url), pool="p")
    gpuroute.unwrap(stub)
    assert stub.Who is original
    gpuroute.unwrap(stub)


def test_an_asyncio_stub_is_routed(server: Server) -> None:
    async def run() -> bytes:
        stub = Stub(grpc.aio.insecure_channel(nowhere()))
        gpuroute.wrap(stub, router_of(server.url), pool="p")
        return await stub.Who(b"")

    assert asyncio.run(run()) == b"s0"


def test_a_client_with_channel_and_stub_is_routed(server: Server) -> None:
    client = TritonLike(grpc.insecure_channel(nowhere()))
    channel = client._channel
    gpuroute.triton.attach(client, router_of(server.url), "p")
    assert client._client_stub.Who(b"") == b"s0"
    client.close()
    with pytest.raises(ValueError, match="closed"):
        client._client_stub.Who(b"")
    gpuroute.triton.detach(client)
    assert client._channel is channel


def test_an_asyncio_client_is_routed(server: Server) -> None:
    async def run() -> bytes:
        client = TritonLike(grpc.aio.insecure_channel(nowhere()))
        gpuroute.triton.attach(client, router_of(server.url), "p")
        answer: bytes = await client._client_stub.Who(b"")
        await client.close()
        return answer

    assert asyncio.run(run()) == b"s0"


def test_what_is_not_known_is_refused(server: Server) -> None:
    with pytest.raises(gpuroute.ConfigError, match=r"cannot route a builtins\.object; accepted: a generated gRPC stub"):
        gpuroute.triton.attach(object(), router_of(server.url), "p")
    with pytest.raises(gpuroute.ConfigError, match="pool=NAME"):
        gpuroute.wrap(Stub(grpc.insecure_channel(nowhere())), router_of(server.url))
