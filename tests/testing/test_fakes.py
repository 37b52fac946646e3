"""FakeClock and FakeRegistry."""

from __future__ import annotations

import asyncio

import pytest

from gpuroute.core.endpoint import Endpoint
from gpuroute.core.fleet import Fleet, PoolConfig, PoolSpec
from gpuroute.testing import FakeClock, FakeRegistry


def test_clock_moves_only_when_told() -> None:
    clock = FakeClock(10.0)
    assert (clock(), clock()) == (10.0, 10.0)
    assert clock.advance(2.5) == clock() == 12.5
    clock.sleep(1.0)
    asyncio.run(clock.asleep(0.5))
    assert clock() == 14.0
    assert clock.slept == [1.0, 0.5]
    with pytest.raises(ValueError, match="does not go back"):
        clock.advance(-1)


def test_registry_delivers_whole_fleets_to_every_subscriber_until_it_closes() -> None:
    registry = FakeRegistry({"llama": ["http://a:1", Endpoint("b", "http://b:2")]})
    seen: list[Fleet] = []
    late: list[Fleet] = []
    first = registry.subscribe(seen.append)
    assert [e.id for e in seen[0].pools["llama"].endpoints] == ["a:1", "b"]
    second = registry.subscribe(late.append)
    first.close()
    first.close()
    registry.set({"llama": PoolSpec("llama", (), PoolConfig(policy="random"))})
    assert (len(seen), len(late), registry.subscribers) == (1, 2, 1)
    assert late[-1].pools["llama"].config.policy == "random"
    second.close()


def test_registry_without_a_fleet_keeps_its_subscribers_waiting() -> None:
    registry = FakeRegistry()
    seen: list[Fleet] = []
    subscription = registry.subscribe(seen.append)
    assert seen == []
    assert subscription.age(1.0) == 0.0
    with pytest.raises(ValueError, match="call set"):
        registry.go_stale()
    registry.set(Fleet({}, as_of=100.0))
    assert (len(seen), subscription.age(130.0)) == (1, 30.0)


def test_trouble_is_reported_and_ends_with_the_next_fleet() -> None:
    registry = FakeRegistry({"p": ["http://a:1"]})
    seen: list[Fleet] = []
    subscription = registry.subscribe(seen.append)
    registry.fail("unreachable")
    assert (subscription.error, len(seen)) == ("unreachable", 1)
    registry.go_stale()
    assert [fleet.stale for fleet in seen] == [False, True]
    assert seen[1].pools == seen[0].pools
    registry.set({"p": []})
    assert subscription.error is None
