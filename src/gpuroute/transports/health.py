"""Active health checks: one thread per process asks every endpoint of every router that opted in. Jittered, bounded.

HTTP endpoints are asked for the path at which their engine says that it is ready, gRPC ones by the engine's own question
or the standard health protocol. An engine whose health check fails under mere load is not asked. What an answer leads
to is decided in `core.health`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import threading
import weakref
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from gpuroute.core.health import Checked, HealthRules
from gpuroute.engines.catalog import engine_of
from gpuroute.errors import ConfigError
from gpuroute.forms import stamps
from gpuroute.transports.pools import tls_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuroute.core.endpoint import Endpoint, Tls
    from gpuroute.core.pool import Pool
    from gpuroute.core.state import EndpointState
    from gpuroute.router import Router

TICK_S = 0.1
AT_A_TIME = 64


class Checker:
    """The one checker of this process. Its thread is a daemon and ends with the last router. Any thread may `watch`."""

    def __init__(self) -> None:
        self._routers: weakref.WeakSet[Router] = weakref.WeakSet()
        self._checked: weakref.WeakKeyDictionary[EndpointState, Checked] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._pid = 0
        self._running = False
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self, router: Router) -> None:
        """Check the endpoints of a router from now on, if its settings ask for it. Cheap when it is watched already."""
        if not router.settings.health_checks or (self._pid == os.getpid() and self._running and router in self._routers):
            return
        if self._pid != os.getpid():  # a forked child has neither the thread nor, perhaps, a free lock
            self._pid, self._running, self._lock = os.getpid(), False, threading.Lock()
        with self._lock:
            self._routers.add(router)
            if not self._running:
                self._running = True
                threading.Thread(target=self._main, name="gpuroute-health", daemon=True).start()

    def _main(self) -> None:
        with contextlib.suppress(RuntimeError):  # the interpreter is ending
            asyncio.run(self._check_on())

    async def _check_on(self) -> None:
        places = asyncio.Semaphore(AT_A_TIME)
        while self._go_on():
            for router, pool, state in tuple(self._endpoints()):
                now = router.clock()
                checked = self._checked.get(state)
                if checked is None:
                    rules = HealthRules(interval_s=router.settings.health_interval)
                    checked = self._checked[state] = Checked(rules, now, router.random)
                if now >= checked.due_at:
                    checked.begin(now, router.random)
                    task = asyncio.create_task(_check(places, router, pool, state, checked))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
            await asyncio.sleep(TICK_S)

    def _go_on(self) -> bool:
        with self._lock:
            for router in [router for router in self._routers if router.closed]:
                self._routers.discard(router)
            self._running = bool(self._routers)
            return self._running

    def _endpoints(self) -> Iterator[tuple[Router, Pool, EndpointState]]:
        for router in tuple(self._routers):
            for pool in router.pools():
                for state in pool.snapshot.routable:
                    if not engine_of(state.endpoint.engine).queue_fails_health:
                        yield router, pool, state


CHECKER = Checker()


async def _check(places: asyncio.Semaphore, router: Router, pool: Pool, state: EndpointState, checked: Checked) -> None:
    async with places:
        try:
            async with asyncio.timeout(checked.rules.timeout_s):
                ask = _grpc if state.endpoint.protocol == "grpc" else _http
                well = await ask(state.endpoint, checked.rules.timeout_s)
        except (OSError, ssl.SSLError, ConfigError, ValueError, EOFError):
            well = False
    checked.ended(pool, state, router.clock(), well=well)


async def _http(endpoint: Endpoint, timeout: float) -> bool:  # noqa: ARG001  (the caller holds it)
    """True if the engine's readiness path answers 2xx."""
    url = urlsplit(endpoint.url)
    secure = url.scheme == "https"
    tls = endpoint.tls
    context = _context(tls, stamps(tls.ca, tls.cert, tls.key)) if secure else None
    name = (tls_name(endpoint) or url.hostname) if secure else None
    reader, writer = await asyncio.open_connection(
        url.hostname, url.port or (443 if secure else 80), ssl=context, server_hostname=name
    )
    try:
        writer.write(_request(endpoint, url.path, url.netloc.rpartition("@")[2]))
        status = await reader.readline()
        return status.startswith(b"HTTP/1.") and status[9:10] == b"2"
    finally:
        writer.transport.abort()


def _request(endpoint: Endpoint, prefix: str, netloc: str) -> bytes:
    base = prefix.rstrip("/").removesuffix("/v1")
    engine = engine_of(endpoint.engine)
    path = engine.live if "{model}" in engine.ready and not endpoint.model else engine.ready
    path = path.format(model=endpoint.model)
    host = {} if "host" in map(str.lower, endpoint.headers) else {"Host": endpoint.authority or netloc}
    headers = {**host, **endpoint.headers, "Connection": "close"}
    lines = [f"GET {base}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


@lru_cache(maxsize=256)
def _context(tls: Tls, _changed: tuple[int, ...]) -> ssl.SSLContext:
    """Kept, as it takes 28 ms to build, until a file changes."""
    context = ssl.create_default_context(cafile=tls.ca or None)
    if tls.cert:
        context.load_cert_chain(tls.cert, tls.key or None)
    return context


async def _grpc(endpoint: Endpoint, timeout: float) -> bool:
    return await asyncio.to_thread(_grpc_blocking, endpoint, timeout)


def _grpc_blocking(endpoint: Endpoint, timeout: float) -> bool:
    """True if the server says that it is ready, or answers without knowing any of the questions."""
    import grpc

    from gpuroute.transports.grpc_peers import Dialer, Peer, channel_options
    from gpuroute.transports.grpc_probes import probes_of

    options = channel_options((), connect_timeout=timeout, idle=60.0, trust_env=False)
    dial = Dialer(grpc.insecure_channel, grpc.secure_channel, options, None, None)
    peer = Peer(endpoint, dial(endpoint))
    try:
        for probe in probes_of(endpoint):
            ask: Any = peer.channel.unary_unary(probe.method)
            try:
                return probe.read(ask(probe.request, timeout=timeout, metadata=tuple(peer.headers.items())))
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                    return False
        return True
    finally:
        peer.channel.close()
