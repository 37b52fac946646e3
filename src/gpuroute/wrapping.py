"""`wrap`: route a client that exists already, in place, and `unwrap`: leave it as it was.

An `httpx2` or `httpx` client gets a routing transport in the place of its own, with the same TLS context and limits; its
proxies serve only hosts that are no pools, because endpoints are called directly. An `openai` or `anthropic` client is
wrapped through the client inside it, and stops retrying: its retries above ours would triple every failure.

Private attributes of those libraries are read here and in `transports.outside`; what is not recognised is refused.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakKeyDictionary

from gpuroute.errors import ConfigError
from gpuroute.router import Router
from gpuroute.transports.outside import Outside

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["unwrap", "wrap"]

C = TypeVar("C")
ACCEPTED = (
    "httpx2.Client, httpx2.AsyncClient, httpx.Client, httpx.AsyncClient, an openai or anthropic client, "
    "a tritonclient client, or a generated gRPC stub"
)

_sdk_retries: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def wrap(client: C, router: Router | str | None = None, *, pool: str | None = None, passthrough: bool | None = None) -> C:
    """Route every request of `client` from now on, and return it. Idempotent.

    `router`: by default one made from the environment and shared by all that is wrapped without one. `pool`: where all
    requests go (a text in the place of `router` means this too); by default the host of each URL names its pool, and
    hosts that are no pools are refused unless `passthrough`. Not while the client has requests under way.
    Raises ConfigError for a client or a transport that is not known.
    """
    if isinstance(router, str):
        router, pool = None, router
    if (grpc := _grpc_for(client)) is not None:
        if pool is None:
            raise ConfigError("a gRPC or Triton client has no host that could name its pool: give wrap(..., pool=NAME)")
        return cast("C", grpc.attach(client, router or _shared_router(), pool))
    inner = _inner(client)
    _route(inner, router, pool, passthrough)
    if inner is not client and client not in _sdk_retries:
        _sdk_retries[client] = client.max_retries  # type: ignore[attr-defined]
        client.max_retries = 0  # type: ignore[attr-defined]
    return client


def unwrap(client: C) -> C:
    """Undo `wrap`: the client's own transport, proxies and retries are back. Harmless on a client that is not wrapped."""
    if (grpc := _grpc_for(client)) is not None:
        return cast("C", grpc.detach(client))
    inner = _inner(client)
    transport = inner._transport  # noqa: SLF001
    if getattr(transport, "replaced", None) is not None:
        inner._transport, inner._mounts = transport.replaced  # noqa: SLF001
        transport.let_go()
    if client in _sdk_retries:
        client.max_retries = _sdk_retries.pop(client)  # type: ignore[attr-defined]
    return client


def _grpc_for(client: Any) -> Any:
    """`gpuroute.grpc.attach`, if this is a generated gRPC stub or a Triton client; grpc is loaded then already.
    For Triton's HTTP clients, its twin."""
    if any(base.__module__.startswith("tritonclient.http") for base in type(client).__mro__):
        return import_module("gpuroute.transports.triton_http")
    attach = import_module("gpuroute.grpc.attach") if "grpc" in sys.modules else None
    return attach if attach is not None and attach.is_client(client) else None


@cache
def _shared_router() -> Router:
    return Router.from_env()


def _route(inner: Any, router: Router | None, pool: str | None, passthrough: bool | None) -> None:
    library, kind = _family(inner)
    ours = import_module(f"gpuroute.{library.__name__}")
    current = inner._transport  # noqa: SLF001
    if isinstance(current, (ours.Transport, ours.AsyncTransport)):
        if current.replaced is None or (current.pool_name == pool and router in (None, current.router)):
            return
        unwrap(inner)
        current = inner._transport  # noqa: SLF001
    mounts = inner._mounts  # noqa: SLF001
    own = library.HTTPTransport if kind == "Client" else library.AsyncHTTPTransport
    for transport in (current, *filter(None, mounts.values())):
        _check_known(transport, own)
    make = ours.Transport if kind == "Client" else ours.AsyncTransport
    routed = make(
        router or _shared_router(),
        pool=pool,
        passthrough=passthrough,
        plain=Outside(current, mounts),
        **_settings(current, library),
    )
    routed.replaced = (current, mounts)
    inner._transport, inner._mounts = routed, {}  # noqa: SLF001


def _inner(client: Any) -> Any:
    """The httpx2 or httpx client: the thing itself, or the one inside an SDK's client."""
    if _family_of(client) is not None:
        return client
    inner = getattr(client, "_client", None)
    if _family_of(inner) is not None and isinstance(getattr(client, "max_retries", None), int):
        return inner
    raise ConfigError(f"cannot route a {type(client).__module__}.{type(client).__qualname__}; accepted: {ACCEPTED}")


def _family(client: Any) -> tuple[ModuleType, str]:
    found = _family_of(client)
    assert found is not None
    return found


def _family_of(client: Any) -> tuple[ModuleType, str] | None:
    """The library of a client, and which of its two classes it is."""
    for base in type(client).__mro__:
        if base.__module__ in ("httpx", "httpx2") and base.__name__ in ("Client", "AsyncClient"):
            return import_module(base.__module__), base.__name__
    return None


def _check_known(transport: Any, own: type) -> None:
    if type(transport) is not own:
        name = f"{type(transport).__module__}.{type(transport).__qualname__}"
        raise ConfigError(
            f"cannot route a client with the custom transport {name}: what it does would be lost; "
            f"accepted: the library's own {own.__name__}"
        )
    replaced = vars(transport).keys() & {"handle_request", "handle_async_request"}
    if replaced:
        raise ConfigError(
            f"cannot route a client whose transport's {replaced.pop()} was replaced: what that does would be lost; "
            "instrument the client after it was wrapped"
        )


def _settings(transport: Any, library: ModuleType) -> dict[str, Any]:
    """What a transport of the library was made with."""
    pool = transport._pool  # noqa: SLF001
    if getattr(pool, "_proxy", None) is not None or getattr(pool, "_uds", None) is not None:
        raise ConfigError("cannot route a client whose transport is bound to a proxy or a Unix socket")
    limits = library.Limits(
        max_connections=pool._max_connections,  # noqa: SLF001
        max_keepalive_connections=pool._max_keepalive_connections,  # noqa: SLF001
        keepalive_expiry=pool._keepalive_expiry,  # noqa: SLF001
    )
    return {
        "verify": pool._ssl_context,  # noqa: SLF001
        "limits": limits,
        "local_address": pool._local_address,  # noqa: SLF001
        "socket_options": pool._socket_options,  # noqa: SLF001
    }
