"""Two attempts of one call side by side: what both send must be whole."""

from __future__ import annotations

import io
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx
import httpx2
import pytest

from gpuroute.transports.bodies import Outgoing

if TYPE_CHECKING:
    from collections.abc import Callable

    from http_caller import Caller
    from http_stub import Exchange, Stage

    Make = Callable[..., Caller]

pytestmark = pytest.mark.real_time

CONTENT = bytes(range(256)) * 1024
URL = "http://llama/v1/audio/transcriptions"


class Recording(io.BytesIO):
    """A file that is read slowly: its second half comes when somebody else begins with it, or after half a second."""

    def __init__(self) -> None:
        super().__init__(CONTENT)
        self.again = threading.Event()
        self.read_some = False

    def read(self, size: int | None = -1) -> bytes:
        if self.read_some:
            self.again.wait(0.5)
            self.again.set()
        self.read_some = True
        return super().read(size)

    def seek(self, position: int, whence: int = 0) -> int:
        if self.read_some:
            self.again.set()
        return super().seek(position, whence)


def used_to_speed(client: Caller) -> None:
    """Any first byte is late by what has been seen."""
    history = client.router.pool("llama").shared.history
    for _ in range(50):
        history.ttft.add(1e-4)
        history.whole.add(1e-4)


async def told(exchange: Exchange) -> None:
    exchange.reply(200, {"endpoint": exchange.stub.name, "whole": CONTENT in exchange.came.body})


@pytest.mark.parametrize("form", [False, True])
def test_a_file_is_read_by_one_attempt_at_a_time(stubs: Stage, caller: Make, *, form: bool) -> None:
    a, b = stubs("a", "b")
    a.behave = b.behave = told
    client = caller([a, b], settings={"hedge": True, "retry_floor": 1000.0})
    if client.is_async and not form:
        pytest.skip("async clients take no synchronous files")
    used_to_speed(client)
    body: dict[str, Any] = {"files": {"file": Recording()}} if form else {"content": Recording()}
    assert client.post(URL, **body).json()["whole"]
    assert len(a.came) + len(b.came) == 1


@pytest.mark.parametrize("library", [httpx2, httpx], ids=lambda library: library.__name__)
def test_what_may_be_sent_side_by_side(library: Any) -> None:
    seam = SimpleNamespace(client=library)

    def shared(**body: Any) -> bool:
        return Outgoing(library.Request("POST", URL, **body), seam).body.shared

    in_memory = {"data": {"a": "1"}, "files": {"file": ("a.wav", CONTENT)}}
    for body in ({}, {"content": CONTENT}, {"json": {}}, {"content": [b"x", b"y"]}, in_memory):
        assert shared(**body), body
    for body in ({"content": io.BytesIO(b"x")}, {"files": {"file": io.BytesIO(b"x")}}, {"content": iter([b"x"])}):
        assert not shared(**body), body
