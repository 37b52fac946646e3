"""What observers are told of a call: every attempt begins and ends once, the call ends once, trace headers go out."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from http_caller import endpoint
from http_stub import hang, ok, sse, status

from gpuroute import Endpoint
from gpuroute.observe import Observer
from gpuroute.transports import routes

if TYPE_CHECKING:
    from collections.abc import Callable

    from http_caller import Caller
    from http_stub import Stage

    Make = Callable[..., Caller]

pytestmark = pytest.mark.real_time


class Recorder(Observer):
    """Notes what it is told, in order."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def attempt_started(self, call: Any, attempt: Any, headers: Any) -> object:
        headers["traceparent"] = f"00-{attempt.number}"
        self.told.append(f"+{attempt.state.id}")
        return attempt.number

    def attempt_ended(self, token: object, call: Any, attempt: Any) -> None:
        assert token == attempt.number
        self.told.append(f"-{attempt.state.id} {attempt.outcome}")

    def call_ended(self, call: Any, now: float) -> None:
        self.told.append(f"call of {len(call.history)}")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(routes, "observer", lambda: recorder)
    return recorder


def test_attempts_and_calls_are_told(stubs: Stage, caller: Make, recorder: Recorder) -> None:
    a, b = stubs("a", "b")
    a.behave = status(500)
    client = caller([a, b])
    client.post(headers={"traceparent": "00-mine"})
    assert recorder.told == ["+a", "-a failed", "+b", "-b success", "call of 2"]
    assert [s.came[0].header("traceparent") for s in (a, b)] == ["00-1", "00-2"], "instead of the caller's own"
    assert [name for name, _ in a.came[0].headers if name.lower() == "traceparent"] == ["traceparent"]


@pytest.mark.parametrize("end", ["read", "close", "forget", "cut"])
def test_a_stream_is_told_to_its_end(
    stubs: Stage, caller: Make, recorder: Recorder, end: str, eventually: Callable[..., None], collect: Any
) -> None:
    (a,) = stubs("a")
    a.behave = sse("x", then=(lambda exchange: exchange.reset()) if end == "cut" else hang if end != "read" else None)
    client = caller([a])
    response = client.open()
    assert recorder.told == ["+a"]
    if end == "close":
        client.close_response(response)
    elif end == "forget":
        del response
        collect()
    elif end == "cut":
        with pytest.raises(client.ours.StreamInterrupted):
            client.read(response)
    else:
        client.read(response)
    outcome = {"read": "success", "cut": "failed"}.get(end, "cancelled")
    eventually(lambda: client.breathe() or len(recorder.told) == 3, f"told: {recorder.told}")
    assert recorder.told == ["+a", f"-a {outcome}", "call of 1"]


def test_calls_that_find_nobody_are_told_too(stubs: Stage, caller: Make, recorder: Recorder) -> None:
    (a,) = stubs("a")
    client = caller([a])
    client.router.registry.set({"llama": []})
    with pytest.raises(client.ours.NoEndpointAvailable):
        client.post()
    assert recorder.told == ["call of 0"]
    recorder.told.clear()
    client.router.registry.set({"llama": [endpoint(a), Endpoint("x", "http://127.0.0.1:9")]})
    a.behave = ok
    client.post()
    assert recorder.told[-1].startswith("call of")
    assert sum(line.startswith("+") for line in recorder.told) == sum(line.startswith("-") for line in recorder.told)


def test_bench_overhead_prints_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    from gpuroute.cli import main

    assert main(["bench", "overhead", "--client", "httpx2-sync", "--pairs", "20", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["client"] for row in rows} == {"httpx2-sync", "httpx2-sync A/A"}
    assert {(row["concurrency"], row["endpoints"]) for row in rows} >= {(1, 1), (1, 8), (64, 8)}
    for row in rows:
        assert row["errors"] == 0
        assert row["routed_us"] > 0
        assert row["added_us"] == pytest.approx(row["routed_us"] - row["bare_us"], abs=0.2)
        assert row["added_share"] == pytest.approx(row["added_us"] / row["bare_us"], abs=0.01)
