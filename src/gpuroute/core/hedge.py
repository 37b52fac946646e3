"""Second attempts before the first has failed: hedging, and rerouting a call that is still queued.

Hedging (Dean & Barroso, "The Tail at Scale", 2013) is for the tail: after the observed high percentile of the time to the
first byte, at most 5 % extra load. Rerouting is for a queue that was misjudged: no first token after 1 s + 2x the call's
own prefill, from a budget of 10 % that is closed while the pool is saturated (unbounded rerouting collapsed in our
simulation: every reroute lengthens the queues that cause reroutes).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuroute.core.attempt import Phase
from gpuroute.core.history import prompt_units
from gpuroute.core.learning import learn_silence
from gpuroute.core.outcome import Outcome
from gpuroute.core.speed import shrunk
from gpuroute.core.trust import kept_within
from gpuroute.errors import ConfigError

if TYPE_CHECKING:
    from gpuroute.core.attempt import Attempt
    from gpuroute.core.call import Call

SATURATED = 0.3
"""Share of calls due for a reroute above which there are none: the queues are everywhere."""


@dataclass(frozen=True, slots=True)
class HedgeRules:
    """Opt in. `hedge`: send a second attempt after the usual high TTFT; `reroute`: move a call that is still queued.

    Shares are of calls; `spreads` counts mean absolute deviations of log(TTFT) above its mean (2: about the p95);
    `patience_s` + `patience_factor` x predicted prefill is when a call counts as queued.
    """

    hedge: bool = False
    hedge_share: float = 0.05
    spreads: float = 2.0
    min_delay_s: float = 0.005
    reroute: bool = False
    reroute_share: float = 0.1
    patience_s: float = 1.0
    patience_factor: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.hedge_share <= 1 or not 0 <= self.reroute_share <= 1 or self.min_delay_s < 0:
            raise ConfigError(f"hedge rules: shares lie in 0..1 and min_delay_s >= 0; got {self!r}")

    def hedge_after(self, high_ttft: float) -> float:
        """Seconds after which a second attempt is due; infinite if off or nothing is known yet."""
        if not self.hedge or math.isinf(high_ttft):
            return math.inf
        return max(self.min_delay_s, high_ttft)

    def reroute_after(self, prefill_s: float) -> float:
        """Seconds after which a call without a first token counts as queued; infinite if off."""
        return self.patience_s + self.patience_factor * prefill_s if self.reroute else math.inf


LAST_PATIENCE = 4.0
"""How much longer an attempt may be silent that nobody else would take over."""


def can_move(call: Call, now: float) -> bool:
    """True if an attempt that is given up now would be followed by one elsewhere."""
    pool = call.pool
    if call.unanswered or not call.replayable or len(call.history) >= call.attempts:
        return False
    with pool.shared.lock:
        paid = pool.budget.balance(now) >= call.work
    return paid and call.elsewhere()


def patience_with(call: Call, attempt: Attempt) -> float:
    """Seconds, from its start, that an attempt may be without a first byte before it counts as hung."""
    rules = call.pool.rules.watchdog
    usual = rules.first_byte(attempt, len(call.pool.snapshot.routable))
    hangs = attempt.state.stalls >= rules.eject_after
    if hangs:  # whoever else waits there need not wait longer
        usual = min(usual, rules.first_floor_s)
    if usual != math.inf and call.deadline != math.inf:
        usual = min(usual, rules.within(attempt, call.deadline - attempt.started))
    moves = usual == math.inf or can_move(call, attempt.started + usual)
    return usual if moves else max(0.0 if hangs else rules.last_floor_s, LAST_PATIENCE * usual)


def due_after(call: Call, attempt: Attempt) -> float:
    """Seconds after the start of an attempt when a second one is due beside it; infinite when both ways are off."""
    rules = call.hedging
    if not (rules.hedge or rules.reroute):
        return math.inf
    history, state = call.pool.shared.history, attempt.state
    if attempt.whole:
        high = history.whole.high(rules.spreads)
    else:
        high = history.ttft.high(rules.spreads) * prompt_units(attempt.tokens)
    prefill = attempt.uncached * shrunk(state.speed, state.cohort)
    # Who was picked by its bid is misjudged if that promise is broken, and by no less than all others are at present.
    return min(rules.hedge_after(high), kept_within(attempt, state.pool.speeds) + rules.reroute_after(prefill))


def overtaken(call: Call, attempt: Attempt) -> bool:
    """True if another attempt of the call answers already: this one must not be sent any more."""
    return any(
        other.first is not None and other.outcome in (None, Outcome.SUCCESS)
        for other in call.history
        if other is not attempt
    )


def second_attempt(call: Call, now: float) -> Attempt | None:
    """Start an attempt beside the live one, paid by the budget of its kind and by the common one; None if not allowed.

    Not beside one that answers by now, or has failed: the timer and the first byte may come in the same moment.
    """
    pool, signals, hedges = call.pool, call.pool.shared.signals, call.hedging.hedge
    if call.history[-1].phase >= Phase.STREAMING:
        return None
    if not hedges:
        last = call.history[-1]
        learn_silence(last.state, last.started, now)
        pool.late += 0.02 * (1 - pool.late)
        if pool.late > SATURATED:
            signals.hedges_denied += 1
            return None
    if not call.replayable or len(call.history) >= call.attempts or now >= call.deadline or not call.elsewhere():
        return None
    # Reroutes are bounded twice: by their share of the calls and of the tokens.
    extra, price = (pool.hedges, call.work) if hedges else (pool.reroutes, max(1.0, call.work))
    with pool.shared.lock:
        paid = extra.balance(now) >= price and pool.budget.try_withdraw(now, call.work)
        if paid:
            extra.try_withdraw(now, price)
    attempt = pool.acquire(call.ask, now, call.tried, call.history) if paid else None
    if attempt is None:
        signals.hedges_denied += 1
        return None
    signals.attempts += 1
    signals.hedges += hedges
    signals.reroutes += not hedges
    return attempt
