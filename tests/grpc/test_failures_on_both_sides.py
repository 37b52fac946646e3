"""What a caller learns of a failure is the same on both sides: blocking, by future, by stream, and in asyncio."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from world import Server, method, refused_url, router_of

import gpuroute
import gpuroute.grpc
import gpuroute.grpc.aio
from gpuroute.core.outcome import Outcome
from gpuroute.transports.grpc_status import judge

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.real_time

CODE = grpc.StatusCode
ANY_PORT = re.compile(r":\d+|\d+\.\d+ s")


def told(error: BaseException) -> dict[str, Any]:
    """All that an error says, whichever its class: ports and times aside."""
    ours = {kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "gpuroute.errors"}
    notes = [ANY_PORT.sub("", note) for note in getattr(error, "__notes__", ())]
    found = {"ours": ours, "notes": notes, "retry_after": getattr(error, "retry_after", None)}
    if not isinstance(error, grpc.RpcError):
        return found | {"text": str(error)}
    metadata = [[tuple(pair) for pair in shown or ()] for shown in (error.initial_metadata(), error.trailing_metadata())]
    return found | {"code": error.code(), "details": ANY_PORT.sub("", error.details() or ""), "metadata": metadata}


SYNC: dict[str, Callable[..., Any]] = {
    "blocking": lambda channel, how: channel.unary_unary(method("Echo"))(b"x", **how),
    "future": lambda channel, how: channel.unary_unary(method("Echo")).future(b"x", **how).result(),
    "stream": lambda channel, how: list(channel.unary_stream(method("Count"))(b"1", **how)),
    "requests": lambda channel, how: channel.stream_unary(method("Collect"))(iter([b"x"]), **how),
    "chat": lambda channel, how: list(channel.stream_stream(method("Chat"))(iter([b"x"]), **how)),
}


async def listed(call: Any) -> list[bytes]:
    return [message async for message in call]


AIO: dict[str, Callable[..., Any]] = {
    "blocking": lambda channel, how: channel.unary_unary(method("Echo"))(b"x", **how),
    "future": lambda channel, how: channel.unary_unary(method("Echo"))(b"x", **how),
    "stream": lambda channel, how: listed(channel.unary_stream(method("Count"))(b"1", **how)),
    "requests": lambda channel, how: channel.stream_unary(method("Collect"))([b"x"], **how),
    "chat": lambda channel, how: listed(channel.stream_stream(method("Chat"))([b"x"], **how)),
}


def in_sync(router: gpuroute.Router, kind: str, pool: str, how: dict[str, Any]) -> Any:
    with gpuroute.grpc.channel(router, pool) as channel:
        return SYNC[kind](channel, how)


def in_asyncio(router: gpuroute.Router, kind: str, pool: str, how: dict[str, Any]) -> Any:
    async def run() -> Any:
        async with gpuroute.grpc.aio.channel(router, pool) as channel:
            return await AIO[kind](channel, how)

    return asyncio.run(run())


def closed_router(server: Server) -> gpuroute.Router:
    router = router_of(server.url)
    router.close()
    return router


def failing(server: Server, *codes: grpc.StatusCode, pushback: str = "") -> gpuroute.Router:
    server.service.fail_next = list(codes)
    server.service.trailing = (("grpc-retry-pushback-ms", pushback),) if pushback else ()
    return router_of(server.url)


# How a call fails: the router of it, and what its caller says.
CASES: dict[str, tuple[Callable[[Server], gpuroute.Router], dict[str, Any]]] = {
    "nobody there": (lambda _: router_of(refused_url(), refused_url()), {}),
    "no endpoints": (lambda _: router_of(), {}),
    "no such pool": (lambda server: router_of(server.url), {"pool": "q"}),
    "no time": (lambda server: router_of(server.url), {"timeout": 0}),
    "a bad option": (lambda server: router_of(server.url), {"metadata": (("x-gpuroute-timeout", "soon"),)}),
    "a closed router": (closed_router, {}),
    "told to stop": (lambda server: failing(server, CODE.UNAVAILABLE, pushback="-1"), {}),
    "one attempt": (lambda server: failing(server, CODE.UNAVAILABLE), {"metadata": (("x-gpuroute-attempts", "1"),)}),
    "rejected": (lambda server: failing(server, CODE.PERMISSION_DENIED), {}),
    "its own bug": (lambda server: failing(server, CODE.UNKNOWN), {}),
}


# In asyncio grpcio says INTERNAL, "Internal error from Core", of a stream that its server ends while it is written.
BY_THE_SERVER = {"told to stop", "one attempt", "rejected", "its own bug"}
WRITING = {"requests", "chat"}
PAIRS = [(case, kind) for case in CASES for kind in SYNC if not (case in BY_THE_SERVER and kind in WRITING)]


@pytest.mark.parametrize(("case", "kind"), PAIRS)
def test_a_failure_reads_the_same(server: Server, case: str, kind: str) -> None:
    make, how = CASES[case]
    pool = how.get("pool", "p")
    said = {name: value for name, value in how.items() if name != "pool"}
    both = []
    for run in (in_sync, in_asyncio):
        with pytest.raises((grpc.RpcError, gpuroute.GpurouteError)) as error, make(server) as router:
            run(router, kind, pool, said)
        both.append(told(error.value))
    assert both[0] == both[1]


def test_what_grpcio_says_of_a_write_that_came_too_late_is_nobodys_failure() -> None:
    """It hides the server's own status, which may well have been a rejection."""
    assert judge(CODE.INTERNAL, "Internal error from Core", ()).outcome is Outcome.REJECTED
    assert judge(CODE.INTERNAL, "a bug", ()).outcome is Outcome.FAILED
