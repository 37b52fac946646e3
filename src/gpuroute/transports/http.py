"""The HTTP drivers: next attempt -> send -> classify -> finish -> sleep or return. One for threads, one for tasks.

They differ in `await` only (a test strips it and compares), and serve both client libraries through `Library`. What
neither waits nor sends is in the modules beside this one: `routes` (which pool), `bodies` (what the caller asked),
`pools` and `wires` (connections), `trips` (one attempt: its classification, record and end), `streams` (the body).

A response is handed out once its first bytes are here. An endpoint that dies while it prefills has often sent its head
already (Starlette does so at once), and until then the call can still go elsewhere.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import ref

from gpuroute.errors import ConfigError, DeadlineExceeded, NoEndpointAvailable
from gpuroute.transports.hedging import race_tasks, race_threads
from gpuroute.transports.routes import ANY_POOL, LARGE_BODY, Route, Routes
from gpuroute.transports.trips import Head, Trip

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from gpuroute.core.call import Call
    from gpuroute.transports.asking import Asking
    from gpuroute.transports.pools import Connection, Pools

MAX_ERROR_BODY = 64 * 1024
"""Bytes of an error response that are read before it is classified, so that its connection can serve again."""

OWN_ARGUMENTS = ("pool", "passthrough", "verify", "cert", "limits", "local_address", "socket_options")


def split_arguments(arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of a client: those for our transport, and those for its own base class. Raises ConfigError."""
    theirs = dict(arguments)
    if theirs.get("proxy") is not None or theirs.pop("transport", None) is not None:
        raise ConfigError("a routed client takes no proxy= and no transport=: connections go to the endpoints")
    mine = {name: theirs.pop(name) for name in OWN_ARGUMENTS if name in theirs}
    if theirs.get("cookies") in (True, False):
        mine["cookies"] = theirs.pop("cookies")
    if theirs.get("trust_env") is not None:
        mine["trust_env"] = theirs["trust_env"]
    return mine, theirs


class Primitives(Routes):
    """What the driver for threads waits with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._all = self._make_pools(None)

    def _pools(self) -> Pools:
        return self._all

    def _plain(self) -> Any:
        return self._outside(self._all, self.library.client.HTTPTransport, self.library.client.Client)

    def _stream(self, trip: Trip, source: Any, chunks: Any, first: bytes | None) -> Any:
        inner, seam = self.library.stream(trip, source, chunks, first), trip.route.seam
        return inner if seam is None or seam.joined else self.library.seamless(self, trip.route, seam, inner)

    def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def _race(self, trip: Trip) -> Any:
        return race_threads(trip, self._try, self._hedge)

    def _ask(self, call: Call) -> Asking | None:
        return self._asker.ask(call) if self._asker is not None else None

    def _ready(self, timeout: float | None) -> None:
        self.router.ready(timeout)

    def _prompt(self, route: Route) -> None:
        route.read()

    def close(self) -> None:
        """Close the connections; who sends again gets new ones. The router is the caller's, and stays open."""
        pools, self._all = self._all, self._make_pools(None)
        pools.close()
        for plain in filter(None, (pools.plain, self._given_plain)):
            plain.close()

    def let_go(self) -> None:
        """Close the connections, but not the transport that was in this one's place before."""
        self._all.close()

    def _after_fork(self) -> None:
        super()._after_fork()
        self._all.forget()
        self._all = self._make_pools(None)


class AsyncPrimitives(Routes):
    """What the driver for tasks waits with. Every event loop has connections of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._by_loop: dict[asyncio.AbstractEventLoop, tuple[Pools, object]] = {}

    def _pools(self) -> Pools:
        loop = asyncio.get_running_loop()
        found = self._by_loop.get(loop)
        return found[0] if found is not None else self._new_loop(loop)

    def _new_loop(self, loop: asyncio.AbstractEventLoop) -> Pools:
        for known in tuple(self._by_loop):  # other threads have loops too, and come here as well
            if known.is_closed():
                self._by_loop.pop(known, None)
        pools = self._make_pools(loop)
        guard = _until_loop_ends(ref(self), loop)
        # Its first step makes the loop know the generator, which the loop then closes when it ends.
        with suppress(StopIteration):
            guard.__anext__().send(None)
        self._by_loop[loop] = (pools, guard)
        return pools

    def _plain(self) -> Any:
        return self._outside(self._pools(), self.library.client.AsyncHTTPTransport, self.library.client.AsyncClient)

    def _stream(self, trip: Trip, source: Any, chunks: Any, first: bytes | None) -> Any:
        inner, seam = self.library.async_stream(trip, source, chunks, first), trip.route.seam
        return inner if seam is None or seam.joined else self.library.async_seamless(self, trip.route, seam, inner)

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _race(self, trip: Trip) -> Any:
        return await race_tasks(trip, self._try, self._hedge)

    async def _ask(self, call: Call) -> Asking | None:
        return await self._asker.ask_async(call) if self._asker is not None else None

    async def _ready(self, timeout: float | None) -> None:
        await self.router.aready(timeout)

    async def _prompt(self, route: Route) -> None:
        if route.out.content is not None and len(route.out.content) > LARGE_BODY:
            await asyncio.to_thread(route.read)
        else:
            route.read()

    async def aclose(self) -> None:
        """Close the connections of all loops; who sends again gets new ones. The router stays open."""
        here = asyncio.get_running_loop()
        for loop, (pools, _) in list(self._by_loop.items()):
            if loop is here:
                self._renew(loop)
                if pools.plain is not None:
                    await pools.plain.aclose()
            else:
                with suppress(RuntimeError):  # that loop has ended, and closed them
                    loop.call_soon_threadsafe(self._renew, loop)
        if self._given_plain is not None:  # it may have served before it was replaced
            await self._given_plain.aclose()

    def _renew(self, loop: asyncio.AbstractEventLoop) -> None:
        found = self._by_loop.get(loop)
        if found is not None:
            pools, guard = found
            fresh = self._make_pools(loop)
            fresh.plain = pools.plain
            self._by_loop[loop] = (fresh, guard)
            pools.close()

    def let_go(self) -> None:
        """Close the connections, but not the transport that was in this one's place before."""
        for loop, (pools, _) in list(self._by_loop.items()):
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(pools.close)

    def __del__(self) -> None:
        if hasattr(self, "_by_loop"):
            self.let_go()

    def _after_fork(self) -> None:
        super()._after_fork()
        self._by_loop = {}


async def _until_loop_ends(owner: ref[AsyncPrimitives], loop: asyncio.AbstractEventLoop) -> AsyncGenerator[None, None]:
    """Close the connections of a loop that ends. One that goes on after its generators were shut down gets new ones."""
    try:
        yield
    finally:
        transport = owner()
        found = transport._by_loop.pop(loop, None) if transport is not None else None  # noqa: SLF001
        if found is not None:
            pools = found[0]
            pools.close()
            if pools.plain is not None:
                await pools.plain.aclose()


class Driver(Primitives):
    """For threads. Safe from any thread."""

    def handle_request(self, request: Any) -> Any:
        """Send a request of the client library to the best endpoint, and again elsewhere when that is right."""
        route = self._begin(request)
        if route is None:
            return self._left(self._plain().handle_request(self._leaving(request)))
        if not self.router.is_ready and not self._disabled:
            if self._left_out(route):
                return self.drive(route)
            self._ready(route.out.options.timeout)
        if route.name == ANY_POOL and not self._disabled:
            self._prompt(route)
        if not self._find_pool(route):
            return self._plain().handle_request(self._passing(request))
        if self._needs_prompt(route):
            self._prompt(route)
        self._open(route)
        return self.drive(route)

    def drive(self, route: Route) -> Any:
        """Attempt after attempt until one is final: its response, or the exception that the caller shall see."""
        call, clock, pools = route.call, self.router.clock, self._pools()
        last: Any = None
        try:
            if route.asked is None and self._asks(route):
                route.asked = self._ask(call)
            while True:
                while (pause := call.delay(clock())) > 0:
                    self._sleep(pause)
                trip = self._depart(route, pools)
                last = self._race(trip) if trip.may_hedge else self._try(trip)
                if not trip.again:
                    break
        except (NoEndpointAvailable, DeadlineExceeded) as error:
            last = self._stuck(route, error, last)
        except BaseException:
            self._abort(route)
            raise
        return self._handed(last)

    def _try(self, trip: Trip) -> Any:
        """Send once. The response, or the exception that the caller shall see; `trip.again` if neither is final."""
        try:
            reply = self._send(trip)
            head = Head(reply.status, reply.headers, cookies=self._settled.cookies)
            if head.status >= 400:
                return self._refused(trip, head, reply)
            return self._accepted(trip, head, reply)
        except Exception as error:
            trip.drop()
            trip.again = trip.failed(error)
            return trip.error(error)
        except BaseException:
            trip.cancelled()
            raise

    def _send(self, trip: Trip) -> Any:
        while True:
            connection = self._connection(trip)
            try:
                return connection.http.handle_request(trip.request())
            except Exception as error:
                if not trip.may_resend(error):
                    raise
            trip.drop()

    def _connection(self, trip: Trip) -> Connection:
        link, pools = trip.link, trip.pools
        link.gate.enter(trip, trip.clipped("pool"))
        connection = None if trip.resent else pools.take(link)
        if connection is None:
            began = time.monotonic()
            wire = pools.wire.connect(self.library.core, link.address, trip.connect_timeout())
            trip.connected(time.monotonic() - began)
            connection = pools.add(link, wire)
        trip.use(connection)
        return connection

    def _accepted(self, trip: Trip, head: Head, reply: Any) -> Any:
        source = reply.stream
        chunks = iter(source)
        if head.status == 101:  # the connection is the caller's from here on
            return trip.respond(head, reply.extensions, self._stream(trip, source, chunks, None))
        first = next(chunks, None)
        while trip.gathers(head, first) and (more := next(chunks, None)) is not None:
            first = (first or b"") + more
        whole = first is None or len(first) == head.length
        if whole:
            if first is not None:
                next(chunks, None)  # the end of the body, which is here already
            source.close()
            trip.release()
        problem = trip.look_inside(head, first, whole=whole)
        if problem is not None and trip.again:
            trip.drop()
            return problem
        stream = self._whole(first) if whole else self._stream(trip, source, chunks, first)
        return trip.respond(head, reply.extensions, stream)

    def _refused(self, trip: Trip, head: Head, reply: Any) -> Any:
        source = reply.stream
        chunks = iter(source)
        body = b""
        chunk: bytes | None = b""
        while chunk is not None and len(body) < MAX_ERROR_BODY:
            body += chunk
            chunk = next(chunks, None)
        if chunk is None:
            source.close()
            trip.release()
        trip.again = trip.answered(head, body)
        if chunk is not None and not trip.again:
            return trip.respond(head, reply.extensions, self._stream(trip, source, chunks, body + chunk))
        trip.drop()
        return trip.respond(head, reply.extensions, self._whole(body))


class AsyncDriver(AsyncPrimitives):
    """For tasks. Safe from any event loop."""

    async def handle_async_request(self, request: Any) -> Any:
        """Send a request of the client library to the best endpoint, and again elsewhere when that is right."""
        route = self._begin(request)
        if route is None:
            return self._left(await self._plain().handle_async_request(self._leaving(request)))
        if not self.router.is_ready and not self._disabled:
            if self._left_out(route):
                return await self.drive(route)
            await self._ready(route.out.options.timeout)
        if route.name == ANY_POOL and not self._disabled:
            await self._prompt(route)
        if not self._find_pool(route):
            return await self._plain().handle_async_request(self._passing(request))
        if self._needs_prompt(route):
            await self._prompt(route)
        self._open(route)
        return await self.drive(route)

    async def drive(self, route: Route) -> Any:
        """Attempt after attempt until one is final: its response, or the exception that the caller shall see."""
        call, clock, pools = route.call, self.router.clock, self._pools()
        last: Any = None
        try:
            if route.asked is None and self._asks(route):
                route.asked = await self._ask(call)
            while True:
                while (pause := call.delay(clock())) > 0:
                    await self._sleep(pause)
                trip = self._depart(route, pools)
                last = await (self._race(trip) if trip.may_hedge else self._try(trip))
                if not trip.again:
                    break
        except (NoEndpointAvailable, DeadlineExceeded) as error:
            last = self._stuck(route, error, last)
        except BaseException:
            self._abort(route)
            raise
        return self._handed(last)

    async def _try(self, trip: Trip) -> Any:
        """Send once. The response, or the exception that the caller shall see; `trip.again` if neither is final."""
        try:
            reply = await self._send(trip)
            head = Head(reply.status, reply.headers, cookies=self._settled.cookies)
            if head.status >= 400:
                return await self._refused(trip, head, reply)
            return await self._accepted(trip, head, reply)
        except Exception as error:
            trip.drop()
            trip.again = trip.failed(error)
            return trip.error(error)
        except BaseException:
            trip.cancelled()
            raise

    async def _send(self, trip: Trip) -> Any:
        while True:
            connection = await self._connection(trip)
            try:
                return await connection.http.handle_async_request(trip.request())
            except Exception as error:
                if not trip.may_resend(error):
                    raise
            trip.drop()

    async def _connection(self, trip: Trip) -> Connection:
        link, pools = trip.link, trip.pools
        await link.gate.enter(trip, trip.clipped("pool"))
        connection = None if trip.resent else pools.take(link)
        if connection is None:
            began = time.monotonic()
            wire = await pools.wire.connect(self.library.core, link.address, trip.connect_timeout())
            trip.connected(time.monotonic() - began)
            connection = pools.add(link, wire)
        trip.use(connection)
        return connection

    async def _accepted(self, trip: Trip, head: Head, reply: Any) -> Any:
        source = reply.stream
        chunks = aiter(source)
        if head.status == 101:  # the connection is the caller's from here on
            return trip.respond(head, reply.extensions, self._stream(trip, source, chunks, None))
        first = await anext(chunks, None)
        while trip.gathers(head, first) and (more := await anext(chunks, None)) is not None:
            first = (first or b"") + more
        whole = first is None or len(first) == head.length
        if whole:
            if first is not None:
                await anext(chunks, None)  # the end of the body, which is here already
            await source.aclose()
            trip.release()
        problem = trip.look_inside(head, first, whole=whole)
        if problem is not None and trip.again:
            trip.drop()
            return problem
        stream = self._whole(first) if whole else self._stream(trip, source, chunks, first)
        return trip.respond(head, reply.extensions, stream)

    async def _refused(self, trip: Trip, head: Head, reply: Any) -> Any:
        source = reply.stream
        chunks = aiter(source)
        body = b""
        chunk: bytes | None = b""
        while chunk is not None and len(body) < MAX_ERROR_BODY:
            body += chunk
            chunk = await anext(chunks, None)
        if chunk is None:
            await source.aclose()
            trip.release()
        trip.again = trip.answered(head, body)
        if chunk is not None and not trip.again:
            return trip.respond(head, reply.extensions, self._stream(trip, source, chunks, body + chunk))
        trip.drop()
        return trip.respond(head, reply.extensions, self._whole(body))
