"""Everything that gpuroute raises, so that a caller can tell whose fault it is.

::

    GpurouteError
    ├── ConfigError (ValueError)             a setting is wrong: names it, and what is accepted
    ├── RegistryError
    │   ├── RegistryUnavailable              no view of the fleet could be had
    │   └── InvalidRecord (ValueError)       one record of the registry is malformed
    ├── UnknownPool (LookupError)            no such pool in the fleet
    ├── NoEndpointAvailable (ConnectionError)  the pool has nothing that may take this call now
    ├── DeadlineExceeded (TimeoutError)      the call's own deadline has passed
    ├── RouterClosed (RuntimeError)          used after close()
    └── StreamInterrupted                    cut after its first byte reached the caller
        └── StreamStalled                    ... because it fell silent

A transport raises subclasses that also derive from its library's own errors (`httpx2.ConnectError`, ...), so
`except` clauses written before gpuroute keep working. No message ever contains a credential.
"""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "DeadlineExceeded",
    "GpurouteError",
    "InvalidRecord",
    "NoEndpointAvailable",
    "RegistryError",
    "RegistryUnavailable",
    "RouterClosed",
    "StreamInterrupted",
    "StreamStalled",
    "UnknownPool",
]


class GpurouteError(Exception):
    """Base of all errors of this library."""


class ConfigError(GpurouteError, ValueError):
    """A setting is malformed or contradicts another; the message names it and what is accepted."""


class RegistryError(GpurouteError):
    """The registry, or something in it, cannot be used."""


class RegistryUnavailable(RegistryError):
    """No view of the fleet could be obtained in time, and there is no usable snapshot on disk."""


class InvalidRecord(RegistryError, ValueError):
    """One registry record is malformed; the message names the key and the field, never the whole value."""


class UnknownPool(GpurouteError, LookupError):
    """The fleet has no pool of this name; the message lists the names that exist."""


class NoEndpointAvailable(GpurouteError, ConnectionError):
    """No endpoint of the pool may take the call now.

    `retry_after` is the number of seconds until the earliest endpoint returns, or None when none is expected.
    """

    retry_after: float | None

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineExceeded(GpurouteError, TimeoutError):
    """The call's deadline passed, over all of its attempts and waits."""


class RouterClosed(GpurouteError, RuntimeError):
    """The router was closed before this call."""


class StreamInterrupted(GpurouteError):
    """A stream was cut after its first byte had reached the caller, so it was not retried.

    Carries what had been received: `endpoint` (its id), `bytes_received`, `events_received` (complete SSE events or
    messages) and `partial_text` (the tail of the generated text, if the body was understood).
    """

    endpoint: str
    bytes_received: int
    events_received: int
    partial_text: str

    def __init__(
        self,
        message: str,
        *,
        endpoint: str = "",
        bytes_received: int = 0,
        events_received: int = 0,
        partial_text: str = "",
    ) -> None:
        super().__init__(message)
        self.endpoint = endpoint
        self.bytes_received = bytes_received
        self.events_received = events_received
        self.partial_text = partial_text


class StreamStalled(StreamInterrupted):
    """A stream fell silent for longer than is normal for its endpoint."""
