"""A watch of etcd as a stream of responses that cannot fall silent unnoticed."""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from gpuroute.core.wire import Message, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PUT = 0  # Event.type


class KeyValue(NamedTuple):
    """One key; `key` is text, with escapes for what is not UTF-8."""

    key: str
    value: bytes
    lease: int

    @classmethod
    def read(cls, message: Message) -> KeyValue:
        return cls(message.text(1), message.data(5), message.integer(6))


class Event(NamedTuple):
    """One change of one key."""

    put: bool
    kv: KeyValue


class WatchResponse(NamedTuple):
    """What one message of a watch says. `compacted`: the events wanted are gone, only a new listing helps."""

    events: list[Event]
    canceled: bool
    compacted: bool
    reason: str

    @classmethod
    def read(cls, data: bytes) -> WatchResponse:
        message = Message(data)
        events = [Event(event.integer(1) == _PUT, KeyValue.read(event.message(2))) for event in message.messages(11)]
        return cls(events, bool(message.integer(4)), message.integer(5) > 0, message.text(6))


class WatchStream:
    """One watch. Iterating yields its responses, and raises RpcError or WireError when it breaks.

    A watch can fall silent for ever with its connection in good health (a member cut off from the others, a proxy in
    between), and silence is also what a quiet fleet sounds like. So it asks for its progress every `heartbeat` seconds,
    and ends itself, `silent`, when two answers are overdue. The asking happens in the thread where gRPC waits for our
    requests.
    """

    def __init__(self, start: Callable[[Iterator[bytes]], Any], create: bytes, heartbeat: float) -> None:
        self.silent = False
        self._heartbeat = heartbeat
        self._wake = threading.Event()
        self._over = False
        self._heard_at = time.monotonic()
        self._wanted_at = math.inf
        self._call = start(self._asks(create))

    def __iter__(self) -> Iterator[WatchResponse]:
        for data in self._call:
            self._heard_at = time.monotonic()
            yield WatchResponse.read(data)

    def ask(self, moment: float) -> None:
        """Have the server answer soon after `moment` (monotonic), so that the reader gets to act then."""
        if moment < self._wanted_at:
            self._wanted_at = moment
            self._wake.set()

    def close(self) -> None:
        """End the stream. Any thread."""
        self._over = True
        self._wake.set()
        self._call.cancel()

    def _asks(self, create: bytes) -> Iterator[bytes]:
        yield encode((1, create))
        while not self._over:
            self._wait(time.monotonic() + self._heartbeat)
            # An `ask` that this line forgets is repeated by the reader when it gets the answer.
            self._wanted_at = math.inf
            if time.monotonic() - self._heard_at > 2 * self._heartbeat:
                self.silent = True
                self._call.cancel()
                return
            yield encode((3, b""))

    def _wait(self, until: float) -> None:
        while not self._over and (left := min(until, self._wanted_at) - time.monotonic()) > 0:
            self._wake.wait(left)
            self._wake.clear()
