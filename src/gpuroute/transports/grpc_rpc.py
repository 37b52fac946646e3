"""One logical RPC over its attempts: what the blocking, the future and the asyncio driver have in common. No I/O here.

A driver is: wait `delay`, `next` (an endpoint's channel), send, then `succeeded`, `failed` (True: go on) or `cancelled`.
The caller's `timeout` is the budget of the whole; each attempt gets what is left of it as its gRPC deadline.

`wait_for_ready` never reaches grpcio, where it would tie the call to one broken endpoint and hide why (grpc-go's trap,
boulder#6834). Here it means: while nothing can be reached, keep trying other endpoints until the deadline, and name the
cause in the final error. Without a deadline that wait is endless, as it is on a plain channel.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from grpc import StatusCode

from gpuroute.core.endpoint import Endpoint
from gpuroute.core.hedge import LAST_PATIENCE
from gpuroute.core.learning import learn_bid
from gpuroute.core.outcome import Outcome
from gpuroute.core.prefix import Prompt, ladder
from gpuroute.core.report import Report
from gpuroute.errors import ConfigError, GpurouteError, NoEndpointAvailable
from gpuroute.observe import Observer, observer, watch
from gpuroute.transports.asking import asker_of
from gpuroute.transports.bodies import NO_OPTIONS, Options, read_options
from gpuroute.transports.grpc_status import REPEATED, REPEATED_IF_SAFE, brief, judge, report_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


    from gpuroute.core.attempt import Attempt
    from gpuroute.core.call import Call
    from gpuroute.router import Router
    from gpuroute.transports.asking import Asking
    from gpuroute.transports.grpc_peers import Peer, Peers

    Pairs = Iterable[tuple[str, Any]]
    ReadPrompt = Callable[[str, bytes], "Prompt | bytes | None"]

OURS = "x-gpuroute-"
UNSENT, UNAVAILABLE, FAILED = "unsent", "unavailable", "failed"
REPLAY = (UNSENT, UNAVAILABLE, FAILED)
NO_STEPS: Sequence[int] = ()

_options: ContextVar[Options] = ContextVar("gpuroute.grpc.options", default=NO_OPTIONS)


@contextmanager
def options(*, key: str | None = None, timeout: float | None = None, attempts: int | None = None) -> Iterator[None]:
    """Options of the calls begun inside: affinity key, deadline in seconds over all attempts, number of attempts.

    Metadata `x-gpuroute-key`, `x-gpuroute-timeout` (`250ms`, `2s`) and `x-gpuroute-attempts` of a call win over it.
    Holds per thread and per task. Raises ConfigError.
    """
    given = {"key": key, "timeout": timeout, "attempts": attempts}
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


class Rpc:
    """One logical RPC. Used by one thread at a time; the drivers see to that.

    Its methods do much in one step: a function call costs 0.1 us on a warm core and three times that between two system
    calls, where these run.
    """

    __slots__ = ("asked", "attempt", "call", "cause", "guarded", "hub", "left", "limited", "metadata", "not_before", "observer", "over",
                 "patient", "peer", "peers", "quiet", "streaming", "token", "wait")  # fmt: skip

    def __init__(
        self, hub: Hub, peers: Peers, call: Call, metadata: Pairs | None, limited: bool, patient: bool | None, streaming: bool
    ) -> None:
        self.hub = hub
        self.peers = peers
        self.call = call
        self.metadata = metadata
        self.limited = limited
        self.patient = patient
        self.streaming = streaming
        self.guarded = False
        self.not_before = 0.0
        self.cause: BaseException | None = None
        self.observer = seen = observer()
        self.quiet = type(seen) is Observer  # it has nothing to say of calls that go well
        self.asked: Asking | None = None
        self.attempt: Attempt | None = None
        self.peer: Peer | None = None
        self.over = False

    def next(self) -> Peer | None:
        """Begin an attempt and give the channel for it; None: ask again after `wait` seconds.

        `left` is then what the attempt may take, in seconds. Raises NoEndpointAvailable, DeadlineExceeded; ConfigError if
        an endpoint's record cannot be dialled.
        """
        if self.asked is not None and (wait := self.asked.pending()):
            self.wait = wait
            return None
        now, call = self.hub.clock(), self.call
        wait = call.delay(now)
        if wait > 0 or now < self.not_before:
            self.wait = max(wait, self.not_before - now)
            return None
        try:
            attempt = self.attempt = call.next_attempt(now)
        except NoEndpointAvailable:
            if not self.patient:
                self._end(now)
                raise
            self._wait_a_little(now)
            return None
        except GpurouteError:
            self._end(now)
            raise
        if not self._depart(attempt, now):
            self.wait = 0.0
            return None
        return self.peer

    def _depart(self, attempt: Attempt, now: float) -> bool:
        """Prepare an attempt: what it may take, and its channel. False if that cannot be had and another one is due."""
        call = self.call
        self.left = max(0.0, call.deadline - now) if self.limited else None
        if self.asked is not None:
            self.asked.take(attempt)
        self.token: object = None
        try:
            self.peer = peer = self.peers.hold(attempt.state.endpoint, attempt, now)
        except ConfigError as error:
            self.peer = None
            if not self._finish(Outcome.FAILED, now, str(error)):
                self._end(now)
                raise
            return False
        if not self.streaming:
            self._guard(attempt, peer, now)
        return True

    def _guard(self, attempt: Attempt, peer: Peer, now: float) -> None:
        """Give up a unary attempt when it is silent for longer than is normal: by its gRPC deadline, which costs nothing.

        How long that is changes slowly, so it is looked up once in a second for each endpoint.
        """
        attempt.whole = True
        if now >= peer.patience_until:
            pool = self.call.pool
            alone = len(pool.snapshot.routable) < 2
            usual = pool.rules.watchdog.first_byte(attempt, len(pool.snapshot.routable))
            peer.patience, peer.patience_until = usual * (LAST_PATIENCE if alone else 1.0), now + 1.0
        self.guarded = peer.patience < math.inf and (self.left is None or peer.patience < self.left)
        if self.guarded:
            self.left = peer.patience

    def headers(self) -> Pairs | None:
        """The metadata of the present attempt: the caller's, the endpoint's own and trace context."""
        attempt = self.attempt
        assert attempt is not None
        extra = attempt.state.endpoint.headers
        if self.quiet and not extra:
            return self.metadata
        traced: dict[str, str] = {}
        self.token = self.observer.attempt_started(self.call, attempt, traced)
        ours = {name.lower(): value for name, value in extra.items()} | traced
        return [pair for pair in self.metadata or () if pair[0] not in ours] + list(ours.items())

    def time_left(self) -> float | None:
        """Seconds until the call's deadline, None without one."""
        return max(0.0, self.call.deadline - self.hub.clock()) if self.limited else None

    def first(self) -> None:
        """The first response message is there: no other attempt can follow."""
        attempt = self.attempt
        if attempt is not None:
            attempt.first_token(self.hub.clock())
            if self.asked is not None and attempt.first is not None:
                self.asked.tell(attempt, attempt.first - attempt.started)

    def succeeded(self, read_trailing: Callable[[], Pairs | None]) -> None:
        """The attempt ended with OK. Where no load was ever reported, trailing metadata is read now and then only."""
        attempt, peer, call = self.attempt, self.peer, self.call
        if attempt is None or peer is None:
            return
        now = self.hub.clock()
        if attempt.first is None:
            attempt.first_token(now)
        peer.unreported += 1
        if peer.unreported < 32 or not peer.unreported & 15:
            trailing = read_trailing()
            if trailing and learn_report(attempt, trailing, call.pool.mean_tokens, now):
                peer.unreported = 0
        self.attempt = None
        call.finish(attempt, Outcome.SUCCESS, now)
        if self.asked is not None:
            self.asked.tell(attempt)
        live = peer.live
        live.discard(attempt)
        if peer.gone and not live:
            self.peers.release(peer, attempt)
        self.over = True
        if not self.quiet:
            self.observer.attempt_ended(self.token, call, attempt)
            self.observer.call_ended(call, now)

    def failed(self, code: StatusCode, details: str | None, trailing: Pairs | None, sent: bool = False) -> bool:
        """The attempt ended with another status; True if a next one is due. `sent`: request messages surely left."""
        now, attempt, call = self.hub.clock(), self.attempt, self.call
        if attempt is None:
            return False
        verdict = judge(code, details, trailing)
        unsent = verdict.unsent and not sent
        if not unsent:
            attempt.sent(now)
        spared = verdict.outcome is Outcome.OVERLOADED or self.guarded
        if verdict.stop or (code not in self.hub.repeated and not spared):
            call.replayable = False
        if trailing:
            learn_report(attempt, trailing, self.call.pool.mean_tokens, now)
        if self.guarded and code is StatusCode.DEADLINE_EXCEEDED and now < call.deadline:
            again = self.stalled(now)
        else:
            how = {"retry_after": verdict.retry_after, "answered": verdict.answered}
            again = self._finish(verdict.outcome, now, brief(code, details), **how)
        if not again and self.patient and unsent and now < call.deadline:
            self._wait_a_little(now)
            again = True
        if not again:
            self._end(now)
        return again

    def stalled(self, now: float) -> bool:
        """The attempt was silent for longer than is normal; True if a next one is due."""
        attempt, call = self.attempt, self.call
        if attempt is None:
            return False
        attempt.sent(now)
        call.pool.stalled(attempt, now)
        return self._finish(Outcome.TIMED_OUT, now, f"silent for {now - attempt.last:.2f} s")

    def silence_left(self, reading_since: float | None) -> float:
        """Seconds that a stream's endpoint may still be silent: none left means hung, infinite that nobody can tell.

        `reading_since`: when the reader began to wait, None if it does not; a slow reader is no silence of the endpoint.
        """
        attempt, call, now = self.attempt, self.call, self.hub.clock()
        if attempt is None:
            return math.inf
        if attempt.first is None:
            return call.patience(attempt) - (now - attempt.started)
        if reading_since is None:
            return math.inf
        return call.gap_patience(attempt) - (now - max(attempt.last, reading_since))

    @property
    def hedge_after(self) -> float:
        """Seconds from now until a second attempt is due beside the present one; infinite if none will be."""
        call, attempt = self.call, self.attempt
        if attempt is None or not (call.hedging.hedge or call.hedging.reroute):
            return math.inf
        return max(0.0, call.hedge_after(attempt) - (self.hub.clock() - attempt.started))

    def second(self) -> Rpc | None:
        """A second attempt beside the present one, if the core allows it; its `peer` is set."""
        now = self.hub.clock()
        attempt = self.call.hedge(now)
        if attempt is None:
            return None
        other = Rpc(self.hub, self.peers, self.call, self.metadata, self.limited, self.patient, self.streaming)
        other.asked, other.attempt = self.asked, attempt
        return other if other._depart(attempt, now) else None

    def lose(self) -> None:
        """Another attempt of this call answered first. Teaches nothing."""
        self._finish(Outcome.CANCELLED, self.hub.clock(), "another attempt was quicker")

    def cancelled(self) -> None:
        """The caller gave up: nobody's fault. Idempotent."""
        now = self.hub.clock()
        self._finish(Outcome.CANCELLED, now)
        self.call.close(now)
        self._end(now)

    def note(self, error: BaseException) -> None:
        """Tell in a final error what was tried, if it was more than one thing."""
        if len(self.call.history) > 1:
            error.add_note(f"gpuroute: {self.call.story()}")

    def _finish(self, outcome: Outcome, now: float, reason: str = "", **how: Any) -> bool:
        attempt, peer = self.attempt, self.peer
        if attempt is None:
            return False
        self.attempt = None
        again = self.call.finish(attempt, outcome, now, reason=reason, **how)
        if self.asked is not None:
            self.asked.tell(attempt)
        if peer is not None:
            self.peers.release(peer, attempt)
        self.observer.attempt_ended(self.token, self.call, attempt)
        return again

    def _end(self, now: float) -> None:
        if not self.over and not self.call.is_live:
            self.over = True
            if not self.quiet:
                self.observer.call_ended(self.call, now)

    def _wait_a_little(self, now: float) -> None:
        pool = self.call.pool
        self.wait = 0.01 + pool.rules.retry.backoff(len(self.call.history) + 1, pool.shared.random)
        self.not_before = now + self.wait


def learn_report(attempt: Attempt, trailing: Pairs, mean_tokens: float, now: float) -> bool:
    """What the endpoint says of its own load in its trailing metadata; False if it says nothing."""
    said = report_in(trailing)
    if said is None or said.requests is None:
        return False
    queued = -1 if said.queued_tokens is None else int(said.queued_tokens)
    running = said.in_flight if said.running is None else said.running
    report = Report(now, int(running or 0), int(said.waiting or 0), queued, said.kv_usage or 0.0, source="orca")
    learn_bid(attempt.state, report, mean_tokens)
    return True
