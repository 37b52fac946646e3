"""OpenTelemetry: metrics `gpuroute.*`, and one CLIENT span per attempt whose trace headers the endpoint receives.

A recording costs 4 to 8 us with the SDK, so a call makes at most three: its duration, that of the attempt which ended
it, and the time to its first byte. What the core counts in plain numbers anyway (retries, hedges, ejections) and what is
a state (in-flight, breakers) is read by observable instruments when the exporter asks, and costs a call nothing. Names
and units: docs/observability.md; attribute names of the semantic conventions are copied, because their package is beta.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from opentelemetry import metrics, trace
from opentelemetry.propagate import inject

from gpuroute.core.breaker import BreakerState
from gpuroute.observe import Observer, watched
from gpuroute.observe.logs import LOGGER, RateLimit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, MutableMapping

    from gpuroute.core.attempt import Attempt
    from gpuroute.core.call import Call
    from gpuroute.core.state import EndpointState

NAME = "gpuroute"
BOUNDARIES = tuple(0.01 * 2**n for n in range(14))  # 10 ms to 82 s: as the GenAI conventions advise for first chunks
MAX_ATTRIBUTE_SETS = 10_000
Attributes = dict[str, str | int]

COUNTERS: tuple[tuple[str, str, str, dict[str, Attributes]], ...] = (
    ("retries", "{attempt}", "Attempts after the first of a call", {"retries": {}}),
    ("hedges", "{attempt}", "Attempts beside one whose first byte was late", {"hedges": {}}),
    ("reroutes", "{attempt}", "Attempts beside one that still queued", {"reroutes": {}}),
    ("continuations", "{attempt}", "Attempts that go on with a stream which broke", {"continuations": {}}),
    (
        "denied",
        "{attempt}",
        "Attempts that were due, and for which no budget was left",
        {"retries_denied": {"gpuroute.attempt.kind": "retry"}, "hedges_denied": {"gpuroute.attempt.kind": "hedge"}},
    ),
    ("stalls", "{attempt}", "Attempts that were silent for longer than is normal", {"stalls": {}}),
    (
        "ejections",
        "{ejection}",
        "Endpoints taken out as outliers, and those that the cap kept in",
        {"ejections": {"gpuroute.enforced": True}, "ejections_unenforced": {"gpuroute.enforced": False}},
    ),
    (
        "breaker.changes",
        "{change}",
        "Breakers that went into a state",
        {
            "breaker_opened": {"gpuroute.breaker": "open"},
            "breaker_half_opened": {"gpuroute.breaker": "half_open"},
            "breaker_closed": {"gpuroute.breaker": "closed"},
        },
    ),
    ("pauses", "{pause}", "Pauses that endpoints asked for", {"pauses": {}}),
)
"""Name, unit, description, and which signals of the core are counted, each with its attributes."""

_troubles = RateLimit(60.0)


def installed() -> Observer | None:
    """An observer over what the process has installed, or None if the API has no SDK behind it."""
    tracer_provider, meter_provider = trace.get_tracer_provider(), metrics.get_meter_provider()
    if _is_placeholder(tracer_provider) and _is_placeholder(meter_provider):
        return None
    return OtelObserver(tracer_provider, meter_provider)


def _is_placeholder(provider: object) -> bool:
    """True for the API's own stand-ins: they pass on to an SDK that comes later, or do nothing."""
    return type(provider).__module__.startswith(("opentelemetry.trace", "opentelemetry.metrics"))


class OtelObserver(Observer):
    """Measures by the given providers. Trouble inside them is logged once a minute and never reaches a call."""

    def __init__(self, tracer_provider: trace.TracerProvider, meter_provider: metrics.MeterProvider) -> None:
        self._tracer = tracer_provider.get_tracer(NAME)
        meter = meter_provider.get_meter(NAME)
        self._call = _histogram(meter, "gpuroute.call.duration", "Calls, over all attempts and waits")
        self._attempt = _histogram(meter, "gpuroute.attempt.duration", "The attempt that ended each call")
        self._first = _histogram(meter, "gpuroute.time_to_first_byte", "From the call's start to its first byte")
        self._of_attempt: dict[tuple[str, str, str], Attributes] = {}
        self._of_call: dict[tuple[str, str], Attributes] = {}
        _observe_routers(meter)

    def attempt_started(self, call: Call, attempt: Attempt, headers: MutableMapping[str, str]) -> object:
        try:
            span = self._tracer.start_span(
                f"attempt {call.pool.name}", kind=trace.SpanKind.CLIENT, attributes=_start_attributes(call, attempt)
            )
            inject(headers, context=trace.set_span_in_context(span))
        except Exception as error:
            _report(error)
            return None
        return span

    def attempt_ended(self, token: object, call: Call, attempt: Attempt) -> None:
        super().attempt_ended(token, call, attempt)
        if isinstance(token, trace.Span):
            try:
                _end(token, attempt)
            except Exception as error:
                _report(error)

    def call_ended(self, call: Call, now: float) -> None:
        try:
            self._record(call, now)
        except Exception as error:
            _report(error)

    def _record(self, call: Call, now: float) -> None:
        # The attempt that answered, if one did: of two at once it need not be the last.
        last = next((attempt for attempt in reversed(call.history) if attempt.first is not None), None)
        last = last or (call.history[-1] if call.history else None)
        outcome = last.outcome.label if last is not None and last.outcome is not None else "not_sent"
        attributes = self._call_attributes(call.pool.name, outcome)
        self._call.record(now - call.started, attributes)
        if last is None:
            return
        self._attempt.record((last.ended or now) - last.started, self._attempt_attributes(call.pool.name, last, outcome))
        if last.first is not None:
            self._first.record(last.first - call.started, attributes)

    def _call_attributes(self, pool: str, outcome: str) -> Attributes:
        return _remembered(self._of_call, (pool, outcome), lambda: _with_error({"gpuroute.pool": pool}, outcome))

    def _attempt_attributes(self, pool: str, attempt: Attempt, outcome: str) -> Attributes:
        return _remembered(
            self._of_attempt,
            (pool, attempt.endpoint.id, outcome),
            lambda: _with_error(_endpoint_attributes(pool, attempt), outcome),
        )


def _remembered(known: dict[Any, Attributes], key: Any, build: Callable[[], Attributes]) -> Attributes:
    """The same attribute set is handed to the SDK again and again; endpoints that come and go must not pile up."""
    found = known.get(key)
    if found is None:
        if len(known) >= MAX_ATTRIBUTE_SETS:
            known.clear()
        found = known[key] = build()
    return found


def _with_error(attributes: Attributes, outcome: str) -> Attributes:
    attributes["gpuroute.outcome"] = outcome
    if outcome not in ("success", "cancelled"):
        attributes["error.type"] = outcome
    return attributes


def _endpoint_attributes(pool: str, attempt: Attempt) -> Attributes:
    url = urlsplit(attempt.endpoint.url)
    attributes: Attributes = {"gpuroute.pool": pool, "gpuroute.endpoint": attempt.endpoint.id}
    if url.hostname:
        attributes["server.address"] = url.hostname
        attributes["server.port"] = url.port or (443 if url.scheme in ("https", "grpcs") else 80)
    return attributes


def _start_attributes(call: Call, attempt: Attempt) -> Attributes:
    attributes = _endpoint_attributes(call.pool.name, attempt)
    attributes["gpuroute.attempt"] = attempt.number
    if attempt.number > 1 and attempt.endpoint.protocol == "http":
        attributes["http.request.resend_count"] = attempt.number - 1
    return attributes


def _end(span: trace.Span, attempt: Attempt) -> None:
    outcome = attempt.outcome.label if attempt.outcome is not None else "cancelled"
    if span.is_recording():
        span.set_attributes(_with_error({}, outcome))
        if outcome not in ("success", "cancelled"):
            span.set_status(trace.StatusCode.ERROR, attempt.reason or outcome)
    span.end()


def _report(error: Exception) -> None:
    if _troubles.admit(type(error).__name__) is not None:
        LOGGER.warning("OpenTelemetry failed, calls go on: %s", type(error).__name__)


# ------------------------------------------------------------------------------------------ instruments


def _histogram(meter: metrics.Meter, name: str, description: str) -> metrics.Histogram:
    try:
        return meter.create_histogram(
            name, unit="s", description=description, explicit_bucket_boundaries_advisory=BOUNDARIES
        )
    except TypeError:  # the API before 1.30 knows no such advice
        return meter.create_histogram(name, unit="s", description=description)


def _observe_routers(meter: metrics.Meter) -> None:
    meter.create_observable_gauge("gpuroute.endpoint.in_flight", [_in_flight], "{attempt}", "Live attempts")
    meter.create_observable_gauge("gpuroute.endpoint.state", [_states], "1", "1 for the state each endpoint is in")
    meter.create_observable_gauge("gpuroute.registry.age", [_ages], "s", "Age of the last good view of the registry")
    for name, unit, description, signals in COUNTERS:
        meter.create_observable_counter(f"{NAME}.{name}", [_counter(signals)], unit, description)


def _endpoints() -> Iterator[tuple[str, EndpointState]]:
    """The endpoints of every router of this process, with the names of their pools. No view of the router is built: an
    export of 10,000 endpoints needs three facts of each."""
    for router in watched():
        for pool in router.pools():
            pool.wake(router.clock())
            for state in pool.snapshot.states:
                yield pool.name, state


def _in_flight(_: metrics.CallbackOptions) -> list[metrics.Observation]:
    sums: dict[tuple[str, str], int] = {}
    for pool, state in _endpoints():
        sums[pool, state.id] = sums.get((pool, state.id), 0) + len(state.in_flight)
    return [
        metrics.Observation(number, {"gpuroute.pool": pool, "gpuroute.endpoint": endpoint})
        for (pool, endpoint), number in sums.items()
    ]


def _states(_: metrics.CallbackOptions) -> list[metrics.Observation]:
    return [
        metrics.Observation(number, {"gpuroute.pool": pool, "gpuroute.endpoint": endpoint, "gpuroute.state": name})
        for (pool, endpoint, name), number in Counter(
            (pool, state.id, _state(state)) for pool, state in _endpoints()
        ).items()
    ]


def _state(state: EndpointState) -> str:
    """What the registry says of an endpoint, or what its breaker knows better."""
    breaker = state.breaker.state
    return str(state.endpoint.state) if breaker is BreakerState.CLOSED else f"breaker_{breaker}"


def _counter(signals: dict[str, Attributes]) -> Callable[[metrics.CallbackOptions], list[metrics.Observation]]:
    """What reads these signals: one row per pool and attributes, added up over the routers of this process."""

    def read(_: metrics.CallbackOptions) -> list[metrics.Observation]:
        sums: dict[tuple[str, str], int] = {}
        for pool in (pool for router in watched() for pool in router.pools()):
            for name in signals:
                sums[pool.name, name] = sums.get((pool.name, name), 0) + getattr(pool.shared.signals, name)
        return [
            metrics.Observation(count, {"gpuroute.pool": pool, **signals[name]}) for (pool, name), count in sums.items()
        ]

    return read


def _ages(_: metrics.CallbackOptions) -> list[metrics.Observation]:
    ages = [age for router in watched() if (age := router.registry_age) is not None]
    return [metrics.Observation(max(ages))] if ages else []
