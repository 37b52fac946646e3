"""Files on file systems with clocks of their own: too slow, too coarse, ahead of ours or behind it."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
from registry.watching import Watcher, eventually

from gpuroute.registry import file
from gpuroute.registry.file import FileRegistry

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.real_time

DAY_NS = 86_400 * 10**9


def document(ident: str) -> str:
    return json.dumps({"pools": {"llama": {"endpoints": [{"id": ident, "url": f"http://{ident}:8000"}]}}})


class Coarse:
    """Seen through a clock with ticks of a day that is some days off; reads of the file are counted."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, days: int) -> None:
        self.reads = 0
        read, stat = file._read, type(path).stat

        def coarse(self: Path, **options: bool) -> os.stat_result:
            found = stat(self, **options)
            if self != path:
                return found
            fields = {name: getattr(found, name) for name in ("st_mode", "st_size", "st_ino", "st_dev")}
            tick = found.st_mtime_ns // DAY_NS * DAY_NS + days * DAY_NS
            return type("Status", (), {**fields, "st_mtime_ns": tick, "st_ctime_ns": tick, "st_mtime": tick / 1e9})()

        def counted(path: Path) -> object:
            self.reads += 1
            return read(path)

        monkeypatch.setattr(type(path), "stat", coarse)
        monkeypatch.setattr(file, "_read", counted)


@pytest.mark.parametrize("days", [-2, 2])
def test_edits_within_one_tick_are_seen_whatever_the_clock_says(tmp_path, monkeypatch, days: int) -> None:
    """A server whose clock is behind stamped the file as if it were old, and the second edit was never seen."""
    path = tmp_path / "fleet.json"
    path.write_text(document("a"))
    Coarse(path, monkeypatch, days)
    with Watcher(FileRegistry(path, poll=0.02, grace=0.0)) as watcher:
        for ident in "bc":
            path.write_text(document(ident))
            watcher.until_ids(ident)


@pytest.mark.parametrize("days", [-2, 2])
def test_a_file_that_stays_is_not_read_for_ever(tmp_path, monkeypatch, days: int) -> None:
    """One whose time lies ahead was read and parsed twice a second for as long."""
    monkeypatch.setattr(file, "SETTLED_S", 0.1)
    path = tmp_path / "fleet.json"
    path.write_text(document("a"))
    coarse = Coarse(path, monkeypatch, days)
    with Watcher(FileRegistry(path, poll=0.02, grace=0.0)) as watcher:
        eventually(lambda: watcher.subscription._settled, "the file to be taken as it is")
        reads = coarse.reads
        looks = iter(range(20))
        monkeypatch.setattr(watcher.subscription._publisher, "publish", lambda *args, **options: next(looks, None))
        eventually(lambda: next(looks, None) is None, "twenty looks")
        assert coarse.reads == reads


def test_a_settled_file_that_gets_its_old_time_and_size_back_is_read(tmp_path, monkeypatch) -> None:
    """As `cp -p` and `rsync --inplace` do."""
    monkeypatch.setattr(file, "SETTLED_S", 0.0)
    path = tmp_path / "fleet.json"
    path.write_text(document("a"))
    with Watcher(FileRegistry(path, poll=0.02, grace=0.0)) as watcher:
        eventually(lambda: watcher.subscription._settled, "the file to be taken as it is")
        status = path.stat()
        path.write_text(document("b"))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        watcher.until_ids("b")
