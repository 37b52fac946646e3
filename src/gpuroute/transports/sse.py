"""Watches a server-sent event stream pass by: how much was delivered, did it fail inside, was it complete.

An engine that fails while it generates says so inside the 200 that it has begun: vLLM sends an event with `error`, a
dead worker simply ends the stream. Neither shows at the level of HTTP. On the good path this costs a byte search per
chunk; events are parsed only when they look like trouble, and at the end.
"""

from __future__ import annotations

import json
from collections import deque
from typing import Any

TAIL = 64 * 1024
"""Bytes at the end of a stream that are kept, for `partial_text` and for its last event; of a longer one, all of it."""
LONGEST = 16 * 1024 * 1024
"""Bytes up to which that holds: what has no end is no event."""

_ENDS = frozenset({"message_stop", "response.completed", "response.incomplete", "response.failed"})
# What ends a stream by these APIs. Others end by closing, so nothing can be missed.
_MARKED = (b"/chat/completions", b"/completions", b"/messages", b"/responses")


class StreamFailed(Exception):
    """An error event arrived: `before` are the bytes of the chunk that come before it, `code` what it said, or 0."""

    def __init__(self, message: str, before: bytes, code: int) -> None:
        super().__init__(message)
        self.before = before
        self.code = code


class Watch:
    """Counts what a response delivers. For any body; events are looked at only if it is an event stream."""

    __slots__ = ("_is_events", "_kept", "_marked", "_pending", "_tail", "_under_way", "bytes", "events")

    def __init__(self, path: bytes, content_type: bytes) -> None:
        self.bytes = 0
        self.events = 0
        self._is_events = content_type.startswith(b"text/event-stream")
        self._marked = path.partition(b"?")[0].endswith(_MARKED)
        self._tail: deque[bytes] = deque()
        self._kept = 0
        self._pending = b""
        self._under_way = 0  # bytes of the event under way, all of which are kept: the last one may be long

    def add(self, chunk: bytes) -> None:
        """Note a chunk before it is delivered. Raises StreamFailed if it tells that the generation failed."""
        if self._is_events:
            data = self._pending + chunk if self._pending else chunk
            failure = _failure(data, len(data) - len(chunk)) if b'"error"' in data else None
            if failure is not None:
                self._keep(failure.before)
                self.bytes += len(failure.before)
                raise failure
            self._under_way += len(chunk)
            self._keep(chunk)
            self._count(data)
        self.bytes += len(chunk)

    @property
    def is_events(self) -> bool:
        """True for an event stream."""
        return self._is_events

    @property
    def ended(self) -> bool:
        """True if the mark of a regular end was delivered."""
        return self._is_events and any(map(_ends, self._events()[-3:]))

    @property
    def complete(self) -> bool:
        """True if the body may end here: its API marks no end, or the mark was delivered."""
        return not (self._is_events and self._marked) or self.ended

    def text(self) -> str:
        """The generated text in the tail of what was delivered, as far as it can be understood."""
        return "".join(map(_text_of, self._events())) if self._is_events else ""

    def _count(self, data: bytes) -> None:
        if data.endswith(b"\n\n"):  # as engines write: whole events
            self.events += data.count(b"\n\n")
            self._pending = b""
            self._under_way = 0
            return
        end = _after_last_event(data, len(data))
        self.events += data.count(b"\n\n", 0, end) + data.count(b"\r\n\r\n", 0, end)
        if end:
            self._under_way = len(data) - end
        self._pending = data[end:][-TAIL:]

    def _keep(self, chunk: bytes) -> None:
        self._tail.append(chunk)
        self._kept += len(chunk)
        while self._kept - len(self._tail[0]) >= max(TAIL, min(self._under_way, LONGEST)):
            self._kept -= len(self._tail.popleft())

    def _events(self) -> list[bytes]:
        return _split(b"".join(self._tail))


def _after_last_event(data: bytes, end: int) -> int:
    """Where the event that is under way at `end` began."""
    lf, crlf = data.rfind(b"\n\n", 0, end), data.rfind(b"\r\n\r\n", 0, end)
    return max(lf + 2 if lf >= 0 else 0, crlf + 4 if crlf >= 0 else 0)


def _split(data: bytes) -> list[bytes]:
    """The data of each event, complete or not."""
    blocks = data.replace(b"\r\n", b"\n").split(b"\n\n")
    return [found for block in blocks if (found := _data_of(block))]


def _data_of(block: bytes) -> bytes:
    lines = (line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:"))
    return b"\n".join(lines)


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return event if isinstance(event, dict) else {}


def _failure(data: bytes, old: int) -> StreamFailed | None:
    """The first event of `data` that is an error; the first `old` bytes of `data` were delivered before."""
    at = 0
    for line in data.splitlines(keepends=True):
        event = _parsed(line[5:]) if line.startswith(b"data:") and b'"error"' in line else {}
        error = event.get("error")
        if error or event.get("object") == "error":
            start = max(old, _after_last_event(data, at))
            return StreamFailed(_message(error or event), data[old:start], _code(error or event))
        at += len(line)
    return None


def _message(error: Any) -> str:
    text = error.get("message") or error.get("type") if isinstance(error, dict) else error
    return str(text or "error event")[:300]


def _code(error: Any) -> int:
    code = error.get("code") or error.get("status_code") if isinstance(error, dict) else None
    return code if isinstance(code, int) else 0


def _ends(data: bytes) -> bool:
    if data.strip() == b"[DONE]":
        return True
    event = _parsed(data)
    choices = event.get("choices")
    finished = isinstance(choices, list) and any(isinstance(c, dict) and c.get("finish_reason") for c in choices)
    # Servers that send no [DONE] still say why they stopped.
    return event.get("type") in _ENDS or finished


def _text_of(data: bytes) -> str:
    event = _parsed(data)
    delta = event.get("delta")
    if isinstance(delta, str):
        return delta  # OpenAI responses
    if isinstance(delta, dict):
        return _string(delta.get("text"))  # Anthropic
    choices = event.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else event
    if not isinstance(choice, dict):
        return ""
    inner = choice.get("delta")
    return _string(inner.get("content")) if isinstance(inner, dict) else _string(choice.get("text"))


def _string(value: Any) -> str:
    return value if isinstance(value, str) else ""
