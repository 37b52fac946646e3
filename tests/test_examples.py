"""Every file in examples/ runs against a fleet that is given; how they start one themselves is common to all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpuroute.testing import GpuServer

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.real_time, pytest.mark.timeout(300)]

EXAMPLES = Path(__file__).parents[1] / "examples"
WHAT_IT_SAYS = {
    "openai_client": ("whole: ", "stream: ", "served by "),
    "anthropic_client": ("12 tokens in, 12 out",),
    "httpx_client": ("httpx2: 9 events from ", "httpx:  ", " by auto: "),
    "any_client": (" said ",),
    "threads": (" calls", "in flight at the end: 0"),
    "prefork": ("4 calls, in flight 0",),
}
CALLS = {
    "openai_client": 2,
    "anthropic_client": 1,
    "httpx_client": 2,
    "any_client": 4,
    "threads": 40,
    "prefork": 12,
}
PATIENT = {"GPUROUTE_CONNECT_TIMEOUT": "20s", "GPUROUTE_WATCHDOG": "false"}
OVER_GRPC = {"grpc_stub", "grpc_aio", "triton_client"}  # run in tests/grpc/test_grpc_examples.py


@pytest.fixture(scope="module")
def servers() -> Iterator[list[GpuServer]]:
    with GpuServer(time_scale=0.01) as one, GpuServer(time_scale=0.01) as two:
        yield [one, two]


def run(name: str, registry: str | None) -> str:
    environ = {**os.environ, **PATIENT, **({"GPUROUTE_REGISTRY": registry} if registry else {})}
    command = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=280, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_all_examples_are_known() -> None:
    assert {path.stem for path in EXAMPLES.glob("[!_]*.py")} == WHAT_IT_SAYS.keys() | OVER_GRPC


@pytest.mark.parametrize("name", sorted(WHAT_IT_SAYS))
def test_against_a_given_fleet(name: str, servers: list[GpuServer]) -> None:
    for server in servers:
        server.reset_counters()
    said = run(name, f"house={servers[0].url},{servers[1].url}")
    assert [words for words in WHAT_IT_SAYS[name] if words not in said] == []
    states = [server.state() for server in servers]
    assert sum(state["finished"] for state in states) == sum(state["received"] for state in states) == CALLS[name]


@pytest.mark.parametrize("name", ["openai_client", "prefork"])
def test_with_stand_ins_of_its_own(name: str) -> None:
    said = run(name, None)
    assert [words for words in WHAT_IT_SAYS[name] if words not in said] == []
