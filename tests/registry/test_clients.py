"""Seats against a real etcd: one for each client, packed when clients leave, kept while etcd is away."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from registry.etcd_server import EtcdCluster
from registry.watching import Writer, eventually, quick, running

from gpuroute import Router
from gpuroute.cli import main
from gpuroute.core.wire import encode
from gpuroute.registry.clients import EtcdSeat, clients_prefix, count_clients
from gpuroute.registry.etcd import EtcdRegistry
from gpuroute.registry.etcd_client import EtcdClient, EtcdError

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuroute.core.subset import Seat
    from gpuroute.registry.etcd_config import EtcdConfig

pytestmark = pytest.mark.real_time

TESTS = str(Path(__file__).parents[1])
SOON = 60.0
QUICK = {"ttl": 10.0, "every": 0.2, "settle": 0.2}  # a lease must outlast the pauses of a busy machine


class QuickRegistry(EtcdRegistry):
    """Counts often, so that a test need not wait."""

    def take_seat(
        self, on_seat: Callable[[Seat], None], place: tuple[str, str] = ("", ""), *, numbered: bool = True
    ) -> EtcdSeat:
        return EtcdSeat(self.config, on_seat, place, numbered=numbered, **QUICK)


def count(config: EtcdConfig) -> int:
    """With patience: etcd may be held up for a moment."""
    return count_clients(replace(config, timeout=30.0))


def seat(config: EtcdConfig, **options: Any) -> EtcdSeat:
    return EtcdSeat(config, lambda _: None, **{**QUICK, **options})


def ordinals(seats: list[EtcdSeat]) -> list[int | None]:
    return sorted(one.seat.ordinal if one.seat else -1 for one in seats)


def packed(seats: list[EtcdSeat]) -> bool:
    return all(one.seat and one.seat.clients == len(seats) for one in seats) and ordinals(seats) == [*range(len(seats))]


def stop(*seats: EtcdSeat) -> None:
    for one in seats:
        one.close()


def router(config: EtcdConfig, **settings: object) -> Router:
    return Router(QuickRegistry(config), **{"policy": "p2c", "subset": "auto", **settings})


def members(router: Router) -> set[str]:
    return {endpoint.id for endpoint in router.snapshot().pools["llama"].endpoints}


def test_clients_that_start_at_once_get_an_ordinal_each(config: EtcdConfig) -> None:
    seats = [seat(config) for _ in range(12)]
    eventually(lambda: packed(seats), "twelve ordinals", SOON)
    assert count(config) == 12
    stop(*seats)
    eventually(lambda: count(config) == 0, "all seats given up")


def test_a_client_that_leaves_moves_at_most_one_other(config: EtcdConfig) -> None:
    seats = [seat(config) for _ in range(5)]
    eventually(lambda: packed(seats), "five ordinals", SOON)
    before = {one: one.seat.ordinal for one in seats if one.seat}
    gone = next(one for one in seats if before[one] == 1)
    gone.close()
    seats.remove(gone)
    eventually(lambda: packed(seats), "four ordinals", SOON)
    moved = [before[one] for one in seats if one.seat and one.seat.ordinal != before[one]]
    assert moved == [4]
    stop(*seats)


def test_a_client_that_restarts_moves_nobody(config: EtcdConfig) -> None:
    seats = [seat(config, settle=60.0) for _ in range(3)]
    eventually(lambda: all(one.seat for one in seats) and ordinals(seats) == [0, 1, 2], "three ordinals", SOON)
    old = next(one for one in seats if one.seat and one.seat.ordinal == 0)
    others = {one: one.seat for one in seats if one is not old}
    old.close()
    eventually(lambda: count(config) == 2, "the key to go", SOON)
    new = seat(config, settle=60.0)
    eventually(lambda: new.seat, "the place of the one that left", SOON)
    assert new.seat
    assert new.seat.ordinal == 0
    assert all(one.seat and was and one.seat.ordinal == was.ordinal for one, was in others.items())
    stop(new, *others)


def test_clients_are_counted_where_they_live(config: EtcdConfig) -> None:
    places = [("eu", "a/1"), ("eu", "a/1"), ("eu", "b"), ("us", "a/1"), ("", "")]
    seats = [seat(config, place=place) for place in places]
    eventually(lambda: packed(seats), "five ordinals", SOON)
    expected = [(2, 3, 4), (2, 3, 4), (1, 3, 4), (1, 1, 4), (0, 0, 0)]
    eventually(lambda: [one.seat[2:] for one in seats if one.seat] == expected, "all to be counted", SOON)
    assert seats[2].seat
    assert seats[2].seat.shares == (0.25, 0.75)
    assert seats[4].seat
    assert seats[4].seat.shares == (None, None)
    seats[0].close()
    eventually(lambda: seats[1].seat and seats[1].seat.in_zone == 1, "one to be missed", SOON)
    stop(*seats)


def test_who_only_wants_to_be_counted_takes_nobodys_ordinal_until_it_needs_one(config: EtcdConfig) -> None:
    first, second = seat(config, place=("", "a"), numbered=False), seat(config, place=("", "b"))
    eventually(lambda: first.seat and first.seat[1:] == (1, 1, 2, 2), "both to be counted", SOON)
    assert first.seat
    assert first.seat.ordinal is None
    assert count(config) == 1
    eventually(lambda: second.seat and second.seat.ordinal == 0, "the other one has an ordinal", SOON)
    first.numbered = True
    eventually(lambda: first.seat and first.seat.ordinal == 1, "an ordinal", SOON)
    stop(first, second)


def test_the_record_is_for_people_and_hand_written_keys_do_no_harm(config: EtcdConfig, writer: Writer) -> None:
    writer.put_raw(clients_prefix(config.prefix) + "note", b"hands off")
    writer.put_raw(clients_prefix(config.prefix) + "0", b"mine")
    one = seat(config)
    eventually(lambda: one.seat, "a seat", SOON)
    assert one.seat
    assert one.seat.ordinal == 1
    found = writer.client.read(clients_prefix(config.prefix) + "1")
    assert found is not None
    assert json.loads(found.value)["pid"] == os.getpid()
    one.close()


def test_while_etcd_is_away_the_seat_holds_and_afterwards_it_is_the_same_one(tmp_path) -> None:
    """etcd comes back empty, its leases lost: nobody may believe to be alone, and each takes its old place again."""
    with EtcdCluster(tmp_path) as cluster:
        config = quick(cluster.url)
        seats = [seat(config, settle=60.0) for _ in range(3)]
        eventually(lambda: packed(seats), "three ordinals", SOON)
        before = {one: one.seat for one in seats}
        cluster.members[0].kill()
        eventually(lambda: all(one.error for one in seats), "the trouble to be noticed", SOON)
        assert {one: one.seat for one in seats} == before
        shutil.rmtree(tmp_path / "m0")
        cluster.members[0].start()
        cluster.wait_healthy()
        eventually(lambda: not any(one.error for one in seats), "all seats kept again", SOON)
        eventually(lambda: count(config) == 3, "three keys", SOON)
        assert {one: one.seat for one in seats} == before
        stop(*seats)


def test_a_close_while_etcd_is_away_does_not_wait_for_it(tmp_path) -> None:
    with EtcdCluster(tmp_path) as cluster:
        one = seat(quick(cluster.url, timeout=60.0))
        eventually(lambda: one.seat, "a seat", SOON)
        cluster.members[0].freeze()
        done = threading.Thread(target=one.close)
        done.start()
        done.join(SOON)
        assert not done.is_alive()
        cluster.members[0].thaw()


def test_three_routers_share_out_the_fleet_and_close_gaps(config: EtcdConfig, writer: Writer) -> None:
    names = [f"gpu-{n:02}" for n in range(60)]
    writer.fill(names)
    routers = [router(config, subset=20) for _ in range(3)]
    for one in routers:
        one.ready(SOON)
    eventually(lambda: all(len(members(one)) == 20 for one in routers), "subsets of 20", SOON)
    eventually(lambda: {one.snapshot().pools["llama"].subset.clients for one in routers} == {3}, "three of them", SOON)
    expected = {f"subset 20 of 60, ordinal {n} of 3" for n in range(3)}

    def views() -> set[str]:
        return {str(one.snapshot().pools["llama"].subset) for one in routers}

    eventually(lambda: views() == expected, "an ordinal each", SOON)
    seen = Counter(name for one in routers for name in members(one))
    assert len(seen) >= 45  # three arcs of a third each: nearly everybody, few of them twice
    first = next(one for one in routers if one.snapshot().pools["llama"].subset.ordinal == 0)
    was_first = members(first)
    first.close()
    routers.remove(first)
    eventually(lambda: {one.snapshot().pools["llama"].subset.clients for one in routers} == {2}, "two of them", SOON)
    eventually(lambda: any(members(one) == was_first for one in routers), "the gap to be filled", SOON)
    for one in routers:
        one.close()
    eventually(lambda: count(config) == 0, "all seats given up")


CLIENT = """
import sys, threading
sys.path.insert(0, sys.argv[2])
from registry.test_clients import QUICK, QuickRegistry, quick
from gpuroute import Router
router = Router(QuickRegistry(quick(sys.argv[1])), subset="auto", policy="p2c")
router.ready(30)
threading.Event().wait()
"""


def test_a_client_process_that_is_killed_loses_its_seat_with_its_lease(etcd_url: str, config, writer: Writer) -> None:
    writer.fill(["a", "b"])
    with running("-c", CLIENT, etcd_url, TESTS) as process:
        eventually(lambda: count(config) == 1, "the first process", SOON)
        mine = seat(config)
        eventually(lambda: mine.seat and mine.seat.clients == 2, "two clients", SOON)
        assert mine.seat
        assert mine.seat.ordinal == 1
        process.kill()
        process.wait()
        lease = writer.client.read(clients_prefix(config.prefix) + "0").lease
        assert lease
        writer.client.revoke(lease)  # as it ends by itself, in some seconds
        eventually(lambda: mine.seat[:2] == (0, 1), "the place of the dead one", SOON)
        mine.close()


FORKED = """
import os, sys
sys.path.insert(0, sys.argv[2])
from registry.test_clients import QUICK, QuickRegistry, eventually, quick
from gpuroute import Router
QUICK["every"] = 4.0  # a fork in the middle of gRPC traffic can crash a child: that is not what is tested here
router = Router(QuickRegistry(quick(sys.argv[1])), subset="auto", policy="p2c")
router.ready(30)
subset = lambda: router.snapshot().pools["llama"].subset
eventually(lambda: subset().ordinal == 0, "a seat", 30)
pid = os.fork()
if pid == 0:
    assert subset().ordinal is None, subset()
    router.call("llama")
    eventually(lambda: subset().ordinal == 1 and subset().clients == 2, "a seat of its own", 30)
    router.close()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
eventually(lambda: subset().ordinal == 0 and subset().clients == 1, "alone again", 30)
router.close()
"""


def test_a_forked_child_takes_a_seat_of_its_own(etcd_url: str, config, writer: Writer) -> None:
    writer.fill(["a", "b"])
    with running("-c", FORKED, etcd_url, TESTS) as process:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert count(config) == 0


def test_the_command_says_who_uses_what(config: EtcdConfig, writer: Writer, capsys) -> None:
    writer.fill([f"gpu-{n:02}" for n in range(60)])
    writer.put_raw(f"{config.prefix}/pools/llama/config", b'{"subset": 20}')
    one = seat(config)
    eventually(lambda: one.seat, "a seat", SOON)
    assert main(["endpoints", "--registry", config.source]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert (shown[1], len(shown)) == ("llama: subset 20 of 60 for each of 1 clients", 63)
    assert main(["endpoints", "--registry", config.source, "--ordinal", "3"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert (shown[1], len(shown)) == ("llama: subset 20 of 60, ordinal 3 of 4", 23)
    assert main(["endpoints", "--registry", config.source, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pools"]["llama"]["subset"] == {
        "members": 20,
        "endpoints": 60,
        "ordinal": None,
        "clients": 1,
    }
    one.close()


def test_a_place_is_counted_although_its_first_record_failed_or_somebody_removed_it(
    config: EtcdConfig, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease lived, so nobody wrote the place again: its zone was one client short for as long as that lived."""
    put, failed = EtcdClient.put, threading.Event()

    def fail_once(self: EtcdClient, key: str, value: bytes, lease: int = 0) -> None:
        if "/places/" in key and not failed.is_set():
            failed.set()
            raise EtcdError("etcd is busy")
        put(self, key, value, lease)

    monkeypatch.setattr(EtcdClient, "put", fail_once)
    counted, numbered = seat(config, place=("eu", "a"), numbered=False), seat(config, place=("eu", "a"))
    eventually(lambda: [one.seat and one.seat.in_zone for one in (counted, numbered)] == [2, 2], "both", SOON)
    assert failed.is_set()
    removed = writer.client.list(f"{config.prefix}/places/")[1]
    for kv in removed:
        writer.client._unary("KV/DeleteRange", encode((1, kv.key)))
    eventually(lambda: len(writer.client.list(f"{config.prefix}/places/")[1]) == 2, "both again", SOON)
    assert numbered.seat
    assert numbered.seat.ordinal == 0
    stop(counted, numbered)
