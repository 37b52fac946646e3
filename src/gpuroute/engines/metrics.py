"""Load figures out of a page in Prometheus text form.

An own bounded scanner: it looks only for the names that an engine's table mentions, so a page of 54 KB with 700 series
costs a fraction of a millisecond, where a full parse (the `prometheus-client` parser) takes 15 ms and is one dependency
more; an agent does this twice a second. It accepts `:` in names, any labels with escapes, timestamps and exemplars,
skips what it cannot read and never raises.
"""

from __future__ import annotations

import re
from functools import lru_cache
from math import isfinite, prod
from typing import TYPE_CHECKING, NamedTuple

from gpuroute.core.orca import LoadReport, as_load

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from .engine import Engine, Reading, Readings

MAX_PAGE = 8 * 1024 * 1024
"""Bytes of a page that are looked at."""

PIECE = 32 * 1024
"""Bytes of a page that are read in a row, a tenth of a millisecond, by who has other things to do."""

# Within a line, even in quotes: else a page of quotes that never end is read once for each of its lines.
_LABELS = r'(?:\{((?:[^"}\n]|"(?:[^"\\\n]|\\.)*")*)\})?'
_LABEL = re.compile(r'([A-Za-z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"')

STARTED = "process_start_time_seconds"
"""What Prometheus clients say of the process that they run in."""

Series = tuple[str, float]


class Metrics(NamedTuple):
    """What a page of metrics said.

    `counters` grow for ever (their differences give rates, and `steps` standing still while requests run means hung):
    `prompt_tokens` (computed, without cached ones), `cached_tokens`, `generated_tokens`, `steps`, `preemptions`,
    `rejected`. One that the engine does not have is absent. `awake` is False for an engine put to sleep. `started`: since
    when its process runs, in seconds since 1970; 0.0 if it does not say, or counts on a port of its own, which may be
    another process's.
    """

    report: LoadReport
    counters: Mapping[str, float]
    awake: bool = True
    started: float = 0.0


def read_metrics(engine: Engine, page: bytes) -> Metrics | None:
    """The load figures of an engine's page; None if it contains none of them."""
    return _metrics(engine, scan(page, _names(engine)))


class Reader:
    """The same, piece by piece, for who has other things to do in between."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._series: dict[str, list[Series]] = {}

    def read(self, piece: bytes) -> None:
        """Some whole lines."""
        for name, found in scan(piece, _names(self._engine)).items():
            self._series.setdefault(name, []).extend(found)

    @property
    def metrics(self) -> Metrics | None:
        """What all of them said."""
        return _metrics(self._engine, self._series)


def pieces(page: bytes) -> Iterator[bytes]:
    """Whole lines, as many as fit into `PIECE` bytes, or one that does not."""
    start, end = 0, min(len(page), MAX_PAGE)
    while start < end:
        last = page.rfind(b"\n", start, start + PIECE) if end - start > PIECE else end - 1
        stop = last + 1 if last > start else page.find(b"\n", start + PIECE, end) + 1 or end
        yield page[start:stop]
        start = stop


def _metrics(engine: Engine, series: Mapping[str, list[Series]]) -> Metrics | None:
    if not series.keys() - {STARTED}:
        return None
    report = {name: value for name, found in engine.report.items() if (value := _figure(series, found)) is not None}
    counters = {name: n for name, found in engine.counters.items() if (n := _figure(series, found)) is not None}
    awake = counters.pop("awake", 1.0) > 0
    cached = counters.get("cached_tokens", 0.0)
    if engine.cached_in_prompt and "prompt_tokens" in counters:
        counters["prompt_tokens"] = max(0.0, counters["prompt_tokens"] - cached)
    return Metrics(LoadReport(**report), counters, awake, _started(engine, series))


def _started(engine: Engine, series: Mapping[str, list[Series]]) -> float:
    found = series.get(STARTED, [])
    return found[0][1] if len(found) == 1 and not engine.metrics_port and 0 < found[0][1] < 2**32 else 0.0


def scan(page: bytes, names: frozenset[str]) -> dict[str, list[Series]]:
    """Every series of these names: name -> (text of its labels, value). NaN and infinities are left out."""
    found: dict[str, list[Series]] = {}
    for name, labels, text in _pattern(names).findall("\n" + page[:MAX_PAGE].decode("utf-8", "replace")):
        try:
            value = float(text)
        except ValueError:
            continue
        if isfinite(value):
            found.setdefault(name, []).append((labels, value))
    return found


def labels_of(text: str) -> dict[str, str]:
    """The labels in the braces of one series."""
    found = _LABEL.findall(text)
    return {name: re.sub(r"\\(.)", _unescaped, value) for name, value in found} if "\\" in text else dict(found)


def _unescaped(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]


@lru_cache(maxsize=64)
def _pattern(names: frozenset[str]) -> re.Pattern[str]:
    either = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return re.compile(rf"\n({either}){_LABELS}[ \t]+(\S+)")  # a letter to look for: a third of the time of `^`


@lru_cache(maxsize=64)
def _names(engine: Engine) -> frozenset[str]:
    tables: Iterable[Readings] = (*engine.report.values(), *engine.counters.values())
    return frozenset((STARTED, *(name for readings in tables for r in readings for name in (*r.names, *r.plus))))


def _figure(series: Mapping[str, list[Series]], readings: Readings) -> float | None:
    values = [_value(series, reading) for reading in readings]
    known = [value for value in values if value is not None]
    return as_load(prod(known)) if len(known) == len(values) else None


def _value(series: Mapping[str, list[Series]], reading: Reading) -> float | None:
    found = next((kept for name in reading.names if (kept := _kept(series.get(name, []), reading))), None)
    if found is None:
        return None
    total = sum(value for _, value in found) if not reading.labels else sum(_product(r, reading) for r, _ in found)
    total += sum(value for name in reading.plus for _, value in series.get(name, []))
    return min(total / len(found), 1.0) if reading.share else total


def _kept(series: list[Series], reading: Reading) -> list[Series]:
    if reading.where is None:
        return series
    label, wanted = reading.where
    return [one for one in series if labels_of(one[0]).get(label) == wanted]


def _product(text: str, reading: Reading) -> float:
    labels = labels_of(text)
    return prod(as_load(labels.get(name)) or 0.0 for name in reading.labels)
