"""The gRPC examples run, without a warning."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

pytest.importorskip("tritonclient.grpc", reason="the package tritonclient[grpc] is not installed")


@pytest.mark.parametrize("name", ["triton_client", "grpc_stub", "grpc_aio"])
def test_an_example_runs(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", f"{name}.py"],
        cwd=EXAMPLES,
        env={**os.environ, "GRPC_VERBOSITY": "ERROR"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) >= 2
