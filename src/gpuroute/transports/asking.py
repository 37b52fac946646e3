"""Ask before sending: the few candidates of this very call say how long their queue is and what they have cached.

`ask` goes to the agents beside at most six candidates, `bid` comes back, the cheapest is picked by the cost of the core,
`take` tells its agent at once, so that the next ask already sees this call, and `tell` says at the first token how it
went. One datagram each (layout: `core.asking`). Whatever is lost, late, forged or garbled is "no report": the endpoint
is compared by this process's own memory, it is never excluded and nothing raises.

A call waits `ask_timeout` at most, or until all have answered, for the last as long again as for the others; late bids
still teach. An agent that is silent time and again is asked more and more rarely. Nothing of this happens, and nothing
is paid for it, where no endpoint of the pool has an agent, where the policy does not compare seconds, or where asks are
off.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING

from gpuroute.core.prefix import seed
from gpuroute.core.seconds import Soonest
from gpuroute.core.sources import NEAR_S, worth_asking
from gpuroute.transports.ask_call import RARE, Asking
from gpuroute.transports.ask_lines import LoopLine, ThreadLine
from gpuroute.transports.ask_peers import SCHEME, Peers

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from gpuroute.config import Settings
    from gpuroute.core.call import Call
    from gpuroute.router import Router
    from gpuroute.transports.ask_engines import Engines
    from gpuroute.transports.ask_grpc import Channels
    from gpuroute.transports.ask_lines import Origin
    from gpuroute.transports.ask_peers import Asked

__all__ = ["Asker", "Asking", "asker_of"]

log = logging.getLogger("gpuroute")

AGAIN_S = 0.001
MENTIONED_S = 60.0
MOST_SLOWER = 4.0  # a round trip counts for at most so many usual ones
NOBODY: Mapping[Origin, Asked] = {}


class Counts:
    """What happened to asks, for people. Single stores of ints; close enough under threads."""

    __slots__ = ("again", "answers", "asks", "calls", "garbled", "late", "strangers", "timeouts")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Start again from zero."""
        self.again = self.calls = self.asks = self.answers = self.late = self.timeouts = self.garbled = self.strangers = 0

    def as_dict(self) -> dict[str, int]:
        """All counts by name."""
        return {name: getattr(self, name) for name in self.__slots__}


class Asker:
    """The asks of one router. Safe from any thread and any loop; opens nothing before the first ask."""

    def __init__(self, settings: Settings, clock: Callable[[], float]) -> None:
        self.timeout = settings.ask_timeout
        self.clock = clock
        self.secret = settings.agent_key.reveal().encode() if settings.agent_key else b""
        self.counts = Counts()
        self._mentioned: dict[str, float] = {}
        self.round_trip = NEAR_S / 2
        self.loss = 5 * RARE  # until some 30 calls have shown that it is less
        self._always = settings.asks == "on"
        self._hashes = settings.ask_hashes
        self._forbids = not settings.ask_hashes and settings.source("ask_hashes") != "default"
        self._tenant = seed(f"tenant/{settings.tenant}") if settings.tenant else 0
        self._files = settings.agent_ca, settings.agent_cert, settings.agent_cert_key
        self._channels: Channels | None = None
        self._engines: Engines | None = None
        self.peers = Peers(engines=settings.asks == "engines", doubts=settings.asks != "agents", rests=self._rests)
        self.covers = self.peers.covers
        self._running_loop: Callable[[], asyncio.AbstractEventLoop] | None = None
        self._arrange()

    def _arrange(self) -> None:
        """What a process needs of its own: also run in a forked child."""
        self._lines: deque[ThreadLine] = deque()
        self._loops: dict[asyncio.AbstractEventLoop, LoopLine] = {}

    def after_fork(self) -> None:
        """Sockets of the parent are not the child's."""
        for line in self._loops.values():
            line.abandon()  # sockets of the parent's loop, whose selector must not hear of it
        if self._channels is not None:
            self._channels.abandon()
        self._engines = None
        self.peers.forget()
        self._arrange()

    @property
    def patience(self) -> float:
        """Seconds without an answer after which an ask is sent again, where messages get lost at all: never so early that
        answers are on their way, nor so late that none can come in time."""
        return min(max(AGAIN_S, 3 * self.round_trip), self.timeout / 2)

    def answered(self, count: int, seconds: float, *, late: bool) -> None:
        """So many answers came, that long after they were asked for on average."""
        self.counts.answers += count
        self.counts.late += count if late else 0
        # A few that are very late say little of the others: most of a whole second would end all asking again.
        usual = self.round_trip
        self.round_trip = usual + (1 - 0.95**count) * (min(seconds, MOST_SLOWER * usual) - usual)

    def mention(self, text: str, *about: object) -> None:
        """A line in the log for whoever wonders why asks do nothing, at most once a minute for each kind."""
        now = self.clock()
        if now - self._mentioned.get(text, -math.inf) >= MENTIONED_S:
            self._mentioned[text] = now
            log.warning(text, *about)

    # ------------------------------------------------------------------------------------------ for drivers

    def ask(self, call: Call) -> Asking | None:
        """Ask, and wait (blocking) for answers: `call.ask.bids` has them. None if this call is not asked for."""
        asked = self.worth_asking(call)
        if not asked:
            return None
        line = self._thread_line()
        try:
            asking = Asking(self, call, asked, line)
            asking.send()
            line.wait(asking)
            asking.conclude()
        finally:
            self._lines.append(line)
        return asking

    async def ask_async(self, call: Call) -> Asking | None:
        """Like `ask`, without blocking the event loop."""
        asked = self.worth_asking(call)
        if not asked:
            return None
        line = self._line()
        asking = Asking(self, call, asked, line)
        asking.send()
        await line.wait(asking)
        asking.conclude()
        return asking

    # ------------------------------------------------------------------------------------------ whom, and whether

    def worth_asking(self, call: Call) -> Mapping[Origin, Asked]:
        """The candidates to ask for this call, by where their bids come from; none if asking would not pay."""
        picker = call.pool.snapshot.picker
        if not isinstance(picker, Soonest):
            return NOBODY
        candidates = picker.candidates(call.ask)
        if len(candidates) < 2:
            return NOBODY
        asked = self.peers.answering(candidates, call.tried if call.history else (), self.clock())
        if asked and (self._always or worth_asking(call.ask, [one[0] for one in asked.values()], self.round_trip)):
            return asked
        return NOBODY

    def hashes(self, call: Call) -> tuple[int, ...]:
        """The hashes of the call's prompt that its agents may see: none unless the pool or this process opts in, and
        none if either says no."""
        ladder = call.ask.ladder
        if not ladder or self._forbids:
            return ()
        stated = call.pool.spec.config.options.get("ask_hashes")
        if not (stated if isinstance(stated, bool) else self._hashes):
            return ()
        tenant = self._tenant
        return tuple([rung ^ tenant for rung in ladder]) if tenant else tuple(ladder)

    def _thread_line(self) -> ThreadLine:
        try:
            return self._lines.pop()
        except IndexError:
            return ThreadLine(self._say)

    def _line(self) -> LoopLine:
        if self._running_loop is None:
            from asyncio import get_running_loop  # threads alone need none of it

            self._running_loop = get_running_loop
        loop = self._running_loop()
        line = self._loops.get(loop)
        if line is None:
            for ended in [known for known in tuple(self._loops) if known.is_closed()]:
                self._loops.pop(ended).close()
            line = self._loops[loop] = LoopLine(loop, self._say)
        return line

    def _rests(self, engine: str) -> bool:
        return self._engines is not None and self._engines.rests(engine.removeprefix(f"{SCHEME}:"))

    def _say(self, data: bytes, scheme: str, target: str, timeout: float, deliver: Callable[[bytes], None]) -> None:
        """Send a message that is no datagram."""
        if scheme == SCHEME:
            with _lock:
                if self._engines is None:
                    from gpuroute.transports.ask_engines import Engines

                    self._engines = Engines(self.secret)
            self._engines.say(data, target, deliver)
            return
        with _lock:
            if self._channels is None:
                from gpuroute.transports.ask_grpc import Channels

                self._channels = Channels(*self._files)
        self._channels.say(data, scheme, target, timeout, deliver)


_ASKERS: weakref.WeakKeyDictionary[Router, Asker] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def asker_of(router: Router) -> Asker | None:
    """The one asker of a router, None if asks are off."""
    if router.settings.asks == "off":
        return None
    with _lock:
        asker = _ASKERS.get(router)
        if asker is None:
            asker = _ASKERS[router] = Asker(router.settings, router.clock)
            router.on_fork(asker.after_fork)
        return asker


def _renew_lock() -> None:
    """In a forked child: who held it may have been another thread of the parent."""
    global _lock  # noqa: PLW0603  (the module is its only user)
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)
