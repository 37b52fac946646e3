"""The stand-in's routes and state: everything but sockets, threads and processes. Lives on one event loop."""

from __future__ import annotations

import asyncio
import json
import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from gpuroute.sim.gpu import Gpu
from gpuroute.sim.job import Job
from gpuroute.sim.spec import gpu_spec

from . import text
from .answer import Answer, EmbeddingsAnswer, StreamedAnswer, WholeAnswer
from .asks import ApiError, read_ask
from .counters import Counters
from .engine import Engine
from .faults import Fault, Faults, error_body
from .formats import ChatFormat, CompletionFormat, MessagesFormat, dumps
from .metrics import EngineMetrics, orca_header

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .asks import Ask, Kind
    from .counters import Arrival
    from .formats import Format
    from .options import ServerOptions
    from .wire import Reply, Request

INFERENCE: dict[str, Kind] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/v1/messages": "messages",
    "/v1/embeddings": "embeddings",
}
CONTROL_PATH = "/_control"


class App:
    """One stand-in engine. All methods belong to the loop's thread."""

    def __init__(self, options: ServerOptions, control: Callable[[dict[str, Any]], Awaitable[object]]) -> None:
        self.options = options
        self._control = control
        self._tasks: set[asyncio.Task[None]] = set()
        spec = gpu_spec(options.gpu)
        self.gpu = Gpu(
            spec,
            options.max_num_seqs,
            options.max_num_batched_tokens,
            options.dram_tokens,
            block_tokens=text.BLOCK_TOKENS,
        )
        self.gpu.slowdown = options.slowdown
        self.metrics = EngineMetrics()
        self.engine = Engine(self.gpu, options.time_scale, self._job_done)
        self.faults = Faults()
        self.counters = Counters()
        self.health = 200
        self.draining = self.mute = False
        self._ready_at = time.monotonic() + options.startup_s
        self._live: dict[Reply, Answer] = {}
        self._serial = 0
        self._gets: dict[str, Callable[[Request, Reply], None]] = {
            "/health": self._health,
            "/ping": self._health,
            "/load": self._load,
            "/metrics": self._metrics,
            "/version": lambda _, reply: reply.send(200, dumps({"version": "0.32.0"})),
            "/v1/models": self._models,
        }

    @property
    def live(self) -> int:
        """Generations under way."""
        return len(self._live)

    def handle(self, request: Request, reply: Reply) -> None:
        """Answer a request, now or by callbacks."""
        path = request.path.removeprefix(self.options.prefix)
        if not request.path.startswith(self.options.prefix):
            path = ""
        if path == CONTROL_PATH:
            task = asyncio.get_running_loop().create_task(self._control_request(request, reply))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return
        if self.mute:
            return
        fault = self.faults.take(path, inference=path in INFERENCE)
        if path in INFERENCE and request.method == "POST":
            self._infer(INFERENCE[path], request, reply, fault)
        elif fault is not None:
            self._order(fault, reply)
        elif path in self._gets and request.method in {"GET", "HEAD"}:
            self._gets[path](request, reply)
        elif path == "/tokenize" and request.method == "POST":
            self._tokenize(request, reply)
        else:
            reply.send(404, dumps({"detail": "Not Found"}))

    def abort_all(self) -> None:
        """Forget every generation: the process is about to die."""
        for answer in list(self._live.values()):
            self._end(answer, "dropped")

    def resume(self) -> None:
        """Back to a healthy server at its normal speed."""
        self.faults.clear()
        self.health, self.draining, self.mute = 200, False, False
        self.engine.resume()

    def state(self) -> dict[str, Any]:
        """Counters and what goes on now, for tests in other processes."""
        return {
            **self.counters.as_json(),
            "running": self.gpu.running,
            "waiting": self.gpu.waiting,
            "live": self.live,
            "slowdown": self.gpu.slowdown,
            "hung": self.gpu.hung,
            "draining": self.draining,
            "pid": os.getpid(),
        }

    # -- inference -------------------------------------------------------------------------------------------------

    def _infer(self, kind: Kind, request: Request, reply: Reply, fault: Fault | None) -> None:
        arrival = self.counters.arrive(request)
        if fault is not None and fault.kind == "answer":
            self.counters.end(arrival, "answered")
            self._order(fault, reply)
            return
        try:
            self._admit()
            ask = self._checked(read_ask(kind, request.body))
            self._generate(ask, request, reply, arrival, fault)
        except ApiError as error:
            self.counters.end(arrival, "rejected")
            reply.send(error.status, error_body(error.status, str(error), error.kind, error.param))

    def _admit(self) -> None:
        limit = self.options.max_queued
        if time.monotonic() < self._ready_at:
            raise ApiError(503, "Loading model", "Service Unavailable")
        if self.draining:
            raise ApiError(500, "cannot schedule new futures after shutdown", "InternalServerError")
        if limit is not None and self.gpu.waiting >= limit:
            self.metrics.rejected += 1
            raise ApiError(503, "", "Service Unavailable")

    def _checked(self, ask: Ask) -> Ask:
        options = self.options
        if options.model and ask.model and ask.model != options.model:
            message = f"The model `{ask.model}` does not exist. Valid aliases: {options.model}."
            raise ApiError(404, message, "NotFoundError", "model")
        room = min(options.max_model_len, self.gpu.kv.capacity) - ask.prompt_tokens
        if (ask.max_tokens or 1) > room:
            message = (
                f"max_tokens={ask.max_tokens or 1} and {ask.prompt_tokens} prompt tokens cannot be greater than "
                f"max_model_len={options.max_model_len}."
            )
            raise ApiError(400, message, param="max_tokens")
        return ask

    def _generate(self, ask: Ask, request: Request, reply: Reply, arrival: Arrival, fault: Fault | None) -> None:
        room = self.options.max_model_len - ask.prompt_tokens
        tokens = ask.max_tokens or text.natural_length(text.extend(0, ask.prompt), room)
        job = Job(ask.prompt_tokens, tokens, text.block_hashes(ask.prompt))
        load_header = partial(self._load_header, request.header("endpoint-load-metrics-format"))
        cls = EmbeddingsAnswer if ask.kind == "embeddings" else StreamedAnswer if ask.stream else WholeAnswer
        answer = cls(
            ask,
            job,
            reply,
            arrival,
            self._format(ask),
            fault=fault,
            interval=self.options.stream_interval,
            load_header=load_header,
            on_end=self._end,
        )
        if not self.engine.submit(job, answer.progress):
            raise ApiError(400, "the prompt does not fit into the KV cache")
        self._live[reply] = answer
        reply.on_abort = answer.aborted
        if ask.stream and self.options.early_headers and not (fault and fault.after_events == 0):
            reply.start()

    def _format(self, ask: Ask) -> Format:
        self._serial += 1
        model = ask.model or self.options.model or "stand-in"
        request_id = f"{self._serial:016x}"
        if ask.kind == "messages":
            return MessagesFormat(model, request_id)
        cls = ChatFormat if ask.kind == "chat" else CompletionFormat
        return cls(model, request_id, include_usage=ask.include_usage)

    def _end(self, answer: Answer, how: str) -> None:
        """A generation is over, by its last token or before."""
        if self._live.pop(answer.reply, None) is None:
            return
        self.counters.end(answer.arrival, how)
        if not answer.job.done:
            self.engine.cancel(answer.job)
        self.metrics.finished[answer.finish if how == "finished" else "abort"] += 1

    def _job_done(self, job: Job) -> None:
        metrics = self.metrics
        metrics.queries += job.prompt_tokens
        metrics.hits += job.cached_tokens
        metrics.prompt_tokens += job.prompt_tokens
        metrics.generation_tokens += job.generated
        metrics.ttft.observe(job.first_token_at - job.submitted_at)
        metrics.e2e.observe(job.done_at - job.submitted_at)

    def _load_header(self, wanted: str) -> list[tuple[str, str]]:
        value = orca_header(self.gpu, wanted) if wanted else None
        return [] if value is None else [("endpoint-load-metrics", value)]

    def _order(self, fault: Fault, reply: Reply) -> None:
        """Answer as a test ordered."""
        body = error_body(fault.status) if fault.body is None else fault.body.encode()
        content_type = "application/json" if body[:1] in {b"{", b"["} else "text/plain"
        headers = [(name, value) for name, value in fault.headers.items() if name.lower() != "content-type"]
        content_type = next((v for k, v in fault.headers.items() if k.lower() == "content-type"), content_type)
        send = partial(reply.send, fault.status, body, content_type, headers)
        if fault.delay > 0:
            asyncio.get_running_loop().call_later(fault.delay, send)
        else:
            send()

    # -- reports ---------------------------------------------------------------------------------------------------

    def _health(self, _: Request, reply: Reply) -> None:
        reply.send(self.health if time.monotonic() >= self._ready_at else 503, b"")

    def _load(self, _: Request, reply: Reply) -> None:
        reply.send(200, dumps({"server_load": self.live}))

    def _metrics(self, _: Request, reply: Reply) -> None:
        page = self.metrics.page(self.gpu, self.options.model or "stand-in")
        reply.send(200, page, "text/plain; version=0.0.4; charset=utf-8")

    def _tokenize(self, request: Request, reply: Reply) -> None:
        """Refused like any other request while it drains, which `/health` says nothing of."""
        try:
            self._admit()
            count = text.count_tokens(str(json.loads(request.body)["prompt"]))
            reply.send(200, dumps({"count": count, "max_model_len": self.options.max_model_len, "tokens": [0] * count}))
        except ApiError as error:
            reply.send(error.status, error_body(error.status, str(error), error.kind))
        except (TypeError, ValueError, KeyError):
            reply.send(400, error_body(400, "a prompt is missing"))

    def _models(self, _: Request, reply: Reply) -> None:
        model = {"id": self.options.model or "stand-in", "object": "model", "created": 0, "owned_by": "vllm"}
        entry = {**model, "root": model["id"], "parent": None, "max_model_len": self.options.max_model_len}
        reply.send(200, dumps({"object": "list", "data": [entry]}))

    async def _control_request(self, request: Request, reply: Reply) -> None:
        """GET: the state. POST `{"do": NAME, ...}`: an order (names and arguments: the methods of `Controls`)."""
        try:
            order = json.loads(request.body) if request.method == "POST" else {"do": "state"}
            reply.send(200, dumps(await self._control(order)))
        except (TypeError, ValueError) as error:
            reply.send(400, dumps({"error": str(error)}))
