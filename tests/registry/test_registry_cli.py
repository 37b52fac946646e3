"""`gpuroute register` and `gpuroute endpoints`, as processes and as calls."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from ports import own_port
from registry.watching import Watcher, own_threads, patient, running

from gpuroute.cli import main
from gpuroute.registry.etcd import EtcdRegistry

if TYPE_CHECKING:
    from registry.watching import Writer

    from gpuroute.registry.etcd_config import EtcdConfig

pytestmark = pytest.mark.real_time


@pytest.fixture
def config(etcd_url: str) -> EtcdConfig:
    return patient(etcd_url)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_register_until_a_signal(config, writer: Writer, tmp_path, number: int) -> None:
    record = tmp_path / "record.json"
    record.write_text('{"headers": {"x-key": "canary"}, "labels": {"rack": "r1"}, "weight": 9}')
    command = ["-m", "gpuroute", "register", "http://10.0.0.7:8000/v1", "--pool", "llama"]
    command += ["--registry", config.source, "--record", str(record), "--weight", "2", "--zone", "z1"]
    command += ["--engine", "vllm", "--model", "llama-3-8b", "--version", "7", "--gpu", "H100", "--gpu-count", "8"]
    command += ["--gpu-memory", "80", "--adapter", "sql", "--label", "node=n1", "--max-in-flight", "64"]
    with running(*command) as process, Watcher(EtcdRegistry(config, grace=110)) as watcher:
        fleet = watcher.until_ids("10.0.0.7:8000_v1")
        (endpoint,) = fleet.pools["llama"].endpoints
        assert (endpoint.weight, endpoint.zone, endpoint.engine, endpoint.version) == (2.0, "z1", "vllm", "7")
        assert (endpoint.gpu.kind, endpoint.gpu.count, endpoint.gpu.memory_gib) == ("H100", 8, 80.0)
        assert endpoint.labels == {"rack": "r1", "node": "n1"}
        assert endpoint.adapters == ("sql",)
        assert endpoint.capacity.max_in_flight == 64
        assert endpoint.headers == {"x-key": "canary"}
        process.send_signal(number)
        _, stderr = process.communicate(timeout=90)
        assert process.returncode == 0
        watcher.until_ids()  # and not after the grace of 110 s
    assert stderr.splitlines()[0].startswith("registered ")
    assert stderr.splitlines()[-1].startswith("removed ")
    assert "canary" not in stderr


def test_register_says_when_etcd_cannot_be_reached_and_still_ends() -> None:
    dead = own_port()
    with running("-m", "gpuroute", "register", "http://a", "--registry", f"etcd://127.0.0.1:{dead}") as process:
        assert "UNAVAILABLE" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=90) == 0


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["ftp://a"], "another scheme"),
        (["http://a", "--weight", "-1"], "weight"),
        (["http://a", "--pool", "Big"], "bad pool name"),
        (["http://a", "--label", "x"], "NAME=VALUE"),
        (["http://a", "--state", "up"], "state"),
        (["http://a", "--record", "/nonexistent.json"], "--record"),
        (["http://a", "--ttl", "0"], "ttl"),
        (["http://a", "--ttl", "soon"], "--ttl"),
        (["http://a", "--registry", "fleet.json"], "etcd://"),
    ],
)
def test_register_refuses_what_can_never_work(args: list[str], says: str, capsys) -> None:
    command = ["register", *args] + ([] if "--registry" in args else ["--registry", "etcd://127.0.0.1:1"])
    before = own_threads()
    try:
        assert main(command) == 2
    except SystemExit as error:
        assert error.code == 2
    assert says in capsys.readouterr().err
    assert own_threads() <= before


NO_OBJECT = ['"H100"', "5", "[]", "true", '[{"kind": "H100"}]']


@pytest.mark.parametrize("field", ["gpu", "labels", "capacity"])
@pytest.mark.parametrize("value", NO_OBJECT)
@pytest.mark.parametrize("options", [[], ["--gpu", "H100", "--label", "a=b", "--max-in-flight", "3"]])
def test_register_refuses_a_record_whose_objects_are_none(
    field: str, value: str, options: list, tmp_path, capsys
) -> None:
    record = tmp_path / "record.json"
    record.write_text(f'{{"{field}": {value}}}')
    command = ["register", "http://a", "--registry", "etcd://127.0.0.1:1", "--record", str(record), *options]
    assert main(command) == 2
    assert f"default/a: {field} is " in capsys.readouterr().err


@pytest.mark.parametrize("ident", ["[]", "{}", "true", '"a/b"'])
def test_register_refuses_a_record_whose_id_is_none(ident: str, tmp_path, capsys) -> None:
    record = tmp_path / "record.json"
    record.write_text(f'{{"id": {ident}}}')
    assert main(["register", "http://a", "--registry", "etcd://127.0.0.1:1", "--record", str(record)]) == 2
    assert "bad id" in capsys.readouterr().err


def test_register_says_what_of_its_record_nobody_will_read(config, tmp_path) -> None:
    record = tmp_path / "record.json"
    record.write_text('{"weigth": 2, "id": null, "gpu": {"kind": "H100", "cuont": 2}, "labels": null}')
    command = ["-m", "gpuroute", "register", "http://a:1", "--pool", "llama", "--record", str(record)]
    command += ["--registry", config.source]
    with running(*command) as process, Watcher(EtcdRegistry(config)) as watcher:
        (endpoint,) = watcher.until_ids("a:1").pools["llama"].endpoints
        assert (endpoint.gpu.kind, endpoint.labels) == ("H100", {})
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=90)
    first, second, *_ = stderr.splitlines()
    assert "record.json': nobody reads 'weigth' (did you mean weight?); accepted: id, url, " in first
    assert second.endswith("nobody reads 'cuont' (did you mean count?) in gpu")


def test_endpoints_as_text_and_json(config, writer: Writer, capsys) -> None:
    writer.put("a", zone="z1", started_at=1.0, headers={"x-key": "canary"}, gpu={"kind": "H100", "count": 8})
    writer.put("b", state="draining")
    writer.put("c", weight=0)
    writer.put_raw(writer.key("bad"), b"{")
    config_record = b'{"policy": "p2c", "salt": "canary", "atempts": 2}'
    writer.put_raw(f"{writer.prefix}/pools/llama/config", config_record)
    assert main(["endpoints", "--registry", config.source]) == 0
    captured = capsys.readouterr()
    view, head, *rows = captured.out.splitlines()
    assert config.source in view
    assert "STALE" not in view
    assert head.split() == ["POOL", "ENDPOINT", "STATE", "AGE", "WEIGHT", "GPU", "ZONE", "MODEL", "URL"]
    assert [row.split()[:3] for row in rows] == [
        ["llama", "a", "ready"],
        ["llama", "b", "draining"],
        ["llama", "c", "ready"],
    ]
    assert "8xH100" in rows[0]
    assert " d " in rows[0]
    assert "(weight 0)" in rows[2]
    assert "bad: is not JSON" in captured.err
    assert "problem: " in captured.err
    assert "llama/config: nobody reads 'atempts' (did you mean attempts?)" in captured.err
    assert main(["endpoints", "--json", "--registry", config.source]) == 0
    out = capsys.readouterr().out
    fleet = json.loads(out)
    assert [item["takes_calls"] for item in fleet["pools"]["llama"]["endpoints"]] == [True, False, False]
    assert fleet["pools"]["llama"]["config"] == {"policy": "p2c", "salt": "***", "atempts": 2}
    assert fleet["pools"]["llama"]["endpoints"][0]["age_s"] > 1e9
    assert 0 <= fleet["age_s"] < 60
    assert not fleet["stale"]
    assert len(fleet["problems"]) == 2
    assert "canary" not in out + captured.out + captured.err


def test_endpoints_of_an_empty_or_absent_registry(config, capsys, monkeypatch) -> None:
    assert main(["endpoints", "--registry", config.source]) == 1
    assert main(["endpoints"]) == 2
    assert "GPUROUTE_REGISTRY" in capsys.readouterr().err
    dead = own_port()
    monkeypatch.setenv("GPUROUTE_REGISTRY", f"etcd://127.0.0.1:{dead}")
    for seconds in (2, 20):  # a busy machine may need some time to find out
        monkeypatch.setenv("GPUROUTE_READY_TIMEOUT", f"{seconds}s")
        assert main(["endpoints"]) == 2
        said = capsys.readouterr().err
        if "etcd 127.0.0.1:" in said:
            break
    assert f"no view of the fleet after {seconds} s: etcd 127.0.0.1:" in said


def test_endpoints_reads_the_environment(capsys, monkeypatch) -> None:
    monkeypatch.setenv("GPUROUTE_REGISTRY", "llama=http://a:8000")
    assert main(["endpoints"]) == 0
    assert "a:8000" in capsys.readouterr().out


def test_endpoints_ends_quietly_when_its_reader_leaves(config, writer: Writer) -> None:
    writer.put("a")
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "gpuroute", "endpoints", "--registry", config.source]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")
