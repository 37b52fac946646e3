"""What all calls of one routed channel share, and how one begins: its options, its prompt, its pool, its deadline."""

from __future__ import annotations

import math
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpuroute.core.endpoint import Endpoint
from gpuroute.core.prefix import Prompt, ladder
from gpuroute.errors import ConfigError
from gpuroute.observe import watch
from gpuroute.router import check_router
from gpuroute.transports.asking import asker_of
from gpuroute.transports.bodies import NO_OPTIONS, Options, read_options
from gpuroute.transports.grpc_rpc import Rpc
from gpuroute.transports.grpc_status import REPEATED, REPEATED_IF_SAFE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gpuroute.router import Router
    from gpuroute.transports.grpc_peers import Peer, Peers
    from gpuroute.transports.grpc_rpc import Pairs

    ReadPrompt = Callable[[str, bytes], "Prompt | bytes | None"]

OURS = "x-gpuroute-"
UNSENT, UNAVAILABLE, FAILED = "unsent", "unavailable", "failed"
REPLAY = (UNSENT, UNAVAILABLE, FAILED)
NO_STEPS: Sequence[int] = ()

_options: ContextVar[Options] = ContextVar("gpuroute.grpc.options", default=NO_OPTIONS)


@contextmanager
def options(
    *,
    key: str | None = None,
    timeout: float | None = None,
    attempts: int | None = None,
    hedge: bool | None = None,
    reroute: bool | None = None,
) -> Iterator[None]:
    """Options of the calls begun inside: affinity key, deadline in seconds over all attempts, number of attempts, and
    whether a unary call may have a second attempt beside a slow one.

    Metadata `x-gpuroute-key`, `-timeout` (`250ms`, `2s`), `-attempts`, `-hedge` and `-reroute` of a call win over it.
    Holds per thread and per task. Raises ConfigError.
    """
    given = {"key": key, "timeout": timeout, "attempts": attempts, "hedge": hedge, "reroute": reroute}
    token = _options.set(read_options(given, {}))
    try:
        yield
    finally:
        _options.reset(token)


def split_metadata(metadata: Pairs | None) -> tuple[Options, list[tuple[str, Any]] | None]:
    """What the call asks of the router, and the metadata to send without it. Raises ConfigError on bad values."""
    if not metadata:
        return _options.get(), None
    rest: list[tuple[str, Any]] = []
    asked: dict[str, str] = {}
    for pair in metadata:
        if pair[0].startswith(OURS):
            asked[pair[0].removeprefix(OURS)] = str(pair[1])
        else:
            rest.append(pair)
    if not asked:
        return _options.get(), rest
    return read_options(None, {**_options.get()._asdict(), **asked}), rest


class Hub:
    """What all calls of one routed channel share. Safe from any thread.

    What a call asks of its pool (is it disabled, does its policy read prompts) changes only with the router's version,
    so it is looked up once per version.
    """

    __slots__ = ("__weakref__", "asker", "asks", "clock", "closed", "leaves", "may_leave", "pool", "prompt", "reads",
                 "repeated", "replay", "router", "version")  # fmt: skip

    def __init__(self, router: Router, pool: str, prompt: ReadPrompt | None, replay: str) -> None:
        if replay not in REPLAY:
            raise ConfigError(f"replay={replay!r}: expected one of {', '.join(REPLAY)}")
        check_router(router)
        settings = router.settings
        self.router = router
        self.pool = pool
        self.clock = router.clock
        self.prompt = prompt
        self.replay = replay
        self.repeated = REPEATED_IF_SAFE if replay == FAILED else REPEATED
        self.may_leave = settings.disabled or settings.rollout < 1
        self.leaves = self.may_leave
        self.reads = False
        self.asker = asker_of(router)
        self.asks = False
        self.version = -1
        self.closed = False
        watch(router)

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
        pool = router.pool(self.pool)
        picker = pool.snapshot.picker
        self.leaves = self.may_leave or pool.spec.config.disabled
        self.asks = self.asker is not None and self.asker.covers(pool)
        self.reads = self.prompt is not None and (picker.wants_ladder or picker.ring is not None)
        self.version = version

    def begin(
        self,
        peers: Peers,
        method: str,
        request: bytes | None,
        timeout: float | None,
        metadata: Pairs | None,
        patient: bool | None,
        streaming: bool,
    ) -> Rpc:
        """Start one logical RPC; `request` is None if it comes as a stream. Raises UnknownPool, RouterClosed, ..."""
        asked = _options.get()
        if metadata:
            asked, metadata = split_metadata(metadata)
        key, steps, tokens = asked.key, NO_STEPS, 0
        if asked.timeout is not None:
            timeout = asked.timeout if timeout is None else min(timeout, asked.timeout)
        if timeout is not None and timeout < 0:
            timeout = 0.0  # grpcio takes it, and says DEADLINE_EXCEEDED
        if self.reads and request and not key:
            key, steps, tokens = self._read(method, request)
        if self.router.settings.health_checks:
            from gpuroute.transports.health import CHECKER

            CHECKER.watch(self.router)
        call = self.router.call(
            self.pool,
            key=key,
            ladder=steps,
            tokens=tokens,
            timeout=timeout,
            attempts=asked.attempts,
            replayable=request is not None and self.replay != UNSENT,
        )
        if asked.hedge is not None or asked.reroute is not None:
            chosen = {name: value for name in ("hedge", "reroute") if (value := getattr(asked, name)) is not None}
            call.hedging = replace(call.hedging, **chosen)
        if peers.version != self.version or call.started >= peers.sweep_at:
            peers.sweep(call.pool.snapshot.by_id, call.started, self.version)
        # A deadline cannot be lifted once an attempt runs, so a stream gets one only if its caller said so.
        limited = call.deadline < math.inf and (timeout is not None or not streaming)
        rpc = Rpc(self, peers, call, metadata, limited, patient, streaming)
        if self.asks and self.asker is not None:
            rpc.asked = self.asker.begin(call)
        return rpc

    def unrouted(self, peers: Peers, metadata: Pairs | None) -> tuple[Peer, Pairs | None] | None:
        """The channel of a call that the kill switch or the rollout leaves unrouted, and its metadata."""
        asked, metadata = split_metadata(metadata)
        url = self.router.fallback(self.pool, asked.key)
        if url is None:
            return None
        peer = peers.hold(Endpoint(f"fallback {url}", url), self, self.clock())
        peer.live.discard(self)
        return peer, metadata

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
