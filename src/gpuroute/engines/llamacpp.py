"""llama.cpp's `llama-server`. It queues without bound; busy slots and deferred requests are its only signs."""

from __future__ import annotations

import json
from typing import Any

from gpuroute.core.orca import LoadReport, as_load

from .engine import Engine, Meaning, reading, rule, share


def read_load(body: bytes) -> LoadReport | None:
    """`/slots`: what each slot does. Requests that wait for a slot are not among them: `waiting` stays unknown."""
    try:
        slots = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(slots, list) or not slots or not all(isinstance(slot, dict) for slot in slots):
        return None
    busy = [slot for slot in slots if slot.get("is_processing")]
    return LoadReport(running=float(len(busy)), queued_tokens=sum(map(_left, busy)))


def _left(slot: dict[str, Any]) -> float:
    """Prompt tokens still to prefill; once a slot decodes, its `n_prompt_tokens` grows with its output."""
    decoding = slot.get("next_token")
    if isinstance(decoding, list) and any(isinstance(one, dict) and one.get("n_decoded") for one in decoding):
        return 0.0
    total, *done = (as_load(slot.get(f"n_prompt_tokens{part}")) or 0.0 for part in ("", "_processed", "_cache"))
    return max(0.0, total - sum(done))


ENGINE = Engine(
    name="llamacpp",
    report={
        "running": reading("llamacpp:requests_processing"),
        "waiting": reading("llamacpp:requests_deferred"),
        "kv_usage": share("llamacpp:kv_cache_usage_ratio"),  # gone from newer versions
    },
    counters={
        "prompt_tokens": reading("llamacpp:prompt_tokens_total"),
        "cached_tokens": reading("llamacpp:prompt_tokens_cached_total"),
        "generated_tokens": reading("llamacpp:tokens_predicted_total"),
        "steps": reading("llamacpp:n_decode_total"),
    },
    cached_in_prompt=False,
    load="/slots",
    read_load=read_load,
    answers=(
        rule(Meaning.LOADING, 503, "loading model"),
        rule(Meaning.OVERLOADED, 503, "no slot available"),
    ),
    signs=(
        ("/v1/models", r'"owned_by"\s*:\s*"llamacpp"'),
        ("/props", r'"default_generation_settings"'),
        ("/metrics", r"(?m)^llamacpp:"),
    ),
)
