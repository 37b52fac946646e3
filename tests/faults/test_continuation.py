"""Continuation: one seamless stream over several endpoints, token by token what one endpoint would have said."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from fault_world import CHAT, PROMPT, TEXT, bodies, experienced, vllm

from gpuroute.errors import StreamInterrupted
from gpuroute.testing import answer
from gpuroute.testing.text import render_chat
from gpuroute.transports.continuation import Seam

if TYPE_CHECKING:
    from collections.abc import Callable

    from http_caller import Caller

    from gpuroute.testing import GpuServer

MESSAGES = [{"role": "user", "content": "tell me something"}]
TOKENS = 12


def body(url: str, **fields: Any) -> dict[str, Any]:
    asked = {"prompt": PROMPT} if url == TEXT else {"messages": MESSAGES}
    return {"model": "m", "max_tokens": TOKENS, "stream": True, **asked, **fields}


def expected(url: str) -> str:
    return answer(PROMPT if url == TEXT else render_chat(MESSAGES), TOKENS)


def events(raw: bytes) -> list[dict[str, Any]]:
    blocks = raw.decode().split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def text_of(found: list[dict[str, Any]]) -> str:
    choices = [choice for event in found for choice in event["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


@pytest.mark.parametrize("url", [CHAT, TEXT])
@pytest.mark.parametrize("cut_after", [1, 5, TOKENS])
def test_token_exact(
    gpus: Callable[..., list[GpuServer]], call: Callable[..., Caller], kind: str, url: str, cut_after: int
) -> None:
    servers = gpus(2)
    servers[0].drop_mid_stream(cut_after, count=1, reset=True)
    client = call(kind, vllm(servers), continuation=True)
    found = events(client.read(client.open(url, json=body(url))))
    assert text_of(found) == expected(url)
    assert len({event["id"] for event in found}) == 1
    roles = [choice for event in found for choice in event["choices"] if choice.get("delta", {}).get("role")]
    assert len(roles) == (url == CHAT)
    finishes = [choice["finish_reason"] for event in found for choice in event["choices"] if choice["finish_reason"]]
    assert finishes == ["length"]


def test_over_three_endpoints_and_with_usage_that_adds_up(
    gpus: Callable[..., list[GpuServer]], call: Callable[..., Caller], kind: str
) -> None:
    servers = gpus(3)
    servers[0].drop_mid_stream(4, count=1)
    servers[1].drop_mid_stream(4, count=1)
    client = call(kind, vllm(servers), continuation=True)
    asked = body(TEXT, stream_options={"include_usage": True})
    found = events(client.read(client.open(TEXT, json=asked)))
    assert text_of(found) == expected(TEXT)
    assert found[-1]["usage"]["completion_tokens"] == TOKENS
    assert found[-1]["usage"]["prompt_tokens"] == len(PROMPT) // 4
    assert [sent["max_tokens"] for sent in bodies(servers)] == [12, 8, 4]
    assert client.router.snapshot().pools["llama"].signals["continuations"] == 2


@pytest.mark.real_time
def test_a_stalled_stream_is_continued_too(
    gpus: Callable[..., list[GpuServer]], call: Callable[..., Caller], kind: str
) -> None:
    servers = gpus(2)
    servers[0].stall_mid_stream(5, count=1)
    client = call(kind, vllm(servers), continuation=True)
    experienced(client, floor=0.6, first=30.0)
    found = events(client.read(client.open(CHAT, json=body(CHAT))))
    assert text_of(found) == expected(CHAT)
    assert client.router.snapshot().pools["llama"].signals["stalls"] == 1


@pytest.mark.parametrize("fields", [{"tools": [{"type": "function"}]}, {"logprobs": True}, {"response_format": {"a": 1}}])
def test_what_cannot_be_joined_is_interrupted_as_ever(
    gpus: Callable[..., list[GpuServer]], call: Callable[..., Caller], fields: dict[str, Any]
) -> None:
    servers = gpus(2)
    servers[0].drop_mid_stream(5, count=1)
    client = call("httpx2-sync", vllm(servers), continuation=True)
    with pytest.raises(StreamInterrupted) as caught:
        client.read(client.open(CHAT, json=body(CHAT, **fields)))
    assert caught.value.endpoint == "gpu-0"
    assert len(bodies(servers)) == 1


def test_off_by_default_and_on_for_one_call(
    gpus: Callable[..., list[GpuServer]], call: Callable[..., Caller], kind: str
) -> None:
    servers = gpus(2)
    client = call(kind, vllm(servers))
    servers[0].drop_mid_stream(5, count=1)
    with pytest.raises(StreamInterrupted) as caught:
        client.read(client.open(TEXT, json=body(TEXT)))
    assert caught.value.partial_text == expected(TEXT)[: 5 * 4]
    servers[1].drop_mid_stream(5, count=1)
    response = client.open(TEXT, json=body(TEXT), extensions={"gpuroute": {"continuation": True}})
    assert text_of(events(client.read(response))) == expected(TEXT)


def test_when_nobody_can_go_on_the_callers_error_holds_all_that_came(
    gpus: Callable[..., list[GpuServer]], call: Callable[..., Caller], kind: str
) -> None:
    servers = gpus(2)
    servers[0].drop_mid_stream(5, count=1)
    servers[1].refuse()
    client = call(kind, vllm(servers), continuation=True, attempts=2)
    got: list[bytes] = []
    with pytest.raises(StreamInterrupted) as caught:
        got.extend(client.chunks(client.open(TEXT, json=body(TEXT))))
    assert caught.value.partial_text == expected(TEXT)[: 5 * 4]
    assert b"".join(got).count(b"data: ") == 5


def test_a_registry_option_switches_it_on_for_a_pool(gpus: Callable[..., list[GpuServer]]) -> None:
    from http_caller import Caller, router_for

    from gpuroute.core.fleet import PoolConfig, PoolSpec

    servers = gpus(2)
    router = router_for(vllm(servers))
    router.registry.set({"llama": PoolSpec("llama", tuple(vllm(servers)), PoolConfig(options={"continuation": True}))})
    client = Caller("httpx2-sync", router)
    servers[0].drop_mid_stream(5, count=1)
    servers[1].drop_mid_stream(5, count=1)
    assert text_of(events(client.read(client.open(TEXT, json=body(TEXT))))) == expected(TEXT)
    client.close()


@pytest.mark.parametrize("choices", ["null", "7", '"a"', "[]", "[7]", '["a"]', "[null]", "[[]]", '{"0": 1}'])
@pytest.mark.parametrize("joined", [False, True])
def test_an_event_of_another_shape_is_passed_on(choices: str, joined: bool) -> None:
    seam = Seam({"stream": True, "prompt": PROMPT}, chat=False)
    seam.feed(b'data: {"id": "one", "choices": [{"text": "a"}]}\n\n')
    seam.joined = joined
    passed = seam.feed(f'data: {{"id": "one", "choices": {choices}}}\n\n'.encode())
    assert json.loads(passed.removeprefix(b"data: ")) == {"id": "one", "choices": json.loads(choices)}
    assert seam.text == "a"
