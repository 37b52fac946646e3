"""The public names, pinned: removing or renaming one is a decision, never an accident."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version

import pytest

import gpuroute

NAMES = [
    "ConfigError",
    "DeadlineExceeded",
    "Endpoint",
    "GpurouteError",
    "InvalidRecord",
    "NoEndpointAvailable",
    "Outcome",
    "RegistryError",
    "RegistryUnavailable",
    "Router",
    "RouterClosed",
    "Settings",
    "StreamInterrupted",
    "StreamStalled",
    "UnknownPool",
    "unwrap",
    "wrap",
]

USES = """
import json, sys
import gpuroute
before = set(sys.modules)
{use}
loaded = set(sys.modules) - before
heavy = {{"asyncio", "ssl", "httpx", "httpx2", "grpc", "opentelemetry", "openai"}}
print(json.dumps(sorted(heavy & loaded)))
"""


def test_the_public_names() -> None:
    assert gpuroute.__all__ == NAMES
    assert set(NAMES) <= set(dir(gpuroute))


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_there_and_documented(name: str) -> None:
    value = getattr(gpuroute, name)
    assert value.__name__ == name
    assert value.__doc__
    assert value.__module__.startswith("gpuroute")


def test_errors_are_caught_by_one_base_and_by_the_builtin_they_refine() -> None:
    errors = [
        value for name in NAMES if isinstance(value := getattr(gpuroute, name), type) and issubclass(value, Exception)
    ]
    assert len(errors) == 11
    assert all(issubclass(error, gpuroute.GpurouteError) for error in errors)
    for error, builtin in [
        (gpuroute.ConfigError, ValueError),
        (gpuroute.InvalidRecord, ValueError),
        (gpuroute.UnknownPool, LookupError),
        (gpuroute.NoEndpointAvailable, ConnectionError),
        (gpuroute.DeadlineExceeded, TimeoutError),
        (gpuroute.RouterClosed, RuntimeError),
    ]:
        assert issubclass(error, builtin)


def test_star_import_and_unknown_names() -> None:
    found: dict[str, object] = {}
    exec("from gpuroute import *", found)
    assert set(NAMES) <= set(found)
    with pytest.raises(AttributeError, match="has no attribute 'Rooter'"):
        gpuroute.Rooter  # noqa: B018


def test_the_version_is_the_packages() -> None:
    assert gpuroute.__version__ == version("gpuroute")


@pytest.mark.parametrize(
    "use",
    [
        "gpuroute.Endpoint('a', 'http://a'); gpuroute.Outcome.SUCCESS",
        "gpuroute.Settings.from_env({'GPUROUTE_REGISTRY': 'http://a'})",
        "gpuroute.Router(endpoints=['http://a', 'http://b']).call('default')",
        "gpuroute.Router(registry='llm=http://a', policy='auto').explain('llm')",
    ],
)
def test_routing_alone_loads_no_client_library(use: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", USES.format(use=use)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


@pytest.mark.parametrize("module", ["httpx", "httpx2", "grpc"])
def test_the_modules_of_transports_state_what_they_export(module: str) -> None:
    found = import_module(f"gpuroute.{module}")
    assert found.__all__ == sorted(found.__all__)
    assert all(getattr(found, name).__doc__ for name in found.__all__)
