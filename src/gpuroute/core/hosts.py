"""Hosts that could not be reached, over all pools of a router: what one pool has found out, the others need not.

Everything else that goes wrong is a matter between one endpoint and one pool: a model that fails does not speak for its
neighbours. A connection that is refused does: there is nobody, whoever asks. Certificates that do not fit, or that this
side cannot use, are a matter of the endpoint's record.
"""

from __future__ import annotations

FORGOTTEN_S = 10.0
"""A host that was missed once and then not for so long starts afresh: the breaker's window."""
MAX_HOSTS = 10_000


class Hosts:
    """Connects that failed in a row, by host and port. Safe from any thread: a count that is lost costs one attempt."""

    __slots__ = ("_missed",)

    def __init__(self) -> None:
        self._missed: dict[str, tuple[int, float]] = {}

    def missed(self, host: str, now: float) -> int:
        """A connect failed; how many in a row that makes, whichever pools tried."""
        before, last = self._missed.pop(host, (0, now))
        count = before + 1 if now - last < FORGOTTEN_S else 1
        if len(self._missed) >= MAX_HOSTS:  # to look for the oldest would fail while other threads add
            self._missed = {}
        self._missed[host] = count, now
        return count

    def reached(self, host: str) -> None:
        """It is there."""
        self._missed.pop(host, None)


def host_of(url: str) -> str:
    """The host and port of an endpoint's URL, in small letters; a Unix socket is a host of its own."""
    if url.startswith("unix:"):
        return url
    return url.rpartition("://")[2].partition("/")[0].rpartition("@")[2].lower()
