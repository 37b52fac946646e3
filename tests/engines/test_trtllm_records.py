"""Records that `trtllm-serve` itself puts into etcd."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuroute.engines.tensorrt_llm import endpoint_of
from gpuroute.errors import InvalidRecord

RECORD = {
    "model": "llama-3-8b",
    "version": "1.2.0",
    "timestamp": "2026-11-29T13:42:50.123456",
    "server_role": "GENERATION",
    "url": "http://10.0.0.7:8000",
}


def record(**changes: object) -> bytes:
    return json.dumps(RECORD | changes).encode()


def test_a_record_becomes_an_endpoint() -> None:
    endpoint = endpoint_of("trtllm/llm-7", record())
    assert (endpoint.id, endpoint.url, endpoint.engine) == ("llm-7", "http://10.0.0.7:8000", "tensorrt_llm")
    assert (endpoint.model, endpoint.version) == ("llama-3-8b", "1.2.0")
    assert dict(endpoint.labels) == {"role": "generation"}
    assert endpoint.started_at == datetime.fromisoformat("2026-11-29T13:42:50.123456").timestamp()


def test_what_may_be_missing() -> None:
    endpoint = endpoint_of("trtllm/x", b'{"url": "gpu-7:8000"}')
    assert (endpoint.url, endpoint.model, endpoint.started_at) == ("http://gpu-7:8000", "", 0.0)
    assert endpoint_of("trtllm/x", record(timestamp="yesterday", model=7, server_role=None)).model == ""
    assert endpoint_of("trtllm/x", record(url="http://[2001:db8::7]:8000/")).url == "http://[2001:db8::7]:8000"


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"url": 7}',
        record(url=""),
        record(url="http://host"),
        record(url="http://host:99999"),
        record(url="ftp://host:21"),
        record(url="http://0.0.0.0:8000"),
        record(url="http://[::]:8000"),
        record(url="http://[bad:8000"),
        b"[" * 50_000,
    ],
)
def test_a_bad_record_names_its_key_and_shows_no_value(value: bytes) -> None:
    with pytest.raises(InvalidRecord, match=r"^trtllm/x: ") as caught:
        endpoint_of("trtllm/x", value)
    assert "10.0.0.7" not in str(caught.value)


@given(st.binary(max_size=100) | st.text(max_size=40).map(lambda url: json.dumps({"url": url}).encode()))
def test_nothing_else_is_raised(value: bytes) -> None:
    with suppress(InvalidRecord):
        assert endpoint_of("trtllm/x", value).url.startswith("http")
