"""SGLang. Its JSON `/v1/loads` is always on; its metrics only with `--enable-metrics`."""

from __future__ import annotations

import json
from typing import Any

from gpuroute.core.orca import LoadReport, as_load

from .engine import Engine, Meaning, Reading, reading, rule, share


def read_load(body: bytes) -> LoadReport | None:
    """`/v1/loads`: one entry for each data-parallel rank, to be added up; `/get_load` is the same list, bare.

    A rank without KV capacity is not ready yet: no report. Its `utilization` is always 0 and is not read.
    """
    try:
        loads = json.loads(body)
    except (ValueError, RecursionError):
        return None
    ranks = loads.get("loads") if isinstance(loads, dict) else loads
    if not isinstance(ranks, list) or not ranks or not all(isinstance(rank, dict) for rank in ranks):
        return None
    capacity = _sum(ranks, "max_total_num_tokens")
    if capacity == 0:
        return None
    used = _sum(ranks, "num_used_tokens")
    return LoadReport(
        running=_sum(ranks, "num_running_reqs"),
        waiting=_sum(ranks, "num_waiting_reqs"),
        kv_usage=None if used is None or capacity is None else min(used / capacity, 1.0),
        queued_tokens=_sum(ranks, "num_waiting_uncached_tokens"),
        in_flight=_sum(ranks, "num_reqs"),
        kv_tokens=capacity,
    )


def _sum(ranks: list[dict[str, Any]], name: str) -> float | None:
    values = [as_load(rank.get(name)) for rank in ranks]
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(ranks) else None


ENGINE = Engine(
    name="sglang",
    deep="/health_generate",
    report={
        "running": reading("sglang:num_running_reqs"),
        "waiting": reading("sglang:num_queue_reqs", plus=("sglang:num_grammar_queue_reqs",)),
        "kv_usage": share("sglang:full_token_usage", "sglang:token_usage"),
        "kv_tokens": (Reading(("sglang:cache_config_info",), labels=("page_size", "num_pages")),),
    },
    counters={
        "prompt_tokens": reading("sglang:prompt_tokens_total"),
        "cached_tokens": reading("sglang:cached_tokens_total"),
        "generated_tokens": reading("sglang:generation_tokens_total"),
        "preemptions": reading("sglang:num_retracted_requests_total"),
    },
    load="/v1/loads",
    read_load=read_load,
    answers=(rule(Meaning.OVERLOADED, (500, 503), "queue is full|aborted by a higher priority|timeout reached"),),
    priority="priority",
    urgent_is_low=False,
    request_id_field="rid",
    salt_fields=("cache_salt", "extra_key"),
    signs=(("/v1/models", r'"owned_by"\s*:\s*"sglang"'), ("/metrics", r"(?m)^sglang:")),
)
