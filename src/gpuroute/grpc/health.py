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

from typing import TYPE_CHECKING, Any

from grpc import RpcError, StatusCode

from gpuroute.core.orca import LoadReport, parse_orca_bin
from gpuroute.transports.grpc_probes import Probe, engine_healthy, serving, tf_serving_ready, triton_ready
from gpuroute.transports.grpc_reports import METHOD, report_request

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def ask(channel: grpc.Channel, probe: Probe, *, timeout: float = 2.0) -> bool:
    """The answer within `timeout` seconds. An unknown service or model is False.

    Raises grpc.RpcError if nobody answers (UNAVAILABLE, DEADLINE_EXCEEDED) or does not know the question (UNIMPLEMENTED).
    """
    call: Any = channel.unary_unary(probe.method)
    try:
        return probe.read(call(probe.request, timeout=timeout))
    except RpcError as error:
        if error.code() is StatusCode.NOT_FOUND:
            return False
        raise


async def aask(channel: grpc.aio.Channel, probe: Probe, *, timeout: float = 2.0) -> bool:
    """Like `ask`, in asyncio."""
    call: Any = channel.unary_unary(probe.method)
    try:
        return probe.read(await call(probe.request, timeout=timeout))
    except RpcError as error:
        if error.code() is StatusCode.NOT_FOUND:
            return False
        raise


def watch(channel: grpc.Channel, service: str = "") -> Iterator[bool]:
    """grpc.health.v1 Watch: whether the service is SERVING, now and after every change. Ends with grpc.RpcError."""
    call: Any = channel.unary_stream("/grpc.health.v1.Health/Watch")
    probe = serving(service)
    for answer in call(probe.request):
        yield probe.read(answer)


def load_reports(channel: grpc.Channel, every: float = 1.0) -> Iterator[LoadReport]:
    """What the server's ORCA service reports of its load, every so many seconds. Ends with grpc.RpcError.

    For looking; `gpuroute.grpc.channel(..., load_reports=1.0)` routes by them.
    """
    call: Any = channel.unary_stream(METHOD)
    for answer in call(report_request(every)):
        report = parse_orca_bin(answer)
        if report is not None:
            yield report
