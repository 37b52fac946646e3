"""Passes through an engine before it is called ready: weights loaded is not warm.

Kernels are compiled, graphs captured and caches allocated by the first requests; the frameworks themselves speak of
50-100. Prompts of several lengths, one output token. An engine whose requests cannot be guessed (Triton, KServe, TF
Serving) is believed when it says that it is ready; a command of the operator's can do better.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from typing import TYPE_CHECKING

from gpuroute.agent.fetch import fetch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuroute.agent.watch import Watch

log = logging.getLogger("gpuroute.agent")

PASSES = 50
PASS_TIMEOUT_S = 60.0
SPEAKS_OPENAI = frozenset({"vllm", "sglang", "tensorrt_llm", "tgi", "llamacpp", "openai", "ray_serve"})
_LENGTHS = (1, 4, 16, 64)


async def warm_up(watch: Watch, passes: int, command: str = "", headers: Mapping[str, str] | None = None) -> str:
    """Send `passes` small requests, or run the command instead; "" if that went well, else what did not."""
    if command:
        return await _run(command, watch)
    if watch.engine.name not in SPEAKS_OPENAI:
        return ""
    models = await _models(watch.url, headers)
    model = watch.model or (models[0] if models else "default")
    if models and model not in models:  # most servers take any name, and answer by what they have
        log.warning("%s: it serves %s, and its record says %s", watch.desk.id, ", ".join(models[:3]), model)
    for number in range(passes):
        status = await _one_pass(watch.url, model, number, headers)
        if not 200 <= status < 300:
            return f"pass {number + 1} of {passes} was answered with status {status}"
    return ""


async def _one_pass(url: str, model: str, number: int, headers: Mapping[str, str] | None) -> int:
    prompt = f"Warm-up {number}. " + "Count to ten. " * _LENGTHS[number % len(_LENGTHS)]
    common = {"model": model, "max_tokens": 1, "temperature": 0}
    body: object = {**common, "prompt": prompt}
    reply = await fetch(url, "/v1/completions", timeout=PASS_TIMEOUT_S, body=body, headers=headers)
    if reply.status in {404, 405, 501}:
        body = {**common, "messages": [{"role": "user", "content": prompt}]}
        reply = await fetch(url, "/v1/chat/completions", timeout=PASS_TIMEOUT_S, body=body, headers=headers)
    return reply.status


async def _models(url: str, headers: Mapping[str, str] | None) -> list[str]:
    reply = await fetch(url, "/v1/models", headers=headers)
    try:
        return [str(one["id"]) for one in json.loads(reply.body)["data"]]
    except (ValueError, LookupError, TypeError, RecursionError):
        return []


async def _run(command: str, watch: Watch) -> str:
    environ = {**os.environ, "ENGINE_URL": watch.url}
    process = await asyncio.create_subprocess_shell(command, env=environ)
    try:
        code = await process.wait()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    return "" if code == 0 else f"the warm-up command ended with exit code {code}"
