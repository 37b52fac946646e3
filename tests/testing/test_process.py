"""GpuServer as a process: killed, frozen, drained, and never left behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from gpuroute.testing import GpuProcess, GpuServer, resent_after_first_byte

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

PATIENCE_S = 60.0
BODY = {"prompt": "Once upon a time", "max_tokens": 4}


@pytest.fixture
def process() -> Iterator[GpuProcess]:
    with GpuServer.spawn(time_scale=0.02) as running:
        yield running


def get(process: GpuProcess, **options: Any) -> httpx2.Response:
    return httpx2.get(process.url + "/health", **{"timeout": PATIENCE_S, **options})


def post(process: GpuProcess, **options: Any) -> httpx2.Response:
    return httpx2.post(process.url + "/v1/completions", json=BODY, timeout=PATIENCE_S, **options)


def streamed(process: GpuProcess) -> AbstractContextManager[httpx2.Response]:
    """A minute's answer if the process is slow, as it is made here: whatever happens meanwhile happens to it."""
    body = {**BODY, "max_tokens": 500, "stream": True}
    return httpx2.stream("POST", process.url + "/v1/completions", json=body, timeout=PATIENCE_S)


def gone(pid: int) -> bool:
    """Dead; perhaps not yet collected by whoever adopted it."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (ProcessLookupError, FileNotFoundError):
        return True


def test_orders_counters_and_the_wire_from_another_process(process: GpuProcess) -> None:
    assert post(process, headers={"x-request-id": "r"}).status_code == 200
    assert process.last_request.target == b"/v1/completions"
    process.answer(503, count=1)
    assert post(process).status_code == 503
    state = process.state()
    assert (state["finished"], state["answered"], state["pid"]) == (1, 1, process.pid)
    assert process.options.time_scale == 0.02
    with pytest.raises(ValueError, match="unknown order"):
        process.control("dance")
    with pytest.raises(ValueError, match="unexpected keyword"):
        process.control("slow", factor=1, extra=2)


def test_refuse_can_be_undone_although_nobody_can_connect(process: GpuProcess) -> None:
    process.refuse()
    with pytest.raises(httpx2.ConnectError):
        get(process)
    process.resume()
    assert get(process).status_code == 200


def test_kill_resets_connections(process: GpuProcess) -> None:
    process.slow(1000)
    with streamed(process) as response:
        process.kill()
        with pytest.raises(httpx2.TransportError):
            list(response.iter_lines())
    assert not process.alive
    with pytest.raises(ConnectionError, match="is gone"):
        process.state()
    process.kill()
    process.stop()


def test_frozen_then_thawed(process: GpuProcess) -> None:
    process.freeze()
    with pytest.raises(httpx2.ReadTimeout):
        get(process, timeout=httpx2.Timeout(PATIENCE_S, read=0.2))
    assert process.alive
    process.thaw()
    assert get(process).status_code == 200


def test_sigterm_finishes_what_runs_and_exits(process: GpuProcess, eventually: Callable[..., None]) -> None:
    process.slow(1000)
    with streamed(process) as response:
        eventually(lambda: process.state()["live"] == 1, "the request runs", PATIENCE_S)
        process.terminate()
        process.slow(1)
        assert "".join(response.iter_text()).endswith("[DONE]\n\n")
    assert process.wait(PATIENCE_S) == 0


def test_wait_times_out(process: GpuProcess) -> None:
    with pytest.raises(TimeoutError, match="still runs"):
        process.wait(0.01)


def test_a_start_that_fails_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(ConnectionError, match=r"did not start: .*in use"):
            GpuServer.spawn(port=taken.getsockname()[1])
    with pytest.raises(ConnectionError, match=r"did not start: .*No such file"):
        GpuServer.spawn(certfile="/no/such.pem")
    said = capfd.readouterr().err.splitlines()
    assert not [line for line in said if not re.match(r"[IWE]\d{4} ", line)], (
        "grpcio may tell of connections of other tests"
    )


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--help"], 0, "A stand-in GPU server"),
        ([], 2, "the following arguments are required: options"),
        (["{"], 2, "argument options: "),
        (["[]"], 2, "not a JSON object"),
        (['{"gpuu": 1}'], 2, "did you mean gpu?"),
        (['{"time_scale": -1}'], 2, "time_scale=-1"),
    ],
)
def test_the_module_says_how_it_is_used(arguments: list[str], code: int, said: str) -> None:
    command = [sys.executable, "-m", "gpuroute.testing", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == code
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_processes_start_side_by_side() -> None:
    fleet = [GpuServer.spawn(wait=False) for _ in range(3)]
    try:
        assert [process._ready for process in fleet] == [None] * 3, "none has been waited for"
        assert len({process.port for process in fleet}) == 3
    finally:
        for process in fleet:
            process.stop()


@pytest.mark.parametrize("how", ["killed", "forked"])
def test_nothing_is_left_when_the_parent_dies(how: str, eventually: Callable[..., None]) -> None:
    """`forked`: a child of the parent lives on and holds our pipe to the stand-in open."""
    fork = "child = os.fork() or time.sleep(600)" if how == "forked" else "child = 0"
    script = (
        "import os, signal, time\nfrom gpuroute.testing import GpuServer\nserver = GpuServer.spawn()\n"
        f"{fork}\nprint(server.pid, child, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid, child = (int(word) for word in parent.stdout.readline().split())
        assert parent.wait(PATIENCE_S) == -signal.SIGKILL
    try:
        eventually(lambda: gone(pid), "the stand-in is gone", within=PATIENCE_S)
        assert not child or not gone(child)
    finally:
        if child:
            os.kill(child, signal.SIGKILL)


def test_doubled_requests_are_found_across_servers() -> None:
    one = {"wire": {"a": [[1.0, 2.0, "dropped"]], "b": [[1.0, None, "dropped"]], "c": [[1.0, 5.0, "finished"]]}}
    two = {"wire": {"a": [[3.0, 4.0, "finished"]], "b": [[3.0, 4.0, "finished"]], "c": [[2.0, None, "cancelled"]]}}
    assert resent_after_first_byte([one, two]) == ["a"]
