"""Token counts at the end of answers and streams."""

from __future__ import annotations

import pytest
from captured import answer, page
from hypothesis import given
from hypothesis import strategies as st

from gpuroute.engines.usage import TAIL, Usage, read_usage


@pytest.mark.parametrize(
    ("title", "usage"),
    [
        ("POST /v1/chat/completions 1", Usage(740, 4, 0)),
        ("POST /v1/chat/completions 2", Usage(740, 4, 739)),
        ("POST /completion", Usage(6, 3, 1)),
        ("POST /v1/messages", Usage(22, 4, 0)),
        ("POST /v1/responses", Usage(22, 4, 21)),
        ("stream", Usage(22, 3, 21)),
        ("too long", None),
    ],
)
def test_what_llamacpp_really_reports(title: str, usage: Usage | None) -> None:
    assert read_usage(answer("llamacpp_outputs.txt", title)[2]) == usage


def test_what_vllm_really_reports() -> None:
    text = page("vllm_outputs2.txt")
    first, second = text.partition(b"--- completions #2")[::2]
    assert read_usage(first) == Usage(109, 8, 0)
    assert read_usage(second.partition(b"\nvllm:")[0]) == Usage(109, 8, 96)
    assert read_usage(answer("vllm_outputs.txt", "completions #1")[2]) == Usage(84, 16, None)
    assert read_usage(answer("vllm_outputs.txt", "ORCA on chat stream")[2]) == Usage(18, 3, None)
    assert read_usage(page("vllm_stream_tail.txt")) is None


@pytest.mark.parametrize(
    ("body", "usage"),
    [
        (b'{"text":"x","meta_info":{"prompt_tokens":9,"completion_tokens":4,"cached_tokens":8}}', Usage(9, 4, 8)),
        (b'{"generated_text":"x","details":{"generated_tokens":4,"prefill":[]}}', Usage(None, 4, None)),
        (
            b'{"usage":{"input_tokens":3,"cache_read_input_tokens":90,"cache_creation_input_tokens":7,"output_tokens":5}}',
            Usage(100, 5, 90),
        ),
        (b'data: {"usage":{"prompt_tokens":5,"completion_tokens":1}}\n\ndata: {"usage":null}\n\n', Usage(5, 1, None)),
        (b'{"content":"\\"usage\\": {\\"prompt_tokens\\": 1}"}', None),
        (b'{"usage":{"prompt_tokens":"5","completion_tokens":-1}}', None),
        (b'{"usage": {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": null}}', Usage(5, 2, None)),
        (b'{"usage":{"prompt_tok', None),
        (b"", None),
    ],
)
def test_shapes(body: bytes, usage: Usage | None) -> None:
    assert read_usage(body) == usage


def test_only_the_tail_is_read() -> None:
    assert read_usage(b"x" * 10_000_000 + b'"usage":{"prompt_tokens":1}}') == Usage(1, None, None)
    assert read_usage(b'"usage":{"prompt_tokens":1}}' + b"x" * TAIL) is None


@given(st.binary(max_size=200))
def test_nothing_raises(data: bytes) -> None:
    read_usage(b'"usage":{' + data)
    read_usage(b'"usage":' + data + b'"timings":' + data)
