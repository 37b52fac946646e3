"""TensorRT-LLM's own server, `trtllm-serve`. The records that it puts into etcd are read by `gpuroute.registry.trtllm`.

Its `/metrics` is no Prometheus page but a JSON list that each reading empties, after a wait of up to 2 s: not read
here. The Prometheus page exists only with `return_perf_metrics`.
"""

from __future__ import annotations

from .engine import Engine, Meaning, reading, rule, share

ENGINE = Engine(
    name="tensorrt_llm",
    deep="/health_generate",
    metrics="/prometheus/metrics",
    report={
        "running": reading("trtllm_num_requests_running"),
        "waiting": reading("trtllm_num_requests_waiting"),
        "kv_usage": share("trtllm_kv_cache_utilization"),
        "kv_tokens": reading("trtllm_kv_cache_tokens_per_block") + reading("trtllm_kv_cache_max_blocks"),
    },
    counters={
        "prompt_tokens": reading("trtllm_prompt_tokens_total"),
        "generated_tokens": reading("trtllm_generation_tokens_total"),
    },
    answers=(rule(Meaning.FAILED, 503, "LLM is unavailable"),),
    salt_fields=("cache_salt",),
    signs=(
        ("/v1/models", r'"owned_by"\s*:\s*"tensorrt_llm"'),
        ("/prometheus/metrics", r"(?m)^trtllm_"),
    ),
)
