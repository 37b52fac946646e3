"""Hosts that are no pools are reached as the client would without a router: by its proxies, its mounts, else directly."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx
import httpx2
import pytest
from http_caller import router_for

import gpuroute

if TYPE_CHECKING:
    from collections.abc import Callable

    from http_caller import Caller
    from http_stub import Exchange, Stage

    Make = Callable[..., Caller]

pytestmark = pytest.mark.real_time

OUTSIDE = "http://outside.example/x"


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("library", [httpx2, httpx], ids=lambda library: library.__name__)
class TestWrapped:
    def test_a_wrapped_client_keeps_its_proxies_for_other_hosts(
        self, stubs: Stage, library: Any, eventually: Callable[..., None], *, asynchronous: bool
    ) -> None:
        a, proxy, direct = stubs("a", "proxy", "direct")
        mounts = {"all://127.0.0.1": None}
        client = getattr(library, "AsyncClient" if asynchronous else "Client")(proxy=proxy.url, mounts=mounts)
        gpuroute.wrap(client, router_for([a]), passthrough=True)
        answers = asyncio.run(_all(client, OUTSIDE, f"{direct.url}/x", "http://llama/x"))
        assert [answer.json()["endpoint"] for answer in answers] == ["proxy", "direct", "a"]
        assert proxy.came[0].target == OUTSIDE.encode()
        eventually(lambda: proxy.open + direct.open == 0, "closed with the client")


async def _all(client: Any, *urls: str) -> list[Any]:
    if isinstance(client, (httpx.Client, httpx2.Client)):
        with client:
            return [client.get(url) for url in urls]
    async with client:
        return [await client.get(url) for url in urls]


def test_proxies_of_the_environment_lead_to_other_hosts(
    stubs: Stage, caller: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, proxy, direct = stubs("a", "proxy", "direct")
    monkeypatch.setenv("HTTP_PROXY", proxy.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    client = caller([a], passthrough=True)
    assert [client.get(url).json()["endpoint"] for url in (OUTSIDE, f"{direct.url}/x", "http://llama/x")] == [
        "proxy",
        "direct",
        "a",
    ]


def test_unless_the_environment_is_not_trusted(stubs: Stage, caller: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    a, direct = stubs("a", "direct")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert caller([a], passthrough=True, trust_env=False).get(f"{direct.url}/x").json()["endpoint"] == "direct"


def test_a_redirect_that_leaves_the_router_goes_by_the_proxy(
    stubs: Stage, caller: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, proxy = stubs("a", "proxy")
    monkeypatch.setenv("HTTP_PROXY", proxy.url)

    async def behave(exchange: Exchange) -> None:
        exchange.reply(307, b"", location=OUTSIDE)

    a.behave = behave
    assert caller([a]).get("http://llama/x", follow_redirects=True).json()["endpoint"] == "proxy"
