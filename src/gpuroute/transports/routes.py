"""From a request of the client library to a call of the router: which pool, which key, and may it leave at all.

The URL's host names the pool; `gpuroute` stands for the pool that serves the body's `model`. What both drivers need and
neither waits for is here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import unquote

from gpuroute.core.endpoint import HTTP
from gpuroute.core.outcome import Outcome
from gpuroute.core.prefix import ladder
from gpuroute.engines.prompts import read_prompt
from gpuroute.errors import DeadlineExceeded, NoEndpointAvailable, RegistryUnavailable, UnknownPool
from gpuroute.observe import observer, watch
from gpuroute.router import check_router
from gpuroute.transports.asking import asker_of
from gpuroute.transports.bodies import PREFIX, Outgoing, model_of
from gpuroute.transports.continuation import seam_of
from gpuroute.transports.outside import Outside
from gpuroute.transports.pools import Limits, Pools, UnusableFiles, Way
from gpuroute.transports.trips import LEAVE, STAY, Settled, Trip

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from collections.abc import Callable, Iterable

    from gpuroute.core.attempt import Attempt
    from gpuroute.core.call import Call
    from gpuroute.core.pool import Pool
    from gpuroute.core.prefix import Prompt
    from gpuroute.core.state import EndpointState
    from gpuroute.observe import Observer
    from gpuroute.router import Router
    from gpuroute.transports.asking import Asking
    from gpuroute.transports.continuation import Seam
    from gpuroute.transports.library import Library
    from gpuroute.transports.reach import SocketOption
    from gpuroute.transports.trips import Head

ANY_POOL = "gpuroute"
_NO_HOST = (
    "the URL has no host, so it names no pool: use http://POOL/path, or a client with a base_url; known pools: {known}"
)
LARGE_BODY = 128 * 1024
"""Bodies above this are read for their prompt off the event loop: json takes 2.5 ms for a MiB."""

_CREDENTIALS = frozenset((b"authorization", b"cookie", b"proxy-authorization", b"x-api-key", b"api-key"))


class Route:
    """One call of the caller: what it asked, where it goes, and how far it is told to the observer."""

    __slots__ = ("asked", "call", "continues", "ended", "inside", "name", "observer", "out", "pin", "pool", "prompt",
                 "seam")  # fmt: skip

    call: Call
    pool: Pool

    def __init__(self, out: Outgoing, name: str, pin: str) -> None:
        self.out = out
        self.name = name
        self.pin = pin
        self.prompt: Prompt | None = None
        self.observer: Observer = observer()
        self.ended = False
        self.inside = False  # the rollout, as was found before the first view of the fleet
        self.asked: Asking | None = None
        self.continues = False
        self.seam: Seam | None = None

    def began(self, trip: Trip, head: Head) -> None:
        """The first bytes are about to be handed out: keep what a continuation would need, if the call wants one."""
        if self.continues and self.seam is None and trip.watch is not None and trip.watch.is_events:
            self.seam = seam_of(self.out, head, trip.link.endpoint.engine)

    def read(self) -> Prompt | None:
        """The prompt in the body; reads it the first time."""
        if self.prompt is None:
            self.prompt = read_prompt(self.out.path.decode("ascii", "replace"), self.out.content)
        return self.prompt

    def conclude(self, now: float) -> None:
        """Tell the observer that the call ended. Idempotent."""
        if not self.ended:
            self.ended = True
            self.observer.call_ended(self.call, now)


class Routes:
    """What a transport of either kind is made of. Arguments: see `gpuroute.httpx2.Transport`."""

    library: ClassVar[Library]
    by_proxies = False  # hosts outside are reached by the proxies of the environment, if there are any
    _try: Any  # of the drivers: send one attempt

    def __init__(
        self,
        router: Router,
        *,
        pool: str | None = None,
        passthrough: bool | None = None,
        cookies: bool | None = None,
        verify: Any = True,
        cert: Any = None,
        trust_env: bool = True,
        limits: Any = None,
        local_address: str | None = None,
        socket_options: Iterable[SocketOption] | None = None,
        plain: Any = None,
    ) -> None:
        check_router(router)
        settings = router.settings
        self.router = router
        self.pool_name = pool
        self._passthrough = settings.passthrough if passthrough is None else passthrough
        self._settled = Settled(
            self.library,
            router.clock,
            settings.connect_timeout,
            cookies=settings.cookies if cookies is None else cookies,
            deadline_header=settings.deadline_header,
        )
        self._way = Way(
            self.library,
            verify=verify,
            cert=cert,
            trust_env=trust_env,
            local_address=local_address,
            socket_options=socket_options or (),
        )
        self._limits = _limits(limits)
        self._given_plain = plain
        self.replaced: tuple[Any, Any] | None = None  # by `gpuroute.wrap`: the client's own transport and mounts
        self._salt = settings.salt.reveal() if settings.salt else None
        self._disabled = settings.disabled
        self._checks = settings.health_checks and not settings.disabled
        self._asker = asker_of(router)
        router.on_fork(self._after_fork)
        watch(router)

    # ------------------------------------------------------------------------------------------ where to

    def _begin(self, request: Any) -> Route | None:
        """What the caller asked; None if the request leaves the router (a redirect to a foreign host)."""
        url = request.url
        mark = url.fragment
        if mark == LEAVE:
            return None
        pin = unquote(mark[len(STAY) :]) if mark.startswith(STAY) else ""
        return Route(Outgoing(request, self.library), self.pool_name or url.host, pin)

    def _left_out(self, route: Route) -> bool:
        """Before the first view of the fleet: begin a call that is outside the rollout, so that it needs none."""
        if self.router.settings.rollout >= 1 or (self._passthrough and not self._is_pool(route.name)):
            return False
        url = self.router.early_fallback(route.out.options.key)
        if url is None:
            route.inside = True
            return False
        route.call = self._unrouted(url, route)
        return True

    def _find_pool(self, route: Route) -> bool:
        """Find the pool, once a view of the fleet is here. False: the host is no pool, and may be called directly.

        Raises UnknownPool.
        """
        if self._disabled:
            return not self._passthrough or self._is_pool(route.name)
        if route.name == ANY_POOL:
            route.name = self.router.resolve(self._model(route))
        try:
            route.pool = self.router.pool(route.name, HTTP)
        except UnknownPool:
            if self._passthrough:
                return False
            if not route.name:
                raise UnknownPool(_NO_HOST.format(known=self._known())) from None
            raise
        return True

    def _known(self) -> str:
        return ", ".join(sorted({pool.name for pool in self.router.pools()})) or "none"

    def _is_pool(self, name: str) -> bool:
        """Whether a host is meant as a pool, for a kill switch that must not carry foreign calls to the fallback."""
        try:
            self.router.pool(name)
        except UnknownPool:
            return name == ANY_POOL
        except RegistryUnavailable:
            return "." not in name  # nobody can tell now; hosts of the outside world have a dot
        return True

    def _model(self, route: Route) -> str:
        model = route.prompt.model if route.prompt is not None else model_of(route.out.body)
        if not model:
            raise UnknownPool(
                f"host {ANY_POOL!r}: the body names no model to find a pool by; known pools: {self._known()}"
            )
        return model

    def _needs_prompt(self, route: Route) -> bool:
        """True if the body decides where the call goes."""
        if self._disabled or route.prompt is not None or route.out.content is None or route.out.options.key:
            return False
        picker = route.pool.snapshot.picker
        return picker.wants_ladder or picker.ring is not None

    def _open(self, route: Route) -> None:
        """Begin the call."""
        if self._checks:
            from gpuroute.transports.health import CHECKER

            CHECKER.watch(self.router, route.pool, self._way)
        options, prompt = route.out.options, route.prompt
        key = options.key or (prompt.key if prompt is not None else None)
        url = self.router.fallback(route.name, key, inside=route.inside)
        if url is not None:
            route.call = self._unrouted(url, route)
            return
        steps: tuple[int, ...] = ()
        if prompt is not None and not key and route.pool.wants_ladder:
            steps = ladder(prompt, route.pool.spec.config.salt if self._salt is None else self._salt)
        route.call = self.router.call(
            route.name,
            key=key,
            ladder=steps,
            tokens=prompt.tokens if prompt is not None else 0,
            timeout=options.timeout,
            attempts=1 if route.pin else options.attempts,
            replayable=route.out.body.replayable,
            protocol=HTTP,
        )
        rules = route.call.hedging
        hedge, reroute = options.hedge, options.reroute
        if hedge is not None or reroute is not None:
            route.call.hedging = replace(
                rules,
                hedge=rules.hedge if hedge is None else hedge,
                reroute=rules.reroute if reroute is None else reroute,
            )
        wanted = route.pool.rules.continuation if options.continuation is None else options.continuation
        route.continues = wanted and not route.pin and not route.out.whole

    def _unrouted(self, url: str, route: Route) -> Call:
        return self.router.unrouted(url, route.out.options.timeout)

    def _asks(self, route: Route) -> bool:
        return self._asker is not None and not route.pin and self._asker.covers(route.call.pool)

    def _depart(self, route: Route, pools: Pools) -> Trip:
        """Start the next attempt. Raises NoEndpointAvailable, DeadlineExceeded, ConfigError."""
        while True:
            now = self.router.clock()
            attempt = self._pinned(route, now) if route.pin else route.call.next_attempt(now)
            try:
                link = pools.link(attempt.state, route.call.pool, self.router.version)
            except UnusableFiles:
                if not self._useless(route, attempt):
                    raise
                continue
            if route.asked is not None:
                route.asked.take(attempt)
            return Trip(self._settled, route, attempt, link, pools)

    def _useless(self, route: Route, attempt: Attempt) -> bool:
        """End an attempt that cannot even connect from here; True if another one is due."""
        attempt.misfit = True
        again = route.call.finish(attempt, Outcome.FAILED, self.router.clock(), reason="unusable TLS files")
        route.observer.attempt_ended(None, route.call, attempt)
        return again

    def _hedge(self, first: Trip) -> Trip | None:
        """A second attempt beside the first, if that is allowed."""
        route = first.route
        attempt = route.call.hedge(self.router.clock())
        if attempt is None:
            return None
        try:
            link = first.pools.link(attempt.state, route.call.pool, self.router.version)
        except UnusableFiles:
            self._useless(route, attempt)
            return None
        if route.asked is not None:
            route.asked.take(attempt)
        return Trip(self._settled, route, attempt, link, first.pools)

    def _pinned(self, route: Route, now: float) -> Attempt:
        call = route.call
        state = call.pool.snapshot.by_id.get(route.pin)
        attempt = state.acquire(now, call.history, call.ask.tokens) if state is not None else None
        if state is None or attempt is None:
            raise NoEndpointAvailable(
                f"pool {call.pool.name!r}: endpoint {route.pin!r} redirected to itself and takes no call now"
            )
        return attempt

    def is_warm(self, state: EndpointState) -> bool:
        """True if a connection to this endpoint is idle here (on this event loop): a request needs no handshake."""
        return self._pools().warm(state)

    def _pools(self) -> Pools:
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------ outside

    def _leaving(self, request: Any) -> Any:
        """A copy of a redirected request that carries no credential to the foreign host."""
        return self._copied(request, lambda name: name not in _CREDENTIALS and not name.startswith(PREFIX))

    def _passing(self, request: Any) -> Any:
        """The request as it goes to a host that is no pool: what it asked of the router is not for others."""
        if not any(name.lower().startswith(PREFIX) for name, _ in request.headers.raw):
            return request
        return self._copied(request, lambda name: not name.startswith(PREFIX))

    def _copied(self, request: Any, keeps: Callable[[bytes], bool]) -> Any:
        return self.library.client.Request(
            request.method,
            request.url.copy_with(fragment=None),
            headers=[header for header in request.headers.raw if keeps(header[0].lower())],
            stream=request.stream,
            extensions=request.extensions,
        )

    def _left(self, response: Any) -> Any:
        """The answer of a foreign host: what it redirects to is outside too, whatever fragment it has."""
        url, mark, _ = response.headers.get("location", "").partition("#")
        if mark:
            response.headers["location"] = f"{url}#{LEAVE}"
        return response

    def _outside(self, pools: Pools, transport: Any, client: Any) -> Any:
        """The transport for hosts that are no pools, of these kinds."""
        if self._given_plain is not None:
            return self._given_plain
        if pools.plain is None:
            context = self._way.shared()
            pools.plain = Outside.of(client(verify=context)) if self.by_proxies else transport(verify=context)
        return pools.plain

    def _make_pools(self, loop: AbstractEventLoop | None) -> Pools:
        return Pools(self.library, self._way, self._limits, loop=loop)

    # ------------------------------------------------------------------------------------------ the end

    def _whole(self, content: bytes | None) -> Any:
        return self.library.client.ByteStream(content or b"")

    def _abort(self, route: Route) -> None:
        now = self.router.clock()
        route.call.close(now)
        route.conclude(now)

    def _stuck(self, route: Route, error: NoEndpointAvailable | DeadlineExceeded, last: Any) -> Any:
        """What ends a call that cannot make its next attempt: the last failure if there is one, else the reason."""
        route.conclude(self.router.clock())
        own = self.library.translated(error)
        if last is None or isinstance(error, DeadlineExceeded):
            own.__cause__ = last if isinstance(last, Exception) else error
            return own
        if isinstance(last, Exception):
            last.add_note(f"gpuroute: no further attempt: {error}")
        return last

    def _handed(self, last: Any) -> Any:
        if isinstance(last, Exception):
            raise last
        return last

    def _after_fork(self) -> None:
        """Connections and locks of the parent are not the child's."""
        self._way.after_fork()


def _limits(limits: Any) -> Limits:
    """The bounds that the client library's own `Limits` ask for, per endpoint instead of over all."""
    if limits is None:
        return Limits()
    most = 2**31 if limits.max_connections is None else limits.max_connections
    idle = most if limits.max_keepalive_connections is None else limits.max_keepalive_connections
    return Limits(most, idle, max(idle, Limits().idle_total), limits.keepalive_expiry)
