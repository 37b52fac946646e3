"""Records: what is taken, what is refused and in which words, and the way back."""

from __future__ import annotations

import copy
import json
import math
import pickle
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuroute.core.endpoint import Capacity, Endpoint, Gpu, State, Tls
from gpuroute.core.fleet import PoolConfig
from gpuroute.errors import InvalidRecord
from gpuroute.registry import schema
from gpuroute.registry.schema import (
    MAX_BYTES,
    check_pool,
    config_record,
    decode,
    default_id,
    endpoint_record,
    parse_config,
    parse_endpoint,
    valid_id,
)

FULL = {
    "url": "https://gpu-1.example:8443/v1",
    "protocol": "http",
    "engine": "vllm",
    "model": "llama-3-8b",
    "version": "7",
    "adapters": ["sql", "chat"],
    "weight": 2.5,
    "gpu": {"kind": "H100", "count": 8, "memory_gib": 80},
    "capacity": {"max_in_flight": 64, "kv_tokens": 500_000},
    "tls": {"server_name": "gpu-1", "ca": "/ca.pem", "cert": "/c.pem", "key": "/k.pem"},
    "headers": {"authorization": "Bearer canary"},
    "authority": "gpu-1.internal",
    "zone": "eu-1a",
    "region": "eu-1",
    "state": "warming",
    "started_at": 1_800_000_000.5,
    "cold_start_s": 40,
    "price": 1.5,
    "agent": "udp://10.0.0.1:7001",
    "labels": {"rack": "r1"},
}


def parse(**fields) -> Endpoint:
    return parse_endpoint({"url": "http://a:8000", **fields}, id="a", key="p/endpoints/a")


def refusal(**fields) -> str:
    with pytest.raises(InvalidRecord) as caught:
        parse(**fields)
    return str(caught.value)


def test_every_field_is_read() -> None:
    endpoint = parse_endpoint(FULL, id="gpu-1", key="k")
    assert endpoint == Endpoint(
        id="gpu-1",
        url="https://gpu-1.example:8443/v1",
        engine="vllm",
        model="llama-3-8b",
        version="7",
        adapters=("sql", "chat"),
        weight=2.5,
        gpu=Gpu("H100", 8, 80.0),
        capacity=Capacity(64, 500_000),
        tls=Tls("gpu-1", "/ca.pem", "/c.pem", "/k.pem"),
        headers={"authorization": "Bearer canary"},
        authority="gpu-1.internal",
        zone="eu-1a",
        region="eu-1",
        state=State.WARMING,
        started_at=1_800_000_000.5,
        cold_start_s=40.0,
        price=1.5,
        agent="udp://10.0.0.1:7001",
        labels={"rack": "r1"},
    )
    assert {row for row in Endpoint.__dataclass_fields__ if row != "id"} == set(FULL)


def test_url_alone_is_enough_and_unknown_or_null_fields_do_no_harm() -> None:
    assert parse(surprise=[1], zone=None) == Endpoint(id="a", url="http://a:8000")


@pytest.mark.parametrize(
    ("url", "protocol"),
    [
        ("http://a", "http"),
        ("https://a:1/x", "http"),
        ("grpc://a:1", "grpc"),
        ("grpcs://a:65535", "grpc"),
        ("http://[::1]:8000", "http"),
    ],
)
def test_schemes(url: str, protocol: str) -> None:
    assert parse(url=url).protocol == protocol


@pytest.mark.parametrize(
    "url",
    [
        "ftp://a",
        "a:8000",
        "",
        "http://",
        "http://:80",
        "http://a:70000",
        "http://a:0",
        "http://a:x",
        "http://u:canary@a",
        "http://a/?q=canary",
        "http://a/#f",
        "http://a b/",
        "http://a\n/",
        "http://ä.example",
        "http://u:canary@a\uff0fb",
        "http://[::1",
        "http://a" + "a" * 3000,
        5,
        ["http://a"],
    ],
)
def test_bad_urls(url: object) -> None:
    text = refusal(url=url)
    assert text.startswith("p/endpoints/a: url ")
    assert "accepted: http://" in text
    assert "canary" not in text


@pytest.mark.parametrize("weight", [-1, -0.001, math.nan, math.inf, 1e18, 1_000_001, "2", True, [1], 10**400])
def test_bad_weights(weight: object) -> None:
    text = refusal(weight=weight)
    assert "p/endpoints/a: weight" in text
    assert "a number from 0 (drained) to 1e6" in text


def test_weights_at_the_edges() -> None:
    assert parse(weight=0).weight == 0
    assert not parse(weight=0).takes_calls
    assert parse(weight=1e6).weight == 1e6


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"protocol": "h3"}, ["protocol", "http, grpc"]),
        ({"url": "grpc://a:1", "protocol": "http"}, ["protocol", "contradicts"]),
        ({"tls": {"ca": "/ca.pem"}}, ["tls", "https://"]),
        ({"url": "https://a", "tls": {"ca": 5}}, ["tls", "ca"]),
        ({"state": "up"}, ["state", "ready, warming, draining, cold"]),
        ({"gpu": "H100"}, ["gpu", "object"]),
        ({"gpu": {"count": 0}}, ["gpu", "count"]),
        ({"gpu": {"count": 1.5}}, ["gpu", "count"]),
        ({"capacity": {"max_in_flight": -1}}, ["capacity", "max_in_flight"]),
        ({"adapters": "sql"}, ["adapters", "list"]),
        ({"adapters": [1]}, ["adapters"]),
        ({"labels": {"a": 1}}, ["labels"]),
        ({"model": "a\nb"}, ["model", "control"]),
        ({"model": "\ud800"}, ["model"]),
        ({"agent": "udp://h"}, ["agent", "port"]),
        ({"agent": "http://h:1"}, ["agent", "udp://"]),
        ({"agent": "udp://h:1/65536"}, ["agent", "engine"]),
        ({"agent": "udp://h:1/" + "9" * 1_900}, ["agent", "engine"]),
        ({"started_at": "now"}, ["started_at"]),
        ({"price": -1}, ["price"]),
    ],
)
def test_refusals_name_the_field_and_what_is_accepted(fields: dict, names: list[str]) -> None:
    text = refusal(**fields)
    assert text.startswith("p/endpoints/a: ")
    assert all(name in text for name in ["accepted", *names]), text


@pytest.mark.parametrize(
    "headers",
    [
        {"a b": "canary"},
        {"a": "canary\r\nx: y"},
        {"a": "cänary"},
        {"Host": "canary"},
        {"content-length": "5"},
        {"a": 5},
        ["canary"],
    ],
)
def test_bad_headers_are_refused_without_being_shown(headers: object) -> None:
    text = refusal(headers=headers)
    assert "headers" in text
    assert "nary" not in text


@pytest.mark.parametrize("record", [[], "x", 5, None, True])
def test_records_that_are_no_objects(record: object) -> None:
    with pytest.raises(InvalidRecord, match=r"p/a: is .*accepted: a JSON object"):
        parse_endpoint(record, id="a", key="p/a")
    with pytest.raises(InvalidRecord, match="accepted: a JSON object"):
        parse_config(record, key="p/a")


def test_url_is_required() -> None:
    with pytest.raises(InvalidRecord, match="url is missing"):
        parse_endpoint({"weight": 1}, id="a", key="k")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 60_000,
        b'{"x":' * 9_000,
        b"1" * 5_000,
        b" " * (MAX_BYTES + 1),
        b"{}" + b" " * 2_000_000,
    ],
)
def test_bytes_that_are_no_record(data: bytes) -> None:
    with pytest.raises(InvalidRecord, match=r"^k: ") as caught:
        parse_endpoint(decode(data, "k"), id="a", key="k")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("name", ["a", "llama-3.1_8b", "0", "a" * 63])
def test_pool_names(name: str) -> None:
    assert check_pool(name, "k") == name


@pytest.mark.parametrize("name", ["", "A", "-a", ".a", "a b", "a/b", "ä", "a" * 64, "a\n"])
def test_bad_pool_names(name: str) -> None:
    with pytest.raises(InvalidRecord, match="bad pool name"):
        check_pool(name, "k")


def test_ids() -> None:
    assert all(map(valid_id, ["gpu-1:8000", "[::1]:80", "a", "A.b_c@d"]))
    assert not any(map(valid_id, ["", "a/b", "a b", "a\\xff", "a\n", "a" * 254]))
    assert default_id("http://a:8000/") == "a:8000"
    assert default_id("grpc://a:1/x/y") == "a:1_x_y"
    assert default_id("http://[::1]:80/t@x") == "[::1]:80_t@x"
    assert default_id("a:1") == "a:1"


@pytest.mark.parametrize(
    "url", ["http://u:canary@a:1/x", "u:canary@a:1/x", "http://u:can/ary@a:1/x", "http://a:1/x?y=canary"]
)
def test_an_id_made_of_a_url_shows_no_secret_of_it(url: str) -> None:
    assert default_id(url) == "a:1_x"


def test_pool_config() -> None:
    record = {"policy": "p2c", "timeout": "250ms", "attempts": 2, "max_in_flight": 9, "disabled": True}
    record |= {"fallback_url": "https://elsewhere/v1", "salt": "canary", "hedge": {"after": "p95"}}
    config = parse_config(record, key="k")
    assert config.timeout == 0.25
    assert config.options == {"hedge": {"after": "p95"}}
    assert config_record(config) == {**record, "timeout": 0.25}
    assert parse_config(config_record(config), key="k") == config
    assert parse_config({}, key="k") == PoolConfig()
    assert "canary" not in json.dumps(config_record(config, secrets=False)) + repr(config)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("timeout", 0),
        ("timeout", "soon"),
        ("timeout", -1),
        ("attempts", 0),
        ("attempts", True),
        ("disabled", "false"),
        ("fallback_url", "ftp://x"),
        ("fallback_url", "http://u:p@x"),
        ("policy", 5),
        ("policy", "p3c"),
        ("ask_hashes", "false"),
        ("hedge", "true"),
        ("watchdog", 1),
    ],
)
def test_bad_pool_config(field: str, value: object) -> None:
    with pytest.raises(InvalidRecord, match=f"^k: {field} .*accepted: "):
        parse_config({field: value}, key="k")


@pytest.mark.parametrize("field", ["timeout", "subset", "zone_price", "policy", "fallback_url", "salt"])
@pytest.mark.parametrize("value", ["canary", "canary\n\x1b[2J", "canary" * 400])
def test_a_refusal_shows_no_value_however_it_is_read(field: str, value: str) -> None:
    if (field, value) != ("salt", "canary"):
        with pytest.raises(InvalidRecord, match=f"^k: {field} .*accepted: ") as caught:
            parse_config({field: value}, key="k")
        assert "canary" not in str(caught.value)


def test_a_policy_that_this_release_does_not_know_names_those_that_it_does() -> None:
    with pytest.raises(InvalidRecord, match=r"policy .*accepted: random, .*auto"):
        parse_config({"policy": "newer"}, key="k")


WORDS = st.text("abcz-0", min_size=1, max_size=8)
ENDPOINTS = st.builds(
    Endpoint,
    id=WORDS,
    url=st.sampled_from(["https://a:1", "grpcs://b:2/x", "https://[::1]:3"]),
    engine=WORDS,
    adapters=st.lists(WORDS, max_size=3).map(tuple),
    weight=st.floats(0, 1e6),
    gpu=st.builds(Gpu, WORDS, st.integers(1, 16), st.floats(0, 200)),
    capacity=st.builds(Capacity, st.integers(0, 9), st.integers(0, 9)),
    tls=st.builds(Tls, WORDS, WORDS, WORDS, WORDS),
    headers=st.dictionaries(WORDS.map("x-{}".format), WORDS, max_size=3),
    state=st.sampled_from(State),
    labels=st.dictionaries(WORDS, WORDS, max_size=3),
).map(lambda item: replace(item, protocol="grpc") if item.url.startswith("grpc") else item)


@given(ENDPOINTS)
def test_an_endpoint_survives_the_way_through_json(endpoint: Endpoint) -> None:
    record = json.loads(json.dumps(endpoint_record(endpoint)))
    assert parse_endpoint(record, id=endpoint.id, key="k") == endpoint


def test_endpoints_and_configs_can_be_copied_and_pickled() -> None:
    for value in (
        parse_endpoint({**FULL, "headers": {}}, id="a", key="k"),
        parse_config({"hedge": {"after": "p95"}}, key="k"),
    ):
        assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) == value
        assert asdict(value)
        assert hash(value) == hash(copy.deepcopy(value))


def test_a_record_holds_only_what_differs_from_the_defaults() -> None:
    assert endpoint_record(Endpoint(id="a", url="http://a")) == {"url": "http://a"}
    assert endpoint_record(parse_endpoint({"url": "grpc://a:1"}, id="a", key="k")) == {"url": "grpc://a:1"}


def test_C4_no_secret_in_what_people_see() -> None:
    endpoint = parse_endpoint(FULL, id="a", key="k")
    shown = json.dumps(endpoint_record(endpoint, secrets=False))
    assert "canary" not in shown + repr(endpoint)
    assert "k.pem" not in shown + repr(endpoint)
    assert "authorization" in shown


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(sorted(FULL)), JSON, max_size=6))
def test_any_json_is_an_endpoint_or_an_invalid_record(fields: dict) -> None:
    try:
        endpoint = parse_endpoint({"url": "http://a", **fields}, id="a", key="k")
    except InvalidRecord as error:
        assert str(error).startswith("k: ")
    else:
        json.dumps(endpoint_record(endpoint)).encode()


@given(st.dictionaries(st.sampled_from(sorted(PoolConfig.__dataclass_fields__)), JSON, max_size=6))
def test_any_json_is_a_pool_config_or_an_invalid_record(fields: dict) -> None:
    try:
        parse_config(fields, key="k")
    except InvalidRecord as error:
        assert str(error).startswith("k: ")


@pytest.mark.parametrize(("heading", "rows"), [("endpoint", schema.ENDPOINT_FIELDS), ("pool", schema._CONFIG)])
def test_the_documentation_lists_the_fields(heading: str, rows: dict | tuple) -> None:
    page = (Path(__file__).parents[2] / "docs" / "registry.md").read_text()
    section = page.partition(f"of a{'n' * (heading == 'endpoint')} {heading}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]*`) \|", section, re.MULTILINE)
    assert {name for cell in cells for name in re.findall(r"`(\w+)`", cell)} == set(rows)
