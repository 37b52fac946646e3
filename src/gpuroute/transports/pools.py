"""Connections to the endpoints: one small pool for each, driven at the level of httpcore's HTTP/1.1 connection.

httpcore's own pool scans all connections of all hosts for every request and polls idle sockets; per endpoint, a stack of
idle connections is all that is needed. Measured on httpcore2 2.16: 637 us for a request on a connection, 836 us through
a pool that holds nothing else. Everything that a request to an endpoint needs is computed once, in its `Link`.

Idle connections are bounded per endpoint and over all endpoints, and closed when they expire, when their endpoint leaves
the registry, or when their event loop ends. HTTP/1.1 only: engines speak nothing else, and multiplexing would hide from
the router what is one connection's trouble and what is the endpoint's.
"""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpuroute.errors import ConfigError
from gpuroute.forms import stamps
from gpuroute.transports.gates import AsyncGate, Gate
from gpuroute.transports.reach import Address
from gpuroute.transports.wires import AsyncWire, Wire

if TYPE_CHECKING:
    import ssl
    from asyncio import AbstractEventLoop
    from collections.abc import Iterable

    from gpuroute.core.endpoint import Endpoint, Tls
    from gpuroute.core.pool import Pool
    from gpuroute.core.state import EndpointState
    from gpuroute.transports.library import Library
    from gpuroute.transports.reach import SocketOption

_VERSION = re.compile(rb"v[0-9]+[a-z0-9]*")

Header = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the connections. `in_use` and `idle` hold per endpoint, `idle_total` over all; `expiry` in seconds.

    256 in use because an engine runs no more sequences at once (vLLM's default); 5 s because that is how long most
    servers keep an idle connection.
    """

    in_use: int = 256
    idle: int = 64
    idle_total: int = 256
    expiry: float | None = 5.0


class UnusableFiles(ConfigError):
    """The TLS files that one endpoint's record names are not here or no good: a reason to take another endpoint."""


class Way:
    """How the connections of one transport are made: whom they trust, what they show, where they come from.

    There is one TLS context for all endpoints (28 ms to build), and one for each CA or client certificate of their own.
    """

    def __init__(
        self,
        library: Library,
        *,
        verify: Any = True,
        cert: Any = None,
        trust_env: bool = True,
        local_address: str | None = None,
        socket_options: Iterable[SocketOption] = (),
    ) -> None:
        self._library = library
        self._arguments = {"verify": verify, "cert": cert, "trust_env": trust_env}
        self._local = local_address
        self._options = tuple(socket_options)
        self._lock = threading.Lock()
        self._contexts: dict[object, ssl.SSLContext] = {}

    def after_fork(self) -> None:
        """In a forked child: the thread that built a context, and held the lock, may not exist here."""
        self._lock = threading.Lock()

    def shared(self) -> ssl.SSLContext:
        """The context of endpoints that have no TLS files of their own."""
        return self._built("shared", lambda: self._library.client.create_ssl_context(**self._arguments))

    def address(self, endpoint: Endpoint) -> Address:
        """Where and how to connect to an endpoint. Raises ConfigError; UnusableFiles for TLS files that are not here."""
        url = self._library.client.URL(endpoint.url)
        if url.scheme not in ("http", "https") or not url.host:
            raise ConfigError(
                f"endpoint {endpoint.id!r}: its URL must begin with http:// or https://, not {url.scheme!r}"
            )
        secure = url.scheme == "https"
        return Address(
            url.raw_host.decode("ascii"),
            url.port or (443 if secure else 80),
            self._of(endpoint.tls) if secure else None,
            tls_name(endpoint),
            self._local,
            self._options,
        )

    def _of(self, tls: Tls) -> ssl.SSLContext:
        """The context for one endpoint. Files are read again when they change."""
        if not (tls.ca or tls.cert):
            return self.shared()
        try:
            return self._built((tls, stamps(tls.ca, tls.cert, tls.key)), lambda: self._own(tls))
        except OSError as error:
            raise UnusableFiles(f"TLS files of an endpoint cannot be used: {error}") from error

    def _own(self, tls: Tls) -> ssl.SSLContext:
        import ssl

        context = ssl.create_default_context(cafile=tls.ca or None)
        if tls.cert:
            context.load_cert_chain(tls.cert, tls.key or None)
        return context

    def _built(self, key: object, build: Any) -> ssl.SSLContext:
        with self._lock:
            context = self._contexts.get(key)
            if context is None:
                context = self._contexts[key] = build()
                context.set_alpn_protocols(["http/1.1"])
            return context


class Link:
    """All that is fixed for requests to one endpoint, and its idle connections, the warmest last."""

    __slots__ = (
        "address", "departed", "endpoint", "gate", "headers", "idle", "names", "origin", "overridden", "pool",
        "prefix", "state", "version",
    )  # fmt: skip

    def __init__(
        self, state: EndpointState, pool: Pool, library: Library, address: Address, gate: Gate | AsyncGate
    ) -> None:
        endpoint = state.endpoint
        url = library.client.URL(endpoint.url)
        self.state = state
        self.pool = pool
        self.endpoint = endpoint
        self.address = address
        self.gate: Any = gate  # one of them waits, the other is awaited
        self.idle: list[Connection] = []
        self.departed = False
        port = url.port or (443 if url.scheme == "https" else 80)
        self.origin = library.core.Origin(url.raw_scheme, url.raw_host, port)
        self.names = {url.netloc, _netloc(library, url.scheme, endpoint.authority)}
        self.prefix: bytes = url.raw_path.partition(b"?")[0].rstrip(b"/")
        last = self.prefix.rpartition(b"/")[2]
        self.version: bytes = b"/" + last if _VERSION.fullmatch(last) else b""
        injected = [(name.encode(), value.encode()) for name, value in endpoint.headers.items()]
        self.overridden = frozenset(name.lower() for name, _ in injected)
        host = [] if b"host" in self.overridden else [(b"Host", endpoint.authority.encode() or url.netloc)]
        self.headers: list[Header] = host + injected

    def target(self, path: bytes) -> bytes:
        """The request target for a path and query of the caller: the endpoint's prefix goes before it.

        A version segment that both have (`/v1`) is written once.
        """
        if not self.prefix:
            return path
        version = self.version
        if version and path.startswith(version) and path[len(version) : len(version) + 1] in (b"", b"/", b"?"):
            path = path[len(version) :]
        return self.prefix + path

    def is_self(self, url: Any) -> bool:
        """True if an absolute URL (of the client library) names this very endpoint, by its own URL or its authority."""
        return bool(url.raw_scheme == self.origin.scheme and url.netloc in self.names)


class Connection:
    """One connection to an endpoint: the HTTP state machine over its wire."""

    __slots__ = ("http", "idle_since", "link", "reused", "wire")

    def __init__(self, link: Link, wire: Any, http: Any) -> None:
        self.link = link
        self.wire = wire
        self.http = http
        self.reused = False
        self.idle_since = 0.0


class Pools:
    """The connections of one transport: of all its threads, or of its tasks on one event loop."""

    def __init__(
        self,
        library: Library,
        way: Way,
        limits: Limits,
        *,
        loop: AbstractEventLoop | None,
    ) -> None:
        self._library = library
        self._way = way
        self._limits = limits
        core = library.core
        self._http = core.HTTP11Connection if loop is None else core.AsyncHTTP11Connection
        self._gate: type[Gate | AsyncGate] = Gate if loop is None else AsyncGate
        self.wire: Any = Wire if loop is None else AsyncWire
        self.loop = loop
        self.plain: Any = None  # the client library's own transport, for hosts that are no pools
        self._links: dict[EndpointState, Link] = {}
        self._idle: OrderedDict[Connection, None] = OrderedDict()
        self._lock = threading.Lock()
        self._version = -1
        self._closed = False

    def link(self, state: EndpointState, pool: Pool, version: int) -> Link:
        """The link to an endpoint. `version` is the registry view's: endpoints that left with it are let go."""
        if version != self._version:
            self._version = version
            self._drop_departed()
        link = self._links.get(state)
        if link is None or link.endpoint is not state.endpoint:
            link = self._linked(state, pool, link)
        return link

    def warm(self, state: EndpointState) -> bool:
        """True if a connection to the endpoint is idle: a request would need no handshake."""
        link = self._links.get(state)
        return link is not None and bool(link.idle)

    def take(self, link: Link) -> Connection | None:
        """An idle connection, or None if a new one is needed."""
        now = time.monotonic()
        with self._lock:
            self._expire(now)
            while link.idle:
                connection = link.idle.pop()
                self._idle.pop(connection, None)
                if not connection.wire.stale:
                    connection.reused = True
                    return connection
                connection.wire.close()
        return None

    def add(self, link: Link, wire: Any) -> Connection:
        """A new connection, in use."""
        return Connection(link, wire, self._http(link.origin, wire))

    def give_back(self, connection: Connection) -> None:
        """A connection whose response ended: keep it, or close it if it cannot serve again."""
        link = connection.link
        with self._lock:
            usable = not link.departed and not self._closed and connection.http.is_idle()
            if usable and len(link.idle) < self._limits.idle:
                connection.idle_since = time.monotonic()
                link.idle.append(connection)
                self._idle[connection] = None
                if len(self._idle) > self._limits.idle_total:
                    self._close_oldest()
                return
        connection.wire.close()

    def close(self) -> None:
        """Close what is idle now, and what is in use when it comes back."""
        with self._lock:
            self._closed = True
            while self._idle:
                self._close_oldest()

    def forget(self) -> None:
        """In a forked child: let go of the parent's connections. Its threads, and so its locks, do not exist here."""
        self._lock = threading.Lock()
        self.close()

    def _linked(self, state: EndpointState, pool: Pool, old: Link | None) -> Link:
        if old is not None and old.endpoint == state.endpoint:
            old.endpoint = state.endpoint  # the registry was read again and says the same
            return old
        if old is not None:
            with self._lock:
                self._retire(old)
        gate = self._gate(self._library.core, self._limits.in_use)
        link = Link(state, pool, self._library, self._way.address(state.endpoint), gate)
        if old is None:
            return self._links.setdefault(state, link)  # another thread may have been quicker
        self._links[state] = link
        return link

    def _expire(self, now: float) -> None:
        expiry = self._limits.expiry
        while expiry is not None and self._idle and now - next(iter(self._idle)).idle_since > expiry:
            self._close_oldest()

    def _close_oldest(self) -> None:
        connection, _ = self._idle.popitem(last=False)
        with suppress(ValueError):  # after an interrupt between the two
            connection.link.idle.remove(connection)
        connection.wire.close()

    def _drop_departed(self) -> None:
        with self._lock:
            for state, link in list(self._links.items()):
                if link.pool.snapshot.by_id.get(state.id) is not state:
                    del self._links[state]
                    self._retire(link)

    def _retire(self, link: Link) -> None:
        link.departed = True
        while link.idle:
            connection = link.idle.pop()
            self._idle.pop(connection, None)
            connection.wire.close()


def _netloc(library: Library, scheme: str, authority: str) -> bytes:
    """An authority as the netloc of URLs that name it."""
    try:
        netloc: bytes = library.client.URL(f"{scheme}://{authority}").netloc
    except library.client.InvalidURL:
        return authority.encode()
    return netloc


def tls_name(endpoint: Endpoint) -> str:
    """The name that an endpoint's certificate must have; "": the host of its URL."""
    if endpoint.tls.server_name:
        return endpoint.tls.server_name
    authority = endpoint.authority
    host = authority.rpartition(":")[0] if re.search(r":[0-9]+$", authority) else authority
    return host.strip("[]")
