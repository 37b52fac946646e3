"""The methods of stubs, as both channels have them: what one is, and how a stub gets its multicallables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuroute.transports.grpc_hub import Hub

    Serializer = Callable[[Any], bytes] | None
    Deserializer = Callable[[bytes], Any] | None


class Method:
    """One method of one kind, and how its messages become bytes. Compared by identity: `Hub.method` gives equals once."""

    __slots__ = ("deserializer", "kind", "name", "registered", "serializer")

    def __init__(
        self, kind: str, name: str, serializer: Serializer, deserializer: Deserializer, registered: bool | None
    ) -> None:
        self.kind = kind
        self.name = name
        self.serializer = serializer
        self.deserializer = deserializer
        self.registered = registered


class Multicallable:
    """What the multicallables of all kinds know.

    A single request is serialized here, once for all attempts and for the prompt that is read in it, unless an
    interceptor of the endpoints' channels expects to see the message itself.
    """

    def __init__(
        self,
        hub: Hub,
        kind: str,
        name: str,
        serializer: Serializer,
        deserializer: Deserializer,
        registered: bool | None,
        early: bool = True,
    ) -> None:
        self.hub = hub
        self.name = name
        self.streaming = kind != "unary_unary"
        self._serializer = serializer
        self._one = kind.startswith("unary")
        self._early = early and self._one
        self._plain = serializer is None  # what is sent is what the caller gave
        self._whole = hub.method(kind, name, serializer, deserializer, registered)
        self._method = hub.method(kind, name, None, deserializer, registered) if self._early else self._whole


def _maker(kind: str) -> Any:
    def make(
        self: Makers,
        method: str,
        request_serializer: Serializer = None,
        response_deserializer: Deserializer = None,
        _registered_method: bool | None = False,
    ) -> Any:
        """A multicallable for one method."""
        return self._make(kind, method, request_serializer, response_deserializer, _registered_method)

    return make


class Makers:
    """The four ways in which a stub gets a multicallable from a channel."""

    def _make(self, kind: str, *method: Any) -> Any:
        raise NotImplementedError

    unary_unary, unary_stream = _maker("unary_unary"), _maker("unary_stream")
    stream_unary, stream_stream = _maker("stream_unary"), _maker("stream_stream")
