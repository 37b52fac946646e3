"""How far an endpoint's bids are believed: by what came of those that were believed before.

A bid is a promise of seconds: (queued + uncached tokens) x rate. First tokens that come later than promised are held
against the endpoint for about a minute, and a call that is overdue counts at once, before its first token: who always
says "idle" would else win every call for as long as the first of them waits. Lateness is charged in seconds; beyond
`DOUBT_S` nothing that the bid says is believed, but the endpoint is not excluded. In the simulator 10 % of agents that
always say "idle, and all is cached" turned 0.55 s mean TTFT into 660 s; with this into 0.56-0.64 s. Such liars lie alike,
so who is burnt by one that said "idle" looks twice at all that say it (`Words`), instead of once burnt by each of them.

Where the engine itself can be asked, that is the second opinion: of those who are not believed, and, once somebody was
found out, of everybody once (`wants_second_opinion`). It knows of no call on its way, so it stands in and does not bid.

Endpoints without a bid are the other half. The waits that a client sees are those of winners, so where others bid, an
endpoint that does not is expected to be as busy as the mean of all bids, and as what was really waited at its like.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuroute.core.attempt import Attempt
    from gpuroute.core.report import Report
    from gpuroute.core.speed import Speeds
    from gpuroute.core.state import EndpointState

FADE_S = 60.0
WEIGHT = 0.8  # of the newest sample
FORGIVENESS = 0.2  # of the newest sample, where many are judged by one: who does not lie is idle at times
SLACK = 3.0  # a promise times this, plus GRACE_S, is kept in time: honest bids err by that, near saturation most of all
GRACE_S = 0.1
DOUBT_S = 0.2
FROZEN_LATE_S = 1.0
ALARM_LATE_S = 1.0  # who is later than that, beyond what is usual, makes one look twice at all for `FADE_S`
FAR, FAR_SHARE = 4, 0.2  # honest counts of one moment differ by less: agents look twice a second
STANDS_IN = "engine:"  # what the source of a report begins with that the engine itself gave
BLIND_WEIGHT = 0.1
USUAL_STEP = 0.1
BLIND_CAUTION = 2.0


class Trust:
    """Seconds that one endpoint's first tokens come later than its bids promise. Single stores; any thread."""

    __slots__ = ("_at", "_late", "checked")

    def __init__(self) -> None:
        self._late = 0.0
        self._at = 0.0
        self.checked = -math.inf  # when its engine was asked for a second opinion

    def learn(self, promised: float, seconds: float, now: float, forgives: float = WEIGHT) -> None:
        """A first token came after `seconds`."""
        late, over = self.lateness(now), max(0.0, _over(promised, seconds))
        self._late = late + (WEIGHT if over > late else forgives) * (over - late)
        self._at = now

    def doubt(self, now: float) -> None:
        """What its agent says does not move although it says that calls run: none of it is believed for a while."""
        self._late, self._at = max(self.lateness(now), FROZEN_LATE_S), now

    def confirm(self, now: float) -> None:
        """The engine itself says what its agent says."""
        self._late, self._at = self.lateness(now) / 2, now

    def lateness(self, now: float) -> float:
        """Seconds expected on top of a promise now."""
        return self._late * math.exp(min(0.0, self._at - now) / FADE_S) if self._late else 0.0


class Words:
    """What came of bids that said "idle": one call at a time is followed. Single stores; any thread."""

    __slots__ = ("_attempt", "_late")

    def __init__(self) -> None:
        self._late = Trust()
        self._attempt: Attempt | None = None

    def taken(self, attempt: Attempt) -> None:
        """An attempt goes to an endpoint that said so."""
        last = self._attempt
        if last is None or last.first is not None or last.outcome is not None:
            self._attempt = attempt

    def learn(self, attempt: Attempt, promised: float, seconds: float, now: float) -> None:
        """The first token of any attempt that was promised one."""
        if attempt is self._attempt:
            self._late.learn(promised, seconds, now, FORGIVENESS)

    def lateness(self, now: float) -> float:
        """Seconds to expect on top of what whoever says "idle" promises."""
        late, last = self._late.lateness(now), self._attempt
        if last is None or last.first is not None:
            return late
        if last.ended is None:
            return max(late, overdue((last,), now))
        self._attempt = None  # it was given up: it waited that long, and is no later every second from then on
        waited = last.ended - last.started
        if last.promised is not None and _over(last.promised, waited) > late:
            self._late.learn(last.promised, waited, last.ended)
        return self._late.lateness(now)


def late_by(state: EndpointState, bid: Report, now: float) -> float:
    """Seconds by which this endpoint, or whoever says the same, breaks its promises, beyond what is usual now."""
    trust = state.trust
    late = 0.0 if trust is None else trust.lateness(now)
    if not bid.running and says_idle(bid):
        late = max(late, state.pool.speeds.words.lateness(now))
    if state.in_flight:
        late = max(late, overdue(tuple(state.in_flight), now))
    return max(0.0, late - state.pool.speeds.usual_late) if late and not stands_in(state, bid) else 0.0


def stands_in(state: EndpointState, bid: Report) -> bool:
    """True if the engine itself said this, beside an agent that was not believed."""
    return bool(state.endpoint.agent) and bid.source.startswith(STANDS_IN)


def wants_second_opinion(state: EndpointState, now: float) -> bool:
    """Whether its engine is worth asking too: its agent is not believed, has not looked at it for a while, or is one of
    those among whom somebody was found out."""
    trust, last, alarm_at = state.trust, state.report, state.pool.speeds.alarm_at
    if now - alarm_at < FADE_S and (trust is None or trust.checked < alarm_at):
        return True
    return last is not None and (last.is_old or late_by(state, last, now) > DOUBT_S)


def second_opinion(state: EndpointState, said: Report | None, found: Report, now: float) -> Report:
    """What counts for the pick of what an agent `said` (None: nothing) and its engine said at the same time."""
    if said is None:
        return found
    if said.is_old:  # it knows of calls on their way, the engine of all others
        queued, waiting = max(said.queued_tokens, found.queued_tokens), max(said.waiting, found.waiting)
        return said._replace(running=found.running, waiting=waiting, queued_tokens=queued, kv_usage=found.kv_usage)
    trust = state.trust = state.trust or Trust()
    trust.checked = now
    if _far(said.running, found.running) or _far(said.waiting, found.waiting):
        trust.doubt(now)
        alarm(state.pool.speeds, now)
        return found
    trust.confirm(now)
    return found if late_by(state, said, now) > DOUBT_S else said


def alarm(speeds: Speeds, now: float) -> None:
    """Somebody's word was far from the truth: everybody's is checked once, where engines can be asked."""
    if now - speeds.alarm_at > FADE_S:
        speeds.alarm_at = now


def says_idle(bid: Report) -> bool:
    """It says that it has nothing to do."""
    return not (bid.running or bid.waiting or bid.queued_tokens > 0)


def learn_usual(speeds: Speeds, promised: float, seconds: float, now: float) -> None:
    """Follow the median lateness of all: where everybody is late, as in a saturated pool, nobody is a liar for it."""
    usual = speeds.usual_late
    if _over(promised, seconds) > usual + ALARM_LATE_S:
        alarm(speeds, now)
    step = USUAL_STEP * max(DOUBT_S, usual)
    speeds.usual_late = max(0.0, usual + (step if _over(promised, seconds) > usual else -step))


def learn_broken(attempt: Attempt, now: float) -> None:
    """A call that was promised a first token was given up, or moved elsewhere, without one: late, or too soon to say."""
    state, waited = attempt.state, now - attempt.started
    if attempt.promised is not None and waited > kept_within(attempt, state.pool.speeds):
        state.trust = state.trust or Trust()
        state.trust.learn(attempt.promised, waited, now)
        alarm(state.pool.speeds, now)


def kept_within(attempt: Attempt, speeds: Speeds) -> float:
    """Seconds within which a first token keeps its promise, as promises are kept at present; 0 without a promise, and
    infinite for an answer in one piece, whose first token nobody sees."""
    if attempt.promised is None:
        return 0.0
    return math.inf if attempt.whole else SLACK * attempt.promised + GRACE_S + speeds.usual_late


def overdue(attempts: Iterable[Attempt], now: float) -> float:
    """By how many seconds the worst of these is late, of those that were promised something and still wait."""
    late = [_over(a.promised, now - a.started) for a in attempts if a.first is None and a.promised is not None]
    return max(0.0, *late) if late else 0.0


def learn_blind(speeds: Speeds, wait: float) -> None:
    """A call waited `wait` seconds at an endpoint that had given no bid."""
    speeds.blind_wait += BLIND_WEIGHT * (wait - speeds.blind_wait)


def blind_queue(speeds: Speeds, rate: float) -> float:
    """Seconds of waiting to expect at an endpoint without a bid, where others have given theirs."""
    return max(speeds.backlog * rate, BLIND_CAUTION * speeds.blind_wait)


def _far(one: int, other: int) -> bool:
    return abs(one - other) > FAR + FAR_SHARE * max(one, other)


def _over(promised: float, seconds: float) -> float:
    return seconds - SLACK * promised - GRACE_S
