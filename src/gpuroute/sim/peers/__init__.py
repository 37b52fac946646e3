"""Yardsticks, NOT for production: the routers of the field, re-stated from their published behaviour.

Each peer decides from what its original would know and with the defaults its makers publish; where a
default is unknown the choice favours the peer. Central peers are one process that sees every call (no extra
hop is charged, no loss of the process is simulated); the others are one instance per client. Two are ideals
that nobody can deploy: `token-queue` accounts for every call of the fleet exactly, `oracle` reads the
engines' minds.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from .caches import LlmdScorers, SglangCacheAware
from .hashing import BoundedHash, CentralBoundedHash
from .ideals import Oracle, TokenQueue
from .proxies import EnvoyLeastRequest, LeastBusy, LeastConnections, PeakEwma, Prequal

if TYPE_CHECKING:
    from gpuroute.sim.loop import Simulation

    from .peer import Peer

PEERS: dict[str, type[Peer]] = {
    "oracle": Oracle,
    "peer:token-queue": TokenQueue,
    "peer:sglang": SglangCacheAware,
    "peer:llm-d": LlmdScorers,
    "peer:kubeai": CentralBoundedHash,
    "peer:kubeai-per-client": BoundedHash,
    "peer:prequal": Prequal,
    "peer:envoy": EnvoyLeastRequest,
    "peer:peak-ewma": PeakEwma,
    "peer:least-conn": LeastConnections,
    "peer:litellm": LeastBusy,
}


def peer_clients(sim: Simulation, count: int, name: str, seed: int) -> list[Peer]:
    """Instances of a peer: one if it is central, else `count`. Raises ValueError with the known names."""
    kind = PEERS.get(name)
    if kind is None:
        raise ValueError(f"unknown peer {name!r}: known are {', '.join(PEERS)}")
    return [kind(sim, Random(f"{seed}/peer/{number}")) for number in range(1 if kind.central else count)]
