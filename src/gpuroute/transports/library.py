"""One client library, as the driver sees it: `httpx2` over `httpcore2`, or `httpx` over `httpcore`.

Their names are the same and their classes are not: a response, its stream and every error must be the caller's own
library's. So the driver asks this object, and never imports either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpuroute import errors
from gpuroute.transports.continuation import AsyncSeamless, Seamless
from gpuroute.transports.streams import AsyncStream, Stream

if TYPE_CHECKING:
    from types import ModuleType

    from gpuroute.core.call import Call


class Library:
    """The modules of a client library, and gpuroute's errors as subclasses of that library's."""

    def __init__(
        self,
        client: ModuleType,
        core: ModuleType,
        *,
        stream_interrupted: type[errors.StreamInterrupted],
        stream_stalled: type[errors.StreamStalled],
        no_endpoint: type[errors.NoEndpointAvailable],
        deadline_exceeded: type[errors.DeadlineExceeded],
    ) -> None:
        # Any: the two libraries have no common types, and what is used of them is pinned by tests with both.
        self.client: Any = client
        self.core: Any = core
        self.stream_interrupted = stream_interrupted
        self.stream_stalled = stream_stalled
        self.no_endpoint = no_endpoint
        self.deadline_exceeded = deadline_exceeded
        self.stream: Any = type("ResponseStream", (Stream, client.SyncByteStream), {})
        self.async_stream: Any = type("AsyncResponseStream", (AsyncStream, client.AsyncByteStream), {})
        self.seamless: Any = type("SeamlessStream", (Seamless, client.SyncByteStream), {})
        self.async_seamless: Any = type("AsyncSeamlessStream", (AsyncSeamless, client.AsyncByteStream), {})
        self._own = {
            getattr(core, name): getattr(client, name)
            for name in (
                "ConnectError", "ConnectTimeout", "LocalProtocolError", "PoolTimeout", "ReadError", "ReadTimeout",
                "RemoteProtocolError", "WriteError", "WriteTimeout",
            )
        }  # fmt: skip

    def is_core(self, error: BaseException) -> bool:
        """True for the errors of the network level."""
        return type(error) in self._own

    def is_timeout(self, error: BaseException) -> bool:
        """True if the endpoint was too slow."""
        return isinstance(error, self.core.TimeoutException)

    def translated(self, error: Exception, call: Call | None = None) -> Exception:
        """The error that the caller expects for one of the network level, or of the router; others unchanged."""
        if isinstance(error, errors.NoEndpointAvailable):
            return self.no_endpoint(str(error), retry_after=error.retry_after)
        if isinstance(error, errors.DeadlineExceeded):
            return self.deadline_exceeded(str(error))
        own = self._own.get(type(error))
        if own is None:
            return error
        translated: Exception = own(str(error))
        return noted(translated, call)


def noted(error: Exception, call: Call | None) -> Exception:
    """The error with a note that tells the attempts of its call."""
    story = call.story() if call is not None else ""
    if story:
        error.add_note(f"gpuroute: {story}")
    return error
