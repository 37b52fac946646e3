"""Redirects and cookies: what stays on its endpoint, what leaves, and that no credential goes along."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from http_caller import attempts, endpoint
from http_stub import Exchange, ok, status

import gpuroute

if TYPE_CHECKING:
    from collections.abc import Callable

    from http_caller import Caller
    from http_stub import Stage, Stub

    Make = Callable[..., Caller]

pytestmark = pytest.mark.real_time

SECRETS = {
    "authorization": "Bearer mine",
    "cookie": "session=mine",
    "x-api-key": "mine",
    "api-key": "mine",
    "x-gpuroute-key": "mine",
}


def redirecting(stub: Stub, location: str, code: int = 307) -> None:
    async def behave(exchange: Exchange) -> None:
        if exchange.came.target.endswith(b"/old"):
            exchange.reply(code, b"", location=location)
        else:
            await ok(exchange)

    stub.behave = behave


def test_h9_a_relative_redirect_stays_on_its_endpoint(stubs: Stage, caller: Make) -> None:
    servers = stubs("a", "b", "c")
    for server in servers:
        redirecting(server, "/p/v1/new?x=1")
    client = caller([endpoint(s, path="/p", headers={"authorization": f"Bearer {s.name}"}) for s in servers])
    for _ in range(3):
        answer = client.post("http://llama/v1/old", content=b"body", headers=SECRETS, follow_redirects=True)
        name = answer.json()["endpoint"]
        assert [r.status_code for r in answer.history] == [307]
        assert attempts(answer.history[0])[0].split()[0] == name
        assert attempts(answer) == [f"{name} success"]
    for server in servers:
        first, second = server.came
        assert (first.target, second.target) == (b"/p/v1/old", b"/p/v1/new?x=1")
        assert (second.body, second.header("authorization")) == (b"body", f"Bearer {server.name}")
        assert second.header("x-api-key") == "mine", "the same endpoint: the caller's headers go along"
        assert second.header("x-gpuroute-key") is None


@pytest.mark.parametrize("location", ["new", "./new", "{own}/v1/new", "//{netloc}/v1/new"])
def test_h9_every_way_to_name_oneself(stubs: Stage, caller: Make, location: str) -> None:
    a, b = stubs("a", "b")
    redirecting(a, location.format(own=a.url, netloc=f"127.0.0.1:{a.port}"))
    client = caller([a, b])
    answer = client.post("http://llama/v1/old", headers=SECRETS, follow_redirects=True)
    assert answer.json()["endpoint"] == "a"
    assert a.came[-1].header("authorization") == "Bearer mine"
    assert b.came == []


@pytest.mark.parametrize("passthrough", [False, True])
@pytest.mark.parametrize("location", ["http://127.0.0.1:{port}/x", "//127.0.0.1:{port}/x", "http://localhost:{port}/x"])
def test_h9_a_foreign_redirect_leaves_the_router_without_credentials(
    stubs: Stage, caller: Make, location: str, *, passthrough: bool
) -> None:
    a, foreign = stubs("a", "foreign")
    redirecting(a, location.format(port=foreign.port))
    client = caller([endpoint(a, headers={"x-injected": "secret"})], passthrough=passthrough)
    answer = client.post("http://llama/v1/old", content=b"body", headers=SECRETS, follow_redirects=True)
    assert (answer.status_code, answer.json()["endpoint"]) == (200, "foreign")
    assert "gpuroute" not in answer.extensions
    (came,) = foreign.came
    sent = {name.lower() for name, _ in came.headers}
    assert not sent & {*SECRETS, "x-injected"}
    assert (came.target, came.body) == (b"/x", b"body")
    assert came.header("host") == location.format(port=foreign.port).split("/")[2]


def test_h9_a_redirect_that_is_not_followed_is_handed_out(stubs: Stage, caller: Make) -> None:
    (a,) = stubs("a")
    redirecting(a, "/v1/new")
    client = caller([a])
    answer = client.post("http://llama/v1/old")
    assert (answer.status_code, answer.has_redirect_location) == (307, True)
    assert str(answer.next_request.url).startswith("http://llama/v1/new")
    assert client.send(answer.next_request).json()["endpoint"] == "a"


def test_h9_hops_are_limited_and_loops_end(stubs: Stage, caller: Make) -> None:
    (a,) = stubs("a")
    redirecting(a, "/v1/old")
    client = caller([a], max_redirects=5)
    with pytest.raises(client.library.TooManyRedirects):
        client.get("http://llama/v1/old", follow_redirects=True)
    assert len(a.came) == 6


def test_h9_one_shot_bodies_are_not_sent_to_the_new_place(stubs: Stage, caller: Make) -> None:
    (a,) = stubs("a")
    redirecting(a, "/v1/new")
    client = caller([a])

    def parts() -> Any:
        yield b"x"

    async def async_parts() -> Any:
        yield b"x"

    with pytest.raises(client.library.StreamConsumed):
        client.post("http://llama/v1/old", content=async_parts() if client.is_async else parts(), follow_redirects=True)


def test_h9_an_endpoint_that_left_meanwhile_is_missed(stubs: Stage, caller: Make) -> None:
    a, b = stubs("a", "b")
    redirecting(a, "/v1/new")
    client = caller([a])
    answer = client.post("http://llama/v1/old")
    client.router.registry.set({"llama": [endpoint(b)]})
    with pytest.raises(gpuroute.NoEndpointAvailable, match="endpoint 'a' redirected to itself"):
        client.send(answer.next_request)
    assert b.came == []


def test_h9_a_malformed_location_is_the_client_librarys_business(stubs: Stage, caller: Make) -> None:
    (a,) = stubs("a")
    redirecting(a, "http://h:badport/")
    client = caller([a])
    try:
        location = client.post("http://llama/v1/old").headers["location"]
    except client.library.RemoteProtocolError as error:  # what some versions make of it
        assert "Invalid URL in location header" in str(error)
    else:
        assert location == "http://h:badport/"


# ------------------------------------------------------------------------------------------------ H7


def setting_cookies(stub: Stub) -> None:
    stub.behave = status(200, b"", set_cookie=f"session={stub.name}; Path=/")


def test_h7_cookies_of_endpoints_are_not_kept(stubs: Stage, caller: Make) -> None:
    a, b = stubs("a", "b")
    setting_cookies(a)
    setting_cookies(b)
    client = caller([a, b])
    for _ in range(4):
        assert "set-cookie" not in client.post().headers
    assert dict(client.client.cookies) == {}
    assert [came.header("cookie") for came in (*a.came, *b.came)] == [None] * 4


def test_h7_unless_asked_for_and_a_jar_of_the_callers_is_sent(stubs: Stage, caller: Make) -> None:
    (a,) = stubs("a")
    setting_cookies(a)
    asked = caller([a], cookies=True)
    assert asked.post().headers["set-cookie"].startswith("session=a")
    by_setting = caller([a], settings={"cookies": True})
    assert "set-cookie" in by_setting.post().headers
    jar = caller([a], cookies={"mine": "1"})
    jar.post()
    jar.post()
    assert [came.header("cookie") for came in a.came[-2:]] == ["mine=1"] * 2
