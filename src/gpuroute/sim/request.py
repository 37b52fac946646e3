"""One call of a trace."""

from __future__ import annotations

from typing import NamedTuple


class Request(NamedTuple):
    """One call: seconds since the start, lengths, prefix block hashes (512 tokens each) and its
    conversation.
    """

    at: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    session: int | None = None
