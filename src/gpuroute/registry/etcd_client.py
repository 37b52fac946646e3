"""What gpuroute needs of etcd's v3 API, over grpcio: a few unary calls, and one kind of stream.

One channel to one member at a time; an error makes the caller `rotate()` to the next. Nothing here retries but the
login: etcd's tokens expire, so a call that was refused is repeated once with a fresh one. That is also how the first
token is had, which lets one configuration serve an etcd before and after its authentication is switched on.

Measured on grpcio 1.60 to 1.85: only `http2.ping_timeout_ms` bounds the wait for a ping's answer
(`keepalive_timeout_ms` leaves it at 60 s), and `min_reconnect_backoff_ms` is in truth the connect timeout.
"""

from __future__ import annotations

from inspect import unwrap
from typing import TYPE_CHECKING, Any

import grpc
import tenacity

from gpuroute.core.wire import Message, encode
from gpuroute.errors import RegistryError
from gpuroute.forms import read_pem
from gpuroute.registry.etcd_watch import KeyValue, WatchStream

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from gpuroute.registry.etcd_config import EtcdConfig

    Metadata = tuple[tuple[str, str], ...]

PAGE = 1_000  # keys per request: a long list over a thin line must not meet the timeout of one call
CONNECT_TIMEOUT_S = 1.0
_EQUAL, _CREATE, _LEASE = 0, 1, 4  # Compare.result, Compare.target
_REFUSALS = frozenset(
    {
        grpc.StatusCode.UNAUTHENTICATED,  # the token is invalid or expired
        grpc.StatusCode.INVALID_ARGUMENT,  # there was no token, or the users changed since it was made
        grpc.StatusCode.PERMISSION_DENIED,  # with a client certificate and no token: its CN is not allowed to
        grpc.StatusCode.FAILED_PRECONDITION,
    }
)


class EtcdError(RegistryError):
    """etcd could not be asked, or refused. `refused`: it answers, but not to us, so haste is pointless."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class EtcdClient:
    """A connection to whichever member answers. One thread at a time, but for `close`."""

    def __init__(self, config: EtcdConfig) -> None:
        self.config = config
        self._member = int(config.random() * len(config.members))
        self._token = ""
        self._channel: grpc.Channel | None = None
        self._closed = False

    @property
    def member(self) -> str:
        """The member in use, `host:port`."""
        return self.config.members[self._member]

    def rotate(self) -> None:
        """Drop the connection; the next call goes to the next member, with certificates read afresh."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        self._member = (self._member + 1) % len(self.config.members)

    def close(self) -> None:
        """End every call in flight, and refuse new ones. Idempotent; any thread."""
        self._closed = True
        channel = self._channel
        if channel is not None:
            channel.close()

    # ------------------------------------------------------------------------------------------ calls

    def list(self, prefix: str) -> tuple[int, list[KeyValue]]:
        """Every key under a prefix as of one revision, and that revision."""
        start, end, revision = prefix.encode(), _after(prefix), 0
        found: list[KeyValue] = []
        while True:
            request = encode((1, start), (2, end), (3, PAGE), (4, revision))
            answer = self._unary("KV/Range", request)
            revision = revision or answer.message(1).integer(3)
            page = answer.messages(2)
            found += map(KeyValue.read, page)
            if not answer.integer(3):
                return revision, found
            start = page[-1].data(1) + b"\0"

    def read(self, key: str) -> KeyValue | None:
        """One key, or None if it is absent."""
        kvs = self._unary("KV/Range", encode((1, key))).messages(2)
        return KeyValue.read(kvs[0]) if kvs else None

    def put(self, key: str, value: bytes, lease: int = 0) -> None:
        """Write one key; with a lease it disappears when the lease ends. EtcdError if the lease has ended."""
        self._unary("KV/Put", encode((1, key), (2, value), (3, lease)))

    def put_own(self, key: str, value: bytes, lease: int) -> bool:
        """Write one key if it exists under this lease; else change nothing and return False."""
        compare = encode((1, _EQUAL), (2, _LEASE), (3, key), (8, lease))
        put = encode((2, encode((1, key), (2, value), (3, lease))))
        return bool(self._unary("KV/Txn", encode((1, compare), (2, put))).integer(2))

    def create(self, key: str, value: bytes, lease: int, *, instead_of: str | None = None) -> bool:
        """Write one key if it does not exist, and delete another in its stead; else change nothing and return False."""
        compare = encode((1, _EQUAL), (2, _CREATE), (3, key), (5, 0))
        put = encode((2, encode((1, key), (2, value), (3, lease))))
        delete = encode((3, encode((1, instead_of)))) if instead_of else None
        return bool(self._unary("KV/Txn", encode((1, compare), (2, put), (2, delete))).integer(2))

    def count(self, prefixes: Sequence[str], own: Sequence[str] = (), lease: int = 0) -> tuple[Sequence[int], bool]:
        """How many keys there are under each prefix, and whether all keys `own` are there under this lease."""
        compares = [(1, encode((1, _EQUAL), (2, _LEASE), (3, key), (8, lease))) for key in own]
        sizes = [encode((1, encode((1, prefix), (2, _after(prefix)), (9, True)))) for prefix in prefixes]
        either = [(number, size) for number in (2, 3) for size in sizes]
        answer = self._unary("KV/Txn", encode(*compares, *either))
        return [part.message(1).integer(4) for part in answer.messages(3)], bool(answer.integer(2))

    def grant(self, ttl: float) -> int:
        """A new lease of `ttl` seconds (whole ones, at least 1)."""
        return self._unary("Lease/LeaseGrant", encode((1, max(1, round(ttl))))).integer(2)

    def revoke(self, lease: int) -> None:
        """End a lease; its keys disappear at once."""
        self._unary("Lease/LeaseRevoke", encode((1, lease)))

    def keep_alive(self, lease: int) -> bool:
        """Renew a lease; False if it has ended."""
        call = self._multi("Lease/LeaseKeepAlive")
        request, timeout = encode((1, lease)), self.config.timeout
        answer = self._answer(lambda: next(call(iter([request]), timeout=timeout, metadata=self._metadata())))
        return answer.integer(3) > 0

    def watch(self, prefix: str, revision: int) -> WatchStream:
        """Follow a prefix from a revision on."""
        create = encode((1, prefix), (2, _after(prefix)), (3, revision), (4, True))
        call, metadata = self._multi("Watch/Watch"), self._metadata()
        try:
            return WatchStream(lambda asks: call(asks, metadata=metadata), create, self.config.heartbeat)
        except ValueError as error:
            raise self.error(error) from None

    # --------------------------------------------------------------------------------------- plumbing

    def _unary(self, method: str, request: bytes) -> Message:
        return self._answer(lambda: self._call(method, request, self._metadata()))

    def _call(self, method: str, request: bytes, metadata: Metadata = ()) -> bytes:
        call: Any = self._connected().unary_unary(f"/etcdserverpb.{method}")
        answer: bytes = call(request, timeout=self.config.timeout, metadata=metadata)
        return answer

    def _answer(self, attempt: Callable[[], bytes]) -> Message:
        """The decoded answer; after a refusal, of a second attempt with a fresh token."""
        try:
            return self._attempt(attempt)
        except EtcdError as error:
            if not error.refused or not self.config.user:
                raise
        self._log_in()
        return self._attempt(attempt)

    def _attempt(self, attempt: Callable[[], bytes]) -> Message:
        try:
            return Message(attempt())
        except (grpc.RpcError, ValueError, StopIteration) as error:
            raise self.error(error) from None

    def _log_in(self) -> None:
        # Whoever changes a password in etcd changes the file that it was read from, before or after.
        request = encode((1, self.config.user), (2, self.config.password.latest()))
        self._token = ""  # while authentication is switched off nobody gets one, and an old one is refused
        self._token = self._attempt(lambda: self._call("Auth/Authenticate", request)).text(2)

    def _metadata(self) -> Metadata:
        # hasleader: a member that lost its quorum refuses and ends streams, instead of staying silent.
        return (("hasleader", "true"), *((("token", self._token),) if self._token else ()))

    def _multi(self, method: str) -> Any:
        return self._connected().stream_stream(f"/etcdserverpb.{method}")

    def _connected(self) -> grpc.Channel:
        if self._closed:
            raise EtcdError("closed")
        if self._channel is None:
            try:
                self._channel = _open(self.config, self.member)
            except (OSError, ValueError) as error:
                raise EtcdError(f"etcd {self.member}: {error}") from None
        return self._channel

    def error(self, error: Exception) -> EtcdError:
        """A failure in words, without secrets. ValueError: a closed channel, or bytes that etcd does not send."""
        if not isinstance(error, grpc.RpcError):
            return EtcdError(f"etcd {self.member}: {error or 'no answer'}")
        code, details = error.code(), error.details()
        return EtcdError(f"etcd {self.member}: {code.name}: {details}", refused=code in _REFUSALS)


def _open(config: EtcdConfig, member: str) -> grpc.Channel:
    connect_ms = int(CONNECT_TIMEOUT_S * 1000)
    options = [
        ("grpc.max_receive_message_length", -1),
        ("grpc.keepalive_time_ms", int(config.ping_interval * 1000)),
        ("grpc.http2.ping_timeout_ms", int(config.ping_timeout * 1000)),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.min_reconnect_backoff_ms", connect_ms),
        ("grpc.max_reconnect_backoff_ms", connect_ms),
        ("grpc.enable_http_proxy", int(config.trust_env)),
        # Else gRPC lets channels share connections, and one made after an error would be given the dead one again.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    # What instruments `grpc` may make bare generators of its streams, which a watch could not cancel.
    insecure, secure = unwrap(grpc.insecure_channel), unwrap(grpc.secure_channel)
    if not config.tls:
        return insecure(member, options=options)  # type: ignore[no-any-return]
    ca, key, cert = map(read_pem, (config.ca, config.key, config.cert))
    return secure(member, grpc.ssl_channel_credentials(ca, key, cert), options=options)  # type: ignore[no-any-return]


def _after(prefix: str) -> bytes:
    """The first key after all keys with this prefix."""
    data = prefix.encode()
    return data[:-1] + bytes([data[-1] + 1])  # a prefix ends in "/", never in 0xff


def retrying(stop: threading.Event, on_error: Callable[[EtcdError], None]) -> tenacity.Retrying:
    """Repeats a call until it succeeds, or raises its last EtcdError once `stop` is set. Full jitter."""

    def error_of(state: tenacity.RetryCallState) -> EtcdError:
        error = state.outcome.exception() if state.outcome else None
        return error if isinstance(error, EtcdError) else EtcdError("no answer")

    def pause(state: tenacity.RetryCallState) -> float:
        # A login costs etcd 0.1 s of CPU: hundreds of clients with a wrong password must not be its load.
        longest = 15.0 if error_of(state).refused else 1.0
        return tenacity.wait_random_exponential(multiplier=0.1, max=longest)(state)

    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(EtcdError),
        stop=tenacity.stop_when_event_set(stop),
        wait=pause,
        sleep=tenacity.sleep_using_event(stop),
        before_sleep=lambda state: on_error(error_of(state)),
        reraise=True,
    )
