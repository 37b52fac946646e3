"""Load reports that servers offer as a stream (ORCA, out of band), followed for the endpoints that a channel has called.

This is the way to a gRPC server's own load where there is no agent: the standard trailer stays inside grpcio. One stream
and one connection per endpoint, all in the one loop of `grpc_aside`, and only where a channel asks for them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import weakref
from typing import TYPE_CHECKING, Any

import grpc

from gpuroute.core.orca import parse_orca_bin
from gpuroute.core.wire import encode
from gpuroute.errors import ConfigError
from gpuroute.transports.grpc_aside import ASIDE
from gpuroute.transports.piggyback import learn_load

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuroute.core.endpoint import Endpoint
    from gpuroute.core.pool import Pool
    from gpuroute.transports.grpc_hub import Hub

log = logging.getLogger("gpuroute")

METHOD = "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics"
AGAIN_S = 5.0
"""Until a stream that broke is asked for anew."""


def report_request(every: float) -> bytes:
    """OrcaLoadReportRequest: a report every so many seconds."""
    return encode((1, encode((1, int(every)), (2, round(every % 1 * 1e9)))))


class Reports:
    """The streams of one routed channel. Any thread. They end with the channel, the router, or the endpoint's record."""

    def __init__(self, hub: Hub, dial: Callable[[Endpoint], Any], every: float) -> None:
        if isinstance(every, bool) or not isinstance(every, (int, float)) or not 0 < every < math.inf:
            raise ConfigError(f"load_reports={every!r}: expected seconds above 0, or None")
        self._hub = weakref.ref(hub)
        self._dial = dial
        self._request = report_request(every)
        self._followed: set[str] = set()

    def follow(self, endpoint: Endpoint) -> None:
        """Learn what this endpoint reports from now on. Idempotent."""
        if endpoint.id not in self._followed:
            self._followed.add(endpoint.id)
            try:
                ASIDE.run(self._follow(endpoint))
            except RuntimeError:  # no more threads: the next channel to it tries again
                self._followed.discard(endpoint.id)

    def after_fork(self) -> None:
        """The parent's streams are not the child's."""
        self._followed = set()

    async def _follow(self, endpoint: Endpoint) -> None:
        reading = asyncio.ensure_future(self._read_on(endpoint))
        try:
            await self._until_it_left(endpoint)
        finally:  # by itself a stream ends with its next report, which from a dead host never comes
            reading.cancel()
            self._followed.discard(endpoint.id)

    async def _read_on(self, endpoint: Endpoint) -> None:
        while True:
            try:
                await self._read(endpoint)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    return  # it does not speak this, and is not asked again
            except (OSError, ValueError) as error:
                log.debug("no load reports of %s: %s", endpoint.id, error)
            await asyncio.sleep(AGAIN_S)

    async def _read(self, endpoint: Endpoint) -> None:
        async with self._dial(endpoint) as channel:
            stream = channel.unary_stream(METHOD)(self._request)
            try:
                async for answer in stream:
                    pool, hub = self._pool(endpoint), self._hub()
                    if pool is None or hub is None:
                        return
                    report, state = parse_orca_bin(answer), pool.snapshot.by_id.get(endpoint.id)
                    if report is not None and state is not None:
                        learn_load(state, report, pool.mean_tokens, hub.clock())
            finally:
                stream.cancel()  # older releases of grpcio let a stream run on whose channel is closed

    async def _until_it_left(self, endpoint: Endpoint) -> None:
        while self._pool(endpoint) is not None:  # noqa: ASYNC110  (nobody could set an event)
            await asyncio.sleep(AGAIN_S)

    def _pool(self, endpoint: Endpoint) -> Pool | None:
        """The pool, while the channel is in use and this record of the endpoint is in it."""
        hub = self._hub()
        if hub is None or hub.closed or hub.router.closed:
            return None
        state = hub.found.snapshot.by_id.get(endpoint.id)
        return hub.found if state is not None and state.endpoint.url == endpoint.url else None
