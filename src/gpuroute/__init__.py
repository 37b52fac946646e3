"""gpuroute: a client-side router for self-hosted GPU inference.

    import gpuroute, openai
    router = gpuroute.Router.from_env()                  # GPUROUTE_REGISTRY=etcd://etcd:2379
    client = gpuroute.wrap(openai.OpenAI(base_url="http://llama-3-8b/v1", api_key="-"), router)

Importing this package loads the standard library only; everything else loads when it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuroute.config import Settings
    from gpuroute.core.endpoint import Endpoint
    from gpuroute.core.outcome import Outcome
    from gpuroute.errors import (
        ConfigError,
        DeadlineExceeded,
        GpurouteError,
        InvalidRecord,
        NoEndpointAvailable,
        RegistryError,
        RegistryUnavailable,
        RouterClosed,
        StreamInterrupted,
        StreamStalled,
        UnknownPool,
    )
    from gpuroute.router import Router
    from gpuroute.wrapping import unwrap, wrap

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "DeadlineExceeded",
    "Endpoint",
    "GpurouteError",
    "InvalidRecord",
    "NoEndpointAvailable",
    "Outcome",
    "RegistryError",
    "RegistryUnavailable",
    "Router",
    "RouterClosed",
    "Settings",
    "StreamInterrupted",
    "StreamStalled",
    "UnknownPool",
    "unwrap",
    "wrap",
]

_HOMES = {
    "Endpoint": "gpuroute.core.endpoint",
    "Outcome": "gpuroute.core.outcome",
    "Router": "gpuroute.router",
    "Settings": "gpuroute.config",
    "unwrap": "gpuroute.wrapping",
    "wrap": "gpuroute.wrapping",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, "gpuroute.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
