"""TensorRT-LLM's own server, `trtllm-serve`, and the records that it puts into etcd.

Its `/metrics` is no Prometheus page but a JSON list that each reading empties, after a wait of up to 2 s: not read
here. The Prometheus page exists only with `return_perf_metrics`.
"""

from __future__ import annotations

import json
from datetime import datetime
from types import MappingProxyType
from urllib.parse import urlsplit

from gpuroute.core.endpoint import Endpoint
from gpuroute.errors import InvalidRecord

from .engine import Engine, Meaning, reading, rule, share

ETCD_PREFIX = "trtllm/"

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


def endpoint_of(key: str, value: bytes) -> Endpoint:
    """The endpoint in a record that `trtllm-serve` wrote under `trtllm/<id>`; raises InvalidRecord.

    The record has no lease: its presence proves nothing, and one left by a crash stays for ever. A server bound to
    every interface registers `0.0.0.0`, by which nobody can reach it. Its `timestamp` has no zone: taken as local.
    """
    try:
        record = json.loads(value)
    except (ValueError, RecursionError):
        raise InvalidRecord(f"{key}: not JSON") from None
    if not isinstance(record, dict) or not isinstance(record.get("url"), str):
        raise InvalidRecord(f"{key}: url: expected a text such as 'http://host:8000'")
    role = record.get("server_role")
    return Endpoint(
        id=key.removeprefix(ETCD_PREFIX),
        url=_url(key, record["url"]),
        engine=ENGINE.name,
        model=_text(record.get("model")),
        version=_text(record.get("version")),
        started_at=_epoch(record.get("timestamp")),
        labels=MappingProxyType({"role": role.lower()} if isinstance(role, str) else {}),
    )


def _url(key: str, text: str) -> str:
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or port is None or parts.scheme not in {"http", "https"}:
        raise InvalidRecord(f"{key}: url: expected http://host:port")
    if host in {"0.0.0.0", "::"}:
        raise InvalidRecord(f"{key}: url: the server registered {host}, start it with --host and its own address")
    return url.rstrip("/")


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _epoch(value: object) -> float:
    try:
        return datetime.fromisoformat(_text(value)).timestamp()
    except (ValueError, OverflowError, OSError):
        return 0.0
