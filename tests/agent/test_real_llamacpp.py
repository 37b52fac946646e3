"""A real llama.cpp server behind a real agent: our beliefs about engines, not our stand-in's.

The server's binary and the script that makes a model of random weights are not part of this repository: the directory
`shared/real` beside it, or the variable REAL_ENGINES, has them.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx2
import pytest
from agent.process import KEY, AgentProcess, Eyes
from ports import closed_udp_port, own_port
from registry.etcd_server import EtcdCluster

import gpuroute.httpx2
from gpuroute.router import Router
from gpuroute.transports.asking import asker_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REAL = Path(os.environ.get("REAL_ENGINES") or Path(__file__).parents[3] / "shared" / "real")

pytestmark = [
    pytest.mark.real,
    pytest.mark.real_time,
    pytest.mark.skipif(not (REAL / "llama-server").exists(), reason=f"no llama-server in {REAL.name}: set REAL_ENGINES"),
    pytest.mark.skipif(not importlib.util.find_spec("gguf"), reason="gguf is not installed: no model can be made"),
]


class Llama:
    """The server as a process that can be ended and started again on its port."""

    def __init__(self, model: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._command = [str(REAL / "llama.sh"), str(model), str(port)]
        self._log = model.with_suffix(".log")
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(["bash", *self._command], stdout=log, stderr=log)

    def stop(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    size = ["--dim", "256", "--layers", "4", "--heads", "8", "--kv-heads", "4"]
    command = [sys.executable, str(REAL / "make_tiny_gguf.py"), str(path), *size]
    subprocess.run(command, check=True, capture_output=True)
    return path


@pytest.fixture
def llama(model: Path) -> Iterator[Llama]:
    server = Llama(model, own_port())
    yield server
    server.stop()


def test_llamacpp_registers_reports_restarts_and_drains(
    llama: Llama, eventually: Callable[..., None], tmp_path: Path
) -> None:
    with EtcdCluster(tmp_path) as etcd:
        options = ["--registry", f"{etcd.url}/real", "--pool", "p", "--id", "real", "--warmup", "4", "--ttl", "20"]
        eyes = Eyes(f"{etcd.url}/real")
        with AgentProcess("--url", llama.url, *options) as agent:
            eventually(lambda: eyes.state("real") == "ready", "it is registered as ready")
            assert eyes.endpoints()["real"].engine == "llamacpp"
            assert agent.load()["engine"] == "llamacpp"
            _reports_truthfully(agent, llama, eventually)
            epoch = agent.load()["epoch"]
            llama.stop()
            eventually(lambda: eyes.state("real") == "warming", "a dead engine takes no calls")
            time.sleep(max(0.0, epoch + 1.1 - time.time()))  # epochs are whole seconds
            llama.start()
            eventually(lambda: eyes.state("real") == "ready", "its successor is ready")
            assert agent.load()["epoch"] > epoch
            agent.terminate()
            assert agent.process.wait(90) == 0
            eventually(lambda: "real" not in eyes.endpoints(), "the record is removed")
        eyes.close()
        assert "draining" in eyes.states("real")


def _reports_truthfully(agent: AgentProcess, llama: Llama, eventually: Callable[..., None]) -> None:
    """Busy while it generates, idle again afterwards."""
    body = {"prompt": "Once upon a time", "max_tokens": 1_500, "stream": True}
    with httpx2.stream("POST", f"{llama.url}/v1/completions", json=body, timeout=60) as response:
        chunks = response.iter_raw()
        next(chunks)
        eventually(lambda: agent.load()["running"] == 1, "the running call is seen")
        assert agent.state() == "ready"
    eventually(lambda: agent.load()["running"] == 0, "and its end")
    assert agent.load()["tokens_per_s"]["generation"] > 0


def test_cached_tokens_of_a_real_engine_are_visible(llama: Llama, eventually: Callable[..., None]) -> None:
    """The second call with the same beginning finds its prefix in the engine, and the agent expected that."""
    from gpuroute.core.endpoint import Endpoint

    with AgentProcess("--url", llama.url, "--id", "real", "--warmup", "1") as agent:
        eventually(lambda: agent.state() == "ready", "it is ready")
        none = Endpoint("none", "http://127.0.0.1:9", agent=f"udp://127.0.0.1:{closed_udp_port()}")
        endpoints = [Endpoint("real", llama.url, agent=agent.lines["agent"]), none]
        router = Router(endpoints={"p": endpoints}, agent_key=KEY, asks="on", ask_hashes=True, ask_timeout="60s")
        asker = asker_of(router)
        assert asker is not None
        prompt = "A prefix that two prompts share. " * 40
        cached = []
        with gpuroute.httpx2.Client(router, timeout=60) as client:
            for question in ("first?", "second?"):
                body = {"prompt": prompt + question, "max_tokens": 4}
                answer = client.post("http://p/v1/completions", json=body).raise_for_status().json()
                cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached[0] < 100
        assert cached[1] > 1_000
        assert asker.counts.answers >= 1
        eventually(lambda: agent.load()["prefix_cache"]["prefixes"] > 0, "the agent remembers the prefix")
        eventually(lambda: agent.load()["tells"] >= 2, "the calls were told")
