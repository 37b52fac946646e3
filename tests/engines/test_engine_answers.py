"""What engines' answers mean (bug-log B3, and section 7 of the router survey)."""

from __future__ import annotations

import json

import pytest
from captured import answer, page
from hypothesis import given
from hypothesis import strategies as st

from gpuroute.core.outcome import Outcome
from gpuroute.engines.answers import classify, judge, judge_stream
from gpuroute.engines.catalog import ENGINES, engine_of
from gpuroute.engines.engine import Meaning

OVERLOADED, LOADING, DRAINING = Meaning.OVERLOADED, Meaning.LOADING, Meaning.DRAINING
MISSING, FAILED, REJECTED = Meaning.MISSING, Meaning.FAILED, Meaning.REJECTED


def error(message: str) -> str:
    return json.dumps({"error": {"message": message, "type": "x", "code": 0}})


TABLE = [
    ("vllm", 503, error("The engine is currently busy and cannot accept new requests."), OVERLOADED),
    ("vllm", 503, '{"error":"The model is currently scaling. Please try again later."}', OVERLOADED),
    ("vllm", 503, '{"error":"This data-parallel rank has been retired and is awaiting shutdown."}', DRAINING),
    ("vllm", 500, error("cannot schedule new futures after shutdown"), DRAINING),
    ("vllm", 500, error("EngineCore encountered an issue."), FAILED),
    ("vllm", 503, "", FAILED),
    ("vllm", 400, error("Got priority 5 but Priority scheduling is not enabled."), REJECTED),
    ("sglang", 503, '{"object":"error","message":"The request queue is full.","code":503}', OVERLOADED),
    ("sglang", 503, '{"message":"The request is aborted by a higher priority request."}', OVERLOADED),
    ("sglang", 503, '{"message":"Request waiting timeout reached."}', OVERLOADED),
    ("tensorrt_llm", 503, "LLM is unavailable. Please check the server logs for more details.", FAILED),
    ("tgi", 429, '{"error":"Model is overloaded","error_type":"overloaded"}', OVERLOADED),
    ("tgi", 424, '{"error":"Request failed during generation","error_type":"generation"}', FAILED),
    ("tgi", 422, '{"error":"Input validation error","error_type":"validation"}', REJECTED),
    ("triton", 503, '{"error":"Exceeds maximum queue size"}', OVERLOADED),
    ("triton", 400, '{"error":"Request for unknown model: \'m\' has no available versions"}', DRAINING),
    ("triton", 400, '{"error":"Request for unknown model: \'nope\' is not found"}', MISSING),
    ("tf_serving", 503, '{"error":"The batch scheduling queue to which this task was submitted is full"}', OVERLOADED),
    ("tf_serving", 404, '{"error":"Servable not found for request: Specific(m, 1)"}', MISSING),
    ("ray_serve", 503, "Request dropped due to backpressure (num_queued_requests=2)", OVERLOADED),
    ("ray_serve", 503, "This node is being drained.", DRAINING),
    ("kserve", 400, '{"error":"Model m is not ready yet."}', LOADING),
    ("openai", 503, "all workers are busy", OVERLOADED),
    ("openai", 529, '{"type":"error","error":{"type":"overloaded_error"}}', OVERLOADED),
    ("openai", 503, "Service Unavailable: the server is starting", LOADING),
    ("openai", 503, "Service Unavailable. Please try again later.", FAILED),
    ("openai", 503, "upstream connect error. reset reason: overflow", OVERLOADED),
    ("", 502, "<html>Bad Gateway</html>", FAILED),
    ("", 408, "", FAILED),
    ("", 409, "", REJECTED),
    ("", 501, "", REJECTED),
    ("", 404, error("The LoRA adapter does not exist"), MISSING),
    ("an engine of tomorrow", 503, "server is shutting down", DRAINING),
]


@pytest.mark.parametrize(("engine", "status", "body", "meaning"), TABLE)
def test_b3_busy_is_told_from_broken(engine: str, status: int, body: str, meaning: Meaning) -> None:
    outcomes = {
        OVERLOADED: Outcome.OVERLOADED,
        LOADING: Outcome.OVERLOADED,
        REJECTED: Outcome.REJECTED,
        MISSING: Outcome.REJECTED,
    }
    found = judge(engine, status, body.encode())
    assert found.meaning is meaning
    assert found.outcome is classify(engine, status, {}, body.encode()) is outcomes.get(meaning, Outcome.FAILED)
    assert found.reason == meaning


def test_b3_what_real_engines_answered() -> None:
    busy = json.loads(page("vllm_outputs2.txt").decode().partition("\n{\n")[2].partition("\n}\n")[0].join("{}"))["503"]
    assert judge("vllm", 503, busy[1].encode()).meaning is OVERLOADED
    for engine in ("llamacpp", "openai"):
        status, _, body = answer("llamacpp_busy.txt", "/v1/chat/completions (loading)")
        assert judge(engine, status, body).meaning is LOADING
        status, _, body = answer("llamacpp_busy.txt", "GET /slots?fail_on_no_slot")
        assert judge(engine, status, body).meaning is OVERLOADED
    for capture, title, meaning in (
        ("vllm_outputs.txt", "wrong model", MISSING),
        ("vllm_outputs.txt", "too long", REJECTED),
        ("llamacpp_outputs.txt", "too long", REJECTED),
        ("llamacpp_outputs.txt", "POST bad json", REJECTED),
        ("vllm_outputs.txt", "GET /health", None),
    ):
        status, _, body = answer(capture, title)
        found = judge(capture.partition("_")[0], status, body)
        assert found.meaning is meaning
        assert found.outcome is (Outcome.SUCCESS if meaning is None else Outcome.REJECTED)


def test_b3_a_time_to_come_back_makes_an_unexplained_503_an_overload() -> None:
    assert classify("vllm", 503, {"retry-after": "2"}) is Outcome.OVERLOADED
    assert classify("vllm", 503, {"retry-after": "soon"}) is Outcome.FAILED
    found = judge("vllm", 503, retry_after=2.0)
    assert (found.outcome, found.meaning, found.retry_after) == (Outcome.OVERLOADED, OVERLOADED, 2.0)


def test_x6_an_engine_that_loads_is_left_alone_for_a_second_or_as_long_as_it_says() -> None:
    body = b'{"error":{"message":"Loading model"}}'
    for said, pause in ((None, 1.0), (2.0, 2.0)):
        found = judge("llamacpp", 503, body, retry_after=said)
        assert (found.outcome, found.meaning, found.retry_after) == (Outcome.OVERLOADED, LOADING, pause)


def test_a_model_that_the_registry_promised_is_missing_by_the_endpoints_fault() -> None:
    body = error("The model `m` does not exist.").encode()
    assert judge("vllm", 404, body, claimed=True).outcome is Outcome.OVERLOADED
    assert judge("vllm", 404, body).outcome is Outcome.REJECTED
    assert judge("vllm", 404, b"{}", claimed=True).outcome is Outcome.REJECTED


@pytest.mark.parametrize(
    ("event", "meaning"),
    [
        (b'data: {"error": {"message": "The request queue is full.", "code": 503}}\n\n', OVERLOADED),
        (b'data: {"error": "The request queue is full.", "code": 503}\n\n', OVERLOADED),
        (b'data: {"object":"error","message":"bad","code":400}\n\n', REJECTED),
        (b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"}}\n\n', OVERLOADED),
        (b'data: {"error":"died"', FAILED),
        (b'data: {"id":"1","choices":[{"delta":{"content":"error overloaded"}}]}\n\n', None),
        (b"data: [DONE]\n\n", None),
        (b"", None),
    ],
)
def test_an_error_as_the_first_event_of_a_stream(event: bytes, meaning: Meaning | None) -> None:
    found = judge_stream("sglang", event)
    assert (found.meaning if found else None) is meaning


def test_engines_are_found_by_any_spelling() -> None:
    for engine in ENGINES:
        assert engine_of(engine.name) is engine
    assert engine_of("TensorRT-LLM").name == "tensorrt_llm"
    assert engine_of("llama.cpp").name == "llamacpp"
    assert engine_of("Ray Serve".replace(" ", "-")).name == "ray_serve"
    assert engine_of("").name == engine_of("unheard of").name == "openai"


def test_the_more_urgent_request_goes_first_everywhere() -> None:
    assert engine_of("vllm").priority_value(5) == {"priority": -5}
    assert engine_of("sglang").priority_value(5) == {"priority": 5}
    assert engine_of("tgi").priority_value(5) == {}


@given(st.sampled_from(ENGINES), st.integers(100, 999), st.binary(max_size=300))
def test_nothing_raises(engine: object, status: int, body: bytes) -> None:
    assert isinstance(judge(engine, status, body).outcome, Outcome)  # type: ignore[arg-type]
    judge_stream("vllm", b"data: " + body)
    judge_stream("vllm", b'data: {"error"' + body)
