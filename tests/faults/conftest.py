"""Fixtures of the fault suite: stand-in GPU servers, and callers of every kind that must leave nothing behind."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fault_world import PATIENCE_S

from gpuroute.testing import GpuServer

sys.path.insert(0, str(Path(__file__).parents[1] / "http"))

from http_caller import KINDS, Caller, in_flight, router_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gpuroute import Endpoint


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def eventually(eventually: Callable[..., None]) -> Callable[..., None]:
    """The shared one, with more patience."""
    return lambda condition, what="the condition", within=PATIENCE_S: eventually(condition, what, within)


@pytest.fixture
def gpus() -> Iterator[Callable[..., list[GpuServer]]]:
    """Start stand-ins in this process: `a, b = gpus(2, time_scale=0.01)`."""
    started: list[GpuServer] = []

    def start(count: int, **options: Any) -> list[GpuServer]:
        options.setdefault("time_scale", 0.02)
        started.extend(GpuServer(**options).start() for _ in range(count))
        return started[-count:]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def call(eventually: Callable[..., None]) -> Iterator[Callable[..., Caller]]:
    """Make a caller of a kind over endpoints; afterwards nothing may be in flight."""
    made: list[Caller] = []

    def make(kind: str, over: list[Endpoint], *, patience: float = PATIENCE_S, **settings: Any) -> Caller:
        settings.setdefault("retry_floor", "1000/s")
        settings.setdefault("watchdog", True)
        made.append(Caller(kind, router_for(over, "llama", **settings), timeout=patience))
        return made[-1]

    yield make
    for one in made:
        eventually(lambda one=one: in_flight(one.router) == 0, f"nothing is in flight: {one.router.snapshot()}")
        one.close()
