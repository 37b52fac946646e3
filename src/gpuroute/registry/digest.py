"""Reads a fleet digest twice a second, for processes that cannot reach agents: a thread, and load reports for the pools.

Several digests are each other's spare: the one that answers is kept, the next is asked at once when it does not. How old
a report is counts from before the question was sent, so it is never younger than it says. Whatever fails is "no report":
the last ones grow old, calls go on, and a line in the log says so.
"""

from __future__ import annotations

import gzip
import hmac
import http.client
import logging
import secrets
import ssl
import threading
import time
import zlib
from io import BytesIO
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from gpuroute.bounded import get
from gpuroute.core.asking import Garbled
from gpuroute.core.digest import AGE_HEADER, AUTH_HEADER, PATH, TAG_HEADER, View, mac_of, tag_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gpuroute.core.report import Report

log = logging.getLogger("gpuroute")

INTERVAL_S = 0.5
TIMEOUT_S = 2.0
READ_S = 5.0  # for a whole answer: who drips would else be waited for, and never be in trouble
MAX_WAIT_S = 5.0
MAX_BODY = 16 * 1024 * 1024
CHUNK = 65_536
MAX_AGE_MS = 3_600_000


class DigestWatch:
    """Reads from the first of `urls` that answers until `close`. Any thread; troubles are in `error`, never raised.

    `deliver` gets the reports of every new round by pool and endpoint, from this watch's thread, and says whether to go
    on. `clock`: that of the reports, in seconds; `random`: which digest is asked first, so that they share the clients.
    """

    def __init__(
        self,
        urls: Sequence[str],
        deliver: Callable[[Mapping[str, Mapping[str, Report]]], bool],
        *,
        clock: Callable[[], float],
        random: Callable[[], float],
        secret: bytes = b"",
        ca: str | None = None,
    ) -> None:
        self.error: str | None = None
        self.url = ""
        self.rounds = 0
        self._urls = tuple(urls)
        self._deliver = deliver
        self._clock = clock
        self._random = random
        self._secret = secret
        self._ca = ca
        self._view = View()
        self._connection: http.client.HTTPConnection | None = None
        self._stop = threading.Event()
        threading.Thread(target=self._run, name="gpuroute-digest", daemon=True).start()

    def close(self) -> None:
        """Stop reading; a read that is under way ends by itself. Idempotent."""
        self._stop.set()

    def _run(self) -> None:
        number, failures = int(self._random() * len(self._urls)), 0
        while not self._stop.is_set():
            self.url = self._urls[number % len(self._urls)]
            trouble, goes_on = self._read_once()
            if not goes_on:
                break
            if trouble:
                number, failures = number + 1, failures + 1
            else:
                failures = 0
            self._tell(trouble if failures >= len(self._urls) else "")
            self._stop.wait(self._pause(failures))
        self._hang_up()

    def _pause(self, failures: int) -> float:
        """Seconds until the next look: at once to a spare that was not tried; then, and among many, not in step."""
        if failures % len(self._urls):
            return 0.0
        turns = failures // len(self._urls)
        return min(MAX_WAIT_S, INTERVAL_S * 2.0**turns) * (0.8 + 0.4 * self._random())

    def _tell(self, trouble: str) -> None:
        if trouble and not self.error:
            log.warning("no digest of the fleet, calls go on without: %s", trouble)
        elif self.error and not trouble:
            log.info("the digest of the fleet is read again, from %s", self.url)
        self.error = trouble or None

    def _read_once(self) -> tuple[str, bool]:
        """One look; what went wrong, and whether the receiver is still there."""
        try:
            began = self._clock()
            body, age_s = self._fetch()
            if not body:
                return "", not self._stop.is_set()
            heard = self._view.apply(body, began - age_s)
        except (OSError, http.client.HTTPException, Garbled, ValueError) as error:
            self._hang_up()
            self._view = View()
            return f"{self.url}: {_said(error)}", True
        self.rounds += 1
        return "", self._deliver(heard) and not self._stop.is_set()

    def _fetch(self) -> tuple[bytes, float]:
        """A new body, b"" if there is none, and how many seconds its round is old."""
        nonce, sent_ms, view = secrets.token_hex(8), int(time.time() * 1000), self._view
        headers = {"Accept-Encoding": "gzip"}
        if self._secret:
            headers[AUTH_HEADER] = f"{sent_ms} {nonce} {mac_of(self._secret, sent_ms, nonce)}"
        connection = self._connection or self._connect()
        path = urlsplit(self.url).path.rstrip("/") + PATH
        answer = get(connection, f"{path}?of={view.id}&since={view.version}", headers, within=READ_S)
        body = _read(answer)
        if answer.status not in {200, 304} or len(body) > MAX_BODY:
            said = body[:100].decode("latin-1").strip() if len(body) <= MAX_BODY else "too long"
            raise Garbled(f"status {answer.status}: {said!r}")
        age = answer.getheader(AGE_HEADER, "")
        if not (age.isascii() and age.isdecimal() and len(age) < 10 and int(age) <= MAX_AGE_MS):
            raise Garbled(f"no {AGE_HEADER}, or none that can be")
        if self._secret and not hmac.compare_digest(
            answer.getheader(TAG_HEADER, "").encode(), tag_of(self._secret, nonce, int(age), body).encode()
        ):
            raise Garbled("the answer is not authentic")
        if answer.status == 304:
            return b"", 0.0
        return _unzipped(body) if answer.getheader("Content-Encoding") == "gzip" else body, int(age) / 1000

    def _connect(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        if parts.scheme == "https":
            context = ssl.create_default_context(cafile=self._ca)
            self._connection = http.client.HTTPSConnection(
                parts.hostname, parts.port or 443, timeout=TIMEOUT_S, context=context
            )
        else:
            # Without a port http.client would look for one in the host, and find it in an IPv6 address.
            self._connection = http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=TIMEOUT_S)
        return self._connection

    def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _read(answer: http.client.HTTPResponse) -> bytes:
    """The body, or as much of it as shows that it is too long."""
    parts, size = [], 0
    while size <= MAX_BODY and (part := answer.read1(CHUNK)):
        parts.append(part)
        size += len(part)
    if size <= MAX_BODY:
        answer.read()  # nothing more, but it lets the connection go on
    return b"".join(parts)


def _unzipped(body: bytes) -> bytes:
    try:
        data = gzip.GzipFile(fileobj=BytesIO(body)).read(MAX_BODY + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise Garbled(f"not gzip: {type(error).__name__}") from None
    if len(data) > MAX_BODY:
        raise Garbled("too long")
    return data


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__
