"""ORCA load reports: the captured ones, the specified ones, the malformed ones."""

from __future__ import annotations

import struct
from base64 import b64encode
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stage import Stage

from gpuroute.core.candidates import Ask
from gpuroute.core.orca import LoadReport, parse_orca, parse_orca_bin
from gpuroute.core.report import Report
from gpuroute.transports.piggyback import learn_header

CAPTURES = Path(__file__).parent.parent / "data" / "captures"


def captured(kind: str) -> str:
    lines = (CAPTURES / "vllm_outputs.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith(f"endpoint-load-metrics: {kind}")).partition(": ")[2]


def double(number: int, value: float) -> bytes:
    return bytes([number << 3 | 1]) + struct.pack("<d", value)


def named(name: str, value: float) -> bytes:
    entry = b"\x0a" + bytes([len(name)]) + name.encode() + double(2, value)
    return bytes([8 << 3 | 2, len(entry)]) + entry


WIRE = double(1, 0.25) + b"\x18\x07" + named("num_requests_waiting", 6) + named("kv_cache_usage_perc", 0.5)
READ = LoadReport(waiting=6, kv_usage=0.5, utilization=0.25)


@pytest.mark.parametrize("kind", ["JSON", "TEXT"])
def test_what_vllm_really_sends(kind: str) -> None:
    report = parse_orca(captured(kind))
    assert report == LoadReport(waiting=0, kv_usage=0)
    assert report.requests == 0


@pytest.mark.parametrize(
    ("text", "report"),
    [
        ('JSON {"named_metrics": {"num_requests_waiting": 6.0, "kv_cache_usage_perc": 0.5}}', READ),
        ("TEXT named_metrics.kv_cache_usage_perc=0.5,named_metrics.num_requests_waiting=6", READ),
        ("text named_metrics.kv_cache_utilization=0.5, named_metrics.max_token_capacity=9000", "triton"),
        ('json {"named_metrics": {"kv_cache_utilization": 0.5, "max_token_capacity": 9000}}', "triton"),
        ('{"cpuUtilization": 0.25, "namedMetrics": {"num_requests_waiting": 6, "kv_usage": 0.5}}', READ),
        ("BIN " + b64encode(WIRE).decode(), READ),
        ("TEXT cpu_utilization=0.25, application_utilization=0.75", LoadReport(utilization=0.25)),
        ("TEXT kv_cache_usage_perc=1.5, num_requests_waiting=-1", LoadReport(kv_usage=1.0)),
        ("TEXT num_requests_waiting=nan, num_requests_running=inf", None),
        ("TEXT", None),
        ("", None),
        ("=,=,=", None),
        ("JSON [1]", None),
        ('JSON {"named_metrics": 7}', None),
        ("JSON {" + '"a":{' * 9000, None),
        ("BIN !!", None),
        ("TEXT " + "num_requests_waiting=1," * 9000, None),
    ],
)
def test_text_and_json(text: str, report: LoadReport | str | None) -> None:
    triton = LoadReport(kv_usage=0.5, kv_tokens=9000)
    expected = triton if report == "triton" else report
    if expected is READ and "pu" not in text and "BIN" not in text:
        expected = READ._replace(utilization=None)
    assert parse_orca(text) == expected


def test_the_binary_form_knows_zero_values_and_unknown_fields() -> None:
    assert parse_orca_bin(WIRE) == READ
    zero = b"\x0a\x14num_requests_waiting"
    assert parse_orca_bin(bytes([0x42, len(zero)]) + zero) == LoadReport(waiting=0)
    assert parse_orca_bin(double(9, 0.5) + double(1, 0.25)) == LoadReport(utilization=0.5)
    assert parse_orca_bin(b"\xfd\x01\0\0\0\0" + WIRE) == READ


@pytest.mark.parametrize("data", [b"", b"\x09", WIRE[:-3], b"\xff" * 20, b"\x0b", b"\x42\x7f", b"\x42\x02\x09\x00"])
def test_a_broken_binary_form_is_no_report(data: bytes) -> None:
    assert parse_orca_bin(data) is None


@given(st.binary())
def test_nothing_raises(data: bytes) -> None:
    for kind in ("", "TEXT ", "JSON ", "BIN "):
        parse_orca(kind + data.decode("latin-1"))
    parse_orca_bin(data)


@pytest.mark.parametrize("value", ["1e308", "1e16", "1e400", "NaN", "-1", '"inf"', "1" + "0" * 400])
@pytest.mark.parametrize("name", ["num_requests_waiting", "num_requests_running", "queued_tokens", "kv_usage"])
def test_what_no_server_can_have_waiting_spoils_no_pool(name: str, value: str) -> None:
    """Means are kept of what is reported: one endpoint's nonsense would meet every call."""
    stage = Stage(3, policy="auto")
    first, second, _ = stage.pool.snapshot.states
    for _ in range(3):
        learn_header(first, f'JSON {{"num_requests_waiting": 1, "{name}": {value}}}'.encode(), 100.0, stage.clock())
    ask = Ask(tokens=100)
    ask.bids = {second.id: Report(stage.clock())}
    assert stage.pool.acquire(ask, stage.clock()) is not None
    assert stage.pool.shared.speeds.backlog < 1e6
