"""What the fault tests share: endpoints over stand-ins, and a router that has seen enough to judge silence."""

from __future__ import annotations

import json
import math
import threading
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gpuroute import Endpoint
from gpuroute.core.watchdog import WatchdogRules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from http_caller import Caller

    from gpuroute.core.attempt import Attempt
    from gpuroute.core.state import EndpointState
    from gpuroute.testing import GpuProcess, GpuServer

CHAT = "http://llama/v1/chat/completions"
TEXT = "http://llama/v1/completions"
PROMPT = "Once upon a time"
PATIENCE_S = 60.0
"""Timeout of clients that nothing is expected to let wait: a busy machine must not look like a failure."""


def vllm(servers: Iterable[GpuServer | GpuProcess], **fields: Any) -> list[Endpoint]:
    """Endpoints gpu-0, gpu-1, ... over stand-ins."""
    return [Endpoint(f"gpu-{n}", server.url, engine="vllm", **fields) for n, server in enumerate(servers)]


def ask(tokens: int = 4, *, stream: bool = True, prompt: str = PROMPT, **fields: Any) -> dict[str, Any]:
    """A completion's body."""
    return {"model": "m", "prompt": prompt, "max_tokens": tokens, "stream": stream, **fields}


def signals(client: Caller, pool: str = "llama") -> dict[str, int]:
    return dict(client.router.snapshot().pools[pool].signals)


@dataclass(frozen=True, slots=True)
class OfOne(WatchdogRules):
    """Judges the silence of gpu-0 alone, which hangs: that of the others is the doing of a busy machine."""

    def first_byte(self, attempt: Attempt, endpoints: int) -> float:
        return WatchdogRules.first_byte(self, attempt, endpoints) if attempt.endpoint.id == "gpu-0" else math.inf

    def gap(self, attempt: Attempt) -> float:
        return WatchdogRules.gap(self, attempt) if attempt.endpoint.id == "gpu-0" else math.inf

    def suspects(self, state: EndpointState, now: float) -> bool:
        return state.id == "gpu-0" and WatchdogRules.suspects(self, state, now)


def experienced(
    client: Caller, *, ttft: float = 0.01, gap: float = 0.001, floor: float = 0.3, first: float = 0.0, last: float = 0.0
) -> None:
    """As if long experience said that first bytes take `ttft` and tokens follow every `gap` seconds.

    Patience is `floor`, or `first` with first bytes, and does not grow with what a busy machine teaches meanwhile;
    `last`: at least, where nobody would take over.
    """
    pool = client.router.pool("llama")
    enabled = pool.rules.watchdog.enabled
    watchdog = OfOne(enabled, first_floor_s=first or floor, gap_floor_s=floor, first_spreads=0.01, gap_spreads=0.01)
    pool.rules = replace(pool.rules, watchdog=replace(watchdog, last_floor_s=last))
    for _ in range(50):
        pool.shared.history.ttft.add(ttft)
        pool.shared.history.gap.add(gap)


@contextmanager
def when(condition: Callable[[], object], act: Callable[[], object]) -> Iterator[None]:
    """Act as soon as the condition holds, from a thread beside the block: what must meet shall not depend on delays."""
    over = threading.Event()

    def watch() -> None:
        while not condition():
            if over.wait(0.005):
                return
        act()

    thread = threading.Thread(target=watch, name="when")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def bodies(servers: Iterable[GpuServer]) -> list[dict[str, Any]]:
    return [json.loads(request.body) for server in servers for request in server.requests]
