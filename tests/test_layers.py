"""The layers hold: who imports whom, what the core must not touch, what `import gpuroute` may load."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import gpuroute

ROOT = Path(gpuroute.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
ANYTHING_PUBLIC = {"router", "config", "registry", "engines", "observe", "core", "errors", "public"}

MAY_IMPORT = {
    "errors": set(),
    "core": {"errors"},
    "config": {"core", "errors"},
    "engines": {"core", "errors"},
    "registry": {"core", "config", "errors"},
    "router": {"core", "config", "registry", "engines", "errors"},
    "observe": {"core", "errors"},
    "transports": {"router", "observe", "engines", "core", "errors", "config", "forms"},
    "public": {"transports", "router", "config", "registry", "engines", "core", "errors"},
    "agent": ANYTHING_PUBLIC,
    "sim": ANYTHING_PUBLIC | {"agent"},
    "testing": ANYTHING_PUBLIC | {"transports", "sim"},
    "cli": ANYTHING_PUBLIC | {"transports", "testing", "sim", "agent"},
}
# "public": the modules that users import to get a transport, and the package itself, which only passes names on.
PART_OF = {
    "routed": "router",
    "pools": "router",
    "rollout": "router",
    "bounded": "config",
    "forms": "config",
    "__main__": "cli",
} | dict.fromkeys(("__init__", "httpx", "httpx2", "grpc", "triton", "wrapping"), "public")
BANNED_IN_CORE = {"time", "random", "threading", "asyncio", "socket", "logging", "os", "secrets", "datetime"}


def layer_of(module: str) -> str:
    """The layer of `gpuroute.x.y`."""
    part = module.split(".")[1] if "." in module else "__init__"
    return PART_OF.get(part, part)


def module_of(path: Path) -> str:
    parts = ["gpuroute", *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> set[str]:
    """Every module that a file imports anywhere, lazily or for types too."""
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            # `from gpuroute import core` imports a layer, not the package.
            found |= {f"{module}.{alias.name}" for alias in node.names} if module == "gpuroute" else {module}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_layers(path: Path) -> None:
    layer = layer_of(module_of(path))
    own = {layer_of(name) for name in imports_of(path) if name.split(".")[0] == "gpuroute"}
    assert own - {layer} <= MAY_IMPORT[layer], f"{layer} may import {sorted(MAY_IMPORT[layer])} only"


@pytest.mark.parametrize("path", sorted((ROOT / "core").rglob("*.py")), ids=lambda path: path.name)
def test_core_is_pure(path: Path) -> None:
    assert {name.split(".")[0] for name in imports_of(path)} & BANNED_IN_CORE == set()
    calls = {
        node.func.id
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert calls & {"open", "print", "input", "exec", "eval", "hash"} == set()


def test_the_layer_test_sees_lazy_relative_and_package_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ROOT / "core" / "some.py"
    lines = ["import os.path", "from . import state", "from gpuroute import cli", "from ..registry.etcd import x"]
    source = "def f():\n    " + "\n    ".join(lines)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: source)
    assert imports_of(path) == {"os.path", "gpuroute.core", "gpuroute.cli", "gpuroute.registry.etcd"}


REPORT = """
import json, sys, time
before = set(sys.modules)
started = time.process_time()  # the machine may have other things to do
import gpuroute
took = time.process_time() - started
print(json.dumps({"ms": took * 1e3, "new": sorted(set(sys.modules) - before)}))
"""


def imported_by(python: str) -> dict[str, object]:
    done = subprocess.run([sys.executable, "-I", "-c", python], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_importing_gpuroute_loads_only_light_stdlib() -> None:
    new = imported_by(REPORT)["new"]
    foreign = {name for name in new if name.split(".")[0] not in {*sys.stdlib_module_names, "gpuroute"}}
    assert foreign == set()
    assert {"asyncio", "ssl", "email"} & set(new) == set()


def test_importing_gpuroute_is_quick() -> None:
    times: list[float] = []
    while len(times) < 30 and min(times, default=1e9) > 80:  # a busy machine slows even what it counts as our own time
        times.append(imported_by(REPORT)["ms"])
    assert min(times) <= 80, f"import gpuroute takes {min(times):.0f} ms at best"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sizes(path: Path) -> None:
    """A file of the core fits into one reading, a function onto one screen."""
    source = path.read_text(encoding="utf-8")
    if layer_of(module_of(path)) == "core":
        assert source.count("\n") <= 250
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = {node.name: lines for node in functions if (lines := (node.end_lineno or 0) - node.lineno + 1) > 60}
    assert long == {}


def test_libraries_load_when_they_are_used() -> None:
    """A router over a static list needs no client library; a client of one library none of the others."""
    names = "[n for n in ('httpx', 'httpx2', 'grpc', 'opentelemetry', 'asyncio', 'rich') if n in sys.modules]"
    router = "import sys, json, gpuroute; gpuroute.Router(endpoints=['http://a:1']).call('default'); "
    assert imported_by(router + f"print(json.dumps({names}))") == []
    httpx2 = "import sys, json, gpuroute.httpx2; "
    loaded = imported_by(httpx2 + f"print(json.dumps({names}))")
    assert not {"httpx", "grpc", "opentelemetry", "rich"} & set(loaded)


def test_test_files_have_names_of_their_own() -> None:
    """pytest imports them by bare name: of two alike, one fails to load."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
