"""What people, tools and damage put where a registry is read from: each is told in words, and ends nothing."""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING

import pytest
from ports import own_port
from registry.watching import Watcher, Writer, eventually, ids, quick, save_snapshot

from gpuroute.errors import ConfigError, InvalidRecord
from gpuroute.registry import open_registry, snapshot
from gpuroute.registry.etcd import EtcdRegistry
from gpuroute.registry.file import FileRegistry
from gpuroute.registry.schema import MAX_SHOWN, parse_endpoint
from gpuroute.registry.view import MAX_GONE, View, document_records

if TYPE_CHECKING:
    from pathlib import Path

    from gpuroute.registry.etcd_config import EtcdConfig

NEVER = ["1" + "0" * 400, "NaN", "Infinity", "-1", "true", "null", '"today"', "1e300"]


# ------------------------------------------------------------------------------------- damaged snapshots


@pytest.mark.parametrize("as_of", NEVER)
def test_a_snapshot_without_a_time_that_can_be_is_as_good_as_none(tmp_path: Path, as_of: str) -> None:
    path = tmp_path / "fleet.json"
    config = quick("etcd://127.0.0.1:1")
    save_snapshot(path, config, "a")
    document = json.loads(path.read_text()) | {"as_of": "@"}
    path.write_text(json.dumps(document).replace('"@"', as_of))
    with pytest.raises(InvalidRecord, match="since when"):
        snapshot.load(path, source=config.source)


@pytest.mark.real_time
def test_whatever_a_snapshot_leads_to_the_watch_goes_on(config, writer: Writer, tmp_path, monkeypatch) -> None:
    """A number too large for a float ended the thread: the process had no fleet for ever, though etcd came back."""

    def fail(path: Path, *, source: str) -> None:
        raise OverflowError("int too large to convert to float")

    monkeypatch.setattr(snapshot, "load", fail)
    nobody = quick(f"etcd://127.0.0.1:{own_port()},{config.members[0]}{config.prefix}")
    writer.put("a")
    with Watcher(EtcdRegistry(nobody, snapshot_path=str(tmp_path / "fleet.json"))) as watcher:
        watcher.until_ids("a")


# ------------------------------------------------------------------------------------ keys and values


def test_keys_of_any_bytes_and_length_make_one_short_line() -> None:
    view = View(grace=0.0, where="/gpuroute/pools/")
    view.put("llama/endpoints/a\x1b[2J\nregistry: all is well", b"x")
    view.put(f"llama/endpoints/{'b' * 100_000}", b'{"url": "http://b"}')
    view.put("no\npool/endpoints/a", b'{"url": "http://b"}')
    view.put("llama/config", b'{"policy": "p2c", "timout": 1}')
    said = [*view.problems.values(), *view.unread().values()]
    assert len(said) == 4
    for text in said:
        assert text.isprintable()
        assert len(text) < MAX_SHOWN + 500
    assert r"a\x1b[2J\nregistry: all is well" in said[0]


def test_names_of_pools_in_a_file_are_shown_on_one_line() -> None:
    pools = {
        "a\nb": {"endpoints": [{"url": "http://a", "id": "x"}] * 2 + [{"url": "http://a", "id": "not an id"}], "x": 1}
    }
    said = [str(item) for item in document_records({"pools": pools}, "f").values() if isinstance(item, InvalidRecord)]
    with pytest.raises(InvalidRecord) as caught:
        document_records({"pools": {"a\nb": []}}, "f")
    assert len(said) == 3
    assert all(text.isprintable() for text in [*said, str(caught.value)])


@pytest.mark.parametrize(
    "url", ["http://user:[s3cret]@h:80/", "http://[s3cret]:80", "http://user:s3cret@[x]:1", "http://[s3cret"]
)
def test_a_url_that_cannot_be_taken_apart_is_not_shown(url: str) -> None:
    with pytest.raises(InvalidRecord) as caught:
        parse_endpoint({"url": url}, id="a", key="k")
    assert "s3cret" not in str(caught.value)
    with pytest.raises(ConfigError) as refused:
        open_registry(f"llama={url}")
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(("wrong", "right"), [(1, True), (0, False)])
def test_a_number_that_is_made_true_or_false_is_a_change(wrong: int, right: bool) -> None:
    """They are equal in Python: a pool was not switched off by the corrected file until something else changed."""
    view = View(grace=0.0)
    view.replace({"llama/config": {"disabled": wrong}}, 0.0)
    assert view.problems
    view.replace({"llama/config": {"disabled": right}}, 0.0)
    assert not view.problems
    assert view.pools(0.0)["llama"].config.disabled is right


def test_pools_that_come_and_go_are_forgotten_the_longest_gone_first() -> None:
    view = View(grace=5.0)
    view.put("stays/endpoints/a", b'{"url": "http://a"}')
    view.put("config-only/config", b"{}")
    for number in range(MAX_GONE + 50):
        view.put(f"job-{number}/endpoints/a", b'{"url": "http://a"}')
        view.delete(f"job-{number}/endpoints/a", float(number))
    names = set(view.pools(MAX_GONE + 1_000.0))
    assert names >= {"stays", "config-only", f"job-{MAX_GONE + 49}", "job-50"}
    assert len(names) == MAX_GONE + 2
    assert set(view.pools(MAX_GONE + 1_001.0)) == names
    view.put("job-0/endpoints/a", b'{"url": "http://a"}')
    assert view.pools(MAX_GONE + 1_002.0)["job-0"].endpoints


def test_a_pool_that_is_kept_in_grace_is_not_forgotten() -> None:
    view = View(grace=5.0)
    for number in range(MAX_GONE + 50):
        view.put(f"job-{number}/endpoints/a", b'{"url": "http://a"}')
    view.replace({}, 10.0)
    assert len(view.pools(11.0)) == MAX_GONE + 50
    assert len(view.pools(16.0)) == MAX_GONE


# ----------------------------------------------------------------------------------------- locations


@pytest.mark.parametrize(
    "location",
    ["etcd://[bad]:2379", "etcd://[::1", "etcd://h1,[1.2.3.4]:2379", "etcd://::1]:1", "etcd://", "file://[x/fleet.json"],
)
def test_a_location_with_a_bad_bracket_is_refused_as_any_other(location: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        open_registry(location)


def test_members_may_be_named_and_of_either_family() -> None:
    """Later releases of Python refuse a bracket that does not begin the host."""
    registry = open_registry("etcds://h1:2379,[::1]:2380,10.0.0.7,[fe80::7]/fleet//a/")
    assert isinstance(registry, EtcdRegistry)
    assert registry.config.members == ("h1:2379", "[::1]:2380", "10.0.0.7:2379", "[fe80::7]:2379")
    assert registry.config.prefix == "/fleet//a"
    assert registry.config.tls


def test_relative_paths_are_those_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon leaves its directory; its registry, snapshot and certificates are read again later."""
    for name in ("ca.pem", "me.pem", "me.key"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    registry = open_registry(
        "etcds://h1", snapshot_path="fleet.json", ca="ca.pem", cert="./me.pem", key=str(tmp_path / "me.key")
    )
    assert isinstance(registry, EtcdRegistry)
    monkeypatch.chdir("/")
    assert registry.snapshot_path == tmp_path / "fleet.json"
    config: EtcdConfig = registry.config
    assert [config.ca, config.cert, config.key] == [str(tmp_path / name) for name in ("ca.pem", "me.pem", "me.key")]


@pytest.mark.real_time
def test_a_file_is_followed_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "fleet.json"
    path.write_text('{"pools": {"llama": {"endpoints": [{"id": "a", "url": "http://a"}]}}}')
    monkeypatch.chdir(tmp_path)
    registry = FileRegistry("fleet.json", poll=0.02, grace=0.0)
    monkeypatch.chdir("/")
    with Watcher(registry) as watcher:
        assert watcher.ids() == ["a"]
        path.write_text(path.read_text().replace('"a"', '"b"'))
        watcher.until_ids("b")


@pytest.mark.real_time
def test_what_a_file_leads_to_never_ends_the_polling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    path = tmp_path / "fleet.json"
    path.write_text('{"pools": {"llama": {"endpoints": [{"id": "a", "url": "http://a"}]}}}')
    replace = View.replace
    with Watcher(FileRegistry(path, poll=0.02, grace=0.0)) as watcher, caplog.at_level(logging.WARNING):
        monkeypatch.setattr(View, "replace", lambda *args: 1 / 0)
        eventually(lambda: watcher.subscription.error, "a trouble")
        assert "ZeroDivisionError" in watcher.subscription.error
        assert ids(watcher.until_stale()) == ["a"]
        monkeypatch.setattr(View, "replace", replace)
        watcher.until_live()
    assert len([line for line in caplog.messages if "ZeroDivision" in line]) == 1


@pytest.mark.real_time
def test_a_path_that_no_system_takes_is_an_error_of_the_subscription() -> None:
    with Watcher(open_registry("file:///tmp/fleet%00.json")) as watcher:
        assert watcher.last is None
        assert "null byte" in watcher.subscription.error
        assert watcher.subscription.age(time.time()) == 0.0
