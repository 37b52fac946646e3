"""The end of an agent when something else ends too: etcd, the engine, or the operator's patience."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from typing import TYPE_CHECKING

import httpx2
import pytest
from agent.process import AgentProcess, Eyes
from agent.stage import AgentThread, call_of, desks, router_of
from ports import lasting_udp_port
from registry.etcd_server import EtcdCluster

from gpuroute.agent.desk import Desk
from gpuroute.agent.register import Life, Rules
from gpuroute.agent.watch import Watch
from gpuroute.core.endpoint import Endpoint
from gpuroute.core.orca import LoadReport
from gpuroute.engines.catalog import engine_of
from gpuroute.testing import GpuServer

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.real_time
STREAM = {"prompt": "x", "max_tokens": 300, "stream": True}


def test_etcd_restarts_and_a_second_signal_comes_while_it_drains(
    tmp_path_factory: pytest.TempPathFactory, eventually: Callable[..., None]
) -> None:
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as etcd, GpuServer(time_scale=1.0) as server:
        place = f"{etcd.url}/{uuid.uuid4().hex}"
        eyes = Eyes(place)
        options = ["--registry", place, "--pool", "p", "--warmup", "0", "--id", "gpu-0", "--ttl", "20", "--drain", "100s"]
        with AgentProcess("--url", server.url, *options) as agent:
            eventually(lambda: eyes.state("gpu-0") == "ready", "the engine is ready")
            with httpx2.stream("POST", f"{server.url}/v1/completions", json=STREAM, timeout=90) as response:
                chunks = response.iter_raw()
                next(chunks)
                server.hang()  # until all has been seen
                etcd.members[0].kill()
                agent.terminate()
                eventually(lambda: agent.state() == "draining", "bids say so without etcd")
                agent.terminate()
                etcd.members[0].start()
                etcd.wait_healthy()
                eventually(lambda: eyes.state("gpu-0") == "draining", "the record says so when etcd is back")
                assert agent.process.poll() is None, "one call still runs, whatever was signalled"
                server.resume()
                for _ in chunks:
                    pass
            assert agent.process.wait(90) == 0
            eventually(lambda: "gpu-0" not in eyes.endpoints(), "the record is removed")
            etcd.members[0].kill()
        with AgentProcess("--url", server.url, *options) as orphan:
            eventually(lambda: orphan.state() == "ready", "it serves without etcd")
            orphan.terminate()
            assert orphan.process.wait(90) == 0, "nor does it wait for etcd to leave"
        eyes.close()


def test_an_engine_that_is_killed_is_not_waited_for(eventually: Callable[..., None]) -> None:
    with GpuServer.spawn(time_scale=1.0) as server, AgentProcess("--url", server.url, "--warmup", "0") as agent:
        eventually(lambda: agent.state() == "ready", "the engine is ready")
        with httpx2.stream("POST", f"{server.url}/v1/completions", json=STREAM, timeout=90) as response:
            next(response.iter_raw())
            server.hang()
            agent.terminate()
            eventually(lambda: agent.state() == "draining", "it waits for the call")
            began = time.monotonic()
            server.kill()
            assert agent.process.wait(90) == 0
            assert time.monotonic() - began < 50, "not for all of --drain"


@pytest.mark.parametrize(
    ("engine", "report", "waits"),
    [
        ("kserve", LoadReport(), True),
        ("triton", LoadReport(waiting=0.0), True),
        ("vllm", LoadReport(), True),
        ("vllm", LoadReport(running=0.0, waiting=0.0), False),
        ("vllm", LoadReport(in_flight=0.0), False),
    ],
)
def test_to_say_nothing_is_not_to_be_idle(
    engine: str, report: LoadReport, waits: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gpuroute.agent.register.LEAVE_S", 0.0)
    drain_s = 0.5 if waits else 80.0

    async def drain() -> tuple[bool, float]:
        watch = Watch("http://127.0.0.1:1", engine_of(engine), Desk("gpu-0"))
        watch.report, watch.health.gone = report, False
        life = Life(watch, Endpoint("gpu-0", "http://127.0.0.1:1"), None, Rules(drain_s=drain_s))
        draining, began = asyncio.ensure_future(life.drain()), time.monotonic()
        while not draining.done():
            watch.looks += 1
            await asyncio.sleep(0.05)
        return draining.result(), time.monotonic() - began

    ended, seconds = asyncio.run(drain())
    assert ended
    assert seconds >= drain_s if waits else seconds < drain_s
    assert ("it does not count what runs" in caplog.text) is waits


def test_an_agent_that_is_replaced_on_its_port_is_heard_under_its_new_epoch(eventually: Callable[..., None]) -> None:
    """Under load from four threads; no call sees it but by what it is told."""
    old, new = desks(2), [Desk(f"gpu-{number}", epoch=2) for number in range(2)]
    port = lasting_udp_port()
    with AgentThread(old, port=port) as agent:
        router, asker = router_of(agent.endpoints(), ask_timeout="20ms")
        epochs: set[int] = set()
        failed: list[BaseException] = []
        stop = threading.Event()

        def work() -> None:
            try:
                while not stop.is_set():
                    asking = asker.ask(call := call_of(router))
                    attempt = call.next_attempt(router.clock())
                    if asking is not None:
                        asking.take(attempt)
                        asking.tell(attempt, 0.01)
                        epochs.update(bid.epoch for bid in asking.bids.values())
                    call.close(router.clock())
                    stop.wait(0.005)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        eventually(lambda: 1 in epochs, "the old one answers")
    epochs.clear()
    with AgentThread(new, port=port):
        eventually(lambda: 2 in epochs and sum(desk.takes for desk in new) > 0, "the new one answers and is told")
    stop.set()
    for thread in threads:
        thread.join()
    router.close()
    assert not failed
