"""The command beside a stand-in engine: from the first look to the removed record, with engine and etcd dying between."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import httpx2
import pytest
from agent.process import KEY, AgentProcess, Eyes
from ports import own_port
from registry.etcd_server import EtcdCluster

import gpuroute.httpx2
from gpuroute.agent.desk import Desk
from gpuroute.agent.register import Life, Rules
from gpuroute.agent.warmup import warm_up
from gpuroute.agent.watch import Watch
from gpuroute.cli import main
from gpuroute.cli.agent import _engines, add_parser
from gpuroute.core.endpoint import Endpoint, State
from gpuroute.engines.catalog import engine_of
from gpuroute.router import Router
from gpuroute.testing import FakeRegistry, GpuServer
from gpuroute.transports.asking import asker_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.real_time


@pytest.fixture
def server() -> Iterator[GpuServer]:
    with GpuServer(time_scale=0.02) as server:
        yield server


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


def own_place(etcd: EtcdCluster) -> str:
    """A registry of this try alone: a test may run again."""
    return f"{etcd.url}/{uuid.uuid4().hex}"


def test_without_a_registry_it_answers_asks_and_shows_pages(server: GpuServer, eventually: Callable[..., None]) -> None:
    with AgentProcess("--url", server.url, "--id", "gpu-0", "--warmup", "3") as agent:
        eventually(lambda: agent.state() == "ready", "the engine is ready")
        eventually(lambda: "kv_tokens" in agent.load()["engine_says"], "its page of metrics was read")
        load = agent.load()
        assert (load["engine"], load["id"]) == ("vllm", "gpu-0")
        assert load["prefix_cache"]["capacity_tokens"] == load["engine_says"]["kv_tokens"] > 100_000
        assert server.state()["finished"] == 3, "the passes of the warm-up"
        assert agent.page("/healthz") == "ok\n"
        assert 'gpuroute_agent_ready{endpoint="gpu-0"} 1' in agent.page("/metrics").splitlines()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            agent.page("/else")
        agent.terminate()
        assert agent.process.wait(90) == 0


def test_calls_ask_take_and_tell(server: GpuServer, eventually: Callable[..., None]) -> None:
    """End to end over HTTP: a streamed call asks, is taken, is told, and its prefix is known afterwards."""
    with (
        GpuServer(time_scale=0.02) as other,
        AgentProcess("--url", server.url, "--url", other.url, "--id", "a", "--id", "b", "--warmup", "1") as agent,
    ):
        eventually(lambda: agent.load(1).get("state") == agent.state() == "ready", "both engines are ready")
        agent.meet()
        order = [agent.load(index)["id"] for index in (0, 1)]
        assert sorted(order) == ["a", "b"]
        urls = {"a": server.url, "b": other.url}
        endpoints = [
            Endpoint(ident, urls[ident], agent=f"{agent.lines['agent']}/{number}") for number, ident in enumerate("ab")
        ]
        patience = {"ask_timeout": "60s", "connect_timeout": "20s", "watchdog": False}
        router = Router(endpoints={"p": endpoints}, agent_key=KEY, asks="on", ask_hashes=True, **patience)
        asker = asker_of(router)
        assert asker is not None
        asker.round_trip = 60.0  # so the last answer is waited for
        body = {"prompt": "say it again " * 2_560, "max_tokens": 2, "stream": True}  # nearly all of it has a hash
        with gpuroute.httpx2.Client(router, timeout=60) as client:
            for _ in range(3):
                with client.stream("POST", "http://p/v1/completions", json=body) as response:
                    response.read()
            client.post("http://p/v1/completions", json={**body, "stream": False})
        assert asker.counts.calls == 4
        eventually(lambda: sum(agent.load(n)["tells"] for n in (0, 1)) == 4, "all calls were told")
        loads = [agent.load(n) for n in (0, 1)]
        assert sum(load["takes"] for load in loads) == 4
        assert sorted(load["takes"] for load in loads) == [0, 4], "the prefix drew the later calls"
        assert sum(load["told"] > 0 for load in loads) == 1, "streamed answers calibrate the speed"
        assert sum(load["prefix_cache"]["prefixes"] > 0 for load in loads) == 1


def test_the_life_of_a_record(etcd: EtcdCluster, eventually: Callable[..., None], tmp_path: Path) -> None:
    """warming, ready, warming when the engine dies, ready when it is back, there again after etcd lost it, draining."""
    place = own_place(etcd)
    eyes = Eyes(place)
    gate = tmp_path / "gate"
    command = f"while [ ! -e {gate} ]; do sleep 0.05; done"
    first = GpuServer.spawn(time_scale=0.02, port=own_port())
    options = ["--registry", place, "--pool", "p", "--ttl", "20", "--warmup-command", command]
    with first, AgentProcess("--url", first.url, "--id", "gpu-0", "--zone", "z", *options) as agent:
        eventually(lambda: eyes.state("gpu-0") == "warming", "it is registered before it is warm")
        gate.touch()
        eventually(lambda: eyes.state("gpu-0") == "ready", "it is ready once the warm-up has ended")
        record = eyes.endpoints()["gpu-0"]
        assert (record.engine, record.agent, record.zone) == ("vllm", agent.lines["agent"], "z")
        epoch = agent.load()["epoch"]
        assert record.started_at == epoch, "when the agent first saw the engine"
        gate.unlink()
        first.kill()
        eventually(lambda: eyes.state("gpu-0") == "warming", "a dead engine takes no calls")
        assert agent.state() == "gone"
        gate.touch()
        with GpuServer.spawn(time_scale=0.02, port=first.port) as second:
            eventually(lambda: eyes.state("gpu-0") == "ready", "the engine's successor is ready")
            assert agent.load()["restarts"] == 1
            assert eyes.endpoints()["gpu-0"].started_at == agent.load()["epoch"] >= epoch
            etcd.members[0].kill()
            etcd.members[0].start()
            etcd.wait_healthy()
            eventually(lambda: eyes.state("gpu-0") == "ready", "etcd's restart changes nothing")
            second.hang()  # until all has been seen
            body = {"prompt": "x", "stream": True}
            with httpx2.stream("POST", f"{second.url}/v1/completions", json=body, timeout=90) as response:
                agent.terminate()
                eventually(lambda: eyes.state("gpu-0") == "draining", "leaving is announced")
                second.resume()
                response.read()
            assert agent.process.wait(90) == 0
            eventually(lambda: "gpu-0" not in eyes.endpoints(), "the record is removed")
    eyes.close()
    assert eyes.states("gpu-0")[:4] == ["warming", "ready", "warming", "ready"]


@pytest.mark.parametrize("way", ["drain", "health"])
def test_an_engine_that_drains_itself_is_announced_while_its_streams_go_on(
    way: str, etcd: EtcdCluster, eventually: Callable[..., None]
) -> None:
    """SIGTERM that went to the engine alone: vLLM refuses new calls then, and its health check says nothing of it."""
    place = own_place(etcd)
    eyes = Eyes(place)
    options = ["--registry", place, "--pool", "p", "--warmup", "1", "--id", "gpu-0"]
    with GpuServer(time_scale=1.0) as server, AgentProcess("--url", server.url, *options) as agent:
        eventually(lambda: eyes.state("gpu-0") == "ready", "the engine is ready")
        warmed = server.state()["finished"]
        body = {"prompt": "x", "max_tokens": 300, "stream": True}
        with httpx2.stream("POST", f"{server.url}/v1/completions", json=body, timeout=90) as response:
            chunks = response.iter_raw()
            next(chunks)
            server.hang()  # the stream goes on until all has been seen
            server.drain() if way == "drain" else server.health(503)
            eventually(lambda: eyes.state("gpu-0") == "draining", "no new calls")
            assert agent.state() == "draining"
            eventually(lambda: agent.load()["running"] == 1, "it sees the call")
            server.resume()
            eventually(lambda: eyes.state("gpu-0") == "ready", "it was not to stop after all")
            for _ in chunks:
                pass
        assert server.state()["finished"] == warmed + 1, "the stream: it was not warmed up again"
    eyes.close()
    assert eyes.states("gpu-0")[-3:] == ["ready", "draining", "ready"]


def test_an_engine_that_ends_after_it_drained_is_gone(etcd: EtcdCluster, eventually: Callable[..., None]) -> None:
    place = own_place(etcd)
    eyes = Eyes(place)
    options = ["--registry", place, "--pool", "p", "--warmup", "0", "--id", "gpu-0"]
    with GpuServer.spawn(time_scale=1.0) as server, AgentProcess("--url", server.url, *options) as agent:
        eventually(lambda: eyes.state("gpu-0") == "ready", "the engine is ready")
        server.drain()
        eventually(lambda: eyes.state("gpu-0") == "draining", "no new calls")
        server.kill()
        eventually(lambda: eyes.state("gpu-0") == "warming", "and then it is not there")
        assert agent.state() == "gone"
    eyes.close()


def test_draining_waits_for_running_calls(eventually: Callable[..., None]) -> None:
    with GpuServer(time_scale=1.0) as server, AgentProcess("--url", server.url, "--warmup", "0") as agent:
        eventually(lambda: agent.state() == "ready", "the engine is ready")
        body = {"prompt": "x", "max_tokens": 300, "stream": True}
        with httpx2.stream("POST", f"{server.url}/v1/completions", json=body, timeout=90) as response:
            chunks = response.iter_raw()
            next(chunks)
            server.hang()  # until all has been seen, however long that takes
            agent.terminate()
            eventually(lambda: agent.state() == "draining", "bids say that it drains")
            eventually(lambda: agent.load()["running"] == 1, "it sees the call")
            assert agent.process.poll() is None
            server.resume()
            for _ in chunks:
                pass
        assert agent.process.wait(90) == 0


def test_draining_ends_when_its_time_is_over(eventually: Callable[..., None]) -> None:
    with (
        GpuServer(time_scale=1.0) as server,
        AgentProcess("--url", server.url, "--warmup", "0", "--drain", "1.5s") as agent,
    ):
        eventually(lambda: agent.state() == "ready", "the engine is ready")
        server.hang()
        body = {"prompt": "x", "max_tokens": 300, "stream": True}
        with httpx2.stream("POST", f"{server.url}/v1/completions", json=body, timeout=90):
            eventually(lambda: agent.load()["waiting"] + agent.load()["running"] > 0, "it sees the call")
            agent.terminate()
            assert agent.process.wait(90) == 1


def test_a_hung_engine_is_told_from_a_busy_one(server: GpuServer, eventually: Callable[..., None]) -> None:
    with AgentProcess("--url", server.url, "--warmup", "0", "--hung-after", "1.5s") as agent:
        eventually(lambda: agent.state() == "ready", "the engine is ready")
        server.hang()
        with httpx2.stream("POST", f"{server.url}/v1/completions", json={"prompt": "x", "stream": True}, timeout=90) as r:
            eventually(lambda: agent.state() == "hung", "work that stands still")
            server.resume()
            r.read()
        eventually(lambda: agent.state() == "ready", "it works again")


def test_a_record_with_fields_that_nobody_reads_is_told(
    server: GpuServer, eventually: Callable[..., None], tmp_path: Path
) -> None:
    (tmp_path / "record.json").write_text('{"weigth": 2}')
    with AgentProcess("--url", server.url, "--warmup", "0", "--record", str(tmp_path / "record.json")) as agent:
        eventually(lambda: agent.state() == "ready", "it serves all the same")
        agent.terminate()
        _, err = agent.process.communicate(timeout=90)
    assert "nobody reads 'weigth' (did you mean weight?)" in err


@pytest.mark.parametrize("engine", ["triton", "kserve"])
def test_an_engine_whose_model_nobody_names_is_ready_when_all_of_its_models_are(
    engine: str, server: GpuServer, eventually: Callable[..., None]
) -> None:
    server.answer(200, path="/v2/health/live")
    server.answer(400, path="/v2/health/ready", count=1)
    server.answer(200, path="/v2/health/ready")
    with AgentProcess("--url", server.url, "--engine", engine, "--drain", "0s") as agent:
        eventually(lambda: agent.state() == "ready", "all of its models are ready")
        agent.terminate()
        _, err = agent.process.communicate(timeout=90)
    assert f"{engine} is asked whether it is ready for all of its models at once: name its model (--model)" in err


def test_a_warm_up_that_fails_is_tried_again(server: GpuServer, eventually: Callable[..., None]) -> None:
    server.answer(500, count=1)
    with AgentProcess("--url", server.url, "--warmup", "2") as agent:
        eventually(lambda: agent.state() == "ready", "ready at the second try")
        assert server.state()["finished"] == 2
    assert server.state()["answered"] == 1


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--listen", "0.0.0.0:0"], "GPUROUTE_AGENT_KEY"),
        (["--listen", "nowhere"], "HOST:PORT"),
        (["--registry", "file:///x.toml"], "etcd://"),
        (["--pool", "Not A Pool"], "pool name"),
        (["--id", "a", "--id", "b"], "as often as --url"),
        (["--record", "/no/such/file"], "--record"),
        (["--listen", "127.0.0.1:70000"], "65535"),
        (["--status", "127.0.0.1:x"], "--status='127.0.0.1:x': expected HOST:PORT"),
        (["--agent-host", "h:0"], "--agent-host='h:0': expected HOST or HOST:PORT"),
        (["--url", "ftp://x"], "--url='ftp://x': expected an http://"),
        (["--url", "http://u:canary@h:1"], "--url=(value not shown): expected an http://"),
        (["--url", "http://a:1", "--url", "http://a:1"], "two engines of one id"),
        (["--listen", "[::1"], "--listen='[::1': expected HOST:PORT"),
        (["--listen", "::1"], "--listen='::1': expected HOST:PORT"),
        (["--listen", "nowhere.invalid:0"], "agent cannot listen on --listen=nowhere.invalid:0 or --status="),
        (["--kv-events", "tcp://127.0.0.1:99999"], "--kv-events='tcp://127.0.0.1:99999': expected tcp://HOST:PORT"),
        (["--gpu", "H100\nx"], "gpu has a kind that has control characters"),
    ],
)
def test_what_can_never_work_is_refused_at_once(options: list[str], complaint: str) -> None:
    command = [sys.executable, "-m", "gpuroute", "agent", "--listen", "127.0.0.1:0", "--status", "127.0.0.1:0", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr
    assert "canary" not in done.stderr


@pytest.mark.parametrize("content", ["{bad", "[1]", "[" * 100_000, "\udcff"])
@pytest.mark.parametrize("command", [["agent"], ["register", "http://a:1", "--registry", "etcd://127.0.0.1:1"]])
def test_a_record_that_is_no_object_is_one_line(
    command: list[str], content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "record.json"
    file.write_bytes(content.encode("utf-8", "surrogateescape"))
    assert main([*command, "--record", str(file)]) == 2
    assert f"--record '{file}': " in capsys.readouterr().err


def test_the_defaults_are_the_documented_ones() -> None:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["agent"])
    assert (args.engine, args.warmup, args.drain, args.hung_after, args.max_rate) == ("auto", 50, 60.0, 10.0, 50_000)
    assert (args.listen, args.status) == ("127.0.0.1:9401", "127.0.0.1:9402")


def test_options_win_over_the_record(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    record.write_text('{"engine": "vllm", "gpu": {"kind": "A100", "count": 2}, "zone": "z1"}')
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    options = ["--engine", "llama.cpp", "--gpu", "H100", "--zone", "z2"]
    (made,) = _engines(parser.parse_args(["agent", "--record", str(record), *options]))
    endpoint = made.endpoint
    assert (endpoint.engine, endpoint.zone, endpoint.gpu.kind, endpoint.gpu.count) == ("llamacpp", "z2", "H100", 2)


@pytest.mark.parametrize(
    ("option", "values", "accepted"),
    [
        ("--warmup", ["-1", "x", "1.5", "\u00b2"], "a whole number of at least 0"),
        ("--max-rate", ["0", "-1", "nan", "1e6"], "a whole number of at least 1"),
        ("--kv-tokens", ["-1", "1e9", ""], "a whole number of at least 0"),
        ("--dram-tokens", ["-1", "many"], "a whole number of at least 0"),
        ("--ttl", ["0.5s", "25h", "soon", "-1s", "inf"], "a duration from 1s to 24h"),
        ("--drain", ["-1s", "soon"], "a duration such as 0s"),
        ("--hung-after", ["0s", "-1s", "nan"], "a duration above 0"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(
    option: str, values: list[str], accepted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in values:
        with pytest.raises(SystemExit) as caught:
            main(["agent", f"{option}={value}"])
        assert caught.value.code == 2
        assert f"argument {option}: {value!r}: expected {accepted}" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["gpu-model", "another"])
def test_an_engine_that_serves_another_model_is_warned_of(model: str, caplog: pytest.LogCaptureFixture) -> None:
    with GpuServer(time_scale=0.02, model="gpu-model") as server:
        watch = Watch(server.url, engine_of("sglang"), Desk("gpu-0"), model=model)
        asyncio.run(warm_up(watch, 0))
    assert ("it serves gpu-model, and its record says another" in caplog.text) is (model == "another")


def test_a_throttled_gpu_is_labelled_while_it_is_and_written_only_when_that_changes() -> None:
    class Record:
        def __init__(self) -> None:
            self.written: list[dict[str, str]] = []

        def update(self, endpoint: Endpoint) -> None:
            self.written.append(dict(endpoint.labels))

    record = Record()
    endpoint = Endpoint("gpu-0", "http://127.0.0.1:1", labels={"rack": "r1", "throttled": "power_cap"})
    life = Life(Watch("http://127.0.0.1:1", engine_of("vllm"), Desk("gpu-0")), endpoint, lambda _: record, Rules())
    for reasons in ("power_cap", "hw_thermal", "hw_thermal", "", ""):
        life.label("throttled", reasons)
    assert record.written == [{"rack": "r1", "throttled": "hw_thermal"}, {"rack": "r1"}]


def test_an_engine_that_was_replaced_says_so_even_to_who_missed_its_warming() -> None:
    """Two looks of a router at the registry, and an engine that was started anew between them."""
    views: list[Endpoint] = []

    class Record:
        def update(self, endpoint: Endpoint) -> None:
            views.append(endpoint)

    desk = Desk("gpu-0", epoch=1_800_000_000)
    watch = Watch("http://127.0.0.1:1", engine_of("vllm"), desk)
    life = Life(watch, Endpoint("gpu-0", "http://127.0.0.1:1"), lambda _: Record(), Rules())
    assert (life.endpoint.state, life.endpoint.started_at) == (State.WARMING, 1_800_000_000)
    registry = FakeRegistry()
    with Router(registry) as router:
        life._now(State.READY)
        registry.set({"p": [views[-1], "http://127.0.0.1:2"]})
        router.ready(60)
        (known, _) = router.pool("p").snapshot.states
        desk.restarted(1_800_000_060)
        life._now(State.WARMING)
        life._now(State.READY)
        registry.set({"p": [views[-1], "http://127.0.0.1:2"]})
        assert [view.started_at - 1_800_000_000 for view in views] == [0, 60, 60]
        assert known in router.pool("p").snapshot.states
        assert known.ramp_at is not None, "its caches are cold"


def test_an_agent_that_alone_is_restarted_leaves_its_engine_as_warm_as_it_is(
    etcd: EtcdCluster, server: GpuServer, eventually: Callable[..., None]
) -> None:
    """The new agent knows nothing of the cache and does not say that it is empty; nor is the engine a newcomer."""
    place = own_place(etcd)
    idle = {"url": "http://127.0.0.1:1", "state": "draining"}  # else the pool would be empty meanwhile
    etcd.ctl("put", f"{place.removeprefix(etcd.url)}/pools/p/endpoints/idle", json.dumps(idle))
    with ExitStack() as stack:
        other, eyes = stack.enter_context(GpuServer(time_scale=0.02)), Eyes(place)
        stack.callback(eyes.close)
        options = ["--url", server.url, "--url", other.url, "--id", "gpu-0", "--id", "gpu-1", "--warmup", "1"]
        options += ["--pool", "p", "--registry", place]
        with AgentProcess(*options) as agent:
            eventually(lambda: eyes.state("gpu-0") == eyes.state("gpu-1") == "ready", "the engines are ready")
            router = stack.enter_context(Router(place, agent_key=KEY, asks="on", ask_hashes=True, ask_timeout="2s"))
            router.ready(60)
            asker = asker_of(router)
            assert asker is not None

            def called(*, take: bool) -> tuple[int | None, int]:
                """One call: how many of its 5,000 tokens are cached, says the agent, and how many are to compute."""
                asking = asker.ask(call := router.call("p", tokens=5_000, ladder=(1, 2, 3, 4, 5)))
                attempt = call.next_attempt(router.clock())
                matched = None
                if asking is not None and attempt.endpoint.id in asking.bids:
                    matched = asking.bids[attempt.endpoint.id].matched_tokens
                    if take:
                        asking.take(attempt)
                call.close(router.clock())
                return matched, attempt.uncached

            eventually(lambda: called(take=True) == (4_096, 904), "an agent knows the prefix")
            known, epochs = router.pool("p").snapshot.kit.by_id, [agent.load(n)["epoch"] for n in (0, 1)]
            assert sorted(state.endpoint.started_at for state in known.values()) == sorted(epochs)
            agent.terminate()
            assert agent.process.wait(90) == 0
        eventually(lambda: not router.pool("p").snapshot.routable, "the records are removed")
        with AgentProcess(*options) as agent:
            eventually(lambda: len(router.pool("p").snapshot.routable) == 2, "they are back")
            assert router.pool("p").snapshot.kit.by_id == known
            assert not router.pool("p").shared.ramping, "and no newcomers"
            assert sorted(agent.load(n)["epoch"] for n in (0, 1)) == sorted(epochs)
            assert agent.load()["prefix_cache"]["unseen_tokens"] > 100_000
            eventually(lambda: called(take=False) == (-1, 904), "what was sent there counts")


def test_c4_the_key_is_not_logged(server: GpuServer, eventually: Callable[..., None]) -> None:
    with AgentProcess("--url", server.url, "--warmup", "1", key="a-key-to-look-for") as agent:
        eventually(lambda: agent.state() == "ready", "the engine is ready")
        pages = agent.page("/load") + agent.page("/metrics")
        agent.terminate()
        out, err = agent.process.communicate(timeout=90)
    assert "a-key-to-look-for" not in out + err + pages


def test_it_stays_small(server: GpuServer, eventually: Callable[..., None]) -> None:
    with AgentProcess("--url", server.url, "--warmup", "1") as agent:
        eventually(lambda: agent.state() == "ready", "the engine is ready")
        status = Path(f"/proc/{agent.process.pid}/status")
        if not status.exists():
            pytest.skip("no /proc here")
        resident = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS"))
        assert int(resident.split()[1]) < 60 * 1024
