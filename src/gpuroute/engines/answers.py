"""What an engine's answer means: its own table first, then what all of them tend to say, then the status alone.

The one distinction that matters is *overloaded* against *broken*: the first moves load away and leaves the breaker
alone, the second takes the endpoint out. Engines use the same 503 for both and rarely say `Retry-After`, so the text
decides. Nothing here raises, whatever the body.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, NamedTuple

from gpuroute.core.outcome import Outcome, http_outcome
from gpuroute.core.retry_after import retry_after

from .catalog import engine_of
from .engine import Meaning, rule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .engine import Engine

HEAD = 4096
"""Bytes of a body that are looked at."""

LOADING_PAUSE_S = 1.0
"""For so long an engine that loads its model is left alone: it is not broken, and should serve soon after it can."""

_BROKEN = (500, 502, 503, 504)
_GENERIC = (
    rule(Meaning.DRAINING, _BROKEN, r"shut(ting)? ?down|being drained|is draining|terminating"),
    rule(
        Meaning.OVERLOADED,
        (500, 503),
        r"overloaded|queue (to which this task was submitted )?is full|currently busy|maximum queue size|backpressure|"
        r"too many (concurrent )?requests|workers are busy|no slot available|reset reason: overflow",
    ),
    rule(Meaning.LOADING, (425, 503), r"loading|starting|not (yet )?ready|warming|initiali[sz]ing|waking|is scaling"),
    rule(Meaning.MISSING, 404, r"(model|lora|adapter).{0,300}(does not exist|not (found|loaded|available))"),
)
_OUTCOMES = {
    Meaning.OVERLOADED: Outcome.OVERLOADED,
    Meaning.LOADING: Outcome.OVERLOADED,
    Meaning.DRAINING: Outcome.FAILED,
    Meaning.FAILED: Outcome.FAILED,
    Meaning.REJECTED: Outcome.REJECTED,
    Meaning.MISSING: Outcome.REJECTED,
}
_DEFAULT = {
    Outcome.OVERLOADED: Meaning.OVERLOADED,
    Outcome.FAILED: Meaning.FAILED,
    Outcome.REJECTED: Meaning.REJECTED,
}
_SSE_ERROR = re.compile(rb"^(?:event: ?error\s+)?data: ?(?=\{\s*\"(?:error|type\": ?\"error|object\": ?\"error))")


class Answer(NamedTuple):
    """An answer understood: `retry_after` in seconds if it named a time, `meaning` None for a success."""

    outcome: Outcome
    meaning: Meaning | None
    retry_after: float | None = None

    @property
    def reason(self) -> str:
        """A word for logs and notes."""
        return self.meaning or ""


def classify(
    engine: Engine | str, status: int, headers: Mapping[str, str], body_head: bytes = b"", *, now_epoch: float = 0.0
) -> Outcome:
    """The outcome of an attempt that was answered like this. `headers` in lower case or without regard to it."""
    return judge(engine, status, body_head, retry_after=retry_after(headers, now_epoch)).outcome


def judge(
    engine: Engine | str,
    status: int,
    body_head: bytes = b"",
    *,
    retry_after: float | None = None,
    claimed: bool = False,
) -> Answer:
    """As `classify`, with the meaning, for one who knows already how many seconds the headers ask for.

    `claimed`: the registry says that this endpoint has the model asked for. "No such model" is then its own fault, and
    another endpoint may do better (OVERLOADED: moves on, does not open the breaker); otherwise it is the caller's.
    """
    if status < 400:
        return Answer(Outcome.SUCCESS, None)
    meaning = _meaning(engine, status, body_head[:HEAD])
    if meaning is None:
        outcome = http_outcome(status, retry_after=retry_after is not None)
        return Answer(outcome, _DEFAULT[outcome], retry_after)
    if meaning is Meaning.MISSING and claimed:
        return Answer(Outcome.OVERLOADED, meaning, retry_after)
    if meaning is Meaning.LOADING and retry_after is None:
        retry_after = LOADING_PAUSE_S
    return Answer(_OUTCOMES[meaning], meaning, retry_after)


def judge_stream(engine: Engine | str, first_event: bytes) -> Answer | None:
    """An error sent as the first event of a stream whose status was 200 already; None if it is no error.

    Such a stream has given the caller nothing yet, so the call may still be tried elsewhere.
    """
    found = _SSE_ERROR.match(first_event)
    if found is None:
        return None
    text = first_event[found.end() : found.end() + HEAD]
    return judge(engine, _code(text), text)


def _meaning(engine: Engine | str, status: int, head: bytes) -> Meaning | None:
    known = engine_of(engine) if isinstance(engine, str) else engine
    for one in (*known.answers, *_GENERIC):
        if status in one.statuses and one.text.search(head):
            return one.meaning
    return None


def _code(text: bytes) -> int:
    try:
        event = json.loads(text.splitlines()[0])
    except (ValueError, RecursionError, IndexError):
        return 500
    nested = event.get("error")
    codes = (event.get("code"), nested.get("code") if isinstance(nested, dict) else None)
    return next((code for code in codes if type(code) is int and 400 <= code < 600), 500)
