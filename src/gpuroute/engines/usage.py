"""Token counts that an engine reports at the end of an answer, whichever API was spoken.

Read from the last bytes of a response or of an event stream, without parsing the rest. Cached tokens correct a router's
belief about prefixes, so "not reported" (vLLM without `--enable-prompt-tokens-details`) is None, never 0.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from gpuroute.core.orca import MOST

TAIL = 16 * 1024
"""Bytes at the end of a body that are looked at."""

_MARKS = (b'"usage":', b'"meta_info":', b'"timings":', b'"details":')
_decode = json.JSONDecoder().raw_decode


class Usage(NamedTuple):
    """`prompt` counts all prompt tokens, `cached` those of them found in the prefix cache; None: not reported."""

    prompt: int | None
    output: int | None
    cached: int | None


def read_usage(tail: bytes) -> Usage | None:
    """The usage at the end of a body or stream; None if it has none. Never raises."""
    text = tail[-TAIL:]
    for mark in _MARKS:
        fields = _object_after(text, mark)
        if fields:
            usage = _usage(fields)
            if usage is not None:
                return usage
    return None


def _object_after(text: bytes, mark: bytes) -> dict[str, Any] | None:
    end = len(text)
    while (at := text.rfind(mark, 0, end)) >= 0:
        rest = text[at + len(mark) :].lstrip()
        if rest.startswith(b"{"):
            try:
                return _decode(rest.decode("utf-8", "replace"))[0]  # type: ignore[no-any-return]
            except (ValueError, RecursionError):
                return None
        end = at  # "usage":null of an earlier or later event
    return None


def _usage(fields: dict[str, Any]) -> Usage | None:
    prompt = _first(fields, "prompt_tokens", "input_tokens", "prompt_n")
    output = _first(fields, "completion_tokens", "output_tokens", "predicted_n", "generated_tokens")
    cached = _cached(fields)
    if "cache_read_input_tokens" in fields or "cache_n" in fields:  # these APIs leave cached tokens out of the prompt
        added = _first(fields, "cache_creation_input_tokens") or 0
        prompt = None if prompt is None else prompt + (cached or 0) + added
    return None if prompt is None and output is None else Usage(prompt, output, cached)


def _cached(fields: dict[str, Any]) -> int | None:
    for name in ("prompt_tokens_details", "input_tokens_details"):
        details = fields.get(name)
        if isinstance(details, dict):
            return _first(details, "cached_tokens")
    return _first(fields, "cached_tokens", "cache_read_input_tokens", "cache_n")


def _first(fields: dict[str, Any], *names: str) -> int | None:
    return next((n for name in names if type(n := fields.get(name)) is int and 0 <= n <= MOST), None)
