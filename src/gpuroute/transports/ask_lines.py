"""The sockets that asks leave by and bids come back to: one for each loop, or for each thread that asks just now.

Plain non-blocking sockets with `add_reader` or `poll`: an asyncio DatagramTransport costs half as much again (measured
190 against 250-340 us of CPU for a call with six asks). Nothing here raises: what cannot be sent is "no report".
"""

from __future__ import annotations

import select
import socket
import struct
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Sequence

    Receive = Callable[[int], tuple[bytes, Any]]
    Sender = Callable[[bytes, Any], object]
    Say = Callable[[bytes, str, str, float, Callable[[bytes], None]], None]

LATE_S = 1.0
"""How long after its call went on a bid is still listened to; nobody waits for it, but it teaches."""

MAX_DATAGRAM = 512
BURST = 64  # datagrams in a row, before the loop may see to something else
TICK = struct.pack("ll", 0, 1_000)  # a timeout of the least that the system's clock ticks by: 1 to 10 ms
ID = slice(16, 24)  # of a message: the id of its call
Address = tuple[Any, ...]
Origin = tuple[int, int, Address | None]
"""Of a bid: the identity and the engine number in it, and where it came from (None: by RELAY)."""

Heard = tuple[bytes, Address | None, float]
"""A message, where it came from, and when."""


RELAY = socket.AF_UNIX
"""The family of places that are not reached by datagrams: their answers come in by a pair of sockets in this process."""


class Place(NamedTuple):
    """Where an agent listens: address family, the address as the system gives it back, which of its engines, the
    addressee of what it is told, and what tells its bids from others.

    Of a gRPC agent: RELAY, and (scheme, target).
    """

    family: int
    address: Address
    engine: int
    to: int
    origin: Origin


class Listener(Protocol):
    """Who asked, and takes what comes back. `key`: the id in its messages, as it is in them; `unread`: what arrived with
    that id; `missing`: messages that it waits for; `patient`: a few milliseconds more do not matter if they do not come;
    `due`: its waiting task."""

    key: bytes
    unread: list[Heard]
    missing: int
    patient: bool
    started: float
    due: asyncio.Future[None] | None

    def step(self, now: float) -> float:
        """Seconds to wait on, 0.0 when the wait is over. Asks again where that is due."""

    def heard(self) -> None:
        """More is in `unread`. Wakes the task if it is time to `step`. Never raises."""


class Line:
    """Sockets (one for each address family that is met) and those who wait for answers on them."""

    def __init__(self, say: Say | None = None) -> None:
        self.sockets: dict[int, socket.socket] = {}
        self.listeners: dict[bytes, Listener] = {}
        self._senders: dict[int, Sender] = {}
        self._say = say
        self._inlet: socket.socket | None = None

    def listen(self, listener: Listener) -> None:
        """Hand over what arrives with its id, until LATE_S have passed or it is told that nothing more will."""
        listeners = self.listeners
        while listeners:
            key, first = next(iter(listeners.items()))
            if listener.started - first.started <= LATE_S:
                break
            del listeners[key]
        listeners[listener.key] = listener

    def send(self, data: bytes, place: Place) -> None:
        """One datagram, if the system takes it now. Any thread."""
        family, address, _, _, _ = place
        try:  # `contextlib.suppress` would cost as much as the rest of this
            (self._senders.get(family) or self._open(family))(data, address)
        except OSError:
            pass

    def send_all(self, asked: Iterable[tuple[Any, Any, Place]], message: Callable[[int], bytes]) -> None:
        """`send` to each of these places the `message` to that engine of its agent."""
        senders, last, data = self._senders, -1, b""
        for _, _, (family, address, engine, _, _) in asked:
            if engine != last:
                last, data = engine, message(engine)
            try:
                (senders.get(family) or self._open(family))(data, address)
            except OSError:
                pass

    def _pass_on(self, data: bytes, address: Address) -> None:
        """Send what is no datagram."""
        if self._say is not None:
            scheme, target = address
            self._say(data, scheme, target, LATE_S, self._relayed)

    def _relayed(self, data: bytes) -> None:
        """An answer that came another way. Any thread."""
        inlet = self._inlet
        if inlet is not None:
            with suppress(OSError):
                inlet.send(data)

    def drain(self, receive: Receive, more: Callable[[int], Sequence[object]]) -> None:
        """Hand over what has arrived at a socket. To poll costs a fifth of being told by an exception that nothing is
        there."""
        listeners, clock = self.listeners, time.monotonic
        heard: set[Listener] = set()
        for _ in range(BURST):
            try:
                data, source = receive(MAX_DATAGRAM)
            except OSError:
                data = b""  # a closed port somewhere, told by ICMP
            listener = listeners.get(data[ID])
            if listener is not None:
                listener.unread.append((data, source, clock()))
                heard.add(listener)
            if not more(0):
                break
        for listener in heard:
            listener.heard()

    def _open(self, family: int) -> Sender:
        try:
            if family == RELAY:
                sock, self._inlet = socket.socketpair(RELAY, socket.SOCK_DGRAM)
                self._inlet.setblocking(False)
            else:
                sock = socket.socket(family, socket.SOCK_DGRAM)
        except OSError:
            return _nowhere
        sock.setblocking(False)
        self._opened(sock)
        self.sockets[family] = sock
        sender = self._senders[family] = self._pass_on if family == RELAY else sock.sendto
        return sender

    def _opened(self, sock: socket.socket) -> None:
        """There is one more socket."""

    def abandon(self) -> None:
        """Know of no sockets: those that there are belong to somebody else."""
        self.sockets, self._senders = {}, {}

    def close(self) -> None:
        """Close the sockets. Idempotent."""
        sockets = self.sockets
        self.abandon()
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
        self._by_fd: dict[int, Receive] = {}
        self._only: Receive | None = None  # if there is just one socket

    def _opened(self, sock: socket.socket) -> None:
        self._by_fd[sock.fileno()] = sock.recvfrom
        self._poll.register(sock, select.POLLIN)
        self._only = None
        with suppress(OSError):  # where there are no such timeouts, sockets are polled
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                sock.setsockopt(socket.SOL_SOCKET, option, TICK)
            sock.setblocking(True)
            self._only = None if self.sockets else sock.recvfrom

    def wait(self, listener: Listener) -> None:
        """Block for as long as the listener wants to; a tick of the system's clock longer if it is patient."""
        poll, clock = self._poll.poll, time.monotonic
        heard: set[Listener] = set()
        while (left := listener.step(clock())) > 0:
            if listener.patient and self._only is not None:
                self._gather(self._only, listener.missing, listener, heard)
            else:
                for number, _ in poll(left * 1e3):
                    self._gather(self._by_fd[number], 1, listener, heard)
        for other in heard:
            other.heard()

    def _gather(self, receive: Receive, count: int, listener: Listener, heard: set[Listener]) -> None:
        """Take so many datagrams, each of which comes within a tick: half the system calls of polling, and none of its
        precise timers, which cost as much as a datagram in a virtual machine. `heard`: who else got one."""
        clock, key, unread = time.monotonic, listener.key, listener.unread
        for _ in range(count):
            try:
                data, source = receive(MAX_DATAGRAM)
            except OSError:  # nothing came, or a closed port somewhere, told by ICMP
                return
            if data[ID] == key:
                unread.append((data, source, clock()))
            elif (other := self.listeners.get(data[ID])) is not None:
                other.unread.append((data, source, clock()))
                heard.add(other)

    def close(self) -> None:
        """Close the sockets. Idempotent."""
        super().close()
        for number in self._by_fd:
            self._poll.unregister(number)
        self._by_fd.clear()


class LoopLine(Line):
    """For the tasks of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, say: Say | None = None) -> None:
        super().__init__(say)
        self._loop = loop

    def _opened(self, sock: socket.socket) -> None:
        more = select.poll()
        more.register(sock, select.POLLIN)
        self._loop.add_reader(sock, self.drain, sock.recvfrom, more.poll)

    async def wait(self, listener: Listener) -> None:
        """Wait for as long as the listener wants to."""
        loop = self._loop
        while (left := listener.step(time.monotonic())) > 0:
            due = listener.due = loop.create_future()
            timer = loop.call_later(left, wake, due)
            try:
                await due
            finally:
                timer.cancel()
                listener.due = None

    def close(self) -> None:
        """Close the sockets. Loop thread, or after the loop's end. Idempotent."""
        if not self._loop.is_closed():
            for sock in self.sockets.values():
                self._loop.remove_reader(sock)
        super().close()


def _nowhere(data: bytes, address: Address) -> None:
    """There is no socket of that kind."""


def wake(due: asyncio.Future[None]) -> None:
    """Go on with the task that waits."""
    if not due.done():
        due.set_result(None)
