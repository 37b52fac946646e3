"""The crowd: callers that stream, check every token, and write down when they began, heard and ended."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpuroute.errors import StreamInterrupted
from gpuroute.testing import answer
from gpuroute.testing.text import TOKEN_BYTES, render_chat

from .notes import Notes
from .sends import CALLS, Send, sends

if TYPE_CHECKING:
    from contextlib import AsyncExitStack
    from random import Random

    from gpuroute.core.call import Call
    from gpuroute.router import Router

TICK_S = 0.02
DEADLINES_S = (3.0, 8.0, 8.0, 8.0)
_FILLER = "the quick brown fox jumps over the lazy dog and thinks of something else to say " * 40


@dataclass(slots=True)
class Seen:
    """One call as its caller saw it; times from the machine's monotonic clock."""

    ident: str
    began: float
    timeout: float
    expected: str
    first: float | None = None
    ended: float = 0.0
    text: str = ""
    error: str = ""
    interrupted: bool = False
    lost: int = 0
    wrong: int = 0
    sends: list[Send] = field(default_factory=list)

    def end(self, now: float) -> None:
        """Count tokens that a good stream did not bring, and those that came twice or are not what follows."""
        got, expected, common = self.text.encode(), self.expected.encode(), 0
        while common < len(got) and got[common : common + TOKEN_BYTES] == expected[common : common + TOKEN_BYTES]:
            common += TOKEN_BYTES
        self.lost = 0 if self.error else max(0, (len(expected) - len(got)) // TOKEN_BYTES)
        self.wrong = max(0, len(got) - common) // TOKEN_BYTES
        self.text = self.expected = ""
        self.ended = now


class Crowd:
    """`callers` tasks in a closed loop, half of them with the OpenAI SDK if it is installed."""

    def __init__(
        self, router: Router, pool: str, callers: int, random: Random, *, think_s: float, prompts: int = 0
    ) -> None:
        self.notes: Notes[Seen] = Notes()
        self._lags: Notes[tuple[float, float]] = Notes()
        self._late: list[tuple[float, float]] | None = None  # those, once they are looked at
        self.has_openai = False
        self._router = router
        self._pool = pool
        self._callers = callers
        self._random = random
        self._think_s = think_s
        self._prompts = prompts  # that many different ones; 0: no two alike
        self._going = True
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, stack: AsyncExitStack) -> None:
        """Let them call."""
        from importlib.util import find_spec

        from gpuroute import httpx2

        ways: list[_Way] = [
            _Plain(await stack.enter_async_context(httpx2.AsyncClient(self._router, timeout=30.0)), self._pool)
        ]
        if find_spec("openai"):
            import openai

            import gpuroute

            self.has_openai = True
            sdk = openai.AsyncOpenAI(base_url=f"http://{self._pool}/v1", api_key="-", max_retries=0, timeout=30.0)
            ways.append(_Sdk(gpuroute.wrap(await stack.enter_async_context(sdk), self._router)))
        self._tasks = [asyncio.create_task(self._call_on(ways[n % len(ways)], n)) for n in range(self._callers)]
        self._tasks.append(asyncio.create_task(self._watch_lag()))

    async def more(self, calls: int, within_s: float) -> None:
        """Let so many more calls end: an outage is over when many in a row went well, and a small crowd makes few."""
        wanted, deadline = len(self.notes) + calls, time.monotonic() + within_s
        while len(self.notes) < wanted and time.monotonic() < deadline:  # noqa: ASYNC110  (callers are many)
            await asyncio.sleep(TICK_S)

    async def stop(self) -> None:
        """Let running calls end."""
        self._going = False
        await asyncio.gather(*self._tasks)

    async def _call_on(self, way: _Way, number: int) -> None:
        await asyncio.sleep(self._think_s * self._random.random())
        count = 0
        while self._going:
            count += 1
            await self._call(way, f"{number}-{count}")
            await asyncio.sleep(self._random.expovariate(1 / self._think_s) if self._think_s else 0)

    async def _call(self, way: _Way, ident: str) -> None:
        random = self._random
        size = random.randrange(40, 3_000)
        if self._prompts:
            number = random.randrange(self._prompts)
            ident_of_prompt, size = f"again {number}", 40 + number * 2_960 // self._prompts
        else:
            ident_of_prompt = ident
        prompt = f"{ident_of_prompt} {_FILLER[:size]}"
        tokens = random.randrange(8, 40)
        began, timeout = time.monotonic(), random.choice(DEADLINES_S)
        seen = Seen(ident, began, timeout, answer(way.rendered(prompt), tokens))
        headers = {"x-request-id": ident, "x-gpuroute-timeout": f"{timeout}s"}
        calls: list[Call] = []
        CALLS.set(calls)
        try:
            await way.ask(prompt, tokens, headers, seen, stream=random.random() < 0.8)
        except Exception as error:
            causes = list(_causes(error))
            seen.interrupted = any(isinstance(cause, StreamInterrupted) for cause in causes)
            seen.error = f"{type(causes[-1]).__name__}: {' / '.join(map(str, causes[:2]))}"[:300]
            notes = [note for cause in causes for note in getattr(cause, "__notes__", ())]
            seen.error += f" [{notes[-1]}]" if notes else ""
        seen.end(time.monotonic())
        seen.sends = sends(calls)
        self.notes.add(seen)

    async def _watch_lag(self) -> None:
        """How late this very process was: what it measures of others cannot be better."""
        while self._going:
            before = time.monotonic()
            await asyncio.sleep(TICK_S)
            lag = time.monotonic() - before - TICK_S
            if lag > TICK_S:
                self._lags.add((time.monotonic(), lag))

    @property
    def lag_s(self) -> float:
        """The longest time that this process stood still."""
        return max((lag for _, lag in self._all_lags()), default=0.0)

    def lag_at(self, moment: float) -> float:
        """How long it stood still around a moment."""
        return max((lag for at, lag in self._all_lags() if at - lag - 1.0 <= moment <= at + 1.0), default=0.0)

    def stood_still(self, start: float, end: float) -> float:
        """For how many of these seconds it stood still."""
        return sum(max(0.0, min(end, at) - max(start, at - lag)) for at, lag in self._all_lags())

    def _all_lags(self) -> list[tuple[float, float]]:
        if self._late is None or len(self._late) < len(self._lags):
            self._late = self._lags.read()
        return self._late

    def close(self) -> None:
        """Forget everything."""
        self.notes.close()
        self._lags.close()


class _Way:
    """One way to call."""

    def rendered(self, prompt: str) -> str:
        """The prompt as the model gets it."""
        return prompt

    async def ask(self, prompt: str, tokens: int, headers: dict[str, str], seen: Seen, *, stream: bool) -> None:
        """Make one call, noting what comes."""
        raise NotImplementedError


class _Plain(_Way):
    """Completions through `gpuroute.httpx2`, events read by hand."""

    def __init__(self, client: Any, pool: str) -> None:
        self._client = client
        self._url = f"http://{pool}/v1/completions"

    async def ask(self, prompt: str, tokens: int, headers: dict[str, str], seen: Seen, *, stream: bool) -> None:
        body = {"model": "chaos", "prompt": prompt, "max_tokens": tokens, "stream": stream}
        async with self._client.stream("POST", self._url, json=body, headers=headers) as response:
            if response.status_code >= 400 or not stream:
                await response.aread()
                response.raise_for_status()
                seen.first = time.monotonic()
                seen.text = response.json()["choices"][0]["text"]
                return
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    seen.first = seen.first or time.monotonic()
                    seen.text += json.loads(line[6:])["choices"][0]["text"]


class _Sdk(_Way):
    """Chat through `openai`."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def rendered(self, prompt: str) -> str:
        return render_chat([{"role": "user", "content": prompt}])

    async def ask(self, prompt: str, tokens: int, headers: dict[str, str], seen: Seen, *, stream: bool) -> None:
        messages = [{"role": "user", "content": prompt}]
        create = self._client.chat.completions.create
        reply = await create(model="chaos", messages=messages, max_tokens=tokens, stream=stream, extra_headers=headers)
        if not stream:
            seen.first = time.monotonic()
            seen.text = reply.choices[0].message.content
            return
        async with reply:
            async for chunk in reply:
                seen.first = seen.first or time.monotonic()
                seen.text += (chunk.choices[0].delta.content or "") if chunk.choices else ""


def _causes(error: BaseException | None) -> Any:
    """An error and what it was raised from: the SDK wraps what the client library raises."""
    while error is not None:
        yield error
        error = error.__cause__
