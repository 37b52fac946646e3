"""Fixtures of the HTTP tests: endpoints, and a caller of each kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import httpx2
import pytest
from http_caller import KINDS, Caller, in_flight, router_for
from http_stub import Stage

from gpuroute.transports.pools import Limits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(autouse=True)
def long_breath(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause of the machine is no silence of a server: what is 5 s by default, for both libraries, is a minute here."""
    for library in (httpx, httpx2):
        kept = library.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=60.0)
        for client in (library.Client, library.AsyncClient):
            monkeypatch.setitem(client.__init__.__kwdefaults__, "timeout", library.Timeout(60.0))
            monkeypatch.setitem(client.__init__.__kwdefaults__, "limits", kept)
    *bounds, _ = Limits.__init__.__defaults__ or ()
    monkeypatch.setattr(Limits.__init__, "__defaults__", (*bounds, 60.0))


@pytest.fixture
def stubs() -> Iterator[Stage]:
    """Start endpoints by name: `a, b = stubs("a", "b")`."""
    stage = Stage()
    yield stage
    stage.close()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def caller(kind: str, eventually: Callable[..., None]) -> Iterator[Callable[..., Caller]]:
    """Make a caller over endpoints or a router; afterwards nothing may be in flight."""
    made: list[Caller] = []

    def make(over: Any, *, settings: dict[str, Any] | None = None, **arguments: Any) -> Caller:
        router = router_for(over, **(settings or {})) if isinstance(over, list) else over
        made.append(Caller(kind, router, **arguments))
        return made[-1]

    yield make
    for one in made:
        eventually(lambda one=one: in_flight(one.router) == 0, f"nothing is in flight: {one.router.snapshot()}")
        one.close()
