"""The answers of the OpenAI and Anthropic interfaces, worded as vLLM 0.32 words them.

Each class writes one answer, streamed (`opening`, `token`, `closing`: server-sent events) or whole.
"""

from __future__ import annotations

import base64
import json
import struct
import time
from dataclasses import dataclass
from typing import Any, Protocol
from zlib import crc32


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one answer."""

    prompt: int
    cached: int
    completion: int

    def as_openai(self) -> dict[str, Any]:
        """The `usage` object of the OpenAI interfaces."""
        return {
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.completion,
            "completion_tokens": self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }

    def as_anthropic(self) -> dict[str, int]:
        """The `usage` object of the Anthropic interface: cached tokens are counted apart."""
        return {
            "input_tokens": self.prompt - self.cached,
            "cache_read_input_tokens": self.cached,
            "output_tokens": self.completion,
        }


class Format(Protocol):
    """Writes one answer."""

    def opening(self, usage: Usage) -> list[bytes]:
        """Events before the first token."""

    def token(self, text: str, finish: str | None) -> bytes:
        """The event of one token; `finish` is `length` or `stop` with the last one."""

    def closing(self, usage: Usage, finish: str) -> list[bytes]:
        """Events after the last token."""

    def whole(self, text: str, finish: str, usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""


def dumps(value: object) -> bytes:
    """Compact JSON."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


def event(value: object, name: str = "") -> bytes:
    """A server-sent event."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + dumps(value) + b"\n\n"


_DONE = b"data: [DONE]\n\n"
_TEXT = "\x00text"
_FINISH = "\x00finish"


class _OpenAiFormat:
    """What chat and completions share. Token events are cut from one template: `dumps` per token costs three times."""

    kind = chunk_kind = prefix = ""

    def __init__(self, model: str, request_id: str, *, include_usage: bool) -> None:
        self.model = model
        self.id = f"{self.prefix}-{request_id}"
        self.created = int(time.time())
        self._include_usage = include_usage
        self._parts: tuple[bytes, bytes, bytes] | None = None

    def opening(self, usage: Usage) -> list[bytes]:  # noqa: ARG002
        return []

    def token(self, text: str, finish: str | None) -> bytes:
        if self._parts is None:
            self._parts = self._template()
        head, middle, tail = self._parts
        return head + dumps(text) + middle + (b"null" if finish is None else b'"%b"' % finish.encode()) + tail

    def closing(self, usage: Usage, finish: str) -> list[bytes]:  # noqa: ARG002
        if not self._include_usage:
            return [_DONE]
        return [event({**self._chunk([]), "usage": usage.as_openai()}), _DONE]

    def whole(self, text: str, finish: str, usage: Usage) -> bytes:
        choice = {**self._whole_choice(text), "logprobs": None, "finish_reason": finish, "stop_reason": None}
        return dumps({**self._base(self.kind), "choices": [choice], "usage": usage.as_openai()})

    def _template(self) -> tuple[bytes, bytes, bytes]:
        head, _, rest = event(self._chunk([self._token_choice(_TEXT, _FINISH)])).partition(dumps(_TEXT))
        middle, _, tail = rest.partition(dumps(_FINISH))
        return head, middle, tail

    def _base(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._base(self.chunk_kind), "choices": choices}

    def _token_choice(self, text: str, finish: str) -> dict[str, Any]:
        raise NotImplementedError

    def _whole_choice(self, text: str) -> dict[str, Any]:
        raise NotImplementedError


class CompletionFormat(_OpenAiFormat):
    """/v1/completions."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def _token_choice(self, text: str, finish: str) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": None}

    def _whole_choice(self, text: str) -> dict[str, Any]:
        return {"index": 0, "text": text}


class ChatFormat(_OpenAiFormat):
    """/v1/chat/completions."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def opening(self, usage: Usage) -> list[bytes]:  # noqa: ARG002
        delta = {"role": "assistant", "content": ""}
        return [event(self._chunk([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]))]

    def _token_choice(self, text: str, finish: str) -> dict[str, Any]:
        return {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": finish}

    def _whole_choice(self, text: str) -> dict[str, Any]:
        return {"index": 0, "message": {"role": "assistant", "content": text}}


_STOP_REASONS = {"length": "max_tokens", "stop": "end_turn"}


class MessagesFormat:
    """/v1/messages, the Anthropic interface."""

    def __init__(self, model: str, request_id: str) -> None:
        self.model = model
        self.id = f"msg_{request_id}"

    def opening(self, usage: Usage) -> list[bytes]:
        block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        message = self._message([], None, usage)
        return [event({"type": "message_start", "message": message}, "message_start"), event(block, block["type"])]  # type: ignore[arg-type]

    def token(self, text: str, finish: str | None) -> bytes:  # noqa: ARG002  (told by message_delta)
        delta = {"type": "text_delta", "text": text}
        return event({"type": "content_block_delta", "index": 0, "delta": delta}, "content_block_delta")

    def closing(self, usage: Usage, finish: str) -> list[bytes]:
        delta = {"stop_reason": _STOP_REASONS[finish], "stop_sequence": None}
        return [
            event({"type": "content_block_stop", "index": 0}, "content_block_stop"),
            event({"type": "message_delta", "delta": delta, "usage": usage.as_anthropic()}, "message_delta"),
            event({"type": "message_stop"}, "message_stop"),
        ]

    def whole(self, text: str, finish: str, usage: Usage) -> bytes:
        return dumps(self._message([{"type": "text", "text": text}], _STOP_REASONS[finish], usage))

    def _message(self, content: list[dict[str, str]], stop: str | None, usage: Usage) -> dict[str, Any]:
        base = {"id": self.id, "type": "message", "role": "assistant", "model": self.model}
        return {**base, "content": content, "stop_reason": stop, "stop_sequence": None, "usage": usage.as_anthropic()}


def embeddings(model: str, texts: list[str], usage: Usage, *, size: int, as_base64: bool) -> bytes:
    """The body of /v1/embeddings: unit-free vectors that depend on the text alone."""
    data = [
        {"object": "embedding", "index": i, "embedding": _encode(embedding(text, size), as_base64=as_base64)}
        for i, text in enumerate(texts)
    ]
    tokens = {"prompt_tokens": usage.prompt, "total_tokens": usage.prompt, "completion_tokens": 0}
    return dumps({"object": "list", "created": int(time.time()), "model": model, "data": data, "usage": tokens})


def embedding(text: str, size: int) -> list[float]:
    """The vector of a text: `size` numbers in [-1, 1)."""
    seed = crc32(text.encode("utf-8", "surrogatepass"))
    return [crc32(b"%d" % i, seed) / 2**31 - 1.0 for i in range(size)]


def _encode(vector: list[float], *, as_base64: bool) -> object:
    if not as_base64:
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
