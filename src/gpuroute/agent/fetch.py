"""One small HTTP exchange with the engine on this machine, with asyncio streams alone.

An agent sends two of these a second and must stay small; a client library would be most of its memory. A new connection
each time: engines close idle ones when they please, and a connection that can be made is itself a sign of life.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from functools import cache
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_BODY = 8 * 1024 * 1024


class Reply(NamedTuple):
    """Status and body. 0: nothing listens there; 599: connected, but no answer in time, or none that is HTTP."""

    status: int
    body: bytes = b""

    @property
    def ok(self) -> bool:
        """True for 2xx."""
        return 200 <= self.status < 300


GONE = Reply(0)
SILENT = Reply(599)


async def fetch(
    url: str, path: str, *, timeout: float = 2.0, body: object = None, headers: Mapping[str, str] | None = None
) -> Reply:
    """GET, or POST where there is a (JSON) body. `timeout` in seconds for all of it. Never raises but CancelledError."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    tls = _trusting() if parts.scheme == "https" else None
    connected = False
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=tls, limit=1 << 20)
            connected = True
            try:
                writer.write(_request(parts.netloc, parts.path.rstrip("/") + path, body, headers or {}))
                return _parsed(await _all_of(reader))
            finally:
                writer.close()
    except (OSError, TimeoutError, EOFError, ValueError, LookupError, asyncio.LimitOverrunError):
        return SILENT if connected else GONE


@cache
def _trusting() -> ssl.SSLContext:
    """The engine is a neighbour on this machine, and its certificate is for the name that clients use. So the
    system's authorities are not needed, which take 20 ms to read: no ask is answered meanwhile."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _request(host: str, target: str, body: object, headers: Mapping[str, str]) -> bytes:
    payload = b"" if body is None else json.dumps(body).encode()
    lines = [f"{'GET' if body is None else 'POST'} {target} HTTP/1.1", f"Host: {host}", "Connection: close"]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(payload)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + payload


async def _all_of(reader: asyncio.StreamReader) -> bytes:
    """The head, and the body by its length, its chunks, or the end of the connection."""
    head = await reader.readuntil(b"\r\n\r\n")
    fields = {k.strip().lower(): v.strip() for k, _, v in (line.partition(b":") for line in head.split(b"\r\n")[1:])}
    if fields.get(b"transfer-encoding", b"").lower() == b"chunked":
        return head + await _chunks(reader)
    if b"content-length" in fields:
        return head + await reader.readexactly(min(int(fields[b"content-length"]), MAX_BODY))
    return head + await _to_the_end(reader)


async def _to_the_end(reader: asyncio.StreamReader) -> bytes:
    found = bytearray()
    while len(found) < MAX_BODY and (piece := await reader.read(MAX_BODY - len(found))):  # `read` gives what is there
        found += piece
    return bytes(found)


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    found = bytearray()
    while len(found) < MAX_BODY and (size := int((await reader.readline()).partition(b";")[0], 16)):
        found += (await reader.readexactly(min(size, MAX_BODY) + 2))[:-2]
    return bytes(found)


def _parsed(answer: bytes) -> Reply:
    head, _, body = answer.partition(b"\r\n\r\n")
    return Reply(int(head.split(b" ", 2)[1]), body)
