"""`tritonclient.http` and `tritonclient.http.aio` over a pool: every request goes to the endpoint picked for it.

Both clients bring their own I/O (gevent, aiohttp) and send through one private object. Only that object is replaced, so
tensors, plugins and errors stay theirs, and nothing is monkey patched: the gevent one gets a small `HTTPClient` per
endpoint, which yields to other greenlets as the original does; the asyncio one keeps its session and is given another
address. Answers are read whole before they count as success, so one that breaks off may still be had elsewhere.

The private names of tritonclient's HTTP clients are used here and nowhere else; what is not recognised is refused.
"""

from __future__ import annotations

import asyncio
import io
import socket
import ssl
import time
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from gpuroute.core.endpoint import HTTP
from gpuroute.core.outcome import Outcome
from gpuroute.core.prefix import ladder
from gpuroute.core.retry_after import parse_retry_after
from gpuroute.engines.answers import judge
from gpuroute.engines.prompts import read_prompt
from gpuroute.errors import ConfigError, DeadlineExceeded
from gpuroute.forms import stamps
from gpuroute.observe import observer, watch
from gpuroute.transports.bodies import read_options
from gpuroute.transports.piggyback import ANSWER, REQUEST, learn_header, wanted
from gpuroute.transports.pools import tls_name
from gpuroute.transports.reach import Address

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gpuroute.core.attempt import Attempt
    from gpuroute.core.call import Call
    from gpuroute.core.endpoint import Endpoint, Tls
    from gpuroute.router import Router

__all__ = ["attach", "detach", "is_client"]

C = TypeVar("C")
OURS = "x-gpuroute-"
NEVER_SENT = (ConnectionRefusedError, socket.gaierror)

_replaced: WeakKeyDictionary[Any, tuple[str, Any]] = WeakKeyDictionary()


def is_client(client: object) -> bool:
    """True for an InferenceServerClient of `tritonclient.http` or of its asyncio twin."""
    return any(base.__module__.startswith("tritonclient.http") for base in type(client).__mro__)


def attach(client: C, router: Router, pool: str, **arguments: Any) -> C:
    """Route every request of `client` over `pool` from now on, and return it. Idempotent.

    Not while the client has requests under way. Closing the client closes what was opened for it, never the router.
    Raises ConfigError for a client that is not known.
    """
    if arguments:
        raise ConfigError(f"a tritonclient.http client takes no {', '.join(sorted(arguments))}")
    name = next((name for name in ("_client_stub", "_stub") if hasattr(client, name)), None)
    if not is_client(client) or name is None:
        raise ConfigError(f"cannot route a {type(client).__module__}.{type(client).__qualname__}")
    _, original = _replaced.setdefault(client, (name, getattr(client, name)))
    watch(router)
    setattr(client, name, (RoutedStub if name == "_client_stub" else RoutedSession)(router, pool, original))
    return client


def detach(client: C) -> C:
    """Undo `attach`. Harmless on a client that is not attached."""
    name, original = _replaced.pop(client, ("", None))
    if name:
        getattr(client, name).leave()
        setattr(client, name, original)
    return client


class Trip:
    """One request over its attempts; no I/O here. `headers` are those of the present attempt."""

    def __init__(self, router: Router, pool: str, path: str, headers: Mapping[str, Any] | None, body: Any) -> None:
        self.router = router
        self._given = {name: value for name, value in (headers or {}).items() if not name.lower().startswith(OURS)}
        asked = {
            name.lower().removeprefix(OURS): str(value)
            for name, value in (headers or {}).items()
            if name.lower().startswith(OURS)
        }
        url = router.fallback(pool, asked.get("key"))
        self.call = _begin(router, pool, path, asked, body) if url is None else _leave(router, url, asked)
        if router.settings.health_checks and url is None:
            from gpuroute.transports.health import CHECKER

            CHECKER.watch(router, self.call.pool, WAY)
        self.attempt: Attempt | None = None
        self.headers: dict[str, Any] = {}
        self._observer = observer()
        self._token: object = None

    def wait(self) -> float:
        """Seconds to wait before the next attempt; 0.0: it has begun. Raises NoEndpointAvailable, DeadlineExceeded."""
        now = self.router.clock()
        wait = self.call.delay(now)
        if wait > 0:
            return wait
        self.attempt = attempt = self.call.next_attempt(now)
        attempt.whole = True
        traced: dict[str, str] = {} if attempt.number == 1 else {f"{OURS}attempt": str(attempt.number)}
        self._token = self._observer.attempt_started(self.call, attempt, traced)
        if format_ := wanted(attempt.endpoint):
            traced[REQUEST] = format_
        host = attempt.endpoint.authority or urlsplit(attempt.endpoint.url).netloc.rpartition("@")[2]
        ours = {"host": host} | {name.lower(): value for name, value in attempt.endpoint.headers.items()} | traced
        self.headers = {name: value for name, value in self._given.items() if name.lower() not in ours} | ours
        return 0.0

    @property
    def endpoint(self) -> Endpoint:
        """Where the present attempt goes."""
        assert self.attempt is not None
        return self.attempt.endpoint

    @property
    def left(self) -> float | None:
        """Seconds until the deadline, None without one."""
        left = self.call.time_left(self.router.clock())
        return None if left == float("inf") else max(left, 0.001)

    def answered(self, status: int, headers: Any, body: bytes) -> bool:
        """The attempt was answered; True if another one is due."""
        attempt, now = self.attempt, self.router.clock()
        assert attempt is not None
        if load := headers.get(ANSWER.decode()):
            learn_header(attempt.state, load.encode("latin-1", "replace"), self.call.pool.mean_tokens, now)
        pause = parse_retry_after(headers.get("retry-after"), time.time())
        found = judge(attempt.endpoint.engine, status, body, retry_after=pause)
        attempt.first_token(now) if found.outcome is Outcome.SUCCESS else attempt.sent(now)
        reason = f"{status} {found.reason}".rstrip() if found.meaning else ""
        return self._end(found.outcome, reason, retry_after=found.retry_after, answered=True)

    def failed(self, error: BaseException, *, never_sent: bool) -> bool:
        """The attempt broke; True if another one is due."""
        assert self.attempt is not None
        if not never_sent:
            self.attempt.sent(self.router.clock())
        outcome = Outcome.TIMED_OUT if isinstance(error, TimeoutError) else Outcome.FAILED
        again = self._end(outcome, type(error).__name__)
        if not again and len(self.call.history) > 1:
            error.add_note(f"gpuroute: {self.call.story()}")
        return again

    def unusable(self, error: OSError) -> bool:
        """The TLS files that the endpoint's record names are not here or no good; True if another attempt is due."""
        assert self.attempt is not None
        self.attempt.misfit = True
        return self.failed(error, never_sent=True)

    def late(self) -> DeadlineExceeded:
        """The budget of the call ran out during the attempt."""
        self._end(Outcome.TIMED_OUT, "deadline")
        return DeadlineExceeded(f"deadline exceeded ({self.call.story()})")

    def close(self) -> None:
        """Let go of an attempt that is still live, because its caller gave up."""
        self._end(Outcome.CANCELLED, "")
        now = self.router.clock()
        self.call.close(now)
        self._observer.call_ended(self.call, now)

    def _end(self, outcome: Outcome, reason: str, **how: Any) -> bool:
        attempt = self.attempt
        if attempt is None or attempt.outcome is not None:
            return False
        again = self.call.finish(attempt, outcome, self.router.clock(), reason=reason, **how)
        self._observer.attempt_ended(self._token, self.call, attempt)
        return again


def _begin(router: Router, pool: str, path: str, asked: dict[str, str], body: Any) -> Call:
    """The call of a request, with the key or the prompt that is read in it."""
    options = read_options(None, asked)
    found = router.pool(pool, HTTP)
    steps: Sequence[int] = ()
    tokens = 0
    picker = found.snapshot.picker
    if isinstance(body, bytes) and not options.key and (picker.wants_ladder or picker.ring is not None):
        prompt = read_prompt(path, body)
        if prompt is not None:
            salt = router.settings.salt
            steps, tokens = ladder(prompt, salt.reveal() if salt else found.spec.config.salt), prompt.tokens
    return router.call(
        pool,
        key=options.key,
        ladder=steps,
        tokens=tokens,
        timeout=options.timeout,
        attempts=options.attempts,
        protocol=HTTP,
    )


def _leave(router: Router, url: str, asked: dict[str, str]) -> Call:
    """The call of a request that the kill switch or the rollout leaves unrouted."""
    return router.unrouted(url, read_options(None, asked).timeout)


def _joined(endpoint: Endpoint, path: str) -> str:
    return urlsplit(endpoint.url).path.rstrip("/") + "/" + path.lstrip("/")


# ---------------------------------------------------------------------------------------------- gevent


class Answer:
    """What tritonclient wants of a response, read whole."""

    def __init__(self, response: Any, body: bytes) -> None:
        self.status_code: int = response.status_code
        self.get: Callable[..., Any] = response.get
        self._body = io.BytesIO(body)

    def read(self, length: int | None = None) -> bytes:
        """The next bytes of the body, or all that are left."""
        return self._body.read(-1 if length is None else length)


class RoutedStub:
    """In the place of a `geventhttpclient.HTTPClient`. Used by the greenlets of one thread, as that is."""

    def __init__(self, router: Router, pool: str, original: Any) -> None:
        self._router = router
        self._pool = pool
        self._original = original
        self._gevent = import_module("gevent")
        self._library = import_module("geventhttpclient")
        self._clients: dict[str, tuple[Endpoint, Any]] = {}
        self._version = -1

    def get(self, request_uri: str, headers: Mapping[str, Any] | None = None) -> Answer:
        """As that of `HTTPClient`."""
        return self._send("GET", request_uri, b"", headers)

    def post(self, request_uri: str, body: Any = b"", headers: Mapping[str, Any] | None = None) -> Answer:
        """As that of `HTTPClient`."""
        return self._send("POST", request_uri, body, headers)

    def close(self) -> None:
        """Close all connections."""
        self.leave()
        self._original.close()

    def leave(self) -> None:
        """Close the connections to endpoints."""
        clients, self._clients = self._clients, {}
        for _, client in clients.values():
            client.close()

    def _send(self, method: str, path: str, body: Any, headers: Mapping[str, Any] | None) -> Answer:
        if not self._router.settings.disabled:
            self._router.ready()
        trip = Trip(self._router, self._pool, path, headers, body.encode() if isinstance(body, str) else body)
        try:
            while True:
                while wait := trip.wait():
                    self._gevent.sleep(wait)
                answer = self._attempt(trip, method, path, body)
                if answer is not None:
                    return answer
        finally:
            trip.close()

    def _attempt(self, trip: Trip, method: str, path: str, body: Any) -> Answer | None:
        """The answer of one attempt, None if another one is due."""
        late = self._gevent.Timeout(trip.left)
        try:
            client = self._client(trip.endpoint)
        except OSError as error:
            if not trip.unusable(error):
                raise
            return None
        try:
            with late:
                response = client.request(method, _joined(trip.endpoint, path), body, trip.headers)
                content = bytes(response.read())
        except (OSError, self._library.response.HTTPConnectionClosed, self._library.response.HTTPParseError) as error:
            if not trip.failed(error, never_sent=isinstance(error, NEVER_SENT)):
                raise
            return None
        except BaseException as error:
            # Its library gives no place back for a request that is cut while it is sent.
            self._clients.pop(trip.endpoint.id, None)
            if error is late:
                raise trip.late() from None
            raise
        if trip.answered(response.status_code, response, content):
            return None
        return Answer(response, content)

    def _client(self, endpoint: Endpoint) -> Any:
        if self._version != self._router.version and not self._router.settings.disabled:
            self._sweep()
        known = self._clients.get(endpoint.id)
        if known is None or known[0] != endpoint:
            if known is not None:
                known[1].close()
            known = self._clients[endpoint.id] = endpoint, self._open(endpoint)
        return known[1]

    def _sweep(self) -> None:
        self._version = self._router.version
        wanted_ids = {*self._router.pool(self._pool, HTTP).snapshot.by_id, "fallback"}
        for name in [name for name in self._clients if name not in wanted_ids]:
            self._clients.pop(name)[1].close()

    def _open(self, endpoint: Endpoint) -> Any:
        pool = self._original._connection_pool  # noqa: SLF001
        how = {
            "concurrency": pool.size,
            "connection_timeout": self._router.settings.connect_timeout,
            "network_timeout": pool.network_timeout,
        }
        if endpoint.url.startswith("https:"):
            context = _context(endpoint.tls, self._gevent.ssl.SSLContext)
            name = tls_name(endpoint)
            how |= {"ssl_options": {"server_hostname": name} if name else {}, "ssl_context_factory": lambda: context}
        return self._library.HTTPClient.from_url(endpoint.url, **how)


def _context(tls: Tls, kind: type[ssl.SSLContext]) -> ssl.SSLContext:
    """As `ssl.create_default_context`, of gevent's own class."""
    context = kind(ssl.PROTOCOL_TLS_CLIENT)
    if tls.ca:
        context.load_verify_locations(tls.ca)
    else:
        context.load_default_certs()
    if tls.cert:
        context.load_cert_chain(tls.cert, tls.key or None)
    return context


@lru_cache(maxsize=256)
def _kept(tls: Tls, _changed: tuple[int, ...]) -> ssl.SSLContext:
    """Until a file changes: it takes 28 ms to build."""
    return _context(tls, ssl.SSLContext)


class Way:
    """How both clients reach an endpoint, for health checks: by the system's trust, and the files in its record."""

    def address(self, endpoint: Endpoint) -> Address:
        """Where and how to connect. Raises OSError for files that are not here."""
        parts, tls = urlsplit(endpoint.url), endpoint.tls
        secure = parts.scheme == "https"
        context = _kept(tls, stamps(tls.ca, tls.cert, tls.key)) if secure else None
        return Address(parts.hostname or "", parts.port or (443 if secure else 80), context, tls_name(endpoint))


WAY = Way()


# ---------------------------------------------------------------------------------------------- asyncio


class RoutedSession:
    """In the place of the client's `aiohttp.ClientSession`, which it uses."""

    def __init__(self, router: Router, pool: str, original: Any) -> None:
        self._router = router
        self._pool = pool
        self._original = original
        self._aiohttp = import_module("aiohttp")
        self._contexts: dict[str, tuple[Endpoint, ssl.SSLContext]] = {}

    async def get(self, url: str, headers: Mapping[str, Any] | None = None) -> Any:
        """As that of `aiohttp.ClientSession`."""
        return await self._send("GET", url, None, headers)

    async def post(self, url: str, data: Any = None, headers: Mapping[str, Any] | None = None) -> Any:
        """As that of `aiohttp.ClientSession`."""
        return await self._send("POST", url, data, headers)

    async def close(self) -> None:
        """Close the session."""
        await self._original.close()

    def leave(self) -> None:
        """Nothing is open but what the session has."""

    async def _send(self, method: str, url: str, body: Any, headers: Mapping[str, Any] | None) -> Any:
        if not self._router.settings.disabled:
            await self._router.aready()
        parts = urlsplit(url)
        path = f"{parts.path}?{parts.query}" if parts.query else parts.path
        trip = Trip(self._router, self._pool, parts.path, headers, body.encode() if isinstance(body, str) else body)
        try:
            while True:
                while wait := trip.wait():  # noqa: ASYNC110  (a time is waited for, not an event)
                    await asyncio.sleep(wait)
                response = await self._attempt(trip, method, path, body)
                if response is not None:
                    return response
        finally:
            trip.close()

    async def _attempt(self, trip: Trip, method: str, path: str, body: Any) -> Any:
        """The response of one attempt, None if another one is due."""
        endpoint = trip.endpoint
        parts = urlsplit(endpoint.url)
        how: dict[str, Any] = {}
        if parts.scheme == "https":
            try:
                how = {"ssl": self._tls(endpoint), "server_hostname": tls_name(endpoint) or None}
            except OSError as error:
                if not trip.unusable(error):
                    raise
                return None
        url = f"{parts.scheme}://{parts.netloc}{_joined(endpoint, path)}"
        left = trip.left
        try:
            async with asyncio.timeout(left) as limit:
                response = await self._original.request(
                    method, url, data=body, headers=trip.headers, allow_redirects=False, **how
                )
                content = await response.read()
        except TimeoutError as error:
            if limit.expired():
                raise trip.late() from None
            if not trip.failed(error, never_sent=False):
                raise
            return None
        except (OSError, self._aiohttp.ClientError) as error:
            if not trip.failed(error, never_sent=isinstance(error, self._aiohttp.ClientConnectorError)):
                raise
            return None
        return None if trip.answered(response.status, response.headers, content) else response

    def _tls(self, endpoint: Endpoint) -> ssl.SSLContext:
        known = self._contexts.get(endpoint.id)
        if known is None or known[0] != endpoint:
            known = self._contexts[endpoint.id] = endpoint, _context(endpoint.tls, ssl.SSLContext)
        return known[1]
