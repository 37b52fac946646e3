"""Second attempts beside the first: opt in, bounded, and the loser's socket is closed."""

from __future__ import annotations

import asyncio
import random
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from fault_world import TEXT, ask, experienced, signals, vllm, when
from stopwatch import Stopwatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from http_caller import Caller

    from gpuroute.testing import GpuServer


def holders(client: Caller) -> set[object]:
    """What still holds a place at a connection gate."""
    transport = client.transport()
    pools = [pools for pools, _ in transport._by_loop.values()] if client.is_async else [transport._all]
    return {holder for one in pools for link in one._links.values() for holder in link.gate.holders}


def patient(client: Caller) -> None:
    """The watchdog shall not be what helps here."""
    experienced(client, floor=30.0)


def test_a_late_first_byte_is_overtaken_and_the_loser_is_hung_up_on(
    gpus: Callable[..., list[GpuServer]], call: Callable[..., Caller], kind: str, eventually: Callable[..., None]
) -> None:
    slow, quick = gpus(2)
    client = call(kind, vllm([slow, quick]), hedge=True)
    patient(client)
    slow.hang()
    with Stopwatch() as watch:
        response = client.open(TEXT, json=ask())
        assert b"[DONE]" in client.read(response)
    assert watch.seconds < 20  # and not the client's own 60
    outcomes = [(a["endpoint"], a["outcome"]) for a in response.extensions["gpuroute"]["attempts"]]
    assert outcomes[0][0] == "gpu-0"
    assert outcomes[1][0] == "gpu-1"
    eventually(lambda: slow.state()["cancelled"] == 1, "the engine saw the loser's connection close")
    assert signals(client)["hedges"] == 1
    states = client.router.pool("llama").snapshot.states
    assert (states[0].failed, states[0].breaker.failures) == (0, 0)
    eventually(lambda: holders(client) == set(), "no connection is held")


def test_the_first_may_still_win(
    gpus: Callable[..., list[GpuServer]], call: Callable[..., Caller], kind: str, eventually: Any
) -> None:
    first, second = gpus(2)
    client = call(kind, vllm([first, second]), hedge=True)
    patient(client)
    first.hang()
    second.hang()
    with when(lambda: second.state()["received"], first.resume):
        response = client.post(TEXT, json=ask())
    assert response.extensions["gpuroute"]["endpoint"] == "gpu-0"
    assert signals(client)["hedges"] == 1
    eventually(lambda: second.state()["cancelled"] == 1, "the hedge was hung up on")


def test_a_failure_beside_a_live_attempt_does_not_end_the_call(
    gpus: Callable[..., list[GpuServer]], call: Callable[..., Caller], kind: str
) -> None:
    first, second = gpus(2)
    client = call(kind, vllm([first, second]), hedge=True)
    patient(client)
    first.hang()
    second.answer(500)
    failed = client.router.pool("llama").snapshot.states[1]
    with when(lambda: failed.failed, first.resume):
        response = client.post(TEXT, json=ask())
    assert response.extensions["gpuroute"]["endpoint"] == "gpu-0"
    assert (signals(client)["hedges"], signals(client)["retries"]) == (1, 0)


def test_when_both_fail_the_call_goes_on(
    gpus: Callable[..., list[GpuServer]], call: Callable[..., Caller], kind: str
) -> None:
    servers = gpus(3)
    client = call(kind, vllm(servers), hedge=True)
    patient(client)
    servers[0].answer(503, delay=0.5, count=1)
    servers[1].answer(500, delay=0.8, count=1)
    assert client.post(TEXT, json=ask(stream=False)).status_code == 200
    assert servers[2].state()["received"] == 1


@pytest.mark.parametrize("how", ["setting", "call"])
def test_off_by_default_and_on_for_one_call(
    gpus: Callable[..., list[GpuServer]], call: Callable[..., Caller], kind: str, how: str
) -> None:
    servers = gpus(2)
    client = call(kind, vllm(servers), hedge=how == "setting")
    patient(client)
    servers[0].hang()
    options = {"gpuroute": {"hedge": how == "call"}}
    late = threading.Timer(0.5, servers[0].resume)
    if how == "setting":  # off for this call, so that it has to wait
        late.start()
    client.post(TEXT, json=ask(), extensions=options)
    assert signals(client)["hedges"] == (how == "call")
    servers[0].resume()
    for server in servers:
        server.answer(200, body="{}", delay=0.5)
    client.post(TEXT, json=ask(), headers={"x-gpuroute-hedge": "no"})
    assert signals(client)["hedges"] == (how == "call")
    late.cancel()


def test_at_most_the_share(gpus: Callable[..., list[GpuServer]], call: Callable[..., Caller]) -> None:
    servers = gpus(4)
    client = call("httpx2", vllm(servers), hedge=True)
    experienced(client, ttft=0.0001, floor=30.0)  # nearly every call is late by this
    for _ in range(20):
        client.many(10, TEXT, json=ask(2))
    found = signals(client)
    assert found["calls"] == 200
    assert 1 <= found["hedges"] <= 0.05 * 200 + 2
    assert found["hedges_denied"] > 0


def test_a_call_that_still_queues_is_rerouted(
    gpus: Callable[..., list[GpuServer]], call: Callable[..., Caller], kind: str
) -> None:
    slow, quick = gpus(2)
    client = call(kind, vllm([slow, quick]), reroute=True)
    for _ in range(40):  # a tenth of calls may be moved, so one needs ten
        client.post(TEXT, json=ask(1))
    patient(client)
    before = signals(client)["reroutes"]  # 0, or a moment of the machine's
    slow.hang()
    with Stopwatch() as watch:
        assert client.post(TEXT, json=ask(stream=False)).status_code == 200
    assert watch.wall >= 1.0  # 1 s + 2x its own prefill
    assert watch.seconds < 20
    assert signals(client)["reroutes"] == before + 1
    assert signals(client)["hedges"] == 0


def test_reroutes_stop_while_the_pool_is_saturated(
    gpus: Callable[..., list[GpuServer]], call: Callable[..., Caller]
) -> None:
    client = call("httpx2-sync", vllm(gpus(2)), reroute=True)
    now = client.router.clock()
    rerouted = 0
    for _ in range(60):  # every call is late
        one = client.router.call("llama")
        one.next_attempt(now)
        rerouted += one.hedge(now) is not None
        one.close(now)
    assert 0 < rerouted < 15
    assert signals(client)["hedges_denied"] > 40


def test_l1_cancelled_in_the_middle_of_a_race_nothing_is_left(
    gpus: Callable[..., list[GpuServer]], call: Callable[..., Caller], eventually: Callable[..., None]
) -> None:
    servers = gpus(3, time_scale=0.02)
    client = call("httpx2", vllm(servers), hedge=True, retry_floor="10000/s")
    experienced(client, ttft=0.001, floor=30.0)
    pool = client.router.pool("llama")
    pool.rules = replace(pool.rules, hedge=replace(pool.rules.hedge, hedge_share=1.0))
    pool.hedges.floor = 10_000.0
    servers[0].hang()
    chance = random.Random(1)

    async def scenario() -> int:
        async def one() -> None:
            response = await client.client.post(TEXT, json=ask(3))
            assert response.status_code == 200

        cancelled = rounds = 0
        while rounds < 100 and (cancelled <= 30 or signals(client)["hedges"] <= 10):  # how many a round has is timing
            rounds += 1
            tasks = [asyncio.create_task(one()) for _ in range(15)]
            for task in tasks:
                asyncio.get_running_loop().call_later(chance.random() * 0.06, task.cancel)
            results = await asyncio.gather(*tasks, return_exceptions=True)
            cancelled += sum(isinstance(result, asyncio.CancelledError) for result in results)
            assert not [r for r in results if isinstance(r, Exception)]
        return cancelled

    assert client.run(scenario()) > 30
    assert signals(client)["hedges"] > 10

    def is_over() -> bool:
        client.breathe()
        return not holders(client) and not any(state.in_flight for state in pool.snapshot.states)

    eventually(is_over, "nothing is in flight, and no connection is held")
    eventually(lambda: sum(server.state()["live"] for server in servers) == 0, "every engine saw them go")
