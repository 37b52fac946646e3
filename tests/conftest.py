"""Shared by all tests: no GPUROUTE_* of the developer's shell, and one way to wait for something."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import threading
import time
import warnings
from typing import TYPE_CHECKING

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import HealthCheck, settings
from stopwatch import Stopwatch

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

# Who starts the tests in the background of a shell may have SIGINT ignored, which the commands under test would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A forked child that collects a gRPC object of its parent never ends: what other tests left as garbage stays that.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=gc.freeze, after_in_parent=gc.unfreeze)

DISTURBED_S = 0.05
"""So much time taken by the machine may make the difference where real clocks run: agents are asked for milliseconds."""
TRIES, TRYING_S = 6, 60.0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """A failed test marked `real_time` runs again if the machine took time from it or its processes, and only then.

    Code that is wrong fails undisturbed too, at once. That there was a failure is shown as a warning.
    """
    if item.get_closest_marker("real_time") is None:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    until = time.monotonic() + TRYING_S
    for left in reversed(range(TRIES)):
        with Stopwatch(below=True) as watch:
            reports = runtestprotocol(item, nextitem=nextitem, log=False)
        failed = [report for report in reports if report.failed]
        taken = max(watch.taken, watch.elsewhere)
        if not failed or taken < DISTURBED_S or not left or time.monotonic() > until:
            break
        errors = [line for line in failed[0].longreprtext.splitlines() if line.startswith("E ")]
        _tell_of_a_new_try(item, f"runs again, as the machine took {taken:.2f} s from it: {errors[:1]}")
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _tell_of_a_new_try(item: pytest.Item, text: str) -> None:
    path, line, _ = item.location
    warning = warnings.WarningMessage(pytest.PytestWarning(text), pytest.PytestWarning, path, line or 0)
    told = {"warning_message": warning, "when": "runtest", "nodeid": item.nodeid, "location": None}
    item.ihook.pytest_warning_recorded.call_historic(kwargs=told)


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
def collect() -> Iterator[Callable[[], int]]:
    """A full collection that is quick, as what was there before the test is left out of it.

    A young one finds nothing of what the interpreter has looked at meanwhile, by chance, and so taken for old.
    """
    gc.freeze()
    yield gc.collect
    gc.unfreeze()


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Wait until a condition holds, or fail saying which one: `eventually(lambda: x == 1, "x is 1", within=5)`."""

    def wait(condition: Callable[[], object], what: str = "the condition", within: float = 30.0) -> None:
        deadline = time.monotonic() + within
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come true within {within} s"
            time.sleep(0.01)

    return wait
