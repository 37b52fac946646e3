"""The asks of one call: sent, waited for, understood, and followed by the `take` and the `tell`.

Whatever is lost, late, forged or garbled is "no report". Who waits reads nothing before it is time: bids that came one
by one are understood in a row, which takes a third of the time because a thread that was just woken up is slow.
"""

from __future__ import annotations

import math
import random
import time
from typing import TYPE_CHECKING

from gpuroute.core.asking import (
    AskBody,
    Garbled,
    TakeBody,
    TellBody,
    encode_ask,
    encode_take,
    encode_tell,
    read_bid,
)
from gpuroute.core.learning import learn_bid
from gpuroute.core.locality import learn_round_trip
from gpuroute.core.report import Report
from gpuroute.core.sources import copies, prompt_tokens
from gpuroute.core.trust import second_opinion
from gpuroute.engines.usage import read_usage
from gpuroute.transports.ask_lines import RELAY, wake
from gpuroute.transports.ask_peers import SILENT_AFTER

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable, Mapping

    from gpuroute.core.attempt import Attempt
    from gpuroute.core.call import Call
    from gpuroute.core.state import EndpointState
    from gpuroute.transports.ask_lines import Heard, Line, Origin, Place
    from gpuroute.transports.ask_peers import Asked
    from gpuroute.transports.asking import Asker

NOT_READY_TOKENS = 1_000_000  # what an engine that takes no calls is charged: dearer than any queue, but not excluded
MOST_AGAIN = 2
LEARNS = 0.05  # the weight of the newest call in the share of asks that get lost
_new = tuple.__new__  # of a NamedTuple: half the price of calling its class
SILENT = (
    f"%s: its agent at %s answered none of the last {SILENT_AFTER} asks (is it there, has it the same "
    "GPUROUTE_AGENT_KEY, is UDP let through, is GPUROUTE_ASK_TIMEOUT long enough?)"
)
UNSIGNED = "an answer from %s was no bid, or not signed with the GPUROUTE_AGENT_KEY of this process"
STRANGE = "a bid from %s was not asked for there: its agent is another endpoint's, or sends from another address"
RARE = 0.002  # where fewer asks are lost of late, nobody is asked again: a short timer costs as much as a datagram


class Asking:
    """The asks of one call, and the take and tell that follow. Owned by the call's task or thread."""

    # What few calls need is looked up in the class until it is set.
    due: asyncio.Future[None] | None = None
    _waits = True
    _again_at = math.inf
    _rounds = _repeated = _answers = _unanswered = 0

    def __init__(self, asker: Asker, call: Call, asked: Mapping[Origin, Asked], line: Line) -> None:
        self.id = id_ = random.getrandbits(64)
        self.key = id_.to_bytes(8, "big")
        self.started = started = time.monotonic()
        self.bids: dict[str, Report] = {}
        self.unread: list[Heard] = []
        self.missing = len(asked)
        self._asker = asker
        self._call = call
        self._line = line
        self._asked = asked
        self._until = until = started + asker.timeout
        patience = asker.patience
        self.patient = asker.loss < RARE
        if self.patient:
            patience *= 3
        else:
            self._again_at = started + patience
        self._look_at = min(until, started + patience)
        self._open: dict[Attempt, Place] = {}
        self._opinions: dict[EndpointState, Report] = {}  # of engines that were asked beside their agents
        self._real_queue: dict[str, int] = {}

    def send(self) -> None:
        """Send the asks."""
        self._line.listen(self)
        self._send(self._asked.values())
        counts = self._asker.counts
        counts.calls += 1
        counts.asks += len(self._asked)

    def _send(self, asked: Iterable[Asked]) -> None:
        asker = self._asker
        body, sent_ms = AskBody(self._call.ask.tokens, asker.hashes(self._call)), int(time.time() * 1000)

        def message(engine: int) -> bytes:
            return encode_ask(body, self.id, sent_ms, engine, 0, asker.secret)

        self._line.send_all(asked, message)

    # ------------------------------------------------------------------------------------------ bids

    def step(self, now: float) -> float:
        """Seconds to wait on, 0.0 when the wait is over; asks again who is overdue.

        The last of the answers is waited for as long again as the others took, or until it can have answered when asked
        again. It may be lost; but without it the pick is worse (0.66 against 0.55 s mean TTFT live, when all but one were
        enough), so it is not given up at once.
        """
        unread = self.unread
        if now < self._look_at and len(unread) < self.missing:
            return self._look_at - now
        latest = unread[-1][2] if unread else now
        self._read()
        missing = self.missing
        if not missing:
            return 0.0
        patience = self._asker.patience
        if missing == 1 and self.bids:
            self._until = min(self._until, self.started + max(2 * (latest - self.started), 2 * patience))
        if now >= self._until:
            return 0.0
        if now >= self._again_at:
            self._rounds += 1
            self._again_at = now + patience if self._rounds < MOST_AGAIN else math.inf
            silent = [one for one in self._silent() if one[2].family != RELAY]
            self._asker.counts.again += len(silent)
            for _ in range(copies(self._asker.loss)):
                self._send(silent)
                self._repeated += len(silent)
        return min(self._until, self._again_at) - now

    def heard(self) -> None:
        """Bids, perhaps, are in `unread`. Wakes the task that waits, if all are there or it is time to `step`."""
        if not self._waits:
            self._read()
        elif self.due is not None and (len(self.unread) >= self.missing or time.monotonic() >= self._look_at):
            wake(self.due)

    def _read(self) -> None:
        """Understand what has arrived."""
        asker, asked, bids, started = self._asker, self._asked, self.bids, self.started
        secret, pool, answers, took = asker.secret, self._call.pool, 0, 0.0
        at, far, mean = asker.clock(), bool(pool.shared.locality), pool.mean_tokens
        unread, self.unread = self.unread, []
        for data, source, now in unread:
            try:
                identity, engine, condition, running, waiting, queued, kv, matched, epoch, age = read_bid(data, secret)
            except Garbled:
                asker.counts.garbled += 1
                asker.mention(UNSIGNED, source)
                continue
            one = asked.get((identity, engine, source))
            if one is None:
                asker.counts.strangers += 1
                asker.mention(STRANGE, source)
                continue
            state, peer, _ = one
            if peer.misses:
                peer.answered()
            bid = _new(Report, (at, running, waiting, queued, kv, matched, epoch, age, peer.sources[condition]))
            if peer.backs_up:
                self._opinions[state] = bid
                continue
            answers += 1
            took += now - started
            if far:
                learn_round_trip(state, now - started)
            if condition:  # not ready
                self._real_queue[state.id] = queued
                bid = bid._replace(queued_tokens=queued + NOT_READY_TOKENS)
            else:
                learn_bid(state, bid, mean)
            bids[state.id] = bid
        self.missing = len(asked) - len(bids) - len(self._opinions)
        if answers:
            self._count(answers, took)
        if self._opinions and not self._waits:
            self._weigh()

    def _count(self, answers: int, took: float) -> None:
        self._answers += answers
        self._asker.answered(answers, took / answers, late=not self._waits)
        if self._unanswered:
            self._were_late(answers)

    def conclude(self) -> None:
        """The wait is over: what was answered counts for the next pick."""
        if self.unread:
            self._read()
        self._waits = False
        asker = self._asker
        self._call.ask.bids = self.bids
        if self.missing or self._repeated:
            self._missed()
        else:
            self._line.listeners.pop(self.key, None)
        if self._opinions:
            self._weigh()
        asker.loss += LEARNS * (min(1.0, self._unanswered / len(self._asked)) - asker.loss)

    def _missed(self) -> None:
        """Hold it against those who did not answer, unless one alone was given up early. Asks without an answer count as
        lost; those whose answers come after all were not."""
        asker, silent = self._asker, self._silent()
        if silent and (len(silent) > 1 or not self.bids or self._repeated):
            now = asker.clock()
            asker.counts.timeouts += 1
            for _, peer, _ in silent:
                peer.missed(now)
                if peer.misses == SILENT_AFTER and not peer.backs_up:
                    asker.mention(SILENT, peer.endpoint.id, peer.agent)
        never = sum(place.family == RELAY for _, _, place in silent)
        self._unanswered = max(0, len(self._asked) + self._repeated - self._answers - len(self._opinions) - never)

    def _were_late(self, answers: int) -> None:
        """They counted as lost, and a busy machine is no lossy network."""
        asker, late = self._asker, min(answers, self._unanswered)
        self._unanswered -= late
        asker.loss = max(0.0, asker.loss - LEARNS * late / len(self._asked))

    def _silent(self) -> list[Asked]:
        bids, opinions = self.bids, self._opinions
        return [
            one for one in self._asked.values() if (one[0] not in opinions if one[1].backs_up else one[0].id not in bids)
        ]

    def _weigh(self) -> None:
        """Engines say what their agents say, or they stand in for them."""
        now, bids, mean = self._asker.clock(), self.bids, self._call.pool.mean_tokens
        for state, counts in self._opinions.items():
            said = bids.get(state.id)
            if said is None:
                learn_bid(state, counts, mean)
            if said is None or state.id not in self._real_queue:  # who is not ready says so
                bids[state.id] = second_opinion(state, said, counts, now)
        self._opinions = {}

    # ------------------------------------------------------------------------------------------ take and tell

    def take(self, attempt: Attempt) -> None:
        """Tell the agent of the endpoint that was picked, asked or not, that the call comes."""
        asker = self._asker
        if self._real_queue:  # the charge for not being ready is no queue to learn from
            attempt.queued = self._real_queue.get(attempt.state.id, attempt.queued)
        place = asker.peers.place(attempt.state, asker.clock())
        if place is not None:
            self._open[attempt] = place
            body = TakeBody(attempt.uncached, prompt_tokens(self._call.ask))
            now_ms = int(time.time() * 1000)
            self._say(encode_take(body, self.id, now_ms, place.engine, 0, asker.secret, place.to), place)

    def began(self, attempt: Attempt, content_type: bytes, first: bytes | None) -> None:
        """The first bytes of the answer are here. Only those of an event stream are a first token; a whole body ends with
        its usage instead."""
        streams = content_type.startswith(b"text/event-stream")
        ttft = attempt.first - attempt.started if streams and attempt.first is not None else 0.0
        usage = read_usage(first) if first else None
        self.tell(attempt, ttft, usage.cached if usage is not None else None)

    def tell(self, attempt: Attempt, ttft: float = 0.0, cached: int | None = None) -> None:
        """Tell its agent that the first token came after `ttft` seconds; 0: it ended without one, or that is not known.

        Only the first of the tells of an attempt is sent.
        """
        place = self._open.pop(attempt, None)
        if place is not None:
            body = TellBody(int(ttft * 1e6), cached)
            now_ms = int(time.time() * 1000)
            self._say(encode_tell(body, self.id, now_ms, place.engine, 0, self._asker.secret, place.to), place)

    def _say(self, data: bytes, place: Place) -> None:
        """Send what nobody answers: more than once, where messages get lost. Agents take no message twice."""
        for _ in range(copies(self._asker.loss)):
            self._line.send(data, place)
