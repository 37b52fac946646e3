"""Where simulated calls come from: recorded traces, files of one's own, and generators.

A trace is a list of requests in order of time. It is scaled up by `superpose`: K copies, each shifted by
its own random time and with its own block and session ids. Compressing time instead would shrink the gaps
between the turns of a conversation, and so promise cache hits that no fleet of that size would see.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from bisect import bisect_left
from datetime import datetime
from heapq import merge
from importlib import resources
from math import isfinite, nan
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

from .generators import servegen, synthetic
from .request import Request

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Request", "Trace", "load_trace"]

MOONCAKE_TICK: Final = 3.0  # its timestamps sit on a 3 s grid: raw replay makes bursts that never were
MOST_TOKENS: Final = 10_000_000  # of one prompt, or of one answer
_COPY_SHIFT: Final = 40  # a copy's ids start at copy << 40: no trace has that many blocks
_NAMED: Final = {"mooncake": "mooncake_conversation.jsonl.gz", "azure-conv": "azure2023_conv.csv.gz"}
_PROMPT_NAMES: Final = ("prompt_tokens", "input_length", "ContextTokens", "num_prefill_tokens", "input_tokens")
_OUTPUT_NAMES: Final = ("output_tokens", "output_length", "GeneratedTokens", "num_decode_tokens")
_TIME_NAMES: Final = ("at", "timestamp", "TIMESTAMP", "arrival_time")


class Trace:
    """Requests in order of time over `span` seconds."""

    __slots__ = ("name", "rows", "span")

    def __init__(self, name: str, rows: Iterable[Request], span: float = 0.0) -> None:
        self.name = name
        self.rows = sorted(rows, key=lambda row: row.at)
        if not self.rows:
            raise ValueError(f"trace {name}: no requests")
        self.span = span or self.rows[-1].at + 1e-9

    @property
    def rate(self) -> float:
        """Requests per second of one copy."""
        return len(self.rows) / self.span

    def superpose(self, copies: int, seed: int, until: float, *, common: int = 0) -> Iterator[Request]:
        """The requests of `copies` shifted copies before `until`. Blocks with an id below `common`
        stay shared.

        Copy 0 is not shifted, so that one copy is the trace itself; the trace repeats when `until`
        is beyond it.
        """
        random = Random(f"{seed}/superpose")
        shifts = [0.0] + [random.random() * self.span for _ in range(copies - 1)]
        return merge(*(self._copy(copy, shift, until, common) for copy, shift in enumerate(shifts)), key=_at)

    def _copy(self, copy: int, shift: float, until: float, common: int) -> Iterator[Request]:
        salt, span, rows = copy << _COPY_SHIFT, self.span, self.rows
        start = bisect_left(rows, shift, key=_at) % len(rows)
        base = -shift if rows[start].at >= shift else span - shift
        while True:
            for index in range(start, len(rows)):
                row = rows[index]
                at = row.at + base
                if at >= until:
                    return
                blocks = tuple([block + salt if block >= common else block for block in row.blocks])
                session = None if row.session is None else row.session + salt
                yield Request(at, row.prompt_tokens, row.output_tokens, blocks, session)
            start, base = 0, base + span


def _at(request: Request) -> float:
    return request.at


def load_trace(source: str, *, seed: int = 0, seconds: float = 3600.0) -> Trace:
    """A trace by name (`mooncake`, `azure-conv`), by file (CSV, JSONL, ServeGen JSON; .gz too), or
    generated.

    `synthetic:rate=5,prompt=1000,output=200,...` is generated for `seconds`, as is a ServeGen file.
    ValueError says what is wrong with a source.
    """
    if source == "synthetic" or source.startswith("synthetic:"):
        return Trace("synthetic", synthetic(source.partition(":")[2], seed=seed, seconds=seconds), seconds)
    if source in _NAMED:
        path = resources.files(__package__).joinpath("data", _NAMED[source])
        return _parse(source, gzip.decompress(path.read_bytes()).decode(), seed, seconds)
    file = Path(source)
    try:
        data = file.read_bytes()
    except (OSError, ValueError) as error:
        known = ", ".join((*_NAMED, "synthetic:..."))
        raise ValueError(f"trace {source!r} is neither one of {known} nor a readable file: {error}") from None
    try:
        text = (gzip.decompress(data) if file.suffix == ".gz" else data).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(
            f"trace {file.name}: expected {'gzip of ' * (file.suffix == '.gz')}UTF-8 text: {error}"
        ) from None
    return _parse(file.name, text, seed, seconds)


def _parse(name: str, text: str, seed: int, seconds: float) -> Trace:
    head = text.lstrip()[:4096]
    if head.startswith("{") and '"clients"' in head.partition("\n")[0]:
        try:
            return Trace(name, servegen(json.loads(text), seed=seed, seconds=seconds), seconds)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"trace {name}: {error}") from None
    if head.startswith("{"):
        records: Iterable[Any] = (line for line in text.splitlines() if line.strip())
    else:
        records = csv.DictReader(io.StringIO(text))
    return _from_records(name, records, seed)


def _from_records(name: str, records: Iterable[Any], seed: int) -> Trace:
    """Records are lines of JSON, or objects."""
    random = Random(f"{seed}/spread")
    rows = list(_rows(name, records, random))
    first = min((row.at for row in rows), default=0.0)
    return Trace(name, [row._replace(at=row.at - first) for row in rows])


def _rows(name: str, records: Iterable[Any], random: Random) -> Iterator[Request]:
    done = 0
    try:
        for record in records:
            yield _row(json.loads(record) if isinstance(record, str) else record, random)
            done += 1
    except (ValueError, TypeError, csv.Error, RecursionError) as error:
        raise ValueError(f"trace {name}, record {done + 1}: {error}") from None


def _row(record: Any, random: Random) -> Request:
    if not isinstance(record, dict):
        raise TypeError("expected a JSON object")
    name, at = _first(record, _TIME_NAMES)
    prompt, output = (_tokens(*_first(record, names)) for names in (_PROMPT_NAMES, _OUTPUT_NAMES))
    if (hashes := record.get("hash_ids")) is not None:  # Mooncake: milliseconds on a 3 s grid
        seconds = _seconds(name, at) / 1e3 + random.random() * MOONCAKE_TICK
        blocks = _ids("hash_ids", hashes)
        session: int | None = blocks[min(1, len(blocks) - 1)] if blocks else None
    else:
        seconds = _seconds(name, at)
        blocks = _ids("blocks", record.get("blocks") or ())
        session = None if (own := record.get("session")) in (None, "") else _ids("session", [own])[0]
    return Request(seconds, prompt, output, blocks, session)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    """Whole numbers, in a list or separated by spaces."""
    items = value.split() if isinstance(value, str) else value
    try:
        return tuple([item if type(item) is int else int(str(item)) for item in items])
    except (ValueError, TypeError):
        raise ValueError(f"{name} is {str(value)[:40]!r}; expected whole numbers") from None


def _tokens(name: str, value: Any) -> int:
    try:
        tokens = int(value if isinstance(value, str | int) else str(value))
    except ValueError:
        tokens = -1
    if not 0 <= tokens <= MOST_TOKENS:
        raise ValueError(f"{name} is {str(value)[:40]!r}; expected a whole number of tokens, at most {MOST_TOKENS}")
    return tokens


def _first(record: dict[str, Any], names: tuple[str, ...]) -> tuple[str, Any]:
    for name in names:
        if name in record:
            return name, record[name]
    raise ValueError(f"it has none of the fields {', '.join(names)}")


def _seconds(name: str, value: Any) -> float:
    try:
        seconds = float(value)
    except (ValueError, TypeError):
        try:
            seconds = datetime.fromisoformat(str(value)[:26]).timestamp()
        except ValueError:
            seconds = nan
    if not isfinite(seconds):
        raise ValueError(f"{name} is {str(value)[:40]!r}; expected a number or a date with its time")
    return seconds
