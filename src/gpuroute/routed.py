"""One attempt for a client library that has no transport of ours: count it, time it, teach from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from gpuroute.core.outcome import Outcome
from gpuroute.errors import GpurouteError, NoEndpointAvailable

if TYPE_CHECKING:
    from types import TracebackType

    from gpuroute.core.attempt import Attempt
    from gpuroute.core.call import Call
    from gpuroute.core.endpoint import Endpoint
    from gpuroute.router import Router

__all__ = ["RoutedAttempt"]


class RoutedAttempt:
    """One attempt as a context manager, sync or async: `with router.attempt("llama") as attempt: get(attempt.url)`.

    Leaving the block ends it: SUCCESS, or by the exception. Say more with `first_token`, `overloaded`, `failed`.
    """

    __slots__ = ("_arguments", "_attempt", "_call", "_failures", "_router")

    def __init__(
        self,
        router: Router,
        pool: str,
        key: str | None,
        tokens: int,
        failures: tuple[type[BaseException], ...],
        protocol: str | None = None,
    ) -> None:
        self._router = router
        self._arguments = (pool, key, tokens, protocol)
        self._failures = failures
        self._call: Call | None = None
        self._attempt: Attempt | None = None

    @property
    def endpoint(self) -> Endpoint:
        """Where to send it. Only inside the block."""
        return self._live()[1].endpoint

    @property
    def url(self) -> str:
        """The endpoint's URL."""
        return self.endpoint.url

    def first_token(self) -> None:
        """The first byte of the answer is here."""
        self._live()[1].first_token(self._router.clock())

    def overloaded(self, retry_after: float | None = None) -> None:
        """The endpoint said that it is busy; `retry_after` seconds if it said for how long."""
        self._end(Outcome.OVERLOADED, retry_after=retry_after, reason="overloaded")

    def failed(self, reason: str = "failed") -> None:
        """The endpoint failed though no exception will say so."""
        self._end(Outcome.FAILED, reason=reason)

    def __enter__(self) -> Self:
        if not self._router.settings.disabled:
            self._router.ready()
        return self._begin()

    async def __aenter__(self) -> Self:
        if not self._router.settings.disabled:
            await self._router.aready()
        return self._begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._end(Outcome.SUCCESS)
        elif issubclass(kind, GpurouteError):  # of a call within the block, to another endpoint
            self._end(Outcome.CANCELLED, reason=kind.__name__)
        elif issubclass(kind, TimeoutError):
            self._end(Outcome.TIMED_OUT, reason=kind.__name__)
        elif issubclass(kind, self._failures):
            self._end(Outcome.FAILED, reason=kind.__name__)
        else:
            self._end(Outcome.CANCELLED, reason=kind.__name__)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def _begin(self) -> Self:
        if self._attempt is not None and self._attempt.outcome is None:
            raise RuntimeError("this attempt is under way: call router.attempt(...) for each")
        pool, key, tokens, protocol = self._arguments
        url = self._router.fallback(pool, key)  # the kill switch, or outside the rollout
        if url is None:
            call = self._router.call(pool, key=key, tokens=tokens, attempts=1, protocol=protocol)
        else:
            call = self._router.unrouted(url)
        now = self._router.clock()
        if (pause := call.delay(now)) > 0:
            raise NoEndpointAvailable(
                f"pool {pool!r}: every endpoint asked for a pause; the earliest returns in {pause:.2f} s",
                retry_after=pause,
            )
        self._call, self._attempt = call, None
        try:
            self._attempt = call.next_attempt(now)
        except BaseException:  # an interrupt: `with` calls no __exit__ for what was not entered
            call.close(now)
            raise
        return self

    def _live(self) -> tuple[Call, Attempt]:
        if self._call is None or self._attempt is None:
            raise RuntimeError("router.attempt(...) is a context manager: use it by `with` or `async with`")
        return self._call, self._attempt

    def _end(self, outcome: Outcome, *, retry_after: float | None = None, reason: str = "") -> None:
        call, attempt = self._live()
        attempt.sent(self._router.clock())  # as far as can be known: what failed was not the way there
        call.finish(attempt, outcome, self._router.clock(), retry_after=retry_after, reason=reason)
