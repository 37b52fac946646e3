"""The command: exit codes, one-line errors, JSON that is JSON, and that each command is there."""

from __future__ import annotations

import errno
import json
import os
import shlex
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import gpuroute.cli.config
from gpuroute.cli import COMMANDS, bench_pick, main
from gpuroute.core.policies import POLICIES


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"gpuroute {version('gpuroute')}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_is_listed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main([name, "--help"])
    assert done.value.code == 0
    assert f"gpuroute {name}" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--help"])
    assert name in capsys.readouterr().out.split()


@pytest.mark.parametrize("argv", [[], ["no-such-command"], ["config", "--no-such-flag"]])
def test_wrong_use_exits_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(argv)
    assert done.value.code == 2
    assert "gpuroute" in capsys.readouterr().err


def test_bad_settings_are_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUROUTE_ATTEMPTS", "3\nx")
    monkeypatch.setenv("GPUROUTE_TIMEOUT", "soon")
    assert main(["config"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("gpuroute: GPUROUTE_TIMEOUT='soon': expected a duration")


@pytest.mark.parametrize("wrong", ["--drain=soon", "--ttl=soon", "--hung-after=-1s"])
def test_a_bad_duration_is_called_one(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["agent", wrong])
    option, _, value = wrong.partition("=")
    assert f"argument {option}: {value!r}: expected a duration" in capsys.readouterr().err


def test_an_agent_for_an_engine_that_nobody_knows_does_not_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["agent", "--engine", "vlm"]) == 2
    assert "gpuroute: --engine='vlm': expected auto or one of " in capsys.readouterr().err


def test_a_register_that_is_refused_leaves_signals_alone(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert main(["register", "http://a:1", "--registry", "etcd://127.0.0.1:1", "--ttl", "0"]) == 2
    assert "ttl=0" in capsys.readouterr().err
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before == set()


def test_ctrl_c_exits_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(gpuroute.cli.config, "run", interrupt)
    assert main(["config"]) == 130


def test_a_closed_pipe_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "gpuroute", "config"], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("closed", "code"), [(">&-", 0), ("2>&-", 0), (">&- 2>&-", 0)])
def test_an_output_that_was_closed_before_is_no_traceback(closed: str, code: int) -> None:
    command = f"{shlex.quote(sys.executable)} -m gpuroute config {closed}"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, "")


def test_what_goes_wrong_is_not_said_on_stdout_when_stderr_is_closed() -> None:
    command = f"{shlex.quote(sys.executable)} -m gpuroute config 2>&-"
    environ = {**os.environ, "GPUROUTE_TIMEOUT": "soon"}
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False, env=environ)
    assert (done.returncode, done.stdout) == (2, "")


def test_letters_that_the_terminal_cannot_show_are_escaped(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.json"
    record = {"id": "gpu-1", "url": "http://127.0.0.1:9", "zone": "zürich"}
    fleet.write_text(json.dumps({"pools": {"llama": {"endpoints": [record]}}}))
    done = subprocess.run(
        [sys.executable, "-m", "gpuroute", "endpoints", "--registry", f"file://{fleet}"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert r"z\xfcrich" in done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["config"], ["endpoints", "--registry", "llama=http://127.0.0.1:9"], ["--help"]])
def test_output_that_cannot_be_written_is_one_line(arguments: list[str], unbuffered: str) -> None:
    if unbuffered and arguments == ["--help"]:
        pytest.skip("argparse itself passes over it")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "gpuroute", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert (done.returncode, done.stderr) == (1, f"gpuroute: standard output: {os.strerror(errno.ENOSPC)}\n")


def test_config_shows_values_with_their_sources_and_no_secrets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUROUTE_POLICY", "p2c")
    monkeypatch.setenv("GPUROUTE_SALT", "canary-1")
    monkeypatch.setenv("GPUROUTE_ZON", "a")
    assert main(["config", "--json"]) == 0
    text = capsys.readouterr().out
    shown = json.loads(text)
    rows = {row["variable"]: (row["value"], row["source"]) for row in shown["settings"]}
    assert rows["GPUROUTE_POLICY"] == ("p2c", "environment")
    assert rows["GPUROUTE_ATTEMPTS"] == ("3", "default")
    assert rows["GPUROUTE_SALT"] == ("***", "environment")
    assert shown["unknown"] == ["unknown variable GPUROUTE_ZON (did you mean GPUROUTE_ZONE?)"]
    assert main(["config"]) == 0
    text += capsys.readouterr().out
    assert "GPUROUTE_POLICY             p2c  [environment]" in text
    assert "canary" not in text


def test_bench_pick_prints_one_json_object(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_pick, "ROUNDS", 2)
    monkeypatch.setattr(bench_pick, "PER_ROUND", 5)
    monkeypatch.setattr(bench_pick, "SIZES", (10, 100))
    assert main(["bench", "pick", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert set(figures) == {"two_random_ns", "policies"}
    assert set(figures["policies"]) == set(POLICIES)
    assert all(set(row) == {"10", "100"} and min(row.values()) > 0 for row in figures["policies"].values())
    assert figures["two_random_ns"] > 0
