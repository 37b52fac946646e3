"""What real engines said, spoiled: cut short, doubled, with numbers that are none, without labels, and very long."""

from __future__ import annotations

import json
import math
import re

import pytest
from captured import CAPTURES
from hypothesis import given
from hypothesis import strategies as st
from stopwatch import Stopwatch

from gpuroute.core.orca import MOST, LoadReport, parse_orca, parse_orca_bin
from gpuroute.engines.answers import judge, judge_stream
from gpuroute.engines.catalog import ENGINES, engine_of
from gpuroute.engines.detect import PATHS, Probed, detect, ready
from gpuroute.engines.metrics import read_metrics
from gpuroute.engines.prompts import read_prompt
from gpuroute.engines.usage import read_usage

RANK = {"num_running_reqs": 3, "num_waiting_reqs": 2, "num_used_tokens": 50_000, "max_total_num_tokens": 100_000}
LABELLED = (
    b'vllm:num_requests_running{engine="0"} 3\nvllm:kv_cache_usage_perc{engine="0"} 0.2\nsglang:token_usage 0.3\n'
    b'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0\nsglang:num_running_reqs 2\n'
    b'sglang:cache_config_info{page_size="64",num_pages="10"} 1\ntrtllm_kv_cache_max_blocks 1000\ntgi_queue_size 3\n'
    b'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="t"} 0.75\n'
)
SOURCES = [path.read_bytes() for path in sorted(CAPTURES.iterdir())]
SOURCES += [LABELLED, json.dumps({"loads": [RANK, RANK]}).encode(), b'{"server_load":7}']
NUMBER = re.compile(rb'(?<=[ :"])[0-9][0-9.e+]*')
INSTEAD = [b"NaN", b"+Inf", b"-Inf", b"-1", b"1e308", b"1e400", b"", b"null", b"[]", b"{}", b'"x"', b"9" * 400, b"\xff"]
WORDS = [b"{", b"}", b'"', b"\\", b"\n", b"[", b" ", b"\0"]


@st.composite
def spoiled(draw: st.DrawFn) -> bytes:
    data = draw(st.sampled_from(SOURCES))
    for kind in draw(
        st.lists(st.sampled_from(["cut", "number", "double", "byte", "word", "labels"]), min_size=1, max_size=5)
    ):
        at = draw(st.integers(0, len(data)))
        lines = data.split(b"\n")
        numbers = [match.span() for match in NUMBER.finditer(data)]
        if kind == "cut":
            data = data[:at]
        elif kind == "number" and numbers:
            start, end = numbers[at % len(numbers)]
            data = data[:start] + draw(st.sampled_from(INSTEAD)) + data[end:]
        elif kind == "double":
            line = at % len(lines)
            data = b"\n".join(lines[:line] + lines[line : line + 1] * 20 + lines[line + 1 :])
        elif kind == "byte":
            data = data[:at] + draw(st.binary(min_size=1, max_size=3)) + data[at + 1 :]
        elif kind == "word":
            data = data[:at] + draw(st.sampled_from(WORDS)) + data[at:]
        elif kind == "labels":
            data = re.sub(rb"\{[^}]*\}", b"", data)
    return data


def check(report: LoadReport | None) -> None:
    for value in report or ():
        assert value is None or 0 <= value <= MOST
    assert report is None or report.kv_usage is None or report.kv_usage <= 1


@given(spoiled(), st.sampled_from([200, 400, 404, 429, 500, 503, 999]))
def test_whatever_is_read_is_a_load_or_nothing(data: bytes, status: int) -> None:
    for engine in ENGINES:
        found = read_metrics(engine, data)
        if found is not None:
            check(found.report)
            assert all(0 <= value <= MOST for value in found.counters.values())
        if engine.read_load is not None:
            check(engine.read_load(data))
        judge(engine, status, data)
        ready(engine, Probed(status, data))
    judge_stream("vllm", data)
    detect(dict.fromkeys(PATHS, Probed(status, data)))
    check(parse_orca(data[:2_000].decode("latin-1")))
    check(parse_orca_bin(data[:2_000]))
    assert all(count is None or 0 <= count <= MOST for count in read_usage(data) or ())
    for path in ("/v1/chat/completions", "/v1/completions", "/generate", "/v1/messages", "/v2/models/x/infer"):
        prompt = read_prompt(path, data)
        assert prompt is None or 0 <= prompt.tokens < math.inf


@pytest.mark.parametrize("line", [b'vllm:num_requests_running{a="\n', b"vllm:num_requests_running{\n", b'vllm:x{a="\\\n'])
@pytest.mark.real_time
def test_a_page_of_quotes_and_braces_that_never_end_does_not_stop_an_agent(line: bytes) -> None:
    page = line * 40_000 + b"vllm:num_requests_waiting 3\n"
    with Stopwatch() as watch:
        found = read_metrics(engine_of("vllm"), page)
    assert found is not None
    assert found.report == LoadReport(waiting=3)
    assert watch.seconds < 20, "each line once: it was as often as there are lines"


@pytest.mark.parametrize("text", [b'"name":', b'"data"', b'"object" : "list"', b'"object":' + b" " * 500])
@pytest.mark.real_time
def test_a_long_answer_that_looks_like_many_engines_does_not_stop_detection(text: bytes) -> None:
    answer = Probed(200, text * (1_000_000 // len(text)))
    with Stopwatch() as watch:
        assert detect(dict.fromkeys(PATHS, answer)) is None
    assert watch.seconds < 20


def test_a_count_that_no_prompt_can_have_is_no_usage() -> None:
    assert read_usage(b'{"usage":{"prompt_tokens":5,"completion_tokens":' + b"9" * 400 + b"}}") == (5, None, None)
