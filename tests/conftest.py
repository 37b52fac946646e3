"""Shared by all tests: no GPUROUTE_* of the developer's shell, and one way to wait for something."""

from __future__ import annotations

import logging
import os
import random
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# How long an example takes, or its generation, is the machine's business: no property of the code.
# CI tries the same examples each time, so that it judges the change; developers' runs look for new ones.
settings.register_profile(
    "gpuroute",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="CI" in os.environ,
    database=None if "CI" in os.environ else settings.default.database,
)
settings.load_profile("gpuroute")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests see only the GPUROUTE_* variables that they set."""
    for name in [name for name in os.environ if name.startswith("GPUROUTE_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def repeatable_chance(request: pytest.FixtureRequest) -> None:
    """In CI each test draws the same numbers in every run."""
    if "CI" in os.environ:
        random.seed(request.node.nodeid)


@pytest.fixture(autouse=True)
def unchanged_log_level() -> Iterator[None]:
    """What a test, or the command that it runs, does to the logger's level ends with it."""
    logger = logging.getLogger("gpuroute")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Wait until a condition holds, or fail saying which one: `eventually(lambda: x == 1, "x is 1", within=5)`."""

    def wait(condition: Callable[[], object], what: str = "the condition", within: float = 10.0) -> None:
        deadline = time.monotonic() + within
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come true within {within} s"
            time.sleep(0.01)

    return wait
