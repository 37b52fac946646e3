"""Cancellation at every await, interrupts at every line: afterwards nothing is in flight and no place is taken."""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import random
import re
import threading
from typing import TYPE_CHECKING, Any

import pytest
from http_caller import endpoint, in_flight, router_for
from http_stub import Exchange, hang, ok, reset, sse, status
from stopwatch import Stopwatch

from gpuroute import Endpoint
from gpuroute.transports import gates, http, streams, wires

if TYPE_CHECKING:
    from collections.abc import Callable

    from http_caller import Caller
    from http_stub import Stage

    from gpuroute import Router

    Make = Callable[..., Caller]

pytestmark = pytest.mark.real_time

NAMES = ("httpx2", "httpx")


def residue(router: Router, transport: Any) -> dict[str, Any]:
    """All that a call may leave behind."""
    pools = [transport._all] if hasattr(transport, "_all") else [pools for pools, _ in transport._by_loop.values()]
    return {
        "in flight": in_flight(router),
        "places": sum(len(link.gate.holders) for each in pools for link in each._links.values()),
    }


CLEAN = {"in flight": 0, "places": 0}


async def moody(exchange: Exchange) -> None:
    """An endpoint that does a bit of everything."""
    await asyncio.sleep(random.random() * 0.004)
    mood = random.choice(
        [ok, status(503, b"overloaded", retry_after="0.001"), reset, sse("a", "b", "c", pause=0.001), ok, ok]
    )
    await mood(exchange)


async def one_call(client: Any) -> None:
    request = client.build_request("POST", "http://llama/v1/chat/completions", content=b"x" * 1000)
    response = await client.send(request, stream=True)
    async for _ in response.aiter_raw():
        pass
    await response.aclose()


@pytest.mark.parametrize("name", NAMES)
def test_l1_random_cancellations_leave_nothing(stubs: Stage, name: str) -> None:
    servers = stubs("a", "b", "c", behave=moody)
    library = importlib.import_module(f"gpuroute.{name}")
    router = router_for(
        [*map(endpoint, servers), Endpoint("nowhere", "http://127.0.0.1:9")],
        policy="p2c",
        random=random.random,
        retry_floor="1000/s",
        breaker_open="0.01s",
    )

    async def scenario() -> None:
        import httpx as legacy
        import httpx2 as modern

        limits = (modern if name == "httpx2" else legacy).Limits(max_connections=2)  # some wait for a connection
        async with library.AsyncClient(router, limits=limits, timeout=1.0) as client:
            ends: dict[str, int] = {}
            rounds = 0
            while rounds < 50 or (rounds < 500 and ends.get("CancelledError", 0) <= 300):  # how many is timing
                rounds += 1
                tasks = [asyncio.create_task(one_call(client)) for _ in range(20)]
                for task in tasks:
                    asyncio.get_running_loop().call_later(random.random() * 0.02, task.cancel)
                    if random.random() < 0.2:  # twice, perhaps a tick apart
                        asyncio.get_running_loop().call_later(random.random() * 0.02, task.cancel)
                results = await asyncio.gather(*tasks, return_exceptions=True)
                for result in results:
                    ends[type(result).__name__] = ends.get(type(result).__name__, 0) + 1
                    assert not isinstance(result, (AssertionError, TypeError, KeyError, RuntimeError)), result
            assert ends.pop("CancelledError") > 300
            assert residue(router, client._transport) == CLEAN
            await asyncio.wait_for(one_call_ok(client), 60)

    asyncio.run(scenario())
    assert in_flight(router) == 0


async def one_call_ok(client: Any) -> None:
    """Sooner or later a moody fleet says yes."""
    while True:
        try:
            await one_call(client)
            return
        except Exception:
            await asyncio.sleep(0.01)


SCENES: dict[str, Any] = {
    "answer": ok,
    "stream": sse("a", "b", "c", pause=0.001),
    "busy": status(503, b"overloaded", retry_after="0.01"),
    "error body": status(400, b"no" * 100),
}


def steps_of(make: Callable[[], Any], cancel_at: int) -> bool:
    """Run a coroutine, throwing CancelledError into it at its n-th suspension. True if it got that far."""

    async def run() -> bool:
        coroutine = make()
        count = 0
        try:
            future = coroutine.send(None)
            while True:
                count += 1
                if count == cancel_at:
                    future = coroutine.throw(asyncio.CancelledError())
                assert count < cancel_at + 5, "a cancelled call goes on"  # httpcore yields once while it cleans up
                if future is None:
                    await asyncio.sleep(0)
                else:
                    future._asyncio_future_blocking = False
                    await asyncio.wait([future])
                future = coroutine.send(None)
        except StopIteration:
            assert count < cancel_at, "a cancellation was swallowed"
            return False
        except asyncio.CancelledError:
            return True

    return asyncio.run(run())


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("name", NAMES)
def test_l1_cancellation_at_every_await(stubs: Stage, name: str, scene: str) -> None:
    a, b = stubs("a", "b", behave=SCENES[scene])
    library = importlib.import_module(f"gpuroute.{name}")
    reached = 0
    while True:
        reached += 1
        router = router_for([a, b], attempts=2)
        transport = library.AsyncTransport(router)
        client = _client(name)(transport=transport)

        async def call(client: Any = client) -> None:
            await one_call(client)

        hit = steps_of(call, reached)
        assert residue(router, transport) == CLEAN, f"at await {reached}"
        state = [(view.last_error, view.breaker) for view in router.snapshot().pools["llama"].endpoints]
        if scene != "busy":
            assert state == [("", "closed")] * 2, "cancelling teaches nothing"
        if not hit:
            break
    assert reached >= 4


def _client(name: str) -> Any:
    return importlib.import_module(name).AsyncClient


def test_r10_nothing_is_sent_after_a_cancellation(stubs: Stage, kind: str) -> None:
    if kind.endswith("-sync"):
        pytest.skip("threads are not cancelled")
    a, b = stubs("a", "b", behave=hang)
    library = importlib.import_module(f"gpuroute.{kind}")
    router = router_for([a, b])

    async def scenario() -> None:
        async with library.AsyncClient(router) as client:
            task = asyncio.create_task(one_call(client))
            while not a.came + b.came:
                await asyncio.sleep(0.001)
            task.cancel()
            with Stopwatch() as watch, pytest.raises(asyncio.CancelledError):
                await task
            assert watch.seconds < 1
            await asyncio.sleep(0.05)
            a.behave = b.behave = status(500)  # now it sleeps between attempts
            task = asyncio.create_task(one_call(client))
            await asyncio.sleep(0)
            router.pool("llama").rules = _slow_backoff(router)
            while not any(view.last_error for view in router.snapshot().pools["llama"].endpoints):
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(scenario())
    assert len(a.came) + len(b.came) == 2
    assert in_flight(router) == 0
    failures = [view.last_error for view in router.snapshot().pools["llama"].endpoints]
    assert sorted(failures) == ["", "500 failed"], "the 500 counts, the cancelled calls do not"


def _slow_backoff(router: Router) -> Any:
    from dataclasses import replace

    rules = router.pool("llama").rules
    router.pool("llama").shared.random = lambda: 1.0
    return replace(rules, retry=replace(rules.retry, base=60.0, cap=60.0))


class Interrupts:
    """Raises KeyboardInterrupt at the n-th operation at which a thread may block: before it, or when it is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = self.count = 0
        self.after = False
        for owner, name in ((wires.Wire, "read"), (wires.Wire, "write"), (gates.Gate, "enter"), (http.time, "sleep")):
            monkeypatch.setattr(owner, name, self._around(getattr(owner, name)))
        monkeypatch.setattr(wires.Wire, "connect", classmethod(self._around(wires.Wire.connect.__func__)))

    def arm(self, at: int, *, after: bool) -> None:
        self.left, self.after, self.count = at, after, 0

    def _around(self, operation: Any) -> Any:
        def interrupted(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return operation(*args, **kwargs)
            self.count += 1
            if self.count == self.left and not self.after:
                raise KeyboardInterrupt
            result = operation(*args, **kwargs)
            if self.count == self.left:
                raise KeyboardInterrupt
            return result

        return interrupted


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("name", NAMES)
def test_l1_interrupts_at_every_blocking_operation(
    stubs: Stage,
    name: str,
    scene: str,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Callable[..., None],
    collect: Callable[[], int],
    *,
    after: bool,
) -> None:
    a, b = stubs("a", "b", behave=SCENES[scene])
    library = importlib.import_module(f"gpuroute.{name}")
    interrupts = Interrupts(monkeypatch)
    at = 0
    while True:
        at += 1
        router = router_for([a, b], attempts=2)
        with library.Client(router) as client:
            interrupts.arm(at, after=after)
            try:
                sync_call(client)
            except KeyboardInterrupt:
                collect()
            eventually(lambda: residue(router, client._transport) == CLEAN, f"nothing left after operation {at}")  # noqa: B023
            if interrupts.count < at:
                break
    assert at > 5


def sync_call(client: Any) -> None:
    request = client.build_request("POST", "http://llama/v1/chat/completions", content=b"x" * 1000)
    response = client.send(request, stream=True)
    for _ in response.iter_raw():
        pass
    response.close()


def test_l1_threads_that_share_a_client(stubs: Stage, kind: str) -> None:
    if not kind.endswith("-sync"):
        pytest.skip("tasks are tested above")
    servers = stubs("a", "b", "c", behave=moody)
    library = importlib.import_module(f"gpuroute.{kind.removesuffix('-sync')}")
    router = router_for(servers, policy="p2c", random=random.random, breaker_failures=10_000, retry_floor="1000/s")
    unexpected: list[BaseException] = []
    with library.Client(router) as client:

        def work() -> None:
            for _ in range(40):
                try:
                    sync_call(client)
                except (AssertionError, TypeError, KeyError, RuntimeError, AttributeError) as error:
                    unexpected.append(error)
                except Exception:
                    continue

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        assert unexpected == []
        assert residue(router, client._transport) == CLEAN


# ------------------------------------------------------------------------------------------------ the pairs

RENAMED = [
    (r"\basync\s+", ""),
    (r"\bawait\s+", ""),
    (r"handle_async_request", "handle_request"),
    (r"__aiter__", "__iter__"),
    (r"\banext\(", "next("),
    (r"\baiter\(", "iter("),
    (r"\baclose\b", "close"),
    (r"\bAsync(?=[A-Z])", ""),
    (r"\btasks\b", "threads"),
    (r"\bevent loop\b", "thread"),
    (r"\basync_stream\b", "stream"),
]


def stripped(cls: type) -> str:
    """The class without what makes it asynchronous, in a normal form."""
    source = inspect.getsource(cls)
    for pattern, replacement in RENAMED:
        source = re.sub(pattern, replacement, source)
    return ast.unparse(ast.parse(source))


@pytest.mark.parametrize(
    ("sync", "asynchronous"),
    [(http.Driver, http.AsyncDriver), (streams.Stream, streams.AsyncStream)],
    ids=lambda cls: cls.__name__,
)
def test_stripping_async_from_one_gives_the_other(sync: type, asynchronous: type) -> None:
    assert stripped(asynchronous) == stripped(sync)


def test_both_kinds_of_primitives_and_wires_have_the_same_methods() -> None:
    for one, other in ((http.Primitives, http.AsyncPrimitives), (gates.Gate, gates.AsyncGate)):
        names = {re.sub("^aclose$", "close", name) for name in vars(other) if not name.startswith("__")}
        assert {name for name in vars(one) if not name.startswith("__")} - {"_core", "_size"} <= names | {"_freed"}
