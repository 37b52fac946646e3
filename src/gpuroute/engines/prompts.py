"""Request bodies of every API that the engines speak, reduced to one canonical prompt.

Only what an engine's prefix cache sees matters: the model, the adapter, the cache salt, the tools (chat templates
render them first), then the messages in order. Two bodies that render to the same prompt should give the same bytes
here, whatever the order of their JSON keys: a string and its single text part, absent and null fields, moved
`cache_control` marks. Images, audio and files stand by the hash of their content, at their place. Text is not
normalised (NFC and NFD are different tokens).

Reading never raises and never touches the body: one that cannot be read (not JSON, compressed, a generator, an
unknown path) gives None, which means no affinity. Any thread.

The cost is that of `json.loads`: about 2.5 ms for a MiB of text. Long strings of a large body (images) are therefore
set aside first, found by their quotes at memchr speed, and looked at only where they matter.
"""

from __future__ import annotations

import json
from struct import error as StructError  # noqa: N812
from struct import pack
from typing import Any

from xxhash import xxh3_64_hexdigest

from gpuroute.core.prefix import MAX_BYTES, Prompt

MEDIA_TOKENS = 1024
"""Prompt tokens reckoned for one image, audio clip or file: its bytes say nothing about them."""

_GENERATE = ("text", "input_ids", "inputs", "text_input", "prompt")
_FIELDS = {
    "completions": ("messages", "prompt"),  # OpenAI: /v1/chat/completions and /v1/completions
    "responses": ("instructions", "input"),
    "embeddings": ("messages", "input"),
    "messages": ("system", "messages"),  # Anthropic
    "completion": ("prompt",),  # llama.cpp
    "generate": _GENERATE,  # SGLang, TGI, Triton
    "generate_stream": _GENERATE,
    "infer": ("inputs",),  # KServe v2
}
_SYSTEM = ("instructions", "system")
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens", "n_predict")
_TEXT_TYPES = ("text", "input_text", "output_text")
_MEDIA_WORDS = ("image", "audio", "video", "file", "document")
_UNSEEN = frozenset(("role", "content", "cache_control", "id", "status", "type"))

_LARGE_BODY = 256 * 1024
_LONG_STRING = 4096
_QUOTES = 4096  # looked at in a large body: 1 ms at most, where short strings abound and nothing can be won
_FOLDED = 256  # characters of a string inside a media part above which its hash stands for it

_ITEM, _FIELD, _PART = "\x1e", "\x1f", "\x1d"

_loads = json.JSONDecoder().decode
_dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode

Json = dict[str, Any]


def read_prompt(path: str, body: bytes | None) -> Prompt | None:
    """The prompt in a request `body` sent to the URL `path`; None if there is none to be read. Never raises."""
    fields = _FIELDS.get(path.partition("?")[0].rpartition("/")[2])
    if fields is None or not isinstance(body, bytes):
        return None
    if fields == ("inputs",) and b'"BYTES"' not in body:
        return None  # tensors of numbers: no prefix to reuse, and slow to parse
    try:
        raw, long_strings = _set_aside(body) if len(body) > _LARGE_BODY else (body, {})
        request = _loads(raw.decode("utf-8", "surrogatepass"))
        return _prompt(request, fields, long_strings) if isinstance(request, dict) else None
    except (ValueError, RecursionError):
        return None


def _prompt(request: Json, fields: tuple[str, ...], long_strings: dict[str, bytes]) -> Prompt | None:
    canon = Canon(long_strings)
    options = _options(request)
    model, salt = request.get("model"), _str(request, "cache_salt") + _str(request, "extra_key")
    model = model if isinstance(model, str) else ""  # as it is: " small " is no name that an engine would know
    adapter = request.get("lora_path") or options.get("adapter_id") or request.get("lora")
    adapter = adapter if isinstance(adapter, str) else _dumps(adapter) if adapter else ""
    canon.text(f"{model}{_FIELD}{adapter}{_FIELD}{salt}")
    if tools := request.get("tools") or request.get("functions"):
        canon.turn("tools", "", tools)
    found = [canon.field(name, request.get(name)) for name in fields]
    if not any(found):
        return None
    return Prompt(
        *canon.finish(),
        model,
        adapter,
        _str(request, "prompt_cache_key"),
        salt,
        _user(request),
        request.get("stream") is True,
        next((n for name in _LIMITS if type(n := options.get(name)) is int and n > 0), 0),
    )


class Canon:
    """Collects the canonical bytes of one prompt, no more than can change a hash, and counts all of it."""

    __slots__ = ("_long", "_media", "_parts", "_size")

    def __init__(self, long_strings: dict[str, bytes]) -> None:
        self._long = long_strings
        self._parts: list[str | bytes] = []
        self._size = 0  # characters of text and bytes of token ids so far, also those not kept
        self._media = 0

    def field(self, name: str, value: object) -> bool:
        """Append one field of the request: a prompt, or a list of turns or prompts. False if it is empty."""
        if not value:
            return False
        if name in _SYSTEM:
            self.turn("system", value)
        elif type(value) is str and name == "input":
            self.turn("user", value)
        else:
            self._prompts(value)
        return True

    def turn(self, role: object, content: object, rest: object = None) -> None:
        """Append one turn: its role, its content in any form, and what else a template may show of it."""
        self.text(f"{_ITEM}{role}{_FIELD}")
        self._content(content)
        if rest:
            self.text(_FIELD)
            self._value(rest)

    def text(self, text: str) -> None:
        """Append text."""
        size = len(text)
        if self._long and (raw := self._long.get(text)):
            size, text = len(raw), raw[: MAX_BYTES + 4].decode("utf-8", "replace")
        if self._size < MAX_BYTES:
            self._parts.append(text[:MAX_BYTES])
        self._size += size

    def finish(self) -> tuple[bytes, int]:
        """The canonical bytes, and an estimate of the tokens of the whole prompt."""
        data = b"".join([part if isinstance(part, bytes) else _encode(part) for part in self._parts])
        kept = sum(map(len, self._parts))
        return data[:MAX_BYTES], self._size * len(data) // (4 * kept) + self._media * MEDIA_TOKENS

    def _prompts(self, value: object) -> None:
        if isinstance(value, list) and value and type(value[0]) is int:
            self._ids(value)
        elif isinstance(value, list):
            for item in value:
                self._item(item)
        else:
            self._item(value)

    def _item(self, item: object) -> None:
        if isinstance(item, dict):
            rest = {k: v for k, v in item.items() if k not in _UNSEEN and v} if len(item) > 2 else None
            self.turn(item.get("role") or item.get("type") or "", item.get("content"), rest)
        elif isinstance(item, list):
            self._prompts(item)
        else:
            self.text(_ITEM)
            self._value(item)

    def _ids(self, ids: list[int]) -> None:
        try:
            data = pack(f"<{len(ids)}I", *ids)  # four bytes each: a block is 256 tokens, as it is of text
        except StructError:  # negative, huge or no numbers: the engine will refuse them
            self._value(ids)
            return
        self.text(_ITEM)
        if self._size < MAX_BYTES:
            self._parts.append(data)
        self._size += len(data)

    def _content(self, content: object) -> None:
        if type(content) is str:
            self.text(content)
        elif isinstance(content, list):
            for position, part in enumerate(content):
                if position:
                    self.text(_PART)
                self._part(part)
        elif content:
            self._part(content)

    def _part(self, part: object) -> None:
        if not isinstance(part, dict):
            self._value(part)
            return
        kind = _str(part, "type")
        if kind in _TEXT_TYPES and isinstance(part.get("text"), str):
            self.text(part["text"])
        elif any(word in kind for word in _MEDIA_WORDS):
            self._media += 1
            self.text(_dumps(self._folded(part)))
        else:
            self.turn(kind, part.get("content"), {k: v for k, v in part.items() if k not in _UNSEEN and v})

    def _value(self, value: object) -> None:
        self.text(value if isinstance(value, str) else _dumps(self._restored(value) if self._long else value))

    def _folded(self, value: object) -> object:
        """`value` with hashes in the place of its long strings."""
        if isinstance(value, str):
            raw = self._long.get(value) or (_encode(value) if len(value) > _FOLDED else b"")
            return xxh3_64_hexdigest(raw) if raw else value
        if isinstance(value, dict):
            return {name: self._folded(item) for name, item in value.items() if name != "cache_control"}
        return [self._folded(item) for item in value] if isinstance(value, list) else value

    def _restored(self, value: object) -> object:
        """`value` with the strings that were set aside."""
        if isinstance(value, str):
            return self._long[value].decode("utf-8", "replace") if value in self._long else value
        if isinstance(value, dict):
            return {name: self._restored(item) for name, item in value.items()}
        return [self._restored(item) for item in value] if isinstance(value, list) else value


def _set_aside(body: bytes) -> tuple[bytes, dict[str, bytes]]:
    """The body with a short name in the place of each long string without escapes, and those strings by name."""
    kept: list[bytes] = []
    long_strings: dict[str, bytes] = {}
    done = 0
    for start, end in _strings(body):
        if end - start > _LONG_STRING and body.find(b"\\", start, end) < 0:
            long_strings[f"\0{len(kept)}\0"] = body[start:end]
            kept.append(body[done:start])
            done = end
    kept.append(body[done:])
    if len(kept) == 1 or any(b"\\u0000" in part for part in kept):  # the names must be nobody else's strings
        return body, {}
    return b"".join([kept[0], *(b"\\u0000%d\\u0000" % n + part for n, part in enumerate(kept[1:]))]), long_strings


def _strings(body: bytes) -> list[tuple[int, int]]:
    """Where the JSON strings of `body` begin and end, as far as its first few thousand quotes tell."""
    found, start, quote = [], -1, -1
    for _ in range(_QUOTES):
        quote = body.find(b'"', quote + 1)
        if quote < 0:
            break
        if start < 0:
            start = quote + 1
        elif not _escaped(body, quote):
            found.append((start, quote))
            start = -1
    return found


def _escaped(body: bytes, at: int) -> bool:
    first = at
    while body[first - 1] == 0x5C:
        first -= 1
    return (at - first) % 2 == 1


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _str(request: Json, name: str) -> str:
    value = request.get(name)
    return value.strip() if isinstance(value, str) else ""


def _user(request: Json) -> str:
    metadata = request.get("metadata")
    nested = _str(metadata, "user_id") if isinstance(metadata, dict) else ""
    return _str(request, "user") or _str(request, "safety_identifier") or nested


def _options(request: Json) -> Json:
    nested = request.get("parameters") or request.get("sampling_params")
    return {**nested, **request} if isinstance(nested, dict) else request
