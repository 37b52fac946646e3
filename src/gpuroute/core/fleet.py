"""What a registry delivers: whole pools of endpoints, never deltas.

A whole set makes a missed event harmless and lets the router diff by id, which is where survivors keep their state.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from gpuroute.core.endpoint import PROTOCOLS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gpuroute.core.endpoint import Endpoint
    from gpuroute.core.subset import Seat


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Settings of one pool that live in the registry; None = not set there (environment and defaults apply).

    `disabled` with `fallback_url` sends every call of the pool to that URL without routing. `salt` seeds the prefix
    hashes: clients that shall agree on homes share it, tenants that shall not learn of each other do not.
    """

    policy: str | None = None
    timeout: float | None = None
    attempts: int | None = None
    max_in_flight: int | None = None
    subset: str | int | None = None
    zone_price: float | None = None
    region_price: float | None = None
    disabled: bool = False
    fallback_url: str = ""
    salt: str = field(default="", repr=False)
    options: Mapping[str, object] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """One pool as the registry states it."""

    name: str
    endpoints: tuple[Endpoint, ...] = ()
    config: PoolConfig = PoolConfig()


def by_protocol(spec: PoolSpec) -> dict[str, PoolSpec]:
    """A pool as what each protocol can use of it; one entry, with the same spec, unless its endpoints differ in that."""
    spoken = {endpoint.protocol for endpoint in spec.endpoints}
    if len(spoken) < 2:
        return dict.fromkeys(spoken, spec)
    return {
        protocol: replace(spec, endpoints=tuple(e for e in spec.endpoints if e.protocol == protocol))
        for protocol in PROTOCOLS
    }


@dataclass(frozen=True, slots=True)
class Fleet:
    """One whole view of the registry. `stale` = from a disk snapshot or past a lost watch; `as_of` in epoch seconds."""

    pools: Mapping[str, PoolSpec]
    source: str = ""
    stale: bool = False
    as_of: float | None = None
    problems: tuple[str, ...] = ()


class Subscription(Protocol):
    """A running watch. Safe from any thread."""

    @property
    def error(self) -> str | None:
        """The last trouble, without secrets, or None when all is well."""

    def close(self) -> None:
        """Stop the watch; no `on_change` begins after this returns. Idempotent."""


class Registry(Protocol):
    """A source of fleets. Nothing starts before `subscribe`.

    One that can tell its clients apart also has `take_seat`, as `Seats` says.
    """

    def subscribe(self, on_change: Callable[[Fleet], None]) -> Subscription:
        """Deliver the whole fleet now or soon, and again after every change, from any thread."""


class HeldSeat(Subscription, Protocol):
    """A place among the clients, until it is closed. `numbered` may become True later, never False again."""

    numbered: bool


class Seats(Protocol):
    """What a registry has that counts its clients, for subsets and zones."""

    def take_seat(self, on_seat: Callable[[Seat], None], place: tuple[str, str], *, numbered: bool) -> HeldSeat:
        """Be counted, in this region and zone ("": not said), and with an ordinal if `numbered`; tell what is counted."""
