"""Which engine is it, and is it ready."""

from __future__ import annotations

from pathlib import Path

import pytest
from captured import answer, page

from gpuroute.engines.catalog import ENGINES, engine_of
from gpuroute.engines.detect import PATHS, Probed, detect, ready

NOT_FOUND = Probed(404, b'{"detail":"Not Found"}')


def models(owner: str) -> bytes:
    return b'{"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "%s"}]}' % owner.encode()


CASES: list[tuple[str, dict[str, Probed]]] = [
    ("sglang", {"/v1/models": Probed(200, models("sglang"))}),
    ("tensorrt_llm", {"/v1/models": Probed(200, models("tensorrt_llm"))}),
    ("openai", {"/v1/models": Probed(200, models("organization"))}),
    ("openai", {"/v1/models": Probed(200, b'{"data":[],"object":"list"}')}),
    ("tgi", {"/info": Probed(200, b'{"model_id":"m","router":"text-generation-router","version":"2.0.4"}')}),
    ("triton", {"/v2": Probed(200, b'{"name":"triton","version":"2.51.0","extensions":["statistics"]}')}),
    ("kserve", {"/v2": Probed(200, b'{"name":"mlserver","version":"1.7.1","extensions":[]}')}),
    ("tf_serving", {"/v1/models": Probed(400, b'{ "error": "Malformed request: GET /v1/models" }')}),
    ("ray_serve", {"/-/healthz": Probed(200, b"success"), "/v1/models": Probed(200, models("vllm"))}),
    ("sglang", {"/metrics": Probed(200, b"# HELP x\nsglang:num_running_reqs 1\n")}),
    ("triton_tensorrt_llm", {"/metrics": Probed(200, b'nv_inference_count 1\nnv_trt_llm_request_metrics{a="b"} 1\n')}),
]


@pytest.mark.parametrize(("name", "answers"), CASES)
def test_engines_give_themselves_away(name: str, answers: dict[str, Probed]) -> None:
    found = detect(dict.fromkeys(PATHS, NOT_FOUND) | answers)
    assert found is engine_of(name)
    assert found.name == name


def test_what_real_engines_showed() -> None:
    vllm = page("vllm_outputs.txt").partition(b"--- /v1/models\n")[2].partition(b"\n---")[0]
    assert detect({"/v1/models": Probed(200, vllm)}) is engine_of("vllm")
    llama = answer("llamacpp_outputs.txt", "GET /v1/models")[2]
    props = answer("llamacpp_outputs.txt", "GET /props")[2]
    assert detect({"/v1/models": Probed(200, llama)}) is detect({"/props": Probed(200, props)}) is engine_of("llamacpp")
    for name in ("vllm", "llamacpp", "triton"):
        assert detect({"/metrics": Probed(200, page(f"{name}_metrics.txt"))}) is engine_of(name)


def test_a_stranger_is_not_recognised() -> None:
    assert detect({}) is None
    assert detect(dict.fromkeys(PATHS, NOT_FOUND)) is None
    assert detect(dict.fromkeys(PATHS, Probed(200, b"<html>hello</html>"))) is None
    assert detect(dict.fromkeys(PATHS, Probed(503, models("vllm")))) is None


def test_few_questions_suffice() -> None:
    assert len(PATHS) <= 8
    assert all(engine.signs for engine in ENGINES)


def test_every_engine_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
    assert [engine.name for engine in ENGINES if f"| `{engine.name}`" not in text] == []


def test_ready() -> None:
    assert ready(engine_of("vllm"), Probed(200, b""))
    assert not ready(engine_of("llamacpp"), Probed(503, b'{"error":{"message":"Loading model"}}'))
    serving = b'{ "model_version_status": [ { "version": "1",\n "state": "AVAILABLE" } ] }'
    assert ready(engine_of("tf_serving"), Probed(200, serving))
    assert not ready(engine_of("tf_serving"), Probed(200, serving.replace(b"AVAILABLE", b"LOADING")))
    assert ready(engine_of("triton"), Probed(200, b""))
