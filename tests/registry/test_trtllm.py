"""Records that `trtllm-serve` itself puts into etcd, as a source of fleets."""

from __future__ import annotations

import json
import uuid
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from registry.watching import Watcher, Writer, ids, patient, quick

from gpuroute import Router
from gpuroute.cli import main
from gpuroute.errors import ConfigError, InvalidRecord, UnknownPool
from gpuroute.registry import first_fleet, open_registry
from gpuroute.registry.etcd import EtcdReader
from gpuroute.registry.schema import parse_endpoint
from gpuroute.registry.trtllm import place_of, read_record

if TYPE_CHECKING:
    from collections.abc import Iterator

    from registry.etcd_server import EtcdCluster

RECORD = {
    "model": "meta-llama/Llama-3.1-8B",
    "version": "1.2.0",
    "timestamp": "2026-11-29T13:42:50.123456",
    "server_role": "GENERATION",
    "url": "http://10.0.0.7:8000",
}
POOL = "meta-llama-llama-3.1-8b"


def record(**changes: object) -> bytes:
    return json.dumps(RECORD | changes).encode()


def test_a_record_becomes_one_of_ours() -> None:
    fields = read_record("trtllm/7", record())
    assert place_of("7", fields) == f"{POOL}/endpoints/7"
    endpoint = parse_endpoint(fields, id="7", key="k")
    assert (endpoint.url, endpoint.engine, endpoint.version) == ("http://10.0.0.7:8000", "tensorrt_llm", "1.2.0")
    assert (endpoint.model, endpoint.labels) == ("meta-llama/Llama-3.1-8B", {"role": "generation"})
    assert endpoint.started_at == datetime.fromisoformat("2026-11-29T13:42:50.123456").timestamp()


def test_what_may_be_missing() -> None:
    assert read_record("trtllm/x", b'{"url": "gpu-7:8000"}') == {
        "url": "http://gpu-7:8000",
        "engine": "tensorrt_llm",
        "started_at": 0.0,
    }
    assert "model" not in read_record("trtllm/x", record(timestamp="yesterday", model=7, server_role=None))
    assert read_record("trtllm/x", record(url="http://[2001:db8::7]:8000/"))["url"] == "http://[2001:db8::7]:8000"


@pytest.mark.parametrize(
    ("model", "pool"),
    [
        (None, "default"),
        ("", "default"),
        ("///", "default"),
        ("Ünsinn 7B", "nsinn-7b"),
        ("M" * 80, "m" * 63),
        ("..a_b..", "a_b"),
    ],
)
def test_pools_are_named_as_models_are_as_far_as_they_can_be(model: str | None, pool: str) -> None:
    assert place_of("x", {} if model is None else {"model": model}) == f"{pool}/endpoints/x"


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"url": 7}',
        record(url=""),
        record(url="http://host"),
        record(url="http://host:99999"),
        record(url="ftp://host:21"),
        record(url="http://0.0.0.0:8000"),
        record(url="http://[::]:8000"),
        record(url="http://[bad:8000"),
        b"[" * 50_000,
    ],
)
def test_a_bad_record_names_its_key_and_what_is_accepted_and_shows_no_value(value: bytes) -> None:
    with pytest.raises(InvalidRecord, match=r"^trtllm/x: .*accepted: ") as caught:
        read_record("trtllm/x", value)
    assert "10.0.0.7" not in str(caught.value)


@given(
    st.binary(max_size=100)
    | st.text(max_size=40).map(lambda url: json.dumps({"url": url}).encode())
    | st.dictionaries(st.sampled_from([*RECORD, "x"]), st.none() | st.floats() | st.text() | st.lists(st.text())).map(
        lambda changes: record(**changes)
    )
)
def test_nothing_else_is_raised(value: bytes) -> None:
    with suppress(InvalidRecord):
        fields = read_record("trtllm/x", value)
        parse_endpoint(fields, id="x", key=place_of("x", fields))


class TrtllmServers:
    """What they do to etcd: plain puts without a lease, below a prefix without a slash."""

    def __init__(self, writer: Writer, prefix: str) -> None:
        self._writer = writer
        self._writer.key = lambda ident, _="": f"{prefix}/{ident}"  # type: ignore[method-assign]

    def put(self, ident: str, value: bytes) -> None:
        self._writer.put_raw(self._writer.key(ident), value)

    def delete(self, ident: str) -> None:
        self._writer.delete(ident)


@pytest.fixture
def place(shared_etcd: EtcdCluster) -> str:
    return f"{shared_etcd.url.replace('etcd://', 'etcd+trtllm://')}/{uuid.uuid4().hex}"


@pytest.fixture
def servers(place: str) -> Iterator[TrtllmServers]:
    config = quick(place)
    writer = Writer(config)
    yield TrtllmServers(writer, config.prefix.lstrip("/"))
    writer.client.close()


@pytest.mark.real_time
def test_servers_come_change_and_go(place: str, servers: TrtllmServers) -> None:
    servers.put("1", record(url="http://10.0.0.1:8000"))
    with Watcher(EtcdReader(patient(place), grace=0.0)) as watcher:
        watcher.until_ids("1", pool=POOL)
        servers.put("2", record(url="http://10.0.0.2:8000", server_role="CONTEXT"))
        fleet = watcher.until_ids("1", "2", pool=POOL)
        assert [endpoint.labels["role"] for endpoint in fleet.pools[POOL].endpoints] == ["generation", "context"]
        servers.put("2", record(url="http://0.0.0.0:8000"))
        fleet = watcher.until(lambda fleet: fleet.problems)
        assert ids(fleet, POOL) == ["1", "2"], "a record that turned bad keeps its last good form"
        assert "/2: url says 0.0.0.0; accepted: " in fleet.problems[0]
        servers.put("2", record(url="http://10.0.0.2:8000", model="other"))
        fleet = watcher.until_ids("2", pool="other")
        assert (ids(fleet, POOL), fleet.problems) == (["1"], ())
        servers.put("3", b'{"url": "http://u:canary@h:1"}')
        fleet = watcher.until(lambda fleet: fleet.problems)
        assert "default/endpoints/3: url holds credentials" in fleet.problems[0]
        assert "canary" not in fleet.problems[0]
        for ident in "123":
            servers.delete(ident)
        fleet = watcher.until_ids(pool="other")
        watcher.until(lambda fleet: not ids(fleet, POOL) and "canary" not in str(fleet.problems))
        assert [text for text in watcher.last.problems if "below" not in text] == []


@pytest.mark.real_time
def test_a_router_and_the_command_read_them(place: str, servers: TrtllmServers, capsys, tmp_path) -> None:
    servers.put("1", record())
    with Router(place, registry_snapshot=str(tmp_path / "kept.json")) as router:
        router.ready(60)
        assert router.resolve("meta-llama/Llama-3.1-8B") == POOL
        assert router.pool(POOL).spec.endpoints[0].engine == "tensorrt_llm"
        with pytest.raises(UnknownPool):
            router.resolve("another")
    kept = first_fleet(open_registry(place, snapshot_path=str(tmp_path / "kept.json")), 60)
    assert ids(kept, POOL) == ["1"]
    assert main(["endpoints", "--registry", place]) == 0
    assert "meta-llama/Llama-3.1-8B  http://10.0.0.7:8000" in capsys.readouterr().out
    assert main(["register", "http://a:1", "--registry", place]) == 2
    assert "etcd://" in capsys.readouterr().err


def test_locations(tmp_path) -> None:
    found = open_registry("etcds+trtllm://h1,h2:1/tr/")
    assert type(found) is EtcdReader
    assert (found.config.tls, found.config.prefix) == (True, "/tr")
    assert found.config.source == "etcds+trtllm://h1:2379,h2:1/tr"
    assert open_registry("etcd+trtllm://h").config.prefix == "/trtllm"
    for wrong in ("etcd+other://h", "etcd+trtllm://h?x=1", "etcds+://h"):
        with pytest.raises(ConfigError, match=r"etcd\+trtllm"):
            open_registry(wrong)
    with pytest.raises(ConfigError, match="ordinals"):
        Router("etcd+trtllm://h", subset="auto")
