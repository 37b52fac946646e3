"""gpuroute for `httpx2`: `Client(router)`, `AsyncClient(router)`, and their transports.

    router = gpuroute.Router.from_env()
    client = gpuroute.httpx2.Client(router)
    client.post("http://llama-3-8b/v1/chat/completions", json=...)      # the host names the pool

Everything else is httpx2: these are its own base classes, its responses and its errors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpcore2
import httpx2

from gpuroute import errors
from gpuroute.transports.http import AsyncDriver, Driver, split_arguments
from gpuroute.transports.library import Library

if TYPE_CHECKING:
    from gpuroute.router import Router

__all__ = [
    "AsyncClient",
    "AsyncTransport",
    "Client",
    "DeadlineExceeded",
    "NoEndpointAvailable",
    "StreamInterrupted",
    "StreamStalled",
    "Transport",
]


class NoEndpointAvailable(errors.NoEndpointAvailable, httpx2.ConnectError):
    """The pool has nothing that may take this call now; also a `httpx2.ConnectError`."""

    _request = None


class DeadlineExceeded(errors.DeadlineExceeded, httpx2.TimeoutException):
    """The call's own deadline has passed; also a `httpx2.TimeoutException`."""

    _request = None


class StreamInterrupted(errors.StreamInterrupted, httpx2.RemoteProtocolError):
    """A stream was cut after its first byte was delivered; also a `httpx2.RemoteProtocolError`."""

    _request = None


class StreamStalled(errors.StreamStalled, httpx2.ReadTimeout):
    """A stream fell silent after its first byte was delivered; also a `httpx2.ReadTimeout`."""

    _request = None


LIBRARY = Library(
    httpx2,
    httpcore2,
    stream_interrupted=StreamInterrupted,
    stream_stalled=StreamStalled,
    no_endpoint=NoEndpointAvailable,
    deadline_exceeded=DeadlineExceeded,
)


class Transport(Driver, httpx2.BaseTransport):
    """Routes the requests of a `httpx2.Client`. Safe from any thread.

    `pool`: all requests go to this pool, whatever their host. `passthrough`: hosts that are no pools are called directly
    instead of refused. `cookies`: let `Set-Cookie` through. `verify`, `cert`, `trust_env`, `limits`, `local_address`,
    `socket_options`: as for `httpx2.HTTPTransport`, the limits per endpoint. `plain`: the transport for passthrough.
    """

    library = LIBRARY


class AsyncTransport(AsyncDriver, httpx2.AsyncBaseTransport):
    """Routes the requests of a `httpx2.AsyncClient`, from any asyncio loop. Arguments as for `Transport`."""

    library = LIBRARY


class Client(httpx2.Client):
    """A `httpx2.Client` whose hosts are pools. Arguments: its own and `Transport`'s, but no `proxy`."""

    def __init__(self, router: Router, **kwargs: Any) -> None:
        mine, theirs = split_arguments(kwargs)
        transport = Transport(router, **mine)
        transport.by_proxies = theirs.get("trust_env", True)
        super().__init__(transport=transport, **theirs)


class AsyncClient(httpx2.AsyncClient):
    """A `httpx2.AsyncClient` whose hosts are pools. Arguments: its own and `AsyncTransport`'s, but no `proxy`."""

    def __init__(self, router: Router, **kwargs: Any) -> None:
        mine, theirs = split_arguments(kwargs)
        transport = AsyncTransport(router, **mine)
        transport.by_proxies = theirs.get("trust_env", True)
        super().__init__(transport=transport, **theirs)
