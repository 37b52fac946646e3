"""One real channel per endpoint: opened at the first call, closed when idle, or when gone and its last call has ended.

Python's grpcio offers no balancer and no resolver, so the channel that balances stands above one plain channel each
(target `ipv4:host:port`, no retries, no proxy, a subchannel pool of its own). A thousand endpoints cost nothing until
they are picked.

Keepalive: `grpc.keepalive_timeout_ms` has no effect in grpcio 1.60 - 1.85 (measured: a frozen peer stays undetected for
60 s); `grpc.http2.ping_timeout_ms` has. `max_pings_without_data` stays at grpc's default: 0 would keep a silent stream
watched, but servers answer with GOAWAY too_many_pings.
"""

from __future__ import annotations

import math
import threading
from inspect import unwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit
from weakref import WeakSet

import grpc
from grpc.experimental import ChannelOptions

from gpuroute.errors import ConfigError
from gpuroute.transports.grpc_errors import ClosedUnder

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

    from gpuroute.core.endpoint import Endpoint
    from gpuroute.transports.grpc_method import Method
    from gpuroute.transports.grpc_reports import Reports

    Options = Sequence[tuple[str, Any]]

INF = math.inf
SECURE = frozenset({"https", "grpcs"})
PLAIN = frozenset({"http", "grpc", ""})
SWEEP_EVERY = 10.0  # seconds
PATIENT_FOR = 32  # unary calls without a load report until but one in a second is looked at
MAX_METHODS = 256  # bound multicallables of one endpoint; more are made by stubs with serializers made per call

# What a parent's channels become in a forked child: destroying one there can hang, so they are kept and never touched.
_ABANDONED: list[object] = []


class Peer:
    """The channel to one endpoint. `live`: tokens of calls that use it; `gone`: closes when the last of them ends."""

    __slots__ = ("channel", "deaf", "endpoint", "gone", "headers", "live", "methods", "patience", "patience_until",
                 "unreported", "used_at")  # fmt: skip

    def __init__(self, endpoint: Endpoint, channel: Any) -> None:
        self.adopt(endpoint)
        self.channel = channel
        self.methods: dict[Method, Any] = {}
        self.live: set[object] = set()
        self.gone = False
        self.used_at = 0.0
        self.patience = INF  # seconds that a unary attempt may take here, looked up at times
        self.patience_until = 0.0
        self.unreported = 0  # looks at its trailing metadata since there was a load report in them
        self.deaf = False  # nothing is expected there

    def adopt(self, endpoint: Endpoint) -> None:
        """Take over a new record of the same server."""
        self.endpoint = endpoint
        headers = ((name.lower(), value) for name, value in endpoint.headers.items())
        self.headers = {name: value.encode() if name.endswith("-bin") else value for name, value in headers}

    def listened(self, reported: bool) -> None:
        """Its trailing metadata were looked at. Where no load is reported that is done now and then only."""
        self.unreported = 0 if reported else self.unreported + 1
        self.deaf = self.unreported >= PATIENT_FOR

    def bind(self, method: Method) -> Any:
        """The multicallable of a method on this channel."""
        try:
            return self.methods[method]
        except KeyError:
            if len(self.methods) >= MAX_METHODS:
                self.methods.clear()
            make = getattr(self.channel, method.kind)
            bound = make(method.name, method.serializer, method.deserializer, method.registered)
            return self.methods.setdefault(method, bound)


class Peers:
    """The open channels of one routed channel. Safe from any thread."""

    __slots__ = ("_by_id", "_close", "_leaving", "_lock", "_open", "closed", "idle", "on_open", "reports", "streams",
                 "sweep_at", "version")  # fmt: skip

    def __init__(
        self,
        opener: Callable[[Endpoint], Any],
        close: Callable[[Any], object],
        idle: float,
        reports: Reports | None = None,
    ) -> None:
        self._open = opener
        self._close = close
        self._by_id: dict[str, Peer] = {}
        self._leaving: set[Peer] = set()  # let go of, and with calls that still run
        self._lock = threading.Lock()
        self.sweep_at = 0.0
        self.version = 0
        self.closed = False
        self.idle = idle
        self.on_open: Callable[[Peer], None] | None = None
        self.reports = reports
        self.streams: WeakSet[Any] = WeakSet()
        """What runs in asyncio and is to be ended at the close, as grpcio may forget it."""

    def hold(self, endpoint: Endpoint, token: object, now: float) -> Peer:
        """The channel to an endpoint, kept open until `release(peer, token)`. Raises ConfigError on bad TLS files,
        ClosedUnder after `close`."""
        while True:
            peer = self._by_id.get(endpoint.id)
            if peer is None or peer.endpoint is not endpoint:
                peer = self._open_peer(endpoint)
            peer.live.add(token)
            # Adding before looking, where `dismiss` marks before looking: one of the two sees the other.
            if not peer.gone:
                peer.used_at = now
                return peer
            self.release(peer, token)

    def release(self, peer: Peer, token: object) -> None:
        """The call that held this peer has ended. Idempotent."""
        peer.live.discard(token)
        if peer.gone and not peer.live:
            self._leaving.discard(peer)
            self._close(peer.channel)

    def sweep(self, wanted: Container[str], now: float, version: int = 0) -> None:
        """Let go of the channels whose endpoint left, or that have been idle for long.

        Due when the fleet's version is another than `version`, and at `sweep_at`.
        """
        self.version = version
        self.sweep_at = now + SWEEP_EVERY
        for peer in self:
            if peer.endpoint.id not in wanted or (not peer.live and now - peer.used_at > self.idle):
                self.dismiss(peer)

    def dismiss(self, peer: Peer) -> None:
        """Let go of a channel: the next call opens a new one, those that run end on this one."""
        with self._lock:
            if self._by_id.get(peer.endpoint.id) is peer:
                del self._by_id[peer.endpoint.id]
        self._end(peer)

    def close(self) -> list[Peer]:
        """Forget all peers and hand them to the caller, who ends them."""
        with self._lock:
            self.closed = True
            peers = [*self._by_id.values(), *tuple(self._leaving)]
            self._by_id.clear()
        for peer in peers:
            peer.gone = True
        return peers

    def abandon(self) -> None:
        """Start afresh in a forked child."""
        _ABANDONED.append((self._by_id, self._leaving))
        self._by_id, self._leaving = {}, set()
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Peer]:
        return iter(tuple(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def _open_peer(self, endpoint: Endpoint) -> Peer:
        with self._lock:
            if self.closed:
                raise ClosedUnder
            old = self._by_id.get(endpoint.id)
            if old is not None and _same_server(old.endpoint, endpoint):
                old.adopt(endpoint)
                return old
            peer = self._by_id[endpoint.id] = Peer(endpoint, self._open(endpoint))
        if old is not None:
            self._end(old)
        if self.on_open is not None:
            self.on_open(peer)
        if self.reports is not None:
            self.reports.follow(endpoint)
        return peer

    def _end(self, peer: Peer) -> None:
        self._leaving.add(peer)
        peer.gone = True
        if not peer.live:
            self._leaving.discard(peer)
            self._close(peer.channel)


def _same_server(one: Endpoint, other: Endpoint) -> bool:
    return (one.url, one.tls, one.authority) == (other.url, other.tls, other.authority)


class Address(NamedTuple):
    """Where an endpoint's URL points: a grpc target, the host to verify, and whether TLS is spoken."""

    target: str
    host: str
    secure: bool


def read_address(endpoint: Endpoint) -> Address:
    """The grpc target of an endpoint. Raises ConfigError on a URL that gRPC cannot use."""
    if endpoint.url.startswith("unix:"):
        return Address(endpoint.url, "localhost", secure=False)
    try:
        parts = urlsplit(endpoint.url if "://" in endpoint.url else f"//{endpoint.url}")
        host, port = parts.hostname, parts.port
    except ValueError:  # a port that is none, half of an IPv6 address
        host = None
    secure = host is not None and parts.scheme in SECURE
    if not host or not (secure or parts.scheme in PLAIN) or parts.path not in {"", "/"}:
        raise ConfigError(
            f"endpoint {endpoint.id!r}: expected grpc://HOST:PORT, grpcs://HOST:PORT, http(s)://HOST:PORT or unix:PATH"
        )
    port = port or (443 if secure else 80)
    if ":" in host:
        return Address(f"ipv6:[{host}]:{port}", host, secure)
    numeric = host.replace(".", "").isdigit()
    return Address(f"ipv4:{host}:{port}" if numeric else f"dns:///{host}:{port}", host, secure)


def channel_options(user: Options, *, connect_timeout: float, idle: float, trust_env: bool) -> dict[str, Any]:
    """The options of every endpoint's channel; what the user set wins."""
    ours = {
        "grpc.enable_retries": 0,
        "grpc.use_local_subchannel_pool": 1,
        "grpc.enable_http_proxy": int(trust_env),
        "grpc.service_config_disable_resolution": 1,
        "grpc.keepalive_time_ms": 10_000,
        "grpc.http2.ping_timeout_ms": 2_500,
        "grpc.initial_reconnect_backoff_ms": 100,
        "grpc.min_reconnect_backoff_ms": max(100, round(connect_timeout * 1000)),  # the limit of one connect
        "grpc.max_reconnect_backoff_ms": 2_000,
        "grpc.client_idle_timeout_ms": max(1_000, round(idle * 1000)),
    }
    # With this one streams tell nobody of their end but their reader, who may not come again.
    return {
        name: value for name, value in (ours | dict(user)).items() if name != ChannelOptions.SingleThreadedUnaryStream
    }


class Dialer:
    """Opens the channel to an endpoint: target, TLS, authority and options. Reads PEM files when it opens."""

    __slots__ = ("_compression", "_credentials", "_extra", "_insecure", "_options", "_secure")

    def __init__(
        self,
        insecure: Callable[..., Any],
        secure: Callable[..., Any],
        options: dict[str, Any],
        credentials: grpc.ChannelCredentials | None,
        compression: grpc.Compression | None,
        **extra: Any,
    ) -> None:
        self._insecure = insecure
        self._secure = secure
        self._options = options
        self._credentials = credentials
        self._compression = compression
        self._extra = extra

    def __call__(self, endpoint: Endpoint) -> Any:
        address = read_address(endpoint)
        options, extra = dict(self._options), self._extra
        name = endpoint.tls.server_name or endpoint.authority
        if endpoint.authority:
            options.setdefault("grpc.default_authority", endpoint.authority)
        if not address.secure and self._credentials is None:
            return _open(self._insecure, address.target, tuple(options.items()), self._compression, **extra)
        # An IP target has no name to verify; the URL's host stands in, as a browser would have it.
        options.setdefault("grpc.ssl_target_name_override", name or address.host)
        credentials = self._credentials or _ssl_credentials(endpoint)
        return _open(self._secure, address.target, credentials, tuple(options.items()), self._compression, **extra)


def _open(make: Callable[..., Any], *what: Any, **extra: Any) -> Any:
    channel = make(*what, **extra)
    if type(channel).__module__.startswith("opentelemetry."):
        # Its instrumentation of `grpc` makes bare generators of streams: nobody could cancel them or ask their status.
        channel.close()
        channel = unwrap(make)(*what, **extra)
    return channel


def _ssl_credentials(endpoint: Endpoint) -> grpc.ChannelCredentials:
    tls = endpoint.tls
    if tls.key and not tls.cert:  # of one without the other grpcio dies, and the process with it
        raise ConfigError(f"endpoint {endpoint.id!r}: its TLS record has a key and no cert")
    paths = tls.ca, tls.key or tls.cert, tls.cert  # a cert alone holds its key, as for HTTP
    try:
        ca, key, cert = (Path(path).read_bytes() if path else None for path in paths)
    except OSError as error:
        raise ConfigError(f"endpoint {endpoint.id!r}: TLS file cannot be read: {error.strerror}") from None
    for name, pem in (("ca", ca), ("key", key), ("cert", cert)):
        if pem is not None and b"-----BEGIN " not in pem:
            raise ConfigError(f"endpoint {endpoint.id!r}: its TLS {name} is no PEM file")
    return grpc.ssl_channel_credentials(ca, key, cert)
