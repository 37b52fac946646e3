"""Observers: what is measured, that it is little, that it costs nothing without an SDK and never hurts a call."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import context, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import gpuroute
from gpuroute import observe
from gpuroute.core import describe
from gpuroute.core.call import Call
from gpuroute.core.endpoint import Endpoint
from gpuroute.core.fleet import Fleet, PoolSpec
from gpuroute.core.outcome import Outcome
from gpuroute.core.pool import Pool, PoolRules
from gpuroute.observe import Observer, logs, watch
from gpuroute.observe.logs import RateLimit
from gpuroute.observe.otel import OtelObserver, installed
from gpuroute.testing import FakeRegistry

CANARY = "canary-7d1"


@pytest.fixture(autouse=True)
def no_other_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers of earlier tests may still wait for the garbage collector."""
    monkeypatch.setattr(observe, "_routers", set())


@pytest.fixture(autouse=True)
def fresh_rate_limit(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Failures of other tests must not silence this one's; the returned list holds the time."""
    now = [0.0]
    monkeypatch.setattr(logs, "_limit", RateLimit(10.0, lambda: now[0]))
    return now


def make_pool(size: int = 3) -> Pool:
    endpoints = tuple(
        Endpoint(f"gpu-{n}", f"http://user:{CANARY}@10.0.0.{n}:8000/v1", headers={"authorization": CANARY})
        for n in range(size)
    )
    return Pool(PoolSpec("llama", endpoints), PoolRules(policy="p2c"), random=random.Random(7).random)


class FakeRouter:
    """What the gauges read."""

    registry_age = 2.5

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def clock(self) -> float:
        return 0.0

    def pools(self) -> tuple[Pool, ...]:
        return (self.pool,)


class Recorded:
    """An observer over an SDK of its own."""

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self.exporter = InMemorySpanExporter()
        tracers = TracerProvider()
        tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.observer = OtelObserver(tracers, MeterProvider([self.reader]))

    def points(self, name: str) -> list[Any]:
        data = self.reader.get_metrics_data()
        scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics] if data else []
        return [p for scope in scopes for m in scope.metrics if m.name == name for p in m.data.data_points]

    def recordings(self) -> int:
        return sum(
            point.count
            for name in ("gpuroute.call.duration", "gpuroute.attempt.duration", "gpuroute.time_to_first_byte")
            for point in self.points(name)
        )


def drive(observer: Observer, pool: Pool, outcomes: list[Outcome], headers: dict[str, str] | None = None) -> Call:
    """One call with an attempt per outcome, as a transport drives it: attempts last 1 s, bytes come halfway."""
    now = 100.0
    call = Call(pool, now)
    for outcome in outcomes:
        attempt = call.next_attempt(now)
        token = observer.attempt_started(call, attempt, {} if headers is None else headers)
        attempt.sent(now)
        if outcome is Outcome.SUCCESS:
            attempt.first_token(now + 0.5)
        now += 1.0
        call.finish(attempt, outcome, now, reason="" if outcome is Outcome.SUCCESS else "503")
        observer.attempt_ended(token, call, attempt)
    observer.call_ended(call, now)
    return call


def test_a_call_makes_three_recordings_however_often_it_is_retried() -> None:
    for outcomes in ([Outcome.SUCCESS], [Outcome.FAILED, Outcome.FAILED, Outcome.SUCCESS], [Outcome.FAILED]):
        recorded = Recorded()
        drive(recorded.observer, make_pool(), outcomes)
        assert recorded.recordings() == (3 if Outcome.SUCCESS in outcomes else 2)


def test_durations_span_what_their_names_say() -> None:
    recorded = Recorded()
    call = drive(recorded.observer, make_pool(), [Outcome.FAILED, Outcome.SUCCESS])
    endpoint = call.history[-1].endpoint
    [whole], [last], [first] = (
        recorded.points(f"gpuroute.{name}") for name in ("call.duration", "attempt.duration", "time_to_first_byte")
    )
    assert (whole.sum, last.sum, first.sum) == (2.0, 1.0, 1.5)
    assert dict(whole.attributes) == {"gpuroute.pool": "llama", "gpuroute.outcome": "success"}
    assert dict(last.attributes) == {
        "gpuroute.pool": "llama",
        "gpuroute.endpoint": endpoint.id,
        "server.address": f"10.0.0.{endpoint.id[-1]}",
        "server.port": 8000,
        "gpuroute.outcome": "success",
    }


def test_a_call_that_was_never_sent_is_recorded_too() -> None:
    recorded = Recorded()
    pool = make_pool(0)
    recorded.observer.call_ended(Call(pool, 1.0), 3.0)
    [point] = recorded.points("gpuroute.call.duration")
    assert point.sum == 2.0
    assert point.attributes["error.type"] == "not_sent"


def test_one_client_span_per_attempt_under_the_callers_span() -> None:
    recorded = Recorded()
    headers: dict[str, str] = {}
    parent = trace.NonRecordingSpan(trace.SpanContext(1, 2, is_remote=False, trace_flags=trace.TraceFlags(1)))
    token = context.attach(trace.set_span_in_context(parent))
    try:
        drive(recorded.observer, make_pool(), [Outcome.FAILED, Outcome.SUCCESS], headers)
    finally:
        context.detach(token)
    failed, served = recorded.exporter.get_finished_spans()
    for span in (failed, served):
        assert span.kind is trace.SpanKind.CLIENT
        assert span.parent is not None
        assert span.parent.span_id == 2
    assert failed.status.status_code is trace.StatusCode.ERROR
    assert failed.attributes["error.type"] == "failed"
    assert served.status.status_code is trace.StatusCode.UNSET
    assert served.attributes["http.request.resend_count"] == 1
    # Each attempt sends its own span's id: after the second, the headers name the second.
    assert headers["traceparent"] == f"00-{1:032x}-{served.context.span_id:016x}-01"


def test_gauges_read_the_routers_that_live() -> None:
    recorded = Recorded()
    pool = make_pool(2)
    router = FakeRouter(pool)
    watch(router)
    call = Call(pool, 0.0)
    busy = call.next_attempt(0.0)
    in_flight = {p.attributes["gpuroute.endpoint"]: p.value for p in recorded.points("gpuroute.endpoint.in_flight")}
    assert in_flight == {"gpu-0": 0, "gpu-1": 0} | {busy.endpoint.id: 1}
    for _ in range(5):
        pool.shared.in_flight.discard(busy)
        busy.state.breaker.failed(busy, 1.0, random.random)
    states = {
        p.attributes["gpuroute.endpoint"]: p.attributes["gpuroute.state"]
        for p in recorded.points("gpuroute.endpoint.state")
    }
    assert states == {"gpu-0": "ready", "gpu-1": "ready"} | {busy.endpoint.id: "breaker_open"}
    assert [point.value for point in recorded.points("gpuroute.registry.age")] == [2.5]
    assert [point.value for point in recorded.points("gpuroute.retries")] == [0]
    call.close(2.0)
    del router
    assert recorded.points("gpuroute.endpoint.in_flight") == []


def test_an_export_describes_no_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view holds fifteen facts of each; building two per export took 1,100 steps for each of 10,000 endpoints."""
    recorded = Recorded()
    router = gpuroute.Router(endpoints={"llama": [f"http://10.0.0.{n}:8000" for n in range(100)]})
    router.start()
    watch(router)
    described: list[object] = []
    monkeypatch.setattr(describe, "describe_endpoint", lambda state, now: described.append(state))
    assert len(recorded.points("gpuroute.endpoint.in_flight")) == 100
    assert len(recorded.points("gpuroute.endpoint.state")) == 100
    assert described == []


def test_gauges_see_what_has_fallen_due_without_a_call() -> None:
    recorded = Recorded()
    router = FakeRouter(make_pool(1))
    watch(router)
    state = router.pool.snapshot.states[0]
    for _ in range(5):
        state.acquire(0.0).finish(Outcome.FAILED, 1.0)
    [before] = recorded.points("gpuroute.endpoint.state")
    router.clock = lambda: 1_000.0
    [after] = recorded.points("gpuroute.endpoint.state")
    seen = [point.attributes["gpuroute.state"] for point in (before, after)]
    assert seen == ["breaker_open", "breaker_half_open"]


def test_the_registrys_age_is_since_it_was_heard_not_since_the_fleet_changed() -> None:
    """A fleet that did not change for days is not old, and one whose registry was lost a moment ago is not new."""
    recorded = Recorded()
    now = [0.0]
    quiet = gpuroute.Router(endpoints=["http://10.0.0.1:8000"], clock=lambda: now[0])
    watch(quiet)
    assert recorded.points("gpuroute.registry.age") == []
    quiet.start()
    now[0] = 86_400.0
    assert [point.value for point in recorded.points("gpuroute.registry.age")] == [0.0]
    registry = FakeRegistry(Fleet({"llama": PoolSpec("llama")}, as_of=time.time() - 600))
    lost = gpuroute.Router(registry)
    lost.start()
    registry.go_stale()
    watch(lost)
    [point] = recorded.points("gpuroute.registry.age")
    assert point.value >= 600
    age = lost.snapshot().registry_age_s
    assert age is not None
    assert age >= 600


def test_counters_read_what_the_core_counts_over_all_routers() -> None:
    recorded = Recorded()
    pools = [make_pool(3), make_pool(3)]
    routers = [FakeRouter(pool) for pool in pools]
    for router in routers:
        watch(router)
    for pool in pools:
        state, other = pool.snapshot.states[:2]
        attempts = [state.acquire(0.0) for _ in range(6)]
        for attempt in attempts[:5]:
            attempt.finish(Outcome.FAILED, 1.0)  # open
        state.tick(1_000.0)  # half open
        state.acquire(1_000.0).finish(Outcome.SUCCESS, 1_001.0)  # closed
        other.pause(5.0)
        other.pause(4.0)  # no later than it was
        pool.outliers.eject(other, pool.snapshot.states, pool.shared, 1.0, 10.0)
        pool.outliers.eject(pool.snapshot.states[2], pool.snapshot.states, pool.shared, 1.0, 10.0)  # forbidden by the cap
        pool.stalled(attempts[5], 9.0)
        pool.shared.signals.hedges += 3
        pool.shared.signals.hedges_denied += 2

    def counted(name: str, attribute: str = "") -> dict[Any, int]:
        points = recorded.points(f"gpuroute.{name}")
        assert {point.attributes["gpuroute.pool"] for point in points} == {"llama"}
        return {point.attributes.get(attribute): point.value for point in points}

    assert counted("breaker.changes", "gpuroute.breaker") == {"open": 2, "half_open": 2, "closed": 2}
    assert counted("ejections", "gpuroute.enforced") == {True: 2, False: 2}
    assert counted("denied", "gpuroute.attempt.kind") == {"retry": 0, "hedge": 4}
    assert [counted(name) for name in ("pauses", "stalls", "hedges")] == [{None: 2}, {None: 2}, {None: 6}]
    for name in ("retries", "reroutes", "continuations"):
        assert counted(name) == {None: 0}
    assert recorded.recordings() == 0


def test_c4_telemetry_and_logs_hold_no_credentials(caplog: pytest.LogCaptureFixture) -> None:
    recorded = Recorded()
    pool = make_pool()
    router = FakeRouter(pool)
    watch(router)
    with caplog.at_level(logging.DEBUG):
        drive(recorded.observer, pool, [Outcome.FAILED, Outcome.SUCCESS])
    spans = "".join(span.to_json() for span in recorded.exporter.get_finished_spans())
    records = "".join(repr(vars(record)) for record in caplog.records)
    data = recorded.reader.get_metrics_data()
    assert data is not None
    assert "gpu-" in spans
    assert "gpu-" in records
    assert [text for text in (spans, records, data.to_json()) if CANARY in text] == []


def test_trouble_inside_telemetry_never_reaches_a_call(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("exporter is broken")

    recorded = Recorded()
    recorded.observer._tracer = recorded.observer._call = Broken()  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING):
        call = drive(recorded.observer, make_pool(), [Outcome.SUCCESS])
    assert call.history[0].outcome is Outcome.SUCCESS
    assert [r.getMessage() for r in caplog.records if "OpenTelemetry failed" in r.getMessage()] != []


def test_failures_are_logged_once_per_interval_with_a_count(
    caplog: pytest.LogCaptureFixture, fresh_rate_limit: list[float]
) -> None:
    observer, pool = Observer(), make_pool(1)
    with caplog.at_level(logging.WARNING, "gpuroute"):
        for _ in range(4):
            drive(observer, pool, [Outcome.FAILED])
        drive(observer, pool, [Outcome.CANCELLED])
        fresh_rate_limit[0] = 10.0
        drive(observer, pool, [Outcome.FAILED])
    records = [record for record in caplog.records if "gpu-0" in record.getMessage()]  # other tests' threads may log too
    assert [record.getMessage() for record in records] == [
        "pool llama: attempt 1 at gpu-0: 503",
        "pool llama: attempt 1 at gpu-0: 503 (and 3 more since the last line)",
    ]
    assert records[1].gpuroute["left_out"] == 3  # type: ignore[attr-defined]


def test_a_whole_fleet_that_is_ill_does_not_flood_the_log(
    fresh_rate_limit: list[float],
) -> None:
    limit = logs._limit
    lines = 0
    for second in range(20):
        fresh_rate_limit[0] = float(second)
        lines += sum(limit.admit(("llama", f"gpu-{n}", "failed")) is not None for n in range(5_000))
        assert len(limit._seen) <= logs.MAX_KEYS + 1
    assert logs.MAX_KEYS <= lines <= 2 * (logs.MAX_KEYS + 1)


def test_what_the_log_leaves_out_of_an_ill_fleet_is_counted(fresh_rate_limit: list[float]) -> None:
    limit = logs._limit
    told = [limit.admit(n) for n in range(1_000)]
    assert [count for count in told if count is not None] == [0] * (logs.MAX_KEYS + 1)
    fresh_rate_limit[0] = 10.0
    left_out = [count for count in (limit.admit(n) for n in range(1_000)) if count]
    assert sum(left_out) == 1_000 - logs.MAX_KEYS - 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_a_child_that_is_forked_while_a_failure_is_logged_can_log() -> None:
    """The lock that a thread of the parent held would be held in the child for ever."""
    program = [sys.executable, "-c", FORKED_WHILE_LOGGING]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["0"], done.stderr


FORKED_WHILE_LOGGING = """
import os, signal
from gpuroute.observe import logs
with logs._limit._lock:
    child = os.fork()
    if not child:
        signal.alarm(20)
        os._exit(logs._limit.admit("gpu-1"))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""

END_TO_END = """
import json, sys
import gpuroute.httpx2
from gpuroute.testing import GpuServer
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

with GpuServer(time_scale=0.0) as server:
    router = gpuroute.Router("llama=" + server.url, connect_timeout="20s")
    client = gpuroute.httpx2.Client(router, timeout=60)
    reader, exporter = InMemoryMetricReader(), InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    metrics.set_meter_provider(MeterProvider([reader]))
    with trace.get_tracer("test").start_as_current_span("caller") as caller:
        body, headers = {"model": "m", "prompt": "hello", "max_tokens": 3}, {"traceparent": "the caller's own"}
        client.post("http://llama/v1/completions", json=body, headers=headers).raise_for_status()
    span = exporter.get_finished_spans()[0]
    sent = [value.decode() for name, value in server.last_request.headers if name.lower() == b"traceparent"]
    names = {m.name for r in reader.get_metrics_data().resource_metrics for s in r.scope_metrics for m in s.metrics}
    client.close()
print(json.dumps({
    "parent": span.parent.span_id == caller.get_span_context().span_id,
    "sent": [ids[:52] for ids in sent] == [f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}"],
    "names": sorted(names),
}))
"""


def test_a_real_call_is_measured_and_its_trace_goes_on() -> None:
    """The SDK comes after the client, as in a program that sets up telemetry late."""
    done = subprocess.run([sys.executable, "-c", END_TO_END], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["parent"]
    assert seen["sent"]
    documented = (Path(__file__).parent.parent / "docs" / "observability.md").read_text()
    rows = re.findall(r"^\| (`gpuroute\.[^|]+)\|", documented, re.MULTILINE)
    assert seen["names"] == sorted(name for row in rows for name in re.findall(r"`(gpuroute\.[a-z_.]+)`", row))


SILENT = """
import sys
from gpuroute.observe import observer
assert type(observer()).__name__ == "Observer"
assert not any(name.startswith("opentelemetry") for name in sys.modules), "OpenTelemetry was loaded for nothing"
import opentelemetry.trace, opentelemetry.metrics
assert type(observer()).__name__ == "Observer", "the API alone is not an SDK"
from opentelemetry.sdk.trace import TracerProvider
assert type(observer()).__name__ == "Observer", "an SDK that is not installed measures nothing"
opentelemetry.trace.set_tracer_provider(TracerProvider())
assert type(observer()).__name__ == "OtelObserver"
"""


def test_nothing_happens_until_an_sdk_is_installed() -> None:
    done = subprocess.run([sys.executable, "-c", SILENT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert installed() is None
