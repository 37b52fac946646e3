"""What the caller asked for, in the form in which it can be sent to any endpoint, and more than once.

The caller's request object is only read. Its body is sent as it is: bytes and seekable files again for every attempt,
generators once. For those the attempt counts as sent from the first byte on, so the core will not repeat it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

from gpuroute.errors import ConfigError
from gpuroute.forms import parse_boolean, parse_duration

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from gpuroute.core.attempt import Attempt

NAME = "gpuroute"
PREFIX = b"x-gpuroute-"
ATTEMPT = b"x-gpuroute-attempt"
"""Tells an endpoint that this is not the call's first attempt, and which one it is."""

ACCEPTED = (
    "timeout (seconds), key (text), attempts (a whole number of at least 1), hedge, reroute, continuation (true, false)"
)
GENERATES = (b"/chat/completions", b"/completions", b"/messages", b"/responses")
_STREAM = re.compile(rb'"stream"\s*:\s*true')

Header = tuple[bytes, bytes]


class Options(NamedTuple):
    """What one call may ask of the router."""

    timeout: float | None = None
    key: str | None = None
    attempts: int | None = None
    hedge: bool | None = None
    reroute: bool | None = None
    continuation: bool | None = None


NO_OPTIONS = Options()


class Outgoing:
    """One request of the caller, read once: immutable but for its body's progress."""

    __slots__ = ("body", "content", "extensions", "headers", "method", "options", "path", "timeouts", "url", "whole")

    def __init__(self, request: Any, library: Any) -> None:
        self.method: str = request.method
        self.url: Any = request.url
        self.extensions: dict[str, Any] = request.extensions
        self.path: bytes = self.extensions.get("target") or request.url.raw_path
        self.timeouts: dict[str, float | None] = self.extensions.get("timeout") or {}
        self.headers, asked = split_headers(request.headers.raw)
        own = self.extensions.get(NAME)
        self.options = read_options(own, asked) if own or asked else NO_OPTIONS
        self.content = content_of(request, library)
        self.body = Body(request.stream, self.content, library)
        self.whole = self.content is not None and is_generation(self.path) and not wants_stream(self.content)

    def with_content(self, content: bytes) -> Outgoing:
        """The same request with another body."""
        other = copy(self)
        length = (b"Content-Length", str(len(content)).encode())
        other.headers = [*(header for header in self.headers if header[0].lower() != b"content-length"), length]
        other.content = content
        other.body = Body(None, content, None)
        return other


class Body:
    """The request's body over all attempts. `shared`: two of them may send it at once; a file has one position only."""

    __slots__ = ("content", "replayable", "rewind", "shared", "source", "started")

    def __init__(self, source: Any, content: bytes | None, library: Any) -> None:
        self.source = source
        self.content = content
        self.rewind = _nothing if content is not None else rewinder(source, library)
        self.replayable = self.rewind is not None
        self.shared = content is not None or (self.rewind is _nothing and all(map(_in_memory, _files(source))))
        self.started = False


class Sending:
    """The body on its way in one attempt; tells the attempt when it has been written completely."""

    __slots__ = ("_attempt", "_body", "_clock")

    def __init__(self, body: Body, attempt: Attempt, clock: Callable[[], float]) -> None:
        self._body = body
        self._attempt = attempt
        self._clock = clock

    def __iter__(self) -> Iterator[bytes]:
        if self._body.content is not None:
            if self._body.content:
                yield self._body.content
        else:
            self._begin()
            yield from self._body.source
        # httpcore asks for more only after it has written what it had.
        self._attempt.sent(self._clock())

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._body.content is not None:
            if self._body.content:
                yield self._body.content
        else:
            self._begin()
            async for chunk in self._body.source:
                yield chunk
        self._attempt.sent(self._clock())

    def _begin(self) -> None:
        body = self._body
        if body.rewind is None:
            self._attempt.sent(self._clock())
        elif body.started:
            body.rewind()
        body.started = True


def split_headers(raw: list[Header]) -> tuple[list[Header], dict[str, str]]:
    """The headers to send on (without Host: that is the endpoint's), and what `x-gpuroute-*` asked for."""
    kept: list[Header] = []
    asked: dict[str, str] = {}
    for header in raw:
        name = header[0].lower()
        if name == ATTEMPT:
            continue  # of a call that a gateway passes on: it counts that one's attempts, not ours
        if name.startswith(PREFIX):
            asked[name[len(PREFIX) :].decode("ascii", "replace")] = header[1].decode("utf-8", "replace")
        elif name != b"host":
            kept.append(header)
    return kept, asked


def read_options(own: Any, asked: dict[str, str]) -> Options:
    """The options of one call: `extensions["gpuroute"]`, then headers. Raises ConfigError on bad ones."""
    if own is not None and not isinstance(own, Mapping):
        raise ConfigError(f"extensions[{NAME!r}] is a {type(own).__name__}; expected a mapping of {ACCEPTED}")
    merged: dict[str, Any] = {**asked, **(own or {})}
    unknown = merged.keys() - set(Options._fields)
    if unknown:
        raise ConfigError(f"unknown option {min(map(repr, unknown))} of a call; accepted: {ACCEPTED}")
    key = merged.get("key")
    if key is not None and not isinstance(key, str):
        raise ConfigError(f"key={key!r} of a call: expected text")
    flags = (_flag(name, merged.get(name)) for name in ("hedge", "reroute", "continuation"))
    return Options(_timeout(merged.get("timeout")), key, _attempts(merged.get("attempts")), *flags)


def is_generation(path: bytes) -> bool:
    """True for the interfaces that generate text."""
    return path.partition(b"?")[0].endswith(GENERATES)


def wants_stream(content: bytes) -> bool:
    """True if a JSON body asks for its answer as a stream. Does not parse it."""
    at = content.rfind(b'"stream"')
    return at >= 0 and _STREAM.match(content, at) is not None


def _flag(name: str, value: Any) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    try:
        return parse_boolean(str(value))
    except ValueError:
        raise ConfigError(f"{name}={value!r} of a call: expected true or false") from None


def _timeout(value: Any) -> float | None:
    if value is None:
        return None
    try:
        seconds = parse_duration(str(value))
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise ConfigError(f"timeout={value!r} of a call: expected seconds above 0, such as 2.0 or 250ms")
    return seconds


def _attempts(value: Any) -> int | None:
    if value is None:
        return None
    text = str(value).strip()
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"attempts={value!r} of a call: expected a whole number of at least 1")
    return int(text)


def content_of(request: Any, library: Any) -> bytes | None:
    """The whole body if it is in memory already; None for streams, which are not read for this."""
    if not isinstance(request.stream, library.client.ByteStream):
        return None
    try:
        content: bytes = request.content
    except library.client.RequestNotRead:
        return b"".join(request.stream)
    return content


def model_of(body: Body) -> str:
    """The `model` that a JSON body or a multipart form names; "" if none."""
    if body.content is None:
        fields = getattr(body.source, "fields", None)
        named = (field.value for field in fields if field.name == "model" and hasattr(field, "value")) if fields else ()
        value = next(iter(named), "")
        return value if isinstance(value, str) else ""
    try:
        document = json.loads(body.content)
    except (ValueError, RecursionError):
        return ""
    model = document.get("model") if isinstance(document, dict) else None
    return model if isinstance(model, str) else ""


def rewinder(stream: Any, library: Any) -> Callable[[], None] | None:
    """What makes a streamed body ready to be sent again; None if nothing can.

    Both libraries wrap a file, an iterator or an iterable into a stream of theirs and keep it as `_stream`; their
    multipart streams rewind files by themselves, if these can seek.
    """
    if isinstance(getattr(stream, "fields", None), list):
        return _nothing if all(_in_memory(file) or _seekable(file) for file in _files(stream)) else None
    if not type(stream).__module__.startswith(f"{library.client.__name__}."):
        return None  # a stream of the caller's own making: nothing is known of it
    source = getattr(stream, "_stream", None)
    if hasattr(source, "read"):
        return _file_rewinder(source) if _seekable(source) else None
    one_shot = source is None or hasattr(source, "__next__") or hasattr(source, "__anext__")
    return None if one_shot or hasattr(source, "aread") else _nothing


def _file_rewinder(file: Any) -> Callable[[], None]:
    start = file.tell()
    return lambda: file.seek(start)


def _files(stream: Any) -> list[Any]:
    """What a multipart form sends as files."""
    return [field.file for field in getattr(stream, "fields", ()) if hasattr(field, "file")]


def _in_memory(file: Any) -> bool:
    return isinstance(file, (str, bytes))


def _seekable(file: Any) -> bool:
    try:
        return bool(file.seekable())
    except (AttributeError, ValueError):
        return False


def _nothing() -> None:
    pass
