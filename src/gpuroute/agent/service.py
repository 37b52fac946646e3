"""One agent process: a socket that answers, a watch and a life for each engine, and pages for people."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from gpuroute.agent.answers import RATE, WHY, Answers
from gpuroute.agent.desk import Desk
from gpuroute.agent.health import HUNG_AFTER_S
from gpuroute.agent.kv_feed import Feed
from gpuroute.agent.register import Life, Rules
from gpuroute.agent.server import UdpServer, netloc, open_socket
from gpuroute.agent.status import Status
from gpuroute.agent.watch import INTERVAL_S, Watch, recognised
from gpuroute.core.asking import EngineState
from gpuroute.engines.catalog import engine_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpuroute.agent.gpus import Eyes
    from gpuroute.agent.grpc_server import Listening
    from gpuroute.agent.kv_feed import Source
    from gpuroute.agent.register import Registered
    from gpuroute.core.endpoint import Endpoint

log = logging.getLogger("gpuroute.agent")

EVERYWHERE = ("0.0.0.0", "::")
KV_TOKENS = 400_000
"""Of an engine that does not say how much its KV cache holds."""

GPUS_S = 1.0
"""How often it is read what is known of the GPUs."""

DROPS_S, DROPS_AGAIN_S = 5.0, 60.0
"""How often the log says what was dropped: soon, and of each reason no more than that often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One engine to stand beside: where it listens for this host, its record as clients shall see it, and where it
    publishes the events of its KV cache, if it does."""

    url: str
    endpoint: Endpoint
    events: Source | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What one agent does. `engine`: a dialect, or "auto"; `keys`: secrets, the present one first; hosts and ports to
    listen on (0: any). `agent_host`: where clients reach us, if not where we listen. `eyes`: what is known of the GPUs
    here; None: nothing will be. Seconds and tokens as named."""

    engines: Sequence[Engine]
    engine: str = "auto"
    model: str = ""
    keys: Sequence[bytes] = field(default=(), repr=False)
    insecure: bool = False
    listen: tuple[str, int] = ("127.0.0.1", 0)
    status: tuple[str, int] = ("127.0.0.1", 0)
    grpc: Listening | None = None
    agent_host: str = ""
    rate: float = RATE
    rules: Rules = Rules()
    hung_after: float = HUNG_AFTER_S
    kv_tokens: int = 0
    dram_tokens: int = 0
    eyes: Eyes | None = None


class Agent:
    """Runs until it is told to stop. Loop thread, but `stop`, which any thread may call through its loop."""

    def __init__(
        self,
        options: Options,
        register: Callable[[Endpoint], Registered] | None = None,
        say: Callable[[dict[str, object]], None] | None = None,
    ) -> None:
        self._options = options
        self._register = register
        self._say = say or (lambda _: None)
        self._stop = asyncio.Event()
        self.desks = [self._desk(engine) for engine in options.engines]
        self.answers = Answers(self.desks, options.keys, rate=options.rate)
        self.watches: list[Watch] = []
        self.lives: list[Life] = []

    def stop(self) -> None:
        """Drain and end. Idempotent."""
        self._stop.set()

    async def run(self) -> bool:
        """Serve until `stop` or SIGTERM; True if all calls had ended. Raises OSError, ConfigError for bad addresses."""
        loop = asyncio.get_running_loop()
        options = self._options
        if options.grpc is not None:
            options.grpc.check(authenticated=bool(options.keys), insecure=options.insecure)
        sock = open_socket(*options.listen, authenticated=bool(options.keys), insecure=options.insecure)
        server = UdpServer(loop, sock, self.answers)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        status, tasks = Status(self.watches, self.answers), []
        second = None
        try:
            address = _address("udp", self._reached_at(options.listen[0]), options.listen[0], server.port)
            if options.grpc is not None:
                from gpuroute.agent.grpc_server import serve

                second, port = await serve(options.grpc, self.answers)
                address = _address(options.grpc.scheme, self._reached_at(options.grpc.host), options.grpc.host, port)
            tasks = [loop.create_task(self._attend(index, address)) for index in range(len(self.desks))]
            tasks += [loop.create_task(_followed(desk.feed)) for desk in self.desks if desk.feed is not None]
            tasks += [loop.create_task(_told_of_drops(self.answers))]
            tasks += [loop.create_task(self._equip(options.eyes))] if options.eyes is not None else []
            port = await status.listen(*options.status)
            self._say({"agent": address, "status": f"http://{netloc(options.status[0], port)}"})
            await _first(self._stop, tasks)
            return all(await asyncio.gather(*(life.drain() for life in self.lives)))
        finally:
            await asyncio.gather(*(life.leave() for life in self.lives))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            status.close()
            server.close()
            if second is not None:
                await second.stop(None)

    def _reached_at(self, listening: str) -> str:
        """The host for clients. `0.0.0.0` would be each client itself; where they reach the engine they reach us too."""
        if self._options.agent_host or listening not in EVERYWHERE or not self._options.engines:
            return self._options.agent_host
        host = urlsplit(self._options.engines[0].endpoint.url).hostname or ""
        return f"[{host}]" if ":" in host else host

    async def _attend(self, index: int, address: str) -> None:
        """Find out which engine it is, then watch it and register it."""
        options, one, desk = self._options, self._options.engines[index], self.desks[index]
        named = one.endpoint.engine or ("" if options.engine == "auto" else options.engine)
        dialect = engine_of(named) if named else await recognised(one.url)
        if dialect is None:
            log.info("%s: no engine answers at %s yet", desk.id, one.url)
        while dialect is None:
            await asyncio.sleep(INTERVAL_S)
            dialect = await recognised(one.url)
        log.info("%s: %s at %s", desk.id, dialect.name, one.url)
        model = options.model or one.endpoint.model
        if not model and "{model}" in dialect.ready:
            asked = "for all of its models at once" if dialect.ready_any else "in vain"
            log.warning("%s: %s is asked whether it is ready %s: name its model (--model)", desk.id, dialect.name, asked)
            dialect = replace(dialect, ready=dialect.ready_any or dialect.ready)
        watch = Watch(one.url, dialect, desk, model=model, hung_after=options.hung_after)
        self.watches.append(watch)
        await watch.look()
        endpoint = _told(one.endpoint, dialect.name, f"{address}{f'/{index}' if index else ''}")
        life = await asyncio.to_thread(Life, watch, endpoint, self._register, options.rules)
        self.lives.append(life)
        await asyncio.gather(watch.run(), life.run())

    async def _equip(self, eyes: Eyes) -> None:
        """Keep the GPUs of all records, and their label `throttled`, as they are known by now."""
        while True:
            await asyncio.sleep(GPUS_S)
            eyes.check()
            for life in self.lives:
                life.equip(eyes.gpu)
                life.label("throttled", ",".join(eyes.reasons))

    def _desk(self, engine: Engine) -> Desk:
        options, endpoint = self._options, engine.endpoint
        kv_tokens = options.kv_tokens or endpoint.capacity.kv_tokens or KV_TOKENS
        desk = Desk(
            endpoint.id,
            gpu=endpoint.gpu.kind,
            kv_tokens=kv_tokens,
            dram_tokens=options.dram_tokens,
            state=EngineState.WARMING,
        )
        desk.feed = Feed(engine.events, desk) if engine.events is not None else None
        return desk


def _address(scheme: str, given: str, host: str, port: int) -> str:
    """Where clients reach us: `given` with or without a port, else where we listen."""
    if given and urlsplit(f"//{given}").port:
        return f"{scheme}://{given}"
    return f"{scheme}://{netloc(given or host, port)}"


async def _told_of_drops(answers: Answers) -> None:
    """Whoever asks in vain hears nothing, so this log has to say why."""
    said, again_at = dict(answers.dropped), dict.fromkeys(WHY, 0.0)
    while True:
        await asyncio.sleep(DROPS_S)
        for why, count in answers.dropped.items():
            if count > said[why] and time.monotonic() >= again_at[why]:
                log.warning(
                    "%d messages dropped, the last from %s: %s", count - said[why], answers.last_from[why], WHY[why]
                )
                said[why], again_at[why] = count, time.monotonic() + DROPS_AGAIN_S


async def _followed(feed: Feed) -> None:
    """Events that cannot be followed are no reason to end."""
    await feed.run()
    await asyncio.Event().wait()


def _told(endpoint: Endpoint, engine: str, agent: str) -> Endpoint:
    return replace(endpoint, engine=endpoint.engine or engine, agent=endpoint.agent or agent)


async def _first(stop: asyncio.Event, tasks: Sequence[asyncio.Task[None]]) -> None:
    """Until told to stop; a task that ends before has failed, and so has the agent."""
    waiting = asyncio.ensure_future(stop.wait())
    done, _ = await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    for task in done:
        if task is not waiting:
            await task
