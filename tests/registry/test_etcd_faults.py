"""An etcd that is silent, dead, frozen, cut off, not there yet, or wants to know who asks. Cases E2 and E7.

Heartbeats are 0.3 s here instead of 5 s, so detection times scale by 17.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Self

import grpc
import pytest
from ports import own_port, own_ports
from registry.etcd_server import EtcdCluster
from registry.watching import Proxy, Watcher, Writer, eventually, ids, patient, quick, refusal, save_snapshot, soon
from stopwatch import Stopwatch

from gpuroute.config import Settings
from gpuroute.core.wire import encode
from gpuroute.errors import RegistryUnavailable
from gpuroute.registry import etcd_options, first_fleet, snapshot
from gpuroute.registry.etcd import EtcdRegistry
from gpuroute.registry.etcd_client import EtcdClient, EtcdError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.real_time


def registry(config, *, grace: float = 0.0, **options) -> EtcdRegistry:
    return EtcdRegistry(config, grace=grace, **options)


# ------------------------------------------------------------------------------------ E2: silent watches


def test_E2_a_black_hole_is_noticed_and_survived(shared_etcd, config, writer: Writer) -> None:
    writer.fill(["a", "b", "c"])
    with Proxy(shared_etcd.members[0].address) as proxy:
        with Watcher(registry(quick(f"etcd://{proxy.address}{config.prefix}"))) as watcher:
            watcher.until_ids("a", "b", "c")

            def go_dark() -> None:
                proxy.heal()
                watcher.until_live()
                proxy.hold()
                with Stopwatch() as watch:
                    assert ids(watcher.until_stale()) == ["a", "b", "c"], "the last set stays in use"
                noticed.append(watch.seconds)

            noticed: list[float] = []
            eventually(lambda: go_dark() or noticed[-1] < 3 * 0.3 + 0.5, "it is noticed soon")
            writer.delete("a")
            writer.put("d")
            assert watcher.subscription.error
            eventually(lambda: watcher.subscription.age(time.time()) > 1.5, "an age that grows")
            proxy.heal()
            watcher.until(lambda fleet: not fleet.stale and ids(fleet) == ["b", "c", "d"])
            eventually(lambda: watcher.subscription.error is None, "no trouble")


def test_E2_another_member_takes_over_while_the_first_is_dark(shared_etcd, config, writer: Writer) -> None:
    writer.fill(["a", "b"])
    address = shared_etcd.members[0].address
    with Proxy(address) as proxy:
        with Watcher(registry(quick(f"etcd://{proxy.address},{address}{config.prefix}"))) as watcher:
            watcher.until_ids("a", "b")
            assert proxy.accepted == 1
            proxy.hold()
            writer.put("c")
            watcher.until(lambda fleet: not fleet.stale and ids(fleet) == ["a", "b", "c"])


class ScriptedEtcd:
    """A gRPC server that lists one endpoint and whose watches do what `watch(number)` yields. Its HTTP/2 is healthy."""

    def __init__(self, watch) -> None:
        self.watches = 0
        self.over = threading.Event()
        self._watch = watch
        self._pool = ThreadPoolExecutor(8)
        self._server = grpc.server(self._pool)
        handlers = {
            "KV": {"Range": grpc.unary_unary_rpc_method_handler(self._range)},
            "Watch": {"Watch": grpc.stream_stream_rpc_method_handler(self._watching)},
        }
        for service, methods in handlers.items():
            generic = grpc.method_handlers_generic_handler(f"etcdserverpb.{service}", methods)
            self._server.add_generic_rpc_handlers((generic,))
        self.url = f"etcd://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.over.set()
        self._server.stop(0).wait()
        self._pool.shutdown()

    def _range(self, request: bytes, context: object) -> bytes:
        kv = encode((1, "/gpuroute/pools/llama/endpoints/a"), (5, b'{"url": "http://a"}'))
        return encode((1, encode((3, 7))), (2, kv))

    def _watching(self, requests, context):
        self.watches += 1
        yield encode((3, 1))
        yield from self._watch(self.watches)
        self.over.wait()


def test_subscriptions_do_not_share_a_connection(shared_etcd, config, writer: Writer) -> None:
    """One that leaves a dead connection must not be given it again because another still holds it."""
    writer.put("a")
    with Proxy(shared_etcd.members[0].address) as proxy:
        source = registry(patient(f"etcd://{proxy.address}{config.prefix}"))
        with Watcher(source) as one, Watcher(source) as other:
            one.until_ids("a")
            other.until_ids("a")
            assert proxy.accepted == 2


def test_E2_silence_above_a_healthy_connection() -> None:
    with ScriptedEtcd(lambda number: []) as etcd, Watcher(registry(quick(etcd.url))) as watcher:
        watcher.until_ids("a")
        eventually(lambda: any("silent" in text for text in watcher.troubles), "a stale view, and why")
        eventually(lambda: etcd.watches >= 2, "a second watch")


def test_a_watch_that_is_refused_while_its_stream_stays_open_starts_again() -> None:
    refused = encode((2, -1), (3, 1), (4, 1), (6, "etcdserver: invalid auth token"))
    with ScriptedEtcd(lambda number: [refused]) as etcd, Watcher(registry(quick(etcd.url))) as watcher:
        watcher.until_ids("a")
        eventually(lambda: any("invalid auth token" in text for text in watcher.troubles), "a stale view, and why")
        eventually(lambda: etcd.watches >= 2, "a second watch")


def test_bytes_that_are_not_etcds_end_the_watch_but_not_the_view() -> None:
    with ScriptedEtcd(lambda number: [b"\x0b\xff"]) as etcd, Watcher(registry(quick(etcd.url))) as watcher:
        eventually(lambda: any(fleet.stale for fleet in watcher.fleets), "a stale view")
        assert watcher.ids() == ["a"]
        eventually(lambda: etcd.watches >= 2, "a second watch")


def test_E2_a_member_without_quorum_is_not_believed(tmp_path) -> None:
    with EtcdCluster(tmp_path, members=3) as cluster:
        config = quick(cluster.url)
        writer = Writer(config)
        writer.fill(["a", "b"])
        with Watcher(registry(config)) as watcher:
            watcher.until_ids("a", "b")
            attached = watcher.subscription._client.member
            others = [member for member in cluster.members if member.address != attached]
            assert len(others) == 2
            for member in others:
                member.freeze()
            watcher.until_stale()
            assert watcher.ids() == ["a", "b"]
            for member in others:
                member.thaw()
            writer.put("c")
            watcher.until(lambda fleet: not fleet.stale and ids(fleet) == ["a", "b", "c"])
        writer.client.close()


# -------------------------------------------------------------------- members that die, freeze, come back


def test_a_killed_etcd_comes_back(tmp_path) -> None:
    with EtcdCluster(tmp_path) as cluster:
        config = quick(cluster.url)
        writer = Writer(config)
        writer.fill(["a", "b"])
        with Watcher(registry(config)) as watcher:
            watcher.until_ids("a", "b")
            for number in range(4):  # who is held up once is not each time
                before = watcher.ids()
                cluster.members[0].kill()
                assert ids(watcher.until_stale()) == before
                eventually(lambda: "UNAVAILABLE" in (watcher.subscription.error or ""), "the trouble to be known")
                cluster.members[0].start()
                writer.put(f"c{number}")
                with Stopwatch() as watch:
                    watcher.until(lambda fleet, n=number: not fleet.stale and f"c{n}" in ids(fleet))
                if watch.seconds < 3:
                    break
            assert watch.seconds < 3
            eventually(lambda: watcher.subscription.error is None, "no trouble")
        writer.client.close()


@pytest.mark.parametrize("means", ["heartbeat", "ping"])
def test_a_frozen_etcd_is_noticed(tmp_path, means: str) -> None:
    options = {"heartbeat": 0.3} if means == "heartbeat" else {"heartbeat": 60, "ping_interval": 0.5, "ping_timeout": 0.5}
    with EtcdCluster(tmp_path) as cluster:
        config = quick(cluster.url, **options)
        writer = Writer(config)
        writer.put("a")
        with Watcher(registry(config)) as watcher:
            watcher.until_ids("a")
            for number in range(4):  # who is held up once is not each time
                with Stopwatch() as watch:
                    cluster.members[0].freeze()
                    watcher.until_stale()
                cluster.members[0].thaw()
                writer.put(f"b{number}")
                watcher.until(lambda fleet, n=number: not fleet.stale and f"b{n}" in ids(fleet))
                if watch.seconds < 3:
                    break
            assert watch.seconds < 3
        for _ in range(4):
            watcher = Watcher(registry(config))
            watcher.until_live()
            cluster.members[0].freeze()
            with Stopwatch() as watch:
                watcher.subscription.close()
            ended = watch.seconds < 1.0 and not watcher.subscription._thread.is_alive()
            cluster.members[0].thaw()
            if ended:
                break
        assert ended, "to close waits for nobody"
        writer.client.close()


def test_three_members_and_their_leader_is_killed(tmp_path) -> None:
    with EtcdCluster(tmp_path, members=3) as cluster:
        assert any(is_survived_soon(cluster, ident) for ident in "abcd"), "who is held up once is not each time"


def is_survived_soon(cluster: EtcdCluster, ident: str) -> bool:
    """Whether a watch at the leader sees that put soon after the leader was killed."""
    leader = cluster.leader()
    order = sorted(cluster.members, key=lambda member: member is not leader)
    config = quick("etcd://" + ",".join(member.address for member in order))
    writer = Writer(config, timeout=1.0)  # soon at the next member
    with Watcher(registry(config)) as watcher:
        watcher.until_live()
        was_there = watcher.subscription._client.member == leader.address
        leader.kill()
        writer.put(ident)
        with Stopwatch() as watch:
            watcher.until(lambda fleet: ident in ids(fleet))
    writer.client.close()
    leader.start()
    cluster.wait_healthy()
    return was_there and watch.seconds < 1.5


# ------------------------------------------------------------------------ E7: unreachable at the start


def test_E7_i_all_members_down_and_no_snapshot(tmp_path) -> None:
    one, two = own_ports(2)
    url = f"etcd://127.0.0.1:{one},127.0.0.1:{two}"

    def refused() -> str:
        with pytest.raises(RegistryUnavailable, match="after 1 s: ") as caught:
            first_fleet(registry(quick(url)), 1.0)
        return str(caught.value)

    said = [soon(2.5, refused)]
    eventually(
        lambda: re.search(r"etcd 127\.0\.0\.1:.*refused", said[-1]) or said.append(refused()), "the reason is said"
    )
    assert refusal(registry(quick(url), snapshot_path=str(tmp_path / "none.json")), "No such file")
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "bad.json").chmod(0o600)
    assert refusal(registry(quick(url), snapshot_path=str(tmp_path / "bad.json")), "is not JSON")


def test_E7_ii_starts_from_the_snapshot_and_switches_to_live(tmp_path) -> None:
    cluster = EtcdCluster(tmp_path)
    config = quick(cluster.url)
    path = tmp_path / "s.json"
    save_snapshot(path, config, "a", "b")

    def booted() -> Watcher:
        watchers.append(Watcher(registry(config, snapshot_path=str(path))))
        watchers[-1].until_stale()
        return watchers[-1]

    watchers: list[Watcher] = []
    watcher = soon(1.0, booted)
    for other in watchers[:-1]:
        other.subscription.close()
    fleet = watcher.last
    with watcher:
        assert ids(fleet) == ["a", "b"]
        assert 590 < watcher.subscription.age(time.time()) < 900
        assert watcher.subscription.error
        with cluster:
            writer = Writer(config)
            writer.fill(["b", "c"])
            watcher.until(lambda fleet: not fleet.stale and ids(fleet) == ["b", "c"])
            writer.client.close()
        assert [key for key in snapshot.load(path, source=config.source).records if "endpoints" in key]


def test_E7_iii_one_of_three_is_down_and_listed_first(shared_etcd, config, writer: Writer) -> None:
    writer.put("a")
    dead = own_port()
    live = shared_etcd.members[0].address

    def watched() -> bool:
        with Watcher(registry(quick(f"etcd://127.0.0.1:{dead},{live},{live}{config.prefix}"))) as watcher:
            return not watcher.until_ids("a").stale

    assert soon(1.0, watched)


def test_E7_iv_a_port_that_accepts_and_never_answers(shared_etcd, config, writer: Writer, tmp_path) -> None:
    writer.put("a")
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"

        def refused() -> str:
            with pytest.raises(RegistryUnavailable) as caught:
                first_fleet(registry(quick(f"etcd://{address}")), 1.5)
            return str(caught.value)

        said = [soon(2.6, refused)]
        eventually(lambda: f"etcd {address}" in said[-1] or said.append(refused()), "the member is named")
        path = tmp_path / "s.json"
        save_snapshot(path, quick(f"etcd://{address}"), "old")
        fleet = soon(2.5, lambda: first_fleet(registry(quick(f"etcd://{address}"), snapshot_path=str(path)), 40))
        assert ids(fleet) == ["old"], "the snapshot is taken when the connect timeout of 1 s has passed"
        live = shared_etcd.members[0].address
        fleet = soon(2.5, lambda: first_fleet(registry(quick(f"etcd://{address},{live}{config.prefix}")), 40))
        assert ids(fleet) == ["a"]


def test_the_snapshot_is_written_and_follows_changes(config, writer: Writer, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("gpuroute.registry.snapshot.SAVE_INTERVAL_S", 0.1)
    path = tmp_path / "s.json"

    def saved() -> list[str]:
        records = snapshot.load(path, source=config.source).records if path.exists() else {}
        return sorted(key.rpartition("/")[2] for key in records if "/endpoints/" in key)

    writer.put("a")
    with Watcher(registry(replace(config, heartbeat=30.0), snapshot_path=str(path))) as watcher:
        eventually(lambda: saved() == ["a"])
        writer.put("b")
        eventually(lambda: saved() == ["a", "b"])
        writer.delete("a", "b")
        watcher.until_ids()
        writer.put("c")
        eventually(lambda: saved() == ["c"])
        writer.delete("c")
        watcher.until_ids()
    assert saved() == ["c"], "an empty fleet is nothing to start from"


def test_a_snapshot_that_cannot_be_written_harms_nothing(config, writer: Writer, tmp_path, caplog) -> None:
    (tmp_path / "file").write_text("")
    writer.put("a")
    with Watcher(registry(config, snapshot_path=str(tmp_path / "file" / "s.json"))) as watcher:
        watcher.until_ids("a")
        writer.put("b")
        watcher.until_ids("a", "b")
        eventually(lambda: "snapshot cannot be written" in caplog.text)


# ------------------------------------------------------------------------------------- TLS and users


def test_tls_and_mtls(tmp_path) -> None:
    trustme = pytest.importorskip("trustme")
    with EtcdCluster(tmp_path, tls=trustme.CA(), client_auth=True) as cluster:
        ca, cert, key = cluster.client_pem()
        config = quick(cluster.url, ca=ca, cert=cert, key=key)
        writer = Writer(config)
        writer.put("a")
        with Watcher(registry(config)) as watcher:
            watcher.until_ids("a")
            writer.put("b")
            watcher.until_ids("a", "b")
        assert refusal(registry(quick(cluster.url, ca=ca)), "UNAVAILABLE")  # no client certificate
        stranger = tmp_path / "stranger.pem"
        trustme.CA().cert_pem.write_to_path(str(stranger))
        assert refusal(registry(quick(cluster.url, ca=str(stranger), cert=cert, key=key)), "UNAVAILABLE")
        assert refusal(registry(quick(cluster.url.replace("etcds", "etcd"))), "UNAVAILABLE")  # no TLS at all
        rotated = tmp_path / "rotated.pem"
        rotated.write_text("not a certificate")
        broken = registry(quick(cluster.url, ca=str(rotated), cert=cert, key=key))
        with Watcher(broken) as watcher:
            eventually(lambda: watcher.subscription.error)
            rotated.write_bytes((tmp_path / "ca.pem").read_bytes())  # read again for every connection
            watcher.until_ids("a", "b")
        writer.client.close()


def test_users_tokens_that_expire_and_wrong_passwords(tmp_path, caplog) -> None:
    with EtcdCluster(tmp_path, flags=["--auth-token-ttl=1", "--bcrypt-cost=4"]) as cluster:
        cluster.ctl("user", "add", "root:root-pw")
        cluster.ctl("user", "grant-role", "root", "root")
        cluster.ctl("user", "add", "reader:canary")
        cluster.ctl("role", "add", "reading")
        cluster.ctl("role", "grant-permission", "reading", "read", "/gpuroute/pools/", "--prefix=true")
        cluster.ctl("user", "grant-role", "reader", "reading")
        reader = quick(cluster.url, user="reader", password="canary")
        before = EtcdClient(replace(reader, timeout=30.0))
        before.list("/gpuroute/pools/")  # a password is no obstacle before authentication is on
        cluster.ctl("auth", "enable")

        writer = Writer(quick(cluster.url, user="root", password="root-pw"))
        writer.put("a")
        with (
            Proxy(cluster.members[0].address) as proxy,
            Watcher(registry(quick(f"etcd://{proxy.address}", user="reader", password="canary"))) as watcher,
        ):
            watcher.until_ids("a")
            token = watcher.subscription._client._token
            assert token
            eventually(lambda: expired(cluster, token), "the token to expire")
            writer.put("b")  # the watch outlives its token, and the writer logs in again
            watcher.until_ids("a", "b")
            proxy.cut()
            writer.put("c")
            watcher.until(lambda fleet: not fleet.stale and ids(fleet) == ["a", "b", "c"])
            assert watcher.subscription._client._token != token
            cluster.members[0].kill()
            watcher.until_stale()
            cluster.members[0].start()
            writer.put("d")  # etcd may know the tokens of its log again, or not
            watcher.until(lambda fleet: not fleet.stale and ids(fleet) == ["a", "b", "c", "d"])
            cluster.ctl("auth", "disable", user="root:root-pw")  # old tokens are refused now, and there are no new ones
            proxy.cut()
            writer.put("e")
            watcher.until(lambda fleet: not fleet.stale and ids(fleet) == ["a", "b", "c", "d", "e"])
            cluster.ctl("auth", "enable")
        for refused in (
            quick(cluster.url),
            quick(cluster.url, user="reader", password="canary2"),
            quick(f"{cluster.url}/elsewhere", user="reader", password="canary"),
        ):
            assert "canary" not in refusal(registry(refused), "INVALID_ARGUMENT|PERMISSION_DENIED")
        before.close()
        writer.client.close()
    assert "canary" not in caplog.text


def expired(cluster: EtcdCluster, token: str) -> bool:
    client = EtcdClient(quick(cluster.url))
    client._token = token
    time.sleep(1.5)  # asking is what keeps a token alive
    try:
        client.read("/gpuroute/pools/x")
    except EtcdError as error:
        return error.refused
    finally:
        client.close()
    return False


def test_a_password_that_was_changed_is_read_from_its_file_again(tmp_path: Path, caplog) -> None:
    path = tmp_path / "password"
    path.write_text("canary-1\n")
    with (
        EtcdCluster(tmp_path, flags=["--bcrypt-cost=4"]) as cluster,
        Proxy(cluster.members[0].address) as proxy,
        open_writer(cluster, "canary-1") as writer,
    ):
        writer.put("a")
        environ = {"GPUROUTE_ETCD_USER": "root", "GPUROUTE_ETCD_PASSWORD_FILE": str(path)}
        reader = quick(f"etcd://{proxy.address}", **etcd_options(Settings.from_env(environ)))
        with Watcher(registry(reader)) as watcher:
            watcher.until_ids("a")
            writer.client._unary("Auth/UserChangePassword", encode((1, "root"), (2, "canary-2")))
            proxy.cut()
            watcher.until_stale()
            eventually(
                lambda: "authentication failed" in (watcher.subscription.error or ""), "the old password to be refused"
            )
            assert watcher.ids() == ["a"]
            path.write_text("canary-2\n")
            watcher.until_live()
            new = {"user": "root", "password": "canary-2"}
            with contextlib.closing(EtcdClient(patient(cluster.url, **new))) as other:
                other.put(writer.key("b"), b'{"url": "http://b:8000"}')
            watcher.until_ids("a", "b")
    assert "canary" not in caplog.text


@contextlib.contextmanager
def open_writer(cluster: EtcdCluster, password: str) -> Iterator[Writer]:
    """With authentication on, and root its only user."""
    cluster.ctl("user", "add", f"root:{password}")
    cluster.ctl("user", "grant-role", "root", "root")
    cluster.ctl("auth", "enable")
    writer = Writer(quick(cluster.url, user="root", password=password))
    try:
        yield writer
    finally:
        writer.client.close()


def test_a_watch_with_a_dead_token_recovers(tmp_path, monkeypatch, caplog) -> None:
    """etcd answers created+canceled to it, and then leaves the stream open and silent."""
    with EtcdCluster(tmp_path, flags=["--bcrypt-cost=4"]) as cluster:
        cluster.ctl("user", "add", "root:root-pw")
        cluster.ctl("user", "grant-role", "root", "root")
        cluster.ctl("auth", "enable")
        config = quick(cluster.url, user="root", password="root-pw")
        original, spoilt = EtcdClient.watch, []

        def watch(self, prefix, revision):
            if not spoilt:
                self._token = "dead.1"
                spoilt.append(1)
            return original(self, prefix, revision)

        monkeypatch.setattr(EtcdClient, "watch", watch)
        with Watcher(registry(config)) as watcher:
            eventually(lambda: "etcd refused the watch" in caplog.text)
            writer = Writer(config)
            writer.put("a")
            watcher.until_ids("a")
            writer.client.close()
