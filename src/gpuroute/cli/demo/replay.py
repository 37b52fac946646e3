"""Real arrivals and lengths, through the `openai` SDK: every call streamed, timed, and accounted for."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpuroute.errors import StreamInterrupted
from gpuroute.sim.traces import load_trace
from gpuroute.testing.text import TOKEN_BYTES, VOCABULARY

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from openai import AsyncOpenAI

ROWS = slice(11_400, 11_800)
TRACE = "Azure LLM inference trace 2023 (conversation), rows 11,401-11,800; Patel et al., Splitwise, ISCA 2024; CC-BY-4.0"
DENSITY = 2.0
"""Twice the trace's rate: a little over half of what the six servers can do."""
_CALL_TIMEOUT_S = 300.0
"""Far beyond what any call takes, on a busy machine too: one that hangs must not keep the demo from its end."""
_FILLER = "".join(token for token in VOCABULARY if token.isascii()) * 80
_TEMPLATE_BYTES = len("<|user|><|end|><|assistant|>")


@dataclass(frozen=True, slots=True)
class Row:
    """One call of the trace: when, in seconds of the replay, and how long."""

    at: float
    prompt: str
    tokens: int


def load_rows(time_scale: float) -> list[Row]:
    """The rows to replay. The trace has lengths, no text: every prompt is different from its first word on."""
    rows = load_trace("azure-conv").rows[ROWS]
    pace = time_scale / DENSITY
    return [
        Row((row.at - rows[0].at) * pace, _prompt(number, row.prompt_tokens), row.output_tokens)
        for number, row in enumerate(rows)
    ]


def _prompt(number: int, tokens: int) -> str:
    start = number * 37 % 400 * TOKEN_BYTES
    size = max(8, tokens * TOKEN_BYTES - _TEMPLATE_BYTES)
    return f"{number:07d}{_FILLER[start:]}"[:size]


@dataclass(slots=True)
class Answered:
    """What became of one call. `error` "" = all tokens arrived."""

    endpoint: str = ""
    ttft: float | None = None
    tokens: int = 0
    error: str = ""
    interrupted: bool = False


@dataclass
class Replay:
    """One pass over the rows. `begun` grows as endpoints begin to answer, `answers` as calls end."""

    client: AsyncOpenAI
    rows: Sequence[Row]
    begun: list[Answered] = field(default_factory=list)
    answers: list[Answered] = field(default_factory=list)
    seconds: float = 0.0

    async def run(self) -> None:
        """Send every row at its time and wait for all answers."""
        started = time.monotonic()
        async with asyncio.TaskGroup() as calls:
            for row in self.rows:
                await asyncio.sleep(max(0.0, started + row.at - time.monotonic()))
                calls.create_task(self._call(row))
        self.seconds = time.monotonic() - started

    async def _call(self, row: Row) -> None:
        answer = Answered()
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                await self._stream(row, answer)
            if answer.tokens != row.tokens:
                answer.error = f"{answer.tokens} tokens instead of {row.tokens}"
        except Exception as error:
            answer.interrupted = any(isinstance(cause, StreamInterrupted) for cause in _causes(error))
            answer.error = f"{type(error).__name__}: {' '.join(str(cause) for cause in _causes(error))}"
        self.answers.append(answer)

    async def _stream(self, row: Row, answer: Answered) -> None:
        started = time.monotonic()
        messages: Any = [{"role": "user", "content": row.prompt}]
        stream = await self.client.chat.completions.create(
            model="demo", messages=messages, max_tokens=row.tokens, stream=True
        )
        answer.endpoint = stream.response.extensions["gpuroute"]["endpoint"]
        self.begun.append(answer)
        async with stream:
            async for chunk in stream:
                text = chunk.choices[0].delta.content if chunk.choices else None
                if text:
                    answer.ttft = answer.ttft or time.monotonic() - started
                    answer.tokens += len(text.encode()) // TOKEN_BYTES


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it was raised from: the SDK wraps what the client library raises."""
    while error is not None:
        yield error
        error = error.__cause__
