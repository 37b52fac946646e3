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
from bisect import bisect_left
from datetime import datetime
from heapq import merge
from importlib import resources
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MOONCAKE_TICK: Final = 3.0  # its timestamps sit on a 3 s grid: raw replay makes bursts that never were
_COPY_SHIFT: Final = 40  # a copy's ids start at copy << 40: no trace has that many blocks
_NAMED: Final = {"mooncake": "mooncake_conversation.jsonl.gz", "azure-conv": "azure2023_conv.csv.gz"}
_PROMPT_NAMES: Final = ("prompt_tokens", "input_length", "ContextTokens", "num_prefill_tokens", "input_tokens")
_OUTPUT_NAMES: Final = ("output_tokens", "output_length", "GeneratedTokens", "num_decode_tokens")
_TIME_NAMES: Final = ("at", "timestamp", "TIMESTAMP", "arrival_time")


class Request(NamedTuple):
    """One call: seconds since the start, lengths, prefix block hashes (512 tokens each) and its
    conversation.
    """

    at: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    session: int | None = None


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
    if source.startswith("synthetic"):
        return synthetic(source.partition(":")[2], seed=seed, seconds=seconds)
    if source in _NAMED:
        path = resources.files(__package__).joinpath("data", _NAMED[source])
        return _parse(source, gzip.decompress(path.read_bytes()).decode(), seed, seconds)
    file = Path(source)
    try:
        data = file.read_bytes()
    except OSError as error:
        known = ", ".join((*_NAMED, "synthetic:..."))
        raise ValueError(f"trace {source!r} is neither one of {known} nor a readable file: {error}") from None
    return _parse(file.name, (gzip.decompress(data) if file.suffix == ".gz" else data).decode(), seed, seconds)


def _parse(name: str, text: str, seed: int, seconds: float) -> Trace:
    head = text.lstrip()[:4096]
    if head.startswith("{") and '"clients"' in head.partition("\n")[0]:
        return servegen(name, json.loads(text), seed=seed, seconds=seconds)
    if head.startswith("{"):
        records: Iterable[dict[str, Any]] = (json.loads(line) for line in text.splitlines() if line.strip())
    else:
        records = csv.DictReader(io.StringIO(text))
    return _from_records(name, records, seed)


def _from_records(name: str, records: Iterable[dict[str, Any]], seed: int) -> Trace:
    random = Random(f"{seed}/spread")
    rows = []
    for number, record in enumerate(records, 1):
        try:
            rows.append(_row(record, random))
        except (ValueError, TypeError) as error:
            raise ValueError(f"trace {name}, record {number}: {error}") from None
    first = min((row.at for row in rows), default=0.0)
    return Trace(name, [row._replace(at=row.at - first) for row in rows])


def _row(record: dict[str, Any], random: Random) -> Request:
    at = _first(record, _TIME_NAMES)
    hashes = record.get("hash_ids")
    if hashes is not None:  # Mooncake: milliseconds on a 3 s grid
        seconds = float(at) / 1e3 + random.random() * MOONCAKE_TICK
        blocks = tuple(hashes)
        session: int | None = blocks[min(1, len(blocks) - 1)] if blocks else None
    else:
        seconds = _seconds(at)
        blocks = _own_blocks(record.get("blocks"))
        session = None if record.get("session") in (None, "") else int(record["session"])
    return Request(seconds, int(_first(record, _PROMPT_NAMES)), int(_first(record, _OUTPUT_NAMES)), blocks, session)


def _own_blocks(value: object) -> tuple[int, ...]:
    if not value:
        return ()
    return tuple(map(int, value.split() if isinstance(value, str) else list(value)))  # type: ignore[call-overload]


def _first(record: dict[str, Any], names: tuple[str, ...]) -> Any:
    for name in names:
        if name in record:
            return record[name]
    raise ValueError(f"it has none of the fields {', '.join(names)}")


def _seconds(value: str | float) -> float:
    try:
        return float(value)
    except ValueError:
        return datetime.fromisoformat(str(value)[:26]).timestamp()


def servegen(name: str, data: dict[str, Any], *, seed: int, seconds: float) -> Trace:
    """ServeGen clients: in each window of a client, arrivals are a Gamma or Weibull renewal process of
    its own.

    Starts at the busiest window of the file. Clients without token lengths are left out (the file lacks
    them).
    """
    random = Random(f"{seed}/servegen")
    width = float(data["window_s"])
    clients = [client for client in data["clients"] if client.get("tok")]
    windows = max(len(client["win"]) for client in clients)
    rates = [sum(c["win"][w][0] for c in clients if w < len(c["win"]) and c["win"][w]) for w in range(windows)]
    start = min(rates.index(max(rates)), max(0, windows - int(seconds // width) - 1))
    points = [point / 100 for point in data["quantile_points"]]
    rows = []
    for client in clients:
        tokens = client["tok"]
        inputs = next(field["q"] for key, field in tokens.items() if "input" in key or "prompt" in key)
        outputs = next(field["q"] for key, field in tokens.items() if "output" in key)
        for at in _renewals(client["win"][start:], width, seconds, random):
            prompt, output = (_quantile(points, q, random.random()) for q in (inputs, outputs))
            rows.append(Request(at, prompt, output, (), int(client["id"])))
    return Trace(name, rows, seconds)


def _renewals(windows: list[list[Any]], width: float, seconds: float, random: Random) -> Iterator[float]:
    for index, window in enumerate(windows):
        if not window or index * width >= seconds:
            continue
        _, _, pattern, shape, scale = window
        at, end = index * width, min((index + 1) * width, seconds)
        while True:
            at += random.gammavariate(shape, scale) if pattern == "G" else random.weibullvariate(scale, shape)
            if at >= end:
                break
            yield at


def _quantile(points: list[float], values: list[float], chance: float) -> int:
    for index in range(1, len(points)):
        if chance <= points[index]:
            low, high = points[index - 1], points[index]
            share = (chance - low) / (high - low)
            return max(1, round(values[index - 1] + share * (values[index] - values[index - 1])))
    return max(1, round(values[-1]))


def synthetic(options: str, *, seed: int, seconds: float) -> Trace:
    """Poisson arrivals of log-normal lengths: `rate` (1/s), `prompt`, `output` (mean tokens), `sigma`, and
    `groups` prompts of `shared` tokens that the calls have in common (Zipf popularity), e.g. system prompts.
    """
    values = {"rate": 10.0, "prompt": 1000.0, "output": 200.0, "sigma": 0.8, "groups": 0.0, "shared": 0.0}
    for part in filter(None, options.split(",")):
        key, _, value = part.partition("=")
        if key not in values:
            raise ValueError(f"synthetic trace: unknown option {key!r}; known are {', '.join(values)}")
        values[key] = float(value)
    random, at, rows = Random(f"{seed}/synthetic"), 0.0, []
    groups = int(values["groups"])
    weights = [1 / rank for rank in range(1, groups + 1)]
    depth = int(values["shared"]) // 512
    while (at := at + random.expovariate(values["rate"])) < seconds:
        prompt, output = (_lognormal(random, values[key], values["sigma"]) for key in ("prompt", "output"))
        group = random.choices(range(groups), weights)[0] if groups else None
        blocks = () if group is None else tuple(group << 12 | level for level in range(depth))
        rows.append(Request(at, prompt + 512 * len(blocks), output, blocks, group))
    return Trace("synthetic", rows, seconds)


def _lognormal(random: Random, mean: float, sigma: float) -> int:
    return max(1, round(mean * random.lognormvariate(-sigma * sigma / 2, sigma) if sigma else mean))
