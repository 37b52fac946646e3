"""The etcd registry against a real etcd. Cases E1 to E9 are facts from public threads about other clients.

Heartbeats are 0.3 s here instead of 5 s, so detection times scale by 17.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
from ports import own_port
from registry.watching import Proxy, Watcher, Writer, eventually, ids, own_threads, patient, quick, save_snapshot
from stopwatch import Stopwatch

from gpuroute.core.wire import encode
from gpuroute.errors import RegistryUnavailable
from gpuroute.registry import first_fleet
from gpuroute.registry.etcd import EtcdRegistry
from gpuroute.registry.etcd_client import EtcdClient

if TYPE_CHECKING:
    from registry.etcd_server import EtcdCluster

    from gpuroute.registry.etcd_config import EtcdConfig

pytestmark = pytest.mark.real_time


def registry(config, *, grace: float = 0.0, **options) -> EtcdRegistry:
    return EtcdRegistry(config, grace=grace, **options)


@pytest.fixture
def config(etcd_url: str) -> EtcdConfig:
    return patient(etcd_url)


# ------------------------------------------------------------------------------------ the plain course


def test_follows_puts_updates_and_deletes(config, writer: Writer) -> None:
    writer.put("a")
    with Watcher(registry(config)) as watcher:
        watcher.until_ids("a")
        writer.put("b", weight=2)
        watcher.until_ids("a", "b")
        writer.put("a", state="draining")
        watcher.until(lambda fleet: fleet.pools["llama"].endpoints[0].state == "draining")
        writer.put_raw(f"{writer.prefix}/pools/llama/config", b'{"policy": "p2c", "timeout": 2}')
        watcher.until(lambda fleet: fleet.pools["llama"].config.policy == "p2c")
        writer.delete("a")
        fleet = watcher.until_ids("b")
        assert fleet.pools["llama"].endpoints[0].weight == 2
        assert not fleet.stale
        assert fleet.source == config.source
        assert watcher.subscription.error is None


def test_an_empty_registry_is_a_view_too(config) -> None:
    with Watcher(registry(config)) as watcher:
        assert watcher.until_live().pools == {}


def test_an_empty_place_is_named_as_long_as_it_is_empty(config, writer: Writer) -> None:
    """A wrong prefix looks like a fleet that is not there yet."""
    with Watcher(registry(config)) as watcher:
        nothing = f"nothing is registered below {config.prefix}/pools/"
        assert watcher.until_live().problems == (nothing,)
        writer.put("a")
        watcher.until(lambda fleet: ids(fleet) == ["a"] and fleet.problems == ())
        writer.delete("a")
        watcher.until(lambda fleet: ids(fleet) == [] and fleet.problems == (nothing,))


def test_other_prefixes_are_none_of_our_business(config, writer: Writer) -> None:
    writer.put("a")
    with Watcher(registry(config)) as watcher:
        watcher.until_ids("a")
        writer.put_raw(f"{config.prefix}/clients/x", b"{}")
        writer.put_raw(f"{config.prefix}-other/pools/llama/endpoints/z", b"{}")
        writer.put("b")
        watcher.until_ids("a", "b")
        assert not watcher.last.problems


def test_a_big_listing_comes_whole(config, writer: Writer) -> None:
    """More than gRPC's default limit of 4 MB, and more than one page."""
    for i in range(1_100):
        writer.put(f"e{i:04}", labels={f"l{j}": "x" * 1_000 for j in range(5)})
    with Watcher(registry(config)) as watcher:
        watcher.until(lambda fleet: len(ids(fleet)) == 1_100)
        writer.delete("e0500")
        watcher.until(lambda fleet: len(ids(fleet)) == 1_099)


def test_a_burst_is_delivered_whole_and_in_few_slices(config, writer: Writer) -> None:
    with Watcher(registry(config)) as watcher:
        watcher.until_live()
        started = time.monotonic()
        writer.fill(f"e{i:03}" for i in range(300))
        watcher.until(lambda fleet: len(ids(fleet)) == 300)
        slices = (watcher.moments[-1] - started) / 0.05
        assert len(watcher.fleets) <= slices + 3


def test_an_event_arrives_at_once(config, writer: Writer) -> None:
    with Watcher(registry(config)) as watcher:
        watcher.until_live()
        delays: list[float] = []
        for i in range(60):
            with Stopwatch() as watch:
                writer.put(f"e{i}")
                watcher.until(lambda fleet, i=i: len(ids(fleet)) == i + 1)
            delays.append(watch.seconds)
            if len(delays) >= 5 and sorted(delays[-5:])[2] < 0.2:  # of five in a row most
                break
        assert sorted(delays[-5:])[2] < 0.2


def test_a_quiet_watch_stays_up_and_young(config, writer: Writer) -> None:
    writer.put("a")
    with Watcher(registry(quick(config.source, heartbeat=2.0, timeout=30.0))) as watcher:
        watcher.until_ids("a")
        first = time.time() - watcher.subscription.age(time.time())
        eventually(lambda: time.time() - watcher.subscription.age(time.time()) > first + 1.0, "heartbeats")
        assert len(watcher.fleets) == 1


# --------------------------------------------------------------------------------------- E1: compaction


def test_E1_compacted_while_the_watch_was_down(shared_etcd: EtcdCluster, config, writer: Writer) -> None:
    writer.fill(["a", "b", "c"])
    with Proxy(shared_etcd.members[0].address) as proxy:
        url = f"etcd://{proxy.address}{config.prefix}"
        with Watcher(registry(quick(url))) as watcher:
            watcher.until_ids("a", "b", "c")
            proxy.hold()
            watcher.until_stale()
            for i in range(500):
                writer.put_raw(f"{config.prefix}-unrelated/{i}", b"x")
            writer.put("b", weight=7)
            writer.delete("c")
            shared_etcd.compact()
            proxy.heal()
            with Stopwatch() as watch:
                fleet = watcher.until(lambda fleet: not fleet.stale and ids(fleet) == ["a", "b"])
            assert watch.seconds <= 2.0
            assert fleet.pools["llama"].endpoints[1].weight == 7
            with Stopwatch() as watch:
                writer.put("d")
                watcher.until_ids("a", "b", "d")
            assert watch.seconds <= 1.0


def test_E1_compacted_between_listing_and_watch(shared_etcd, config, writer: Writer, monkeypatch) -> None:
    writer.put("a")
    listings = []
    original = EtcdClient.list

    def list_then_compact(self, prefix):
        found = original(self, prefix)
        if not listings:  # the first one: by the time of the watch its revision is gone
            writer.fill(["b", "c"])
            shared_etcd.compact()
        listings.append(found)
        return found

    monkeypatch.setattr(EtcdClient, "list", list_then_compact)
    with Watcher(registry(config)) as watcher:
        watcher.until_ids("a", "b", "c")
        assert len(listings) == 2
        assert not any(fleet.stale for fleet in watcher.fleets), "it is no fault of the connection"


def test_E1_the_answer_to_a_compacted_revision_is_understood(shared_etcd, config, writer: Writer) -> None:
    writer.fill(["a", "b"])
    shared_etcd.compact()
    stream = writer.client.watch(config.prefix, 1)
    assert any(response.compacted for response in stream)
    stream.close()


# -------------------------------------------------------------------------------------- E5: bad records


def test_E5_one_bad_record_does_not_spoil_the_rest(config, writer: Writer, caplog) -> None:
    good = [f"good-{i}" for i in range(5)]
    writer.fill(good)
    bad = {
        "empty": b"",
        "cut": b'{"url": "http',
        "array": b"[]",
        "bytes": b"\xff\xfe",
        "port": b'{"url": "http://h:70000"}',
        "weight": b'{"url": "http://h", "weight": "abc"}',
        "huge": b'{"url": "http://h", "model": "' + b"x" * 2_000_000 + b'"}',
    }
    for ident, value in bad.items():
        writer.put_raw(writer.key(ident), value)
    with grpc.insecure_channel(writer.client.member) as channel:  # a key that no str can hold
        put = channel.unary_unary("/etcdserverpb.KV/Put")
        put(encode((1, writer.key("x").encode() + b"\xff"), (2, b"{}")), timeout=30)
    writer.put("extra", unknown={"a": 1})
    writer.put("twin", url="http://good-1:8000")
    usable = [*good, "extra", "twin"]
    with Watcher(registry(config)) as watcher:
        fleet = watcher.until_ids(*usable)
        assert len(fleet.problems) == len(bad) + 2
        assert any("same URL" in text for text in fleet.problems)
        for value in (b"{", b"[]", b"\xff"):
            writer.put_raw(writer.key("good-0"), value)
            fleet = watcher.until(lambda fleet: any("good-0: is" in text for text in fleet.problems))
            assert ids(fleet) == sorted(usable), "keeps its last good form"
            writer.put("good-0")
            watcher.until(lambda fleet: not any("good-0: " in text for text in fleet.problems))
        assert watcher.subscription.error is None
    logged = [record.getMessage() for record in caplog.records if "bad record" in record.getMessage()]
    assert len(logged) == len(bad) + 2, "one line per key and minute"
    assert all(len(text) < 500 for text in logged)


# -------------------------------------------------------------------------------- E6: the keys vanish


def test_E6_all_keys_vanish_and_come_back_within_the_grace(config, writer: Writer) -> None:
    idents = ["a", "b", "c", "d"]
    writer.fill(idents)
    with Watcher(registry(config, grace=110)) as watcher:
        watcher.until_ids(*idents)
        writer.delete(*idents)
        watcher.until(lambda fleet: any("vanished" in text for text in fleet.problems))
        assert all(ids(fleet) for fleet in watcher.fleets), "never empty"
        assert not watcher.last.stale
        writer.fill(idents)
        watcher.until(lambda fleet: not fleet.problems and ids(fleet) == idents)


def test_E6_all_keys_vanish_for_good(config, writer: Writer) -> None:
    idents = ["a", "b", "c", "d"]
    writer.fill(idents)
    with Watcher(registry(config, grace=0.6)) as watcher:
        watcher.until_ids(*idents)
        with Stopwatch() as watch:
            writer.delete(*idents)
            fleet = watcher.until_ids()
        assert watch.wall >= 0.6
        assert watch.seconds < 1.5, "it waited for a heartbeat"
        assert fleet.pools["llama"].endpoints == (), "the pool is known, and empty"


def test_E6_a_grace_of_zero_believes_at_once(config, writer: Writer) -> None:
    writer.fill(["a", "b", "c"])
    with Watcher(registry(config, grace=0)) as watcher:
        watcher.until_ids("a", "b", "c")
        with Stopwatch() as watch:
            writer.delete("a", "b", "c")
            watcher.until_ids()
        assert watch.seconds < 0.6


def test_E6_a_process_that_starts_while_the_keys_are_gone_has_the_grace_too(config, tmp_path) -> None:
    save_snapshot(tmp_path / "s.json", config, "a", "b")
    with Watcher(registry(config, grace=0.5, snapshot_path=str(tmp_path / "s.json"))) as watcher:
        watcher.until(lambda fleet: not fleet.stale and not ids(fleet))
        assert ids(next(fleet for fleet in watcher.fleets if not fleet.stale)) == ["a", "b"]


# -------------------------------------------------------------------------------------- E9: flapping


def test_E9_a_flapping_key(config, writer: Writer) -> None:
    writer.fill(["a", "b", "c"])
    with Watcher(registry(config, grace=5)) as watcher:
        original = watcher.until_ids("a", "b", "c").pools["llama"].endpoints[1]
        for _ in range(10):
            writer.delete("b")
            watcher.until_ids("a", "c")
            writer.put("b")
            fleet = watcher.until_ids("a", "b", "c")
            assert fleet.pools["llama"].endpoints[1] == original
        assert not any(fleet.stale or fleet.problems for fleet in watcher.fleets)


# ------------------------------------------------------------------- proxies, processes, threads, ends


def test_proxy_variables_are_ignored_unless_trusted(config, writer: Writer, monkeypatch) -> None:
    dead = own_port()
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{dead}")
    for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    writer.put("a")
    assert ids(first_fleet(registry(config), 40)) == ["a"]
    trusting = quick(config.source, trust_env=True)
    with pytest.raises(RegistryUnavailable):
        first_fleet(registry(trusting), 0.5)


def test_nothing_runs_before_subscribe_and_nothing_after_close(config, writer: Writer) -> None:
    writer.put("a")
    threads, before = threading.active_count(), own_threads()
    quiet = registry(config)
    assert own_threads() <= before
    watcher = Watcher(quiet)
    assert [thread.name for thread in own_threads() - before] == ["gpuroute-etcd"]
    watcher.until_ids("a")
    watcher.subscription.close()
    watcher.subscription.close()
    eventually(lambda: own_threads() <= before, "its thread to end")
    writer.put("b")
    assert watcher.ids() == ["a"]
    eventually(lambda: threading.active_count() <= threads, "gRPC's own threads to end")


def test_close_is_quick_whether_etcd_can_be_reached_or_not(config) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        for place in (config, quick(f"etcd://127.0.0.1:{mute.getsockname()[1]}")):
            for _ in range(10):  # who is held up once is not each time
                watcher = Watcher(registry(place))
                with Stopwatch() as watch:
                    watcher.subscription.close()
                if watch.seconds < 0.5 and not watcher.subscription._thread.is_alive():
                    break
            assert watch.seconds < 0.5
            assert not watcher.subscription._thread.is_alive()


def test_a_subscriber_may_close_from_within_its_callback(config, writer: Writer) -> None:
    writer.put("a")
    closed = threading.Event()
    box: list = []
    ready = threading.Event()

    def on_change(fleet) -> None:
        ready.wait(40)
        box[0].close()
        closed.set()

    box.append(registry(config).subscribe(on_change))
    ready.set()
    assert closed.wait(40)
    eventually(lambda: not box[0]._thread.is_alive())


def test_a_subscriber_that_raises_does_not_end_the_watch(config, writer: Writer) -> None:
    seen = []

    def on_change(fleet) -> None:
        seen.append(ids(fleet))
        raise RuntimeError("a bug of the subscriber")

    subscription = registry(config).subscribe(on_change)
    writer.put("a")
    eventually(lambda: ["a"] in seen)
    writer.put("b")
    eventually(lambda: ["a", "b"] in seen)
    subscription.close()


def test_a_bug_in_the_watch_does_not_end_it(config, writer: Writer, monkeypatch, caplog) -> None:
    monkeypatch.setattr("gpuroute.registry.etcd.REFUSED_PAUSE_S", 0.0)
    writer.put("a")
    failures = []
    original = EtcdClient.watch

    def watch(self, prefix, revision):
        if len(failures) < 2:
            failures.append(1)
            raise KeyError("a bug of ours")
        return original(self, prefix, revision)

    monkeypatch.setattr(EtcdClient, "watch", watch)
    with Watcher(registry(config)) as watcher:
        writer.put("b")
        watcher.until(lambda fleet: not fleet.stale and ids(fleet) == ["a", "b"])
        eventually(lambda: len(failures) == 2 and watcher.subscription._stream is not None)
    logged = [record.levelno for record in caplog.records if "failed and starts again" in record.getMessage()]
    assert logged == [logging.ERROR] * 2


FORK = """
import os, sys
sys.path.insert(0, sys.argv[2])
from gpuroute.registry.etcd import EtcdRegistry
from registry.watching import Proxy, Watcher, Writer, eventually, ids, quick, save_snapshot
registry = EtcdRegistry(quick(sys.argv[1], heartbeat=30, timeout=30))
watcher = Watcher(registry)
watcher.until_ids("a")
child = os.fork()
if child == 0:
    watcher.subscription.close()
    with Watcher(registry) as again:
        again.until_ids("a")
    os._exit(7)
_, status = os.waitpid(child, 0)
watcher.until_live()
with Watcher(registry) as another:
    another.until_ids("a")
print(os.waitstatus_to_exitcode(status), watcher.subscription.error)
watcher.subscription.close()
"""


def test_a_forked_child_subscribes_anew_and_leaves_the_parent_alone(config, writer: Writer) -> None:
    writer.put("a")
    assert run_script(FORK, config.source).split() == ["7", "None"]


LEFT_OPEN = """
import sys
sys.path.insert(0, sys.argv[2])
from gpuroute.registry.etcd import EtcdRegistry
from registry.watching import Proxy, Watcher, Writer, eventually, ids, quick, save_snapshot
watcher = Watcher(EtcdRegistry(quick(sys.argv[1], heartbeat=100)))
watcher.until_ids("a")
print("done")
"""


def test_a_process_that_never_closes_ends_without_ado(config, writer: Writer) -> None:
    writer.put("a")
    with Stopwatch() as watch:
        assert run_script(LEFT_OPEN, config.source) == "done\n"
    assert watch.seconds < 50, "it waited for a heartbeat"


def run_script(code: str, *args: str) -> str:
    command = [sys.executable, "-c", code, *args, str(Path(__file__).parents[1])]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return done.stdout
