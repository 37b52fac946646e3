"""The Router: the one object a user meets. Holds the pools, the clock and the source of chance.

Nothing starts in the constructor: the registry is subscribed to at the first call, so a pre-fork server may build a
router in its parent. A forked child starts afresh from the last view: load, locks and watcher of the parent are not its.
"""

from __future__ import annotations

import logging
import os
import random as _random
import threading
import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self, cast

from gpuroute.config import Settings
from gpuroute.core.call import Call
from gpuroute.core.candidates import Ask
from gpuroute.core.describe import Explanation, RouterView, explain
from gpuroute.core.endpoint import PROTOCOLS
from gpuroute.core.policies import BY_SECONDS, READ_REPORTS
from gpuroute.core.ring import session_key
from gpuroute.errors import ConfigError, RegistryUnavailable, RouterClosed
from gpuroute.pools import Pools
from gpuroute.rollout import Rollout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gpuroute.core.endpoint import Endpoint
    from gpuroute.core.fleet import Fleet, HeldSeat, Registry, Seats, Subscription
    from gpuroute.core.pool import Pool
    from gpuroute.core.report import Report
    from gpuroute.core.subset import Seat
    from gpuroute.registry.digest import DigestWatch
    from gpuroute.routed import RoutedAttempt

__all__ = ["Router"]

log = logging.getLogger("gpuroute")

_ROUTERS: weakref.WeakSet[Router] = weakref.WeakSet()


class Router:
    """Routes calls over the pools of a registry. Safe from any thread, any event loop, and after `os.fork`.

    Give one source: `registry` (a URL, inline text or a Registry object) or `endpoints` (URLs, Endpoint objects, or a
    mapping of pool names to such lists); without either, `GPUROUTE_REGISTRY` is used. Further keyword arguments are
    settings by name (`policy="p2c"`, `timeout=2.0`; docs/configuration.md). Raises ConfigError on bad ones.
    """

    def __init__(
        self,
        registry: str | Registry | None = None,
        *,
        endpoints: Sequence[str | Endpoint] | Mapping[str, Sequence[str | Endpoint]] | None = None,
        settings: Settings | None = None,
        clock: Callable[[], float] = time.monotonic,
        random: Callable[[], float] = _random.random,
        **overrides: Any,
    ) -> None:
        if registry is not None and endpoints is not None:
            raise ConfigError("Router: give registry= or endpoints=, not both")
        if isinstance(registry, str):
            overrides["registry"] = registry
        elif registry is not None and not hasattr(registry, "subscribe"):
            accepted = "text or an object with `subscribe`; URLs by pool are `endpoints=`"
            raise ConfigError(f"Router: registry= is of type {type(registry).__name__}; accepted: {accepted}")
        if settings is not None and overrides:
            raise ConfigError(f"Router: give settings= or {', '.join(sorted(overrides))}, not both")
        self.settings = settings or Settings.from_env(**overrides)
        self.clock = clock
        self.random = random
        self.version = 0
        self._source = registry if registry is not None and not isinstance(registry, str) else None
        self._endpoints = endpoints
        self._fleet: Fleet | None = None
        self._fleet_at = 0.0
        self._closed = False
        self._fork_hooks: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._arrange()
        self._check_source()
        if self.settings.log_level:
            logging.getLogger("gpuroute").setLevel(self.settings.log_level.upper())
        _ROUTERS.add(self)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Router:
        """A router configured by `GPUROUTE_*` variables; arguments win. Raises ConfigError."""
        return cls(settings=Settings.from_env(environ, **overrides))

    def _arrange(self) -> None:
        """What a process needs of its own: also run in a forked child, where the parent's locks may be held."""
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._waiting: list[Callable[[], None]] = []
        self._subscription: Subscription | None = None
        self._seat: HeldSeat | None = None
        self._digest: DigestWatch | None = None
        self._said_unread = False
        self._pools = Pools(self.settings, self.random)
        self._rollout = Rollout(self.settings)
        self._started = False

    def _check_source(self) -> None:
        if self._source is None and self._endpoints is None and self.settings.registry is None:
            raise ConfigError(
                "no registry: set GPUROUTE_REGISTRY (etcd://..., file:///..., or POOL=URL,URL), "
                "or give registry= or endpoints="
            )
        if self._source is None:
            self._source = self._open()
        if self.settings.subset != "off" and not hasattr(self._source, "take_seat"):
            kind = type(self._source).__name__
            raise ConfigError(f"{self.settings.named('subset')} is set but {kind} gives no ordinals: it needs etcd")

    def _open(self) -> Registry:
        from gpuroute.registry import etcd_options, open_registry, static_registry

        if self._endpoints is not None:
            return static_registry(self._endpoints)
        settings = self.settings
        return open_registry(
            settings.registry or "",
            snapshot_path=settings.registry_snapshot,
            empty_grace=settings.empty_grace,
            **etcd_options(settings),
        )

    # ------------------------------------------------------------------------------------------ the fleet

    def start(self) -> None:
        """Subscribe to the registry if that has not happened yet. Every call does this by itself."""
        if self._started and not self._closed:
            return
        with self._lock:
            if self._closed:
                raise RouterClosed("this router is closed; make a new one")
            if self._started:
                return
            self._started = True
        assert self._source is not None
        try:
            subscription = self._source.subscribe(self.update)
        except BaseException:
            self._started = False
            raise
        with self._lock:
            if not self._closed:
                self._subscription = subscription
                self._digest = self._read_digest()
        if self._closed:  # by another thread meanwhile: nobody else would stop this watch
            subscription.close()
            raise RouterClosed("this router was closed while it started")

    def _read_digest(self) -> DigestWatch | None:
        settings, reference = self.settings, weakref.ref(self)
        if not settings.digest:
            return None
        from gpuroute.core.digest import learn_digest
        from gpuroute.registry.digest import DigestWatch

        def deliver(heard: Mapping[str, Mapping[str, Report]]) -> bool:
            router = reference()
            if router is None:
                return False
            for pool in router.pools():
                learn_digest(pool, heard.get(pool.name, {}))
            router._say_if_unread()  # noqa: SLF001  (it is ourselves, held weakly)
            return True

        secret = settings.agent_key.reveal().encode() if settings.agent_key else b""
        own = {"clock": self.clock, "random": self.random}
        return DigestWatch(settings.digest.split(","), deliver, **own, secret=secret, ca=settings.agent_ca)

    def _say_if_unread(self) -> None:
        """Once, if the digest is read and no pool's policy looks at what it says."""
        policies = {pool.rules.policy for pool in self.pools()}
        if policies and not policies & READ_REPORTS and not self._said_unread:
            self._said_unread = True
            used, reading = ", ".join(sorted(policies)), ", ".join(sorted(READ_REPORTS))
            log.warning(
                "%s is read for nothing: the policy %s looks at no reports; these do: %s",
                self.settings.named("digest"),
                used,
                reading,
            )

    def update(self, fleet: Fleet) -> None:
        """Adopt a whole view of the fleet. Called by the registry; any thread."""
        now = self.clock()
        with self._lock:
            self._fleet, self._fleet_at = fleet, now
            self._pools.adopt(fleet, now)
            self.version += 1
            waiting, self._waiting = self._waiting, []
        self._ready.set()
        for wake in waiting:
            wake()
        if self._started:
            self._be_counted(self._pools.want_ordinal(fleet))

    def _be_counted(self, numbered: bool) -> None:
        """Become one of the clients that are counted, once a pool needs an ordinal, or the numbers of clients by zone."""
        place = (self.settings.region or "", self.settings.zone or "")
        located = any(place) and any(pool.rules.policy not in BY_SECONDS for pool in self.pools())
        seats = cast("Seats", self._source) if hasattr(self._source, "take_seat") else None
        if seats is None:
            if numbered and not self._pools.subsets.warned:
                self._pools.subsets.warned = True
                log.warning("a pool wants subsets, but %s gives no ordinals: all of it is used", self._describe_source())
        elif self._seat is not None:
            self._seat.numbered |= numbered
        elif numbered or located:
            seat = seats.take_seat(self._seated, place, numbered=numbered)
            with self._lock:
                surplus = self._seat is not None or self._closed
                self._seat = self._seat if surplus else seat
            if surplus:
                seat.close()

    def _seated(self, seat: Seat) -> None:
        """Use the part of each pool that goes with this ordinal. Called by the registry; any thread."""
        with self._lock:
            self._pools.subsets.seat = seat
            if self._fleet is not None and not self._closed:
                self._pools.adopt(self._fleet, self.clock())
                self.version += 1

    @property
    def is_ready(self) -> bool:
        """True once a first view of the fleet is here (or will never be, after `close`): there is nothing to wait for."""
        return self._ready.is_set()

    def ready(self, timeout: float | None = None) -> None:
        """Wait (blocking) for the first view of the fleet, at most `timeout` seconds (default: `ready_timeout`).

        Raises RegistryUnavailable, RouterClosed.
        """
        if self._closed or not self._ready.is_set():
            self.start()
            self._ready.wait(self._patience(timeout))
            self._check_view()

    async def aready(self, timeout: float | None = None) -> None:
        """Like `ready`, without blocking the event loop."""
        if self._closed or not self._ready.is_set():
            import asyncio

            loop = asyncio.get_running_loop()
            await loop.run_in_executor(None, self.start) if not self._started else None
            arrived = asyncio.Event()

            def wake() -> None:
                with suppress(RuntimeError):  # the loop has ended since
                    loop.call_soon_threadsafe(arrived.set)

            with self._lock:
                self._waiting.append(wake)
            try:
                if not self._ready.is_set():
                    with suppress(TimeoutError):
                        await asyncio.wait_for(arrived.wait(), self._patience(timeout))
            finally:
                with self._lock, suppress(ValueError):
                    self._waiting.remove(wake)
            self._check_view()

    def _patience(self, timeout: float | None) -> float:
        limit = self.settings.ready_timeout
        return limit if timeout is None else min(limit, timeout)

    def _check_view(self) -> None:
        if self._closed:
            raise RouterClosed("this router was closed before the first view of the fleet came")
        if not self._ready.is_set():
            raise self._no_view()

    def _no_view(self) -> RegistryUnavailable:
        trouble = self._subscription.error if self._subscription else None
        return RegistryUnavailable(
            f"no view of the fleet yet from {self._describe_source()}: {trouble or 'the registry has not answered'}"
        )

    def _describe_source(self) -> str:
        return self.settings.registry or type(self._source).__name__

    # ------------------------------------------------------------------------------------------ calls

    def call(
        self,
        pool: str,
        *,
        key: str | None = None,
        ladder: Sequence[int] = (),
        tokens: int = 0,
        timeout: float | None = None,
        attempts: int | None = None,
        replayable: bool = True,
        protocol: str | None = None,
    ) -> Call:
        """Begin one logical call. Never blocks: see `ready` for the first one.

        `key`: session affinity; `ladder`: prefix hashes; `tokens`: estimated prompt tokens; `timeout`: seconds over all
        attempts; `protocol` (`http`, `grpc`): only endpoints that speak it. Raises UnknownPool, RouterClosed,
        RegistryUnavailable, ConfigError (a negative timeout, no attempt, nobody who speaks that protocol).
        """
        if (timeout is not None and not timeout >= 0) or (attempts is not None and attempts < 1):
            raise ConfigError(f"call: need timeout >= 0 seconds and attempts >= 1, got {timeout} and {attempts}")
        found = self.pool(pool, protocol)
        ask = self._ask(found, key, ladder, tokens)
        return Call(found, self.clock(), ask, timeout, attempts, replayable)  # by name: 100 ns more

    def _ask(self, pool: Pool, key: str | None, ladder: Sequence[int], tokens: int) -> Ask | None:
        """What a call says of itself; None if nothing."""
        if not key or key.isspace():  # a blank key is no key: all who send one would share one home
            return Ask(None, ladder, tokens) if ladder or tokens else None
        salt = self.settings.salt.reveal() if self.settings.salt else pool.spec.config.salt
        return Ask(session_key(key, salt), ladder, tokens)

    def attempt(
        self,
        pool: str,
        *,
        key: str | None = None,
        tokens: int = 0,
        failures: tuple[type[BaseException], ...] = (OSError,),
        protocol: str | None = None,
    ) -> RoutedAttempt:
        """One counted attempt for any other client library: `with` or `async with`, then use `.url`.

        `failures`: exceptions that are the endpoint's fault; others that leave the block teach nothing about it.
        `protocol` (`http`, `grpc`): only endpoints that speak it; by default HTTP where a pool has both.
        """
        from gpuroute.routed import RoutedAttempt

        return RoutedAttempt(self, pool, key, tokens, failures, protocol)

    def pool(self, name: str, protocol: str | None = None) -> Pool:
        """The pool of this name; with a protocol (`http`, `grpc`), the part of it that speaks that.

        Raises UnknownPool (which lists the names), ConfigError (nobody in it speaks that), RouterClosed,
        RegistryUnavailable.
        """
        try:
            found = self._pools.by_protocol[protocol].get(name)
            if found is not None and self._started and not self._closed:
                return found
            self.start()
            found = self._pools.by_protocol[protocol].get(name)
        except KeyError:
            raise ConfigError(f"protocol {protocol!r}: expected one of {', '.join(PROTOCOLS)}") from None
        if found is not None:
            return found
        if not self._ready.is_set():
            raise self._no_view()
        raise self._pools.missing(name)

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._closed

    def pools(self) -> tuple[Pool, ...]:
        """The pools; one that has, or had, endpoints of both protocols is two of that name. Never blocks."""
        return self._pools.all()

    def resolve(self, model: str) -> str:
        """The pool that serves a model: the pool of that name, else the only one all of whose endpoints list the model.

        Raises UnknownPool, and then nothing is sent: a call must not reach a host that lacks the model. Also raises
        RouterClosed, RegistryUnavailable.
        """
        if not self._started or self._closed or not self._ready.is_set():
            self.start()
            self._check_view()
        return self._pools.serving(model)

    def fallback(self, pool: str, key: str | None = None, *, inside: bool = False) -> str | None:
        """The URL to use instead of routing: kill switch, or the share of calls outside the rollout; else None.

        `inside`: `early_fallback` has found the call inside the rollout already.
        """
        return self._rollout.fallback(self._pools.by_protocol[None].get(pool), key, inside=inside)

    def unrouted(self, url: str, timeout: float | None = None) -> Call:
        """A call to the URL that `fallback` named: one attempt."""
        return self._rollout.call(url, self.clock(), timeout, self.random)

    def early_fallback(self, key: str | None = None) -> str | None:
        """Like `fallback`, before the first view of the fleet: calls outside the rollout must not wait for the registry,
        nor fail with it. None: the call has to wait for the view."""
        return self._rollout.early(key)

    # ------------------------------------------------------------------------------------------ looking

    def snapshot(self) -> RouterView:
        """What this router knows now: pools, endpoints, load, limits, ages, last errors. Typed and JSON-able."""
        now, fleet = self.clock(), self._fleet
        for pool in self.pools():
            pool.wake(now)
        return RouterView(
            source=self._describe_source(),
            stale=fleet.stale if fleet else True,
            registry_age_s=self.registry_age,
            registry_error=self._trouble(),
            problems=fleet.problems if fleet else (),
            version=self.version,
            digest_error=self._digest.error if self._digest else None,
            pools=self._pools.views(now),
        )

    @property
    def registry_age(self) -> float | None:
        """Seconds since the registry last confirmed the fleet as it is in use; None before the first view."""
        if self._fleet is None:
            return None
        age = getattr(self._subscription, "age", None)  # registries of others need not say
        return age(time.time()) if age is not None else self.clock() - self._fleet_at

    def _trouble(self) -> str | None:
        """What is wrong with the watch, or with keeping an ordinal."""
        held = (self._subscription, self._seat)
        return next((one.error for one in held if one is not None and one.error), None)

    def explain(
        self,
        pool: str,
        *,
        key: str | None = None,
        ladder: Sequence[int] = (),
        tokens: int = 0,
        protocol: str | None = None,
    ) -> Explanation:
        """The candidates, costs, exclusions and winner of a pick that is not done. Raises UnknownPool."""
        found = self.pool(pool, protocol)
        ask = self._ask(found, key, ladder, tokens) or Ask()
        ask.now = self.clock()
        found.wake(ask.now)
        return explain(found, ask)

    # ------------------------------------------------------------------------------------------ the end

    def on_fork(self, hook: Callable[[], None]) -> None:
        """Run a bound method in every forked child, before its first call. Held weakly."""
        self._fork_hooks.append(weakref.WeakMethod(hook, self._fork_hooks.remove))

    def after_fork(self) -> None:
        """Start afresh in a forked child, from the last view. Called by `os.register_at_fork`."""
        fleet = self._fleet
        self._arrange()
        if fleet is not None and not self._closed:
            self.update(fleet)
        for reference in self._fork_hooks:
            hook = reference()
            if hook is not None:
                hook()

    def close(self) -> None:
        """Stop watching. Calls that run finish; new ones raise RouterClosed. Idempotent.

        With subsets on, blocks for up to a second if etcd does not answer.
        """
        with self._lock:
            self._closed = True
            self.version += 1  # who keeps what it looked up must look again
            subscription, self._subscription = self._subscription, None
            seat, self._seat = self._seat, None
            digest, self._digest = self._digest, None
            waiting, self._waiting = self._waiting, []
        self._ready.set()  # who waits for a view must hear that none will come
        for wake in waiting:
            wake()
        for held in (subscription, seat, digest):
            if held is not None:
                held.close()

    async def aclose(self) -> None:
        """Like `close`, without blocking the event loop while a seat among the clients is given up."""
        if self._seat is None:
            self.close()
        else:
            import asyncio

            await asyncio.get_running_loop().run_in_executor(None, self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        pools = {name: len(pool.snapshot.states) for name, pool in self._pools.by_protocol[None].items()}
        return f"<Router {type(self._source).__name__} pools={pools} version={self.version}{' closed' * self._closed}>"


def check_router(value: object) -> None:
    """Raise ConfigError unless this is a Router: clients take one where others take a URL."""
    if not isinstance(value, Router):
        raise ConfigError(f"expected a gpuroute.Router, got {type(value).__name__}: Router(registry=...) makes one")


def _reset_after_fork() -> None:
    for router in tuple(_ROUTERS):
        router.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
