"""The stand-in's gRPC face: the same engine, faults and counters as over HTTP, and what a router makes of them."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from ports import own_port
from world import PATIENCE_S, drained, router_of

import gpuroute
import gpuroute.grpc
from gpuroute.core.wire import Message, encode
from gpuroute.grpc import health
from gpuroute.testing import GpuServer
from gpuroute.testing.grpc_face import GrpcFace

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.real_time

INFER, STREAM = "/inference.GRPCInferenceService/ModelInfer", "/inference.GRPCInferenceService/ModelStreamInfer"


@pytest.fixture
def faces() -> Iterator[list[tuple[GpuServer, GrpcFace]]]:
    servers = [GpuServer(time_scale=0.001) for _ in range(2)]
    running: list[tuple[GpuServer, GrpcFace]] = []
    try:
        running.extend((server.start(), GrpcFace(server, port=own_port()).start()) for server in servers)
        yield running
    finally:
        for server, face in running:
            face.stop()
            server.stop()


def request(text: str, max_tokens: int = 4) -> bytes:
    tensor = encode((1, "text_input"), (2, "BYTES"), (3, b"\x01"))
    limit = encode((1, "max_tokens"), (2, encode((2, max_tokens))))
    raw = len(text.encode()).to_bytes(4, "little") + text.encode()
    return encode((1, "llama"), (3, "r1"), (4, limit), (5, tensor), (7, raw))


def text_of(response: bytes) -> str:
    return bytes(Message(response).all(6)[0][4:]).decode()


def router_to(faces: Any, **settings: Any) -> gpuroute.Router:
    return router_of(*(face.url for _, face in faces), **settings)


def test_infer_and_stream_give_the_same_text(faces: Any) -> None:
    router = router_to(faces)
    with gpuroute.grpc.channel(router, "p") as channel:
        whole = channel.unary_unary(INFER)(request("Why is the sky blue?", 6), timeout=30)
        parts = [
            Message(m) for m in channel.stream_stream(STREAM)(iter([request("Why is the sky blue?", 6)]), timeout=30)
        ]
    texts = [text_of(part.data(2)) for part in parts]
    assert len(texts) == 7, "six tokens and the final mark"
    assert "".join(texts) == text_of(whole)
    assert Message(whole).text(3) == "r1"
    assert drained(router)
    assert sum(server.state()["received"] for server, _ in faces) == 2


def test_faults_show_as_statuses_and_are_routed_around(faces: Any) -> None:
    faces[0][0].answer(429)
    router = router_to(faces, policy="round_robin")
    with gpuroute.grpc.channel(router, "p") as channel:
        call = channel.unary_unary(INFER)
        for n in range(6):
            assert call(request(f"question {n}"), timeout=30)
    with grpc.insecure_channel(faces[0][1].url.replace("grpc://", "ipv4:")) as channel:
        with pytest.raises(grpc.RpcError) as error:
            channel.unary_unary(INFER)(request("x"), timeout=30)
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_cancelled_call_frees_the_engine(faces: Any, eventually: Any) -> None:
    server, face = faces[0]
    server.hang()
    with gpuroute.grpc.channel(router_of(face.url), "p") as channel:
        call = channel.unary_unary(INFER).future(request("x"))
        eventually(lambda: server.state()["live"] == 1, "the request is there")
        call.cancel()
        eventually(lambda: server.state()["live"] == 0, "the request is gone")


def test_readiness(faces: Any) -> None:
    server, face = faces[0]
    with grpc.insecure_channel(face.url.replace("grpc://", "ipv4:")) as channel:
        assert health.ask(channel, health.triton_ready("llama"), timeout=60)
        assert health.ask(channel, health.serving(), timeout=60)
        server.health(503)
        assert not health.ask(channel, health.triton_ready(), timeout=60)
        assert not health.ask(channel, health.serving(), timeout=60)


def test_a_face_that_is_closed_costs_no_call_and_comes_back(faces: Any) -> None:
    router = router_to(faces, policy="round_robin", breaker_open="200ms")
    with gpuroute.grpc.channel(router, "p") as channel:
        call = channel.unary_unary(INFER)
        assert call(request("a"), timeout=30)
        faces[0][1].stop()
        for n in range(8):
            assert call(request(f"b{n}"), timeout=30)
        before = faces[0][0].state()["received"]
        faces[0][1].start()
        until = time.monotonic() + PATIENCE_S
        while faces[0][0].state()["received"] == before and time.monotonic() < until:
            call(request("c"), timeout=30)
        assert faces[0][0].state()["received"] > before


def test_load_is_seen_over_grpc_as_over_http(faces: Any, eventually: Any) -> None:
    """Case G7: while one server's answers hang, calls go to the other one."""
    faces[0][0].hang()
    router = router_to(faces, policy="least_request")
    with gpuroute.grpc.channel(router, "p") as channel:
        call = channel.unary_unary(INFER)
        threads: list[threading.Thread] = []
        stuck = faces[0][0]

        def one_more_is_stuck() -> bool:  # the other one may be quick enough to get each of the first
            threads.append(threading.Thread(target=lambda: call(request("x"), timeout=110)))
            threads[-1].start()
            return len(threads) >= 8 and stuck.state()["live"] > 0

        eventually(one_more_is_stuck, "the one that hangs has got a call")
        eventually(lambda: 0 < stuck.state()["live"] == sum(t.is_alive() for t in threads), "the rest is answered")
        before = faces[1][0].state()["received"]
        for n in range(8):
            call(request(f"short {n}"), timeout=90)
        assert faces[1][0].state()["received"] >= before + 7
        faces[0][0].resume()
        for thread in threads:
            thread.join()
    assert drained(router)
