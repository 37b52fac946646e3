"""One logical call: its deadline, its attempts, and whether there is another one.

The state machine that every driver (sync, async, gRPC, simulator) runs::

    while True:
        while (pause := call.delay(now())) > 0: sleep(pause)
        attempt = call.next_attempt(now())       # raises NoEndpointAvailable, DeadlineExceeded
        ... send, classify ...
        if not call.finish(attempt, outcome, now()): return or raise

Rules: an attempt is repeated only before its first byte was handed to the caller, only if the request can be sent again,
within attempts, deadline and budget. Once a request was fully sent, a reset or a timeout permits one further attempt
only: a request that kills its server must not walk through the fleet.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gpuroute.core.attempt import READY, SENT, STREAMING, Attempt, Phase
from gpuroute.core.candidates import NOTHING_ASKED, Ask
from gpuroute.core.hedge import due_after, patience_with, second_attempt
from gpuroute.core.outcome import Outcome
from gpuroute.core.seconds import Soonest
from gpuroute.core.story import nobody, tell, with_story
from gpuroute.core.tried import Tried
from gpuroute.errors import DeadlineExceeded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuroute.core.pool import Pool
    from gpuroute.core.state import EndpointState

INF = math.inf
SUCCESS = Outcome.SUCCESS


class Call:
    """Owned by one task or thread. Times are monotonic seconds. Without a `timeout` the pool's own holds."""

    # What few calls need is looked up in the class until it is set.
    ask = NOTHING_ASKED
    deadline = INF
    not_before = -INF
    work = 1.0
    unanswered = 0
    _attempts: int | None = None
    _tried: Tried | None = None

    def __init__(
        self,
        pool: Pool,
        now: float,
        ask: Ask | None = None,
        timeout: float | None = None,
        attempts: int | None = None,
        replayable: bool = True,
    ) -> None:
        rules, arrivals = pool.rules, pool.arrivals
        self.pool = pool
        self.started = now
        if timeout is None:
            timeout = rules.timeout
        if timeout is not None:
            self.deadline = now + timeout
        if attempts is not None:
            self._attempts = attempts
        self.replayable = replayable
        self.hedging = rules.hedge
        self.history: list[Attempt] = []
        signals = pool.shared.signals
        signals.calls += 1
        if ask is None:
            ask = pool.blank or Ask()
        if ask is not NOTHING_ASKED:
            self.ask = ask
            self.work = pool.work(ask.tokens)
            signals.keyed += ask.key is not None or bool(ask.ladder)
        if pool.late:
            pool.late *= 0.98
        if now >= arrivals.until:
            arrivals.pass_to(now)
        arrivals.sum += self.work

    @property
    def attempts(self) -> int:
        """How many it may have."""
        return self.pool.rules.retry.attempts if self._attempts is None else self._attempts

    @property
    def tried(self) -> Tried:
        """Where this call has been. Made when somebody asks: most calls succeed at once."""
        if self._tried is None:
            self._tried = Tried()
        self._tried.states.update(attempt.state for attempt in self.history)
        return self._tried

    def time_left(self, now: float) -> float:
        """Seconds until the deadline; infinite without one."""
        return self.deadline - now

    def delay(self, now: float) -> float:
        """Seconds to wait before the next attempt: backoff, or every endpoint asked for a pause. 0 to go on.

        A pause that would outlast the deadline is not waited for: `next_attempt` then says so at once.
        """
        pause = self.not_before - now
        if self.pool.shared.limited:
            pause = max(pause, self.pool.pause_left(now))
        return pause if 0 < pause < self.deadline - now else 0.0

    def candidates(self) -> Sequence[EndpointState]:
        """The endpoints whose answer would change the next pick and that can be asked: put their bids in `ask.bids`.

        Empty when the policy does not compare seconds or nobody has an agent. At most six.
        """
        picker = self.pool.snapshot.picker
        if not isinstance(picker, Soonest) or self.ask is NOTHING_ASKED:  # the policy is newer than the call
            return ()
        states, tried = picker.candidates(self.ask), self.tried
        return [s for s in states if s.endpoint.agent and s.admitted and s not in tried] if len(states) > 1 else ()

    def next_attempt(self, now: float) -> Attempt:
        """Start the next attempt on the endpoint that the policy prefers.

        Raises DeadlineExceeded if no time is left, NoEndpointAvailable if no endpoint may take it.
        """
        pool, history = self.pool, self.history
        signals = pool.shared.signals
        if now >= self.deadline:
            signals.deadlines += 1
            raise DeadlineExceeded(with_story(self, f"deadline exceeded after {now - self.started:.3f} s"))
        attempt = pool.acquire(self.ask, now, self.tried if history else (), history)
        if attempt is None:
            raise nobody(self, now)
        signals.attempts += 1
        if attempt.number > 1:
            signals.retries += 1
        return attempt

    def finish(
        self,
        attempt: Attempt,
        outcome: Outcome,
        now: float,
        *,
        retry_after: float | None = None,
        reason: str = "",
        answered: bool = False,
        resumable: bool = False,
    ) -> bool:
        """End an attempt and teach its endpoint; True if another attempt is due (see `delay`).

        `retry_after`: seconds that the server asked for. `answered`: the server replied (with an error), so it was
        not killed by this request. `resumable`: the driver can go on where a stream broke off, so bytes that reached
        the caller are no reason to stop. Finishing an attempt twice changes nothing and returns False.
        """
        reached = attempt.phase
        if not attempt.finish(outcome, now, reason) or outcome is SUCCESS:
            return False
        rules = self.pool.rules.retry
        if outcome is Outcome.OVERLOADED and (pause := rules.pause(retry_after, self.pool.shared.random)) > 0:
            attempt.state.pause(now + pause)
        if outcome.health < 0:
            self.tried.failed(attempt.state)
        spoke = answered or resumable or outcome is Outcome.OVERLOADED  # who says "busy" was not killed by this request
        if not outcome.retryable or self.is_live or not self._may_repeat(SENT if resumable else reached, answered=spoke):
            return False
        self.pool.shared.signals.continuations += resumable
        return self._schedule(reached, outcome, now)

    @property
    def is_live(self) -> bool:
        """True while an attempt is in flight."""
        return any(attempt.outcome is None for attempt in self.history)

    # -------------------------------------------------------------------------------- silence and second attempts

    def patience(self, attempt: Attempt) -> float:
        """Seconds, from its start, that this attempt may be without a first byte before it counts as hung.

        Four times as many, and 10 at least, if nobody else could take the call: a late answer is better than none.
        """
        return patience_with(self, attempt)

    def gap_patience(self, attempt: Attempt) -> float:
        """Seconds of silence within this attempt's stream that are still normal."""
        return self.pool.rules.watchdog.gap(attempt)

    def stalled(self, attempt: Attempt, now: float, *, resumable: bool = False) -> bool:
        """Its patience ran out: like `finish(TIMED_OUT)`, and repeated stalls eject the endpoint."""
        reason = f"silent for {now - attempt.last:.2f} s"
        self.pool.stalled(attempt, now)
        return self.finish(attempt, Outcome.TIMED_OUT, now, reason=reason, resumable=resumable)

    def hedge_after(self, attempt: Attempt) -> float:
        """Seconds after the start of an attempt when a second one is due; infinite when neither way is on."""
        return due_after(self, attempt)

    def hedge(self, now: float) -> Attempt | None:
        """A second attempt beside the live one, if attempts, deadline, budgets and another endpoint allow it.

        The loser must be cancelled and finished as CANCELLED by the driver; that teaches nothing.
        """
        return second_attempt(self, now)

    def close(self, now: float) -> None:
        """Release whatever is still live as CANCELLED. Idempotent; the end of every driver's `finally`."""
        for attempt in self.history:
            if attempt.outcome is None:
                attempt.finish(Outcome.CANCELLED, now)

    def elsewhere(self) -> bool:
        """True if an endpoint that was not tried takes calls now."""
        been = self.tried.states
        return any(state.admitted and state not in been for state in self.pool.snapshot.routable)

    def _may_repeat(self, reached: Phase, *, answered: bool) -> bool:
        if reached >= STREAMING or len(self.history) >= self.attempts:
            return False
        if reached is READY:
            return True  # it never left, so even a one-shot body is still whole
        self.unanswered += not answered
        return self.replayable and self.unanswered < 2

    def _schedule(self, reached: Phase, outcome: Outcome, now: float) -> bool:
        """Withdraw the retry from the budget now, at scheduling, so that waiting retries cannot all fire at once."""
        pool, random, tried = self.pool, self.pool.shared.random, self.tried
        elsewhere = any(state.admitted and state not in tried for state in pool.snapshot.routable[:64])
        at_once = elsewhere and (reached is READY or outcome is Outcome.OVERLOADED)
        wait = 0.0 if at_once else pool.rules.retry.backoff(len(self.history), random)
        # A pause that outlasts the deadline: the server's own "busy" tells the caller more than our "nobody" would.
        if now + max(wait, pool.pause_left(now)) >= self.deadline:
            return False
        with pool.shared.lock:
            paid = pool.budget.try_withdraw(now, self.work)
        if not paid:
            pool.shared.signals.retries_denied += 1
            return False
        self.not_before = now + wait
        return True

    def story(self) -> str:
        """The attempts in one line for error notes: `2 attempts: gpu-7 503, gpu-2 connection refused`."""
        return tell(self.history)
