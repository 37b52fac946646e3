"""Events that are longer than what is kept of a stream: the end of a response in the Responses API repeats all of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from gpuroute.transports.sse import LONGEST, TAIL, StreamFailed, Watch

if TYPE_CHECKING:
    from collections.abc import Callable

    from http_caller import Caller
    from http_stub import Exchange, Stage

    Make = Callable[..., Caller]

EVENTS = b"text/event-stream"
PATH = b"/v1/responses"


def event(kind: str, length: int, newline: str = "\n") -> bytes:
    data = json.dumps({"response": {"text": "x" * length}, "type": kind})
    return f"event: {kind}{newline}data: {data}{newline}{newline}".encode()


def pieces(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("size", [1_000, 16_383, 65_536])
def test_a_last_event_of_any_length_ends_its_stream(size: int, newline: str) -> None:
    watch = Watch(PATH, EVENTS)
    for piece in pieces(event("response.created", 100, newline) + event("response.completed", 5 * TAIL, newline), size):
        watch.add(piece)
    assert watch.complete
    assert watch.events == 2


def test_an_event_of_any_length_that_is_cut_does_not() -> None:
    watch = Watch(PATH, EVENTS)
    for piece in pieces(event("response.completed", 5 * TAIL)[:-100], 16_384):
        watch.add(piece)
    assert not watch.complete


def test_a_long_event_is_let_go_when_others_follow() -> None:
    watch = Watch(PATH, EVENTS)
    for piece in [*pieces(event("response.created", 5 * TAIL), 16_384), *[event("x", 1_000)] * 200]:
        watch.add(piece)
    assert sum(map(len, watch._tail)) < 2 * TAIL
    with pytest.raises(StreamFailed):
        watch.add(b'data: {"error": {"message": "out of memory"}}\n\n')


def test_bytes_without_end_are_not_kept_for_ever() -> None:
    watch = Watch(PATH, EVENTS)
    piece = b"x" * 1024 * 1024
    for _ in range(40):
        watch.add(piece)
    assert sum(map(len, watch._tail)) <= LONGEST + len(piece)


@pytest.mark.real_time
def test_a_response_that_repeats_a_long_prompt_is_whole(stubs: Stage, caller: Make) -> None:
    (a,) = stubs("a")

    async def behave(exchange: Exchange) -> None:
        exchange.start()
        for piece in pieces(event("response.completed", 3 * TAIL), 10_000):
            await exchange.chunk(piece)
        exchange.end()

    a.behave = behave
    client = caller([a])
    answer = client.post("http://llama/v1/responses", json={"stream": True})
    assert answer.content == event("response.completed", 3 * TAIL)
