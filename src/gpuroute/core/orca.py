"""Load that a server reports about itself: one form for all dialects, and the ORCA ones read here.

A report rides on an ordinary response, so it costs no request. Three encodings exist: `TEXT name=value, ...` and
`JSON {...}` in the HTTP header `endpoint-load-metrics` (sent only to those who ask with
`endpoint-load-metrics-format`), and a serialised `xds.data.orca.v3.OrcaLoadReport` in the gRPC trailer
`endpoint-load-metrics-bin`. Its nine fields do not justify a protobuf dependency.

Reports are hints from outside: whatever is malformed, negative or not finite counts as not reported, nothing raises.
"""

from __future__ import annotations

import json
from base64 import b64decode
from struct import unpack
from typing import TYPE_CHECKING, Any, NamedTuple

from gpuroute.core.wire import Message, WireError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

FORMAT_HEADER = "endpoint-load-metrics-format"
REPORT_HEADER = "endpoint-load-metrics"
REPORT_TRAILERS = ("endpoint-load-metrics-bin", "x-endpoint-load-metrics-bin")

_MAX_SIZE = 16 * 1024
MOST = 1e15  # more is no load but nonsense, and would be in the means of a whole pool


class LoadReport(NamedTuple):
    """What an engine said of its load at one moment; None means that it did not say, never that it is idle."""

    running: float | None = None
    """Sequences in execution."""
    waiting: float | None = None
    """Requests queued before execution."""
    kv_usage: float | None = None
    """Share of the KV cache in use, 0 to 1."""
    queued_tokens: float | None = None
    """Uncached prompt tokens still to be prefilled."""
    in_flight: float | None = None
    """Requests accepted and not yet answered, where running and waiting are not told apart."""
    kv_tokens: float | None = None
    """Capacity of the KV cache in tokens."""
    utilization: float | None = None
    """Use of the machine as ORCA understands it, 1 being full."""

    @property
    def requests(self) -> float | None:
        """Requests in the engine: running and waiting, as far as they are known."""
        if self.running is None and self.waiting is None:
            return self.in_flight
        return (self.running or 0.0) + (self.waiting or 0.0)


_NAMES = {
    "running": ("num_requests_running", "num_running_reqs", "requests_processing", "running"),
    "waiting": ("num_requests_waiting", "num_queue_reqs", "requests_deferred", "waiting"),
    "kv_usage": ("kv_cache_usage_perc", "kv_cache_utilization", "gpu_cache_usage_perc", "token_usage", "kv_usage"),
    "queued_tokens": ("queued_tokens", "num_waiting_uncached_tokens", "num_queued_tokens"),
    "in_flight": ("in_flight", "server_load"),
    "kv_tokens": ("kv_tokens", "max_token_capacity", "max_total_num_tokens"),
    "utilization": ("application_utilization", "cpu_utilization"),
}
_FIELD = {name: field for field, names in _NAMES.items() for name in names}


def report_of(values: Iterable[tuple[str, object]]) -> LoadReport | None:
    """A report from named values, of any dialect; None if no name is known."""
    found: dict[str, float] = {}
    for name, value in values:
        field = _FIELD.get(name)
        if field and field not in found and (number := as_load(value)) is not None:
            found[field] = min(number, 1.0) if field == "kv_usage" else number
    return LoadReport(**found) if found else None


def as_load(value: object) -> float | None:
    """`value` as a number that is not negative and can be a load, else None."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return number if 0 <= number <= MOST else None


def parse_orca(text: str) -> LoadReport | None:
    """The report in an `endpoint-load-metrics` header of any encoding; None if there is none."""
    if len(text) > _MAX_SIZE:
        return None
    kind, _, rest = text.strip().partition(" ")
    match kind.upper():
        case "JSON":
            return _from_json(rest)
        case "TEXT":
            return _from_text(rest)
        case "BIN":
            return _from_base64(rest)
    return _from_json(text) if kind.startswith("{") else _from_text(text)


def parse_orca_bin(data: bytes) -> LoadReport | None:
    """The report in a serialised OrcaLoadReport (a gRPC `-bin` trailer); None if there is none."""
    if len(data) > _MAX_SIZE:
        return None
    try:
        return report_of(list(_from_wire(data)))
    except WireError:
        return None


def _from_text(text: str) -> LoadReport | None:
    pairs = (item.partition("=") for item in text.split(","))
    return report_of((name.strip().removeprefix("named_metrics."), value) for name, _, value in pairs)


def _from_json(text: str) -> LoadReport | None:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return report_of(_flat(fields)) if isinstance(fields, dict) else None


def _flat(fields: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    named = fields.get("named_metrics", fields.get("namedMetrics"))
    if isinstance(named, dict):
        yield from named.items()
    yield from fields.items()
    yield "application_utilization", fields.get("applicationUtilization")
    yield "cpu_utilization", fields.get("cpuUtilization")


def _from_base64(text: str) -> LoadReport | None:
    try:
        return parse_orca_bin(b64decode(text, validate=True))
    except ValueError:
        return None


def _from_wire(data: bytes) -> Iterator[tuple[str, object]]:
    """Names and values of an OrcaLoadReport; named metrics are field 8, a map. As proto3 has it, 0 is not sent."""
    message = Message(data)
    for entry in message.messages(8):
        yield entry.text(1), _double(entry, 2)
    yield "application_utilization", _double(message, 9) or None
    yield "cpu_utilization", _double(message, 1) or None


def _double(message: Message, number: int) -> float:
    return float(unpack("<d", message.integer(number).to_bytes(8, "little", signed=True))[0])
