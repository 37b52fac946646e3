"""What the fault tests share: endpoints over stand-ins, and a router that has seen enough to judge silence."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpuroute import Endpoint

if TYPE_CHECKING:
    from collections.abc import Iterable

    from http_caller import Caller

    from gpuroute.testing import GpuProcess, GpuServer

CHAT = "http://llama/v1/chat/completions"
TEXT = "http://llama/v1/completions"
PROMPT = "Once upon a time"


def vllm(servers: Iterable[GpuServer | GpuProcess], **fields: Any) -> list[Endpoint]:
    """Endpoints gpu-0, gpu-1, ... over stand-ins."""
    return [Endpoint(f"gpu-{n}", server.url, engine="vllm", **fields) for n, server in enumerate(servers)]


def ask(tokens: int = 4, *, stream: bool = True, prompt: str = PROMPT, **fields: Any) -> dict[str, Any]:
    """A completion's body."""
    return {"model": "m", "prompt": prompt, "max_tokens": tokens, "stream": stream, **fields}


def signals(client: Caller, pool: str = "llama") -> dict[str, int]:
    return dict(client.router.snapshot().pools[pool].signals)


def experienced(client: Caller, *, ttft: float = 0.01, gap: float = 0.001, floor: float = 0.15, **rules: Any) -> None:
    """As if long experience said that first bytes take `ttft` and tokens follow every `gap` seconds."""
    pool = client.router.pool("llama")
    watchdog = replace(pool.rules.watchdog, first_floor_s=floor, gap_floor_s=floor, **rules)
    pool.rules = replace(pool.rules, watchdog=watchdog)
    for _ in range(50):
        pool.shared.history.ttft.add(ttft)
        pool.shared.history.gap.add(gap)


def bodies(servers: Iterable[GpuServer]) -> list[dict[str, Any]]:
    return [json.loads(request.body) for server in servers for request in server.requests]
