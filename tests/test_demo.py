"""`gpuroute demo`: the whole of it in short, and its parts."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import pytest
from registry.etcd_server import EtcdCluster

import gpuroute
from gpuroute import cli
from gpuroute.cli.demo import books, figures, fleet, replay, screen
from gpuroute.core.endpoint import Endpoint, Gpu, State
from gpuroute.errors import ConfigError, StreamInterrupted
from gpuroute.testing import GpuServer

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuroute.testing import GpuProcess

pytestmark = [pytest.mark.real_time, pytest.mark.timeout(300)]

COMMAND = [sys.executable, "-m", "gpuroute", "demo", "--calls", "40"]


def test_json_is_one_object_with_the_documented_keys() -> None:
    done = subprocess.run([*COMMAND, "--json"], capture_output=True, text=True, timeout=280, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert set(told) == {"calls", "failed", "interrupted", "retried", "policies"}
    assert (told["calls"], told["failed"]) == (80, 0)
    assert list(told["policies"]) == ["auto", "round_robin"]
    for policy in told["policies"].values():
        assert set(policy) == {"ttft_p50", "ttft_p95", "ttft_p99", "tokens_per_s", "failed", "interrupted"}
        assert 0 < policy["ttft_p50"] <= policy["ttft_p95"] <= policy["ttft_p99"]
        assert policy["tokens_per_s"] > 0


def test_on_a_terminal_a_table_lives_and_the_events_are_told() -> None:
    parent, child = pty.openpty()
    script = "import gpuroute.cli as cli, gpuroute.cli.demo as demo; demo.POLICIES = demo.POLICIES[:1]; cli.main(%r)"
    command = [sys.executable, "-c", script % (COMMAND[3:],)]
    with subprocess.Popen(command, stdout=child, stderr=child, env={**os.environ, "COLUMNS": "120"}) as demo:
        os.close(child)
        shown = b""
        try:
            while part := os.read(parent, 65536):
                shown += part
        except OSError:  # the terminal's other end is closed
            pass
        assert demo.wait(280) == 0
    os.close(parent)
    said = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
    for words in ("endpoint", "in flight", "TTFT p50", "half speed", "│ gpu-7"):
        assert words in said
    for event in ("killed (SIGKILL)", "slowed to half its speed", "drained", "joined"):
        assert said.count(event) == 1
    assert re.search(r"auto +40 +0 ", said)
    assert "One decision of the default policy:" in said
    assert "demo by auto: gpu-" in said
    assert "Splitwise" in said


def test_ctrl_c_leaves_nothing_behind(eventually: Callable[..., None]) -> None:
    with subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        while "killed" not in (line := demo.stdout.readline()):
            assert line, "the demo ended early"
        children = _children(demo.pid)
        assert len(children) >= 5
        demo.send_signal(2)
        assert demo.wait(120) == 130
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), "all servers are gone", 60)


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--registry", "file:///tmp/x.json"], "etcd://"),
        (["--registry", "etcd://"], "etcd://"),
        (["--calls", "0"], "expected 1 to 400"),
    ],
)
def test_wrong_use_is_named(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_without_the_extra_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gpuroute.cli.demo.find_spec", lambda name: None if name == "rich" else name)
    assert cli.main(["demo"]) == 2
    assert "the demo needs rich: pip install 'gpuroute[demo]'" in capsys.readouterr().err


def test_failures_decide_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("gpuroute.cli.demo._judge", _judged)
    assert cli.main(["demo", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["failed"] == 1


async def _judged(policy: str, *_: object) -> tuple[figures.Figures, str]:
    failed = int(policy == "auto")
    return figures.Figures(policy, 400, failed, 2, 3, (0.1, 0.2, 0.3), 99.0, {}, ()), "why"


# ------------------------------------------------------------------------------------------------------- parts


def test_rows_are_the_trace_s() -> None:
    rows = replay.load_rows(0.3)
    assert (len(rows), rows[0].at) == (400, 0.0)
    assert [row.at for row in rows] == sorted(row.at for row in rows)
    assert 5 < rows[-1].at < 15
    assert len({row.prompt[:7] for row in rows}) == 400
    mean = sum(len(row.prompt.encode()) for row in rows) / 400 / 4
    assert 1_100 < mean < 1_250  # the rows' own mean is 1,173 tokens
    assert max(row.tokens for row in rows) == 561


def test_calls_are_accounted_for_by_how_they_end() -> None:
    rows = [replay.Row(0.0, name, 2) for name in ("good", "short", "cut", "bad")]
    pass_ = replay.Replay(_Sdk(), rows)  # type: ignore[arg-type]
    asyncio.run(pass_.run())
    by_prompt = dict(zip(("good", "short", "cut", "bad"), sorted(pass_.answers, key=_order), strict=True))
    assert (by_prompt["good"].error, by_prompt["good"].tokens) == ("", 2)
    assert by_prompt["good"].ttft is not None
    assert by_prompt["short"].error == "1 tokens instead of 2"
    assert by_prompt["cut"].interrupted
    assert (by_prompt["bad"].interrupted, by_prompt["bad"].error) == (False, "OSError: no way")
    told = figures.measure("auto", pass_, retried=1)
    assert (told.calls, told.failed, told.interrupted, told.shares) == (4, 2, 1, {"gpu-1": 1.0})
    assert dict(told.errors) == {"OSError: no way": 1, "1 tokens instead of 2": 1}
    lines = figures.closing_lines([told])
    assert "failed under auto, 1 times: OSError: no way" in lines


def _order(answer: replay.Answered) -> int:
    endings = ["", "1 tokens", "APIConnectionError", "OSError"]
    return max(i for i, ending in enumerate(endings) if answer.error.startswith(ending))


class APIConnectionError(Exception):
    """As an SDK wraps what its client library raises."""


class _Sdk:
    """Just enough of an SDK: the prompt says how the stream ends."""

    def __init__(self) -> None:
        self.chat = SimpleNamespace(completions=self)

    async def create(self, *, messages: Any, **_: Any) -> _Stream:
        if messages[0]["content"] == "bad":
            raise OSError("no way")
        return _Stream(messages[0]["content"])


class _Stream:
    def __init__(self, how: str) -> None:
        self._how = how
        self.response = SimpleNamespace(extensions={"gpuroute": {"endpoint": "gpu-1"}})

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def __aiter__(self) -> Any:
        yield SimpleNamespace(choices=[SimpleNamespace(delta=SimpleNamespace(content=" bat"))])
        yield SimpleNamespace(choices=[])
        if self._how == "cut":
            raise APIConnectionError from StreamInterrupted("cut", endpoint="gpu-1", bytes_received=1, events_received=1)
        if self._how == "good":
            yield SimpleNamespace(choices=[SimpleNamespace(delta=SimpleNamespace(content=" der"))])


@pytest.mark.parametrize(("rank", "value"), [(50, 2.0), (95, 4.0), (99, 4.0), (0, 1.0)])
def test_percentiles(rank: float, value: float) -> None:
    assert figures.percentile([1.0, 2.0, 3.0, 4.0], rank) == value
    assert figures.percentile([], rank) == 0.0


def test_a_router_reads_what_the_file_book_wrote() -> None:
    book = books.open_book(None)
    try:
        book.put(Endpoint("gpu-1", "http://127.0.0.1:1", gpu=Gpu("L40S")))
        book.put(Endpoint("gpu-2", "http://127.0.0.1:2", state=State.DRAINING))
        book.put(Endpoint("gpu-3", "http://127.0.0.1:3"))
        book.remove("gpu-3")
        book.remove("never there")
        with gpuroute.Router(settings=book.settings("p2c")) as router:
            router.ready()
            seen = router.snapshot().pools["demo"]
        assert [(view.id, view.state, view.gpu) for view in seen.endpoints] == [
            ("gpu-1", "ready", "L40S"),
            ("gpu-2", "draining", ""),
        ]
        assert seen.policy == "p2c"
    finally:
        book.close()


def test_events_that_happen_at_once_are_all_in_the_file_book() -> None:
    book = books.FileBook()
    idents = [f"gpu-{number}" for number in range(64)]
    try:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda ident: book.put(Endpoint(ident, "http://127.0.0.1:1")), idents))
            list(threads.map(book.remove, idents[:32]))
        with gpuroute.Router(settings=book.settings("p2c")) as router:
            router.ready()
            assert {view.id for view in router.snapshot().pools["demo"].endpoints} == set(idents[32:])
    finally:
        book.close()


def test_a_router_reads_what_the_etcd_book_wrote(tmp_path: Path, eventually: Callable[..., None]) -> None:
    with EtcdCluster(tmp_path) as etcd:
        book = books.open_book(etcd.url)
        first = Endpoint("gpu-1", "http://127.0.0.1:1", gpu=Gpu("L40S"))
        book.put(first)
        book.put(Endpoint("gpu-2", "http://127.0.0.1:2"))
        with gpuroute.Router(settings=book.settings("p2c")) as router:
            router.ready()

            def seen() -> dict[str, str]:
                return {view.id: view.state for view in router.snapshot().pools[book.pool].endpoints}

            assert seen() == {"gpu-1": "ready", "gpu-2": "ready"}
            book.put(replace(first, state=State.DRAINING))
            book.remove("gpu-2")
            eventually(lambda: seen() == {"gpu-1": "draining"}, "the changes are seen", 60)
        book.close()
        assert etcd.ctl("get", "--prefix", "/gpuroute", "--keys-only").strip() == ""


def test_the_demo_s_file_book_ignores_the_user_s_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUROUTE_DISABLED", "1")
    monkeypatch.setenv("GPUROUTE_POLICY", "nonsense")
    book = books.open_book(None)
    assert (book.settings("auto").disabled, book.settings("auto").policy) == (False, "auto")
    book.close()


def test_quiet_says_nothing_and_plain_says_lines(capsys: pytest.CaptureFixture[str]) -> None:
    screen.Screen(quiet=True).say("no")
    screen.Screen(quiet=False).event("yes")
    assert re.fullmatch(r" +0\.0 s  yes\n", capsys.readouterr().out)


def test_a_fleet_that_cannot_be_registered_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[GpuProcess] = []
    monkeypatch.setattr(fleet, "_spawn", lambda kind: started.append(GpuServer.spawn(wait=False)) or started[-1])
    monkeypatch.setattr(fleet, "KINDS", ("L40S", "V100"))

    class Full(books.FileBook):
        def put(self, endpoint: Endpoint) -> None:
            raise ConfigError("no room")

    book = Full()
    with pytest.raises(ConfigError, match="no room"), fleet.DemoFleet(book, print):
        pass
    book.close()
    assert [process.alive for process in started] == [False, False]
