"""The snapshot on disk: atomic, private, and never believed when in doubt."""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from registry.watching import Watcher, eventually, running

from gpuroute.core.fleet import Fleet
from gpuroute.errors import InvalidRecord
from gpuroute.registry import snapshot
from gpuroute.registry.etcd import EtcdRegistry
from gpuroute.registry.view import View

pytestmark = pytest.mark.real_time

SOURCE = "etcd://h:2379/gpuroute"


def pools(count: int = 3):
    view = View(grace=0.0)
    records = {f"llama/endpoints/e{i}": {"url": f"http://e{i}", "headers": {"x-key": "canary"}} for i in range(count)}
    view.replace(records, 0.0)
    return view.pools(0.0)


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "fleet.json"
    snapshot.save(path, pools(), source=SOURCE, as_of=1_800_000_000.0)
    found = snapshot.load(path, source=SOURCE)
    view = View(grace=0.0)
    view.replace(found.records, 0.0)
    assert view.pools(0.0) == pools()
    assert found.as_of == 1_800_000_000.0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600, "it holds headers, which are secret"
    assert list(path.parent.iterdir()) == [path]


def test_the_mode_is_private_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        snapshot.save(tmp_path / "s", pools(), source=SOURCE, as_of=0.0)
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff",
        b"[]",
        b"null",
        b'{"pools": {}}',
        b'{"pools": {}, "source": "etcd://h:2379/gpuroute"}',
        b'{"pools": {}, "source": "etcd://other:2379/gpuroute", "as_of": 1}',
        b"[" * 100_000,
    ],
)
def test_E7_a_corrupt_or_foreign_snapshot_is_as_good_as_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "s.json"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(InvalidRecord, match=r"s\.json"):
        snapshot.load(path, source=SOURCE)


def test_E7_every_cut_of_a_snapshot_is_as_good_as_none(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    snapshot.save(path, pools(1), source=SOURCE, as_of=1.0)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(InvalidRecord):
            snapshot.load(path, source=SOURCE)


def test_a_snapshot_that_others_can_write_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    snapshot.save(path, pools(), source=SOURCE, as_of=1.0)
    path.chmod(0o666)
    with pytest.raises(InvalidRecord, match="written by others"):
        snapshot.load(path, source=SOURCE)


def test_a_failed_save_leaves_the_old_snapshot_and_no_rubbish(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "s.json"
    snapshot.save(path, pools(), source=SOURCE, as_of=1.0)

    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        snapshot.save(path, pools(9), source=SOURCE, as_of=2.0)
    assert snapshot.load(path, source=SOURCE).as_of == 1.0
    assert list(tmp_path.iterdir()) == [path]


SAVER = """
import sys
from pathlib import Path
from typing import Any
sys.path.insert(0, sys.argv[2])
from registry.test_registry_snapshot import SOURCE, pools, snapshot
many = pools(200)
while True:
    snapshot.save(Path(sys.argv[1]), many, source=SOURCE, as_of=1.0)
"""


def test_E7_kill_9_while_saving_leaves_no_unreadable_file(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    for round_ in range(4):
        started = time.time()
        with running("-c", SAVER, str(path), str(Path(__file__).parents[1])):
            eventually(lambda at=started: path.exists() and path.stat().st_mtime > at, "a save of this process")
            time.sleep(0.004 * round_)  # to be hit at another point of its work each time
        assert len(snapshot.load(path, source=SOURCE).records) == 201


def test_leftovers_of_killed_writers_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    old, fresh, other = tmp_path / "s.json.1-2.tmp", tmp_path / "s.json.3-4.tmp", tmp_path / "notes.tmp"
    for file in (old, fresh, other):
        file.write_text(json.dumps({}))
    for file in (old, other):
        os.utime(file, (0, 0))
    snapshot.save(path, pools(), source=SOURCE, as_of=1.0)
    assert not old.exists()
    assert fresh.exists()
    assert other.exists()


def test_that_it_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On a read-only file system a fleet in which something changes all the time said it every five seconds."""
    place = tmp_path / "place"
    place.write_text("no directory")
    keeper = snapshot.Keeper(place / "fleet.json", "etcd://h1")
    for number in range(4):
        keeper.keep(Fleet(pools(1)), number * 10.0)
        keeper.wait(60.0)
    assert len([line for line in caplog.messages if "cannot be written" in line]) == 1
    place.unlink()
    keeper.keep(Fleet(pools(1)), 50.0)
    keeper.wait(60.0)
    assert (place / "fleet.json").exists()
    (place / "fleet.json").unlink()
    place.rmdir()
    place.write_text("no directory again")
    keeper.keep(Fleet(pools(1)), 60.0)
    keeper.wait(60.0)
    assert len([line for line in caplog.messages if "cannot be written" in line]) == 2


def test_a_disk_that_hangs_holds_up_nothing(config, writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a second save begun beside it: each would be one more thread that waits."""
    begun, over, save = [], threading.Event(), snapshot.save

    def hang(*what: Any, **how: Any) -> None:
        begun.append(1)
        over.wait(60)
        save(*what, **how)

    monkeypatch.setattr(snapshot, "save", hang)
    monkeypatch.setattr(snapshot, "SAVE_INTERVAL_S", 0.2)
    path = tmp_path / "fleet.json"
    writer.put("a")
    with Watcher(EtcdRegistry(config, snapshot_path=str(path), grace=0.0)) as watcher:
        watcher.until_ids("a")
        eventually(lambda: begun, "a save")
        writer.put("b")
        watcher.until_ids("a", "b")
        writer.put("c")
        watcher.until_ids("a", "b", "c")
        assert begun == [1]
        over.set()
        eventually(lambda: path.exists() and "http://c:8000" in path.read_text(), "the newest is saved after all")
