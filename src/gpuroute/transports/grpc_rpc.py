"""One logical RPC over its attempts: what the blocking, the future and the asyncio driver have in common. No I/O here.

A driver is: `next` (an endpoint's channel, or a wait), send, then `succeeded`, `failed` (True: go on) or `cancelled`.
The caller's `timeout` is the budget of the whole; each attempt gets what is left of it as its gRPC deadline.

`wait_for_ready` never reaches grpcio, where it would tie the call to one broken endpoint and hide why (grpc-go's trap,
boulder#6834). Here it means: while nothing can be reached, keep trying other endpoints until the deadline, and name the
cause in the final error. Without a deadline that wait is endless, as it is on a plain channel.
"""

from __future__ import annotations

import math
from copy import copy
from typing import TYPE_CHECKING, Any

from grpc import StatusCode

from gpuroute.core.call import Call
from gpuroute.core.hedge import LAST_PATIENCE
from gpuroute.core.outcome import Outcome
from gpuroute.errors import ConfigError, GpurouteError, NoEndpointAvailable
from gpuroute.observe import Observer, observer
from gpuroute.transports.bodies import NO_OPTIONS
from gpuroute.transports.grpc_errors import ClosedUnder
from gpuroute.transports.grpc_options import CHOSEN, split_metadata
from gpuroute.transports.grpc_status import brief, judge, report_in
from gpuroute.transports.piggyback import learn_load

if TYPE_CHECKING:
    from gpuroute.core.attempt import Attempt
    from gpuroute.transports.asking import Asking
    from gpuroute.transports.grpc_method import Multicallable
    from gpuroute.transports.grpc_options import Pairs
    from gpuroute.transports.grpc_peers import Peer, Peers

ATTEMPT = "x-gpuroute-attempt"
"""Tells an endpoint that this is not the call's first attempt, and which one it is."""

INF = math.inf


class Rpc:
    """One logical RPC. Used by one thread at a time; the drivers see to that.

    Its methods do much in one step, and most fields are looked up in the class until they are set: an instruction costs
    10 ns on a warm core and four times that between two system calls, where these run.
    """

    peer: Peer
    """The channel of the present attempt."""
    left: float | None
    """What the attempt may take, in seconds."""
    metadata: Pairs | None = None
    """The caller's."""
    sending: Pairs | None = None
    """The attempt's."""
    wait: float
    """Seconds until `next` is to be asked again, after it gave None."""
    attempt: Attempt | None = None
    asked: Asking | None = None
    cause: BaseException | None = None
    observer = Observer()
    quiet = True
    """The observer has nothing to say of calls that go well."""
    token: object = None
    fresh = True
    """No time has passed since the call began."""
    limited = True
    """The deadline is that of attempts, too. It cannot be lifted once one runs: a stream has one only if its caller said
    so."""
    patient = False
    races = False
    """It may have a second attempt beside a slow one."""
    guarded = False
    not_before = 0.0
    over = False

    def __init__(
        self,
        method: Multicallable,
        peers: Peers,
        request: bytes | None,
        timeout: float | None,
        metadata: Pairs | None,
        patient: bool | None,
    ) -> None:
        """Begin a call; `request` is None if it comes as a stream. Raises UnknownPool, RouterClosed, ConfigError, ..."""
        self.method = method
        self.hub = hub = method.hub
        asked = CHOSEN.get()
        if metadata:
            asked, self.metadata = split_metadata(metadata)
            self.sending = self.metadata
        if asked is not NO_OPTIONS or (hub.reads and request):
            call = hub.call_with(asked, method.name, request, timeout)
        else:
            call = Call(hub.found, hub.clock(), None, timeout, None, hub.replay and request is not None)
        if peers.version != hub.version or call.started >= peers.sweep_at:
            peers.sweep(hub.found.snapshot.by_id, call.started, hub.version)
        self.call = call
        self.peers = peers
        if patient:
            self.patient = True
        if method.streaming:
            self.limited = timeout is not None or asked.timeout is not None
        elif hub.races or asked is not NO_OPTIONS:
            self.races = call.hedging.hedge or call.hedging.reroute
        seen = observer()
        if type(seen) is not Observer:
            self.observer, self.quiet = seen, False

    def ask(self, asked: Asking | None) -> None:
        """The endpoints that could take the call have been asked, and that took its time."""
        self.asked, self.fresh = asked, False

    @property
    def listens(self) -> bool:
        """True if the trailing metadata of the present attempt are wanted."""
        return self.method.streaming or not self.peer.deaf

    def next(self) -> Peer | None:
        """Begin an attempt and give the channel for it; None: ask again after `wait` seconds.

        `left` is then what the attempt may take, in seconds. Raises NoEndpointAvailable, DeadlineExceeded; ConfigError if
        an endpoint's record cannot be dialled.
        """
        call, fresh = self.call, self.fresh
        if fresh:
            self.fresh, now = False, call.started
        else:
            self.guarded, now = False, self.hub.clock()
        if not fresh or call.pool.shared.limited:
            if self.hub.closed:
                self._end(now)
                raise ClosedUnder
            wait = max(call.delay(now), self.not_before - now)
            if wait > 0:
                self.wait = wait
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
        return self.depart(attempt, now)

    def depart(self, attempt: Attempt, now: float) -> Peer | None:
        """Prepare an attempt: what it may take, and its channel. None if that cannot be had and another one is due."""
        if self.asked is not None:
            self.asked.take(attempt)
        try:
            self.peer = peer = self.peers.hold(attempt.state.endpoint, attempt, now)
        except ConfigError as error:
            self.wait = 0.0
            attempt.misfit = True
            if not self._leave(attempt, Outcome.FAILED, now, reason=str(error)):
                self._end(now)
                raise
            return None
        except BaseException:
            self._leave(attempt, Outcome.CANCELLED, now)
            self._end(now)
            raise
        if attempt.number > 1 or peer.headers or not self.quiet:
            self.sending = self._extended(attempt, peer)
        left = self.call.deadline - now
        if self.method.streaming:
            self.left = left if left < INF and self.limited else None
            return peer
        attempt.whole = True
        if now >= peer.patience_until:
            self._look_up_patience(attempt, peer, now)
        patience = peer.patience
        if patience < left:
            left, self.guarded = patience, True
        self.left = left if left < INF else None
        return peer

    def _look_up_patience(self, attempt: Attempt, peer: Peer, now: float) -> None:
        """How long a unary attempt may be silent at an endpoint before it is given up, by its gRPC deadline, which costs
        nothing. That changes slowly, so it is looked up once in a second, as are load reports where there are none."""
        pool = self.call.pool
        alone = len(pool.snapshot.routable) < 2
        usual = pool.rules.watchdog.first_byte(attempt, len(pool.snapshot.routable))
        peer.patience, peer.patience_until = usual * (LAST_PATIENCE if alone else 1.0), now + 1.0
        peer.deaf = False

    def _extended(self, attempt: Attempt, peer: Peer) -> Pairs:
        """The metadata of an attempt: the caller's, the endpoint's own and trace context."""
        traced: dict[str, str] = {} if attempt.number == 1 else {ATTEMPT: str(attempt.number)}
        self.token = self.observer.attempt_started(self.call, attempt, traced)
        ours = peer.headers | traced
        return [pair for pair in self.metadata or () if pair[0] not in ours] + list(ours.items())

    def time_left(self) -> float | None:
        """Seconds until the call's deadline, None without one."""
        return max(0.0, self.call.deadline - self.hub.clock()) if self.limited and self.call.deadline < INF else None

    def first(self) -> None:
        """The first response message is there: no other attempt can follow."""
        attempt = self.attempt
        if attempt is not None:
            attempt.first_token(self.hub.clock())
            if self.asked is not None and attempt.first is not None:
                self.asked.tell(attempt, attempt.first - attempt.started)

    def chunk(self) -> None:
        """One more response message is there."""
        attempt = self.attempt
        if attempt is not None:
            attempt.chunk(self.hub.clock())

    def succeeded(self, trailing: Pairs | None) -> None:
        """The attempt ended with OK. `trailing`: its trailing metadata, which drivers read if `listens`."""
        attempt = self.attempt
        if attempt is None:
            return
        self.attempt = None
        peer, now = self.peer, self.hub.clock()
        attempt.succeed(now)
        if trailing is not None:
            peer.listened(bool(trailing) and learn_report(attempt, trailing, self.call.pool.mean_tokens, now))
        if self.asked is not None:
            self.asked.tell(attempt)
        peer.live.discard(attempt)
        if peer.gone:
            self.peers.release(peer, attempt)
        if not self.quiet:
            self.over = True
            self.observer.attempt_ended(self.token, self.call, attempt)
            self.observer.call_ended(self.call, now)

    def failed(self, code: StatusCode, details: str | None, trailing: Pairs | None, sent: bool = False) -> bool:
        """The attempt ended with another status; True if a next one is due. `sent`: request messages surely left."""
        now, attempt, call = self.hub.clock(), self.attempt, self.call
        if attempt is None:
            return False
        verdict = judge(code, details, trailing)
        unsent = verdict.unsent and not sent
        if not unsent:
            attempt.sent(now)
        if verdict.misfit:
            attempt.misfit = True
        if verdict.dead:
            self.peers.dismiss(self.peer)
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
            return INF
        if attempt.first is None:
            return call.patience(attempt) - (now - attempt.started)
        if reading_since is None:
            return INF
        return call.gap_patience(attempt) - (now - max(attempt.last, reading_since))

    @property
    def hedge_after(self) -> float:
        """Seconds from now until a second attempt is due beside the present one; infinite if none will be."""
        call, attempt = self.call, self.attempt
        if attempt is None or not self.races:
            return INF
        return max(0.0, call.hedge_after(attempt) - (self.hub.clock() - attempt.started))

    def second(self) -> Rpc | None:
        """A second attempt beside the present one, if the core allows it; its `peer` is set."""
        now = self.hub.clock()
        attempt = self.call.hedge(now)
        if attempt is None:
            return None
        other = copy(self)
        other.attempt, other.guarded = attempt, False
        try:
            return other if other.depart(attempt, now) else None
        except (ConfigError, ClosedUnder):  # there is still the first
            return None

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
        attempt = self.attempt
        if attempt is None:
            return False
        again = self._leave(attempt, outcome, now, reason=reason, **how)
        self.peers.release(self.peer, attempt)
        return again

    def _leave(self, attempt: Attempt, outcome: Outcome, now: float, **how: Any) -> bool:
        self.attempt = None
        again = self.call.finish(attempt, outcome, now, **how)
        if self.asked is not None:
            self.asked.tell(attempt)
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
    return said is not None and learn_load(attempt.state, said, mean_tokens, now)
