"""Under what instruments `grpc` itself: OpenTelemetry's patch makes bare generators of streams."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc.experimental import ChannelOptions
from world import Endpoint, Server, drained, method, router_of

import gpuroute.grpc
from gpuroute.registry.etcd_client import _open
from gpuroute.registry.etcd_config import EtcdConfig

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.real_time


class Instrumented:
    """A channel as `GrpcInstrumentorClient().instrument()` lets `grpc.insecure_channel` make them (0.66)."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.close, self.unary_unary = channel.close, channel.unary_unary
        self._channel = channel

    def unary_stream(self, *what: Any, **how: Any) -> Any:
        call = self._channel.unary_stream(*what, **how)
        return lambda *request, **more: (message for message in call(*request, **more))


Instrumented.__module__ = "opentelemetry.instrumentation.grpc.grpcext._interceptor"


@pytest.fixture
def instrumented(monkeypatch: pytest.MonkeyPatch) -> None:
    def patched(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def instrumented(*what: Any, **how: Any) -> Instrumented:
            return Instrumented(make(*what, **how))

        return instrumented

    for name in ("insecure_channel", "secure_channel"):
        monkeypatch.setattr(grpc, name, patched(getattr(grpc, name)))


@pytest.mark.usefixtures("instrumented")
def test_streams_stay_calls_that_can_be_cancelled_and_dropped(server: Server) -> None:
    assert not hasattr(grpc.insecure_channel(server.target).unary_stream(method("Count"))(b"1"), "cancel")
    router = router_of(server.url)
    with gpuroute.grpc.channel(router, "p") as channel:
        count = channel.unary_stream(method("Count"))
        call = count(b"2")
        assert (list(call), call.code()) == ([b"0", b"1"], grpc.StatusCode.OK)
        call = count(b"1 wait")
        assert (next(call), call.cancel(), call.code()) == (b"0", True, grpc.StatusCode.CANCELLED)
        call = count(b"1 wait")
        assert next(call) == b"0"
        del call
        assert drained(router)


@pytest.mark.usefixtures("instrumented")
def test_the_registrys_own_connections_are_nobodys_business() -> None:
    for config in (EtcdConfig(members=("127.0.0.1:1",)), EtcdConfig(members=("127.0.0.1:1",), tls=True)):
        channel = _open(config, "127.0.0.1:1")
        assert not isinstance(channel, Instrumented)
        channel.close()


def test_streams_that_only_their_reader_would_hear_the_end_of_are_not_made(server: Server) -> None:
    """grpcio's experimental option leaves a stream without its reader running, and counted, for ever."""
    router = router_of(server.url)
    with gpuroute.grpc.channel(router, "p", options=((ChannelOptions.SingleThreadedUnaryStream, 1),)) as channel:
        call = channel.unary_stream(method("Count"))(b"1 wait")
        assert next(call) == b"0"
        del call
        assert drained(router)


def test_binary_headers_of_an_endpoint_are_sent_as_bytes(server: Server) -> None:
    router = router_of(Endpoint("a", server.url, headers={"Tenant-Bin": "seven"}))
    with gpuroute.grpc.channel(router, "p") as channel:
        assert channel.unary_unary(method("Who"))(b"") == b"s0"
    assert server.service.metadata == [(("tenant-bin", b"seven"),)]
