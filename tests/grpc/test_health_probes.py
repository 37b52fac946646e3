"""Active health checks of gRPC servers: the engine's own question first, then grpc.health.v1."""

from __future__ import annotations

from concurrent import futures
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from checks import checked
from world import Endpoint

from gpuroute.core.wire import Message, encode
from gpuroute.grpc.health import ask, engine_healthy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.real_time

STANDARD = "/grpc.health.v1.Health/Check"
OWN = {
    "triton": "/inference.GRPCInferenceService/ModelReady",
    "mlserver": "/inference.GRPCInferenceService/ModelReady",
    "tf_serving": "/tensorflow.serving.ModelService/GetModelStatus",
    "vllm": "/vllm.grpc.engine.VllmEngine/HealthCheck",
    "sglang": "/sglang.grpc.scheduler.SglangScheduler/HealthCheck",
    "tensorrt_llm": "/trtllm.TrtllmService/HealthCheck",
}
WELL = {"tf_serving": encode((1, encode((1, 7), (2, 30)))), "tensorrt_llm": encode((1, "OK"))}
ILL = {"tf_serving": encode((1, encode((1, 7), (2, 20)))), "tensorrt_llm": encode((1, "engine is dead"))}
SERVING, NOT_SERVING = encode((1, 1)), encode((1, 2))


class Answers(grpc.GenericRpcHandler):
    """What a server says to each question it knows; notes what it was asked."""

    def __init__(self, **known: Any) -> None:
        self.known: dict[str, bytes | grpc.StatusCode] = known["known"]
        self.asked: list[tuple[str, bytes, dict[str, Any]]] = []

    def service(self, details: Any) -> Any:
        known = self.known.get(details.method)
        if known is None:
            return None

        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            self.asked.append((details.method, request, dict(details.invocation_metadata)))
            if isinstance(known, bytes):
                return known
            return context.abort(known, "in other words")  # type: ignore[no-any-return]

        return grpc.unary_unary_rpc_method_handler(answer)


@contextmanager
def answering(known: dict[str, Any]) -> Iterator[tuple[Answers, Callable[..., bool]]]:
    """A server, and a check of an endpoint there."""
    answers = Answers(known=known)
    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=[answers])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()

    def check(engine: str, **fields: Any) -> bool:
        return checked(Endpoint("a", f"grpc://127.0.0.1:{port}", engine=engine, model="llama", **fields))

    try:
        yield answers, check
    finally:
        server.stop(0).wait(30)


@pytest.mark.parametrize("engine", OWN)
def test_an_engine_is_asked_in_its_own_words(engine: str) -> None:
    """Its server may well be SERVING while the model is not there."""
    own = OWN[engine]
    for answer, well in ((WELL.get(engine, encode((1, True))), True), (ILL.get(engine, b""), False)):
        with answering({own: answer, STANDARD: SERVING}) as (answers, check):
            assert check(engine) is well
            assert [method for method, *_ in answers.asked] == [own]


@pytest.mark.parametrize("engine", ["triton", "tf_serving"])
def test_a_model_that_is_not_there_is_not_well(engine: str) -> None:
    with answering({OWN[engine]: grpc.StatusCode.NOT_FOUND, STANDARD: SERVING}) as (answers, check):
        assert check(engine) is False
        (_, request, _) = answers.asked[0]
        assert b"llama" in (Message(request).data(1))


@pytest.mark.parametrize("engine", [*OWN, "", "something new"])
@pytest.mark.parametrize(("answer", "well"), [(SERVING, True), (NOT_SERVING, False), (None, True)])
def test_who_does_not_know_the_question_is_asked_by_the_standard(engine: str, answer: bytes | None, well: bool) -> None:
    """And who knows neither lives, as it answers."""
    with answering({} if answer is None else {STANDARD: answer}) as (_, check):
        assert check(engine) is well


def test_checks_carry_the_endpoints_own_headers() -> None:
    """A server that wants to know who asks would refuse a bare check, and look ill."""
    with answering({STANDARD: SERVING}) as (answers, check):
        assert check("", headers={"Authorization": "Bearer hush", "Tenant-Bin": "seven"})
        (_, _, metadata) = answers.asked[0]
        assert (metadata["authorization"], metadata["tenant-bin"]) == ("Bearer hush", b"seven")


@pytest.mark.parametrize(("status", "well"), [("OK", True), ("engine is dead", False), ("", False)])
def test_tensorrt_llm_says_ok_in_a_text(status: str, well: bool) -> None:
    """The others say `true`."""
    target = OWN["tensorrt_llm"]
    answers = Answers(known={target: encode((1, status or None))})
    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=[answers])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with grpc.insecure_channel(f"ipv4:127.0.0.1:{port}") as channel:
            assert ask(channel, engine_healthy("tensorrt_llm"), timeout=60) is well
    finally:
        server.stop(0).wait(30)
