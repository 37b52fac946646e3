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
        self._hub = hub
        self._name = name
        self._serializer = serializer
        self._one = kind.startswith("unary")
        self._early = early and self._one
        self._streaming = kind != "unary_unary"
        self._whole = hub.method(kind, name, serializer, deserializer, registered)
        self._method = hub.method(kind, name, None, deserializer, registered) if self._early else self._whole


class Makers:
    """The four ways in which a stub gets a multicallable from a channel."""

    def _make(self, kind: str, *method: Any) -> Any:
        raise NotImplementedError

    def unary_unary(
        self,
        method: str,
        request_serializer: Serializer = None,
        response_deserializer: Deserializer = None,
        _registered_method: bool | None = False,
    ) -> Any:
        """A multicallable for one method."""
        return self._make("unary_unary", method, request_serializer, response_deserializer, _registered_method)

    def unary_stream(
        self,
        method: str,
        request_serializer: Serializer = None,
        response_deserializer: Deserializer = None,
        _registered_method: bool | None = False,
    ) -> Any:
        """A multicallable for one method."""
        return self._make("unary_stream", method, request_serializer, response_deserializer, _registered_method)

    def stream_unary(
        self,
        method: str,
        request_serializer: Serializer = None,
        response_deserializer: Deserializer = None,
        _registered_method: bool | None = False,
    ) -> Any:
        """A multicallable for one method."""
        return self._make("stream_unary", method, request_serializer, response_deserializer, _registered_method)

    def stream_stream(
        self,
        method: str,
        request_serializer: Serializer = None,
        response_deserializer: Deserializer = None,
        _registered_method: bool | None = False,
    ) -> Any:
        """A multicallable for one method."""
        return self._make("stream_stream", method, request_serializer, response_deserializer, _registered_method)
