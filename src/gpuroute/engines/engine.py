"""What gpuroute knows of one engine, as data: the type that every module of this package fills in once.

An engine's dialect is a table, not code: where it says that it is ready, under which names it counts, how it says "I am
full", which body fields it honours. Adding an engine is adding one `Engine(...)`; the functions that read the tables
(`answers`, `metrics`, `detect`, `usage`) know no engine by name. Traps are told in docs/engines.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gpuroute.core.orca import LoadReport


class Meaning(StrEnum):
    """What an engine says with an answer that is no success."""

    OVERLOADED = "overloaded"
    """Full, but sound: it will take calls again by itself."""
    LOADING = "loading"
    """Not serving yet."""
    DRAINING = "draining"
    """Not serving any more."""
    MISSING = "model not loaded"
    """It does not have the model or adapter asked for."""
    FAILED = "failed"
    """Broken, or broke on this request."""
    REJECTED = "rejected"
    """The request itself is at fault."""


class Rule(NamedTuple):
    """An answer with one of `statuses` whose body matches `text` has this meaning."""

    meaning: Meaning
    statuses: frozenset[int]
    text: re.Pattern[bytes]


def rule(meaning: Meaning, statuses: int | tuple[int, ...], text: str = "") -> Rule:
    """A rule; `text` is a regular expression, case of no matter, searched in the head of the body."""
    known = frozenset((statuses,) if isinstance(statuses, int) else statuses)
    return Rule(meaning, known, re.compile(text.encode(), re.IGNORECASE))


class Reading(NamedTuple):
    """One number out of a page of metrics.

    `names` are tried in turn (old and new names of one thing). Several series (data-parallel ranks, models) are added;
    of a share their mean is taken. `where` keeps series by a label, `labels` multiplies label values of an info
    series, `plus` is added if present.
    """

    names: tuple[str, ...]
    where: tuple[str, str] | None = None
    share: bool = False
    labels: tuple[str, ...] = ()
    plus: tuple[str, ...] = ()


Readings = tuple[Reading, ...]
"""Factors of one figure; nearly always one."""


def reading(*names: str, where: tuple[str, str] | None = None, plus: tuple[str, ...] = ()) -> Readings:
    """A count, under the first of these names that the page has."""
    return (Reading(names, where=where, plus=plus),)


def share(*names: str, where: tuple[str, str] | None = None) -> Readings:
    """A number between 0 and 1."""
    return (Reading(names, where=where, share=True),)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Engine:
    """The dialect of one engine. "" means that it has no such thing.

    Paths may contain `{model}`. A health path answering 2xx, with `ready_text` in the body if that is given, means
    ready; `ready_any` is the one for who names no model; `deep` generates a token: it proves work, but costs a
    slot. `queue_fails_health`: its health check fails under mere load, so it must not eject. `knock`: path and JSON
    body of a request that costs it next to nothing, and that it refuses while it drains, where its health check
    says nothing of that. `metrics_port`: 0 is the port of requests. `load` is a cheap JSON endpoint read by
    `read_load`. `orca`: what to ask for in `endpoint-load-metrics-format`. `cached_in_prompt`: the counter of
    prompt tokens includes cached ones. `urgent_is_low`: small values of the `priority` field go first. `signs`:
    (path, pattern of a 200 answer) that give it away.
    """

    name: str
    ready: str = "/health"
    ready_any: str = ""
    live: str = "/health"
    ready_text: str = ""
    deep: str = ""
    queue_fails_health: bool = False
    knock: tuple[str, Mapping[str, str]] | None = None
    metrics: str = "/metrics"
    metrics_port: int = 0
    report: Mapping[str, Readings] = field(default_factory=dict)
    counters: Mapping[str, Readings] = field(default_factory=dict)
    cached_in_prompt: bool = True
    load: str = ""
    read_load: Callable[[bytes], LoadReport | None] | None = None
    orca: str = ""
    answers: tuple[Rule, ...] = ()
    priority: str = ""
    urgent_is_low: bool = True
    request_id_header: str = ""
    request_id_field: str = ""
    salt_fields: tuple[str, ...] = ()
    signs: tuple[tuple[str, str], ...] = ()

    def priority_value(self, urgency: int) -> dict[str, int]:
        """The body field that says how urgent a request is; a higher `urgency` goes first. {} without priorities."""
        if not self.priority:
            return {}
        return {self.priority: -urgency if self.urgent_is_low else urgency}
