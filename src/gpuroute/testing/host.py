"""The stand-in on its loop: sockets, connections, and the orders that tests give while it runs."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import socket
import ssl
import sys
from typing import TYPE_CHECKING, Any

from .app import App
from .faults import Fault
from .wire import Connection

if TYPE_CHECKING:
    from collections.abc import Callable

    from .counters import Received
    from .options import ServerOptions


class Host:
    """A listening App. Made, used and closed on one loop; `die` is how it kills its process, if it has one."""

    def __init__(
        self, options: ServerOptions, *, ssl_context: ssl.SSLContext | None = None, die: Callable[[], None] | None = None
    ) -> None:
        self.options = options
        self.app = App(options, self.order)
        self.port = options.port
        self._ssl = ssl_context or _server_context(options)
        self._die = die
        self._server: asyncio.Server | None = None
        self._place: socket.socket | None = None
        self._connections: set[Connection] = set()

    @property
    def url(self) -> str:
        """Where clients find it, without a trailing slash."""
        return f"{'https' if self._ssl else 'http'}://{self.options.host}:{self.port}{self.options.prefix}"

    async def listen(self) -> None:
        """Take connections; the same port every time."""
        if self._server is not None:
            return
        self._keep_port()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            self._connection, self.options.host, self.port, ssl=self._ssl, backlog=1024
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def order(self, order: dict[str, Any]) -> object:
        """Carry out `{"do": NAME, ...}`. Raises ValueError or TypeError for one it does not know."""
        arguments = {name: value for name, value in order.items() if name != "do"}
        action = getattr(self, f"_do_{order.get('do')}", None)
        if action is None:
            known = ", ".join(name[4:] for name in dir(self) if name.startswith("_do_"))
            raise ValueError(f"unknown order {order.get('do')!r}: known are {known}")
        result = action(**arguments)
        return await result if asyncio.iscoroutine(result) else result

    def close(self) -> None:
        """Stop listening and drop all connections."""
        self._do_refuse()
        for connection in list(self._connections):
            connection.cut(reset=False)
        if self._place is not None:
            self._place.close()

    def _keep_port(self) -> None:
        """A bound socket keeps the port ours while nobody listens: else the system may give it to another process.

        Only Linux lets us listen beside it.
        """
        if self._place is not None or sys.platform != "linux":
            return
        place = socket.socket(socket.AF_INET6 if ":" in self.options.host else socket.AF_INET)
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # taken already: `create_server` says so
            place.bind((self.options.host, self.port))
            self.port = place.getsockname()[1]
        self._place = place

    def _connection(self) -> Connection:
        options = self.options
        return Connection(self.app.handle, self._connections, options.keepalive_requests, options.keepalive_s)

    def _do_state(self) -> dict[str, Any]:
        return self.app.state()

    def _do_requests(self) -> list[dict[str, Any]]:
        return [_as_json(request) for request in self.app.counters.requests]

    def _do_reset_counters(self) -> None:
        self.app.counters.clear()

    def _do_slow(self, factor: float) -> None:
        if factor <= 0:
            raise ValueError(f"factor must be above 0: {factor}")
        self.app.engine.slow(factor)

    def _do_hang(self, *, everything: bool = False) -> None:
        self.app.engine.hang()
        self.app.mute = everything

    async def _do_resume(self) -> None:
        self.app.resume()
        await self.listen()

    def _do_answer(self, status: int, **fault: Any) -> None:
        self.app.faults.add(Fault("answer", status=status, **fault))

    def _do_drop_mid_stream(self, **fault: Any) -> None:
        self.app.faults.add(Fault("drop", **fault))

    def _do_stall_mid_stream(self, **fault: Any) -> None:
        self.app.faults.add(Fault("stall", **fault))

    def _do_health(self, status: int) -> None:
        self.app.health = status

    def _do_drain(self) -> None:
        self.app.draining = True

    def _do_refuse(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for connection in [c for c in self._connections if c.idle]:
            connection.cut(reset=False)

    def _do_kill(self) -> None:
        if self._die is not None:
            self._die()
        self._do_refuse()
        for connection in list(self._connections):
            connection.cut(reset=True)
        self.app.abort_all()
        self.app.engine.crash()


def _server_context(options: ServerOptions) -> ssl.SSLContext | None:
    if not options.certfile:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(options.certfile, options.keyfile or None)
    if options.client_ca:
        context.load_verify_locations(options.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _as_json(request: Received) -> dict[str, Any]:
    return {
        "method": request.method,
        "target": request.target.decode("latin-1"),
        "headers": [[name.decode("latin-1"), value.decode("latin-1")] for name, value in request.headers],
        "body": base64.b64encode(request.body).decode(),
        "connection": request.connection,
    }
