"""The plain way: pools by host, prefixes, headers, options, the decision record. All four clients."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from http_caller import attempts, endpoint, in_flight, router_for
from http_stub import Exchange, status

import gpuroute
from gpuroute import Endpoint
from gpuroute.core.fleet import Fleet, PoolConfig, PoolSpec
from gpuroute.testing import FakeRegistry
from gpuroute.transports.health import _request

if TYPE_CHECKING:
    from collections.abc import Callable

    from http_caller import Caller
    from http_stub import Stage

    Make = Callable[..., Caller]

pytestmark = pytest.mark.real_time


def test_the_host_names_the_pool(stubs: Stage, caller: Make) -> None:
    a, b = stubs("a", "b")
    client = caller(router_for([a], "llama"))
    client.router.registry.set({"llama": [endpoint(a)], "embed-3": [endpoint(b)]})
    assert client.post("http://llama/v1/x").json()["endpoint"] == "a"
    assert client.post("http://EMBED-3:99/v1/x").json()["endpoint"] == "b"
    assert client.post("https://llama/v1/x").json()["endpoint"] == "a", "the endpoint's scheme decides"


def test_calls_spread_and_are_counted_out(stubs: Stage, caller: Make) -> None:
    servers = stubs("a", "b", "c")
    client = caller(servers)
    for _ in range(9):
        assert client.post(content=b"{}").status_code == 200
    assert [len(server.came) for server in servers] == [3, 3, 3]
    assert [server.connections for server in servers] == [1, 1, 1], "connections are kept"
    assert in_flight(client.router) == 0


def test_an_unknown_pool_is_a_clear_error(stubs: Stage, caller: Make) -> None:
    (a,) = stubs("a")
    client = caller([a])
    with pytest.raises(gpuroute.UnknownPool, match="'lama' is not in the fleet; known pools: llama"):
        client.post("http://lama/v1/x")
    for relative in ("/v1/x", "v1/x", "http:///v1/x"):
        with pytest.raises(gpuroute.UnknownPool, match=r"the URL has no host.* base_url; known pools: llama"):
            client.post(relative)
    assert a.came == []


def test_passthrough_calls_other_hosts_directly(stubs: Stage, caller: Make) -> None:
    a, b = stubs("a", "b")
    client = caller([a], passthrough=True)
    answer = client.post(f"{b.url}/v1/x", headers={"authorization": "Bearer k"})
    assert answer.json()["endpoint"] == "b"
    assert "gpuroute" not in answer.extensions
    assert client.post("http://llama/v1/x").json()["endpoint"] == "a"


def test_the_host_gpuroute_means_the_pool_of_the_model(stubs: Stage, caller: Make) -> None:
    a, b = stubs("a", "b")
    client = caller([a])
    served = Endpoint("b", b.url, model="meta/llama-3-8b", adapters=("sql",))
    client.router.registry.set({"small": [endpoint(a)], "large": [served]})
    url = "http://gpuroute/v1/chat/completions"
    for model, name in (("small", "a"), ("meta/llama-3-8b", "b"), ("sql", "b")):
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
        assert client.post(url, json=body).json()["endpoint"] == name
        assert client.post("http://gpuroute/v1/rerank", json={"model": model}).json()["endpoint"] == name
        form = {"data": {"model": model}, "files": {"file": b"audio"}}
        assert client.post("http://gpuroute/v1/audio/transcriptions", **form).json()["endpoint"] == name
    came = len(a.came) + len(b.came)
    for bad in ({"model": "SMALL", "prompt": "x"}, {"model": "typo", "prompt": "x"}, {"prompt": "x"}, {}):
        with pytest.raises(gpuroute.UnknownPool, match="known pools: large, llama, small"):
            client.post("http://gpuroute/v1/completions", json=bad)
    with pytest.raises(gpuroute.UnknownPool, match="names no model"):
        client.post(url, content=b"\xff not json")
    assert len(a.came) + len(b.came) == came, "nothing was sent"


PATHS = {
    # prefix of the endpoint: {request path: target on the wire}
    "": {"/chat": "/chat", "/v1/chat": "/v1/chat", "?q=1": "/?q=1", "/a//b": "/a//b"},
    "/": {"/chat": "/chat", "": "/"},
    "/v1": {
        "/chat": "/v1/chat",
        "/v1/chat": "/v1/chat",
        "/v1": "/v1",
        "/v1?q=1": "/v1?q=1",
        "/v1beta/chat": "/v1/v1beta/chat",
        "?q=1": "/v1/?q=1",
        "/a//b": "/v1/a//b",
    },
    "/v1/": {"/v1/chat": "/v1/chat", "/caf%C3%A9": "/v1/caf%C3%A9", "/a%2Fb": "/v1/a%2Fb"},
    "/v1/v1": {"/v1/chat": "/v1/v1/chat"},
    "/t%2Fx/v1": {"/v1/models/x:generate": "/t%2Fx/v1/models/x:generate", "/x?a=%2B&b=+": "/t%2Fx/v1/x?a=%2B&b=+"},
    "/models": {"/models/x:generate": "/models/models/x:generate"},
}


@pytest.mark.parametrize("prefix", PATHS)
def test_h4_base_path(stubs: Stage, caller: Make, prefix: str) -> None:
    (a,) = stubs("a")
    client = caller([endpoint(a, path=prefix)])
    for path, target in PATHS[prefix].items():
        client.get(f"http://llama{path}")
        assert a.came.pop().target.decode() == target


def test_h4_base_url_of_the_client_is_joined_before(stubs: Stage, caller: Make) -> None:
    (a,) = stubs("a")
    client = caller([endpoint(a, path="/v1")], base_url="http://llama/v1")
    client.get("chat")
    client.get("/chat")
    assert [came.target for came in a.came] == [b"/v1/chat", b"/v1/chat"]


def test_the_request_is_not_mutated(stubs: Stage, caller: Make) -> None:
    a, b = stubs("a", "b")
    a.behave = status(503)
    client = caller([endpoint(a, headers={"authorization": "Bearer a"}, path="/p"), endpoint(b)])
    request = client.client.build_request(
        "POST",
        "http://llama/v1/x",
        content=b"abc",
        headers={"x-gpuroute-key": "k", "Host": "caller.test"},
        extensions={"gpuroute": {"attempts": 2}, "x": 1},
    )
    before = (str(request.url), list(request.headers.raw), dict(request.extensions), request.stream, request.method)
    assert client.send(request).status_code == 200
    assert before == (str(request.url), list(request.headers.raw), dict(request.extensions), request.stream, "POST")


def test_endpoint_headers_are_injected_and_win(stubs: Stage, caller: Make) -> None:
    a, b = stubs("a", "b")
    client = caller([endpoint(a, headers={"Authorization": "Bearer of-a", "X-Tenant": "t"}), endpoint(b)])
    for _ in range(2):
        client.post(headers={"authorization": "Bearer mine", "x-mine": "1"})
    assert [v for k, v in a.came[0].headers if k.lower() == "authorization"] == ["Bearer of-a"]
    assert a.came[0].header("x-tenant") == "t"
    assert b.came[0].header("authorization") == "Bearer mine", "b knows nothing of a's key"
    assert b.came[0].header("x-tenant") is None
    assert {s.came[0].header("x-mine") for s in (a, b)} == {"1"}


@pytest.mark.parametrize("name", ["Host", "host"])
def test_a_host_among_an_endpoints_headers_is_its_host(stubs: Stage, caller: Make, name: str) -> None:
    (a,) = stubs("a")
    record = endpoint(a, headers={name: "gpu.example"}, authority="other.example")
    assert caller([record]).post(headers={"host": "mine"}).status_code == 200
    assert [v for k, v in a.came[0].headers if k.lower() == "host"] == ["gpu.example"]
    asked = _request(record, "", "127.0.0.1:1").decode().lower()
    assert asked.count("host:") == 1
    assert "host: gpu.example\r\n" in asked


def test_options_by_extension_and_header_are_obeyed_and_not_sent(stubs: Stage, caller: Make) -> None:
    servers = stubs("a", "b", "c")
    for server in servers:
        server.behave = status(500)
    client = caller(servers)
    one = client.post(extensions={"gpuroute": {"attempts": 1}})
    two = client.post(headers={"x-gpuroute-attempts": "2", "X-Gpuroute-Timeout": "30s", "x-gpuroute-key": "k"})
    three = client.post(headers={"x-gpuroute-attempts": "1"}, extensions={"gpuroute": {"attempts": 3}})
    assert [len(attempts(answer)) for answer in (one, two, three)] == [1, 2, 3]
    sent = [name.lower() for server in servers for came in server.came for name, _ in came.headers]
    assert {name for name in sent if name.startswith("x-gpuroute")} == {"x-gpuroute-attempt"}  # ours, on repeats


@pytest.mark.parametrize(
    ("own", "complaint"),
    [
        ({"timeout": 0}, "timeout=0 of a call: expected seconds above 0"),
        ({"timeout": "soon"}, "timeout='soon'"),
        ({"attempts": 0}, "attempts=0 of a call: expected a whole number"),
        ({"attempts": 1.5}, "attempts=1.5"),
        ({"key": 7}, "key=7 of a call: expected text"),
        ({"tiemout": 1}, "unknown option 'tiemout' of a call; accepted: timeout"),
    ],
)
def test_bad_options_name_themselves(stubs: Stage, caller: Make, own: dict[str, Any], complaint: str) -> None:
    (a,) = stubs("a")
    with pytest.raises(gpuroute.ConfigError, match=complaint):
        caller([a]).post(extensions={"gpuroute": own})
    assert a.came == []


def test_the_decision_record_tells_the_attempts(stubs: Stage, caller: Make) -> None:
    a, b = stubs("a", "b")
    a.behave = status(503, b"the queue is full")
    answer = caller([a, b]).post()
    record = answer.extensions["gpuroute"]
    assert json.loads(json.dumps(record)) == record
    assert (record["pool"], record["endpoint"], record["policy"]) == ("llama", "b", "round_robin")
    assert record["reason"] == "retry: a 503 overloaded"
    assert [attempt["outcome"] for attempt in record["attempts"]] == ["overloaded", "success"]
    assert 0 <= record["timings"]["connect_s"] < record["timings"]["first_byte_s"] < 60


def test_the_final_failure_stops_an_sdk_from_retrying(stubs: Stage, caller: Make) -> None:
    (a,) = stubs("a")
    client = caller([a])
    for code in (400, 429, 500):
        a.behave = status(code, b"no", x_should_retry="true")
        answer = client.post(extensions={"gpuroute": {"attempts": 1, "timeout": 20}})
        assert (answer.status_code, answer.headers["x-should-retry"], answer.read()) == (code, "false", b"no")
    a.behave = status(200)
    assert "x-should-retry" not in client.post().headers


def test_affinity_key_keeps_an_endpoint(stubs: Stage, caller: Make) -> None:
    servers = stubs("a", "b", "c", "d")
    client = caller(servers, settings={"policy": "session"})
    for _ in range(5):
        client.post(extensions={"gpuroute": {"key": "user-7"}})
        client.post(headers={"x-gpuroute-key": "user-7"})
        client.post(json={"messages": [{"role": "user", "content": "hi"}], "prompt_cache_key": "user-7"})
    assert sorted(len(server.came) for server in servers) == [0, 0, 0, 15]


def test_prompts_with_the_same_prefix_meet(stubs: Stage, caller: Make) -> None:
    servers = stubs("a", "b", "c", "d")
    client = caller(servers, settings={"policy": "prefix"})
    system = {"role": "system", "content": "You are terse. " * 200}
    large = {"role": "system", "content": "x" * 200_000}  # read off the loop
    for first in (system, large):
        homes = {
            client.post(json={"messages": [first, {"role": "user", "content": str(n)}]}).json()["endpoint"]
            for n in range(6)
        }
        assert len(homes) == 1


def test_bodies_arrive_unchanged(stubs: Stage, caller: Make) -> None:
    (a,) = stubs("a")
    client = caller([a], settings={"policy": "prefix"})
    bodies = [b"", b"\xff\x00 not json", b'{"messages": "\\ud800"}', b'{ "b":1,\n"a":2 }', b"x" * 300_000]
    for body in bodies:
        assert client.post(content=body).status_code == 200
    assert [came.body for came in a.came] == bodies


def test_kill_switch_and_rollout_go_to_the_fallback(stubs: Stage, caller: Make) -> None:
    a, old = stubs("a", "old")
    off = caller(router_for([a], disabled=True, fallback_url=f"{old.url}/api"))
    answer = off.post("http://llama/v1/x")
    assert answer.json()["endpoint"] == "old"
    assert (old.came[0].target, old.came[0].header("host")) == (b"/api/v1/x", f"127.0.0.1:{old.port}")
    assert answer.extensions["gpuroute"]["endpoint"] == "fallback"
    some = caller(router_for([a], rollout="30%", fallback_url=old.url))
    names = [some.post("http://llama/v1/x").json()["endpoint"] for _ in range(10)]
    assert (names.count("a"), names.count("old")) == (3, 7)


def test_calls_outside_the_rollout_do_not_wait_for_the_registry(stubs: Stage, caller: Make) -> None:
    a, old = stubs("a", "old")
    registry = FakeRegistry()  # silent until it is told a fleet
    client = caller(gpuroute.Router(registry, rollout="50%", fallback_url=old.url, ready_timeout="50ms", watchdog=False))
    for _ in range(2):
        assert client.post("http://llama/v1/x").json()["endpoint"] == "old"
        with pytest.raises(gpuroute.RegistryUnavailable):  # the other half is the router's
            client.post("http://llama/v1/x")
    assert client.post("http://llama/v1/x").json()["endpoint"] == "old"
    registry.set({"llama": [endpoint(a)]})
    names = [client.post("http://llama/v1/x").json()["endpoint"] for _ in range(4)]
    assert names == ["a", "old", "a", "old"]


def test_the_kill_switch_leaves_passthrough_calls_alone(stubs: Stage, caller: Make) -> None:
    a, old, foreign = stubs("a", "old", "foreign")
    registry = FakeRegistry()
    client = caller(gpuroute.Router(registry, disabled=True, fallback_url=old.url, watchdog=False), passthrough=True)
    for known in (False, True):  # before and after the first view of the fleet
        if known:
            registry.set({"llama": [endpoint(a)]})
        assert client.post("http://llama/v1/x").json()["endpoint"] == "old"
        assert client.post(f"{foreign.url}/v1/x").json()["endpoint"] == "foreign"


def test_a_disabled_pool_goes_to_its_own_fallback_and_is_not_retried(stubs: Stage, caller: Make) -> None:
    a, old = stubs("a", "old")
    client = caller(router_for([a]))
    spec = PoolSpec("llama", (endpoint(a),), PoolConfig(disabled=True, fallback_url=old.url))
    client.router.registry.set(Fleet({"llama": spec}))
    old.behave = status(500)
    assert client.post().status_code == 500
    assert (len(a.came), len(old.came)) == (0, 1)


def test_an_empty_pool_and_a_closed_router_say_so(stubs: Stage, caller: Make) -> None:
    (a,) = stubs("a")
    client = caller([a])
    client.router.registry.set({"llama": []})
    with pytest.raises(client.ours.NoEndpointAvailable, match="the registry lists no endpoint") as caught:
        client.post()
    assert isinstance(caught.value, client.library.ConnectError)
    assert isinstance(caught.value, gpuroute.NoEndpointAvailable)
    assert caught.value.request.url.host == "llama"
    client.router.close()
    with pytest.raises(gpuroute.RouterClosed):
        client.post()


def test_proxy_and_transport_arguments_are_refused(stubs: Stage, caller: Make) -> None:
    (a,) = stubs("a")
    for arguments in ({"proxy": "http://p:1"}, {"transport": object()}):
        with pytest.raises(gpuroute.ConfigError, match="takes no proxy= and no transport="):
            caller([a], **arguments)
    assert caller([a], proxy=None, transport=None).post().status_code == 200


def test_proxies_of_the_environment_are_not_used(stubs: Stage, caller: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    (a,) = stubs("a")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert caller([a]).post().status_code == 200


def test_a_head_request_and_a_bodyless_answer_end_at_once(stubs: Stage, caller: Make) -> None:
    (a,) = stubs("a")

    async def headers_only(exchange: Exchange) -> None:
        exchange.writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")

    a.behave = headers_only
    client = caller([a])
    assert client.request("HEAD", "http://llama/health").headers["content-length"] == "1000"
    a.behave = status(204)
    assert client.get("http://llama/x").status_code == 204
    assert a.connections == 1
