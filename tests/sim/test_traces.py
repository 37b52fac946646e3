"""Traces: what is read, how they are spread and laid over each other."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from gpuroute.sim.run import Scenario, simulate
from gpuroute.sim.traces import Request, Trace, load_trace

if TYPE_CHECKING:
    from pathlib import Path


def test_mooncake_is_complete_and_off_its_grid() -> None:
    trace = load_trace("mooncake", seed=1)
    assert len(trace.rows) == 12_031
    assert sum(row.prompt_tokens for row in trace.rows) / 12_031 == pytest.approx(12_035, abs=1)
    gaps = [b.at - a.at for a, b in pairwise(trace.rows)]
    mean = sum(gaps) / len(gaps)
    variation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 / mean
    assert variation == pytest.approx(1.0, abs=0.1)  # 3.0 on the raw 3 s grid
    assert all(row.blocks and row.session is not None for row in trace.rows)


def test_azure_is_complete() -> None:
    trace = load_trace("azure-conv")
    assert len(trace.rows) == 19_366
    assert trace.rate == pytest.approx(5.53, abs=0.01)
    assert sum(row.output_tokens for row in trace.rows) / 19_366 == pytest.approx(211, abs=1)


def test_one_copy_is_the_trace_itself() -> None:
    trace = Trace("t", [Request(float(at), 10, 5, (at, at + 1), at) for at in range(20)], span=20.0)
    assert list(trace.superpose(1, 7, 20.0)) == trace.rows


def test_copies_are_shifted_and_share_nothing_but_common_blocks() -> None:
    trace = Trace("t", [Request(float(at), 1024, 5, (0, 1, at + 2), at) for at in range(50)], span=50.0)
    rows = list(trace.superpose(4, 3, 50.0, common=1))
    assert len(rows) == pytest.approx(200, abs=4)
    assert [row.at for row in rows] == sorted(row.at for row in rows)
    assert {row.blocks[0] for row in rows} == {0}
    assert len({row.blocks[1] for row in rows}) == 4
    assert len({row.session for row in rows}) == len({row.blocks[2] for row in rows}) == 200
    assert rows == list(trace.superpose(4, 3, 50.0, common=1))
    assert rows != list(trace.superpose(4, 4, 50.0, common=1))


def test_the_trace_repeats_beyond_its_end() -> None:
    trace = Trace("t", [Request(1.0, 1, 1)], span=10.0)
    assert [row.at for row in trace.superpose(1, 1, 35.0)] == [1.0, 11.0, 21.0, 31.0]


def test_own_csv_and_jsonl(tmp_path: Path) -> None:
    table = tmp_path / "own.csv"
    table.write_text("at,prompt_tokens,output_tokens,blocks,session\n5,600,7,1 2,9\n6.5,100,8,,\n")
    lines = tmp_path / "own.jsonl.gz"
    rows = [
        {"at": 5, "prompt_tokens": 600, "output_tokens": 7, "blocks": [1, 2], "session": 9},
        {"at": 6.5, "prompt_tokens": 100, "output_tokens": 8},
    ]
    lines.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    expected = [Request(0.0, 600, 7, (1, 2), 9), Request(1.5, 100, 8)]
    assert load_trace(str(table)).rows == load_trace(str(lines)).rows == expected


HEAD = "at,prompt_tokens,output_tokens\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("at,prompt_tokens\n1,2\n", "record 1: .*output_tokens"),
        (f"{HEAD}1,2,3\nx,2,3\n", "record 2: at is 'x'; expected a number or a date"),
        (f"{HEAD}1,2,3\nnan,2,3\n", "record 2: at is 'nan'; expected a number"),
        (f"{HEAD}inf,2,3\n", "record 1: at is 'inf'; expected a number"),
        (f"{HEAD}1,-2,3\n", "record 1: prompt_tokens is '-2'; expected a whole number of tokens"),
        (f"{HEAD}1,2.5,3\n", "record 1: prompt_tokens is '2.5'; expected a whole number of tokens"),
        (f"{HEAD}1,2,{9**30}\n", "record 1: output_tokens is .*; expected a whole number of tokens, at most"),
        (f"{HEAD}1,2\n", "record 1: output_tokens is 'None'; expected"),
        (HEAD, "no requests"),
        ("", "no requests"),
        ('{"at": 1, "prompt_tokens": 1, "output_tokens": 1}\n{bad\n', "record 2: .*line 1 column 2"),
        ('{"at": 1, "prompt_tokens": 1, "output_tokens": 1}\n[1]\n', "record 2: expected a JSON object"),
        (
            '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": "abc"}',
            "hash_ids is 'abc'; expected whole",
        ),
        (
            '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1, null]}',
            "record 1: hash_ids is .*None",
        ),
        ('{"timestamp": "x", "input_length": 1, "output_length": 1, "hash_ids": []}', "record 1: timestamp is 'x'"),
        ('{"at": 0, "prompt_tokens": 1, "output_tokens": 1, "blocks": 5}', "record 1: blocks is '5'; expected whole"),
        ('{"at": 0, "prompt_tokens": 1, "output_tokens": 1, "blocks": [1.5]}', "record 1: blocks is "),
        ('{"at": 0, "prompt_tokens": 1, "output_tokens": 1, "session": "z"}', "record 1: session is "),
        ('{"a":' * 100_000, "record 1: "),
        ('{"clients": []}', "no ServeGen file: KeyError 'window_s'"),
        ('{"clients": 5, "window_s": 60}', "no ServeGen file: TypeError"),
        ('{"clients": [{"id": 1}], "window_s": 60}', "no client has token lengths"),
        ('{"clients": [{"id": 1}], "window_s": 0}', "window_s is 0.0; expected seconds above 0"),
    ],
)
def test_a_bad_file_says_where(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.csv"
    file.write_text(text)
    with pytest.raises(
        ValueError, match=f"^trace bad.csv.*: .*{message}|^trace bad.csv: {message}|^trace bad.csv, {message}"
    ):
        load_trace(str(file))


@pytest.mark.parametrize(
    "window", [[1, 1, "G", 0, 1], [1, 1, "W", 1, -1], [1, 1, "G", 1, 1e-9], [1, 1, "W", 1, 1e-9], [1]]
)
def test_a_servegen_window_that_cannot_be_does_not_go_on_for_ever(tmp_path: Path, window: list) -> None:
    tokens = {"input_tokens": {"q": [100, 200]}, "output_tokens": {"q": [10, 10]}}
    data = {"window_s": 600, "quantile_points": [0, 100], "clients": [{"id": 3, "win": [window], "tok": tokens}]}
    file = tmp_path / "s.json"
    file.write_text(json.dumps(data))
    with pytest.raises(
        ValueError, match=r"trace s.json: (a window has shape|more than 10000000 calls|it is no|not enough values)"
    ):
        load_trace(str(file), seconds=600)


@pytest.mark.parametrize(
    ("name", "data"), [("a.gz", b"no gzip"), ("b.gz", gzip.compress(b"at" * 999, mtime=0)[:-9]), ("c.csv", b"\xff")]
)
def test_a_file_that_is_no_text_says_so(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=f"trace {name}: expected (gzip of )?UTF-8 text: "):
        load_trace(str(tmp_path / name))


@pytest.mark.parametrize("rows", ["5,10,10\n", "5,10,10\n5,10,10\n"])
def test_a_trace_of_one_moment_is_not_repeated_a_billion_times(tmp_path: Path, rows: str) -> None:
    file = tmp_path / "short.csv"
    file.write_text(HEAD + rows)
    with pytest.raises(ValueError, match=r"short.csv repeats \d calls every 1e-09 s: .*expected at most 1e\+08"):
        simulate(Scenario(trace=str(file), fleet="2xH100", clients=1, window=5.0, warmup=0.0), "p2c", 1)


@pytest.mark.parametrize(
    "option",
    [
        "rate=0",
        "rate=-1",
        "rate=nan",
        "rate=inf",
        "rate",
        "prompt=0",
        "output=inf",
        "sigma=-1",
        "groups=1e12",
        "shared=-1",
    ],
)
def test_a_number_that_no_generator_can_use_is_explained(option: str) -> None:
    name = option.partition("=")[0]
    with pytest.raises(ValueError, match=f"synthetic trace: '{option}': expected {name}= and a number from "):
        load_trace(f"synthetic:{option}")


def test_more_calls_than_memory_can_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="more than 10000000 calls would be generated"):
        load_trace("synthetic:rate=1e6", seconds=3600)


def test_an_unknown_source_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="mooncake"):
        load_trace("nowhere")
    with pytest.raises(ValueError, match="neither one of mooncake"):
        load_trace("syntheticus:rate=1")


def test_servegen_follows_its_windows(tmp_path: Path) -> None:
    tokens = {"input_tokens": {"q": [100, 200]}, "output_tokens": {"q": [10, 10]}}
    client = {"id": 3, "win": [[], [5.0, 1.0, "G", 1.0, 0.2], [10.0, 1.0, "W", 1.0, 0.1]], "tok": tokens}
    data = {"window_s": 600, "quantile_points": [0, 100], "clients": [client, {"id": 4, "win": [[]]}]}
    file = tmp_path / "s.json"
    file.write_text(json.dumps(data))
    rows = load_trace(str(file), seed=2, seconds=1800).rows
    second, third = ([row for row in rows if lo <= row.at < lo + 600] for lo in (600, 1200))
    assert len([row for row in rows if row.at < 600]) == 0
    assert len(second) == pytest.approx(3000, rel=0.1)
    assert len(third) == pytest.approx(6000, rel=0.1)
    assert all(100 <= row.prompt_tokens <= 200 and row.output_tokens == 10 and row.session == 3 for row in rows)


def test_synthetic_has_the_asked_means_and_shared_prefixes() -> None:
    trace = load_trace("synthetic:rate=20,prompt=1000,output=50,groups=4,shared=1024", seed=1, seconds=300)
    assert trace.rate == pytest.approx(20, rel=0.1)
    assert sum(row.output_tokens for row in trace.rows) / len(trace.rows) == pytest.approx(50, rel=0.1)
    assert len({row.blocks for row in trace.rows}) == 4
    with pytest.raises(ValueError, match="unknown option 'speed'"):
        load_trace("synthetic:speed=1")
