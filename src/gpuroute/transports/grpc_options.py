"""What a single gRPC call may ask of the router: in its metadata, or for a block of code."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from gpuroute.transports.bodies import NO_OPTIONS, Options, read_options

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    Pairs = Iterable[tuple[str, Any]]

OURS = "x-gpuroute-"

CHOSEN: ContextVar[Options] = ContextVar("gpuroute.grpc.options", default=NO_OPTIONS)


@contextmanager
def options(
    *,
    key: str | None = None,
    timeout: float | None = None,
    attempts: int | None = None,
    hedge: bool | None = None,
    reroute: bool | None = None,
) -> Iterator[None]:
    """Options of the calls begun inside: affinity key, deadline in seconds over all attempts, number of attempts, and
    whether a unary call may have a second attempt beside a slow one.

    Metadata `x-gpuroute-key`, `-timeout` (`250ms`, `2s`), `-attempts`, `-hedge` and `-reroute` of a call win over it.
    Holds per thread and per task. Raises ConfigError.
    """
    given = {"key": key, "timeout": timeout, "attempts": attempts, "hedge": hedge, "reroute": reroute}
    token = CHOSEN.set(read_options(given, {}))
    try:
        yield
    finally:
        CHOSEN.reset(token)


def split_metadata(metadata: Pairs | None) -> tuple[Options, list[tuple[str, Any]] | None]:
    """What the call asks of the router, and the metadata to send without it. Raises ConfigError on bad values."""
    if not metadata:
        return CHOSEN.get(), None
    rest: list[tuple[str, Any]] = []
    asked: dict[str, str] = {}
    for pair in metadata:
        if pair[0][: len(OURS)] == OURS:  # names may be bytes
            asked[pair[0].removeprefix(OURS)] = str(pair[1])
        else:
            rest.append(pair)
    if not asked:
        return CHOSEN.get(), rest
    return read_options(None, {**CHOSEN.get()._asdict(), **asked}), rest
