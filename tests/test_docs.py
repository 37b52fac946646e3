"""The documents say what the code does: tables, links, commands, examples."""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import gpuroute
from gpuroute.cli import COMMANDS
from gpuroute.config import is_secret, markdown, rows, variable
from gpuroute.core.outcome import Outcome
from gpuroute.core.policies import POLICIES
from gpuroute.observe.otel import COUNTERS
from gpuroute.registry import first_fleet, open_registry
from gpuroute.registry.schema import CONFIG_FIELDS, ENDPOINT_FIELDS
from gpuroute.testing import GpuServer

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PATIENT = {"GPUROUTE_CONNECT_TIMEOUT": "20s", "GPUROUTE_WATCHDOG": "false"}
"""A busy machine is no fault of a server: what is late is not asked again elsewhere, and not complained about."""
COMMANDS_OF_THE_README = [
    "python3 -m venv .venv && .venv/bin/pip install -q -e '.[demo]' && .venv/bin/gpuroute demo",
    "python3 -m venv .venv && .venv/bin/pip install -q -e '.[test]' && .venv/bin/pytest -q",
]

FLAGS_OF_OTHERS = {  # of engines, and of ruff
    "--check",
    "--enable-metrics",
    "--enable-prompt-tokens-details",
    "--enable-server-load-tracking",
    "--kv-events-config",
    "--prefix",
    "--shutdown-timeout",
    "--stream-interval",
}

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def section(page: str, title: str) -> str:
    return (ROOT / "docs" / page).read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def first_column(text: str) -> set[str]:
    """The names in code type that the rows of a table begin with."""
    cells = re.findall(r"^\| (`[^|]*)\|", text, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from options(inner)


def test_readme_opens_with_a_paragraph_an_example_and_the_two_commands() -> None:
    parts = re.split(r"^```", (ROOT / "README.md").read_text(), maxsplit=2, flags=re.MULTILINE)
    title, paragraph = parts[0].strip().split("\n\n")
    assert title == "# gpuroute"
    assert len(paragraph) > 100
    assert parts[1].startswith("python\n")
    code = [line for line in parts[1].splitlines()[1:] if line.strip()]
    assert len(code) <= 10
    assert [line for block in blocks(parts[2], "sh") for line in block.splitlines()] == COMMANDS_OF_THE_README


def test_configuration_has_the_table_of_the_code() -> None:
    assert markdown() in (ROOT / "docs" / "configuration.md").read_text(), "run python -m gpuroute.config"


def test_policies_and_outcomes_are_explained() -> None:
    configuration = (ROOT / "docs" / "configuration.md").read_text().partition("## Policies")[2]
    assert set(re.findall(r"^\| `(\w+)`", configuration, re.MULTILINE)) == set(POLICIES)
    index = (ROOT / "docs" / "index.md").read_text()
    assert {outcome.label for outcome in Outcome} <= set(re.findall(r"^\| (\w+) \|", index, re.MULTILINE))


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_the_index_lists_every_page() -> None:
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages <= set(re.findall(r"^- \[[^]]*\]\(([^)]*)\):? ", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE))


@every_page
def test_variables_and_commands_exist(page: Path) -> None:
    text = page.read_text()
    known = {variable(row.name) for row in rows()} | {variable(row.name) + "_FILE" for row in rows() if is_secret(row)}
    assert set(re.findall(r"GPUROUTE_[A-Z_]*[A-Z]", text)) - known == set()
    shell = "".join(blocks(text, "sh")) + " ".join(re.findall(r"`(gpuroute [^`]*)`", text))
    assert set(re.findall(r"(?:^|/| )gpuroute ([a-z]+)", shell, re.MULTILINE)) - set(COMMANDS) == set()


def test_flags_exist() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    for name in COMMANDS:
        importlib.import_module(f"gpuroute.cli.{name}").add_parser(commands)
    text = "".join(page.read_text() for page in PAGES if page.name != "CHANGELOG.md")
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text)) - set(options(parser)) <= FLAGS_OF_OTHERS


def test_tables_of_records_have_every_field() -> None:
    assert first_column(section("registry.md", "Fields of an endpoint")) == set(ENDPOINT_FIELDS)
    assert set(CONFIG_FIELDS) <= set(re.findall(r"`(\w+)`", section("registry.md", "Settings of a pool")))


def test_the_table_of_metrics_has_every_counter() -> None:
    source = (ROOT / "src" / "gpuroute" / "observe" / "otel.py").read_text()
    others = re.findall(r'(?:_histogram\(meter, |create_observable_gauge\()"([^"]+)"', source)
    assert len(others) == 6
    metrics = {*others, *(f"gpuroute.{name}" for name, *_ in COUNTERS)}
    assert first_column(section("observability.md", "OpenTelemetry")) == metrics


def test_the_source_distribution_has_what_the_readme_links_to() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packed = settings["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    links = re.findall(r"\]\(([^)#\s]+)", (ROOT / "README.md").read_text())
    assert {link.partition("/")[0] for link in links} <= set(packed)


@every_page
def test_python_in_documents_parses(page: Path) -> None:
    for block in blocks(page.read_text(), "python"):
        ast.parse(block)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["README.md", "docs/quickstart.md"])
def test_examples_run(name: str) -> None:
    [example] = blocks((ROOT / name).read_text(), "python")
    with GpuServer(model="llama-3-8b", time_scale=0.01) as server:
        environ = {**os.environ, **PATIENT, "GPUROUTE_REGISTRY": f"llama-3-8b={server.url}"}
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", example],
            env=environ,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.strip()


@every_page
def test_fleet_files_are_fleets(page: Path, tmp_path: Path) -> None:
    for number, block in enumerate(blocks(page.read_text(), "toml")):
        path = tmp_path / f"fleet-{number}.toml"
        path.write_text(block)
        fleet = first_fleet(open_registry(str(path)), 10.0)
        assert fleet.problems == ()
        assert all(pool.endpoints for pool in fleet.pools.values())


def test_the_changelog_knows_this_version() -> None:
    releases = re.findall(r"^## \[(\d\S*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert releases[0] == gpuroute.__version__
