"""Streams: counted from before the connect to the end of the body, whoever ends it and however."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from http_caller import in_flight
from http_stub import DONE, Exchange, hang, sse, status, token

import gpuroute
from gpuroute.transports.sse import StreamFailed, Watch

if TYPE_CHECKING:
    from collections.abc import Callable

    from http_caller import Caller
    from http_stub import Stage

    Make = Callable[..., Caller]

pytestmark = pytest.mark.real_time


def outcomes(client: Caller) -> dict[str, tuple[int, str]]:
    """Per endpoint: calls served, and the last error."""
    views = client.router.snapshot().pools["llama"].endpoints
    return {view.id: (view.served, view.last_error) for view in views}


def test_l2_open_streams_count(stubs: Stage, caller: Make) -> None:
    a, b = stubs("a", "b")
    a.behave = b.behave = sse("x", then=hang)
    client = caller([a, b], settings={"policy": "least_request"})
    client.router.registry.set({"llama": [gpuroute.Endpoint("a", a.url)]})
    streams = [client.open() for _ in range(20)]
    client.router.registry.set({"llama": [gpuroute.Endpoint("a", a.url), gpuroute.Endpoint("b", b.url)]})
    assert in_flight(client.router) == 20
    b.behave = sse("y")
    for _ in range(20):
        client.read(client.open())
    assert (len(a.came), len(b.came)) == (20, 20)
    for number, stream in enumerate(streams):
        assert in_flight(client.router) == 20 - number
        client.close_response(stream)
    assert in_flight(client.router) == 0


def test_l2_waiting_for_heads_counts(stubs: Stage, caller: Make) -> None:
    a, b = stubs("a", "b")

    everybody = asyncio.Event()

    async def late(exchange: Exchange) -> None:
        if len(a.came) + len(b.came) == 20:
            everybody.set()
        await everybody.wait()
        exchange.reply(200, b"x")

    a.behave = b.behave = late
    client = caller([a, b], settings={"policy": "p2c"}, timeout=60.0)
    answers = client.many(20)
    assert [answer.status_code for answer in answers] == [200] * 20
    assert abs(len(a.came) - len(b.came)) <= 2


def test_l2_closed_unread_and_ended_without_marker(stubs: Stage, caller: Make) -> None:
    (a,) = stubs("a")
    a.behave = sse("x", then=hang)
    client = caller([a])
    client.close_response(client.open())
    assert in_flight(client.router) == 0
    a.behave = sse("x", done=False)
    response = client.open("http://llama/generate_stream")  # an API whose streams have no end marker
    assert client.read(response) == token("x")
    assert in_flight(client.router) == 0
    assert outcomes(client) == {"a": (2, "")}


def test_a_stream_is_delivered_piece_by_piece(stubs: Stage, caller: Make) -> None:
    (a,) = stubs("a")
    read = asyncio.Event()

    async def one_by_one(exchange: Exchange) -> None:
        exchange.start()
        for piece in (*map(token, "abc"), DONE):
            await exchange.chunk(piece)
            await read.wait()  # nothing more comes before this has been handed out
            read.clear()
        exchange.end()

    a.behave = one_by_one
    client = caller([a])
    response = client.open()
    pieces = []
    for chunk in client.chunks(response):
        pieces.append(bytes(chunk))
        a.loop.call_soon_threadsafe(read.set)
    assert pieces == [*map(token, "abc"), DONE]
    assert in_flight(client.router) == 0
    assert response.extensions["gpuroute"]["endpoint"] == "a"


def test_the_connection_of_a_finished_stream_serves_again(stubs: Stage, caller: Make) -> None:
    (a,) = stubs("a")
    a.behave = sse(*"abc")
    client = caller([a])
    for _ in range(3):
        client.read(client.open())
    assert a.connections == 1


def test_hanging_up_after_the_end_marker_is_a_success(stubs: Stage, caller: Make) -> None:
    (a,) = stubs("a")
    a.behave = sse("x", pause=0.02, then=lambda exchange: exchange.chunk(DONE) and _late_end(exchange))
    client = caller([a])
    response = client.open()
    seen = b""
    for chunk in client.chunks(response):
        seen += chunk
        if DONE in seen:
            break
    client.close_response(response)
    state = client.router.pool("llama").snapshot.by_id["a"]
    assert (state.served, len(state.in_flight)) == (1, 0)


async def _late_end(exchange: Exchange) -> None:
    await exchange.chunk(DONE)
    await asyncio.sleep(30)


def test_h1_early_exits_leak_no_connection(stubs: Stage, caller: Make, eventually: Any, collect: Any) -> None:
    (a,) = stubs("a")
    a.behave = sse(*["x"] * 50, pause=0.005)
    client = caller([a])
    limits = client.library.Limits(max_connections=2, max_keepalive_connections=2)
    client = caller(client.router, limits=limits)
    for _ in range(6):  # break, and close
        response = client.open()
        next(iter(client.chunks(response)))
        client.close_response(response)
    for _ in range(6):  # closed unread
        client.close_response(client.open())
    for _ in range(6):  # break, and forget
        response = client.open()
        next(iter(client.chunks(response)))
        del response
        collect()
        eventually(lambda: client.breathe() or in_flight(client.router) == 0, "the forgotten stream is let go")
    for _ in range(6):  # never begun, and forgotten
        client.open()
        collect()
        eventually(lambda: client.breathe() or in_flight(client.router) == 0, "the forgotten response is let go")
    a.behave = status(200, b"fine")
    assert client.post().content == b"fine"
    eventually(lambda: a.open <= 1, "the server sees the others closed")


def test_a_forgotten_stream_is_let_go_under_any_lock(stubs: Stage, caller: Make, eventually: Any, collect: Any) -> None:
    """The collector may run while this very thread holds the lock of the endpoint."""
    (a,) = stubs("a")
    a.behave = sse("x", then=hang)
    client = caller([a], settings={"max_in_flight": 1000})
    response = client.open()
    state = client.router.pool("llama").snapshot.by_id["a"]
    with state.lock:
        del response
        collect()
    eventually(lambda: client.breathe() or not state.in_flight, "it is let go")


def test_limits_make_calls_wait_for_a_connection(stubs: Stage, caller: Make) -> None:
    (a,) = stubs("a")

    async def slow(exchange: Exchange) -> None:
        await asyncio.sleep(0.05)
        exchange.reply(200, b"x")

    a.behave = slow
    client = caller([a])
    client = caller(client.router, limits=client.library.Limits(max_connections=2, keepalive_expiry=60.0))
    assert [answer.status_code for answer in client.many(8)] == [200] * 8
    assert a.connections <= 2
    a.behave = sse("x", then=hang)
    soon = client.library.Timeout(60.0, pool=0.05)
    one = caller(client.router, limits=client.library.Limits(max_connections=1), timeout=soon)
    held = one.open()
    assert {type(answer).__name__ for answer in one.many(3)} == {"PoolTimeout"}
    one.close_response(held)
    a.behave = status(200)
    assert one.post().status_code == 200, "the place is free again"
    none = caller(client.router, limits=client.library.Limits(max_connections=0), timeout=soon)
    assert {type(answer).__name__ for answer in none.many(2)} == {"PoolTimeout"}, "0 is a limit, too"


def test_a_slow_reader_slows_its_server(stubs: Stage, caller: Make) -> None:
    (a,) = stubs("a")
    size = 16 * 1024 * 1024  # more than all that the system may keep on its way
    written = 0

    async def flood(exchange: Exchange) -> None:
        nonlocal written
        exchange.start(content_type="application/octet-stream")
        for _ in range(size // 65536):
            await exchange.chunk(b"z" * 65536)
            written += 65536
        exchange.end()

    a.behave = flood
    client = caller([a])
    response = client.open()
    if client.is_async:
        client.run(asyncio.sleep(0.2))
    assert written < size, "unread bytes are not collected without bound"
    assert len(client.read(response)) == size


def test_upgrades_hand_out_the_connection(stubs: Stage, caller: Make) -> None:
    (a,) = stubs("a")

    async def upgrade(exchange: Exchange) -> None:
        exchange.writer.write(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: echo\r\nconnection: upgrade\r\n\r\n")
        exchange.writer.write(await exchange.reader.readexactly(4))

    a.behave = upgrade
    client = caller([a])
    headers = {"upgrade": "echo", "connection": "upgrade"}
    response = client.open("http://llama/socket", "GET", headers=headers)
    assert (response.status_code, in_flight(client.router)) == (101, 1)
    raw = response.extensions["network_stream"]
    client.run(raw.write(b"ping"))
    assert client.run(raw.read(100)) == b"ping"
    client.close_response(response)
    assert in_flight(client.router) == 0


# ------------------------------------------------------------------------------------------------ the watch

CHAT, ANTHROPIC, RESPONSES = b"/v1/chat/completions", b"/v1/messages", b"/v1/responses?x=1"


def watched(path: bytes, data: bytes, size: int) -> Watch:
    watch = Watch(path, b"text/event-stream; charset=utf-8")
    for at in range(0, len(data), size):
        watch.add(data[at : at + size])
    return watch


ANTHROPIC_STREAM = (
    b"event: content_block_delta\r\n"
    b'data: {"type":"content_block_delta","delta":{"type":"text_delta","text":"hi"}}\r\n\r\n'
    b'event: message_stop\r\ndata: {"type":"message_stop"}\r\n\r\n'
)
RESPONSES_STREAM = (
    b'event: response.created\ndata: {"type":"response.created","response":{"error":null}}\n\n'
    b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"hi"}\n\n'
    b'event: response.completed\ndata: {"type":"response.completed","response":{"error":null}}\n\n'
)
NO_MARKER = b'data: {"choices":[{"delta":{"content":"hi"},"finish_reason":"stop"}]}\n\n'


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize(
    ("path", "data", "events"),
    [
        (CHAT, token("hi") + DONE, 2),
        (CHAT, NO_MARKER, 1),
        (b"/v1/completions", b'data: {"choices":[{"text":"hi"}]}\n\n' + DONE, 2),
        (ANTHROPIC, ANTHROPIC_STREAM, 2),
        (RESPONSES, RESPONSES_STREAM, 3),
    ],
)
def test_the_watch_knows_a_whole_stream_in_pieces_of_any_size(path: bytes, data: bytes, events: int, size: int) -> None:
    watch = watched(path, data, size)
    assert (watch.events, watch.bytes, watch.complete, watch.ended, watch.text()) == (events, len(data), True, True, "hi")


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_the_watch_misses_the_end_of_a_cut_stream(size: int) -> None:
    for path, data in ((CHAT, token("hi")), (ANTHROPIC, ANTHROPIC_STREAM[:110]), (RESPONSES, RESPONSES_STREAM[:150])):
        assert not watched(path, data, size).complete
    assert watched(b"/generate_stream", token("hi"), size).complete, "nothing marks the end there"
    assert Watch(CHAT, b"application/json").complete


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize(
    ("event", "code"),
    [
        (b'data: {"error":{"message":"boom","code":400}}\n\n', 400),
        (b'data:{"error": "boom"}\n\n', 0),
        (b'data: {"object":"error","message":"boom","code":503,"error":null}\n\n', 503),
        (b'event: error\ndata: {"type":"error","error":{"type":"x","message":"boom"}}\n\n', 0),
    ],
)
def test_the_watch_finds_an_error_event(event: bytes, code: int, size: int) -> None:
    with pytest.raises(StreamFailed, match="boom") as caught:
        watched(CHAT, token("a") + token('say "error"') + event, size)
    assert caught.value.code == code
    if size == 1000:
        assert caught.value.before == token("a") + token('say "error"')


def test_the_watch_takes_nothing_for_an_error_that_is_none() -> None:
    harmless = [
        token('{"error": {"message": "quoted"}}'),
        b'data: {"choices":[],"error":null}\n\n',
        b'data: {"choices":[{"delta":{"content":"x","error":1}}]}\n\n',
        b': "error"\n\n',
        b'data: not json "error"\n\n',
    ]
    assert watched(CHAT, b"".join(harmless), 1000).events == len(harmless)


def test_the_watch_keeps_only_the_tail() -> None:
    watch = Watch(CHAT, b"text/event-stream")
    for number in range(5000):
        watch.add(token(f"{number} "))
    assert watch.events == 5000
    assert watch.text().endswith(" 4998 4999 ")
    assert len(watch.text()) < 64 * 1024
