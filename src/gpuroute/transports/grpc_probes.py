"""What gRPC inference servers are asked to know that they are ready, each in its own words, without their packages."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gpuroute.core.wire import Message, WireError, encode
from gpuroute.engines.catalog import engine_of
from gpuroute.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gpuroute.core.endpoint import Endpoint

_SERVING, _AVAILABLE = 1, 30
_KSERVE = frozenset({"triton", "triton_tensorrt_llm", "kserve"})


class Probe(NamedTuple):
    """One question: the method's full name, the serialized request, and what the serialized answer means."""

    method: str
    request: bytes
    good: Callable[[Message], bool]

    def read(self, answer: bytes) -> bool:
        """True if this answer says ready. Garbage does not."""
        try:
            return self.good(Message(answer))
        except WireError:
            return False


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
    service, good = _ENGINES[engine]
    return Probe(f"/{service}/HealthCheck", b"", good)


def probes_of(endpoint: Endpoint) -> Iterator[Probe]:
    """What to ask this endpoint, the most telling first; the next one if it does not know the question."""
    engine = engine_of(endpoint.engine)
    if engine.name in _KSERVE:
        yield triton_ready(endpoint.model if "{model}" in engine.ready else "")
    elif engine.name == "tf_serving" and endpoint.model:
        yield tf_serving_ready(endpoint.model)
    elif engine.name in _ENGINES:
        yield engine_healthy(engine.name)
    yield serving()


def _is_serving(answer: Message) -> bool:
    return answer.integer(1) == _SERVING


def _first_is_true(answer: Message) -> bool:
    return answer.integer(1) == 1


def _says_ok(answer: Message) -> bool:
    return answer.text(1) == "OK"


def _has_available(answer: Message) -> bool:
    return any(status.integer(2) == _AVAILABLE for status in answer.messages(1))


_ENGINES = {
    "vllm": ("vllm.grpc.engine.VllmEngine", _first_is_true),
    "sglang": ("sglang.grpc.scheduler.SglangScheduler", _first_is_true),
    "tensorrt_llm": ("trtllm.TrtllmService", _says_ok),
}
