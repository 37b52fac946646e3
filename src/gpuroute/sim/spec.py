"""The constants of the step model (see `sim.gpu`), for each kind of GPU."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from typing import Any, Final

MODEL_8B: Final = "llama31_8b_tp1_bf16"
_ALIASES: Final = {
    "H100": "H100-SXM",
    "H200": "H200-SXM",
    "A100": "A100-80G-SXM",
    "V100": "V100-32G",
    "L4": "L4-24G",
}


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """Constants of the step model, in seconds (the JSON has milliseconds)."""

    kind: str
    h: float
    c0: float
    w: float
    a: float
    k: float
    q: float
    s: float
    kv_tokens: int

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second of a busy engine, attention aside."""
        return 1.0 / self.a

    def seconds(self, tokens: int, kv: float = 0, pairs: float = 0, seqs: int = 1) -> float:
        """Length of one step."""
        return fixed(self, tokens) + self.k * kv + self.q * pairs + self.s * seqs


def fixed(spec: GpuSpec, tokens: int) -> float:
    """Seconds of a step with so many tokens, apart from what context and sequences add."""
    return spec.h + spec.c0 + float((spec.w**6 + (spec.a * tokens) ** 6) ** (1 / 6))


@lru_cache(maxsize=256)
def table_of(spec: GpuSpec, tokens: int) -> tuple[float, ...]:
    """`fixed` of 0 to so many tokens."""
    return tuple(fixed(spec, n) for n in range(tokens + 1))


@cache
def _constants() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("data/step_model_constants.json").read_text("utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def gpu_kinds(model: str = MODEL_8B) -> tuple[str, ...]:
    """Kinds that `gpu_spec` knows, short names first."""
    return (*(_ALIASES if model == MODEL_8B else ()), *_constants()[model])


def gpu_spec(kind: str, model: str = MODEL_8B) -> GpuSpec:
    """Constants for a GPU kind such as `H100` or `L40S`. Raises ValueError with the known kinds."""
    table = _constants().get(model, {})
    row = table.get(_ALIASES.get(kind.upper(), kind)) or table.get(kind.upper())
    if row is None:
        raise ValueError(f"unknown GPU {kind!r} for {model}: known are {', '.join(gpu_kinds())}")
    seconds = {name: row[name] / 1e3 for name in ("h", "c0", "w", "a", "k", "q", "s")}
    return GpuSpec(kind=kind, kv_tokens=int(row["kv_tokens"]), **seconds)
