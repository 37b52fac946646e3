"""Pages of metrics and cheap load endpoints, from captures where there are some."""

from __future__ import annotations

import json
import time

import pytest
from captured import answer, page
from hypothesis import given
from hypothesis import strategies as st

from gpuroute.core.orca import LoadReport
from gpuroute.engines.catalog import ENGINES, engine_of
from gpuroute.engines.metrics import labels_of, read_metrics, scan


def metrics(engine: str, text: str) -> LoadReport:
    found = read_metrics(engine_of(engine), text.encode())
    assert found is not None
    return found.report


def test_a_real_page_of_vllm() -> None:
    found = read_metrics(engine_of("vllm"), page("vllm_metrics.txt"))
    assert found is not None
    assert found.report._replace(kv_tokens=None) == LoadReport(running=0, waiting=0, kv_usage=0)
    assert found.report.kv_tokens
    assert found.report.kv_tokens > 10_000
    assert found.awake
    expected = {"prompt_tokens": 190, "cached_tokens": 0, "generated_tokens": 39, "steps": 39, "preemptions": 0}
    assert found.counters == expected | {"rejected": 0}
    assert found.started == 1_795_959_723.68


def test_real_lines_of_vllm_with_cache_hits() -> None:
    lines = b"vllm:prompt_tokens_total 218.0\n" + page("vllm_outputs2.txt")
    found = read_metrics(engine_of("vllm"), lines)
    assert found is not None
    assert found.counters == {"prompt_tokens": 122, "cached_tokens": 96, "rejected": 48}


def test_real_pages_of_llamacpp() -> None:
    busy = read_metrics(engine_of("llamacpp"), answer("llamacpp_busy.txt", "GET /metrics")[2])
    assert busy is not None
    assert busy.report == LoadReport(running=4, waiting=3)
    assert busy.report.requests == 7
    idle = read_metrics(engine_of("llamacpp"), page("llamacpp_metrics.txt"))
    assert idle is not None
    assert idle.counters == {"prompt_tokens": 770, "cached_tokens": 782, "generated_tokens": 22, "steps": 22}


def test_a_real_page_of_triton() -> None:
    found = read_metrics(engine_of("triton"), page("triton_metrics.txt"))
    assert found is not None
    assert found.report == LoadReport(waiting=0)
    assert found.counters == {"steps": 30, "rejected": 0}


PAGES = [
    (
        "vllm",
        (
            'vllm:num_requests_waiting{model_name="m"} 3\nvllm:num_requests_swapped{model_name="m"} 2\n'
            'vllm:gpu_cache_usage_perc{model_name="m"} 0.5\n'
        ),
        LoadReport(waiting=5, kv_usage=0.5),
    ),
    (
        "vllm",
        (
            'vllm:num_requests_running{engine="0"} 3\nvllm:num_requests_running{engine="1"} 4\n'
            'vllm:kv_cache_usage_perc{engine="0"} 0.2\nvllm:kv_cache_usage_perc{engine="1"} 0.4\n'
            'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0\n'
            'vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="50"} 1.0\n'
        ),
        LoadReport(running=7, kv_usage=pytest.approx(0.3), kv_tokens=2400),
    ),
    (
        "sglang",
        (
            'sglang:num_running_reqs{model_name="m"} 2\nsglang:num_queue_reqs{model_name="m"} 1\n'
            'sglang:num_grammar_queue_reqs{model_name="m"} 1\nsglang:token_usage{model_name="m"} 0.25\n'
            'sglang:cache_config_info{page_size="64",num_pages="10"} 1\n'
        ),
        LoadReport(running=2, waiting=2, kv_usage=0.25, kv_tokens=640),
    ),
    (
        "tensorrt_llm",
        (
            "trtllm_num_requests_running 2\ntrtllm_num_requests_waiting 7\ntrtllm_kv_cache_utilization 0.62\n"
            "trtllm_kv_cache_tokens_per_block 32\ntrtllm_kv_cache_max_blocks 1000\n"
        ),
        LoadReport(running=2, waiting=7, kv_usage=0.62, kv_tokens=32_000),
    ),
    (
        "triton-trtllm",
        (
            'nv_trt_llm_request_metrics{model="t",request_type="waiting",version="1"} 4\n'
            'nv_trt_llm_request_metrics{model="t",request_type="scheduled",version="1"} 6\n'
            'nv_trt_llm_request_metrics{model="t",request_type="context",version="1"} 99\n'
            'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="t"} 0.75\n'
            'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="t"} 64\n'
            'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="t"} 100\n'
        ),
        LoadReport(running=6, waiting=4, kv_usage=0.75, kv_tokens=6400),
    ),
    ("tgi", "tgi_queue_size 3\ntgi_batch_current_size 5\n", LoadReport(running=5, waiting=3)),
    (
        "ray",
        (
            'ray_serve_deployment_queued_queries{deployment="d",handle="h"} 2\n'
            'ray_serve_deployment_queued_queries{deployment="d",handle="i"} 1\n'
            'ray_serve_replica_processing_queries{replica="a"} 4\n'
        ),
        LoadReport(running=4, waiting=3),
    ),
    (
        "vllm",
        (
            "# HELP vllm:num_requests_running vllm:num_requests_running 9\n vllm:num_requests_running 8\n"
            'vllm:num_requests_running_total 7\nvllm:num_requests_running{a="} 5",b="\\"} 6\\\\",} 4 1700000000000\n'
            "vllm:num_requests_waiting NaN\nvllm:kv_cache_usage_perc +Inf\n"
        ),
        LoadReport(running=4),
    ),
]


@pytest.mark.parametrize(("engine", "text", "report"), PAGES)
def test_pages_of_every_dialect(engine: str, text: str, report: LoadReport) -> None:
    assert metrics(engine, text) == report
    assert metrics(engine, text.replace("\n", "\r\n")) == report


def test_a_sleeping_engine_is_not_awake() -> None:
    text = 'vllm:engine_sleep_state{sleep_state="awake"} 0.0\nvllm:engine_sleep_state{sleep_state="discard_all"} 1.0\n'
    found = read_metrics(engine_of("vllm"), text.encode())
    assert found is not None
    assert not found.awake


def test_a_page_without_load_is_no_report() -> None:
    for engine in ENGINES:
        for text in (b"", b"python_info 1\n", b"[]", b"\xff\xfe\0", b"vllm:\n", b"vllm:num_requests_running abc\n"):
            assert read_metrics(engine, text) is None


@pytest.mark.parametrize(
    ("engine", "text", "started"),
    [
        ("vllm", "vllm:num_requests_running 1\nprocess_start_time_seconds 1.7e+09", 1.7e9),
        ("vllm", "vllm:num_requests_running 1", 0.0),
        ("vllm", "vllm:num_requests_running 1\nprocess_start_time_seconds -5", 0.0),
        ("vllm", "vllm:num_requests_running 1\nprocess_start_time_seconds 1e300", 0.0),
        (
            "vllm",
            'process_start_time_seconds{a="1"} 5\nprocess_start_time_seconds{a="2"} 6\nvllm:num_requests_running 1',
            0.0,
        ),
        ("ray_serve", "ray_serve_replica_processing_queries 1\nprocess_start_time_seconds 5", 0.0),
    ],
)
def test_since_when_an_engine_runs(engine: str, text: str, started: float) -> None:
    found = read_metrics(engine_of(engine), text.encode())
    assert found is not None
    assert found.started == started
    assert read_metrics(engine_of(engine), b"process_start_time_seconds 5\n") is None, "which is no load"


def test_labels_with_escapes() -> None:
    assert labels_of(r'a="x\"y\\z\n,b=\"1\"", c_1 = "}{"') == {"a": 'x"y\\z\n,b="1"', "c_1": "}{"}


def test_scanning_a_real_page_costs_little() -> None:
    text, engine = page("vllm_metrics.txt"), engine_of("vllm")
    spent = []
    for _ in range(50):
        start = time.thread_time()
        read_metrics(engine, text)
        spent.append(time.thread_time() - start)
    assert min(spent) < 0.005


@given(st.binary(max_size=200))
def test_nothing_raises(data: bytes) -> None:
    read_metrics(engine_of("vllm"), b"vllm:num_requests_running{" + data)
    scan(b"a{" + data, frozenset(("a",)))
    for engine in ENGINES:
        if engine.read_load:
            engine.read_load(data)


RANK = {
    "dp_rank": 0,
    "num_running_reqs": 3,
    "num_waiting_reqs": 2,
    "num_waiting_uncached_tokens": 4000,
    "num_used_tokens": 50_000,
    "max_total_num_tokens": 100_000,
    "utilization": 0,
}


def load(engine: str, body: str | bytes) -> LoadReport | None:
    read = engine_of(engine).read_load
    assert read is not None
    return read(body.encode() if isinstance(body, str) else body)


def test_sglang_loads_are_added_over_ranks() -> None:
    idle = RANK | {"num_running_reqs": 0, "num_waiting_reqs": 0, "num_waiting_uncached_tokens": 0, "num_used_tokens": 0}
    expected = LoadReport(running=3, waiting=2, kv_usage=0.25, queued_tokens=4000, kv_tokens=200_000)
    assert load("sglang", json.dumps({"version": "0.5", "loads": [RANK, idle]})) == expected
    assert load("sglang", json.dumps([{"dp_rank": 0, "num_reqs": 5, "num_waiting_reqs": 1}])) == LoadReport(
        waiting=1, in_flight=5
    )
    for body in (
        json.dumps({"loads": [RANK | {"max_total_num_tokens": 0}]}),
        '{"loads": []}',
        "[]",
        "[7]",
        "7",
        "{",
        "x",
    ):
        assert load("sglang", body) is None


def test_llamacpp_slots() -> None:
    assert load("llamacpp", answer("llamacpp_outputs.txt", "GET /slots\n")[2]) == LoadReport(running=0, queued_tokens=0)
    busy = load("llamacpp", answer("llamacpp_busy.txt", "GET /slots (7")[2])
    assert busy is not None
    assert (busy.running, busy.waiting) == (4, None)
    assert busy.queued_tokens == 0  # all four decode: their "prompt" is 49 tokens and 80 of output
    waiting = b'[{"is_processing":true,"n_prompt_tokens":1801,"n_prompt_tokens_processed":512,"n_prompt_tokens_cache":0}]'
    assert load("llamacpp", waiting) == LoadReport(running=1, queued_tokens=1289)
    for body in ("[]", "{}", "[1]", "no", '[{"is_processing": true, "n_prompt_tokens": "x"}, 3]'):
        assert load("llamacpp", body) is None


def test_vllm_load_that_says_nothing_is_no_report() -> None:
    assert load("vllm", '{"server_load":7}') == LoadReport(in_flight=7)
    for body in ('{"server_load":0}', '{"server_load":-1}', '{"server_load":null}', "[]", "{}", ""):
        assert load("vllm", body) is None
