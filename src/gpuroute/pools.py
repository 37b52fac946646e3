"""The pools of the present fleet: what a view of the registry, the settings and a client's place make of it.

One name may be two pools, one for each protocol, since a client of HTTP must not be offered endpoints that speak gRPC.
The router locks `adopt`; reading needs no lock, because maps are replaced as a whole.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from gpuroute.core.breaker import BreakerRules
from gpuroute.core.describe import PoolView, describe_pool
from gpuroute.core.endpoint import GRPC, HTTP
from gpuroute.core.fleet import Fleet, PoolSpec, by_protocol
from gpuroute.core.hedge import HedgeRules
from gpuroute.core.hosts import Hosts
from gpuroute.core.locality import Locality, relocate
from gpuroute.core.merge import merge_rules
from gpuroute.core.outliers import OutlierRules
from gpuroute.core.pool import Pool, PoolRules
from gpuroute.core.retry import RetryRules
from gpuroute.core.subset import Subsets
from gpuroute.core.watchdog import WatchdogRules
from gpuroute.errors import ConfigError, UnknownPool

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence

    from gpuroute.config import Settings
    from gpuroute.core.endpoint import Endpoint


MAX_GONE = 1_000
"""Pools whose record is gone that are remembered by name: their calls hear that nobody is there, and if they come back
they are what they were."""


class Pools:
    """`by_protocol`: pools by name that a client of that protocol may use; under None whatever there is, HTTP first."""

    def __init__(self, settings: Settings, random: Callable[[], float]) -> None:
        self.subsets = Subsets()
        self.by_protocol: dict[str | None, dict[str, Pool]] = {None: {}, HTTP: {}, GRPC: {}}
        self._settings = settings
        self._random = random
        self._hosts = Hosts()
        self._parts: dict[str, dict[str, Pool]] = {}  # by name and protocol
        self._resting: dict[tuple[str, str], Pool] = {}  # without endpoints of their protocol, which may come back
        self._gone: dict[str, None] = {}  # names without a record, which may come back

    def adopt(self, fleet: Fleet, now: float) -> None:
        """Become the pools of this view; endpoints that stay keep their state."""
        rules, parts = self._rules(), self._kept(fleet)
        for name in [*fleet.pools, *(name for name in parts if name not in fleet.pools)]:
            spec = fleet.pools.get(name) or PoolSpec(name)
            before = parts.get(name, {})
            # A pool without endpoints remains what it was: their protocol is not known, and they may come back.
            wanted = by_protocol(spec) or dict.fromkeys(before or (HTTP,), spec)
            merged = merge_rules(rules, spec, self._explicit())
            for protocol in before.keys() - wanted.keys():
                before[protocol].update(PoolSpec(name), merged, now)
                self._resting[name, protocol] = before[protocol]
            known = before | {protocol: self._resting.pop((name, protocol)) for protocol in self._back(name, wanted)}
            parts[name] = {
                protocol: self._placed(part, _part_name(name, protocol, wanted), merged, known.get(protocol), now)
                for protocol, part in wanted.items()
            }
        self._parts = parts
        main = {name: part.get(HTTP) or part[GRPC] for name, part in parts.items()}
        http = {name: pool for name, pool in main.items() if HTTP in parts[name] or not pool.spec.endpoints}
        # Who moved to gRPC has nobody for HTTP now, which is the fleet's state and no mistake of its callers.
        moved = {name: pool for (name, protocol), pool in self._resting.items() if protocol == HTTP}
        self.by_protocol = {
            None: main,
            HTTP: moved | http,
            GRPC: main | {name: part[GRPC] for name, part in parts.items() if GRPC in part},
        }

    def _kept(self, fleet: Fleet) -> dict[str, dict[str, Pool]]:
        """What is known by name, the longest without a record first to be forgotten."""
        for name in fleet.pools:
            self._gone.pop(name, None)
        self._gone |= dict.fromkeys(name for name in self._parts if name not in fleet.pools and name not in self._gone)
        for name in tuple(self._gone)[: max(0, len(self._gone) - MAX_GONE)]:
            del self._gone[name]
            for protocol in (HTTP, GRPC):
                self._resting.pop((name, protocol), None)
                self.subsets.forget(_part_name(name, protocol, self._parts[name]))
        return {name: part for name, part in self._parts.items() if name in fleet.pools or name in self._gone}

    def _back(self, name: str, wanted: Mapping[str, PoolSpec]) -> list[str]:
        """Protocols that this pool had before, lost, and has again."""
        return [protocol for protocol in wanted if (name, protocol) in self._resting]

    def _placed(self, spec: PoolSpec, part: str, rules: PoolRules, pool: Pool | None, now: float) -> Pool:
        """The pool with this spec, or as much of it as this client uses."""
        spec = self.subsets.narrowed(spec, self._subset_mode(spec), part)
        if pool is None:
            pool = Pool(PoolSpec(spec.name), rules, random=self._random, now=now, make_lock=threading.Lock)
            pool.shared.hosts = self._hosts
        pool.survivors.elders = self.subsets.elders(part)
        relocate(pool.shared, pool.snapshot.states, self._locality(spec))
        pool.update(spec, rules, now)
        return pool

    def _locality(self, spec: PoolSpec) -> Locality:
        settings, seat = self._settings, self.subsets.seat
        prices = {
            name: stated if stated is not None and name not in self._explicit() else getattr(settings, name)
            for name, stated in (("zone_price", spec.config.zone_price), ("region_price", spec.config.region_price))
        }
        return Locality(settings.zone or "", settings.region or "", *prices.values(), *(seat.shares if seat else ()))

    def _subset_mode(self, spec: PoolSpec) -> str | int:
        stated = None if "subset" in self._explicit() else spec.config.subset
        return self._settings.subset if stated is None else stated

    def want_ordinal(self, fleet: Fleet) -> bool:
        """True if any pool is to be used in part only: then it matters which of the clients this one is."""
        return any(self._subset_mode(spec) != "off" for spec in fleet.pools.values())

    def all(self) -> tuple[Pool, ...]:
        """Each of them once, also those that nobody of their protocol is left in: their counters must not fall."""
        return (*(pool for part in self._parts.values() for pool in part.values()), *self._resting.copy().values())

    def views(self, now: float) -> dict[str, PoolView]:
        """What is known of each, for people."""
        return {
            (shown := _part_name(name, protocol, part)): replace(
                describe_pool(pool, now), subset=self.subsets.views.get(shown)
            )
            for name, part in self._parts.items()
            for protocol, pool in part.items()
        }

    def missing(self, name: str) -> ConfigError | UnknownPool:
        """Why there is no pool of this name for a client."""
        known = ", ".join(sorted(self._parts)) or "none"
        if name in self._parts:
            return ConfigError(
                f"pool {name!r} has no endpoint for HTTP: all of them speak gRPC; call it through gpuroute.grpc.channel, "
                "or name another pool"
            )
        hint = ": give its name, not a URL" if "/" in name else ""
        return UnknownPool(f"pool {name!r} is not in the fleet{hint}; known pools: {known}")

    def serving(self, model: str) -> str:
        """The pool of that name, else the only one all of whose endpoints list the model. Raises UnknownPool."""
        pools = {name: pool.spec.endpoints for name, pool in self.by_protocol[None].items()}
        if pools.get(model):
            return model
        listing = {name: sum(_serves(e, model) for e in endpoints) for name, endpoints in pools.items()}
        serving = [name for name, count in listing.items() if 0 < count == len(pools[name])]
        if len(serving) == 1:
            return serving[0]
        if model in pools:
            return model  # it has no endpoints now, which the call will say
        raise UnknownPool(_why_unresolved(model, listing, serving))

    def _rules(self) -> PoolRules:
        settings = self._settings
        return PoolRules(
            policy=settings.policy,
            timeout=settings.timeout,
            max_in_flight=settings.max_in_flight,
            panic=settings.panic,
            panic_share=settings.panic_share,
            outliers=OutlierRules(interval_s=settings.eject_interval, max_share=settings.eject_share),
            watchdog=WatchdogRules(enabled=settings.watchdog),
            hedge=HedgeRules(hedge=settings.hedge, reroute=settings.reroute),
            continuation=settings.continuation,
            retry=RetryRules(attempts=settings.attempts),
            breaker=BreakerRules(failures=settings.breaker_failures, open_s=settings.breaker_open),
            budget_ratio=settings.retry_budget,
            budget_floor=settings.retry_floor,
        )

    def _explicit(self) -> frozenset[str]:
        names = (
            "policy", "timeout", "max_in_flight", "attempts", "hedge", "reroute", "continuation", "watchdog", "subset",
            "zone_price", "region_price",
        )  # fmt: skip
        return frozenset(name for name in names if self._settings.source(name) != "default")


def _part_name(name: str, protocol: str, parts: Container[str]) -> str:
    """How one pool, or the gRPC part of a mixed one, is called among others."""
    return f"{name} ({protocol})" if protocol == GRPC and HTTP in parts else name


def _serves(endpoint: Endpoint, model: str) -> bool:
    return model == endpoint.model or model in endpoint.adapters


def _why_unresolved(model: str, listing: Mapping[str, int], serving: Sequence[str]) -> str:
    if serving:
        return f"model {model!r} is served by several pools ({', '.join(sorted(serving))}): name one"
    partly = ", ".join(sorted(name for name, count in listing.items() if count))
    if partly:
        return f"model {model!r} is served by only some endpoints of pool {partly}: give it a pool of its own"
    return f"no pool serves model {model!r}; known pools: {', '.join(sorted(listing)) or 'none'}"
