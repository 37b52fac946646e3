"""Keys under a lease, against a real etcd: they are there while their process is, and only then."""

from __future__ import annotations

import json
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from ports import own_port
from registry.etcd_server import EtcdCluster
from registry.watching import Watcher, Writer, eventually, own_threads, patient, quick, running
from stopwatch import Stopwatch

from gpuroute.core.endpoint import Endpoint, State
from gpuroute.errors import InvalidRecord
from gpuroute.registry.etcd import EtcdRegistry
from gpuroute.registry.etcd_client import EtcdClient
from gpuroute.registry.lease import LeasedKey, Registration

if TYPE_CHECKING:
    from gpuroute.registry.etcd_config import EtcdConfig

pytestmark = pytest.mark.real_time

LONG = 100.0  # a lease that no busy machine lets end

ENDPOINT = Endpoint(id="a", url="http://a:8000", state=State.WARMING, headers={"authorization": "Bearer canary"})


@pytest.fixture
def config(etcd_url: str) -> EtcdConfig:
    return patient(etcd_url)


def hasten(*registrations: Registration) -> bool:
    """Have them see to their leases and keys now, and not after a third of the lease."""
    for registration in registrations:
        registration._key._look_at = 0.0
        registration._key._wake.set()
    return True


def stored(writer: Writer, ident: str = "a") -> dict:
    found = writer.client.read(writer.key(ident))
    return json.loads(found.value) if found else {}


def test_registers_updates_and_leaves(shared_etcd: EtcdCluster, config, writer: Writer) -> None:
    lines: list[str] = []
    registration = Registration(config, "llama", ENDPOINT, ttl=LONG, report=lines.append)
    assert registration.wait(40)
    assert stored(writer) == {
        "url": "http://a:8000",
        "state": "warming",
        "headers": {"authorization": "Bearer canary"},
    }
    assert shared_etcd.ctl("get", "--print-value-only", writer.key("a")).strip() == json.dumps(stored(writer))
    with Watcher(EtcdRegistry(config, grace=110)) as watcher:
        watcher.until_ids("a")
        registration.update(replace(ENDPOINT, state=State.READY))
        watcher.until(lambda fleet: fleet.pools["llama"].endpoints[0].state is State.READY)
        with Stopwatch() as watch:
            registration.close()
            registration.close()
        assert watch.seconds < 1, "it waited for the next look at its lease"
        watcher.until_ids()  # at once, for it was announced, and not after the grace of 110 s
    assert registration.error is None
    assert [line.split()[0] for line in lines] == ["registered", "removed"]
    assert "canary" not in "".join(lines)


def test_a_lease_is_kept_alive(config, writer: Writer) -> None:
    def is_kept() -> bool:
        registration = Registration(config, "llama", ENDPOINT, ttl=2)
        registration.wait(40)
        lease = writer.client.read(writer.key("a")).lease
        assert lease
        until = time.monotonic() + 5.0
        while (found := writer.client.read(writer.key("a"))) and found.lease == lease and time.monotonic() < until:
            time.sleep(0.1)
        registration.close()
        return found is not None and found.lease == lease

    assert any(is_kept() for _ in range(5)), "the key lapsed, and not because this process stood still once"


def test_E9_an_etcd_that_lost_its_leases_gets_a_fresh_one(tmp_path) -> None:
    """The worst outage: it comes back empty. Re-putting with the dead lease would fail for ever."""
    with EtcdCluster(tmp_path) as cluster:
        config = patient(cluster.url)
        writer = Writer(config)
        lines: list[str] = []
        registration = Registration(config, "llama", ENDPOINT, ttl=LONG, report=lines.append)
        assert registration.wait(40)
        before = writer.client.read(writer.key("a")).lease
        cluster.members[0].kill()
        eventually(lambda: hasten(registration) and registration.error)
        shutil.rmtree(tmp_path / "m0")
        cluster.members[0].start()
        cluster.wait_healthy()
        writer.client.rotate()
        eventually(lambda: hasten(registration) and stored(writer), "the key to come back")
        assert writer.client.read(writer.key("a")).lease != before
        eventually(lambda: registration.error is None)
        assert [line.split()[0] for line in lines[:3]] == ["registered", "etcd", "registered"]
        assert "kept again" in lines[3]
        registration.close()
        writer.client.close()


def test_E9_a_lease_that_was_revoked_elsewhere_is_replaced(config, writer: Writer) -> None:
    registration = Registration(config, "llama", ENDPOINT, ttl=LONG)
    registration.wait(40)
    dead = writer.client.read(writer.key("a")).lease
    writer.client.revoke(dead)
    assert not stored(writer)
    registration.update(replace(ENDPOINT, state=State.READY))
    eventually(lambda: stored(writer), "the key to come back")
    found = writer.client.read(writer.key("a"))
    assert found.lease not in {0, dead}
    registration.close()


def test_a_short_outage_costs_neither_the_lease_nor_the_key(tmp_path) -> None:
    with EtcdCluster(tmp_path) as cluster:
        config = patient(cluster.url)
        writer = Writer(config)
        lines: list[str] = []
        registration = Registration(config, "llama", ENDPOINT, ttl=LONG, report=lines.append)
        assert registration.wait(40)
        before = writer.client.read(writer.key("a"))
        cluster.members[0].kill()
        eventually(lambda: hasten(registration) and registration.error)
        cluster.members[0].start()
        cluster.wait_healthy()
        eventually(lambda: hasten(registration) and registration.error is None)
        writer.client.rotate()
        assert writer.client.read(writer.key("a")) == before
        assert len(lines) == 3
        assert "kept again" in lines[2]
        registration.close()
        writer.client.close()


def test_a_takeover_between_reading_and_writing_is_seen(config, writer: Writer) -> None:
    old = Registration(config, "llama", ENDPOINT, ttl=LONG)
    old.wait(40)
    client = old._key._client
    taken: list[Registration] = []

    def read(key: str):
        found = EtcdClient.read(client, key)
        if not taken:
            taken.append(Registration(config, "llama", replace(ENDPOINT, version="2"), ttl=LONG))
            taken[0].wait(40)
        return found

    client.read = read
    old.update(replace(ENDPOINT, state=State.READY))
    eventually(lambda: taken and taken[0]._key._ready.is_set())
    old.close()
    assert stored(writer)["version"] == "2"
    taken[0].close()


def test_a_lease_that_ends_between_renewing_and_writing(config, writer: Writer, monkeypatch) -> None:
    original, revoked = EtcdClient.put, []

    def put(self, key: str, value: bytes, lease: int = 0) -> None:
        if not revoked:
            revoked.append(lease)
            self.revoke(lease)
        original(self, key, value, lease)

    monkeypatch.setattr(EtcdClient, "put", put)
    lines: list[str] = []
    registration = Registration(config, "llama", ENDPOINT, report=lines.append)
    assert registration.wait(40)
    assert writer.client.read(writer.key("a")).lease not in {0, revoked[0]}
    assert "NOT_FOUND" in lines[0]
    registration.close()


def test_a_zombie_with_a_dead_lease_does_not_overwrite_its_successor(config, writer: Writer) -> None:
    old = Registration(config, "llama", ENDPOINT, ttl=LONG)
    old.wait(40)
    writer.client.revoke(writer.client.read(writer.key("a")).lease)
    new = Registration(config, "llama", replace(ENDPOINT, version="2"), ttl=LONG)
    new.wait(40)
    old.update(replace(ENDPOINT, state=State.READY))
    eventually(lambda: "another process" in (old.error or ""))
    assert stored(writer)["version"] == "2"
    new.close()
    old.update(replace(ENDPOINT, state=State.READY, version="3"))
    eventually(lambda: stored(writer).get("version") == "3", "the old one to take its place again")
    old.close()


def test_a_report_that_raises_does_not_end_the_lease(config, writer: Writer, caplog) -> None:
    def report(text: str) -> None:
        raise BrokenPipeError("nobody listens")

    registration = Registration(config, "llama", ENDPOINT, ttl=1, report=report)
    assert registration.wait(40)
    registration.update(replace(ENDPOINT, version="2"))
    eventually(lambda: stored(writer).get("version") == "2")
    registration.close()
    assert not stored(writer)


def test_a_key_that_somebody_removed_comes_back(config, writer: Writer) -> None:
    registration = Registration(config, "llama", ENDPOINT, ttl=LONG)
    registration.wait(40)
    writer.delete("a")
    eventually(lambda: hasten(registration) and stored(writer), "the key to come back")
    registration.close()
    assert not stored(writer)


def test_a_key_that_another_process_took_over_is_left_alone(config, writer: Writer) -> None:
    """A restart under the same id, where the old process is still draining when the new one is ready."""
    lines: list[str] = []
    old = Registration(config, "llama", ENDPOINT, ttl=LONG, report=lines.append)
    old.wait(40)
    new = Registration(config, "llama", replace(ENDPOINT, version="2"), ttl=LONG)
    new.wait(40)
    eventually(lambda: hasten(old) and "another process" in (old.error or ""), "the old one to notice")
    old.update(replace(ENDPOINT, state=State.DRAINING))
    old.close()
    assert stored(writer)["version"] == "2"
    assert stored(writer)["state"] == "warming"
    assert sum("another process" in line for line in lines) == 1
    assert "left to the process" in lines[-1]
    assert not [line for line in lines if line.startswith("removed")]
    new.close()
    assert not stored(writer)


def test_an_update_in_the_moment_of_a_takeover_does_not_overwrite(config, writer: Writer) -> None:
    old = Registration(config, "llama", ENDPOINT, ttl=LONG)
    old.wait(40)
    new = Registration(config, "llama", replace(ENDPOINT, version="2"), ttl=LONG)
    new.wait(40)
    old.update(replace(ENDPOINT, state=State.READY))
    eventually(lambda: old.error)
    old.close()
    assert stored(writer)["version"] == "2"
    new.close()


SCRIPT = """
import sys, time
sys.path.insert(0, sys.argv[2])
from gpuroute.core.endpoint import Endpoint
from gpuroute.registry.lease import Registration
from registry.watching import quick
registration = Registration(quick(sys.argv[1]), "llama", Endpoint(id="a", url="http://a"), ttl=3)
time.sleep(600)
"""


def registering(config):
    return running("-c", SCRIPT, config.source, str(Path(__file__).parents[1]))


def test_the_key_of_a_killed_process_goes_with_its_lease(config, writer: Writer) -> None:
    with registering(config) as process:
        eventually(lambda: stored(writer), "the registration")
        began = time.monotonic()
        process.kill()
        process.wait()
        assert stored(writer) or time.monotonic() - began > 1.5
        eventually(lambda: not stored(writer), "the lease to end")


def test_E9_a_process_that_was_frozen_for_longer_than_its_lease_comes_back(config, writer: Writer) -> None:
    with registering(config) as process:
        eventually(lambda: stored(writer), "the registration")
        process.send_signal(signal.SIGSTOP)
        eventually(lambda: not stored(writer), "the lease to end")
        process.send_signal(signal.SIGCONT)
        eventually(lambda: stored(writer), "a fresh lease")


def test_etcd_may_be_down_at_the_start_and_at_the_end(tmp_path) -> None:
    cluster = EtcdCluster(tmp_path)
    config = patient(cluster.url)
    lines: list[str] = []
    registration = Registration(config, "llama", ENDPOINT, report=lines.append)
    eventually(lambda: "UNAVAILABLE" in (registration.error or ""), "the trouble to be known")
    assert not registration.wait(0)
    with cluster:
        assert registration.wait(40)
        eventually(lambda: registration.error is None)
    with Stopwatch() as watch:
        registration.close()
    assert watch.seconds < 2, "it waited for an answer"
    assert "within 10 s" in lines[-1]


def test_any_key_can_be_leased(config, writer: Writer) -> None:
    key = f"{config.prefix}/clients/c1"
    leased = LeasedKey(config, key, b"{}", ttl=LONG)
    assert leased.wait(40)
    assert writer.client.read(key).value == b"{}"
    leased.update(b'{"ordinal": 3}')
    eventually(lambda: writer.client.read(key).value == b'{"ordinal": 3}')
    leased.close()
    assert writer.client.read(key) is None


def test_what_readers_would_refuse_is_refused_at_once(config) -> None:
    before = own_threads()
    with pytest.raises(InvalidRecord, match="bad pool name"):
        Registration(config, "Llama", ENDPOINT)
    with pytest.raises(InvalidRecord, match="weight"):
        Registration(config, "llama", replace(ENDPOINT, weight=-1))
    with pytest.raises(InvalidRecord, match="bad id"):
        Registration(config, "llama", replace(ENDPOINT, id="a/b"))
    assert own_threads() <= before
    dead = own_port()
    registration = Registration(quick(f"etcd://127.0.0.1:{dead}"), "llama", ENDPOINT)
    with pytest.raises(ValueError, match="id"):
        registration.update(replace(ENDPOINT, id="b"))
    with pytest.raises(InvalidRecord, match="weight"):
        registration.update(replace(ENDPOINT, weight=-1))
    registration.close()
