"""One attempt on its way: the link between the core's `Attempt`, a connection, and the response that is handed out.

Here is everything of the HTTP drivers that neither waits nor differs between threads and event loops: how a status or an
error is classified, what a response head says, the decision record, and the one place where an attempt ends.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from gpuroute.core.hedge import overtaken
from gpuroute.core.locality import learn_round_trip
from gpuroute.core.outcome import Outcome
from gpuroute.core.retry_after import parse_retry_after, parse_retry_after_ms
from gpuroute.engines.answers import judge
from gpuroute.transports.bodies import ATTEMPT, NAME, Sending
from gpuroute.transports.library import noted
from gpuroute.transports.piggyback import ANSWER, REQUEST, learn_header, wanted
from gpuroute.transports.sse import StreamFailed, Watch

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuroute.core.attempt import Attempt
    from gpuroute.core.call import Call
    from gpuroute.transports.bodies import Header
    from gpuroute.transports.library import Library
    from gpuroute.transports.pools import Connection, Link, Pools
    from gpuroute.transports.routes import Route

STAY = "gpuroute-endpoint="
LEAVE = "gpuroute-leave"
ASK_AGAIN_S = 0.5
"""While an endpoint is silent, others may find out that it hangs."""
MAX_GATHERED = 1024 * 1024
"""Bytes of an answer in one piece that are read before it is handed out."""
SHOULD_RETRY = b"x-should-retry"


class Head:
    """What of a response's head decides what happens next, read in one pass."""

    __slots__ = (
        "chunked", "coded", "content_type", "headers", "length", "load", "location", "retry_after", "retry_after_ms",
        "status",
    )  # fmt: skip

    def __init__(self, status: int, headers: list[Header], *, cookies: bool) -> None:
        self.status = status
        self.length = -1
        self.chunked = self.coded = False
        self.content_type = b""
        self.load = b""
        self.location: bytes | None = None
        self.retry_after: str | None = None
        self.retry_after_ms: str | None = None
        kept: list[Header] = []
        for header in headers:
            name = header[0].lower()
            if name in _READ:
                self._read(name, header[1])
            if name != b"set-cookie" or cookies:
                kept.append(header)
        self.headers = kept
        if self.coded:
            self.content_type = b""  # compressed events cannot be read here: they pass like any other bytes
        if self.chunked:
            self.length = -1  # the chunks say where it ends, whatever Content-Length says

    def _read(self, name: bytes, value: bytes) -> None:
        if name == b"content-length":
            self.length = int(value)  # h11 has checked it
        elif name == b"content-type":
            self.content_type = value
        elif name == b"content-encoding":
            self.coded = value.lower() != b"identity"
        elif name == b"transfer-encoding":
            self.chunked = True
        elif name == b"location":
            self.location = value
        elif name == ANSWER:
            self.load = value
        elif name == b"retry-after":
            self.retry_after = value.decode("latin-1")
        else:
            self.retry_after_ms = value.decode("latin-1")

    def pause(self) -> float | None:
        """Seconds that the server asked for, or None."""
        found = parse_retry_after_ms(self.retry_after_ms)
        return parse_retry_after(self.retry_after, time.time()) if found is None else found


_READ = frozenset(
    (
        ANSWER, b"content-encoding", b"content-length", b"content-type", b"location", b"retry-after", b"retry-after-ms",
        b"transfer-encoding",
    )
)  # fmt: skip


class Settled:
    """The settings of one transport that its calls read."""

    __slots__ = ("clock", "connect_timeout", "cookies", "deadline_header", "library")

    def __init__(
        self,
        library: Library,
        clock: Callable[[], float],
        connect_timeout: float,
        *,
        cookies: bool,
        deadline_header: str | None = None,
    ) -> None:
        self.library = library
        self.deadline_header = deadline_header
        self.clock = clock
        self.connect_timeout = connect_timeout
        self.cookies = cookies


class Trip:
    """One attempt: owns its connection until the response's end, and ends exactly once. One task or thread at a time."""

    __slots__ = (
        "_extra", "_token", "again", "attempt", "beaten", "call", "connect_s", "connection", "link", "out", "pools",
        "resent", "route", "settled", "silent", "watch",
    )  # fmt: skip

    def __init__(self, settled: Settled, route: Route, attempt: Attempt, link: Link, pools: Pools) -> None:
        self.settled = settled
        self.route = route
        self.out = route.out
        self.call = route.call
        self.attempt = attempt
        self.link = link
        self.pools = pools
        self.again = self.beaten = False
        self.connection: Connection | None = None
        self.watch: Watch | None = None
        self.connect_s: float | None = None
        self.resent = False
        self.silent = False
        attempt.whole = self.out.whole
        self._extra: dict[str, str] = {} if attempt.number == 1 else {ATTEMPT.decode(): str(attempt.number)}
        if load_format := wanted(attempt.state.endpoint):
            self._extra[REQUEST] = load_format
        self._token = route.observer.attempt_started(route.call, attempt, self._extra)

    # ------------------------------------------------------------------------------------------ sending

    def request(self) -> Any:
        """The request as it goes to this endpoint, for httpcore."""
        core, link, out = self.settled.library.core, self.link, self.out
        headers = out.headers
        if self.settled.deadline_header is not None and self.call.deadline != math.inf:
            left = max(0.0, self.call.time_left(self.settled.clock()))
            self._extra[self.settled.deadline_header] = str(int(left * 1_000))
        replaced = link.overridden
        if self._extra:
            replaced = replaced.union(name.lower().encode() for name in self._extra)
        if replaced:
            headers = [header for header in headers if header[0].lower() not in replaced]
        extra = [(name.encode(), value.encode()) for name, value in self._extra.items()]
        origin = link.origin
        return core.Request(
            out.method,
            core.URL(scheme=origin.scheme, host=origin.host, port=origin.port, target=self._target()),
            headers=[*link.headers, *headers, *extra],
            content=Sending(out.body, self.attempt, self.settled.clock),
            extensions=out.extensions,
        )

    def _target(self) -> bytes:
        return self.out.path if self.route.pin else self.link.target(self.out.path)

    def connected(self, seconds: float) -> None:
        """A new connection took so long: the handshake of TCP is one round trip, that of TLS 1.3 another."""
        self.connect_s = seconds
        learn_round_trip(self.attempt.state, seconds / (2 if self.link.origin.scheme == b"https" else 1))

    def connect_timeout(self) -> float | None:
        """Seconds for one connect: short while another endpoint could be tried instead, never beyond the deadline."""
        call = self.call
        limit: float | None = self.out.timeouts.get("connect")
        if len(call.history) < call.attempts and len(call.pool.snapshot.routable) > len(call.history):
            limit = min(self.settled.connect_timeout, math.inf if limit is None else limit)
        return self._clipped(limit)

    def clipped(self, name: str) -> float | None:
        """A timeout of the caller's, or what is left until the deadline if that is less."""
        return self._clipped(self.out.timeouts.get(name))

    def _clipped(self, limit: float | None) -> float | None:
        if self.call.deadline == math.inf:
            return limit
        left = max(0.0, self.call.time_left(self.settled.clock()))
        return left if limit is None else min(left, limit)

    def use(self, connection: Connection) -> None:
        """Send by this connection, until the deadline at the latest, and no longer than its silence is normal."""
        self.connection = connection
        call, rules = self.call, self.call.pool.rules.watchdog
        self.attempt.awaited(self.settled.clock())
        until = None if call.deadline == math.inf else time.monotonic() + call.time_left(self.settled.clock())
        if rules.enabled:
            connection.wire.begin(until, rules.first_floor_s, self._patience)
        else:
            connection.wire.begin(until)
        if len(call.history) > 1 and overtaken(call, self.attempt):
            self.lose()
        if self.attempt.outcome is not None:  # it lost a race while it was connecting
            self.drop()
            raise self.settled.library.core.ConnectError("the call went on elsewhere")

    def _patience(self) -> float:
        """Seconds that the endpoint may still be silent; none left means that this attempt is over."""
        call, attempt = self.call, self.attempt
        usual = call.patience(attempt) if attempt.first is None else call.gap_patience(attempt)
        left = usual - (self.settled.clock() - attempt.last)
        self.silent = left <= 0
        return min(left, ASK_AGAIN_S)

    def may_resend(self, error: Exception) -> bool:
        """True if a kept-alive connection died without a word: the server had closed it while the request was on its way.

        Once per attempt, on a new connection to the same endpoint. The attempt stays SENT, so a request that kills its
        server meets the same bound as any other.
        """
        connection, body = self.connection, self.out.body
        if connection is None or self.resent or not connection.reused or connection.wire.heard:
            return False
        library = self.settled.library
        lost = library.is_core(error) and not library.is_timeout(error)
        self.resent = lost and (body.replayable or not body.started)
        return self.resent

    # ------------------------------------------------------------------------------------------ ending

    def end(
        self, outcome: Outcome, reason: str = "", *, retry_after: float | None = None, answered: bool = False
    ) -> bool:
        """End the attempt; True if another one is due. Idempotent. Leaves the connection alone."""
        attempt, now = self.attempt, self.settled.clock()
        if attempt.outcome is not None:
            return False
        seam = self.route.seam
        resumable = seam is not None and attempt.first is not None and outcome.retryable and seam.can_resume
        again = False
        if outcome is Outcome.SUCCESS and attempt.first is None and attempt.whole:
            attempt.succeed(now)
        elif self.silent and outcome is Outcome.TIMED_OUT:
            again = self.call.stalled(attempt, now, resumable=resumable)
        else:
            again = self.call.finish(
                attempt,
                outcome,
                now,
                retry_after=retry_after,
                reason=reason,
                answered=answered,
                resumable=resumable,
            )
        self.again = again
        self.route.observer.attempt_ended(self._token, self.call, attempt)
        if self.route.asked is not None:
            self.route.asked.tell(attempt)
        if not again and not self.call.is_live:
            self.route.conclude(now)
        return again

    def failed(self, error: Exception) -> bool:
        """End the attempt by an exception; True if another one is due."""
        library = self.settled.library
        name = type(error).__name__
        if not library.is_core(error) or isinstance(error, library.core.PoolTimeout):
            return self.end(Outcome.CANCELLED, name)  # the caller's body, or this process's own limit
        if isinstance(error, library.core.LocalProtocolError):
            return self.end(Outcome.REJECTED, name)
        if "certificate" in str(error):
            self.attempt.misfit = True
        return self.end(Outcome.TIMED_OUT if library.is_timeout(error) else Outcome.FAILED, name)

    def answered(self, head: Head, body: bytes) -> bool:
        """End the attempt by an error status; True if another one is due."""
        claimed = head.status == 404 and self._claimed()
        found = judge(self.link.endpoint.engine, head.status, body, retry_after=head.pause(), claimed=claimed)
        reason = f"{head.status} {found.reason}".rstrip()
        return self.end(found.outcome, reason, retry_after=found.retry_after, answered=True)

    def failed_inside(self, error: StreamFailed) -> bool:
        """End the attempt by an error event in its stream; True if another one is due."""
        found = judge(self.link.endpoint.engine, error.code or 500, str(error).encode())
        return self.end(found.outcome, f"error event: {error}"[:200], answered=True)

    def _claimed(self) -> bool:
        """True if the registry says that this endpoint has the model that the body names."""
        endpoint, prompt = self.link.endpoint, self.route.read()
        return prompt is not None and prompt.model in (endpoint.model, *endpoint.adapters)

    def look_inside(self, head: Head, first: bytes | None, *, whole: bool) -> Exception | None:
        """Judge what is here before it is handed out: the first bytes, or all. The failure found in it, if any.

        With `again` set, the call goes on elsewhere. Otherwise the caller gets the endpoint's own words.
        """
        self.watch = Watch(self.out.path, head.content_type)
        try:
            if first:
                self.watch.add(first)
            if whole and not self.watch.complete:
                raise StreamFailed("it ended without its end marker", b"", 0)
        except StreamFailed as failure:
            self.again = self.failed_inside(failure)
            return self.interruption(failure)
        if not whole or self.route.asked is not None:
            self.attempt.first_token(self.settled.clock())
        rules = self.call.pool.rules.watchdog
        if self.connection is not None:
            self.connection.wire.quiet = rules.gap_floor_s if rules.enabled else math.inf
        self.route.began(self, head)
        if self.route.asked is not None:
            self.route.asked.began(self.attempt, head.content_type, first)
        if head.load:
            learn_header(self.attempt.state, head.load, self.call.pool.mean_tokens, self.settled.clock())
        if whole:
            self.end(Outcome.SUCCESS)
        return None

    def gathers(self, head: Head, first: bytes | None) -> bool:
        """True if more of an answer in one piece is waited for before it is handed out: until then it can be repeated."""
        return self.out.whole and first is not None and len(first) < head.length <= MAX_GATHERED

    def release(self) -> None:
        """The response was read to its end: the connection may serve again."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.wire.patience = None
            self.pools.give_back(connection)
        self.link.gate.leave(self)

    def drop(self) -> None:
        """Hang up. Idempotent."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.wire.close()
        self.link.gate.leave(self)

    @property
    def may_hedge(self) -> bool:
        """True if a second attempt may start beside this one."""
        call = self.call
        wanted = call.hedging.hedge or call.hedging.reroute
        return wanted and call.replayable and self.out.body.shared and len(call.history) < call.attempts

    def lose(self) -> None:
        """Another attempt of this call answered first: hang up, from any thread, and teach nothing."""
        attempt, self.beaten = self.attempt, True
        if attempt.first is None and attempt.number < len(self.call.history) and attempt.outcome is None:
            self.call.pool.stalled(attempt, self.settled.clock(), outpaced=True)
        self.end(Outcome.CANCELLED, "another attempt was quicker")
        connection = self.connection
        if connection is not None:
            connection.wire.abort()

    @property
    def lost(self) -> bool:
        """True if it ended so that another attempt may do better."""
        outcome = self.attempt.outcome
        return self.beaten or (outcome is not None and outcome.retryable)

    def cancelled(self, reason: str = "closed early") -> None:
        """The caller lost interest: hang up, and teach nothing."""
        self.drop()
        self.end(Outcome.CANCELLED, reason)

    # ------------------------------------------------------------------------------------------ answering

    def error(self, error: Exception) -> Exception:
        """What the caller sees of an exception that ended the call before any byte was delivered."""
        library, call = self.settled.library, self.call
        if library.is_timeout(error) and call.time_left(self.settled.clock()) <= 0:
            seen: Exception = library.deadline_exceeded(self._late())
        elif library.is_core(error):
            seen = library.translated(error, call)
        else:
            return error
        seen.__cause__ = error
        return seen

    def interruption(self, error: Exception) -> Exception:
        """What the caller sees of a stream that broke after its first byte."""
        library, call, watch = self.settled.library, self.call, self.watch
        late = library.is_timeout(error)
        if late and call.time_left(self.settled.clock()) <= 0:
            return library.deadline_exceeded(self._late())
        if not (isinstance(error, StreamFailed) or library.is_core(error)):
            return error
        if watch is None:  # the body of an error status
            return self.error(error)
        endpoint = self.link.endpoint.id
        why = str(error) or type(error).__name__
        kind = library.stream_stalled if late else library.stream_interrupted
        return noted(
            kind(
                f"the stream from {endpoint} was cut after {watch.bytes} bytes: {why}",
                endpoint=endpoint,
                bytes_received=watch.bytes,
                events_received=watch.events,
                partial_text=watch.text(),
            ),
            call,
        )

    def _late(self) -> str:
        call = self.call
        return f"deadline exceeded after {self.settled.clock() - call.started:.3f} s ({call.story()})"

    def respond(self, head: Head, extensions: dict[str, Any], stream: Any) -> Any:
        """The response for the caller, of its own library's class."""
        headers = head.headers
        if head.status >= 400:
            headers = [header for header in headers if header[0].lower() != SHOULD_RETRY]
            headers.append((SHOULD_RETRY, b"false"))  # the SDKs obey it: their retries would triple ours
        elif head.location is not None and 300 <= head.status < 400:
            headers = [self._relocated(header) for header in headers]
        return self.settled.library.client.Response(
            status_code=head.status,
            headers=headers,
            stream=stream,
            extensions={**extensions, NAME: self.record()},
        )

    def _relocated(self, header: Header) -> Header:
        """A redirect that its follower will take to the right place: a fragment, which never leaves the client, says
        whether the new URL is this endpoint's own or leaves the router."""
        if header[0].lower() != b"location":
            return header
        client, link, origin = self.settled.library.client, self.link, self.link.origin
        target = self._target()
        path = target if target.startswith(b"/") else b"/"
        try:
            here = client.URL(scheme=origin.scheme.decode(), host=origin.host.decode(), port=origin.port, raw_path=path)
            url = here.join(header[1].decode("utf-8", "replace"))
        except Exception:  # a malformed Location is the caller's library's to complain about
            return header
        if not link.is_self(url):
            return header[0], str(url.copy_with(fragment=LEAVE)).encode()
        path = url.raw_path
        if path.startswith(b"//"):  # which alone would be a host
            asked = self.out.url
            path = str(client.URL(scheme=asked.scheme, host=asked.host, port=asked.port, raw_path=path)).encode()
        return header[0], path + f"#{STAY}{quote(link.endpoint.id, safe='')}".encode()

    def record(self) -> dict[str, Any]:
        """The decision record of the call, as far as it went."""
        call, attempt = self.call, self.attempt
        return {
            "pool": call.pool.name,
            "endpoint": attempt.endpoint.id,
            "policy": call.pool.rules.policy,
            "reason": _reason(call),
            "attempts": [
                {"endpoint": a.state.id, "outcome": a.outcome.label if a.outcome else "live", "reason": a.reason}
                for a in call.history
            ],
            "timings": {
                "waited_s": attempt.started - call.started,
                "connect_s": self.connect_s,
                "first_byte_s": None if attempt.first is None else attempt.first - call.started,
            },
        }


def _reason(call: Call) -> str:
    if len(call.history) > 1:
        return f"retry: {call.history[-2].state.id} {call.history[-2].reason}"
    return f"first choice of {call.pool.rules.policy}"
