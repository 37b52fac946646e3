"""tritonclient, sync and asyncio, through a routed channel to real servers: MLServer, and Triton where it is there."""

from __future__ import annotations

import asyncio
import collections
import queue
import threading
import time
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from checks import checked
from peers import Peer, mlserver, triton
from world import Endpoint, drained, router_of

import gpuroute
import gpuroute.grpc
import gpuroute.grpc.aio
import gpuroute.triton
from gpuroute.grpc import health

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

np = pytest.importorskip("numpy", reason="tritonclient needs numpy")
client = pytest.importorskip("tritonclient.grpc", reason="the package tritonclient[grpc] is not installed")
aio_client = pytest.importorskip("tritonclient.grpc.aio")
http_client = pytest.importorskip("tritonclient.http", reason="the package tritonclient[http] is not installed")
aio_http_client = pytest.importorskip("tritonclient.http.aio")

pytestmark = [pytest.mark.real, pytest.mark.real_time]


def started(make: Any, count: int, directory: Path, model: str) -> Iterator[list[Peer]]:
    running: list[Peer] = []
    try:
        running.extend(make(f"m{n}", directory) for n in range(count))
        yield [peer.wait_ready(model) for peer in running]
    finally:
        for peer in running:
            peer.stop()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Peer]]:
    yield from started(mlserver, 2, tmp_path_factory.mktemp("mlserver"), "echo")


@pytest.fixture(scope="module")
def tritons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Peer]]:
    yield from started(triton, 2, tmp_path_factory.mktemp("triton"), "words")


def text(value: bytes) -> list[Any]:
    tensor = client.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([value], dtype=object))
    return [tensor]


def router_to(peers: list[Peer], **settings: Any) -> gpuroute.Router:
    return router_of(*(peer.url for peer in peers), **settings)


def attached(router: gpuroute.Router) -> Any:
    return gpuroute.wrap(client.InferenceServerClient("127.0.0.1:1"), router, pool="p")


def server_of(result: Any) -> bytes:
    name: bytes = result.as_numpy("server")[0]
    return name


# ------------------------------------------------------------------------------------------ MLServer


def test_infer_goes_to_every_server(servers: list[Peer]) -> None:
    router = router_to(servers, policy="round_robin")
    routed = attached(router)
    assert routed.is_server_ready()
    assert routed.is_model_ready("echo")
    results = [routed.infer("echo", text(b"hello %d" % n), client_timeout=60) for n in range(8)]
    assert [result.as_numpy("text_input")[0] for result in results] == [b"hello %d" % n for n in range(8)]
    assert {server_of(result) for result in results} == {b"m0", b"m1"}
    assert drained(router)
    routed.close()
    gpuroute.unwrap(routed)


def test_async_infer_calls_back(servers: list[Peer]) -> None:
    router = router_to(servers)
    routed = attached(router)
    heard: queue.Queue[Any] = queue.Queue()
    for _ in range(8):
        routed.async_infer("echo", text(b"later"), lambda result, error: heard.put((result, error)))
    answers = [heard.get(timeout=60) for _ in range(8)]
    assert [error for _, error in answers] == [None] * 8
    assert {result.as_numpy("text_input")[0] for result, _ in answers} == {b"later"}
    assert drained(router)
    routed.close()


def test_the_asyncio_client(servers: list[Peer]) -> None:
    router = router_to(servers, policy="round_robin")

    async def run() -> set[bytes]:
        async with aio_client.InferenceServerClient("127.0.0.1:1") as routed:
            gpuroute.triton.attach(routed, router, "p")
            assert await routed.is_model_ready("echo")
            return {server_of(r) for r in await asyncio.gather(*(routed.infer("echo", text(b"x")) for _ in range(8)))}

    assert asyncio.run(run()) == {b"m0", b"m1"}
    assert drained(router)


def test_a_generated_stub_and_an_interceptor(servers: list[Peer]) -> None:
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    seen: list[str] = []

    class Watcher(grpc.UnaryUnaryClientInterceptor):
        def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
            seen.append(details.method)
            return continuation(details, request)

    with gpuroute.grpc.channel(router_to(servers), "p") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(grpc.intercept_channel(channel, Watcher()))
        assert stub.ModelReady(service_pb2.ModelReadyRequest(name="echo")).ready
        assert stub.ServerLive.future(service_pb2.ServerLiveRequest()).result(timeout=60).live
    assert len(seen) == 2


def test_errors_are_the_servers_own(servers: list[Peer]) -> None:
    router = router_to(servers, breaker_failures=1)
    routed = attached(router)
    with pytest.raises(client.InferenceServerException, match="NOT_FOUND"):
        routed.infer("nothing", text(b"x"))
    assert {view.breaker for view in router.snapshot().pools["p"].endpoints} == {"closed"}
    assert sum(view.served for view in router.snapshot().pools["p"].endpoints) == 1
    routed.close()


def test_equal_prompts_meet_at_one_server(servers: list[Peer]) -> None:
    routed = attached(router_to(servers, policy="prefix"))
    homes = [{server_of(routed.infer("echo", text(b"%d " % n * 900))) for _ in range(4)} for n in range(4)]
    assert all(len(home) == 1 for home in homes)
    # Homes follow from the ports, which the system chooses: four of four prompts may well live at one server, 64 do not.
    more = (server_of(routed.infer("echo", text(b"%d " % n * 900))) for n in range(4, 64))
    assert any({answer} != homes[0] for answer in more)
    routed.close()


def test_dead_endpoints_are_not_noticed(servers: list[Peer]) -> None:
    router = router_of("grpc://127.0.0.1:1", "grpc://127.0.0.1:2", servers[0].url)
    routed = attached(router)
    for _ in range(10):
        assert server_of(routed.infer("echo", text(b"x"), client_timeout=60)) == b"m0"
    routed.close()


def test_a_draining_server_costs_no_call(servers: list[Peer], tmp_path: Path) -> None:
    (extra,) = extras = [mlserver("m9", tmp_path)]
    try:
        extra.wait_ready("echo")
        router = router_to([*servers, *extras], policy="round_robin")
        routed = attached(router)
        answers = collections.Counter[bytes]()
        while answers[b"m9"] < 3:
            answers[server_of(routed.infer("echo", text(b"x"), client_timeout=60))] += 1
        extra.drain()
        until = time.monotonic() + 2
        while time.monotonic() < until:
            answers[server_of(routed.infer("echo", text(b"x"), client_timeout=60))] += 1
        assert set(answers) == {b"m0", b"m1", b"m9"}
        routed.close()
    finally:
        extra.stop()


JSON = {"Content-Type": "application/json"}  # without it aiohttp says octet-stream, which MLServer refuses


def http_text(value: bytes) -> dict[str, Any]:
    """In JSON: MLServer knows no binary tensors."""
    tensor = http_client.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([value], dtype=object), binary_data=False)
    wanted = [http_client.InferRequestedOutput(name, binary_data=False) for name in ("text_input", "server")]
    return {"inputs": [tensor], "outputs": wanted}


def test_the_http_client(servers: list[Peer]) -> None:
    router = router_of(*(peer.http_url for peer in servers), policy="round_robin")
    routed = gpuroute.wrap(http_client.InferenceServerClient("127.0.0.1:1", concurrency=4), router, pool="p")
    assert routed.is_model_ready("echo")
    results = [routed.async_infer("echo", **http_text(b"hello %d" % n)) for n in range(8)]
    answers = [result.get_result() for result in results]
    assert [str(answer.as_numpy("text_input")[0]) for answer in answers] == [f"hello {n}" for n in range(8)]
    assert {str(answer.as_numpy("server")[0]) for answer in answers} == {"m0", "m1"}
    assert drained(router)
    routed.close()


def test_the_asyncio_http_client(servers: list[Peer]) -> None:
    router = router_of(*(peer.http_url for peer in servers), policy="round_robin")

    async def run() -> set[str]:
        async with aio_http_client.InferenceServerClient("127.0.0.1:1") as routed:
            gpuroute.triton.attach(routed, router, "p")
            answers = await asyncio.gather(*(routed.infer("echo", headers=JSON, **http_text(b"x")) for _ in range(8)))
            return {str(answer.as_numpy("server")[0]) for answer in answers}

    assert asyncio.run(run()) == {"m0", "m1"}
    assert drained(router)


def test_probes(servers: list[Peer]) -> None:
    with gpuroute.grpc.channel(router_to(servers), "p") as channel:
        assert health.ask(channel, health.triton_ready(), timeout=60)
        assert health.ask(channel, health.triton_ready("echo"), timeout=60)
        with pytest.raises(grpc.RpcError) as error:
            health.ask(channel, health.serving(), timeout=60)  # it does not implement grpc.health.v1
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
    for model, well in (("echo", True), ("nothing", False)):  # as active health checks ask it
        assert checked(Endpoint("a", servers[0].url, engine="mlserver", model=model)) is well


# ------------------------------------------------------------------------------------------ Triton


def numbers() -> list[Any]:
    tensor = client.InferInput("x", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.arange(4, dtype=np.float32).reshape(1, 4))
    return [tensor]


def test_triton_infers_and_streams(tritons: list[Peer]) -> None:
    router = router_to(tritons)
    routed = attached(router)
    assert routed.infer("echo", numbers(), client_timeout=60).as_numpy("y").tolist() == [[0, 2, 4, 6]]
    heard: queue.Queue[Any] = queue.Queue()
    routed.start_stream(lambda result, error: heard.put((result, error)))
    routed.async_stream_infer("words", text(b"the sky is blue"))
    words = [heard.get(timeout=60) for _ in range(4)]
    assert [error for _, error in words] == [None] * 4
    assert [result.as_numpy("text_output")[0] for result, _ in words] == [b"the", b"sky", b"is", b"blue"]
    routed.stop_stream()
    assert drained(router)
    routed.close()


def test_triton_over_http(tritons: list[Peer]) -> None:
    router = router_of(*(peer.http_url for peer in tritons), policy="round_robin")
    routed = gpuroute.wrap(http_client.InferenceServerClient("127.0.0.1:1", concurrency=4), router, pool="p")
    tensor = http_client.InferInput("x", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.arange(4, dtype=np.float32).reshape(1, 4))
    requests = [routed.async_infer("echo", [tensor]) for _ in range(8)]
    assert [request.get_result().as_numpy("y").tolist() for request in requests] == [[[0, 2, 4, 6]]] * 8
    assert {view.served for view in router.snapshot().pools["p"].endpoints} == {4}
    routed.close()


def test_a_full_triton_is_overloaded_not_broken(tritons: list[Peer]) -> None:
    """Its queue takes four; what it refuses goes to the other one, and no breaker opens."""
    router = router_to(tritons, breaker_failures=1)
    with gpuroute.grpc.channel(router, "p"):
        routed = attached(router)
        failed: list[str] = []

        def work() -> None:
            for _ in range(10):
                try:
                    routed.infer("echo", numbers(), client_timeout=60)
                except client.InferenceServerException as error:
                    failed.append(str(error))

        threads = [threading.Thread(target=work) for _ in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all("Exceeds maximum queue size" in error for error in failed)
        assert {view.breaker for view in router.snapshot().pools["p"].endpoints} == {"closed"}
        assert router.snapshot().pools["p"].signals["pauses"] > 0
        routed.close()


def test_a_draining_triton_costs_no_call(tritons: list[Peer], tmp_path: Path) -> None:
    (extra,) = extras = [triton("m9", tmp_path)]
    try:
        extra.wait_ready("words")
        router = router_to([tritons[0], *extras], policy="round_robin")
        routed = attached(router)
        for _ in range(40):
            routed.infer("echo", numbers(), client_timeout=60)
        served = {view.url: view.served for view in router.snapshot().pools["p"].endpoints}
        assert served[extra.url] > 10
        extra.drain()
        until = time.monotonic() + 3
        while time.monotonic() < until:
            routed.infer("echo", numbers(), client_timeout=60)
        routed.close()
    finally:
        extra.stop()
