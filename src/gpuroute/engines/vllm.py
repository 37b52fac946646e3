"""vLLM, with the metric names of both its engines (v0 and v1). Captured: 0.32 on a CPU."""

from __future__ import annotations

import json

from gpuroute.core.orca import LoadReport, as_load

from .engine import Engine, Meaning, Reading, reading, rule, share


def read_load(body: bytes) -> LoadReport | None:
    """`/load`. Without `--enable-server-load-tracking` it says 0 for ever, so 0 is taken for no report."""
    try:
        count = as_load(json.loads(body).get("server_load"))
    except (ValueError, AttributeError, RecursionError):
        return None
    return LoadReport(in_flight=count) if count else None


ENGINE = Engine(
    name="vllm",
    report={
        "running": reading("vllm:num_requests_running"),
        "waiting": reading("vllm:num_requests_waiting", plus=("vllm:num_requests_swapped",)),
        "kv_usage": share("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        "kv_tokens": (Reading(("vllm:cache_config_info",), labels=("block_size", "num_gpu_blocks")),),
    },
    counters={
        "prompt_tokens": reading("vllm:prompt_tokens_total"),
        "cached_tokens": reading("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
        "generated_tokens": reading("vllm:generation_tokens_total"),
        "steps": reading("vllm:iteration_tokens_total_count"),
        "preemptions": reading("vllm:num_preemptions_total"),
        "rejected": reading("vllm:admission_rejections_total"),
        "awake": reading("vllm:engine_sleep_state", where=("sleep_state", "awake")),
    },
    knock=("/tokenize", {"prompt": "a"}),  # 0.32, told to stop: 500 like any other, while /health goes on saying 200
    load="/load",
    read_load=read_load,
    orca="TEXT",
    answers=(
        rule(Meaning.DRAINING, 500, "cannot schedule new futures after shutdown"),
        rule(Meaning.DRAINING, 503, "rank has been retired"),
        rule(Meaning.OVERLOADED, 503, "currently busy and cannot accept|currently scaling"),
    ),
    priority="priority",
    request_id_header="x-request-id",
    request_id_field="request_id",
    salt_fields=("cache_salt",),
    signs=(("/v1/models", r'"owned_by"\s*:\s*"vllm"'), ("/metrics", r"(?m)^vllm:")),
)
