"""The cost of DESIGN section 2: predicted seconds until this call's first token, plus what the choice costs others.

`queue + alpha x uncached prompt + neighbours + penalties - discount of a home`, in seconds of the endpoint at hand, so a
slow GPU, a long queue and a lost cache are compared in one currency. `alpha` > 1 charges for the prefill that others will
wait behind; it rises with the backlog, because a fixed one spreads prefixes near saturation and loses capacity.
With a bid (`Ask.bids`) queue and cached tokens are the server's own word; without one they are this process's memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuroute.core.candidates import NOTHING_ASKED, Ask
from gpuroute.core.pickers import Kit, first_admitted
from gpuroute.core.ramp import dearer
from gpuroute.core.report import faded, own_work
from gpuroute.core.sources import DEPTH_TOKENS, HOME, HOME_RUNG, Sources, prompt_tokens
from gpuroute.core.speed import Speeds, shrunk
from gpuroute.core.strata import Strata
from gpuroute.core.trust import DOUBT_S, blind_queue, late_by, says_idle, stands_in

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from gpuroute.core.attempt import Attempt
    from gpuroute.core.report import Report
    from gpuroute.core.ring import Ring
    from gpuroute.core.state import EndpointState

INF = math.inf
HOME_TOKENS = (DEPTH_TOKENS[0], *DEPTH_TOKENS[: HOME_RUNG + 1])  # by rungs; a session without a known prompt has none
BLIND_NEIGHBOUR_S = 0.003  # per own call in flight: decodes slow prefill down, and reports that all share make all run


@dataclass(frozen=True, slots=True)
class SecondsRules:
    """Constants of the cost; found in our simulator (docs/simulation.md).

    `alpha` is 2 at a mean backlog of `alpha_tokens`. Blind = without a bid. `kv_slope`: by how much prefill is slower
    beside the decodes of a full KV cache; where KV use is not known, `running_slope` is that per running sequence.
    `ask_homes`: of the first 1,024 tokens, for those who ask. Rungs: which hashes of the ladder have homes, and how many,
    for others, shorter prompts, and where some endpoints are far. `calm`, `placed`: at most so many blind candidates
    that were calm lately, and that were given the prefix before. `failure_s` fades over `failure_fade_s`.
    """

    alpha_max: float = 30.0
    alpha_tokens: float = 14_000.0
    blind_alpha: float = 3.0
    blind_hit: float = 0.35
    home_discount: float = 0.3
    home_discount_max: float = 3.0
    home_tokens: float = 30_000.0
    kv_slope: float = 0.45
    running_slope: float = 0.012
    neighbour_s: float = 0.002
    failure_s: float = 1.0
    failure_fade_s: float = 5.0
    ask_homes: int = 5
    ask_rungs: tuple[tuple[int, int], ...] = ((2, 2), (4, 2))
    blind_rungs: tuple[tuple[int, int], ...] = ((2, 1),)
    calm: int = 4
    placed: int = 4


class Soonest:
    """The policy `auto`, and what `predictive` corrects (without homes). Immutable, of one snapshot; any thread."""

    remembers = True
    ring: Ring | None = None

    def __init__(self, kit: Kit, *, homes: bool, rules: SecondsRules | None = None) -> None:
        self.wants_ladder = homes
        self.rules = rules or SecondsRules()
        self.ring = kit.ring() if homes else None
        self._kit = kit
        asks = any(state.endpoint.agent for state in kit.states)
        self._sources = Strata(kit, self.rules, self.ring) if asks else Sources(kit, self.rules, self.ring, asks=False)

    def candidates(self, ask: Ask) -> Sequence[EndpointState]:
        """A handful, drawn once per call. With agents at most six: last placement, homes of 1,024 tokens, at least one at
        random. Without: the four best placements, one home, four that were calm lately, two random."""
        return tuple(self._drawn(ask))

    def pick(self, ask: Ask, tried: Container[EndpointState] = ()) -> EndpointState | None:
        if ask is NOTHING_ASKED:
            ask = Ask()  # a draw is kept in the ask, and that one is everybody's
        best, best_cost, price = None, INF, self._price
        for state, why in self._drawn(ask).items():
            if len(state.in_flight) < state.limit and (not tried or state not in tried):
                cost = price(state, ask, why)
                if cost < best_cost:
                    best, best_cost = state, cost
        if best is None:
            ask.candidates = None  # all tried or closed: the next draw finds others
            best = first_admitted(self._kit, tried)
        return best

    def consider(self, ask: Ask) -> Iterable[tuple[EndpointState, float, str]]:
        return [(state, self._price(state, ask, why), why) for state, why in self._drawn(ask).items()]

    def cost(self, state: EndpointState, ask: Ask) -> float:
        """Predicted seconds to the first token, plus the cost to others."""
        return self._price(state, ask, (ask.candidates or {}).get(state, ""))

    def uncached(self, state: EndpointState, ask: Ask) -> int:
        """Prompt tokens that this endpoint would have to compute, as far as is known."""
        bid = ask.bids.get(state.id) if ask.bids else None
        return _uncached(state, ask, bid, 0.0 if bid is None else late_by(state, bid, ask.now))

    def promised(self, attempt: Attempt, ask: Ask) -> tuple[float, float | None]:
        """What the bid of the endpoint that was picked said: tokens ahead, and seconds to the first token if any bid."""
        state = attempt.state
        bid = ask.bids.get(state.id) if ask.bids else None
        if bid is None:
            return 0.0, None
        queued = bid.queue_tokens(ask.mean_tokens)
        if stands_in(state, bid):
            return queued, None  # what comes of it says nothing of its agent
        if says_idle(bid):
            state.pool.speeds.words.taken(attempt)
        return queued, (queued + attempt.uncached) * shrunk(state.speed, state.cohort)

    def _price(self, state: EndpointState, ask: Ask, why: str) -> float:
        rules, speeds = self.rules, state.pool.speeds
        rate = shrunk(state.speed, state.cohort)
        bid = ask.bids.get(state.id) if ask.bids else None
        if bid is None:
            seconds = self._blind(state, ask, rate, why)
        else:  # prefill is slower beside the decodes that the bid reports
            rate *= 1 + (rules.kv_slope * bid.kv_usage or rules.running_slope * bid.running)
            seconds = self._by_bid(state, ask, rate, bid)
        if why == HOME:
            share = min(rules.home_discount_max, rules.home_discount + speeds.backlog / rules.home_tokens)
            seconds -= share * HOME_TOKENS[min(len(ask.ladder), HOME_RUNG + 1)] * rate
        if state.troubled and state.last_error_at is not None:
            seconds += rules.failure_s * math.exp(min(0.0, state.last_error_at - ask.now) / rules.failure_fade_s)
        # A ramp or a low weight makes waiting dearer; a home that is cheaper than free stays what it is.
        if seconds > 0:
            seconds *= state.inverse_weight if state.ramp_at is None else dearer(state)
        return seconds + state.away

    def _by_bid(self, state: EndpointState, ask: Ask, rate: float, bid: Report) -> float:
        """Seconds of waiting and prefill by the server's own word."""
        speeds = state.pool.speeds
        late = late_by(state, bid, ask.now)
        backlog = bid.queue_tokens(ask.mean_tokens) * rate + late
        if not bid.kv_usage:
            backlog += bid.running * self.rules.neighbour_s
        if late > DOUBT_S:
            backlog += speeds.backlog * rate
        return backlog + self._alpha(speeds) * _uncached(state, ask, bid, late) * rate

    def _blind(self, state: EndpointState, ask: Ask, rate: float, why: str) -> float:
        """Seconds of waiting and prefill by what was last seen or reported here, and what this process has sent since."""
        rules, speeds, in_flight = self.rules, state.pool.speeds, state.in_flight
        queue, report, now, mean = state.queue, state.report, ask.now, speeds.mean_wait
        if report is not None and (queue is None or report.at > queue.at):
            since = report.at
            wait = faded(report.queue_tokens(ask.mean_tokens) * rate, now - since, mean)
        elif queue is not None:
            since = queue.at
            wait = faded(queue.seconds, now - since, mean)
        else:
            since, wait = -INF, mean
        if in_flight:
            tokens, whole, age = own_work(in_flight, since, now)
            wait += tokens * rate
            if report is None or since != report.at:  # what was seen is what a call met that was sent before these
                wait = max(wait, whole * rate)
            wait = max(wait, age) + len(in_flight) * BLIND_NEIGHBOUR_S
        # A prompt of no known prefix takes no cache away from others.
        alpha = rules.blind_alpha if ask.ladder or self.ring is None or ask.key is not None else 1.0
        if ask.bids:
            wait = max(wait, blind_queue(speeds, rate))
            alpha = self._alpha(speeds)
        if why == HOME:
            alpha *= 1 - rules.blind_hit  # others were sent here for the same prefix
        uncached = (ask.tokens or prompt_tokens(ask)) - (ask.placed.get(state.id, 0) if ask.placed else 0)
        return wait + alpha * rate * (uncached if uncached > 0 else 1)

    def _alpha(self, speeds: Speeds) -> float:
        """What a token of prefill costs in all: itself, and in a backlog those who wait behind it.

        Squared: below saturation a longer queue ends soon by itself, above it what is computed twice delays everybody.
        """
        return min(self.rules.alpha_max, 1 + (speeds.backlog / self.rules.alpha_tokens) ** 2)

    def _drawn(self, ask: Ask) -> dict[EndpointState, str]:
        found = ask.candidates
        if found is None or ask.drawn_by is not self:  # of an older view: some may have left since
            found = ask.candidates = self._sources.draw(ask)
            ask.drawn_by = self
        return found


def _uncached(state: EndpointState, ask: Ask, bid: Report | None, late: float) -> int:
    """Prompt tokens to compute: by its bid if it is believed, else by what was placed there."""
    if bid is not None and bid.matched_tokens >= 0 and late <= DOUBT_S:
        matched = bid.matched_tokens
    else:
        matched = ask.placed.get(state.id, 0)
    left = (ask.tokens or prompt_tokens(ask)) - matched
    return left if left > 0 else 1
