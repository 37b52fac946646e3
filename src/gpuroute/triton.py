"""Triton's own clients over a pool: `gpuroute.triton.attach(client, router, "resnet")`.

    client = tritonclient.grpc.InferenceServerClient("any:8001")
    gpuroute.triton.attach(client, router, "resnet")
    client.infer("resnet", inputs)                     # routed call by call

Also `tritonclient.grpc.aio`, `tritonclient.http` and `tritonclient.http.aio`. `infer` and `async_infer` are routed call
by call; `start_stream` (gRPC) opens one stream to one endpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from gpuroute.router import Router

__all__ = ["attach", "detach"]

C = TypeVar("C")


def attach(client: C, router: Router, pool: str, **arguments: Any) -> C:
    """Route every call of `client` over `pool` from now on, and return it. Idempotent.

    `arguments` are those of `gpuroute.grpc.channel`, for gRPC clients. Not while the client has calls under way. Closing
    the client closes what was opened for it, never the router. Raises ConfigError for a client that is not known.
    """
    return _module(client).attach(client, router, pool, **arguments)  # type: ignore[no-any-return]


def detach(client: C) -> C:
    """Undo `attach`. Harmless on a client that is not attached."""
    return _module(client).detach(client)  # type: ignore[no-any-return]


def _module(client: object) -> Any:
    """The one that knows this client: each needs a library that users of the other may not have."""
    from gpuroute.transports import triton_http

    if triton_http.is_client(client):
        return triton_http
    from gpuroute.grpc import attach

    return attach
