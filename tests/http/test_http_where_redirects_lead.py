"""Where a `Location` leads is what a client without a router makes of it: from the path that was asked, by every name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from http_caller import endpoint, router_for
from http_stub import Exchange, ok

if TYPE_CHECKING:
    from collections.abc import Callable

    from http_caller import Caller
    from http_stub import Stage, Stub

    Make = Callable[..., Caller]

pytestmark = pytest.mark.real_time


def redirecting(stub: Stub, location: str) -> None:
    async def behave(exchange: Exchange) -> None:
        if b"/old" in exchange.came.target:
            exchange.reply(307, b"", location=location)
        else:
            await ok(exchange)

    stub.behave = behave


@pytest.mark.parametrize(
    ("location", "target"),
    [
        ("new", b"/p/v1/models/new"),
        ("./new?x=1", b"/p/v1/models/new?x=1"),
        ("../new", b"/p/v1/new"),
        ("/new", b"/new"),
        ("%2Fnew", b"/p/v1/models/%2Fnew"),
    ],
)
@pytest.mark.parametrize("prefix", ["/p", "/p/v1"])
def test_a_relative_path_begins_where_the_request_went(
    stubs: Stage, caller: Make, prefix: str, location: str, target: bytes
) -> None:
    a, b = stubs("a", "b")
    redirecting(a, location)
    client = caller([endpoint(a, path=prefix), endpoint(b)])
    answer = client.get("http://llama/v1/models/old?from=here", follow_redirects=True)
    assert answer.json()["endpoint"] == "a"
    assert a.came[-1].target == target


def test_a_second_step_begins_where_the_first_one_led(stubs: Stage, caller: Make) -> None:
    (a,) = stubs("a")

    async def behave(exchange: Exchange) -> None:
        steps = {b"/p/v1/old": "/other/old", b"/other/old": "new"}
        step = steps.get(exchange.came.target)
        if step is None:
            await ok(exchange)
        else:
            exchange.reply(307, b"", location=step)

    a.behave = behave
    caller([endpoint(a, path="/p")]).get("http://llama/v1/old", follow_redirects=True)
    assert [came.target for came in a.came] == [b"/p/v1/old", b"/other/old", b"/other/new"]


@pytest.mark.parametrize("authority", ["gpu.example:8443", "GPU.example:8443", "gpu.example", "gpu.example:80"])
def test_an_endpoint_that_goes_by_its_authority_names_itself(stubs: Stage, caller: Make, authority: str) -> None:
    a, b = stubs("a", "b")
    redirecting(a, f"http://{authority}/v1/new")
    client = caller([endpoint(a, authority=authority), endpoint(b)])
    answer = client.get("http://llama/v1/old", headers={"authorization": "Bearer mine"}, follow_redirects=True)
    assert answer.json()["endpoint"] == "a"
    assert (a.came[-1].target, a.came[-1].header("authorization")) == (b"/v1/new", "Bearer mine")


@pytest.mark.parametrize("fragment", ["", "#part", "#gpuroute-endpoint=a"])
def test_who_has_left_the_router_stays_outside(stubs: Stage, caller: Make, fragment: str) -> None:
    a, foreign, other = stubs("a", "foreign", "other")
    redirecting(a, f"{foreign.url}/old")
    redirecting(foreign, f"{other.url}/new{fragment}")
    answer = caller([a]).get("http://llama/v1/old", follow_redirects=True)
    assert answer.json()["endpoint"] == "other"


def test_options_of_a_call_go_to_no_host_outside(stubs: Stage, caller: Make) -> None:
    a, outside = stubs("a", "outside")
    client = caller([a], passthrough=True)
    headers = {"x-gpuroute-key": "user-7", "X-Gpuroute-Timeout": "20s", "authorization": "Bearer mine", "x-other": "1"}
    client.post(f"{outside.url}/x?y=1", content=b"body", headers=headers)
    (came,) = outside.came
    assert (came.target, came.body) == (b"/x?y=1", b"body")
    assert (came.header("authorization"), came.header("x-other")) == ("Bearer mine", "1"), "asked for by the caller"
    assert [name for name, _ in came.headers if name.lower().startswith("x-gpuroute-")] == []


@pytest.mark.parametrize("pool", [None, "llama"])
@pytest.mark.parametrize("location", ["{own}//b/new?x=1#part", "/.//b/new?x=1"])
def test_a_path_that_looks_like_a_host_is_none(stubs: Stage, caller: Make, location: str, pool: str | None) -> None:
    """Of `http://own//b/new` alone, `//b/new` would be left: the host `b`, which may be a pool or somebody else's."""
    a, b = stubs("a", "b")
    redirecting(a, location.format(own=a.url))
    router = router_for([endpoint(a)])
    router.registry.set({"llama": [endpoint(a)], "b": [endpoint(b)]})
    client = caller(router, pool=pool)
    answer = client.get("http://me:mine@llama:81/old", follow_redirects=True)
    assert (answer.json()["endpoint"], a.came[-1].target) == ("a", b"//b/new?x=1")
    assert (answer.url.host, answer.url.port) == ("llama", 81)
    assert "mine" not in answer.history[0].headers["location"]
    assert a.came[-1].header("authorization") == a.came[0].header("authorization") == "Basic bWU6bWluZQ=="
    assert b.came == []
