"""Answers of plain HTTP that are whole in time.

`http.client` bounds each wait for bytes, and so waits for ever on who drips them, also while it reads a head.
"""

from __future__ import annotations

import http.client
import io
import time
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping


def get(
    connection: http.client.HTTPConnection, path: str, headers: Mapping[str, str], *, within: float
) -> http.client.HTTPResponse:
    """Ask, and read the head. All of the answer must be read `within` so many seconds, and each piece of it come within
    the connection's `timeout`: else TimeoutError, also while its body is read. Raises HTTPException, OSError too."""
    until, each = time.monotonic() + within, connection.timeout or within
    connection.response_class = partial(_Answer, until=until, each=each)  # type: ignore[assignment]
    if connection.sock is not None:
        connection.sock.settimeout(each)
    connection.request("GET", path, headers=dict(headers))
    return connection.getresponse()


class _Answer(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, until: float, each: float, **named: Any) -> None:
        super().__init__(sock, *args, **named)
        self.fp = io.BufferedReader(_Timed(self.fp.detach(), sock, until, each))


class _Timed(io.RawIOBase):
    """What comes from a socket until a moment (monotonic seconds)."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, until: float, each: float) -> None:
        self._raw = raw
        self._sock = sock
        self._until = until
        self._each = each

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the answer took too long")
        self._sock.settimeout(min(left, self._each))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()
