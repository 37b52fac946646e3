"""Route a gRPC client that exists already, in place: a generated stub, or Triton's clients (sync and asyncio).

Only the channel changes. A generated stub is its multicallables, so it gets those that the same class makes on a routed
channel; Triton's client is a channel and a stub, both of which are replaced. The private names of tritonclient are
used here and nowhere else; what is not recognised is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import grpc

from gpuroute.errors import ConfigError
from gpuroute.grpc import aio, channel

if TYPE_CHECKING:
    from gpuroute.router import Router

__all__ = ["attach", "detach", "is_client"]

C = TypeVar("C")

_SYNC = (
    grpc.UnaryUnaryMultiCallable,
    grpc.UnaryStreamMultiCallable,
    grpc.StreamUnaryMultiCallable,
    grpc.StreamStreamMultiCallable,
)
_AIO = (
    grpc.aio.UnaryUnaryMultiCallable,
    grpc.aio.UnaryStreamMultiCallable,
    grpc.aio.StreamUnaryMultiCallable,
    grpc.aio.StreamStreamMultiCallable,
)
# Triton's clients lift grpc's limit of 4 MiB, because tensors are larger.
_TRITON = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))

_replaced: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


def is_client(client: object) -> bool:
    """True for a generated stub or a client of `tritonclient.grpc`."""
    return _is_triton(client) or _kind(client) is not None


def attach(client: C, router: Router, pool: str, **arguments: Any) -> C:
    """Route every call of `client` over `pool` from now on, and return it. Idempotent.

    `arguments` are those of `gpuroute.grpc.channel`. Not while the client has calls under way: a stream that Triton's
    client has open stays where it is. Closing the client closes the routed channel, never the router.
    Raises ConfigError for anything but a generated stub or a Triton gRPC client.
    """
    if _is_triton(client):
        parts = _triton_parts(client, router, pool, arguments)
    elif (kind := _kind(client)) is not None:
        make = aio.channel if kind is _AIO else channel
        parts = vars(type(client)(make(router, pool, **arguments)))  # type: ignore[call-arg]
    else:
        name = f"{type(client).__module__}.{type(client).__qualname__}"
        raise ConfigError(f"cannot route a {name}; accepted: a generated gRPC stub, or a client of tritonclient.grpc")
    _replaced.setdefault(client, {name: getattr(client, name) for name in parts})
    for name, part in parts.items():
        setattr(client, name, part)
    return client


def detach(client: C) -> C:
    """Undo `attach`. Harmless on a client that is not attached."""
    for name, part in _replaced.pop(client, {}).items():
        setattr(client, name, part)
    return client


def _is_triton(client: object) -> bool:
    channel_types = (grpc.Channel, grpc.aio.Channel)
    return isinstance(getattr(client, "_channel", None), channel_types) and hasattr(client, "_client_stub")


def _triton_parts(client: Any, router: Router, pool: str, arguments: dict[str, Any]) -> dict[str, Any]:
    make = aio.channel if isinstance(client._channel, grpc.aio.Channel) else channel  # noqa: SLF001
    options = (*_TRITON, *arguments.pop("options", ()))
    routed: Any = make(router, pool, options=options, **arguments)
    return {"_channel": routed, "_client_stub": type(client._client_stub)(routed)}  # noqa: SLF001


def _kind(client: object) -> tuple[type, ...] | None:
    """The multicallables that a stub consists of; None for what is no stub."""
    parts = list(getattr(client, "__dict__", {}).values())
    return next((kind for kind in (_SYNC, _AIO) if parts and all(isinstance(part, kind) for part in parts)), None)
