"""All engines by name. An unknown name is treated like any OpenAI-compatible server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import kserve, llamacpp, openai, ray_serve, sglang, tensorrt_llm, tf_serving, tgi, triton, vllm

if TYPE_CHECKING:
    from .engine import Engine

ENGINES: tuple[Engine, ...] = (
    ray_serve.ENGINE,  # before the engine that it wraps
    vllm.ENGINE,
    sglang.ENGINE,
    tensorrt_llm.ENGINE,
    triton.TENSORRT_LLM,
    triton.ENGINE,
    tgi.ENGINE,
    llamacpp.ENGINE,
    tf_serving.ENGINE,
    kserve.ENGINE,
    openai.ENGINE,  # last: others speak its API too
)
"""In the order in which detection tries them."""

_BY_NAME = {engine.name: engine for engine in ENGINES}
_ALIASES = {
    "trtllm": "tensorrt_llm",
    "trtllm_serve": "tensorrt_llm",
    "triton_trtllm": "triton_tensorrt_llm",
    "text_generation_inference": "tgi",
    "llama.cpp": "llamacpp",
    "llama_cpp": "llamacpp",
    "tensorflow_serving": "tf_serving",
    "tfserving": "tf_serving",
    "ray": "ray_serve",
    "rayserve": "ray_serve",
    "mlserver": "kserve",
    "kserve_v2": "kserve",
    "": "openai",
}


def engine_of(name: str) -> Engine:
    """The engine of that name (case and hyphens do not matter), or the generic one. Any thread."""
    found = _BY_NAME.get(name)
    if found is None:
        plain = name.strip().lower().replace("-", "_")
        found = _BY_NAME.get(_ALIASES.get(plain, plain), openai.ENGINE)
    return found
