"""What the end of an RPC says about the endpoint, about the call, and about a next attempt.

gRPC has one vocabulary of statuses for three speakers: the application, its server library, and the client's own
transport. The code alone does not tell them apart, and Python sees nothing of the stream below it, so the known texts of
the transport and of three servers stand here in tables. An unknown text falls back to its code's meaning.

*Unsent* is the important one: an RPC that never reached an application may be sent again at no risk, whatever it does.
Measured on grpcio 1.85: `GOAWAY received` names streams above the last one that the server took; `Stream removed` and
`Socket closed` prove nothing (a server killed in mid-call gives them too).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from grpc import StatusCode

from gpuroute.core.orca import REPORT_HEADER, REPORT_TRAILERS, parse_orca, parse_orca_bin
from gpuroute.core.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuroute.core.orca import LoadReport

    Metadata = Iterable[tuple[str, str | bytes]] | None

OUTCOMES = {
    StatusCode.OK: Outcome.SUCCESS,
    StatusCode.CANCELLED: Outcome.FAILED,  # by the server or a proxy; a caller's own is never classified here
    StatusCode.UNKNOWN: Outcome.FAILED,
    StatusCode.INTERNAL: Outcome.FAILED,
    StatusCode.DATA_LOSS: Outcome.FAILED,
    StatusCode.UNAVAILABLE: Outcome.FAILED,
    StatusCode.DEADLINE_EXCEEDED: Outcome.TIMED_OUT,
    StatusCode.RESOURCE_EXHAUSTED: Outcome.OVERLOADED,
}
"""Every other code describes the request: REJECTED, never repeated, never held against the endpoint."""

# Codes whose failure may be repeated although the application may have acted on the request.
# CANCELLED is what MLServer tells the calls that run when it gets its SIGTERM (measured, 1.7).
REPEATED = frozenset({StatusCode.UNAVAILABLE, StatusCode.RESOURCE_EXHAUSTED, StatusCode.NOT_FOUND, StatusCode.CANCELLED})
REPEATED_IF_SAFE = REPEATED | {
    StatusCode.UNKNOWN,
    StatusCode.INTERNAL,
    StatusCode.DATA_LOSS,
    StatusCode.DEADLINE_EXCEEDED,
}

# What an endpoint says that is full, or that no longer serves a model it used to serve: another one will do better.
_BUSY = (
    (StatusCode.UNAVAILABLE, "exceeds maximum queue size"),  # Triton
    (StatusCode.UNAVAILABLE, "server is stopping"),  # the same in the first second after its SIGTERM, as the next two
    (StatusCode.UNAVAILABLE, "server exiting"),
    (StatusCode.UNAVAILABLE, "server not ready"),
    (StatusCode.UNAVAILABLE, "batch scheduling queue"),  # TF Serving
    (StatusCode.NOT_FOUND, "has no available versions"),  # Triton, while it drains
    (StatusCode.NOT_FOUND, "servable not found"),  # TF Serving, while it loads or unloads
)
# Failures by the caller's own doing: on this side, and what Triton calls UNAVAILABLE though it never will be there.
_OWN = (
    "model load / unload is not allowed",
    "exception serializing request",
    "exception deserializing response",
    "exception iterating requests",
    "message larger than max",
    "internal error from core",  # of a stream that ended while it was written to, in asyncio: hides how
)
_UNSENT = ("failed to connect to all addresses", "goaway received", "connections to all backends failing")
_UNSENT_TOO = ("errors resolving", "dns resolution failed", "empty address list", "no addresses")
# What it showed, or what it was to see; the last is grpcio 1.66 on a key that does not fit.
_MISFIT = ("certificate", "verification check", "security handshaker", "empty address list")
_TRANSPORT = ("stream removed", "socket closed", "connection reset", "broken pipe", "ping timeout", "transport closed")
_NOT_GRPC = "received http2 header with status"  # a proxy or a web server answered


class Verdict(NamedTuple):
    """One ended attempt. `unsent`: no application saw it. `answered`: a server replied, so it lives.

    `retry_after`: seconds the server asked for; `stop`: it asked not to be tried again. `misfit`: its TLS record
    was at fault. `dead`: nothing comes through its connection, which grpcio may go on using until a write has ended.
    """

    outcome: Outcome
    unsent: bool = False
    answered: bool = True
    retry_after: float | None = None
    stop: bool = False
    misfit: bool = False
    dead: bool = False


def judge(code: StatusCode, details: str | None, trailing: Metadata) -> Verdict:
    """Classify a status that is not OK and not the caller's own cancellation. Never raises."""
    text = (details or "").lower()
    outcome = OUTCOMES.get(code, Outcome.REJECTED)
    if text and any(part in text for part in _OWN):
        return Verdict(Outcome.REJECTED)
    if code is StatusCode.UNAVAILABLE and any(part in text for part in (*_UNSENT, *_UNSENT_TOO)):
        return Verdict(outcome, unsent=True, answered=False, misfit=any(part in text for part in _MISFIT))
    if any(code is busy and part in text for busy, part in _BUSY):
        outcome = Outcome.OVERLOADED
    elif _NOT_GRPC in text:
        outcome = Outcome.FAILED
    pushback, stop = read_pushback(trailing) if trailing else (None, False)
    if pushback is not None and outcome is Outcome.FAILED:
        outcome = Outcome.OVERLOADED
    silent = code is StatusCode.CANCELLED or outcome is Outcome.TIMED_OUT
    answered = not silent and not any(part in text for part in _TRANSPORT)
    return Verdict(outcome, answered=answered, retry_after=pushback, stop=stop, dead="ping timeout" in text)


def brief(code: StatusCode, details: str | None) -> str:
    """One short line for notes and logs: the code, and what grpc wraps in its story of all addresses."""
    text = (details or "").rpartition("last error: ")[2]
    return f"{code.name}: {text}" if text else code.name


def read_pushback(trailing: Metadata) -> tuple[float | None, bool]:
    """Seconds to wait, and whether the server forbids another attempt (gRFC A6), from trailing metadata."""
    for key, value in trailing or ():
        if key == "grpc-retry-pushback-ms":
            milliseconds = _integer(value)
            return (None, True) if milliseconds is None or milliseconds < 0 else (milliseconds / 1000, False)
        if key == "retry-after":  # gateways
            seconds = _integer(value)
            return (None if seconds is None or seconds < 0 else float(seconds)), False
    return None, False


def _integer(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


def report_in(trailing: Metadata) -> LoadReport | None:
    """The load report (ORCA) that a server put in its trailing metadata.

    grpcio keeps the standard `endpoint-load-metrics-bin` for its own balancers and shows it to no application (measured:
    1.66, 1.85); what arrives is its older name, and the text forms.
    """
    for key, value in trailing or ():
        if key in REPORT_TRAILERS and isinstance(value, bytes):
            return parse_orca_bin(value)
        if key == REPORT_HEADER and isinstance(value, str):
            return parse_orca(value)
    return None
