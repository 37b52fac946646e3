"""A host of several addresses, the first of which swallows everything: the next one is tried in time."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Any

import pytest
from http_caller import endpoint
from ports import own_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from http_caller import Caller
    from http_stub import Stage, Stub

    Make = Callable[..., Caller]

pytestmark = pytest.mark.real_time

NAME = "two.example"


@contextlib.contextmanager
def swallowing(port: int) -> Iterator[None]:
    """127.0.0.2 at this port: its queue is full, so that the system drops what comes."""
    with contextlib.ExitStack() as held:
        listener = held.enter_context(socket.socket())
        listener.bind(("127.0.0.2", port))
        listener.listen(0)
        for _ in range(50):
            one = held.enter_context(socket.socket())
            one.settimeout(0.3)
            try:
                one.connect(("127.0.0.2", port))
            except TimeoutError:
                yield
                return
        pytest.skip("this system does not drop connections to a full queue")


@pytest.fixture
def two(stubs: Stage, monkeypatch: pytest.MonkeyPatch) -> Stub:
    """A server at the second address of a name."""
    (a,) = stubs("a")
    resolve = socket.getaddrinfo

    def both(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        if host != NAME:
            return resolve(host, port, *args, **kwargs)
        kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        return [(*kind, ("127.0.0.2", int(port))), (*kind, ("127.0.0.1", int(port)))]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    return a


@pytest.mark.parametrize("limits", [{"timeout": 60.0}, {"timeout": None}])
def test_the_next_address_is_tried_in_time(two: Stub, caller: Make, limits: dict[str, Any]) -> None:
    client = caller([endpoint(two, url=f"http://{NAME}:{two.port}")], settings={"attempts": 1}, **limits)
    with swallowing(two.port):
        assert client.post(extensions={"gpuroute": {"timeout": 40.0}}).json()["endpoint"] == "a"


def test_an_address_that_refuses_costs_nothing(two: Stub, caller: Make) -> None:
    client = caller([endpoint(two, url=f"http://{NAME}:{two.port}")], settings={"attempts": 1})
    assert client.post().json()["endpoint"] == "a"


def test_an_address_of_a_family_that_is_not_here_is_passed_over(
    two: Stub, caller: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = socket.getaddrinfo

    def exotic(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        found = resolve(host, port, *args, **kwargs)
        return [(9999, *found[0][1:]), *found] if host == NAME else found

    monkeypatch.setattr(socket, "getaddrinfo", exotic)
    client = caller([endpoint(two, url=f"http://{NAME}:{two.port}")], settings={"attempts": 1})
    assert client.post().json()["endpoint"] == "a"


def test_no_address_that_answers_is_one_failure(two: Stub, caller: Make) -> None:
    client = caller([endpoint(two, url=f"http://{NAME}:{own_port()}")], settings={"attempts": 1})
    with pytest.raises(client.library.ConnectError):
        client.post()


def test_a_cancelled_connect_tries_no_other_address(two: Stub, caller: Make) -> None:
    client = caller([endpoint(two, url=f"http://{NAME}:{two.port}")], timeout=None)
    if not client.is_async:
        pytest.skip("threads are not cancelled")

    async def scenario() -> None:
        task = asyncio.ensure_future(client.client.post("http://llama/x"))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with swallowing(two.port):
        client.run(scenario())
    assert two.came == []
