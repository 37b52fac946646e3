"""Cases of public failures, live through HTTP against stand-in GPUs: black holes, floods, dead hosts, busy ones."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from fault_world import CHAT, PATIENCE_S, TEXT, ask, signals, vllm, when
from http_caller import router_for
from ports import own_port
from stopwatch import Stopwatch

from gpuroute import ConfigError, Endpoint, NoEndpointAvailable, UnknownPool, httpx2
from gpuroute.config import Settings
from gpuroute.core.endpoint import State
from gpuroute.core.fleet import PoolSpec
from gpuroute.core.state import EJECTION
from gpuroute.errors import StreamInterrupted
from gpuroute.testing import GpuServer, answer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from http_caller import Caller

Gpus = Any


def served(client: Caller | Any, name: str) -> int:
    return int(client.router.pool("llama").snapshot.by_id[name].served)


def closed_loop(
    router: Any,
    callers: int,
    seconds: float,
    *,
    body: dict[str, Any] | None = None,
    calls: int = 0,
    ends: list[float | None] | None = None,
) -> list[float | None]:
    """Callers that call again at once: the end of each call, seconds from the start; None for a failed one.

    They go on until `seconds` are over and `calls` have ended: how many calls a second has depends on the machine.
    `ends` is filled as they end.
    """
    ends = [] if ends is None else ends

    async def work(client: httpx2.AsyncClient, started: float) -> None:
        while True:
            try:
                response = await client.post(TEXT, json=body or ask(2, stream=False))
                ends.append(time.monotonic() - started if response.status_code == 200 else None)
            except Exception:
                ends.append(None)
            if time.monotonic() - started >= seconds and len(ends) >= calls:
                return

    async def run() -> None:
        async with httpx2.AsyncClient(router, timeout=PATIENCE_S) as client:
            started = time.monotonic()
            await asyncio.gather(*(work(client, started) for _ in range(callers)))

    asyncio.run(run())
    return ends


@pytest.fixture
def routers() -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def make(over: list[Endpoint], **settings: Any) -> Any:
        import random

        settings.setdefault("random", random.Random(1).random)
        settings.setdefault("watchdog", False)  # silence is not what these are about, and a busy machine makes some
        made.append(router_for(over, "llama", **settings))
        return made[-1]

    yield make
    for router in made:
        router.close()


@pytest.mark.parametrize("fault", ["500", "refuse", "error event"])
def test_l4_a_fast_failing_host_is_no_black_hole(gpus: Gpus, routers: Callable[..., Any], fault: str) -> None:
    servers = gpus(4, time_scale=0.0)
    for good in servers[1:]:
        good.answer(200, body='{"choices": []}', delay=0.1)
    if fault == "refuse":
        servers[0].refuse()
    elif fault == "500":
        servers[0].answer(500)
    else:
        event = 'data: {"error": {"message": "worker died", "code": 500}}\n\n'
        servers[0].answer(200, headers={"content-type": "text/event-stream"}, body=event)
    router = routers(vllm(servers), policy="least_request")
    states = router.pool("llama").snapshot.states
    closed_loop(router, 20, 0.6, body=ask(2), calls=100)
    before = [state.served for state in states]
    ends = closed_loop(router, 20, 1.2, body=ask(2), calls=200)
    shares = [state.served - earlier for state, earlier in zip(states, before, strict=True)]
    assert shares[0] <= 0.05 * sum(shares)
    assert ends.count(None) <= 0.01 * len(ends)


def test_l4_without_breaker_and_ejection_it_gets_no_more_than_its_share(gpus: Gpus, routers: Callable[..., Any]) -> None:
    servers = gpus(4, time_scale=0.0)
    for good in servers[1:]:
        good.answer(200, body="{}", delay=0.05)
    servers[0].answer(500)
    router = routers(
        vllm(servers), policy="least_latency", eject_interval="0s", breaker_failures=1_000_000, retry_floor="1000/s"
    )
    closed_loop(router, 10, 1.0, calls=150)
    states = router.pool("llama").snapshot.states
    assert states[0].served <= 0.25 * sum(state.served for state in states)


def test_l5_a_newcomer_is_ramped_and_all_newcomers_are_not(gpus: Gpus, routers: Callable[..., Any]) -> None:
    servers = gpus(9, time_scale=0.0)
    for server in servers:
        server.answer(200, body="{}", delay=0.02)
    router = routers(vllm(servers[:8]), policy="least_request")
    assert all(state.ramp_at is None for state in router.pool("llama").snapshot.states)  # all are new: no ramp
    closed_loop(router, 16, 0.4, calls=100)
    router.registry.set({"llama": vllm(servers)})
    states = router.pool("llama").snapshot.by_id
    before = sum(state.served for state in states.values())
    closed_loop(router, 16, 0.8, calls=300)
    after = sum(state.served for state in states.values())
    assert 0 < states["gpu-8"].served <= 2 * (after - before) / 9


def test_b4_at_most_one_probe_reaches_a_half_open_endpoint(
    gpus: Gpus, routers: Callable[..., Any], eventually: Callable[..., None]
) -> None:
    (server,) = gpus(1)
    router = routers(vllm([server]), breaker_failures=1, breaker_open="200ms", panic="fail_fast")
    server.answer(500, count=1)
    assert closed_loop(router, 1, 0.0) == [None]
    server.hang()
    time.sleep(0.3)  # past the open time, jitter included
    before = server.state()["received"]
    results: list[bool] = []

    async def probe_and_others() -> None:
        async with httpx2.AsyncClient(router, timeout=PATIENCE_S) as client:

            async def one() -> None:
                try:
                    results.append((await client.post(TEXT, json=ask(2, stream=False))).status_code == 200)
                except NoEndpointAvailable:
                    results.append(False)
                if len(results) == 99:  # all but the probe: now it may end
                    server.resume()

            await asyncio.gather(*(one() for _ in range(100)))

    asyncio.run(probe_and_others())
    assert server.state()["received"] - before == 1
    assert (results.count(False), results[-1]) == (99, True)


def test_b3_a_full_engine_is_not_broken_and_serves_again_at_once(gpus: Gpus, routers: Callable[..., Any]) -> None:
    (server,) = gpus(1, max_num_seqs=2, max_queued=2, time_scale=0.1)
    router = routers(vllm([server]), attempts=1, breaker_open="60s")
    server.hang()  # so that it is full however slowly the burst arrives
    ended: list[float | None] = []
    with when(lambda: len(ended) >= 36, server.resume):  # all but the four that it took
        burst = closed_loop(router, 40, 0.0, body=ask(20, stream=False), ends=ended)
    assert burst.count(None) >= 36  # vLLM's "busy" 503 without Retry-After
    state = router.pool("llama").snapshot.states[0]
    assert state.breaker.failures == 0
    assert EJECTION not in state.caps
    with Stopwatch() as watch:
        while closed_loop(router, 1, 0.0)[0] is None:
            assert time.monotonic() - watch.started < 40
    assert watch.seconds < 15  # its own pause of a quarter of a second, not an open breaker's 60 s
    assert signals_of(router)["breaker_opened"] == 0


def test_b3_the_dead_variant_is_taken_out_in_the_end(gpus: Gpus, routers: Callable[..., Any]) -> None:
    servers = gpus(3, time_scale=0.0)
    servers[0].answer(503, body="upstream connect error")
    router = routers(vllm(servers), retry_floor="1000/s", breaker_open="60s")
    assert closed_loop(router, 4, 0.3, calls=60).count(None) == 0
    assert signals_of(router)["breaker_opened"] == 1


def test_b1_a_callers_mistakes_do_not_hurt_others(gpus: Gpus, routers: Callable[..., Any]) -> None:
    servers = gpus(3, time_scale=0.0)
    router = routers(vllm(servers))
    with httpx2.Client(router, timeout=PATIENCE_S) as client:
        for _ in range(30):
            assert client.post(TEXT, json={"model": "m", "prompt": "x", "max_tokens": -1}).status_code == 400
        assert sum(server.state()["received"] for server in servers) == 30
        assert client.post(TEXT, json=ask()).status_code == 200
    assert all(not state.caps and not state.failed for state in router.pool("llama").snapshot.states)


def test_x1_no_outage_of_a_minute_after_a_fault_of_a_second(gpus: Gpus, routers: Callable[..., Any]) -> None:
    servers = gpus(3, time_scale=0.0)
    router = routers(vllm(servers), breaker_open="60s")
    for server in servers:
        server.answer(500)
    assert closed_loop(router, 4, 0.5, calls=40).count(None) > 0
    assert {view.breaker for view in router.snapshot().pools["llama"].endpoints} == {"open"}
    for server in servers:
        server.resume()
    assert closed_loop(router, 4, 0.5, calls=40).count(None) == 0


def test_x1_the_other_side_fails_fast_with_a_time(gpus: Gpus, routers: Callable[..., Any]) -> None:
    servers = gpus(2, time_scale=0.0)
    router = routers(vllm(servers), breaker_open="60s", panic="fail_fast", breaker_failures=1)
    for server in servers:
        server.answer(500)
    with httpx2.Client(router, timeout=PATIENCE_S) as client:
        client.post(TEXT, json=ask())
        with Stopwatch() as watch, pytest.raises(NoEndpointAvailable) as caught:
            client.post(TEXT, json=ask())
    assert watch.seconds < 15  # and not until the first one is back
    assert 20 < caught.value.retry_after <= 72


@pytest.mark.real_time
def test_r8_who_is_asked_to_wait_waits_and_the_other_side_is_a_short_deadline(
    gpus: Gpus, routers: Callable[..., Any]
) -> None:
    servers = gpus(3, time_scale=0.0)
    router = routers(vllm(servers), attempts=4)
    with httpx2.Client(router, timeout=PATIENCE_S) as client:
        for _ in range(4):  # who is held up once is not each time
            for server in servers:
                server.answer(429, headers={"retry-after": "1"}, count=1)
            with Stopwatch() as watch:
                assert client.post(TEXT, json=ask(stream=False)).status_code == 200
            assert watch.wall > 0.9
            if watch.seconds < 2.5:
                break
        assert watch.seconds < 2.5
        for server in servers:
            server.answer(429, headers={"retry-after": "30"}, count=2)
        with Stopwatch() as watch:
            response = client.post(TEXT, json=ask(stream=False), extensions={"gpuroute": {"timeout": 20.0}})
        assert response.status_code == 429
        assert watch.seconds < 10


def test_x3_only_hosts_that_list_the_model_are_candidates(gpus: Gpus) -> None:
    small, large = gpus(2)
    router = router_for([Endpoint("a", small.url, engine="vllm", model="small")], "p1")
    router.registry.set(
        {
            "p1": PoolSpec("p1", (Endpoint("a", small.url, engine="vllm", model="small"),)),
            "p2": PoolSpec("p2", (Endpoint("b", large.url, engine="vllm", model="large"),)),
        }
    )
    with router, httpx2.Client(router, timeout=PATIENCE_S) as client:
        assert client.post("http://gpuroute/v1/completions", json=ask() | {"model": "small"}).status_code == 200
        for wrong in ("SMALL", "smal", "typo", "", " small ", "small:lora"):
            with pytest.raises(UnknownPool):
                client.post("http://gpuroute/v1/completions", json=ask() | {"model": wrong})
    assert (small.state()["received"], large.state()["received"]) == (1, 0)


def test_x4_a_killed_host_costs_callers_nothing_and_is_back_soon(routers: Callable[..., Any]) -> None:
    with GpuServer.spawn(time_scale=0.0, port=own_port()) as one, GpuServer.spawn(time_scale=0.0) as two:
        router = routers(vllm([one, two]), breaker_open="300ms", eject_interval="0s")
        closed_loop(router, 2, 0.2)
        timer = threading.Timer(0.2, one.kill)
        timer.start()
        with Stopwatch() as away:
            ends = closed_loop(router, 4, 1.0, calls=100)
        timer.join()
        assert ends.count(None) == 0
        state = router.pool("llama").snapshot.by_id["gpu-0"]
        assert state.failed <= 20  # five in a row, three more on their way, and probes ever more seldom
        with GpuServer.spawn(time_scale=0.0, port=one.port):
            before = state.served
            with Stopwatch() as watch:
                while state.served <= before + 3:
                    assert time.monotonic() - watch.started < 40 + 3 * away.wall
                    closed_loop(router, 4, 0.1)
            assert watch.seconds < 3 * away.wall + 3  # each time it is out for twice as long as the time before


def test_x4_a_silent_drop_costs_no_call_either(gpus: Gpus, routers: Callable[..., Any]) -> None:
    """A host whose packets vanish: its queue of connections is full and nobody accepts."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(0)
    fillers = [socket.socket() for _ in range(3)]
    for filler in fillers:
        filler.setblocking(False)
        filler.connect_ex(listening.getsockname())
    (server,) = gpus(1, time_scale=0.0)
    hole = Endpoint("hole", f"http://127.0.0.1:{listening.getsockname()[1]}")
    router = routers([hole, *vllm([server])], connect_timeout="1s")
    assert closed_loop(router, 8, 0.6, calls=50).count(None) == 0
    hole, well = router.pool("llama").snapshot.states
    before = hole.served, well.served
    assert closed_loop(router, 8, 1.0, calls=200).count(None) == 0
    assert hole.served - before[0] <= 0.05 * (well.served - before[1])
    for one in (listening, *fillers):
        one.close()


def test_r3_what_reached_the_caller_is_never_told_again(gpus: Gpus, call: Callable[..., Caller], kind: str) -> None:
    first, second = gpus(2)
    client = call(kind, vllm([first, second]))
    first.drop_mid_stream(5, reset=True)
    got: list[bytes] = []
    with pytest.raises(StreamInterrupted):
        got.extend(client.chunks(client.open(CHAT, json={**ask(9), "messages": [{"role": "user", "content": "x"}]})))
    assert b"".join(got).count(b'"content":') == 5
    assert second.state()["received"] == 0
    assert served(client, "gpu-0") == client.router.pool("llama").snapshot.states[0].failed == 1


def test_life_only_ready_and_cold_take_calls_and_a_draining_ones_streams_finish(
    gpus: Gpus, call: Callable[..., Caller], kind: str
) -> None:
    servers = gpus(4, time_scale=0.1)
    client = call(kind, vllm(servers[:1]))
    response = client.open(TEXT, json=ask(30))
    states = (State.DRAINING, State.WARMING, State.COLD, State.READY)
    fleet = [replace(one, state=state) for one, state in zip(vllm(servers), states, strict=True)]
    client.router.registry.set({"llama": fleet})
    text = client.read(response).decode()
    assert text.count('"text"') == 30
    assert answer("Once upon a time", 1) in text
    for _ in range(8):
        client.post(TEXT, json=ask(1))
    assert [server.state()["received"] > 0 for server in servers] == [True, False, True, True]
    assert servers[0].state()["received"] == 1
    fleet[1] = replace(fleet[1], state=State.READY)
    client.router.registry.set({"llama": fleet})
    for _ in range(40):
        client.post(TEXT, json=ask(1))
    assert servers[1].state()["received"] > 0


def test_an_endpoints_record_survives_a_flap(gpus: Gpus, routers: Callable[..., Any]) -> None:
    servers = gpus(2, time_scale=0.0)
    router = routers(vllm(servers), breaker_failures=1, breaker_open="60s")
    servers[0].answer(500)
    closed_loop(router, 2, 0.1)
    assert router.pool("llama").snapshot.by_id["gpu-0"].limit == 0
    router.registry.set({"llama": vllm(servers)[1:]})
    router.registry.set({"llama": vllm(servers)})
    assert router.pool("llama").snapshot.by_id["gpu-0"].limit == 0


def signals_of(router: Any) -> dict[str, int]:
    return dict(router.snapshot().pools["llama"].signals)


def test_r1_attempts_of_a_call_are_what_is_configured_and_told(
    gpus: Gpus, call: Callable[..., Caller], kind: str
) -> None:
    servers = gpus(3)
    client = call(kind, vllm(servers))
    for server in servers:
        server.answer(500)
    response = client.post(TEXT, json=ask())
    assert response.headers["x-should-retry"] == "false"  # what the SDKs' own retry layers obey
    assert [a["endpoint"] for a in response.extensions["gpuroute"]["attempts"]] == ["gpu-0", "gpu-1", "gpu-2"]
    sent = [server.last_request.header("x-gpuroute-attempt") for server in servers]
    assert sent == [None, "2", "3"]
    assert signals(client)["retries"] == 2


def test_an_answer_in_one_piece_that_breaks_off_is_asked_for_again(
    gpus: Gpus, call: Callable[..., Caller], kind: str
) -> None:
    """Nothing of it was handed out yet, so nothing can be told twice."""
    servers = gpus(2)
    client = call(kind, vllm(servers))
    servers[0].drop_mid_stream(1, reset=True)
    response = client.post(TEXT, json=ask(40, stream=False))
    assert response.json()["choices"][0]["text"] == answer("Once upon a time", 40)
    assert [a["outcome"] for a in response.extensions["gpuroute"]["attempts"]] == ["failed", "success"]


@pytest.mark.parametrize("way", ["hedge", "reroute", "continuation"])
def test_settings_that_contradict_each_other_are_errors(way: str) -> None:
    with pytest.raises(ConfigError, match="there is no second attempt"):
        Settings.from_env({}, registry="llama=http://a:1", attempts=1, **{way: True})
