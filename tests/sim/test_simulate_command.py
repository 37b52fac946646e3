"""`gpuroute simulate`: outputs for people and machines, errors in one line, the step model's errors."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpuroute.cli import main
from gpuroute.cli import simulate as command
from gpuroute.sim import output
from gpuroute.sim.run import KEYS, Scenario, sweep
from gpuroute.sim.validate import validate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BASE = ["simulate", "--fleet", "3xH100", "--clients", "2", "--copies", "1", "--window", "20", "--warmup", "5", "--quiet"]


def test_json_on_stdout_has_exactly_the_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASE, "--policy", "p2c,oracle", "--seeds", "2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["policy"], row["seed"]) for row in rows] == [("p2c", 1), ("p2c", 2), ("oracle", 1), ("oracle", 2)]
    assert all(tuple(row) == KEYS for row in rows)


def test_files_table_and_processes_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two, table = tmp_path / "1.json", tmp_path / "2.json", tmp_path / "t.csv"
    assert main([*BASE, "--policy", "p2c,auto+asks", "--json", str(one), "--csv", str(table)]) == 0
    assert main([*BASE, "--policy", "p2c,auto+asks", "--json", str(two), "--jobs", "2"]) == 0
    assert one.read_bytes() == two.read_bytes()
    with table.open() as lines:
        assert [row["policy"] for row in csv.DictReader(lines)] == ["p2c", "auto+asks"]
    shown = capsys.readouterr().out
    assert "auto+asks" in shown
    assert "mooncake x 1 on 3xH100" in shown


def test_a_ray_cluster_gives_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is an extra")
    local, cluster = tmp_path / "local.json", tmp_path / "ray.json"
    sweep_of_two = [*BASE, "--policy", "p2c,auto+asks", "--seeds", "2"]
    assert main([*sweep_of_two, "--json", str(local)]) == 0
    assert main([*sweep_of_two, "--json", str(cluster), "--engine", "ray", "--jobs", "2"]) == 0
    assert local.read_bytes() == cluster.read_bytes()


class Ref:
    """Where a result will be."""

    def __init__(self, value: object) -> None:
        self.value = value


class Remote:
    """A function that runs elsewhere; here: at once."""

    def __init__(self, work: Callable[..., object]) -> None:
        self._work = work

    def remote(self, *what: object) -> Ref:
        return Ref(self._work(*what))


class PretendRay:
    """What we call of Ray, for machines without it."""

    def __init__(self) -> None:
        self.cancelled, self.up, self.started = 0, False, 0

    def is_initialized(self) -> bool:
        return self.up

    def init(self, **_: object) -> None:
        self.up = True
        self.started += 1

    def remote(self, **_: object) -> Callable[[Callable[..., object]], object]:
        return Remote

    def put(self, what: object) -> object:
        return what

    def wait(self, waiting: list[object], num_returns: int) -> tuple[list[object], list[object]]:
        return waiting[-num_returns:], waiting[:-num_returns]  # the last comes first, as it may

    def get(self, done: Ref) -> object:
        return done.value

    def cancel(self, left: object, *, force: bool) -> None:
        self.cancelled += force

    def shutdown(self) -> None:
        self.up = False


@pytest.fixture
def pretend_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendRay]:
    ray = PretendRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.delitem(sys.modules, "gpuroute.sim.cluster", raising=False)
    yield ray
    sys.modules.pop("gpuroute.sim.cluster", None)


def test_a_cluster_is_left_as_it_was_found(pretend_ray: PretendRay) -> None:
    scenario = Scenario(fleet="2xH100", clients=1, window=5, warmup=0)
    here = sweep(scenario, ["p2c", "random"], [1, 2])
    there = sweep(scenario, ["p2c", "random"], [1, 2], engine="ray")
    assert repr(here) == repr(there), "in the order that was asked for, whatever came first"
    assert (pretend_ray.started, pretend_ray.up, pretend_ray.cancelled) == (1, False, 0)
    pretend_ray.up = True  # somebody else's
    sweep(scenario, ["p2c"], [1], engine="ray")
    assert (pretend_ray.started, pretend_ray.up) == (1, True)


def test_what_is_left_on_a_cluster_is_cancelled(pretend_ray: PretendRay) -> None:
    def stop(_: object) -> None:
        raise KeyboardInterrupt

    scenario = Scenario(fleet="2xH100", clients=1, window=5, warmup=0)
    done = sweep(scenario, ["p2c"], [1, 2, 3], engine="ray", on_result=stop)
    assert [result.row["seed"] for result in done] == [3]
    assert (pretend_ray.cancelled, pretend_ray.up) == (2, False)


def test_ray_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "find_spec", lambda _: None)
    assert main([*BASE, "--engine", "ray"]) == 2
    assert "gpuroute[ray]" in capsys.readouterr().err
    assert main([*BASE, "--plot", "x.png"]) == 2
    assert "gpuroute[plot]" in capsys.readouterr().err


def test_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="plots are an extra")
    picture = tmp_path / "p.png"
    assert main([*BASE, "--policy", "p2c", "--plot", str(picture), "--json", str(tmp_path / "r")]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main([*BASE, "--plot", str(tmp_path / "p.docx")]) == 2
    assert "expected a file name that ends in .png, .svg or .pdf" in capsys.readouterr().err


def test_table_without_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(output, "find_spec", lambda _: None)
    results = sweep(Scenario(fleet="2xH100", clients=1, window=10, warmup=0), ["p2c"], [1, 2])
    output.print_table(results, "title")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "title"
    assert lines[2].startswith("p2c")
    assert "±" in lines[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "fastest"], "unknown policy 'fastest'"),
        (["--policy", "p2c+rumours"], "unknown policy"),
        (["--fleet", "nothing"], "fleet 'nothing'"),
        (["--trace", "/no/such/file"], "neither one of"),
        (["--event", "3:melt:1"], "event '3:melt:1'"),
        (["--policy", "auto+"], "unknown policy 'auto+'"),
        (["--policy", ",,"], "--policy=',,': expected names"),
        (["--event", "3:die:99"], "the fleet has 0 to"),
        (["--json", "/no/such/directory/x"], "--json='/no/such/directory/x': expected a file in a directory"),
        (["--csv", "/"], "--csv='/': expected a file"),
        (["--only", "base"], "expected --suite"),
        (["--suite", "headline", "--only", "base,nope"], "--only='nope': expected cases of the suite, of headline,"),
        (["--suite", "headline", "--csv", "x.csv"], "--csv and --plot are of single sweeps"),
        (["--slo", "2"], "expected TTFT,TPOT"),
        (["--slo", "fast,slow"], "expected TTFT,TPOT"),
    ],
)
def test_wrong_use_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASE, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "values", "accepted"),
    [
        ("--clients", ["0", "-1", "x", "1.5", "99999999999"], "a whole number of at least 1 and at most 100000"),
        ("--copies", ["0", "99999999999"], "a whole number of at least 1"),
        ("--seeds", ["0", "99999999999"], "a whole number of at least 1"),
        ("--jobs", ["0", "-1", "99999999999"], "a whole number of at least 1"),
        ("--max-num-seqs", ["0"], "a whole number of at least 1"),
        ("--max-num-batched-tokens", ["99999999999"], "a whole number of at least 1"),
        ("--dram-tokens", ["-1"], "a whole number of at least 0"),
        ("--subset", ["-1", "auto"], "a whole number of at least 0"),
        ("--window", ["0", "-1", "nan", "inf"], "a duration above 0"),
        ("--warmup", ["-1", "nan"], "a duration such as 0s"),
        ("--timeout", ["0", "-1"], "a duration above 0"),
        ("--network-delay", ["-1", "nan", "inf"], "a duration such as 0s"),
        ("--report-loss", ["-0.1", "1.1", "nan", "10%"], "a number from 0 to 1"),
        ("--coverage", ["inf", "2"], "a number from 0 to 1"),
        ("--foreign", ["-1"], "a number from 0 to 1"),
        ("--scale-h", ["0", "-1", "nan", "inf"], "a number above 0 and at most 1000"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(
    option: str, values: list[str], accepted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in values:
        with pytest.raises(SystemExit) as caught:
            main(["simulate", f"{option}={value}"])
        assert caught.value.code == 2
        assert f"argument {option}: {value!r}: expected {accepted}" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_after_all_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert main([*BASE, "--csv", str(tmp_path / "x.csv")]) == 2
    assert "x.csv' cannot be written: No space left on device" in capsys.readouterr().err


def test_ctrl_c_keeps_what_is_done() -> None:
    def stop(result: object) -> None:
        raise KeyboardInterrupt

    scenario = Scenario(fleet="2xH100", clients=1, window=10, warmup=0)
    assert len(sweep(scenario, ["p2c", "random"], [1, 2], on_result=stop)) == 1


def test_progress_is_told_up_to_the_end() -> None:
    shares: list[float] = []
    sweep(Scenario(fleet="2xH100", clients=1, window=30, warmup=0), ["p2c", "random"], [1], on_progress=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] > 0.95


def test_the_step_model_matches_recorded_runs() -> None:
    rows = validate()
    tuned = [row for row in rows if row.run.startswith("RTXPRO6000")]
    untuned = [row for row in rows if row.run.startswith("RTX4090")]
    assert len(tuned) == len(untuned) == 12
    assert max(abs(row.error) for row in tuned) < 0.03
    assert max(abs(row.error) for row in untuned) < 0.12


def test_validate_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--validate"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 25


def test_validate_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--validate", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 24
    assert set(rows[0]) == {"run", "metric", "statistic", "measured", "simulated", "error"}


def test_help_shows_defaults_that_say_something(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    said = capsys.readouterr().out
    assert "(default: p2c,auto,oracle)" in said
    assert not any(f"default: {word}" in said for word in ("None", "False", "inf", "0)", "[]"))
