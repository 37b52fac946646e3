"""A host that is gone is found out once, whatever number of models it served (case B7); nothing else crosses pools."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx2 as library
import pytest
from fault_world import PATIENCE_S
from http_caller import endpoint
from http_stub import Stage
from ports import own_port

from gpuroute import Endpoint, Router, httpx2
from gpuroute.core.fleet import PoolSpec
from gpuroute.core.hosts import FORGOTTEN_S, MAX_HOSTS, Hosts, host_of
from gpuroute.core.outcome import Outcome
from gpuroute.core.pool import Pool, PoolRules
from gpuroute.testing import FakeRegistry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from http_stub import Exchange

    from gpuroute.core.state import EndpointState

MODELS = tuple("abcdefgh")
THRESHOLD = 5
GOOD = {"choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]}


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://gpu-1:8000/v1", "gpu-1:8000"),
        ("http://GPU-1:8000", "gpu-1:8000"),
        ("grpc://gpu-1:8000", "gpu-1:8000"),
        ("https://user:secret@gpu-1", "gpu-1"),
        ("http://[::1]:80/a/b", "[::1]:80"),
        ("gpu-1:8001", "gpu-1:8001"),
        ("unix:/run/a.sock", "unix:/run/a.sock"),
        ("unix:///run/b.sock", "unix:///run/b.sock"),
    ],
)
def test_the_host_of_an_endpoint(url: str, host: str) -> None:
    assert host_of(url) == host


def test_hosts_are_forgotten_by_time_by_being_there_and_by_number() -> None:
    hosts = Hosts()
    assert [hosts.missed("a", now) for now in (0.0, 1.0, 1.0 + FORGOTTEN_S - 0.1)] == [1, 2, 3]
    assert hosts.missed("a", 2.0 + 2 * FORGOTTEN_S) == 1
    hosts.missed("a", 3.0 + 2 * FORGOTTEN_S)
    hosts.reached("a")
    hosts.reached("never missed")
    assert hosts.missed("a", 3.0 + 2 * FORGOTTEN_S) == 1
    for number in range(MAX_HOSTS):
        assert hosts.missed(f"host-{number}", 30.0) == 1
    assert 0 < len(hosts._missed) <= MAX_HOSTS
    assert hosts.missed("a", 30.0) == 1, "it made room, with all others"


def two_pools() -> list[EndpointState]:
    """One host's endpoint in either of two pools that share what is known of hosts."""
    pools = []
    for name in "xy":
        spec = PoolSpec(name, (Endpoint(f"host-{name}", "http://host:1"), Endpoint(f"other-{name}", "http://other:1")))
        pools.append(Pool(PoolSpec(name), PoolRules(), random=random.Random(1).random))
        pools[-1].shared.hosts = pools[0].shared.hosts
        pools[-1].update(spec, PoolRules(), 0.0)
    return [pool.snapshot.by_id[f"host-{pool.name}"] for pool in pools]


def end(state: EndpointState, outcome: Outcome, now: float, *, sent: bool = False) -> None:
    attempt = state.acquire_in_panic(now)
    assert attempt is not None
    if sent:
        attempt.sent(now)
    attempt.finish(outcome, now)


def test_b7_what_one_pool_could_not_reach_the_other_leaves_at_its_first_failure() -> None:
    x, y = two_pools()
    for n in range(THRESHOLD):
        assert x.limit > 0
        end(x, (Outcome.FAILED, Outcome.TIMED_OUT)[n % 2], n / 10)
    assert x.limit == 0
    assert y.limit > 0, "nobody has tried there"
    end(y, Outcome.FAILED, 0.6)
    assert y.limit == 0
    assert (x.failed, y.failed) == (THRESHOLD, 1)


def test_b7_a_server_that_answers_badly_is_a_matter_of_its_pool() -> None:
    x, y = two_pools()
    for n in range(THRESHOLD):
        end(x, Outcome.FAILED, n / 10, sent=True)
    end(y, Outcome.FAILED, 0.6, sent=True)
    assert (x.limit == 0, y.limit > 0) == (True, True)
    end(y, Outcome.FAILED, 0.7)  # not to be reached once, and nobody else missed it
    assert y.limit > 0


def test_b7_a_host_that_is_back_is_back_for_all() -> None:
    x, y = two_pools()
    for n in range(THRESHOLD):
        end(x, Outcome.FAILED, n / 10)
    end(x, Outcome.SUCCESS, 6.0, sent=True)  # a probe
    end(y, Outcome.FAILED, 6.1)
    assert y.limit > 0
    late = two_pools()
    for n in range(THRESHOLD):
        end(late[0], Outcome.FAILED, n / 10)
    end(late[1], Outcome.FAILED, 1.0 + FORGOTTEN_S)
    assert late[1].limit > 0, "that was long ago"


@pytest.fixture
def stubs() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


async def well(exchange: Exchange) -> None:
    exchange.reply(200, GOOD)


def test_b7_eight_models_of_a_dead_host_pay_its_threshold_once(stubs: Stage) -> None:
    (host,) = stubs("well", behave=well)
    dead = SimpleNamespace(name="dead", url=f"http://127.0.0.1:{own_port()}")
    pools = {
        model: PoolSpec(model, tuple(endpoint(one, id=f"{one.name}-{model}", model=model) for one in (dead, host)))
        for model in MODELS
    }
    settings: dict[str, Any] = {"retry_floor": "1000/s", "breaker_open": "60s", "connect_timeout": "20s"}
    with Router(FakeRegistry(pools), policy="round_robin", random=lambda: 0.0, **settings) as router:
        router.ready()
        with httpx2.Client(router, timeout=PATIENCE_S) as client:
            for model in MODELS:
                for _ in range(2 * THRESHOLD):
                    body = {"model": model, "prompt": "x"}
                    assert client.post("http://gpuroute/v1/completions", json=body).status_code == 200
        states = [router.pool(model).snapshot.by_id[f"dead-{model}"] for model in MODELS]
        assert {state.limit for state in states} == {0}
        assert [state.failed for state in states] == [THRESHOLD] + [1] * (len(MODELS) - 1)


def test_b7_what_a_block_of_the_callers_own_says_of_an_endpoint_stays_in_its_pool() -> None:
    """`router.attempt`: who called, and how far it came, is not known here."""
    endpoints = {name: [Endpoint(f"{name}-{n}", "http://host:1") for n in (1, 2)] for name in "xy"}
    with Router(endpoints=endpoints, policy="round_robin", random=lambda: 0.0, breaker_open="60s") as router:
        for _ in range(4 * THRESHOLD):
            with pytest.raises(library.ConnectError), router.attempt("x", failures=(library.ConnectError,)):
                raise library.ConnectError("whatever")
        with pytest.raises(library.ConnectError), router.attempt("y", failures=(library.ConnectError,)):
            raise library.ConnectError("whatever")
        assert all(state.limit > 0 for state in router.pool("y").snapshot.states)
