"""The gRPC examples run, without a warning."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

pytest.importorskip("tritonclient.grpc", reason="the package tritonclient[grpc] is not installed")

OLD = tuple(map(int, grpc.__version__.split(".")[:2])) < (1, 80)
NOISE = re.compile(r"Exception in callback PollerCompletionQueue\._handle_events\(.*?\nBlockingIOError: .*?\n", re.DOTALL)
"""What grpcio's poller logs before 1.80 where a process has several event loops, as with the stand-in servers."""


@pytest.mark.parametrize("name", ["triton_client", "grpc_stub", "grpc_aio"])
def test_an_example_runs(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", f"{name}.py"],
        cwd=EXAMPLES,
        env={**os.environ, "GRPC_VERBOSITY": "ERROR", "GPUROUTE_CONNECT_TIMEOUT": "20s", "GPUROUTE_WATCHDOG": "false"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (NOISE.sub("", done.stderr) if OLD else done.stderr) == ""
    assert len(done.stdout.splitlines()) >= 2
