"""Agents in a thread of the test, and routers that ask them."""

from __future__ import annotations

import asyncio
import select
import threading
import time
from typing import TYPE_CHECKING, Any, Self

from gpuroute.agent.answers import Answers
from gpuroute.agent.desk import Desk
from gpuroute.agent.server import UdpServer, open_socket
from gpuroute.core.endpoint import Endpoint
from gpuroute.router import Router
from gpuroute.transports.asking import Asker, asker_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpuroute.core.call import Call
    from gpuroute.transports.ask_lines import Line

KEY = "secret-of-the-test"


def met(answers: Answers) -> Answers:
    """An agent that has heard something: what was said a second before its first message its predecessor may have heard
    as well, so a first take that a busy machine holds up would count for nothing."""
    answers._replays.fresh(0, 0, int(time.time() * 1000))
    return answers


def hear(line: Line) -> None:
    """Hand over what has arrived at a line that nobody waits on."""
    for sock in line.sockets.values():
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        if poll.poll(0):
            line.drain(sock.recvfrom, poll.poll)


class AgentThread:
    """An agent of these desks on a loopback port, on a loop of its own. `lose(data)` True: that message is lost."""

    def __init__(
        self, desks: Sequence[Desk], key: str = KEY, lose: Callable[[bytes], bool] = lambda _: False, port: int = 0
    ) -> None:
        self.desks = desks
        self.answers = met(Answers(desks, [key.encode()] if key else []))
        self._lose = lose
        self._port = port
        self.port = 0
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        answer = self.answers.answer
        self.answers.answer = lambda data, *rest: b"" if self._lose(data) else answer(data, *rest)
        sock = open_socket("127.0.0.1", self._port, authenticated=True)
        server = UdpServer(self._loop, sock, self.answers)
        self.port = server.port
        self._started.set()
        await self._stop.wait()
        server.close()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def endpoints(self, url: str = "http://127.0.0.1:1") -> list[Endpoint]:
        return [
            Endpoint(desk.id, url, agent=f"udp://127.0.0.1:{self.port}/{number}")
            for number, desk in enumerate(self.desks)
        ]


def desks(count: int = 4) -> list[Desk]:
    return [Desk(f"gpu-{number}", epoch=1) for number in range(count)]


def router_of(endpoints: Sequence[Endpoint], **settings: Any) -> tuple[Router, Asker]:
    """A started router over pool `p` and its asker."""
    router = Router(
        endpoints={"p": list(endpoints)}, **{"asks": "on", "agent_key": KEY, "ask_timeout": "60s", **settings}
    )
    router.ready(60)
    asker = asker_of(router)
    assert asker is not None
    return router, asker


def call_of(router: Router, tokens: int = 5_000, ladder: tuple[int, ...] = ()) -> Call:
    return router.call("p", tokens=tokens, ladder=ladder)
