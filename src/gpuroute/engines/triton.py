"""Triton Inference Server: any backend, and the TensorRT-LLM backend, which alone counts requests and KV blocks.

Metrics are served on a port of their own. gRPC answers are classified by the gRPC transport.
"""

from __future__ import annotations

from dataclasses import replace

from .engine import Engine, Meaning, reading, rule, share

_BLOCKS = "nv_trt_llm_kv_cache_block_metrics"
_REQUESTS = "nv_trt_llm_request_metrics"

ENGINE = Engine(
    name="triton",
    ready="/v2/models/{model}/ready",  # a ready server may lack the model
    ready_any="/v2/health/ready",
    live="/v2/health/live",
    metrics_port=8002,
    report={"waiting": reading("nv_inference_pending_request_count")},
    counters={
        "steps": reading("nv_inference_exec_count"),
        "rejected": reading("nv_inference_request_failure", where=("reason", "REJECTED")),
    },
    answers=(
        rule(Meaning.OVERLOADED, (429, 500, 503), "exceeds maximum queue size"),
        rule(Meaning.DRAINING, (400, 404, 503), "no available versions|server (is )?(not ready|stopping|exiting)"),
        rule(Meaning.REJECTED, 500, "failed to parse the request json"),  # its own word for it is 500
        rule(Meaning.MISSING, (400, 404), "unknown model"),
    ),
    request_id_header="triton-request-id",
    request_id_field="id",
    signs=(("/v2", r'"name"\s*:\s*"triton"'), ("/metrics", r"(?m)^nv_inference_")),
)

TENSORRT_LLM = replace(
    ENGINE,
    name="triton_tensorrt_llm",
    report={
        "running": reading(_REQUESTS, where=("request_type", "scheduled")),
        "waiting": reading(_REQUESTS, where=("request_type", "waiting")),
        "kv_usage": share(_BLOCKS, where=("kv_cache_block_type", "fraction")),
        "kv_tokens": reading(_BLOCKS, where=("kv_cache_block_type", "tokens_per"))
        + reading(_BLOCKS, where=("kv_cache_block_type", "max")),
    },
    orca="json",  # lower case, HTTP only
    signs=(("/metrics", r"(?m)^nv_trt_llm_"),),
)
