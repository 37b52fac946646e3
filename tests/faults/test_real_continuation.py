"""Continuation over two real llama.cpp servers, one of which is killed in the middle of its answer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from agent.test_real_llamacpp import Llama, model, pytestmark  # noqa: F401  (fixture and marks)
from fault_world import PATIENCE_S
from ports import own_ports

import gpuroute.httpx2
from gpuroute import Endpoint, Router

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ASK = {"prompt": "one two three four", "max_tokens": 60, "temperature": 0, "stream": True, "seed": 1}


def texts(lines: Any) -> list[str]:
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return [event["choices"][0]["text"] for event in events if event["choices"]]


def test_a_killed_servers_stream_goes_on_at_the_other(
    model: Path,  # noqa: F811
    eventually: Callable[..., None],
) -> None:
    one, two = (Llama(model, port) for port in own_ports(2))
    try:
        endpoints = [Endpoint(name, server.url, engine="llamacpp") for name, server in (("one", one), ("two", two))]
        with (
            Router(endpoints={"p": endpoints}, policy="round_robin", continuation=True, random=lambda: 0.0) as router,
            gpuroute.httpx2.Client(router, timeout=PATIENCE_S) as client,
        ):
            for server in (one, two):
                eventually(lambda server=server: healthy(server.url), "it is loaded")
            whole = texts(client.post("http://p/v1/completions", json=ASK).text.splitlines())
            assert len(whole) > 40
            got, url = [], ""
            with client.stream("POST", "http://p/v1/completions", json=ASK) as response:
                url = response.extensions["gpuroute"]["endpoint"]
                for line in response.iter_lines():
                    got += texts([line])
                    if len(got) == 5 and url:
                        (one if url == "one" else two).stop()
                        url = ""
            assert router.snapshot().pools["p"].signals["continuations"] == 1
        assert "".join(got) == "".join(whole)
    finally:
        for server in (one, two):
            server.stop()


def healthy(url: str) -> bool:
    import httpx2

    try:
        return httpx2.get(f"{url}/health", timeout=2).status_code == 200
    except httpx2.HTTPError:
        return False
