"""The suite of claims: its rows fit its cases, and its verdicts are right."""

from __future__ import annotations

import argparse
import json

import pytest

from gpuroute import cli
from gpuroute.cli import simulate as command
from gpuroute.sim import suite
from gpuroute.sim.output import print_claims
from gpuroute.sim.run import Result, check_policy
from gpuroute.sim.suite import CASES, ROWS, Row, cases_of, judged


def arguments(text: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    return parser.parse_args(["simulate", *text.split()])


@pytest.mark.parametrize("case", CASES)
def test_every_case_is_a_command_that_parses(case: str) -> None:
    args = arguments(CASES[case])
    command._scenario(args)
    for name in args.policy.split(","):
        check_policy(name)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.case}: {row.figure}")
def test_every_row_finds_its_policies_in_its_cases(row: Row) -> None:
    found = {
        case: [
            Result(
                {"policy": name, "ttft_mean": 2.0, "ttft_p50": 2.0, "ttft_p95": 2.0, "ttft_p99": 2.0, "goodput": 2.0}
                | {"hit": 0.5, "max_over_mean": 2.0, "success": 0.9},
                {"attempts_per_call": 1.0, "utilisation": 0.5}
                | {f"{what}_{kind}": 9.0 for what in ("calls", "prompts") for kind in ("A100", "V100")},
            )
            for name in arguments(CASES[case]).policy.split(",")
        ]
        for case in cases_of([row])
    }
    assert row.value(found) > 0


def test_a_figure_is_held_against_its_bar() -> None:
    found = {"base": [Result({"policy": "auto", "ttft_mean": 1.2}), Result({"policy": "p2c", "ttft_mean": 1.0})]}
    rows = [
        Row("1", "a", "base", "auto / p2c", "<= 1.1"),
        Row("1", "b", "base", "auto", ">= 1.1"),
        Row("1", "c", "base", "auto"),
    ]
    table = judged([*rows, Row("1", "d", "over", "auto")], found)
    assert [row["met"] for row in table] == [False, True, None], "cases that were not run are left out"
    assert table[0]["value"] == pytest.approx(1.2)
    assert table[0]["command"].startswith("gpuroute simulate ")


def test_several_seeds_give_a_mean_and_its_interval(capsys: pytest.CaptureFixture[str]) -> None:
    def results(policy: str, *means: float) -> list[Result]:
        return [Result({"policy": policy, "seed": seed, "ttft_mean": mean}) for seed, mean in enumerate(means, 1)]

    found = {"base": [*results("auto", 1.0, 2.0, 3.0), *results("p2c", 2.0, 2.0, 2.0)]}
    (row,) = judged([Row("1", "a", "base", "auto / p2c", "<= 1")], found)
    assert row["value"] == pytest.approx(1.0)
    assert row["plus_minus"] == pytest.approx(1.242, abs=0.001), "Student's t with two degrees of freedom"
    print_claims([row])
    assert "| 1 ± 1.2 | <= 1 | met |" in capsys.readouterr().out
    found["base"].pop()  # interrupted: the last seed of one policy is missing
    (row,) = judged([Row("1", "a", "base", "auto / p2c", "<= 1")], found)
    assert row["value"] == pytest.approx(0.75), "of the two that are complete"


def test_the_command_prints_claims_and_fails_when_one_is_missed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = "--trace synthetic:rate=20,prompt=500,output=5 --fleet 2xH100 --clients 2 --copies 1 --window 2 --warmup 1"
    monkeypatch.setattr(suite, "CASES", {"tiny": f"{tiny} --policy p2c,random"})
    rows = (Row("1", "free", "tiny", "p2c.success", ">= 1"), Row("1", "never", "tiny", "p2c / random", "<= 0"))
    monkeypatch.setattr(suite, "SUITES", {"headline": rows})
    assert cli.main(["simulate", "--suite", "headline", "--quiet"]) == 1
    assert "**missed**" in capsys.readouterr().out
    monkeypatch.setattr(suite, "SUITES", {"headline": rows[:1]})
    assert cli.main(["simulate", "--suite", "headline", "--quiet", "--json"]) == 0
    assert [row["met"] for row in json.loads(capsys.readouterr().out)] == [True]


def test_a_case_may_have_seeds_of_its_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = "--trace synthetic:rate=20,prompt=500,output=5 --fleet 2xH100 --clients 2 --copies 1 --window 2 --warmup 1"
    monkeypatch.setattr(suite, "CASES", {"one": f"{tiny} --policy p2c", "three": f"{tiny} --policy p2c --seeds 3"})
    monkeypatch.setattr(suite, "SUITES", {"headline": (Row("4", "a", "one", "p2c"), Row("4", "b", "three", "p2c"))})
    assert cli.main(["simulate", "--suite", "headline", "--quiet", "--json"]) == 0
    one, three = json.loads(capsys.readouterr().out)
    assert one["plus_minus"] == 0 < three["plus_minus"]
