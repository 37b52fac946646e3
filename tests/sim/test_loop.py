"""Whole simulations: nothing is lost, trouble is survived, one seed is one result."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuroute.core.outcome import Outcome
from gpuroute.sim.agents import Agents
from gpuroute.sim.clients import core_clients
from gpuroute.sim.fleet import Engine, FleetEvent, Server, parse_event, parse_fleet
from gpuroute.sim.loop import Flight, Simulation
from gpuroute.sim.measure import Meter, confidence, quantile
from gpuroute.sim.peers import PEERS, peer_clients
from gpuroute.sim.reports import Reports
from gpuroute.sim.run import KEYS, Result, Scenario, simulate
from gpuroute.sim.traces import Request, load_trace

if TYPE_CHECKING:
    from gpuroute.core.report import Report

SMALL = Scenario(trace="mooncake", fleet="4xH100", clients=3, copies=2, window=20, warmup=5)


class Watch(Meter):
    """A meter that also keeps who ended how."""

    def __init__(self, window: float) -> None:
        super().__init__(0.0, window)
        self.ended: list[tuple[int, str]] = []

    def succeeded(self, flight: Flight, job: object, now: float) -> None:
        self.ended.append((flight.number, "ok"))
        super().succeeded(flight, job, now)  # type: ignore[arg-type]

    def failed(self, flight: Flight, now: float) -> None:
        self.ended.append((flight.number, "failed"))
        super().failed(flight, now)


def run(
    policy: str,
    *,
    fleet: str = "4xH100",
    rate: float = 8.0,
    seconds: float = 20.0,
    events: tuple[str, ...] = (),
    clients: int = 3,
    timeout: float = inf,
    seed: int = 1,
    output: int = 50,
    reports: Reports | None = None,
) -> tuple[Watch, Simulation]:
    random, at, requests = Random(seed), 0.0, []
    while (at := at + random.expovariate(rate)) < seconds:
        group = random.randrange(5)
        blocks = tuple(group << 8 | level for level in range(4))
        requests.append(Request(at, 2048 + random.randrange(3000), 1 + random.randrange(output), blocks, group))
    meter = Watch(seconds)
    servers = parse_fleet(fleet, Engine())
    sim = Simulation(
        servers, iter(requests), meter=meter, events=[parse_event(text) for text in events], seed=seed, timeout=timeout
    )
    if policy in PEERS:
        sim.clients = peer_clients(sim, clients, policy, seed)
    else:
        sim.clients = core_clients(sim, clients, policy, seed, reports=reports)
    sim.run()
    assert meter.arrivals == len(requests)
    return meter, sim


def ended_once(meter: Watch) -> None:
    assert len(meter.ended) == len({flight for flight, _ in meter.ended}) == meter.arrivals


@pytest.mark.parametrize("policy", ["random", "round_robin", "p2c", "least_request", "prefix", "session", "auto", *PEERS])
def test_every_policy_answers_every_call(policy: str) -> None:
    meter, sim = run(policy)
    ended_once(meter)
    assert meter.failures == 0
    assert sum(server.live + server.taken for server in sim.servers) == 0
    assert meter.attempts == meter.arrivals


@pytest.mark.parametrize("name", ["p2c", "auto+piggyback", "auto+engine", "auto+asks", "peer:prequal", "oracle"])
def test_one_seed_is_one_result_and_another_seed_another(name: str) -> None:
    first, again, other = (simulate(SMALL, name, seed) for seed in (7, 7, 8))
    assert repr(first) == repr(again)
    assert first.row != other.row
    assert tuple(first.row) == KEYS


troubles = st.lists(
    st.tuples(
        st.floats(0, 15),
        st.sampled_from(["die", "restart", "hang", "recover", "throttle", "drain", "errors", "overload", "join"]),
        st.integers(0, 3),
    ),
    max_size=6,
)


@settings(max_examples=25, deadline=None)
@given(troubles=troubles, policy=st.sampled_from(["p2c", "prefix", "peer:sglang"]), seed=st.integers(0, 99))
def test_whatever_happens_every_call_ends_once(troubles: list[tuple[float, str, int]], policy: str, seed: int) -> None:
    value = {"throttle": ":0.5", "errors": ":0.5", "overload": ":2"}
    events = tuple(f"{at}:{kind}:{index}{value.get(kind, '')}" for at, kind, index in troubles)
    meter, sim = run(policy, events=events, timeout=30.0, seed=seed, seconds=10.0)
    ended_once(meter)
    assert len(meter.ttft) + meter.failures == meter.arrivals
    assert all(server.live >= 0 and server.taken >= 0 for server in sim.servers)


def test_a_dead_server_costs_retries_not_answers() -> None:
    meter, sim = run("p2c", events=("5:die:1",))
    assert meter.failures <= 8  # those it had begun to stream
    assert meter.attempts > meter.arrivals
    assert sim.servers[1].picked < sim.servers[0].picked


def test_errors_of_one_server_are_hidden_by_retries() -> None:
    meter, _ = run("p2c", events=("0:errors:2:1",))
    assert meter.failures <= 2


def test_overload_answers_send_calls_elsewhere() -> None:
    meter, _ = run("p2c", events=("0:overload:0:1",), rate=4.0)
    assert meter.failures == 0


def test_a_hang_without_timeout_ends_the_run_all_the_same() -> None:
    meter, _ = run("random", events=("5:hang:0",), seconds=8.0, rate=3.0)
    assert 0 < meter.arrivals - len(meter.ended) < meter.arrivals


def test_a_timeout_frees_calls_from_a_hung_server() -> None:
    meter, sim = run("p2c", events=("5:hang:0",), timeout=8.0)
    ended_once(meter)
    assert meter.failures > 0
    assert sim.servers[1].live == 0


def test_a_drained_server_gets_nothing_new() -> None:
    _, sim = run("p2c", events=("4:drain:2",))
    assert sim.servers[2].picked < 0.5 * sim.servers[0].picked


def test_a_server_joins_when_the_registry_says_so() -> None:
    _, sim = run("p2c", events=("10:join:3",))
    late = sim.servers[3].picked
    _, sim = run("p2c", events=("10:join:3", "9:outage::60"))
    assert sim.servers[3].picked == 0 < late


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("fleet", ["3xH100", "2xL40S,1xH100"])
def test_yardsticks_survive_a_fleet_that_leaves_and_comes_and_use_who_joins(name: str, fleet: str) -> None:
    scenario = replace(SMALL, trace="synthetic:rate=10,prompt=4000", fleet=fleet, copies=1)
    for events in (("1:drain:0-2", "8:join:0-2"), ("1:die:0-2",), ("2:join:2",)):
        found = simulate(replace(scenario, events=tuple(parse_event(text) for text in events)), name, 1)
    assert found.shares[2] > 0, "the newcomer, and the fastest"


def test_a_throttled_server_is_slower() -> None:
    healthy, _ = run("random")
    throttled, _ = run("random", events=("0:throttle:0-3:0.5",))
    assert sum(throttled.ttft) > 1.5 * sum(healthy.ttft)


def test_asks_are_answered_lost_or_lied_to_without_harm() -> None:
    for reports in (
        Reports("agent", loss=0.3),
        Reports("agent", coverage=0.5),
        Reports("agent", liars=0.5, cache_error=0.3),
        Reports("engine", stale=5.0, frozen_at=10.0),
        Reports("piggyback", loss=0.5, stale=1.0),
    ):
        meter, _ = run("auto", reports=reports)
        ended_once(meter)
        assert meter.failures == 0


def test_a_share_of_the_agents_freezes_and_the_others_go_on() -> None:
    """Each second every agent is asked the same; the frozen ones never say anything else again."""
    meter = Meter(0.0, 20.0)
    calls = load_trace("synthetic:rate=60,prompt=3000,output=100", seed=1, seconds=20.0).superpose(1, 1, 20.0)
    sim = Simulation(parse_fleet("8xH100", Engine()), calls, meter=meter, seed=1)
    sim.clients = core_clients(sim, 2, "p2c", 1)
    agents = Agents(sim, Reports("agent", frozen_at=5.0, frozen=0.25))
    said: dict[int, set[Report]] = {index: set() for index in range(8)}

    def ask(_: object) -> None:
        for index, its in said.items():
            report = agents.bid(index, 0, 1_000, ())
            assert report is not None
            its.add(report._replace(at=0.0))

    for second in range(6, 20):
        sim.at(float(second), ask, None)
    sim.run()
    assert sorted(len(its) > 1 for its in said.values()) == [False] * 2 + [True] * 6


def test_plain_inference_servers_answer_too() -> None:
    for policy in ("p2c", "auto+asks", "oracle", "peer:token-queue"):
        scenario = Scenario(
            trace="synthetic:rate=60,prompt=100,output=1", fleet="4xbatcher", clients=4, window=10, warmup=2
        )
        row = simulate(scenario, policy, 1).row
        assert row["success"] == 1.0
        assert 0.01 < row["ttft_mean"] < 1.0


def test_better_knowledge_gives_better_times() -> None:
    scenario = Scenario(fleet="8xH100", clients=16, copies=3, window=60, warmup=30)
    mean = {name: simulate(scenario, name, 1).row["ttft_mean"] for name in ("random", "p2c", "peer:sglang", "oracle")}
    assert mean["oracle"] < mean["peer:sglang"] < mean["p2c"] < mean["random"]


def test_utilisation_and_load_are_sampled() -> None:
    result = simulate(SMALL, "round_robin", 1)
    assert isinstance(result, Result)
    assert 0 < result.extra["utilisation"] <= 1.0001
    assert result.row["max_over_mean"] >= 1
    assert sum(result.shares) == pytest.approx(result.extra["requests_per_s"] * SMALL.window)


@pytest.mark.parametrize("timeout", [0.0004, 0.0006, 0.01])
def test_a_call_may_be_over_before_its_candidates_have_been_asked(timeout: float) -> None:
    found = simulate(replace(SMALL, timeout=timeout), "auto+asks", 1)
    assert found.row["success"] == 0.0


def test_news_may_take_no_time() -> None:
    found = simulate(replace(SMALL, reports=Reports(delay=0.0)), "auto+asks", 1)
    assert found.row["success"] == 1.0


@pytest.mark.parametrize(
    "text", ["4H100", "x", "2xH100@3", "0x", "3xGTX", "2xH100@.", "2xH100*..", "2xH100,", "999999999xH100", "9xA100@-1"]
)
def test_a_bad_fleet_is_explained(text: str) -> None:
    with pytest.raises(ValueError, match=r"fleet '.*': |fleet '.*' has no servers|unknown GPU 'GTX'.*known are"):
        parse_fleet(text, Engine())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("5", "expected AT:KIND"),
        ("5:melt:1", "KIND one of die, "),
        ("5:die:", "servers must look like"),
        ("5:die:101%", "servers must look like"),
        ("5:die:-1", "servers must look like"),
        ("x:die:1", "AT must be seconds"),
        ("nan:die:1", "AT must be seconds"),
        ("inf:die:1", "AT must be seconds"),
        ("-1:die:1", "AT must be seconds"),
        ("5:die:1:7", "die takes no VALUE"),
        ("5:throttle:1:1", "VALUE must be the loss of speed, from 0 to below 1"),
        ("5:throttle:1:nan", "VALUE must be the loss"),
        ("5:throttle:1:-1", "VALUE must be the loss"),
        ("5:errors:1:1.5", "VALUE must be the share"),
        ("5:errors:1:x", "VALUE must be the share"),
        ("5:overload:1:-1", "VALUE must be the calls"),
        ("5:outage:1:5", "expected AT:outage::SECONDS"),
        ("5:outage", "VALUE must be seconds above 0"),
        ("5:outage::0", "VALUE must be seconds above 0"),
    ],
)
def test_a_bad_event_is_explained(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=f"^event {text!r}: .*{says}"):
        parse_event(text)


@pytest.mark.parametrize("servers", ["10", "3-10", "5-3"])
def test_an_event_of_servers_that_the_fleet_does_not_have_is_explained(servers: str) -> None:
    with pytest.raises(ValueError, match=f"die of servers {servers}: the fleet has 0 to 9"):
        parse_event(f"1:die:{servers}").targets(10, 1)


def test_events_name_servers_by_index_range_or_share() -> None:
    assert list(parse_event("1:die:3").targets(10, 1)) == [3]
    assert list(parse_event("1:die:3-5").targets(10, 1)) == [3, 4, 5]
    chosen = FleetEvent(1.0, "die", "30%").targets(10, 1)
    assert len(set(chosen)) == 3
    assert chosen == FleetEvent(1.0, "die", "30%").targets(10, 1)


def test_a_server_says_what_it_is() -> None:
    server = Server(4, "H100", Engine().build("H100"))
    assert server.endpoint().id == "gpu-4"
    assert server.report(0.0).queued_tokens == 0


def test_statistics() -> None:
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0
    assert quantile([1.0], 0.99) == 1.0
    assert quantile([], 0.5) == 0.0
    mean, half = confidence([1.0, 2.0, 3.0])
    assert (mean, half) == (2.0, pytest.approx(2.484, abs=0.001))
    assert confidence([5.0]) == (5.0, 0.0)


def test_a_call_too_large_for_the_engine_is_rejected_not_retried() -> None:
    meter = Watch(10.0)
    sim = Simulation(parse_fleet("2xV100", Engine()), iter([Request(0.0, 150_000, 5)]), meter=meter)
    sim.clients = core_clients(sim, 1, "p2c", 1)
    sim.run()
    assert (meter.failures, meter.attempts) == (1, 1)
    assert Outcome.REJECTED.retryable is False


def test_least_connections_are_counted_per_weight() -> None:
    scenario = replace(SMALL, trace="synthetic:rate=40,prompt=4000", fleet="1xL40S,1xH100", copies=1)
    found = simulate(scenario, "peer:least-conn", 1)
    slow, fast = found.shares
    assert fast > 1.5 * slow
