"""Which registry a location means, and what is said about one that means nothing. Static registries too."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
from registry.watching import Watcher, ids

from gpuroute.config import Settings
from gpuroute.core.endpoint import Endpoint
from gpuroute.errors import ConfigError
from gpuroute.registry import etcd_options, first_fleet, open_registry, static_registry
from gpuroute.registry.etcd import EtcdRegistry
from gpuroute.registry.file import FileRegistry


def test_inline_pools() -> None:
    registry = open_registry("llama=http://a:8000, http://b:8000;embed=grpc://c:9000 ;")
    with Watcher(registry) as watcher:
        assert watcher.ids("llama") == ["a:8000", "b:8000"]
        assert watcher.last.pools["embed"].endpoints == (Endpoint(id="c:9000", url="grpc://c:9000", protocol="grpc"),)
        assert not watcher.last.stale
        assert watcher.subscription.error is None
        assert watcher.subscription.age(5.0) == 0.0


def test_a_bare_list_is_the_default_pool() -> None:
    assert ids(first_fleet(open_registry("http://a,https://b/v1"), 1), "default") == ["a", "b_v1"]


def test_static_registry_in_code() -> None:
    endpoint = Endpoint(id="x", url="http://x", weight=0)
    fleet = first_fleet(static_registry({"llama": ["http://a", endpoint], "none": []}), 1)
    assert fleet.pools["llama"].endpoints[1] is endpoint
    assert fleet.pools["none"].endpoints == ()
    assert ids(first_fleet(static_registry(["http://a", endpoint]), 1), "default") == ["a", "x"]
    for wrong in ("http://a", {"llama": "http://a"}, 5, {"llama": 5}, {"llama": {"endpoints": ["http://a"]}}):
        with pytest.raises(ConfigError, match="a list of URLs"):
            static_registry(wrong)
    for wrong in ([5], {"llama": [{"url": "http://a"}]}):
        with pytest.raises(ConfigError, match=r"item 1: is of type .*a URL or an Endpoint"):
            static_registry(wrong)


@pytest.mark.parametrize(
    "endpoint",
    [
        Endpoint("a", "http://user:CANARY@a:8000"),
        Endpoint("a", "http://a:99999"),
        Endpoint("a", "ftp://a"),
        Endpoint("", "http://a:8000"),
        Endpoint("a", "http://a:8000", weight=math.nan),
        Endpoint("a", "http://a:8000", weight=-1),
        Endpoint("a", "http://a:8000", headers={"Host": "b"}),
        Endpoint("a", "http://a:8000", headers={"x": "CANARY\r\ny: z"}),
    ],
)
def test_an_endpoint_in_code_may_say_what_a_record_may(endpoint: Endpoint) -> None:
    with pytest.raises(ConfigError, match=r"llama, item 1: .*accepted: ") as caught:
        static_registry({"llama": [endpoint]})
    assert "CANARY" not in str(caught.value)


@pytest.mark.parametrize(
    ("location", "says"),
    [
        ("", "expected etcd://"),
        ("nonsense", "expected etcd://"),
        ("redis://h:1", "unknown scheme 'redis'"),
        ("etcd3://h:1", "unknown scheme 'etcd3'"),
        ("https//h", "expected etcd://"),
        ("fleet.yaml", "expected etcd://"),
        ("llama=ftp://a", "another scheme"),
        ("llama=http://a:70000", "bad port"),
        ("llama=http://a;llama=http://b", "given twice"),
        ("llama=http://a,http://a", "repeats id"),
        ("Llama=http://a", "bad pool name"),
        ("meta-llama/Llama-3=http://a", "bad pool name 'meta-llama/Llama-3'"),
        ("llama:8b=http://a", "bad pool name 'llama:8b'"),
        ("llama=http://a,embed=http://b", "llama: a pool begins after `,`; expected POOL=URL,URL;POOL2=URL"),
        ("llama=http://u:canary@a", "credentials"),
        ("llama=localhost:8000", "llama, item 1: url has another scheme"),
        ("file://host/fleet.json", "file:///absolute"),
        ("file:fleet.json", "file:///absolute"),
        ("file://localhost", "file:///absolute"),
        ("file://localhostess/fleet.json", "file:///absolute"),
        ("file:///fleet.json#x", "file:///absolute"),
        ("file:///fleet.json?x=1", "file:///absolute"),
        ("etcd://", "bad member"),
        ("etcd://h:0", "bad member"),
        ("etcd://h:99999/p", "bad member"),
        ("etcd://h:2379,,g", "bad member"),
        ("etcd://h/p?x=1", "expected etcd://"),
        ("etcd://u:canary@h", "GPUROUTE_ETCD_PASSWORD"),
    ],
)
def test_a_bad_location_is_a_config_error_that_says_what_is_accepted(location: str, says: str) -> None:
    with pytest.raises(ConfigError, match=r"expected|accepted|instead|repeats|twice") as caught:
        open_registry(location)
    assert says in str(caught.value)
    assert "canary" not in str(caught.value)


def test_etcd_locations(tmp_path) -> None:
    registry = open_registry("etcd://h1:2379,[::1],h3:1/a/b/", user="u", password="canary", empty_grace=1)
    assert registry.grace == 1
    assert isinstance(registry, EtcdRegistry)
    assert registry.config.members == ("h1:2379", "[::1]:2379", "h3:1")
    assert registry.config.prefix == "/a/b"
    assert registry.config.source == "etcd://h1:2379,[::1]:2379,h3:1/a/b"
    assert "canary" not in repr(registry.config)
    assert open_registry("etcds://h").config.tls
    assert open_registry("etcd://h").config.prefix == "/gpuroute"


def test_etcd_options_that_contradict(tmp_path) -> None:
    pem = tmp_path / "x.pem"
    pem.write_text("")
    for options in (
        {"user": "u"},
        {"password": "p"},
        {"cert": str(pem)},
        {"ca": str(pem), "location": "etcd://h"},
        {"ca": str(tmp_path / "absent.pem")},
    ):
        location = options.pop("location", "etcds://h")
        with pytest.raises(ConfigError):
            open_registry(location, **options)


def test_settings_fill_the_etcd_options() -> None:
    environ = {"GPUROUTE_ETCD_USER": "u", "GPUROUTE_ETCD_PASSWORD": "p", "GPUROUTE_TRUST_ENV": "1"}
    registry = open_registry("etcd://h", **etcd_options(Settings.from_env(environ)))
    assert (registry.config.user, registry.config.password.reveal(), registry.config.trust_env) == ("u", "p", True)


@pytest.mark.parametrize(
    "location",
    ["file:///tmp/a%20b.toml", "file:/tmp/a b.toml", "file://localhost/tmp/a b.toml", "/tmp/a b.toml", "a b.json"],
)
def test_file_locations(location: str) -> None:
    registry = open_registry(location)
    assert isinstance(registry, FileRegistry)
    assert registry.path.stem == "a b"


STATIC_ONLY = """
import json, sys
from gpuroute.registry import first_fleet, open_registry
fleet = first_fleet(open_registry("llama=http://a"), 1)
heavy = ["grpc", "asyncio", "ssl", "tenacity", "httpx", "httpx2", "email", "gpuroute.config"]
print(json.dumps([name for name in heavy if name in sys.modules]))
"""


def test_the_static_path_loads_neither_grpc_nor_asyncio_nor_ssl() -> None:
    done = subprocess.run([sys.executable, "-c", STATIC_ONLY], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_the_file_path_loads_neither_grpc_nor_asyncio_nor_ssl(tmp_path) -> None:
    path = tmp_path / "fleet.json"
    path.write_text('{"pools": {"llama": {"endpoints": ["http://a"]}}}')
    code = STATIC_ONLY.replace("llama=http://a", str(path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
