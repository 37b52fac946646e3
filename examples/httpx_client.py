"""httpx2 (asynchronous) and httpx (synchronous): the host of the URL names the pool, the rest is theirs."""

import asyncio

from _fleet import fleet

import gpuroute
import gpuroute.httpx
import gpuroute.httpx2


async def stream(router: gpuroute.Router, pool: str) -> None:
    """Server-sent events through httpx2, with options of this one call."""
    body = {"model": pool, "prompt": "Once upon a time", "max_tokens": 8, "stream": True}
    options = {"timeout": 10.0, "key": "session-1", "attempts": 2}
    async with gpuroute.httpx2.AsyncClient(router) as client:
        request = client.build_request(
            "POST", f"http://{pool}/v1/completions", json=body, extensions={"gpuroute": options}
        )
        response = await client.send(request, stream=True)
        events = [line async for line in response.aiter_lines() if line.startswith("data: ")]
        await response.aclose()
        print("httpx2:", len(events), "events from", response.extensions["gpuroute"]["endpoint"])


def ask(router: gpuroute.Router, pool: str) -> None:
    """The same classes for httpx."""
    with gpuroute.httpx.Client(router) as client:
        body = {"model": pool, "prompt": "Once upon a time", "max_tokens": 8}
        response = client.post(f"http://{pool}/v1/completions", json=body).raise_for_status()
        print("httpx: ", response.json()["choices"][0]["text"])
        print(router.explain(pool))


with fleet() as pool, gpuroute.Router.from_env() as router:
    asyncio.run(stream(router, pool))
    ask(router, pool)
