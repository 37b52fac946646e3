"""The stand-in's language: same prompt, same answer; a prompt with half of its answer yields the other half."""

from __future__ import annotations

import pytest

from gpuroute.testing import text


def test_continuation_is_exact_at_every_token() -> None:
    prompt = text.render_chat([{"role": "user", "content": "Grüße aus Köln"}])
    whole = text.answer(prompt, 40)
    for tokens in range(41):
        part = text.answer(prompt, tokens)
        assert part + text.answer(prompt + part, 40 - tokens) == whole


def test_tokens_add_up_when_text_moves_into_the_prompt() -> None:
    prompt = "x" * 21
    said = text.answer(prompt, 30)
    assert text.count_tokens(prompt + said) == text.count_tokens(prompt) + 30
    assert all(len(token.encode()) == text.TOKEN_BYTES for token in text.VOCABULARY)
    assert len(set(text.VOCABULARY)) == 256


def test_a_model_that_stops_by_itself_stops_at_the_same_token_when_continued() -> None:
    lengths = []
    for i in range(60):
        prompt = f"question {i}"
        length = text.natural_length(text.extend(0, prompt), 10_000)
        lengths.append(length)
        half = text.answer(prompt, length // 2)
        rest = text.natural_length(text.extend(0, prompt + half), 10_000)
        assert length // 2 + rest == length
    assert 30 < sum(lengths) / len(lengths) < 110


def test_block_hashes_are_those_of_prefixes() -> None:
    shared = "system prompt " * 40
    one, two = text.block_hashes(shared + "a" * 200), text.block_hashes(shared + "b" * 200)
    whole_blocks = len(shared) // (text.BLOCK_TOKENS * text.TOKEN_BYTES)
    assert one[:whole_blocks] == two[:whole_blocks]
    assert not set(one[whole_blocks:]) & set(two[whole_blocks:])
    assert text.block_hashes("short") == ()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("plain", "plain"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ([{"type": "image_url", "image_url": {"url": "u"}}], '{"image_url": {"url": "u"}, "type": "image_url"}'),
        (None, ""),
    ],
)
def test_content_in_every_form(content: object, expected: str) -> None:
    assert text.content_text(content) == expected


def test_an_open_ended_chat_is_the_closed_one_in_progress() -> None:
    question = {"role": "user", "content": "hi"}
    asked = text.render_chat([question])
    continued = text.render_chat([question, {"role": "assistant", "content": " bat"}], open_ended=True)
    assert continued == asked + " bat"
