"""Request bodies of the inference interfaces, read into one shape; what vLLM refuses is refused in its words."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from . import text

if TYPE_CHECKING:
    from collections.abc import Callable

Kind = Literal["chat", "completion", "messages", "embeddings"]
_COMPLETION_TOKENS = 16


class ApiError(Exception):
    """An error answer of the interface."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.param = status, kind, param


@dataclass(frozen=True, slots=True)
class Ask:
    """One inference request. `max_tokens` None = until the model stops by itself."""

    kind: Kind
    model: str
    prompt: str
    prompt_tokens: int
    max_tokens: int | None = None
    stream: bool = False
    include_usage: bool = False
    texts: tuple[str, ...] = ()
    dimensions: int = 8
    as_base64: bool = False


def read_ask(kind: Kind, raw: bytes) -> Ask:
    """Read a body. Raises ApiError (400) for one that vLLM would refuse."""
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise ApiError(400, f"body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(400, "body must be a JSON object")
    if body.get("n", 1) != 1:
        raise ApiError(400, "this stand-in gives one choice: n must be 1", param="n")
    return _READERS[kind](body)


def _read_chat(body: dict[str, Any]) -> Ask:
    continues = bool(body.get("continue_final_message"))
    if continues and body.get("add_generation_prompt", True):
        raise ApiError(400, "Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    prompt = text.render_chat(_messages(body), tools=body.get("tools"), open_ended=continues)
    limit = _limit(body, "max_completion_tokens") or _limit(body, "max_tokens")
    return _generation("chat", body, prompt, limit)


def _read_completion(body: dict[str, Any]) -> Ask:
    prompt = _one_prompt(body.get("prompt"))
    return _generation("completion", body, prompt, _limit(body, "max_tokens") or _COMPLETION_TOKENS)


def _read_messages(body: dict[str, Any]) -> Ask:
    messages = _messages(body)
    system = body.get("system")
    if system:
        messages = [{"role": "system", "content": system}, *messages]
    open_ended = messages[-1].get("role") == "assistant"
    prompt = text.render_chat(messages, tools=body.get("tools"), open_ended=open_ended)
    limit = _limit(body, "max_tokens")
    if limit is None:
        raise ApiError(400, "max_tokens: Field required", param="max_tokens")
    return _generation("messages", body, prompt, limit)


def _read_embeddings(body: dict[str, Any]) -> Ask:
    given = body.get("input")
    items = given if isinstance(given, list) and not _is_token_ids(given) else [given]
    texts = tuple(_one_prompt(item) for item in items)
    return Ask(
        kind="embeddings",
        model=str(body.get("model") or ""),
        prompt="".join(texts),
        prompt_tokens=sum(text.count_tokens(item) for item in texts),
        max_tokens=1,
        texts=texts,
        dimensions=_limit(body, "dimensions") or 8,
        as_base64=body.get("encoding_format") == "base64",
    )


_READERS: dict[Kind, Callable[[dict[str, Any]], Ask]] = {
    "chat": _read_chat,
    "completion": _read_completion,
    "messages": _read_messages,
    "embeddings": _read_embeddings,
}


def _generation(kind: Kind, body: dict[str, Any], prompt: str, limit: int | None) -> Ask:
    options = body.get("stream_options")
    return Ask(
        kind=kind,
        model=str(body.get("model") or ""),
        prompt=prompt,
        prompt_tokens=text.count_tokens(prompt),
        max_tokens=limit,
        stream=bool(body.get("stream")),
        include_usage=isinstance(options, dict) and bool(options.get("include_usage")),
    )


def _messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise ApiError(400, "messages: a list of at least one message is required", param="messages")
    return messages


def _limit(body: dict[str, Any], name: str) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ApiError(400, f"{name} must be at least 1, got {value!r}.", param=name)
    return value


def _one_prompt(prompt: object) -> str:
    """A prompt given as text, as token ids, or as a list of one of these."""
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if _is_token_ids(prompt):
        return "".join(text.VOCABULARY[token % 256] for token in prompt)  # type: ignore[attr-defined]
    raise ApiError(400, "a text or a list of token ids is required; this stand-in takes one prompt", param="prompt")


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, int) for item in value)
