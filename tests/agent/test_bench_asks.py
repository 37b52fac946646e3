"""The benches run and say what they promise to say; their figures are for quiet machines, not for tests."""

from __future__ import annotations

import json

import pytest

from gpuroute.cli import main
from gpuroute.cli.bench_live import BLOCK_TOKENS, prompt_of
from gpuroute.sim.traces import Request
from gpuroute.testing.text import block_hashes, count_tokens

pytestmark = pytest.mark.real_time


def test_bench_ask(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuroute.cli.bench_ask.ROUNDS", 1)
    assert main(["bench", "ask", "--json", "--seconds", "0.3", "--rate", "200"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["asks_per_s"] > 100
    assert row["agent_rss_mib"] < 60
    assert 3 < row["asks_per_call"] <= 6
    assert {"p50_ms", "p99_ms", "p999_ms", "floor_p99_ms", "unasked_us"} <= set(row)
    assert min(row[f"{name}_us_best"] for name in ("floor_sync", "floor_async", "asked_sync", "asked_async")) > 0


@pytest.mark.timeout(300)
def test_bench_live(capfd: pytest.CaptureFixture[str]) -> None:
    size = [
        "--servers",
        "3",
        "--agents",
        "1",
        "--clients",
        "2",
        "--time-scale",
        "0.05",
        "--warmup",
        "0",
        "--window",
        "12",
        "--ask-timeout",
        "200ms",
    ]
    assert (
        main(["bench", "live", "--json", *size, "--policies", "p2c,auto+asks,auto+asks+liars+loss,auto+asks+closed"]) == 0
    )
    out, progress = capfd.readouterr()
    assert "turn 4 of 4: auto+asks+closed: mean TTFT" in progress
    rows = json.loads(out)
    assert [(row["policy"], row["asks"], row["trouble"]) for row in rows] == [
        ("p2c", False, ""),
        ("auto", True, ""),
        ("auto", True, "liars+loss"),
        ("auto", True, "closed"),
    ]
    assert all(row["calls"] > 5 and row["failed"] <= row["calls"] / 4 and row["ttft_mean"] > 0 for row in rows)
    assert all({"ttft_p95", "ttft_p99", "cached_share"} <= set(row) for row in rows)
    assert rows[1]["answered_share"] > 0
    assert rows[2]["answered_share"] < 0.8, "half of all asks or their answers get lost"


def test_blocks_of_a_trace_become_text_that_is_shared_as_far_as_the_trace_says() -> None:
    one = Request(0.0, 2_000, 10, (1, 2, 3))
    other = Request(1.0, 1_700, 10, (1, 2, 9))
    texts = [prompt_of(request, 0) for request in (one, other)]
    assert [count_tokens(text) for text in texts] == [2_000, 1_700]
    shared = len(set(block_hashes(texts[0])) & set(block_hashes(texts[1])))
    assert shared == 2 * BLOCK_TOKENS // 16
    assert prompt_of(one, 0) == prompt_of(one, 0) != prompt_of(one, 1)
