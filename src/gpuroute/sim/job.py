"""One request inside a simulated engine."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from .gpu import Gpu

Event = Literal["token", "first", "done"]
WAITING, PREFILL, DECODE, DONE = range(4)


class Job:
    """One prompt and its answer, as the engine sees it. `blocks`: hashes of its full prefix blocks, in
    order.
    """

    __slots__ = (
        "before",
        "blocks",
        "cached_tokens",
        "done_at",
        "entered",
        "first_token_at",
        "gpu",
        "held",
        "last",
        "left",
        "output_tokens",
        "phase",
        "pinned",
        "preempted",
        "prompt_tokens",
        "submitted_at",
        "tag",
    )

    def __init__(
        self, prompt_tokens: int, output_tokens: int, blocks: tuple[int, ...] = (), *, tag: object = None
    ) -> None:
        self.prompt_tokens = max(1, prompt_tokens)
        self.output_tokens = max(1, output_tokens)
        self.blocks = blocks
        self.tag = tag
        self.cached_tokens = 0
        self.preempted = 0
        self.submitted_at = self.first_token_at = self.done_at = inf
        self.gpu: Gpu | None = None
        self.phase = WAITING
        self.left = 0  # prompt tokens still to compute (waiting: an estimate)
        self.held = 0  # KV tokens of its own, shared blocks aside, as of `entered`
        self.pinned = 0  # leading blocks held in the pool
        self.entered = 0  # decode step at which it began to decode
        self.last = -1  # decode step at which it ends
        self.before = 0  # tokens before `entered`

    @property
    def done(self) -> bool:
        """Ended, by its last token or by a cancel."""
        return self.phase == DONE

    @property
    def generated(self) -> int:
        """Tokens out so far, up to the last applied step."""
        if self.phase != DECODE or self.gpu is None:
            return self.before
        return self.before + self.gpu.decode_steps - self.entered

    @property
    def context(self) -> int:
        """Prompt and generated tokens."""
        return self.prompt_tokens + self.generated
