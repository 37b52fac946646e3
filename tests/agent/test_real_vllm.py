"""A real vLLM (on the CPU, random weights) behind a real agent: our beliefs about engines, not our stand-in's.

Too heavy for every run (an installation of 3.4 GB, half a minute to start): it needs the path of a virtual environment
with vLLM in GPUROUTE_TEST_VLLM, and the scripts that make a model and start the server in the directory `shared/real`
beside this repository, or in the variable REAL_ENGINES.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import httpx2
import pytest
from agent.process import KEY, AgentProcess, Eyes
from ports import closed_udp_port, own_port
from registry.etcd_server import EtcdCluster

import gpuroute.httpx2
from gpuroute.core.endpoint import Endpoint
from gpuroute.router import Router
from gpuroute.transports.asking import asker_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

VENV = Path(os.environ.get("GPUROUTE_TEST_VLLM") or "/nonexistent")
REAL = Path(os.environ.get("REAL_ENGINES") or Path(__file__).parents[3] / "shared" / "real")
BLOCKS = 100
SENTENCE = "route the gpu batch to the least loaded replica with the longest cached prefix "

pytestmark = [
    pytest.mark.real,
    pytest.mark.real_time,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (VENV / "bin" / "python").exists(), reason="set GPUROUTE_TEST_VLLM to a virtual environment with vLLM"
    ),
    pytest.mark.skipif(not (REAL / "vllm.sh").exists(), reason=f"no vllm.sh in {REAL.name}: set REAL_ENGINES"),
]


class Vllm:
    """The server in a process group of its own, with a KV cache of 100 blocks of 32 tokens that publishes its events."""

    def __init__(self, directory: Path) -> None:
        self.model, self.log = directory / "tinyhf", directory / "vllm.log"
        self.events, self.replay = (f"ipc://{directory}/{name}.sock" for name in ("kv", "replay"))
        make = [str(VENV / "bin" / "python"), str(REAL / "make_tiny_hf.py"), str(self.model)]
        subprocess.run(make, check=True, capture_output=True)
        port = own_port()
        self.url = f"http://127.0.0.1:{port}"
        config = (
            f'{{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "{self.events}", '
            f'"replay_endpoint": "{self.replay}", "topic": "kv"}}'
        )
        options = ["--num-gpu-blocks-override", str(BLOCKS), "--kv-events-config", config, "--shutdown-timeout", "20"]
        command = ["bash", str(REAL / "vllm.sh"), str(VENV), str(self.model), str(port), *options]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def is_up(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-2_000:]
        try:
            return urllib.request.urlopen(f"{self.url}/health", timeout=5).status == 200
        except (urllib.error.URLError, OSError):
            return False

    def figure(self, name: str) -> float:
        """One of vLLM's own metrics."""
        page = urllib.request.urlopen(f"{self.url}/metrics", timeout=20).read().decode()
        return sum(float(value) for value in re.findall(rf"^vllm:{name}\{{[^}}]*\}} (\S+)$", page, re.MULTILINE))

    def complete(self, prompt: str, tokens: int = 1) -> int:
        """Tokens of the prompt that were cached."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = httpx2.post(f"{self.url}/v1/completions", json=body, timeout=120).raise_for_status().json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"] or 0)

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    server = Vllm(tmp_path_factory.mktemp("vllm"))
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def up(vllm: Vllm, eventually: Callable[..., None]) -> Vllm:
    eventually(vllm.is_up, "vLLM serves", 600.0)
    return vllm


class Client:
    """A router that asks with hashes, over the engine and an endpoint that is dear and whose agent never answers."""

    def __init__(self, engine: Vllm, agent: AgentProcess) -> None:
        dear = Endpoint("none", "http://127.0.0.1:9", weight=0.001, agent=f"udp://127.0.0.1:{closed_udp_port()}")
        endpoints = [Endpoint("real", engine.url, engine="vllm", agent=agent.lines["agent"]), dear]
        self.router = Router(endpoints={"p": endpoints}, agent_key=KEY, asks="on", ask_hashes=True, ask_timeout="60s")
        asker = asker_of(self.router)
        assert asker is not None
        self.asker = asker
        self.http = gpuroute.httpx2.Client(self.router, timeout=120)

    def complete(self, prompt: str) -> int:
        """Cached tokens of a call that was asked for, taken and told."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0}
        answer = self.http.post("http://p/v1/completions", json=body).raise_for_status().json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"] or 0)

    def matched(self, prompt: str) -> int:
        """What the agent believes of that prompt, without a call."""
        from gpuroute.core.prefix import ladder
        from gpuroute.engines.prompts import read_prompt

        found = read_prompt("/v1/completions", b'{"model": "tiny", "prompt": "%s"}' % prompt.encode())
        assert found is not None
        asking = self.asker.ask(self.router.call("p", tokens=found.tokens, ladder=ladder(found)))
        assert asking is not None
        return asking.bids["real"].matched_tokens


def test_it_registers_reports_truthfully_and_drains(up: Vllm, eventually: Callable[..., None], tmp_path: Path) -> None:
    with ExitStack() as stack:
        etcd = stack.enter_context(EtcdCluster(tmp_path))
        eyes = Eyes(f"{etcd.url}/real")
        stack.callback(eyes.close)
        before = up.figure("prompt_tokens_total")
        options = ["--registry", f"{etcd.url}/real", "--pool", "p", "--id", "real", "--warmup", "6", "--ttl", "3"]
        agent = stack.enter_context(AgentProcess("--url", up.url, *options))
        eventually(lambda: eyes.state("real") == "ready", "it is registered as ready", 120.0)
        assert eyes.states("real")[-2:] == ["warming", "ready"]
        assert up.figure("prompt_tokens_total") > before, "it was warmed up"
        record = eyes.endpoints()["real"]
        assert (record.engine, record.agent) == ("vllm", agent.lines["agent"])
        says = agent.load()["engine_says"]
        assert says["kv_tokens"] == agent.load()["prefix_cache"]["capacity_tokens"] == BLOCKS * 32
        _busy(up, agent, eventually)
        agent.terminate()
        assert agent.process.wait(90) == 0
        eventually(lambda: "real" not in eyes.endpoints(), "the record is removed")
        assert "draining" in eyes.states("real")
        assert up.is_up(), "the engine is not the agent's to stop"


def _busy(up: Vllm, agent: AgentProcess, eventually: Callable[..., None]) -> None:
    """Six generations in an engine for four: what the agent says is what vLLM's own page says."""
    calls = [threading.Thread(target=up.complete, args=(f"{number} {SENTENCE}", 300)) for number in range(6)]
    for call in calls:
        call.start()

    def agree() -> bool:
        own = [int(up.figure(f"num_requests_{name}")) for name in ("running", "waiting")]
        load = agent.load()
        seen = [load["running"], int(load["engine_says"]["waiting"])]
        return own == seen == [4, 2] and 0 < load["kv_usage"] < 1 and load["state"] == "ready"

    eventually(agree, "agent and engine agree on a full engine", 120.0)
    for call in calls:
        call.join()
    eventually(lambda: (agent.load()["running"], agent.load()["waiting"]) == (0, 0), "and on an idle one", 60.0)
    assert agent.load()["tokens_per_s"]["generation"] > 0


def test_prefix_hits_are_expected_and_seen(up: Vllm, eventually: Callable[..., None]) -> None:
    with AgentProcess("--url", up.url, "--id", "real", "--warmup", "1") as agent:
        eventually(lambda: agent.state() == "ready", "it is ready", 120.0)
        client = Client(up, agent)
        prompt = "first " + SENTENCE * 60
        assert client.matched(prompt) <= 0, "of this prompt nothing is cached, or nothing is known"
        assert client.complete(prompt) < 64
        eventually(lambda: client.matched(prompt) >= 1_024, "the agent expects the prefix to be cached")
        hits = up.figure("prefix_cache_hits_total")
        assert client.complete(prompt + "second") > 500, "and it is"
        assert up.figure("prefix_cache_hits_total") > hits
        eventually(lambda: agent.load()["tells"] >= 2, "the calls were told")


def test_kv_events_show_what_the_engine_has_forgotten(up: Vllm, eventually: Callable[..., None]) -> None:
    """Strangers fill the cache. Counting takes alone, the agent would go on to promise a hit."""
    events = ["--kv-events", up.events, "--kv-events-replay", up.replay]
    with (
        AgentProcess("--url", up.url, "--id", "real", "--warmup", "1", *events) as agent,
        AgentProcess("--url", up.url, "--id", "real", "--warmup", "0") as other,
    ):
        eventually(lambda: agent.state() == other.state() == "ready", "they are ready", 120.0)
        prompt = "events " + SENTENCE * 60
        clients = [Client(up, one) for one in (agent, other)]
        assert clients[0].complete(prompt) < 64
        clients[1].complete(prompt)
        eventually(lambda: agent.load()["kv_events"]["state"] == "following", "the events are heard")
        assert agent.load()["kv_events"]["blocks"] > 10
        assert agent.page("/healthz") == "ok\n"
        for client in clients:
            eventually(lambda client=client: client.matched(prompt) >= 1_024, "both expect a hit")
        assert clients[0].complete(prompt) > 500
        for number in range(8):
            up.complete(f"{number} stranger " + f"{number} " * 600)
        eventually(lambda: clients[0].matched(prompt) == 0, "who hears the events knows that it is gone")
        assert clients[1].matched(prompt) >= 1_024, "who only counts takes does not"
        assert agent.load()["kv_events"]["lost"] == 0
        assert 0 < agent.load()["kv_events"]["blocks"] <= BLOCKS
        assert clients[0].complete(prompt) < 64, "and it really is"


# ------------------------------------------------------------------------------------------ streams that are cut


class Cutter:
    """A relay before the engine that hangs up on its first client after so many events of a stream, in mid-event."""

    def __init__(self, url: str, events: int) -> None:
        self._engine = ("127.0.0.1", int(url.rpartition(":")[2]))
        self._events = events
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with self._listener, self._listener.accept()[0] as here, socket.create_connection(self._engine) as there:
            for sock in (here, there):
                sock.settimeout(120)
            request = b""
            while not self._is_whole(request):
                request += here.recv(65_536)
            there.sendall(request)
            answer = b""
            while answer.count(b"data: ") <= self._events:
                answer += there.recv(65_536)
            place = -1
            for _ in range(self._events + 1):
                place = answer.index(b"data: ", place + 1)
            here.sendall(answer[: place + 9])

    @staticmethod
    def _is_whole(request: bytes) -> bool:
        head, end, body = request.partition(b"\r\n\r\n")
        length = re.search(rb"(?im)^content-length: (\d+)", head)
        return bool(end) and length is not None and len(body) >= int(length[1])

    def close(self) -> None:
        self._thread.join(120)


CAPITALS = "ABCDEFGH"
LONG = 48


def letters(directory: Path) -> list[int]:
    """Tokens that stay what they are beside each other: the model's tokenizer has learned to join small letters only.
    Text that is tokenised anew may else become other tokens, after which nobody could tell what a continuation lost."""
    vocabulary = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    return [vocabulary[letter] for letter in CAPITALS]


def generation(url: str, tokens: list[int]) -> dict[str, object]:
    said = f"route the gpu {SENTENCE}"
    asked = {"prompt": said} if url.endswith("/v1/completions") else {"messages": [{"role": "user", "content": said}]}
    generated = {"allowed_token_ids": tokens, "max_tokens": LONG, "temperature": 0, "ignore_eos": True}
    return {"model": "tiny", **asked, **generated, "stream": True, "stream_options": {"include_usage": True}}


def told(lines: Iterable[str]) -> tuple[str, list[str], dict[str, int]]:
    """The text of a stream, its ids, and its usage."""
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    texts = [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices]
    usage = [event["usage"] for event in events if event.get("usage")]
    return "".join(texts), sorted({event["id"] for event in events}), usage[-1]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("after", [2, LONG // 2])
def test_a_stream_that_is_cut_goes_on_token_by_token(up: Vllm, path: str, after: int) -> None:
    asked = generation(path, letters(up.model))
    whole, _, usage = told(httpx2.post(up.url + path, json=asked, timeout=300).raise_for_status().text.splitlines())
    assert len(whole) == usage["completion_tokens"] == LONG, "one letter is one token"
    assert len(set(whole)) > 1
    cutter = Cutter(up.url, after)
    endpoints = [Endpoint(name, url, engine="vllm") for name, url in (("cut", cutter.url), ("well", up.url))]
    with (
        Router(endpoints={"p": endpoints}, policy="round_robin", continuation=True, random=lambda: 0.0) as router,
        gpuroute.httpx2.Client(router, timeout=300) as client,
        client.stream("POST", f"http://p{path}", json=asked) as response,
    ):
        assert response.extensions["gpuroute"]["endpoint"] == "cut"
        text, ids, sum_of_both = told(list(response.iter_lines()))
        assert router.snapshot().pools["p"].signals["continuations"] == 1
    cutter.close()
    assert text == whole
    assert len(ids) == 1
    assert sum_of_both["completion_tokens"] == LONG
    assert sum_of_both["prompt_tokens"] == usage["prompt_tokens"]


# --------------------------------------------------------------------------------- the last test: it ends the engine


def test_an_engine_that_drains_itself_is_announced_while_its_stream_goes_on(
    up: Vllm, eventually: Callable[..., None]
) -> None:
    with AgentProcess("--url", up.url, "--id", "real", "--warmup", "1") as agent:
        eventually(lambda: agent.state() == "ready", "it is ready", 120.0)
        body = {"model": "tiny", "prompt": "long", "max_tokens": 1_800, "ignore_eos": True, "stream": True}
        with httpx2.stream("POST", f"{up.url}/v1/completions", json=body, timeout=120) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(up.process.pid, signal.SIGTERM)
            eventually(lambda: agent.state() == "draining", "it takes no new calls", 60.0)
            assert urllib.request.urlopen(f"{up.url}/health", timeout=20).status == 200, "which it does not say here"
            assert "data: [DONE]" in list(lines), "the stream ends whole"
        assert up.process.wait(60) == 0
        eventually(lambda: agent.state() == "gone", "and then it is not there", 30.0)
