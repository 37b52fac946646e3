"""The sockets that asks leave by and bids come back to: one for each loop, or for each thread that asks just now.

Plain non-blocking sockets with `add_reader` or `poll`: an asyncio DatagramTransport costs half as much again (measured
190 against 250-340 us of CPU for a call with six asks). Nothing here raises: what cannot be sent is "no report".
"""

from __future__ import annotations

import select
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable

    Say = Callable[[bytes, str, str, float, Callable[[bytes], None]], None]

LATE_S = 1.0
"""How long after its call went on a bid is still listened to; nobody waits for it, but it teaches."""

MAX_DATAGRAM = 512
Address = tuple[Any, ...]


RELAY = socket.AF_UNIX
"""The family of places that are not reached by datagrams: their answers come in by a pair of sockets in this process."""


class Place(NamedTuple):
    """Where an agent listens: address family, the address as the system gives it back, and which of its engines.

    Of a gRPC agent: RELAY, and (scheme, target).
    """

    family: int
    address: Address
    engine: int


class Listener(Protocol):
    """Who asked, and takes what comes back."""

    id: int
    started: float

    @property
    def missing(self) -> int:
        """How many have not answered."""

    def step(self, now: float) -> float:
        """Seconds to wait on, 0.0 when the wait is over. Asks again where that is due."""

    def heard(self, data: bytes, source: Address, now: float) -> None:
        """A datagram with this id arrived. Never raises."""


def id_of(data: bytes) -> int:
    """The id in a message's header, 0 if it is too short for one."""
    return int.from_bytes(data[16:24], "big")


class Line:
    """Sockets (one for each address family that is met) and those who wait for answers on them."""

    def __init__(self, say: Say | None = None) -> None:
        self.sockets: dict[int, socket.socket] = {}
        self.listeners: dict[int, Listener] = {}
        self._say = say
        self._inlet: socket.socket | None = None

    def listen(self, listener: Listener) -> None:
        """Hand over what arrives with its id, until LATE_S have passed."""
        now, listeners = time.monotonic(), self.listeners
        while listeners:
            first = next(iter(listeners.values()))
            if now - first.started <= LATE_S:
                break
            del listeners[first.id]
        listeners[listener.id] = listener

    def send(self, data: bytes, place: Place) -> None:
        """One datagram, if the system takes it now. Any thread."""
        sock = self.sockets.get(place.family) or self._open(place.family)
        if sock is None:
            return
        if place.family == RELAY:
            if self._say is not None:
                scheme, target = place.address
                self._say(data, scheme, target, LATE_S, self._relayed)
            return
        try:  # `contextlib.suppress` would cost as much as the rest of this
            sock.sendto(data, place.address)
        except OSError:
            pass

    def _relayed(self, data: bytes) -> None:
        """An answer that came another way. Any thread."""
        inlet = self._inlet
        if inlet is not None:
            with suppress(OSError):
                inlet.send(data)

    def drain(self, sockets: Iterable[socket.socket]) -> None:
        """Hand over all that has arrived."""
        now = time.monotonic()
        for sock in sockets:
            while True:
                try:
                    data, source = sock.recvfrom(MAX_DATAGRAM)
                except BlockingIOError:
                    break
                except ConnectionError:
                    continue  # a closed port somewhere, told by ICMP
                listener = self.listeners.get(id_of(data))
                if listener is not None:
                    listener.heard(data, source, now)
                    self._heard(listener)

    def _open(self, family: int) -> socket.socket | None:
        try:
            if family == RELAY:
                sock, self._inlet = socket.socketpair(RELAY, socket.SOCK_DGRAM)
                self._inlet.setblocking(False)
            else:
                sock = socket.socket(family, socket.SOCK_DGRAM)
        except OSError:
            return None
        sock.setblocking(False)
        self.sockets[family] = sock
        self._opened(sock)
        return sock

    def _opened(self, sock: socket.socket) -> None:
        raise NotImplementedError

    def _heard(self, listener: Listener) -> None:
        """Somebody heard something."""

    def close(self) -> None:
        """Close the sockets. Idempotent."""
        sockets, self.sockets = self.sockets, {}
        for sock in sockets.values():
            sock.close()
        inlet, self._inlet = self._inlet, None
        if inlet is not None:
            inlet.close()

    def __del__(self) -> None:
        self.close()


class ThreadLine(Line):
    """For one thread at a time, which waits itself."""

    def __init__(self, say: Say | None = None) -> None:
        super().__init__(say)
        self._poll = select.poll()

    def _opened(self, sock: socket.socket) -> None:
        self._poll.register(sock, select.POLLIN)

    def wait(self, listener: Listener) -> None:
        """Block for as long as the listener wants to."""
        while (left := listener.step(time.monotonic())) > 0:
            if self._poll.poll(max(1.0, left * 1e3)):
                self.drain(self.sockets.values())


class LoopLine(Line):
    """For the tasks of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, say: Say | None = None) -> None:
        super().__init__(say)
        self._loop = loop
        self._waiting: dict[int, _Wait] = {}

    def _opened(self, sock: socket.socket) -> None:
        self._loop.add_reader(sock, self.drain, (sock,))

    def _heard(self, listener: Listener) -> None:
        if listener.missing < 2:
            wait = self._waiting.get(listener.id)
            if wait is not None:
                wait.look()

    async def wait(self, listener: Listener) -> None:
        """Wait for as long as the listener wants to."""
        wait = self._waiting[listener.id] = _Wait(self._loop, listener)
        wait.look()
        try:
            await wait.over
        finally:
            wait.stop()
            del self._waiting[listener.id]

    def close(self) -> None:
        """Close the sockets. Loop thread, or after the loop's end. Idempotent."""
        if not self._loop.is_closed():
            for sock in self.sockets.values():
                self._loop.remove_reader(sock)
        super().close()


class _Wait:
    """A task that waits for answers: `over` is set when its listener has had enough."""

    __slots__ = ("_listener", "_loop", "_timer", "over")

    def __init__(self, loop: asyncio.AbstractEventLoop, listener: Listener) -> None:
        self._loop = loop
        self._listener = listener
        self._timer: asyncio.TimerHandle | None = None
        self.over: asyncio.Future[None] = loop.create_future()

    def look(self) -> None:
        """Ask the listener how long to wait on."""
        self.stop()
        left = self._listener.step(time.monotonic())
        if left > 0:
            self._timer = self._loop.call_later(left, self.look)
        elif not self.over.done():
            self.over.set_result(None)

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
