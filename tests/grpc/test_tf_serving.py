"""TF Serving's stubs over a pool: prompts, draining, full queues and readiness."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from world import drained, router_of

import gpuroute
import gpuroute.grpc
import gpuroute.grpc.aio
from gpuroute.grpc import health

pytest.importorskip("google.protobuf", reason="the package protobuf is not installed")
from tf_serving import PredictionServiceStub, Served, answered_by, asked

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.real_time
TFSERVING = os.environ.get("GPUROUTE_TEST_TFSERVING", "")  # read before the suite takes all GPUROUTE_* away
SOURCES = Path(gpuroute.__file__).parent.parent
CODE = grpc.StatusCode


@pytest.fixture
def two() -> Iterator[list[Served]]:
    servers = [Served("s0"), Served("s1")]
    yield servers
    for server in servers:
        server.stop()


def router_to(servers: list[Served], **settings: Any) -> gpuroute.Router:
    return router_of(*(server.url for server in servers), **settings)


def test_predict_is_routed_and_answers_as_ever(two: list[Served]) -> None:
    router = router_to(two, policy="round_robin")
    with gpuroute.grpc.channel(router, "p") as channel:
        stub = PredictionServiceStub(channel)
        answers = [stub.Predict(asked(b"hello %d" % n), timeout=30) for n in range(4)]
        assert [answer.outputs["text"].string_val[0] for answer in answers] == [b"hello %d" % n for n in range(4)]
        assert {answered_by(answer) for answer in answers} == {b"s0", b"s1"}
        assert answered_by(stub.Predict.future(asked(b"later")).result(timeout=30)) in {b"s0", b"s1"}
    assert drained(router)


def test_predict_in_asyncio(two: list[Served]) -> None:
    async def run() -> set[bytes]:
        async with gpuroute.grpc.aio.channel(router_to(two, policy="round_robin"), "p") as channel:
            stub = PredictionServiceStub(channel)
            return {answered_by(await stub.Predict(asked(b"x"), timeout=30)) for _ in range(4)}

    assert asyncio.run(run()) == {b"s0", b"s1"}


def test_equal_prompts_meet_at_one_server(two: list[Served]) -> None:
    with gpuroute.grpc.channel(router_to(two, policy="prefix"), "p") as channel:
        stub = PredictionServiceStub(channel)
        homes = [{answered_by(stub.Predict(asked(b"%d " % n * 900), timeout=30)) for _ in range(3)} for n in range(48)]
    assert all(
        len(home) == 1 for home in homes
    )  # at one of two by chance less than once in 10^11: they follow from ports
    assert set.union(*homes) == {b"s0", b"s1"}


@pytest.mark.parametrize(
    ("code", "details"),
    [
        (CODE.NOT_FOUND, "Servable not found for request: Latest(echo)"),
        (CODE.UNAVAILABLE, "The batch scheduling queue to which this task was submitted is full"),
    ],
)
def test_one_that_loads_or_is_full_is_left_alone_for_a_while(two: list[Served], code: Any, details: str) -> None:
    router = router_to(two, policy="round_robin", breaker_failures=1)
    two[0].fail_next = two[1].fail_next = [(code, details)]  # one list: whoever is first fails, once
    with gpuroute.grpc.channel(router, "p") as channel:
        assert answered_by(PredictionServiceStub(channel).Predict(asked(b"x"), timeout=30)) in {b"s0", b"s1"}
    pool = router.snapshot().pools["p"]
    assert pool.signals["pauses"] == 1
    assert {view.breaker for view in pool.endpoints} == {"closed"}


@pytest.mark.parametrize(("state", "ready"), [(30, True), (20, False), (50, False)])
def test_readiness_by_model_status(two: list[Served], state: int, ready: bool) -> None:
    for server in two:
        server.state = state
    with gpuroute.grpc.channel(router_to(two), "p") as channel:
        assert health.ask(channel, health.tf_serving_ready("echo"), timeout=30) is ready
        assert not health.ask(channel, health.tf_serving_ready("nothing"), timeout=30)


@pytest.mark.real
def test_the_real_packages_own_stubs() -> None:
    """In an environment of its own: it needs TensorFlow (600 MB)."""
    python = Path(TFSERVING) / "bin" / "python"
    if not TFSERVING or not python.exists():
        pytest.skip("no venv with tensorflow-serving-api, tensorflow-cpu and xxhash in GPUROUTE_TEST_TFSERVING")
    done = subprocess.run(
        [python, Path(__file__).with_name("tf_serving.py")],
        env=os.environ | {"PYTHONPATH": str(SOURCES)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "routed"
