"""One endpoint of the fleet as the registry describes it: immutable identity, labels and capacity.

Nothing here changes while calls run; what a router learns about an endpoint lives in `state.EndpointState`.
Fields and their meaning: `docs/registry.md`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from gpuroute.core.hidden import HiddenHeaders

if TYPE_CHECKING:
    from collections.abc import Mapping


HTTP, GRPC = "http", "grpc"
PROTOCOLS = (HTTP, GRPC)
MAX_ENGINE = 0xFFFF  # of one agent: messages have two bytes for it
GRPC_SCHEMES = ("grpc://", "grpcs://", "unix:")


def no_entries() -> Mapping[str, str]:
    """An empty mapping (a plain dict, so that endpoints can be pickled and copied)."""
    return {}


def engine_of_agent(path: str) -> int:
    """Which of an agent's engines the path of its URL means; 0 if it says none that can be."""
    text = path.strip("/")
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0
    return number if number <= MAX_ENGINE else 0


class State(StrEnum):
    """Where an endpoint is in its life: only `ready` and `cold` ones are given new calls."""

    READY = "ready"
    WARMING = "warming"
    DRAINING = "draining"
    COLD = "cold"


@dataclass(frozen=True, slots=True)
class Gpu:
    """The accelerators behind an endpoint: `kind` ("H100"), their number, memory of one in GiB."""

    kind: str = ""
    count: int = 1
    memory_gib: float = 0.0


@dataclass(frozen=True, slots=True)
class Capacity:
    """Hard limits stated by the registry; 0 means not stated."""

    max_in_flight: int = 0
    kv_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS to one endpoint: the name to send and verify, and paths of PEM files."""

    server_name: str = ""
    ca: str = ""
    cert: str = ""
    key: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Immutable identity of one endpoint. `headers` are secret: their values never appear in `repr` or a dump.

    `protocol` is `grpc` for every URL of a gRPC scheme, whatever is given.
    """

    id: str
    url: str
    protocol: str = "http"
    engine: str = ""
    model: str = ""
    version: str = ""
    adapters: tuple[str, ...] = ()
    weight: float = 1.0
    gpu: Gpu = Gpu()
    capacity: Capacity = Capacity()
    tls: Tls = Tls()
    headers: Mapping[str, str] = field(default_factory=no_entries, repr=False, hash=False)
    authority: str = ""
    zone: str = ""
    region: str = ""
    state: State = State.READY
    started_at: float = 0.0
    cold_start_s: float = 0.0
    price: float = 0.0
    agent: str = ""
    labels: Mapping[str, str] = field(default_factory=no_entries, hash=False)

    def __post_init__(self) -> None:
        if type(self.headers) is not HiddenHeaders:
            object.__setattr__(self, "headers", HiddenHeaders(self.headers))
        if self.url.startswith(GRPC_SCHEMES) and self.protocol != GRPC:
            object.__setattr__(self, "protocol", GRPC)

    @property
    def takes_calls(self) -> bool:
        """True if new calls may go here: in service and not drained by weight 0."""
        return 0 < self.weight < math.inf and self.state in (State.READY, State.COLD)
