"""What all calls of one routed channel share, looked up once per view of the fleet; and the methods that stubs hold."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc

from gpuroute.core.endpoint import GRPC, Endpoint
from gpuroute.core.prefix import Prompt, ladder
from gpuroute.errors import ConfigError
from gpuroute.observe import watch
from gpuroute.router import check_router
from gpuroute.transports.asking import asker_of
from gpuroute.transports.grpc_method import Method
from gpuroute.transports.grpc_options import split_metadata
from gpuroute.transports.grpc_peers import MAX_METHODS, Dialer, channel_options
from gpuroute.transports.grpc_reports import Reports
from gpuroute.transports.grpc_status import REPEATED, REPEATED_IF_SAFE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gpuroute.core.call import Call
    from gpuroute.core.pool import Pool
    from gpuroute.router import Router
    from gpuroute.transports import bodies, grpc_peers
    from gpuroute.transports.asking import Asker
    from gpuroute.transports.grpc_options import Pairs
    from gpuroute.transports.grpc_peers import Peer, Peers

    ReadPrompt = Callable[[str, bytes], "Prompt | bytes | None"]

UNSENT, UNAVAILABLE, FAILED = "unsent", "unavailable", "failed"
REPLAY = (UNSENT, UNAVAILABLE, FAILED)
NO_STEPS: Sequence[int] = ()
NOTHING: Mapping[str, Any] = {}
NEVER = -1


class Hub:
    """What all calls of one routed channel share. Safe from any thread.

    What a call asks of its pool (is it disabled, does its policy read prompts) changes only with the router's version,
    so it is looked up once per version. `known`: the version of which nothing more need be looked up; NEVER while calls
    must take the long way (no view yet, closed, or some of them are not to be routed).
    """

    __slots__ = ("__weakref__", "_methods", "asker", "asleep", "clock", "closed", "found", "known", "leaves", "may_leave",
                 "pool", "prompt", "races", "reads", "repeated", "replay", "router", "version", "way")  # fmt: skip

    found: Pool
    """The pool, in the version that was looked at."""
    way: Dialer
    """Opens a blocking channel to an endpoint, as the calls' own are: for health checks."""

    def __init__(self, router: Router, pool: str, prompt: ReadPrompt | None, replay: str) -> None:
        if replay not in REPLAY:
            raise ConfigError(f"replay={replay!r}: expected one of {', '.join(REPLAY)}")
        check_router(router)
        settings = router.settings
        self.router = router
        self.pool = pool
        self.clock = router.clock
        self.prompt = prompt
        self.replay = replay != UNSENT
        self.repeated = REPEATED_IF_SAFE if replay == FAILED else REPEATED
        self.may_leave = settings.disabled or settings.rollout < 1
        self.leaves = self.may_leave
        self.reads = self.races = False
        self.asker: Asker | None = None
        self.version = self.known = NEVER
        self.closed = False
        self.asleep: set[Any] = set()  # flights that wait for their next attempt; `close` wakes them
        self._methods: dict[tuple[Any, ...], Method] = {}
        watch(router)

    def method(self, *what: Any) -> Method:
        """The method of this kind, name, serializer, deserializer and registration; for most stubs equal ones are one."""
        if len(self._methods) >= MAX_METHODS:  # of stubs with serializers made per call
            self._methods.clear()
        return self._methods.setdefault(what, Method(*what))

    def close(self) -> None:
        """No more calls."""
        self.closed = True
        self.known = NEVER

    def wait(self, timeout: float | None) -> float | None:
        """Wait (blocking) for the first view of the fleet, and return what is left of the timeout."""
        if self.version >= 0 or self.router.settings.disabled:
            return timeout
        began = self.clock()
        self.router.ready(timeout)
        return None if timeout is None else max(0.0, timeout - (self.clock() - began))

    async def await_view(self, timeout: float | None) -> float | None:
        """Like `wait`, without blocking the event loop."""
        began = self.clock()
        await self.router.aready(timeout)
        return None if timeout is None else max(0.0, timeout - (self.clock() - began))

    @property
    def waits(self) -> bool:
        """True while a call must wait for the first view of the fleet."""
        return self.version < 0 and not self.router.is_ready and not self.router.settings.disabled

    def look(self) -> None:
        """Look at the pool of another version than ours. Raises UnknownPool, RouterClosed, RegistryUnavailable."""
        router = self.router
        version = router.version
        if router.settings.disabled:
            return
        self.found = pool = router.pool(self.pool, GRPC)
        picker = pool.snapshot.picker
        self.leaves = self.may_leave or pool.spec.config.disabled
        asker = asker_of(router)
        self.asker = asker if asker is not None and asker.covers(pool) else None
        self.reads = self.prompt is not None and (picker.wants_ladder or picker.ring is not None)
        self.races = pool.rules.hedge.hedge or pool.rules.hedge.reroute
        self.version = version
        self.known = NEVER if self.leaves or self.closed else version
        if router.settings.health_checks:
            from gpuroute.transports.health import CHECKER

            CHECKER.watch(router, pool, self.way)

    def call_with(self, asked: bodies.Options, method: str, request: bytes | None, timeout: float | None) -> Call:
        """The call of a request that says something of itself: a prompt, a key, or options of its own."""
        key, steps, tokens = asked.key, NO_STEPS, 0
        if timeout is not None and timeout < 0:
            timeout = 0.0  # grpcio takes it, and says DEADLINE_EXCEEDED
        if asked.timeout is not None:
            timeout = asked.timeout if timeout is None else min(timeout, asked.timeout)
        if self.reads and request and not key:
            key, steps, tokens = self._read(method, request)
        call = self.router.call(
            self.pool,
            protocol=GRPC,
            key=key,
            ladder=steps,
            tokens=tokens,
            timeout=timeout,
            attempts=asked.attempts,
            replayable=self.replay and request is not None,
        )
        for name in ("hedge", "reroute"):
            chosen = getattr(asked, name)
            if chosen is not None:
                call.hedging = replace(call.hedging, **{name: chosen})
        return call

    def unrouted(self, peers: Peers, metadata: Pairs | None, *, inside: bool = False) -> tuple[Peer, Pairs | None] | None:
        """The channel of a call that the kill switch or the rollout leaves unrouted, and its metadata."""
        asked, rest = split_metadata(metadata)
        if self.waits:
            url = self.router.early_fallback(asked.key)
        else:
            url = self.router.fallback(self.pool, asked.key, inside=inside)
        if url is None:
            return None
        peer = peers.hold(Endpoint(f"fallback {url}", url), self, self.clock())
        peer.live.discard(self)
        return peer, rest

    def _read(self, method: str, request: bytes) -> tuple[str | None, Sequence[int], int]:
        """The key, prefix hashes and prompt tokens in a request."""
        assert self.prompt is not None
        prompt = self.prompt(method, request)
        if prompt is None:
            return None, NO_STEPS, 0
        if isinstance(prompt, bytes):
            prompt = Prompt(prompt, len(prompt) // 4)
        if prompt.key:
            return prompt.key, NO_STEPS, prompt.tokens
        salt = self.router.settings.salt
        chosen = salt.reveal() if salt else self.router.pool(self.pool).spec.config.salt
        return None, ladder(prompt, chosen), prompt.tokens


def wire(
    router: Router,
    pool: str,
    insecure: Callable[..., Any],
    secure: Callable[..., Any],
    extra: Mapping[str, Any] = NOTHING,
    *,
    options: grpc_peers.Options,
    credentials: grpc.ChannelCredentials | None,
    compression: grpc.Compression | None,
    prompt: ReadPrompt | None,
    replay: str,
    idle_timeout: float,
    load_reports: float | None,
) -> tuple[Hub, Dialer, Reports | None]:
    """What a routed channel of these arguments consists of. Raises ConfigError."""
    hub, settings = Hub(router, pool, prompt, replay), router.settings
    ours = channel_options(
        options, connect_timeout=settings.connect_timeout, idle=idle_timeout, trust_env=settings.trust_env
    )
    dialer = Dialer(insecure, secure, ours, credentials, compression, **extra)
    hub.way = Dialer(grpc.insecure_channel, grpc.secure_channel, ours, credentials, None)
    if load_reports is None:
        return hub, dialer, None
    aside = Dialer(grpc.aio.insecure_channel, grpc.aio.secure_channel, ours, credentials, None)
    return hub, dialer, Reports(hub, aside, load_reports)
