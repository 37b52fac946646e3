"""Everything that can be chosen when a stand-in server starts."""

from __future__ import annotations

from dataclasses import dataclass


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
