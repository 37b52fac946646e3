"""gpuroute's own failures in the form that gRPC users catch: an `RpcError` with a code, and our error type as well.

`except grpc.RpcError` written before gpuroute sees UNAVAILABLE or DEADLINE_EXCEEDED; `except NoEndpointAvailable` works
over gRPC as it does over HTTP. On a future or a stream such an error is also the call itself, as grpcio has it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from grpc import StatusCode

from gpuroute.errors import DeadlineExceeded, NoEndpointAvailable, RegistryUnavailable, StreamStalled

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

SERIALIZING = "Exception serializing request!"  # grpcio's own words
LOCALLY_CANCELLED = "Locally cancelled by application!"
FINISHED = "RPC already finished."


class EndedCall(grpc.RpcError, grpc.Call, grpc.Future):  # type: ignore[type-arg]
    """A call that ended on this side without reaching a server: error, call and future in one."""

    def __init__(self, code: StatusCode, details: str) -> None:
        super().__init__(details)
        self._code = code
        self._details = details

    def code(self) -> StatusCode:
        """The status."""
        return self._code

    def details(self) -> str:
        """The reason."""
        return self._details

    def debug_error_string(self) -> str:
        """The same reason."""
        return self._details

    def initial_metadata(self) -> Any:
        """Nothing."""
        return ()

    def trailing_metadata(self) -> Any:
        """Nothing."""
        return ()

    def is_active(self) -> bool:
        """False."""
        return False

    def time_remaining(self) -> Any:
        """None."""
        return None

    def add_callback(self, callback: Callable[[], None]) -> bool:  # noqa: ARG002
        """False: it is over."""
        return False

    def cancel(self) -> bool:
        """False: it is over."""
        return False

    def cancelled(self) -> bool:
        """True if the caller cancelled it."""
        return self._code is StatusCode.CANCELLED

    def running(self) -> bool:
        """False."""
        return False

    def done(self) -> bool:
        """True."""
        return True

    def result(self, timeout: float | None = None) -> NoReturn:  # noqa: ARG002
        """Raise."""
        if self.cancelled():
            raise grpc.FutureCancelledError
        raise self

    def exception(self, timeout: float | None = None) -> Exception:  # noqa: ARG002
        """This error."""
        if self.cancelled():
            raise grpc.FutureCancelledError
        return self

    def traceback(self, timeout: float | None = None) -> TracebackType | None:  # noqa: ARG002
        """Where `result` raises."""
        try:
            self.result()
        except grpc.RpcError:
            return sys.exc_info()[2]

    def add_done_callback(self, fn: Callable[[Any], None]) -> None:
        """Call it now."""
        fn(self)

    def __iter__(self) -> EndedCall:
        return self

    def __next__(self) -> NoReturn:
        raise self

    def __str__(self) -> str:
        return f"<{type(self).__name__} {self._code}: {self._details}>"

    __repr__ = __str__


class ClosedUnder(EndedCall):
    """CANCELLED: the channel was closed while the call had no attempt under way. Nobody cancelled the call itself."""

    def __init__(self) -> None:
        super().__init__(StatusCode.CANCELLED, "Channel closed!")

    def cancelled(self) -> bool:
        """False."""
        return False


class NoEndpoint(EndedCall, NoEndpointAvailable):
    """UNAVAILABLE: no endpoint of the pool may take the call."""

    def __init__(self, error: NoEndpointAvailable) -> None:
        EndedCall.__init__(self, StatusCode.UNAVAILABLE, str(error))
        self.retry_after = error.retry_after


class NoView(EndedCall, RegistryUnavailable):
    """UNAVAILABLE: the registry has not told of any fleet yet."""

    def __init__(self, error: RegistryUnavailable) -> None:
        EndedCall.__init__(self, StatusCode.UNAVAILABLE, str(error))


class OutOfTime(EndedCall, DeadlineExceeded):
    """DEADLINE_EXCEEDED, between attempts."""

    def __init__(self, error: DeadlineExceeded) -> None:
        EndedCall.__init__(self, StatusCode.DEADLINE_EXCEEDED, str(error))


class Stalled(EndedCall, StreamStalled):
    """UNAVAILABLE: the endpoint was silent for longer than is normal, and the stream could not begin elsewhere."""

    def __init__(self, message: str, endpoint: str) -> None:
        EndedCall.__init__(self, StatusCode.UNAVAILABLE, message)
        StreamStalled.__init__(self, message, endpoint=endpoint)


class _AioEnded(grpc.aio.AioRpcError):
    def _tell(self, code: StatusCode, text: str) -> None:
        self._code = code
        self._details = self._debug_error_string = text
        self._initial_metadata = self._trailing_metadata = grpc.aio.Metadata()

    def __str__(self) -> str:
        return f"<{type(self).__name__} {self.code()}: {self.details()}>"

    __repr__ = __str__


class AioNoEndpoint(_AioEnded, NoEndpointAvailable):
    """UNAVAILABLE: no endpoint of the pool may take the call."""

    def __init__(self, error: NoEndpointAvailable) -> None:
        NoEndpointAvailable.__init__(self, str(error), retry_after=error.retry_after)
        self._tell(StatusCode.UNAVAILABLE, str(error))


class AioNoView(_AioEnded, RegistryUnavailable):
    """UNAVAILABLE: the registry has not told of any fleet yet."""

    def __init__(self, error: RegistryUnavailable) -> None:
        RegistryUnavailable.__init__(self, str(error))
        self._tell(StatusCode.UNAVAILABLE, str(error))


class AioOutOfTime(_AioEnded, DeadlineExceeded):
    """DEADLINE_EXCEEDED, between attempts."""

    def __init__(self, error: DeadlineExceeded) -> None:
        DeadlineExceeded.__init__(self, str(error))
        self._tell(StatusCode.DEADLINE_EXCEEDED, str(error))


class AioStalled(_AioEnded, StreamStalled):
    """UNAVAILABLE: the endpoint was silent for longer than is normal, and the stream could not begin elsewhere."""

    def __init__(self, message: str, endpoint: str) -> None:
        StreamStalled.__init__(self, message, endpoint=endpoint)
        self._tell(StatusCode.UNAVAILABLE, message)


Core = NoEndpointAvailable | RegistryUnavailable | DeadlineExceeded


def ended(error: Core) -> EndedCall:
    """The error of the core as one of gRPC's."""
    if isinstance(error, DeadlineExceeded):
        return OutOfTime(error)
    return NoView(error) if isinstance(error, RegistryUnavailable) else NoEndpoint(error)


def aio_ended(error: Core) -> grpc.aio.AioRpcError:
    """The error of the core as one of gRPC's asyncio API."""
    if isinstance(error, DeadlineExceeded):
        return AioOutOfTime(error)
    return AioNoView(error) if isinstance(error, RegistryUnavailable) else AioNoEndpoint(error)
