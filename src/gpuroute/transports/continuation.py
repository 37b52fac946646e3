"""Going on with a stream of generated text on another endpoint, where the first one broke off. Opt in.

The text that the caller has is appended to the prompt (completions), or given as an assistant message to be continued
(chat: `continue_final_message`, which vLLM and SGLang know), and the new stream is joined to the old one: whole events
only, under the first stream's id, without a second opening, with token counts that add up.

What cannot be joined without guessing is not continued, and ends with StreamInterrupted as it would without this: tool
calls, reasoning, log probabilities, several choices, structured output, prompts of token ids. `max_tokens` is reduced by
the tokens that arrived: by `usage` or `token_ids` where events carry them, else one per event, which is what the engines
send unless told otherwise (`--stream-interval`).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from gpuroute.errors import StreamInterrupted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from gpuroute.transports.bodies import Outgoing
    from gpuroute.transports.routes import Route
    from gpuroute.transports.trips import Head

CHAT_ENGINES = frozenset({"vllm", "sglang"})
COMPLETION_TOKENS = 16
"""What vLLM generates at most for a completion that does not say."""

_UNJOINABLE = (
    "tools", "functions", "logprobs", "prompt_logprobs", "echo", "suffix", "response_format", "guided_json",
    "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "use_beam_search", "tool_choice",
)  # fmt: skip
_END = b"data: [DONE]\n\n"


def seam_of(out: Outgoing, head: Head, engine: str) -> Seam | None:
    """What it takes to continue this answer; None if it cannot be done."""
    path = out.path.partition(b"?")[0]
    chat = path.endswith(b"/chat/completions")
    if not path.endswith(b"/completions") or (chat and engine not in CHAT_ENGINES):
        return None
    if any(name.lower() == b"content-encoding" for name, _ in head.headers):
        return None
    body = _object(out.content or b"")
    plain = body.get("n") in (None, 1) and body.get("best_of") in (None, 1)
    if not body.get("stream") or not plain or any(body.get(name) for name in _UNJOINABLE):
        return None
    if chat:
        messages = body.get("messages")
        joinable = isinstance(messages, list) and bool(messages) and _continuable(body, messages)
    else:
        joinable = isinstance(body.get("prompt"), str)
    return Seam(body, chat=chat) if joinable else None


def _continuable(body: dict[str, Any], messages: list[Any]) -> bool:
    last = messages[-1]
    return not body.get("continue_final_message") or (isinstance(last, dict) and isinstance(last.get("content"), str))


class Seam:
    """One answer over all streams that bring it: what the caller has of it. Not locked: one reader at a time."""

    def __init__(self, body: dict[str, Any], *, chat: bool) -> None:
        self.joined = False
        self._body = body
        self._chat = chat
        self._raw = bytearray()  # the event under way
        self._unread: list[bytes] = []  # events that were delivered but not looked into yet
        self._texts: list[str] = []
        self._tokens = 0
        self._before = 0  # tokens of earlier streams
        self._told = 0  # tokens by the count of the present stream's own usage
        self._finished = False
        self._plain = True
        self._identity: dict[str, Any] = {}

    @property
    def text(self) -> str:
        """The generated text that the caller has."""
        self._read()
        return "".join(self._texts)

    @property
    def can_resume(self) -> bool:
        """True if what was delivered so far can be continued."""
        self._read()
        return self._plain

    def feed(self, chunk: bytes) -> bytes:
        """The whole events that a chunk completes, as the caller shall see them."""
        self._raw += chunk
        end = max(self._raw.rfind(b"\n\n") + 2, self._raw.rfind(b"\r\n\r\n") + 4)
        if end < 4:
            return b""
        events = bytes(self._raw[:end])
        del self._raw[:end]
        if self.joined:
            events = b"".join(map(self._rejoined, _split(events)))
        else:
            self._unread.append(events)
            if len(self._unread) >= 1_000:
                self._read()
        return events

    def rest(self) -> bytes:
        """What is left when a stream ends by itself: an event without its empty line."""
        left = bytes(self._raw)
        self._raw.clear()
        return left

    def cut(self) -> bytes | None:
        """The stream broke: the body that asks for the rest, or None if the caller has every token already."""
        self._raw.clear()
        self._read()
        self.joined = True
        self._before, self._told = self._tokens, 0
        limit = self._limit()
        if self._finished or (limit is not None and self._tokens >= limit[1]):
            return None
        return json.dumps(self._continued(limit), ensure_ascii=False, separators=(",", ":")).encode()

    def end(self) -> bytes:
        """The end of a stream that lost nothing but its end."""
        if self._finished:
            return _END
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        if self._chat:
            choice["delta"] = {}
        else:
            choice["text"] = ""
        event = {**self._identity, "choices": [choice]}
        return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n" + _END

    def _continued(self, limit: tuple[str, int] | None) -> dict[str, Any]:
        body = dict(self._body)
        if not self._texts:
            return body
        text = "".join(self._texts)
        if limit is not None:
            body[limit[0]] = limit[1] - self._tokens
        if body.get("min_tokens"):
            body["min_tokens"] = max(0, body["min_tokens"] - self._tokens)
        if not self._chat:
            return {**body, "prompt": body["prompt"] + text}
        messages = list(body["messages"])
        if body.get("continue_final_message"):
            messages[-1] = {**messages[-1], "content": messages[-1]["content"] + text}
        else:
            messages.append({"role": "assistant", "content": text})
        return {**body, "messages": messages, "continue_final_message": True, "add_generation_prompt": False}

    def _limit(self) -> tuple[str, int] | None:
        for name in ("max_completion_tokens", "max_tokens"):
            if isinstance(self._body.get(name), int):
                return name, self._body[name]
        return None if self._chat else ("max_tokens", COMPLETION_TOKENS)

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        for event in _split(b"".join(unread)):
            self._note(_object(_data(event)))

    def _note(self, event: dict[str, Any]) -> None:
        """Learn from one event that the caller gets."""
        if not self._identity:
            self._identity = {key: event[key] for key in ("id", "object", "created", "model") if key in event}
        choice = _first_choice(event)
        delta = choice.get("delta") if self._chat else choice
        delta = delta if isinstance(delta, dict) else {}
        text = delta.get("content" if self._chat else "text")
        self._plain = self._plain and not any(delta.get(name) for name in _STRANGE)
        self._finished = self._finished or bool(choice.get("finish_reason"))
        if isinstance(text, str) and text:
            self._texts.append(text)
            ids = choice.get("token_ids")
            self._tokens += len(ids) if isinstance(ids, list) and ids else 1
        usage = event.get("usage")
        if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
            self._told = usage["completion_tokens"]
            self._tokens = max(self._tokens, self._before + self._told)

    def _rejoined(self, raw: bytes) -> bytes:
        """An event of a later stream as a part of the first: same id, no second opening, usage over all."""
        event = _object(_data(raw))
        if not event:
            return raw
        self._note(event)
        choice = _first_choice(event)
        delta = choice.get("delta")
        opens = isinstance(delta, dict) and delta.pop("role", None) and not delta.get("content")
        if opens and not choice.get("finish_reason") and not event.get("usage"):
            return b""
        usage = event.get("usage")
        if isinstance(usage, dict):
            event["usage"] = self._summed(usage)
        merged = {**event, **self._identity}
        return b"data: " + json.dumps(merged, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"

    def _summed(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The later stream's prompt held the text of the earlier ones: that was generated, not asked."""
        moved = {"prompt_tokens": -self._before, "completion_tokens": self._before}
        return {**usage, **{key: usage[key] + more for key, more in moved.items() if isinstance(usage.get(key), int)}}


_STRANGE = ("tool_calls", "function_call", "reasoning", "reasoning_content", "refusal", "logprobs", "audio")


def _first_choice(event: dict[str, Any]) -> dict[str, Any]:
    choices = event.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    return choice if isinstance(choice, dict) else {}


def _split(events: bytes) -> list[bytes]:
    """Events with their empty lines."""
    blocks = events.replace(b"\r\n", b"\n").split(b"\n\n")
    return [block + b"\n\n" for block in blocks if block]


def _data(event: bytes) -> bytes:
    return b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))


def _object(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


class _Joint:
    """What both seamless streams share: the call's route and driver, and the stream that brings the text now."""

    def __init__(self, driver: Any, route: Route, seam: Seam, inner: Any) -> None:
        self._driver = driver
        self._route = route
        self._seam = seam
        self._inner = inner

    def _again(self, error: StreamInterrupted) -> bytes | None:
        """The body to go on with after a break; None if nothing is missing. Raises the error if there is no going on."""
        trip = getattr(self._inner, "_trip", None)
        if trip is None or not self._seam.can_resume:
            raise error
        body = self._seam.cut()
        if body is None:
            self._route.conclude(self._driver.router.clock())
        elif not trip.again:
            raise error
        return body

    def _asks(self, body: bytes) -> Route:
        route = self._route
        route.out = route.out.with_content(body)
        return route

    def _took_over(self, response: Any, error: StreamInterrupted) -> bool:
        """Go on with a new response, if it is one."""
        self._inner = response.stream
        if response.status_code >= 400:
            raise error
        return True


class Seamless(_Joint):
    """One stream over several endpoints, for threads."""

    def __iter__(self) -> Iterator[bytes]:
        going = True
        while going:
            going = False
            try:
                for chunk in self._inner:
                    if events := self._seam.feed(chunk):
                        yield events
                if rest := self._seam.rest():
                    yield rest
            except StreamInterrupted as error:
                body = self._again(error)
                if body is None:
                    yield self._seam.end()
                else:
                    going = self._took_over(self._resumed(body, error), error)

    def _resumed(self, body: bytes, error: StreamInterrupted) -> Any:
        try:
            return self._driver.drive(self._asks(body))
        except Exception as cause:
            raise error from cause

    def close(self) -> None:
        """Hang up if the body was not read to its end. Idempotent."""
        self._inner.close()


class AsyncSeamless(_Joint):
    """One stream over several endpoints, for tasks."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        going = True
        while going:
            going = False
            try:
                async for chunk in self._inner:
                    if events := self._seam.feed(chunk):
                        yield events
                if rest := self._seam.rest():
                    yield rest
            except StreamInterrupted as error:
                body = self._again(error)
                if body is None:
                    yield self._seam.end()
                else:
                    going = self._took_over(await self._resumed(body, error), error)

    async def _resumed(self, body: bytes, error: StreamInterrupted) -> Any:
        try:
            return await self._driver.drive(self._asks(body))
        except Exception as cause:
            raise error from cause

    async def aclose(self) -> None:
        """Hang up if the body was not read to its end. Idempotent."""
        await self._inner.aclose()
