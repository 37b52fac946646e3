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
    from collections.abc import Callable

    Say = Callable[[bytes, str, str, float, Callable[[bytes], None]], None]

LATE_S = 1.0
"""How long after its call went on a bid is still listened to; nobody waits for it, but it teaches."""

MAX_DATAGRAM = 512
BURST = 64  # datagrams in a row, before the loop may see to something else
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

    def step(self, now: float) -> float:
        """Seconds to wait on, 0.0 when the wait is over. Asks again where that is due."""

    def heard(self, data: bytes, source: Address, now: float) -> bool:
        """A datagram with this id arrived; True if it is time to `step`. Never raises."""


def id_of(data: bytes) -> int:
    """The id in a message's header, 0 if it is too short for one."""
    return int.from_bytes(data[16:24], "big")


class Line:
    """Sockets (one for each address family that is met) and those who wait for answers on them."""

    def __init__(self, say: Say | None = None) -> None:
        self.sockets: dict[int, socket.socket] = {}
        self.listeners: dict[int, Listener] = {}
        self._poll = select.poll()
        self._by_fd: dict[int, socket.socket] = {}
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

    def drain(self) -> None:
        """Hand over what has arrived. To poll first costs a fifth of being told by an exception that nothing is there."""
        for _ in range(BURST):
            if not self._receive(0):
                return

    def _receive(self, patience_ms: float) -> bool:
        """Wait for so long at most and hand over one datagram of each socket that has any; False if none has."""
        ready = self._poll.poll(patience_ms)
        for number, _ in ready:
            try:
                data, source = self._by_fd[number].recvfrom(MAX_DATAGRAM)
            except OSError:
                continue  # a closed port somewhere, told by ICMP
            listener = self.listeners.get(id_of(data))
            if listener is not None and listener.heard(data, source, time.monotonic()):
                self._is_due(listener)
        return bool(ready)

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
        self._by_fd[sock.fileno()] = sock
        self._poll.register(sock, select.POLLIN)
        self._opened(sock)
        self.sockets[family] = sock
        return sock

    def _opened(self, sock: socket.socket) -> None:
        """There is one more socket."""

    def _is_due(self, listener: Listener) -> None:
        """Its next step is due."""

    def close(self) -> None:
        """Close the sockets. Idempotent."""
        sockets, self.sockets = self.sockets, {}
        for number in self._by_fd:
            self._poll.unregister(number)
        self._by_fd.clear()
        for sock in sockets.values():
            sock.close()
        inlet, self._inlet = self._inlet, None
        if inlet is not None:
            inlet.close()

    def __del__(self) -> None:
        self.close()


class ThreadLine(Line):
    """For one thread at a time, which waits itself."""

    def wait(self, listener: Listener) -> None:
        """Block for as long as the listener wants to."""
        while (left := listener.step(time.monotonic())) > 0:
            self._receive(max(1.0, left * 1e3))


class LoopLine(Line):
    """For the tasks of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, say: Say | None = None) -> None:
        super().__init__(say)
        self._loop = loop
        self._waiting: dict[int, asyncio.Future[None]] = {}

    def _opened(self, sock: socket.socket) -> None:
        self._loop.add_reader(sock, self.drain)

    def _is_due(self, listener: Listener) -> None:
        due = self._waiting.get(listener.id)
        if due is not None and not due.done():
            due.set_result(None)

    async def wait(self, listener: Listener) -> None:
        """Wait for as long as the listener wants to."""
        loop, waiting = self._loop, self._waiting
        while (left := listener.step(time.monotonic())) > 0:
            due = waiting[listener.id] = loop.create_future()
            timer = loop.call_later(left, self._is_due, listener)
            try:
                await due
            finally:
                timer.cancel()
                del waiting[listener.id]

    def close(self) -> None:
        """Close the sockets. Loop thread, or after the loop's end. Idempotent."""
        if not self._loop.is_closed():
            for sock in self.sockets.values():
                self._loop.remove_reader(sock)
        super().close()
