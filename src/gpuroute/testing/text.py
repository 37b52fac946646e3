"""The stand-in's language model: the next token is a function of all text so far, and of nothing else.

Every replica therefore answers a prompt alike, and a prompt followed by the first half of its answer yields exactly
the second half: what continuation after a lost stream must reproduce token by token. CRC-32 is used because it
extends (`crc(a + b)` needs only `crc(a)` and `b`) and is the same in every process, unlike `hash()`.

All tokens are four UTF-8 bytes, so token counts add up when text moves from the answer into the prompt.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from zlib import crc32

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TOKEN_BYTES = 4
BLOCK_TOKENS = 16
MEAN_ANSWER_TOKENS = 64


def _vocabulary() -> tuple[str, ...]:
    """256 tokens " bat", " der", ...; every 32nd has a two-byte letter, to find code that splits characters."""
    words = [f" {a}{b}{c}" for a in "bdfgklmn" for b in "aeio" for c in "klmnrstv"]
    for i in range(0, 256, 32):
        words[i] = words[i][:2] + "é"
    return tuple(words)


VOCABULARY = _vocabulary()


def _mix(context: int) -> int:
    """Spread a CRC: neighbouring contexts must not give neighbouring tokens."""
    return (context * 2_654_435_761) & 0xFFFF_FFFF


def extend(context: int, text: str) -> int:
    """The context after `text`."""
    return crc32(text.encode("utf-8", "surrogatepass"), context)


def next_token(context: int) -> str:
    """The token that follows `context`."""
    return VOCABULARY[_mix(context) >> 24]


def ends(context: int) -> bool:
    """True if a model that may stop by itself stops here (once in MEAN_ANSWER_TOKENS)."""
    return (_mix(context) >> 8) % MEAN_ANSWER_TOKENS == 0


def answer(prompt: str, tokens: int) -> str:
    """The first `tokens` tokens that follow `prompt`: what a test compares a stream with."""
    return "".join(token for token, _ in zip(tokens_after(extend(0, prompt)), range(tokens), strict=False))


def tokens_after(context: int) -> Iterator[str]:
    """All tokens after `context`, without end."""
    while True:
        token = next_token(context)
        yield token
        context = extend(context, token)


def natural_length(context: int, limit: int) -> int:
    """How many tokens the model says before it stops by itself: 1 to `limit`."""
    for length, token in enumerate(tokens_after(context), 1):
        context = extend(context, token)
        if ends(context) or length >= limit:
            return length
    return limit


def count_tokens(text: str) -> int:
    """Tokens of a prompt, at least 1."""
    return max(1, -(-len(text.encode("utf-8", "surrogatepass")) // TOKEN_BYTES))


def block_hashes(text: str) -> tuple[int, ...]:
    """One hash per whole block of 16 tokens, each of the prompt up to the block's end."""
    data = text.encode("utf-8", "surrogatepass")
    size = BLOCK_TOKENS * TOKEN_BYTES
    hashes, context = [], 0
    for end in range(size, len(data) + 1, size):
        context = crc32(data[end - size : end], context)
        hashes.append(end << 32 | context)
    return tuple(hashes)


def render_chat(messages: Sequence[dict[str, Any]], *, tools: object = None, open_ended: bool = False) -> str:
    """Messages as one prompt; `open_ended` leaves the last message unfinished, so that the answer continues it."""
    parts = [f"<|tools|>{json.dumps(tools, sort_keys=True)}<|end|>"] if tools else []
    parts += [f"<|{message.get('role', 'user')}|>{content_text(message.get('content'))}<|end|>" for message in messages]
    if open_ended and messages:
        return "".join(parts).removesuffix("<|end|>")
    return "".join(parts) + "<|assistant|>"


def content_text(content: object) -> str:
    """The text of a message's content: a string, or parts of which those without text count as their JSON."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_part_text(part) for part in content)
    return "" if content is None else json.dumps(content, sort_keys=True)


def _part_text(part: object) -> str:
    text = part.get("text") if isinstance(part, dict) else None
    return text if isinstance(text, str) else json.dumps(part, sort_keys=True)
