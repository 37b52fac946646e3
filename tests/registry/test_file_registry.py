"""The file registry: every way in which people and tools write files."""

from __future__ import annotations

import json
import logging
import os
import time
from typing import TYPE_CHECKING

import pytest
from registry.watching import Watcher, eventually, ids, own_threads

from gpuroute import Router
from gpuroute.errors import RegistryUnavailable
from gpuroute.registry import first_fleet
from gpuroute.registry.file import FileRegistry

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.real_time


def document(*idents: str) -> str:
    return json.dumps({"pools": {"llama": {"endpoints": [{"id": i, "url": f"http://{i}:8000"} for i in idents]}}})


def replace(path: Path, text: str) -> None:
    sibling = path.with_suffix(".new")
    sibling.write_text(text)
    sibling.replace(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.json"
    path.write_text(document("a", "b"))
    return path


def registry(path: Path, grace: float = 0.0) -> FileRegistry:
    return FileRegistry(path, poll=0.02, grace=grace)


def test_the_first_view_is_there_when_subscribe_returns(path: Path) -> None:
    with Watcher(registry(path)) as watcher:
        assert watcher.ids() == ["a", "b"]
        assert watcher.subscription.age(time.time()) < 60


def test_edits_in_place_and_atomic_replacement(path: Path) -> None:
    with Watcher(registry(path)) as watcher:
        path.write_text(document("a", "b", "c"))
        watcher.until_ids("a", "b", "c")
        replace(path, document("d"))
        watcher.until_ids("d")


def test_an_edit_that_changes_neither_size_nor_time_is_seen(path: Path) -> None:
    with Watcher(registry(path)) as watcher:
        status = path.stat()
        path.write_text(document("a", "x"))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        watcher.until_ids("a", "x")


def test_a_symlink_that_is_switched(path: Path) -> None:
    link = path.with_name("link.json")
    link.symlink_to(path)
    other = path.with_name("other.json")
    other.write_text(document("z"))
    with Watcher(registry(link)) as watcher:
        fresh = path.with_name("fresh")
        fresh.symlink_to(other)
        fresh.replace(link)
        watcher.until_ids("z")


def test_toml(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(
        '[pools.llama.config]\npolicy = "p2c"\ntimeout = "2s"\n'
        '[[pools.llama.endpoints]]\nid = "a"\nurl = "http://a"\nweight = 2\n'
        '[[pools.llama.endpoints]]\nurl = "http://b"\ngpu = { kind = "H100", count = 8 }\n'
    )
    spec = first_fleet(FileRegistry(path), 1).pools["llama"]
    assert spec.config.timeout == 2.0
    assert [endpoint.id for endpoint in spec.endpoints] == ["a", "b"]
    assert spec.endpoints[1].gpu.count == 8


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pools": 5}', "\x00", '{"pools": {"llama": 1}}', "[" * 100_000])
def test_bad_content_keeps_the_last_good_set_and_says_so(path: Path, text: str, caplog) -> None:
    with Watcher(registry(path)) as watcher:
        replace(path, text)
        fleet = watcher.until_stale()
        assert ids(fleet) == ["a", "b"]
        assert str(path) in watcher.subscription.error
        assert "accepted" in watcher.subscription.error
        replace(path, document("c"))
        watcher.until_ids("c")
        assert watcher.last.stale is False
        assert watcher.subscription.error is None
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert sum(str(path) in record.getMessage() for record in warned) == 1


def test_E5_a_bad_record_spoils_nothing(path: Path, caplog) -> None:
    items = [{"id": "a", "url": "http://a:8000"}, {"id": "b", "url": "http://b:8000", "weight": "abc"}]
    with Watcher(registry(path)) as watcher:
        replace(path, json.dumps({"pools": {"llama": {"endpoints": items}}}))
        fleet = watcher.until(lambda fleet: fleet.problems)
        assert ids(fleet) == ["a", "b"], "b keeps its last good form"
        assert "llama/endpoints/b: weight" in fleet.problems[0]
        assert not fleet.stale
        replace(path, document("a", "b", "c"))
        watcher.until(lambda fleet: not fleet.problems)
    assert sum("bad record" in record.getMessage() for record in caplog.records) == 1


def test_a_setting_that_nobody_reads_is_said_once_and_shown_as_a_problem(path: Path, caplog) -> None:
    def pool(*idents: str) -> str:
        fleet = json.loads(document(*idents))
        fleet["pools"]["llama"]["config"] = {"time_out": 2, "attempts": 2}
        return json.dumps(fleet)

    replace(path, pool("a"))
    with Router(f"file://{path}") as router:
        router.ready(30)
        assert router.pool("llama").rules.retry.attempts == 2
        (problem,) = router.snapshot().problems
        assert "llama/config: nobody reads 'time_out' (did you mean timeout?); accepted: policy, " in problem
        replace(path, pool("a", "b"))
        eventually(lambda: len(router.snapshot().pools["llama"].endpoints) == 2)
        replace(path, document("a", "b", "c"))
        eventually(lambda: not router.snapshot().problems)
    assert sum("time_out" in record.getMessage() for record in caplog.records) == 1


def test_a_file_that_vanishes_and_returns(path: Path) -> None:
    away = path.with_suffix(".away")
    with Watcher(registry(path)) as watcher:
        path.rename(away)
        assert ids(watcher.until_stale()) == ["a", "b"]
        assert "No such file" in watcher.subscription.error
        away.rename(path)
        watcher.until_live()
        assert watcher.subscription.error is None


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fleet.json")
    with pytest.raises(RegistryUnavailable, match="is no regular file; accepted: one that can be read again"):
        first_fleet(registry(tmp_path / "fleet.json"), 0.1)


def test_a_file_that_is_missing_at_start_is_an_error_and_is_found_later(tmp_path: Path) -> None:
    path = tmp_path / "fleet.json"
    with pytest.raises(RegistryUnavailable, match=r"No such file.*fleet\.json"):
        first_fleet(registry(path), 0.1)
    with Watcher(registry(path)) as watcher:
        assert "No such file" in watcher.subscription.error
        assert watcher.last is None
        path.write_text(document("a"))
        watcher.until_ids("a")


def test_E6_a_half_written_file_empties_nothing(path: Path) -> None:
    """TOML is valid at every line, so a writer caught half way looks like an operator who removed endpoints."""
    path = path.with_suffix(".toml")
    lines = [f'[[pools.llama.endpoints]]\nid = "e{i}"\nurl = "http://e{i}"\n' for i in range(6)]
    path.write_text("".join(lines))
    with Watcher(registry(path, grace=30)) as watcher:
        path.write_text(lines[0])
        watcher.until(lambda fleet: fleet.problems)
        assert len(watcher.ids()) == 6
        path.write_text("".join(lines))
        watcher.until(lambda fleet: not fleet.problems)
        assert len(watcher.ids()) == 6


def test_E6_endpoints_removed_for_good_are_gone_after_the_grace(path: Path) -> None:
    with Watcher(registry(path, grace=0.3)) as watcher:
        replace(path, '{"pools": {}}')
        watcher.until_ids()
        assert "llama" in watcher.last.pools


def test_nothing_is_delivered_when_nothing_changed(path: Path) -> None:
    with Watcher(registry(path)) as watcher:
        replace(path, document("a", "b"))
        written = time.time()
        eventually(lambda: watcher.subscription.age(written) == 0.0, "a poll after the write")
        replace(path, document("a", "b", "c"))
        watcher.until_ids("a", "b", "c")
        assert len(watcher.fleets) == 2


def test_a_subscriber_that_raises_does_not_end_the_watch(path: Path) -> None:
    seen = []

    def on_change(fleet) -> None:
        seen.append(ids(fleet))
        raise RuntimeError("a bug of the subscriber")

    subscription = registry(path).subscribe(on_change)
    replace(path, document("c"))
    eventually(lambda: ["c"] in seen)
    subscription.close()


def test_close_stops_the_thread_and_further_deliveries(path: Path) -> None:
    before = own_threads()
    watcher = Watcher(registry(path))
    assert [thread.name for thread in own_threads() - before] == ["gpuroute-file"]
    watcher.subscription.close()
    watcher.subscription.close()
    eventually(lambda: own_threads() <= before, "its thread to end")
    replace(path, document("c"))
    assert watcher.ids() == ["a", "b"]
