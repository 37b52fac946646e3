"""Serves a digest over HTTP to clients that cannot reach agents: `/digest`, and for people `/healthz` and `/metrics`.

Connections are kept, because every client comes twice a second. With a key, only questions that know it are answered, and
every answer is authenticated with its age for the very question, so that neither forged nor recorded ones steer anybody.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import ssl
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qs, urlsplit

from gpuroute.agent.answers import AHEAD_MS, BEHIND_MS
from gpuroute.agent.server import netloc
from gpuroute.core.digest import AGE_HEADER, AUTH_HEADER, PATH, TAG_HEADER, mac_of, tag_of
from gpuroute.errors import ConfigError
from gpuroute.forms import stamps

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gpuroute.agent.collect import Collector
    from gpuroute.core.fleet import Fleet, Registry, Subscription

log = logging.getLogger("gpuroute.agent")

IDLE_S = 30.0
MOST_CONNECTIONS = 4_000
STALE_S = 5.0
RENEWED_S = 60.0
LIMIT = 8_192


class Reply(NamedTuple):
    """Status, body, and further headers."""

    status: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = (("Content-Type", "text/plain"),)


class DigestServer:
    """Collects from the fleet of a registry, and serves what it has. Loop thread.

    `keys`: accepted secrets, the present one first; an answer is authenticated with that of its question. `pair`: PEM
    files of a certificate and its key, for TLS.
    """

    def __init__(
        self,
        collector: Collector,
        registry: Registry,
        keys: Sequence[bytes] = (),
        *,
        insecure: bool = False,
        pair: tuple[str, str] | None = None,
    ) -> None:
        self.collector = collector
        self.refused = self.served = self.unchanged = self.sent = 0
        self._registry = registry
        self._keys = tuple(keys)
        self._insecure = insecure
        self._pair = pair
        self._subscription: Subscription | None = None
        self._server: asyncio.Server | None = None
        self._collecting: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._connections: set[asyncio.StreamWriter] = set()
        self._pages: dict[str, Callable[[], Reply]] = {"/healthz": self._health, "/metrics": self._metrics}

    async def start(self, host: str, port: int) -> str:
        """Serve and collect; the URL. Raises OSError if the port is taken, ConfigError where a key is missing."""
        if not (self._keys or self._insecure or _is_loopback(host)):
            raise ConfigError(
                f"--digest on {host}: questions from other hosts need a key (GPUROUTE_AGENT_KEY), or the word --insecure"
            )
        context = None
        if self._pair is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(*self._pair)
            self._renewing = asyncio.ensure_future(_renewed(context, self._pair))
        self._server = await asyncio.start_server(self._serve, host, port, limit=LIMIT, ssl=context)
        self._subscription = await asyncio.to_thread(self._registry.subscribe, self._adopt)
        self._collecting = asyncio.ensure_future(self.collector.run())
        bound = self._server.sockets[0].getsockname()[1]
        return f"{'https' if context else 'http'}://{netloc(host, bound)}"

    async def close(self) -> None:
        """Stop. Idempotent."""
        collecting, subscription, self._subscription = self._collecting, self._subscription, None
        if self._server is not None:
            self._server.close()
        if self._renewing is not None:
            self._renewing.cancel()
        for writer in tuple(self._connections):
            writer.close()
        if collecting is not None:
            collecting.cancel()
            with suppress(asyncio.CancelledError):
                await collecting
        if subscription is not None:
            await asyncio.to_thread(subscription.close)

    def _adopt(self, fleet: Fleet) -> None:
        self.collector.adopt(fleet)
        if self.collector.without:
            log.info("digest: %d endpoints have no agent", self.collector.without)

    # ------------------------------------------------------------------------------------------ HTTP

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MOST_CONNECTIONS:
            writer.close()
            return
        self._connections.add(writer)
        try:
            while True:
                async with asyncio.timeout(IDLE_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    keep, data = self._answered(head)
                    self.sent += len(data)
                    writer.write(data)
                    await writer.drain()
                if not keep:
                    break
        except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # who stays away, or speaks no HTTP
        finally:
            self._connections.discard(writer)
            writer.close()

    def _answered(self, head: bytes) -> tuple[bool, bytes]:
        line, _, rest = head.decode("latin-1").partition("\r\n")
        words = line.split(" ")
        fields = {k.strip().lower(): v.strip() for k, _, v in (one.partition(":") for one in rest.split("\r\n"))}
        if len(words) != 3 or words[0] != "GET" or "content-length" in fields or "transfer-encoding" in fields:
            return False, _encoded(Reply("400 Bad Request", b"a GET without a body\n"), keep=False)
        keep = words[2] == "HTTP/1.1" and fields.get("connection", "").lower() != "close"
        return keep, _encoded(self.reply(words[1], fields), keep=keep)

    def reply(self, target: str, fields: Mapping[str, str]) -> Reply:
        """The answer to a GET; names of `fields` in lower case."""
        parts = urlsplit(target)
        if parts.path != PATH:
            page = self._pages.get(parts.path)
            return page() if page else Reply("404 Not Found", b"try /digest, /healthz or /metrics\n")
        nonce, secret = self._authenticated(fields.get(AUTH_HEADER.lower(), ""))
        if self._keys and not secret:
            self.refused += 1
            return Reply("401 Unauthorized", b"the key, or the clock, is another one\n")
        asked = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        since = int(asked["since"]) if asked.get("since", "").isascii() and asked.get("since", "").isdecimal() else 0
        return self._digest(asked.get("of", ""), since, nonce, secret, zipped="gzip" in fields.get("accept-encoding", ""))

    def _digest(self, ident: str, since: int, nonce: str, secret: bytes, *, zipped: bool) -> Reply:
        digest = self.collector.digest
        if not digest.version:
            return Reply("503 Service Unavailable", b"nothing is collected yet\n", (("Retry-After", "1"),))
        age_ms = max(0, int((time.monotonic() - digest.as_of) * 1000))
        same = (ident, since) == (digest.id, digest.version)
        body, encoding = (b"", "") if same else digest.body(ident, since, compressed=zipped)
        headers = [("Content-Type", "application/json"), (AGE_HEADER, str(age_ms)), ("Cache-Control", "no-store")]
        headers += [("ETag", f'"{digest.id}-{digest.version}"')]
        headers += [("Content-Encoding", encoding)] if encoding else []
        headers += [(TAG_HEADER, tag_of(secret, nonce, age_ms, body))] if secret else []
        self.served += not same
        self.unchanged += same
        return Reply("304 Not Modified" if same else "200 OK", body, tuple(headers))

    def _authenticated(self, text: str) -> tuple[str, bytes]:
        """The nonce of a question, and the secret that it knows; both empty if it knows none."""
        words = text.split(" ")
        if len(words) == 3 and len(words[0]) < 16 and words[0].isascii() and words[0].isdecimal() and len(words[1]) <= 64:
            sent_ms, (nonce, mac) = int(words[0]), words[1:]
            if -AHEAD_MS <= int(time.time() * 1000) - sent_ms <= BEHIND_MS:
                for key in self._keys:
                    if hmac.compare_digest(mac_of(key, sent_ms, nonce).encode(), mac.encode()):
                        return nonce, key
        return "", b""

    # ------------------------------------------------------------------------------------------ for people

    def _health(self) -> Reply:
        digest, trouble = self.collector.digest, self._subscription.error if self._subscription else None
        age = time.monotonic() - digest.as_of
        if not digest.version or age > STALE_S:
            return Reply("503 Service Unavailable", b"no round of asks in the last 5 s\n")
        return Reply("200 OK", f"ok\n{f'registry: {trouble}' if trouble else ''}".encode())

    def _metrics(self) -> Reply:
        collector, digest = self.collector, self.collector.digest
        rows = [
            ("agents", "gauge", len(collector.targets)),
            ("silent", "gauge", len(digest.silent) + len(collector.targets) - len(digest)),
            ("without_agent", "gauge", collector.without),
            ("age_seconds", "gauge", round(time.monotonic() - digest.as_of, 3) if digest.version else -1),
            ("round_seconds", "gauge", round(collector.round_s, 4)),
            ("rounds_total", "counter", collector.rounds),
            ("asks_total", "counter", collector.asks),
            ("garbled_total", "counter", collector.garbled),
            ("served_total", "counter", self.served),
            ("unchanged_total", "counter", self.unchanged),
            ("refused_total", "counter", self.refused),
            ("sent_bytes_total", "counter", self.sent),
            ("connections", "gauge", len(self._connections)),
        ]
        lines = [f"# TYPE gpuroute_digest_{name} {kind}\ngpuroute_digest_{name} {value}\n" for name, kind, value in rows]
        return Reply("200 OK", "".join(lines).encode(), (("Content-Type", "text/plain; version=0.0.4"),))


async def _renewed(context: ssl.SSLContext, pair: tuple[str, str]) -> None:
    """Handshakes use the certificate as it is in its file now."""
    seen = stamps(*pair)
    while True:
        await asyncio.sleep(RENEWED_S)
        try:
            now = stamps(*pair)
            if now != seen:
                context.load_cert_chain(*pair)
                seen = now
        except OSError as error:  # also of a pair that does not match, yet
            log.warning("digest: the new certificate cannot be read: %s", error)


def _encoded(reply: Reply, *, keep: bool) -> bytes:
    bare = reply.status.startswith("304")
    length = () if bare else (("Content-Length", str(len(reply.body))),)
    headers = (*reply.headers, *length, ("Connection", "keep-alive" if keep else "close"))
    lines = [f"HTTP/1.1 {reply.status}", *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + reply.body


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
