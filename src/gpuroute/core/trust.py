"""How far an endpoint's bids are believed: by what came of those that were believed before.

A bid is a promise of seconds: (queued + uncached tokens) x rate. First tokens that come later than promised are held
against the endpoint for about a minute, and a call that is overdue counts at once, before its first token: who always
says "idle" would else win every call for as long as the first of them waits. Lateness is charged in seconds; beyond
`DOUBT_S` nothing that the bid says is believed, but the endpoint is not excluded. In the simulator 10 % of agents that
always say "idle, and all is cached" turned 0.55 s mean TTFT into 660 s; with this into 0.56-0.64 s. Such liars lie alike,
so who is burnt by one that said "idle" looks twice at all that say it (`Words`), instead of once burnt by each of them.

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

FADE_S = 60.0
WEIGHT = 0.8  # of the newest sample
FORGIVENESS = 0.2  # of the newest sample, where many are judged by one: who does not lie is idle at times
SLACK = 3.0  # a promise times this, plus GRACE_S, is kept in time: honest bids err by that, near saturation most of all
GRACE_S = 0.1
DOUBT_S = 0.2
FROZEN_LATE_S = 1.0
BLIND_WEIGHT = 0.1
USUAL_STEP = 0.1
BLIND_CAUTION = 2.0


class Trust:
    """Seconds that one endpoint's first tokens come later than its bids promise. Single stores; any thread."""

    __slots__ = ("_at", "_late")

    def __init__(self) -> None:
        self._late = 0.0
        self._at = 0.0

    def learn(self, promised: float, seconds: float, now: float, forgives: float = WEIGHT) -> None:
        """A first token came after `seconds`."""
        late, over = self.lateness(now), max(0.0, _over(promised, seconds))
        self._late = late + (WEIGHT if over > late else forgives) * (over - late)
        self._at = now

    def doubt(self, now: float) -> None:
        """What its agent says does not move although it says that calls run: none of it is believed for a while."""
        self._late, self._at = max(self.lateness(now), FROZEN_LATE_S), now

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


def says_idle(bid: Report) -> bool:
    """It says that it has nothing to do."""
    return not (bid.running or bid.waiting or bid.queued_tokens > 0)


def learn_usual(speeds: Speeds, promised: float, seconds: float) -> None:
    """Follow the median lateness of all: where everybody is late, as in a saturated pool, nobody is a liar for it."""
    usual = speeds.usual_late
    step = USUAL_STEP * max(DOUBT_S, usual)
    speeds.usual_late = max(0.0, usual + (step if _over(promised, seconds) > usual else -step))


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


def _over(promised: float, seconds: float) -> float:
    return seconds - SLACK * promised - GRACE_S
