"""One generation under way: tokens come from the engine, text and events go to the client, faults strike between."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from . import text
from .formats import Usage, embeddings

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuroute.sim.job import Job

    from .asks import Ask
    from .counters import Arrival
    from .faults import Fault
    from .formats import Format
    from .wire import Reply


class Answer:
    """Turns the progress of one job into a reply. `on_end(answer, how)` runs once, whatever happens."""

    def __init__(
        self,
        ask: Ask,
        job: Job,
        reply: Reply,
        arrival: Arrival,
        form: Format,
        *,
        fault: Fault | None,
        interval: int,
        load_header: Callable[[], list[tuple[str, str]]],
        on_end: Callable[[Answer, str], None],
    ) -> None:
        self.ask, self.job, self.reply, self.arrival, self.form = ask, job, reply, arrival, form
        self._fault, self._interval = fault, interval
        self._load_header, self._on_end = load_header, on_end
        self._context = text.extend(0, ask.prompt)
        self._emitted = 0
        self.finish = "stop" if ask.max_tokens is None else "length"

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        return Usage(self.ask.prompt_tokens, self.job.cached_tokens, self._emitted)

    def aborted(self) -> None:
        """The client went away."""
        self._on_end(self, "cancelled")

    def _next(self) -> str:
        token = text.next_token(self._context)
        self._context = text.extend(self._context, token)
        self._emitted += 1
        return token

    def _strike(self) -> bool:
        """True if an ordered fault takes effect now."""
        if self._fault is None or self.reply.written < self._fault.after_events:
            return False
        self._cut(self._fault)
        return True

    def _cut(self, fault: Fault) -> None:
        """Drop the connection, or (a stall) leave it open in silence."""
        if fault.kind == "drop" and not self.reply.done:
            self.reply.cut(reset=fault.reset)
            self._on_end(self, "dropped")

    def _first_byte(self) -> None:
        if self.arrival.first_byte is None:
            self.arrival.first_byte = time.monotonic()


class StreamedAnswer(Answer):
    """An answer as server-sent events: the first token alone, then one event per `interval` tokens."""

    def progress(self, job: Job) -> None:
        """The engine made tokens: send those that are new."""
        if not self._emitted:
            self._open()
        while (size := self._due(job)) and not self._strike():
            words = "".join([self._next() for _ in range(size)])
            last = job.done and self._emitted == job.generated
            self.reply.event(self.form.token(words, self.finish if last else None))
        if job.done and self._emitted == job.generated and not self._strike():
            self._close()

    def _due(self, job: Job) -> int:
        """Tokens that make the next event; 0 = not yet."""
        ready = job.generated - self._emitted
        if not self._emitted:
            return min(ready, 1)
        return min(ready, self._interval) if ready >= self._interval or job.done else 0

    def _open(self) -> None:
        if self._strike():
            return
        if not self.reply.began:
            self.reply.start()
        self._first_byte()
        for data in self.form.opening(self.usage):
            self.reply.event(data)

    def _close(self) -> None:
        for data in self.form.closing(self.usage, self.finish):
            self.reply.event(data)
        self._on_end(self, "finished")
        self.reply.end()


class WholeAnswer(Answer):
    """An answer in one piece, with the load header that vLLM puts on these only."""

    def progress(self, job: Job) -> None:
        """The engine made tokens: answer when it made all."""
        if not job.done or self.reply.done:
            return
        body = self._body(job)
        if self._fault is not None:
            if self._fault.after_events:
                self.reply.send_half(200, body)
            self._cut(self._fault)
            return
        self._first_byte()
        self._on_end(self, "finished")
        self.reply.send(200, body, headers=self._load_header())

    def _body(self, job: Job) -> bytes:
        words = "".join([self._next() for _ in range(job.generated)])
        return self.form.whole(words, self.finish, self.usage)


class EmbeddingsAnswer(WholeAnswer):
    """Vectors: one step of the engine, no text."""

    def _body(self, job: Job) -> bytes:  # noqa: ARG002
        ask = self.ask
        return embeddings(ask.model, list(ask.texts), self.usage, size=ask.dimensions, as_base64=ask.as_base64)
