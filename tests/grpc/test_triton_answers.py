"""What a real Triton answered (tests/data/captures), as the gRPC driver and the HTTP engine understand it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from grpc import StatusCode

from gpuroute.core.outcome import Outcome
from gpuroute.engines.answers import classify
from gpuroute.engines.catalog import engine_of
from gpuroute.transports.grpc_status import judge

CAPTURES = Path(__file__).parent.parent / "data" / "captures"
SUCCESS, REJECTED, OVERLOADED, FAILED = Outcome.SUCCESS, Outcome.REJECTED, Outcome.OVERLOADED, Outcome.FAILED

MEANINGS = {
    "gRPC unknown model": REJECTED,
    "gRPC wrong input": REJECTED,
    "gRPC wrong shape": REJECTED,
    "gRPC deadline": Outcome.TIMED_OUT,
    "gRPC unload": REJECTED,
    "gRPC full queue": OVERLOADED,
    "gRPC after SIGTERM: infer": OVERLOADED,
    "gRPC after SIGTERM: infer, a second later": OVERLOADED,
    "gRPC after SIGTERM: ServerReady": OVERLOADED,
    "gRPC after SIGTERM: ModelReady": OVERLOADED,
    "gRPC after its end": FAILED,
    "HTTP infer, endpoint-load-metrics-format: json": SUCCESS,
    "HTTP unknown model": REJECTED,
    "HTTP bad JSON": REJECTED,
    "HTTP ready of an unknown model": REJECTED,
    "HTTP full queue": OVERLOADED,
    "HTTP /v2": SUCCESS,
}
"""A server that stops is like one that is full: it gets a pause, and nothing is held against it."""


def _answers() -> dict[str, tuple[str, str]]:
    lines = (CAPTURES / "triton_answers.txt").read_text().splitlines()[2:]
    return {title: (status, text) for title, status, text in (line.split(" | ", 2) for line in lines)}


def _meaning(title: str, status: str, text: str) -> Outcome:
    if title.startswith("gRPC"):
        return judge(StatusCode[status], text, ()).outcome
    return classify("triton", int(status), {}, text.encode())


def test_every_answer_means_what_it_means() -> None:
    assert {title: _meaning(title, *answer) for title, answer in _answers().items()} == MEANINGS


@pytest.mark.parametrize("title", [title for title in MEANINGS if title.startswith("gRPC")])
def test_only_who_is_not_there_saw_nothing_of_the_call(title: str) -> None:
    status, text = _answers()[title]
    verdict = judge(StatusCode[status], text, ())
    assert verdict.unsent is (title == "gRPC after its end")
    assert verdict.answered is (title not in {"gRPC after its end", "gRPC deadline"})


def test_the_session_of_tritonclient() -> None:
    """Its errors, and that there is no load report without the TensorRT-LLM backend: none is asked for."""
    session = (CAPTURES / "triton_client.txt").read_text()
    errors = re.findall(r"\[StatusCode\.(\w+)\] (.*)", session)
    assert [judge(StatusCode[code], text, ()).outcome for code, text in errors] == [REJECTED, Outcome.TIMED_OUT]
    assert "ORCA header: None" in session
    assert not engine_of("triton").orca
    assert engine_of("triton_tensorrt_llm").orca == "json"


def test_an_answer_over_http_tells_the_id_of_its_request() -> None:
    head, _, body = (CAPTURES / "triton_rest.txt").read_text().replace("\r\n", "\n").partition("\n\n")
    assert head.startswith("HTTP/1.1 200")
    assert f'"{engine_of("triton").request_id_field}":"q"' in body
    assert classify("triton", 200, {}, body.encode()) is SUCCESS
