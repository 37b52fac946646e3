"""Without an agent, an endpoint's load still comes with its answers, where the engine sends it."""

from __future__ import annotations

import pytest

import gpuroute.httpx2
from gpuroute.core.endpoint import Endpoint
from gpuroute.router import Router
from gpuroute.testing import GpuServer
from gpuroute.transports.piggyback import learn_header

pytestmark = pytest.mark.real_time


def answered(server: GpuServer, **record: str) -> Router:
    router = Router(endpoints={"p": [Endpoint("gpu-0", server.url, **record)]}, asks="off", connect_timeout="20s")
    with gpuroute.httpx2.Client(router, timeout=60) as client:
        client.post("http://p/v1/completions", json={"prompt": "x", "max_tokens": 2}).raise_for_status()
    return router


def test_an_engine_that_reports_with_its_answers_is_asked_to_and_heard() -> None:
    with GpuServer(time_scale=0.01) as server:
        view = answered(server, engine="vllm").snapshot().pools["p"].endpoints[0]
        assert view.report is not None
        assert (view.report.source, view.report.waiting, view.report.late_s) == ("orca", 0, 0.0)
        assert dict(server.last_request.headers)[b"endpoint-load-metrics-format"] == b"TEXT"


@pytest.mark.parametrize("record", [{}, {"engine": "tgi"}, {"engine": "vllm", "agent": "udp://127.0.0.1:9"}], ids=str)
def test_others_are_not_bothered(record: dict[str, str]) -> None:
    with GpuServer(time_scale=0.01) as server:
        assert answered(server, **record).snapshot().pools["p"].endpoints[0].report is None
        assert b"endpoint-load-metrics-format" not in dict(server.last_request.headers)


@pytest.mark.parametrize(
    "value", [b"", b"TEXT", b"JSON {", b"BIN \xff", b"TEXT named_metrics.kv_cache_usage_perc=0.5", b"x" * 99_999]
)
def test_what_says_nothing_teaches_nothing(value: bytes) -> None:
    router = Router(endpoints={"p": [Endpoint("gpu-0", "http://127.0.0.1:1")]})
    state = router.pool("p").snapshot.states[0]
    assert not learn_header(state, value, 100.0, 1.0)
    assert state.report is None
