"""Is a gRPC inference server there, ready, and how loaded? Asked in its own words, without its packages.

A `Probe` is one question as data: the method, the request in wire format, and how to read the answer. `ask` puts it to
any channel, `aask` to an asyncio one::

    ask(channel, serving())                    # grpc.health.v1, every server that has it
    ask(channel, triton_ready("llama"))        # Triton, MLServer, KServe v2; without a model: the server itself
    ask(channel, tf_serving_ready("resnet"))   # TF Serving
    ask(channel, engine_healthy("vllm"))       # the services of vLLM, SGLang and TensorRT-LLM

`watch` follows grpc.health.v1, `load_reports` the ORCA service (out of band).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from grpc import RpcError, StatusCode

from gpuroute.core.orca import LoadReport, parse_orca_bin
from gpuroute.core.wire import Message, WireError, encode
from gpuroute.errors import ConfigError
from gpuroute.transports.grpc_reports import METHOD, report_request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import grpc

__all__ = [
    "Probe",
    "aask",
    "ask",
    "engine_healthy",
    "load_reports",
    "serving",
    "tf_serving_ready",
    "triton_ready",
    "watch",
]

_SERVING, _AVAILABLE = 1, 30
_ENGINES = {
    "vllm": "vllm.grpc.engine.VllmEngine",
    "sglang": "sglang.grpc.scheduler.SglangScheduler",
    "tensorrt_llm": "trtllm.TrtllmService",
}


class Probe(NamedTuple):
    """One question: the method's full name, the serialized request, and what the serialized answer means."""

    method: str
    request: bytes
    good: Callable[[Message], bool]


def serving(service: str = "") -> Probe:
    """grpc.health.v1: is this service (or the whole server) SERVING?"""
    return Probe("/grpc.health.v1.Health/Check", encode((1, service or None)), _is_serving)


def triton_ready(model: str = "", version: str = "") -> Probe:
    """KServe v2: is the server ready, or this model of it?"""
    service = "/inference.GRPCInferenceService/"
    if not model:
        return Probe(service + "ServerReady", b"", _first_is_true)
    return Probe(service + "ModelReady", encode((1, model), (2, version or None)), _first_is_true)


def tf_serving_ready(model: str, version: int | None = None) -> Probe:
    """TF Serving: is a version of this model (or that one) AVAILABLE?"""
    wanted = None if version is None else encode((1, version))
    spec = encode((1, model), (2, wanted))
    return Probe("/tensorflow.serving.ModelService/GetModelStatus", encode((1, spec)), _has_available)


def engine_healthy(engine: str) -> Probe:
    """The HealthCheck of an LLM engine's own gRPC service. Raises ConfigError for an engine that has none."""
    if engine not in _ENGINES:
        raise ConfigError(f"engine {engine!r} has no gRPC health check of its own; known: {', '.join(_ENGINES)}")
    return Probe(f"/{_ENGINES[engine]}/HealthCheck", b"", _first_is_true)


def _is_serving(answer: Message) -> bool:
    return answer.integer(1) == _SERVING


def _first_is_true(answer: Message) -> bool:
    return answer.integer(1) == 1


def _has_available(answer: Message) -> bool:
    return any(status.integer(2) == _AVAILABLE for status in answer.messages(1))


def ask(channel: grpc.Channel, probe: Probe, *, timeout: float = 2.0) -> bool:
    """The answer within `timeout` seconds. An unknown service or model is False.

    Raises grpc.RpcError if nobody answers (UNAVAILABLE, DEADLINE_EXCEEDED) or does not know the question (UNIMPLEMENTED).
    """
    call: Any = channel.unary_unary(probe.method)
    try:
        return _read(probe, call(probe.request, timeout=timeout))
    except RpcError as error:
        if error.code() is StatusCode.NOT_FOUND:
            return False
        raise


async def aask(channel: grpc.aio.Channel, probe: Probe, *, timeout: float = 2.0) -> bool:
    """Like `ask`, in asyncio."""
    call: Any = channel.unary_unary(probe.method)
    try:
        return _read(probe, await call(probe.request, timeout=timeout))
    except RpcError as error:
        if error.code() is StatusCode.NOT_FOUND:
            return False
        raise


def _read(probe: Probe, answer: bytes) -> bool:
    try:
        return probe.good(Message(answer))
    except WireError:
        return False


def watch(channel: grpc.Channel, service: str = "") -> Iterator[bool]:
    """grpc.health.v1 Watch: whether the service is SERVING, now and after every change. Ends with grpc.RpcError."""
    call: Any = channel.unary_stream("/grpc.health.v1.Health/Watch")
    probe = serving(service)
    for answer in call(probe.request):
        yield _read(probe, answer)


def load_reports(channel: grpc.Channel, every: float = 1.0) -> Iterator[LoadReport]:
    """What the server's ORCA service reports of its load, every so many seconds. Ends with grpc.RpcError.

    For looking; `gpuroute.grpc.channel(..., load_reports=1.0)` routes by them.
    """
    call: Any = channel.unary_stream(METHOD)
    for answer in call(report_request(every)):
        report = parse_orca_bin(answer)
        if report is not None:
            yield report
