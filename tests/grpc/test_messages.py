"""Prompts in protobuf requests, read by field numbers."""

from __future__ import annotations

import struct
import time
from typing import Any

import pytest

from gpuroute.core.prefix import MAX_BYTES, ladder
from gpuroute.core.wire import encode
from gpuroute.engines.messages import fields_reader, read_message

INFER = "/inference.GRPCInferenceService/ModelInfer"
PREDICT = "/tensorflow.serving.PredictionService/Predict"
VLLM = "/vllm.grpc.engine.VllmEngine/Generate"
SGLANG = "/sglang.grpc.scheduler.SglangScheduler/Generate"


def tensor(name: str, kind: str = "BYTES", contents: bytes | None = None) -> bytes:
    return encode((1, name), (2, kind), (3, b"\x01\x01"), (5, contents))


def raw_text(*texts: bytes) -> bytes:
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)


def infer(*fields: tuple[int, Any], model: str = "llama") -> bytes:
    return encode((1, model), (3, "request-7"), *fields)


def packed(*ids: int) -> bytes:
    return b"".join(encode((1, n))[1:] for n in ids)


def test_kserve_raw_text_at_its_place() -> None:
    request = infer(
        (5, tensor("temperature", "FP32")),
        (5, tensor("TEXT_INPUT")),
        (7, struct.pack("<f", 0.5)),
        (7, raw_text(b"Why is the sky blue?")),
    )
    prompt = read_message(INFER, request)
    assert prompt is not None
    assert (prompt.canonical, prompt.model, prompt.tokens) == (b"llama\x1fWhy is the sky blue?", "llama", 5)


def test_kserve_inline_text() -> None:
    prompt = read_message(INFER, infer((5, tensor("prompt", contents=encode((8, b"Why"), (8, b" not?"))))))
    assert prompt is not None
    assert prompt.canonical == b"llama\x1fWhy not?"


def test_kserve_token_ids() -> None:
    ids = struct.pack("<4q", 1, 2, 3, 4)
    prompt = read_message(INFER, infer((5, tensor("input_ids", "INT64")), (7, ids)))
    assert prompt is not None
    assert (prompt.canonical, prompt.tokens) == (b"llama\x1f" + ids, 4)


@pytest.mark.parametrize(
    ("value", "key"),
    [(encode((2, 42)), "sequence llama 42"), (encode((3, "abc")), "sequence llama abc"), (encode((2, 0)), "")],
)
def test_triton_sequences_are_keys(value: bytes, key: str) -> None:
    entry = encode((1, "sequence_id"), (2, value))
    prompt = read_message(INFER, infer((4, entry), (5, tensor("x", "FP32")), (7, b"\0\0\0\0")))
    assert (prompt.key if prompt else "") == key


def test_tensors_without_text_have_no_prompt() -> None:
    assert read_message(INFER, infer((5, tensor("image", "UINT8")), (7, b"\0" * 100))) is None


def test_tf_serving_text() -> None:
    text = encode((1, 7), (8, b"Why "), (8, b"not?"))
    entry = encode((1, "inputs"), (2, text))
    noise = encode((1, "length"), (2, encode((1, 3), (7, 5))))
    prompt = read_message(PREDICT, encode((1, encode((1, "bert"))), (2, noise), (2, entry)))
    assert prompt is not None
    assert (prompt.canonical, prompt.model) == (b"bert\x1fWhy not?", "bert")
    other = encode((1, "sentence"), (2, text))
    assert read_message(PREDICT, encode((1, encode((1, "bert"))), (2, other))) is not None
    assert read_message(PREDICT, encode((1, encode((1, "bert"))), (2, other), (2, encode((1, "b"), (2, text))))) is None


@pytest.mark.parametrize("method", [VLLM, SGLANG, "/trtllm.TrtllmService/Generate"])
def test_engines_token_ids(method: str) -> None:
    ids = packed(*range(1, 1000))
    prompt = read_message(method, encode((1, "r"), (2, encode((1, "text"), (2, ids)))))
    assert prompt is not None
    assert prompt.tokens == 999
    longer = read_message(method, encode((1, "s"), (2, encode((2, ids + packed(7, 8, 9))))))
    assert longer is not None
    assert ladder(prompt)[0] == ladder(longer)[0], "equal prefixes have different homes"


def test_vllm_text_and_sglang_images() -> None:
    prompt = read_message(VLLM, encode((1, "r"), (3, "Why not?")))
    assert prompt is not None
    assert prompt.canonical == b"\x1fWhy not?"
    assert read_message(SGLANG, encode((1, "r"), (3, b"an image"))) is None


def test_other_messages_by_their_field_numbers() -> None:
    read = fields_reader({"/my.Engine/Generate": (2, 1)})
    prompt = read("/my.Engine/Generate", encode((2, encode((1, "Why not?")))))
    assert prompt is not None
    assert prompt.canonical == b"\x1fWhy not?"
    assert read(VLLM, encode((3, "Why not?"))) is not None
    assert read("/my.Engine/Other", b"") is None


@pytest.mark.parametrize("method", [INFER, PREDICT, VLLM, SGLANG])
def test_garbage_is_no_prompt(method: str) -> None:
    whole = infer((5, tensor("prompt")), (7, raw_text(b"x" * 50)))
    for request in (b"", b"\xff" * 40, b"{}", *(whole[:n] for n in range(len(whole)))):
        read_message(method, request)
    read_message(method, None)  # type: ignore[arg-type]
    assert read_message("/unknown.Service/Method", whole) is None


def test_a_string_that_claims_more_than_is_there() -> None:
    prompt = read_message(INFER, infer((5, tensor("prompt")), (7, b"\xff\xff\xff\x7fshort")))
    assert prompt is not None
    assert prompt.canonical == b"llama\x1fshort"


def test_large_tensors_cost_nothing() -> None:
    request = infer(
        (5, tensor("image", "UINT8")),
        (5, tensor("prompt")),
        (7, b"\0" * 20_000_000),
        (7, raw_text(b"x" * 500_000)),
    )
    fastest = min(_seconds(request) for _ in range(30))
    assert fastest < 0.002, "the tensors were copied"
    prompt = read_message(INFER, request)
    assert prompt is not None
    assert len(prompt.canonical) <= MAX_BYTES
    assert prompt.tokens == 125_000


def _seconds(request: bytes) -> float:
    began = time.thread_time()  # the machine may have other things to do
    read_message(INFER, request)
    return time.thread_time() - began
