"""Everything that can be chosen when a stand-in server starts."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from gpuroute.errors import ConfigError
from gpuroute.sim.spec import gpu_spec

_NUMBERS = ("time_scale", "keepalive_s", "startup_s")
_COUNTS = {
    "port": 0, "max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 1, "max_queued": 0, "dram_tokens": 0,
    "stream_interval": 1, "keepalive_requests": 0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of `GpuServer`, in process or spawned; all of them survive JSON.

    `gpu`: a kind that the step model knows (H100, H200, A100, L40S, L4, V100). `time_scale`: wall seconds per GPU
    second (0.1 = ten times faster than the real thing, 0 = answer at once). `port` 0 = chosen by the system.
    `model` "" = any model name is served. `max_queued`: more waiting requests than this are answered 503.
    `prefix`: a URL path that all routes live under. `early_headers`: streams send their head before the first token,
    as vLLM does; `stream_interval`: tokens per event after the first, as vLLM's option of that name.
    `keepalive_requests`, `keepalive_s`: hang up after so many requests, or so many idle seconds (0 = never).
    `startup_s`: until then `/health` and all requests answer 503, as while weights are loaded.
    `certfile`, `keyfile`, `client_ca`: PEM paths; TLS if a certificate is given, mutual TLS if a client CA is.
    What cannot be is a ConfigError that names the option.
    """

    gpu: str = "H100"
    model: str = ""
    time_scale: float = 0.1
    host: str = "127.0.0.1"
    port: int = 0
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 131_072
    max_queued: int | None = None
    dram_tokens: int = 0
    slowdown: float = 1.0
    prefix: str = ""
    early_headers: bool = True
    stream_interval: int = 1
    keepalive_requests: int = 0
    keepalive_s: float = 0.0
    startup_s: float = 0.0
    certfile: str = ""
    keyfile: str = ""
    client_ca: str = ""

    def __post_init__(self) -> None:
        try:
            gpu_spec(self.gpu if isinstance(self.gpu, str) else repr(self.gpu))
        except ValueError as error:
            raise ConfigError(f"gpu={self.gpu!r}: {error}") from None
        for name in (*_NUMBERS, "slowdown"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value < math.inf or (name == "slowdown" and not value):
                raise ConfigError(f"{name}={value!r}: expected a number {'above' if name == 'slowdown' else 'from'} 0")
        for name, least in _COUNTS.items():
            value = getattr(self, name)
            if not (type(value) is int and value >= least) and not (value is None and name == "max_queued"):
                raise ConfigError(f"{name}={value!r}: expected a whole number from {least}")
        if self.port > 65_535:
            raise ConfigError(f"port={self.port!r}: expected at most 65535")

    @classmethod
    def of(cls, given: dict[str, Any]) -> ServerOptions:
        """Options by their names. Raises TypeError for a name that is none, ConfigError for a value that cannot be."""
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                close = get_close_matches(name, known, 1)
                hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
                raise TypeError(f"unknown option {name!r} of a GpuServer ({hint})")
        return cls(**given)
