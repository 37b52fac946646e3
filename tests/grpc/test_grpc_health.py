"""Readiness questions in the words of each server, against servers that answer in wire format."""

from __future__ import annotations

import asyncio
import struct
from concurrent import futures
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest

import gpuroute
from gpuroute.core.wire import Message, encode
from gpuroute.grpc import health

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.real_time


@contextmanager
def answering(service: str, method: str, answer: Callable[[bytes, Any], Any], *, stream: bool = False) -> Iterator[str]:
    handler = grpc.unary_stream_rpc_method_handler if stream else grpc.unary_unary_rpc_method_handler
    server = grpc.server(futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler(answer)}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"ipv4:127.0.0.1:{port}"
    finally:
        server.stop(0).wait(30)


def check(target: str, probe: health.Probe) -> bool:
    """Asked in both manners, which must agree."""

    async def asked() -> bool:
        async with grpc.aio.insecure_channel(target) as channel:
            return await health.aask(channel, probe, timeout=60)

    with grpc.insecure_channel(target) as channel:
        found = health.ask(channel, probe, timeout=60)
    assert asyncio.run(asked()) is found
    return found


@pytest.mark.parametrize(("status", "good"), [(1, True), (2, False), (0, False), (3, False)])
def test_grpc_health(status: int, good: bool) -> None:
    with answering("grpc.health.v1.Health", "Check", lambda request, _: encode((1, status))) as target:
        assert check(target, health.serving("x")) is good


def test_an_unknown_service_is_not_serving() -> None:
    def unknown(request: bytes, context: grpc.ServicerContext) -> bytes:
        assert Message(request).text(1) == "x"
        context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")

    with answering("grpc.health.v1.Health", "Check", unknown) as target:
        assert check(target, health.serving("x")) is False


def test_nobody_there_is_an_error() -> None:
    with grpc.insecure_channel("ipv4:127.0.0.1:1") as channel, pytest.raises(grpc.RpcError) as error:
        health.ask(channel, health.serving(), timeout=30)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE


def test_watching_health() -> None:
    def changes(request: bytes, context: Any) -> Iterator[bytes]:
        yield from (encode((1, status)) for status in (2, 1, 2))

    with (
        answering("grpc.health.v1.Health", "Watch", changes, stream=True) as target,
        grpc.insecure_channel(target) as channel,
    ):
        assert list(health.watch(channel)) == [False, True, False]


@pytest.mark.parametrize("ready", [True, False])
def test_triton(ready: bool) -> None:
    service = "inference.GRPCInferenceService"
    with answering(service, "ServerReady", lambda request, _: encode((1, ready or None))) as target:
        assert check(target, health.triton_ready()) is ready

    def model(request: bytes, context: Any) -> bytes:
        asked = Message(request)
        return encode((1, ready and (asked.text(1), asked.text(2)) == ("llama", "3")))

    with answering(service, "ModelReady", model) as target:
        assert check(target, health.triton_ready("llama", "3")) is ready


@pytest.mark.parametrize(("states", "good"), [((30,), True), ((20,), False), ((50, 30), True), ((), False)])
def test_tf_serving(states: tuple[int, ...], good: bool) -> None:
    def status(request: bytes, context: Any) -> bytes:
        spec = Message(request).message(1)
        assert (spec.text(1), spec.message(2).integer(1)) == ("bert", 4)
        return encode(*((1, encode((1, n), (2, state))) for n, state in enumerate(states)))

    with answering("tensorflow.serving.ModelService", "GetModelStatus", status) as target:
        assert check(target, health.tf_serving_ready("bert", 4)) is good


def test_engines_own_checks() -> None:
    with answering("vllm.grpc.engine.VllmEngine", "HealthCheck", lambda request, _: encode((1, True))) as target:
        assert check(target, health.engine_healthy("vllm")) is True
    with pytest.raises(gpuroute.ConfigError, match="known: vllm, sglang, tensorrt_llm"):
        health.engine_healthy("tgi")


def test_garbage_is_not_ready() -> None:
    with answering("grpc.health.v1.Health", "Check", lambda request, _: b"\xff\xff") as target:
        assert check(target, health.serving()) is False


def test_load_reports_out_of_band() -> None:
    asked: list[Message] = []

    def reports(request: bytes, context: Any) -> Iterator[bytes]:
        asked.append(Message(request).message(1))
        for waiting in (3.0, 5.0):
            yield encode((8, encode((1, "num_requests_waiting")) + b"\x11" + struct.pack("<d", waiting)))

    service = "xds.service.orca.v3.OpenRcaService"
    with (
        answering(service, "StreamCoreMetrics", reports, stream=True) as target,
        grpc.insecure_channel(target) as channel,
    ):
        assert [report.waiting for report in health.load_reports(channel, every=1.5)] == [3.0, 5.0]
    assert (asked[0].integer(1), asked[0].integer(2)) == (1, 500_000_000)
