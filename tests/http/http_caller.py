"""One way to call all four clients: the tests are written once, and run through sync and async, httpx2 and httpx."""

from __future__ import annotations

import asyncio
import importlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from gpuroute import Endpoint, Router
from gpuroute.testing import FakeRegistry

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from http_stub import Stub

KINDS = ("httpx2", "httpx2-sync", "httpx", "httpx-sync")


def endpoint(stub: Stub, **fields: Any) -> Endpoint:
    url = fields.pop("url", stub.url) + fields.pop("path", "")
    return Endpoint(fields.pop("id", stub.name), url, **fields)


def router_for(stubs: Sequence[Stub | Endpoint], pool: str = "llama", **settings: Any) -> Router:
    """A router over one pool of these; its registry is `router.registry`."""
    registry = FakeRegistry({pool: [s if isinstance(s, Endpoint) else endpoint(s) for s in stubs]})
    settings.setdefault("policy", "round_robin")
    settings.setdefault("random", lambda: 0.0)
    settings.setdefault("connect_timeout", "20s")  # on a busy machine the default of 1 s is a fault of its own
    settings.setdefault("watchdog", False)  # and a pause of half a second is no endpoint's
    router = Router(registry, **settings)
    router.registry = registry
    router.ready()
    return router


class Caller:
    """A client of one kind over a router, called synchronously."""

    def __init__(self, kind: str, router: Router, **arguments: Any) -> None:
        self.kind = kind
        self.name = kind.removesuffix("-sync")
        self.is_async = not kind.endswith("-sync")
        self.ours = importlib.import_module(f"gpuroute.{self.name}")
        self.library = importlib.import_module(self.name)
        self.router = router
        self._runner = asyncio.Runner() if self.is_async else None
        self.client = (self.ours.AsyncClient if self.is_async else self.ours.Client)(router, **arguments)

    def run(self, result: Any) -> Any:
        return self._runner.run(_awaited(result)) if self._runner is not None else result

    def breathe(self) -> None:
        """Let the client's loop do what it has to do: between calls it stands still."""
        if self._runner is not None:
            self._runner.run(asyncio.sleep(0.001))

    def request(self, method: str, url: str, **arguments: Any) -> Any:
        return self.run(self.client.request(method, url, **arguments))

    def post(self, url: str = "http://llama/v1/chat/completions", **arguments: Any) -> Any:
        return self.request("POST", url, **arguments)

    def get(self, url: str, **arguments: Any) -> Any:
        return self.request("GET", url, **arguments)

    def send(self, request: Any, **arguments: Any) -> Any:
        return self.run(self.client.send(request, **arguments))

    def open(self, url: str = "http://llama/v1/chat/completions", method: str = "POST", **arguments: Any) -> Any:
        """A response whose body has not been read."""
        return self.send(self.client.build_request(method, url, **arguments), stream=True)

    def chunks(self, response: Any) -> Iterator[bytes]:
        """The body, piece by piece."""
        if self._runner is None:
            yield from response.iter_raw()
            return
        pieces = response.aiter_raw()
        while (piece := self.run(anext(pieces, None))) is not None:
            yield piece

    def read(self, response: Any) -> bytes:
        return b"".join(self.chunks(response))

    def close_response(self, response: Any) -> None:
        self.run(response.aclose() if self.is_async else response.close())

    def many(self, count: int, url: str = "http://llama/v1/x", **arguments: Any) -> list[Any]:
        """This many requests at once; exceptions among the results."""
        if self._runner is not None:
            return self.run(_gathered(self.client, count, url, arguments))
        with ThreadPoolExecutor(count) as threads:
            futures = [threads.submit(self.client.post, url, **arguments) for _ in range(count)]
            return [future.exception() or future.result() for future in futures]

    def transport(self) -> Any:
        return self.client._transport

    def close(self) -> None:
        self.run(self.client.aclose() if self.is_async else self.client.close())
        if self._runner is not None:
            self._runner.close()
        self.router.close()


async def _awaited(result: Any) -> Any:
    return await result


async def _gathered(client: Any, count: int, url: str, arguments: dict[str, Any]) -> list[Any]:
    calls = (client.post(url, **arguments) for _ in range(count))
    return await asyncio.gather(*calls, return_exceptions=True)


def in_flight(router: Router) -> int:
    return sum(view.in_flight for view in router.snapshot().pools.values())


def attempts(response: Any) -> list[str]:
    """Which endpoints were tried, and what became of it."""
    return [f"{a['endpoint']} {a['reason'] or a['outcome']}" for a in response.extensions["gpuroute"]["attempts"]]
