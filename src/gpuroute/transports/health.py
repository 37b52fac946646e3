"""Active health checks: one thread per process asks every endpoint of every router that opted in. Jittered, bounded.

HTTP endpoints are asked for the path at which their engine says that it is ready, gRPC ones by the engine's own question
or the standard health protocol. An engine whose health check fails under mere load is not asked. What an answer leads
to is decided in `core.health`.

An endpoint is reached as calls reach it: by the trust, the certificate and the local address of the client, or the
credentials and options of the channel, that called its pool last. Pools that nobody has called are left alone: in whose
name would they be asked?
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from gpuroute.core.health import Checked, HealthRules
from gpuroute.engines.catalog import engine_of
from gpuroute.errors import ConfigError
from gpuroute.transports.reach import UNREACHABLE, reached

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuroute.core.endpoint import Endpoint
    from gpuroute.core.pool import Pool
    from gpuroute.core.state import EndpointState
    from gpuroute.router import Router
    from gpuroute.transports.grpc_peers import Dialer
    from gpuroute.transports.reach import Address

TICK_S = 0.1
AT_A_TIME = 64


class Way(Protocol):
    """How an HTTP client reaches an endpoint."""

    def address(self, endpoint: Endpoint) -> Address:
        """Where and how to connect. Raises OSError, ConfigError."""


class Checker:
    """The one checker of this process. Its thread is a daemon and ends with the last router. Any thread may `watch`."""

    def __init__(self) -> None:
        self._routers: weakref.WeakSet[Router] = weakref.WeakSet()
        self._ways: weakref.WeakKeyDictionary[Pool, Way | Dialer] = weakref.WeakKeyDictionary()
        self._checked: weakref.WeakKeyDictionary[EndpointState, Checked] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._pid = 0
        self._running = False
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self, router: Router, pool: Pool, way: Way | Dialer) -> None:
        """Check the endpoints of a pool of this router from now on, in this way, if the router's settings ask for it.
        Cheap when that is done already."""
        if not router.settings.health_checks:
            return
        if self._pid == os.getpid() and self._running and self._ways.get(pool) is way:
            return
        if self._pid != os.getpid():  # a forked child has neither the thread nor, perhaps, a free lock
            self._pid, self._running, self._lock = os.getpid(), False, threading.Lock()
            self._ways = weakref.WeakKeyDictionary()
        with self._lock:
            self._routers.add(router)
            self._ways[pool] = way
            if not self._running:
                with contextlib.suppress(RuntimeError):  # no more threads: the next call tries again
                    threading.Thread(target=self._main, name="gpuroute-health", daemon=True).start()
                    self._running = True

    def _main(self) -> None:
        with contextlib.suppress(RuntimeError):  # the interpreter is ending
            asyncio.run(self._check_on())

    async def _check_on(self) -> None:
        places = asyncio.Semaphore(AT_A_TIME)
        # As many threads: who is silent must not keep others waiting, and then be taken for their silence.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(AT_A_TIME))
        while self._go_on():
            for router, pool, way, state in tuple(self._endpoints()):
                now = router.clock()
                checked = self._checked.get(state)
                if checked is None:
                    rules = HealthRules(interval_s=router.settings.health_interval)
                    checked = self._checked[state] = Checked(rules, now, router.random)
                if now >= checked.due_at:
                    checked.begin(now, router.random)
                    task = asyncio.create_task(_check(places, router, pool, way, state, checked))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
            await asyncio.sleep(TICK_S)

    def _go_on(self) -> bool:
        with self._lock:
            for router in [router for router in self._routers if router.closed]:
                self._routers.discard(router)
            self._running = bool(self._routers)
            return self._running

    def _endpoints(self) -> Iterator[tuple[Router, Pool, Way | Dialer, EndpointState]]:
        for router in tuple(self._routers):
            for pool in router.pools():
                way = self._ways.get(pool)
                if way is not None:
                    for state in pool.snapshot.routable:
                        if not engine_of(state.endpoint.engine).queue_fails_health:
                            yield router, pool, way, state


CHECKER = Checker()


async def _check(
    places: asyncio.Semaphore,
    router: Router,
    pool: Pool,
    way: Way | Dialer,
    state: EndpointState,
    checked: Checked,
) -> None:
    async with places:
        timeout = checked.rules.timeout_s
        try:
            async with asyncio.timeout(timeout):
                if hasattr(way, "address"):
                    well = await _http(state.endpoint, way, timeout)
                else:
                    well = await asyncio.to_thread(_grpc, state.endpoint, way, timeout)
        except (*UNREACHABLE, ConfigError, ValueError, EOFError):
            well = False
    checked.ended(pool, state, router.clock(), well=well)


async def _http(endpoint: Endpoint, way: Way, timeout: float) -> bool:
    """True if the engine's readiness path answers 2xx. The timeout is the caller's to keep."""
    url, address = urlsplit(endpoint.url), way.address(endpoint)
    sock = await reached(asyncio.get_running_loop(), address, timeout)
    name = address.server_name if address.context is not None else None
    reader, writer = await asyncio.open_connection(sock=sock, ssl=address.context, server_hostname=name)
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


def _grpc(endpoint: Endpoint, dial: Dialer, timeout: float) -> bool:
    """True if the server says that it is ready, or answers without knowing any of the questions."""
    import grpc

    from gpuroute.transports.grpc_peers import Peer
    from gpuroute.transports.grpc_probes import probes_of

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
