"""When endpoints fail before a byte was delivered: who is tried next, what is sent again, what the caller sees."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from typing import TYPE_CHECKING, Any

import pytest
from http_caller import attempts, endpoint
from http_stub import DONE, Exchange, hang, ok, reset, sse, status, token
from stopwatch import Stopwatch

import gpuroute
from gpuroute import Endpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from http_caller import Caller
    from http_stub import Stage, Stub

    Make = Callable[..., Caller]

pytestmark = pytest.mark.real_time

NOWHERE = "http://127.0.0.1:9"  # the discard port: refused


def test_r1_one_layer_of_retries(stubs: Stage, caller: Make) -> None:
    servers = stubs("a", "b", "c", "d")
    for server in servers:
        server.behave = status(500)
    client = caller(servers, settings={"retry_floor": "1000/s"})
    for wanted in (None, 1, 2, 4):
        before = sum(len(server.came) for server in servers)
        extensions = {"gpuroute": {"attempts": wanted}} if wanted else {}
        answer = client.post(extensions=extensions)
        sent = sum(len(server.came) for server in servers) - before
        assert (answer.status_code, sent, len(attempts(answer))) == (500, wanted or 3, wanted or 3)
        assert answer.headers["x-should-retry"] == "false"


def test_r1_the_budget_bounds_the_amplification(stubs: Stage, caller: Make) -> None:
    (a,) = stubs("a")
    a.behave = status(500)
    client = caller([a], settings={"retry_budget": "20%", "retry_floor": "0.000001/s", "breaker_failures": 10_000})
    for _ in range(50):
        client.post()
    assert len(a.came) <= 50 * 1.2 + 2


def test_r2_the_next_attempt_goes_elsewhere(stubs: Stage, caller: Make) -> None:
    (b,) = stubs("b")
    client = caller([Endpoint("a", NOWHERE), endpoint(b)])
    for _ in range(4):
        answer = client.post(extensions={"gpuroute": {"attempts": 2}})
        tried = attempts(answer)
        assert tried[-1] == "b success"
        assert tried[:-1] in ([], ["a ConnectError"])
    assert len(b.came) == 4


def test_r2_a_single_endpoint_is_tried_again(stubs: Stage, caller: Make) -> None:
    (a,) = stubs("a")

    async def fails_once(exchange: Exchange) -> None:
        exchange.reply(500 if len(a.came) == 1 else 200)

    a.behave = fails_once
    assert attempts(caller([a]).post()) == ["a 500 failed", "a success"]


def test_r2_after_all_were_tried_they_may_be_again(stubs: Stage, caller: Make) -> None:
    servers = stubs("a", "b", "c")
    for server in servers:
        server.behave = status(503, b"overloaded", retry_after="0.01")
    answer = caller(servers).post(extensions={"gpuroute": {"attempts": 5}})
    assert sorted(len(server.came) for server in servers) == [1, 2, 2]
    assert len(attempts(answer)) == 5


@pytest.mark.parametrize("code", [400, 401, 403, 404, 413, 422, 501])
def test_b1_the_callers_own_mistake_is_not_retried(stubs: Stage, caller: Make, code: int) -> None:
    a, b = stubs("a", "b")
    a.behave = b.behave = status(code, {"error": "yours"})
    client = caller([a, b], settings={"breaker_failures": 1})
    for _ in range(4):
        assert client.post().status_code == code
    assert len(a.came) + len(b.came) == 4
    views = client.router.snapshot().pools["llama"].endpoints
    assert {view.breaker for view in views} == {"closed"}


def test_an_endpoint_without_its_model_is_left_for_another(stubs: Stage, caller: Make) -> None:
    a, b = stubs("a", "b")
    a.behave = status(404, {"error": {"message": "The model `m` does not exist."}})
    client = caller([endpoint(a, model="m"), endpoint(b, model="m")])
    assert client.post(json={"model": "m", "messages": [{"role": "user", "content": "x"}]}).json()["endpoint"] == "b"
    assert client.post(json={"model": "other", "messages": [{"role": "user", "content": "x"}]}).status_code in (200, 404)


def test_the_last_exception_surfaces_with_a_note(stubs: Stage, caller: Make) -> None:
    a, b = stubs("a", "b")
    a.behave, b.behave = status(503), reset
    client = caller([a, b])
    with pytest.raises((client.library.ReadError, client.library.RemoteProtocolError)) as caught:
        client.post(extensions={"gpuroute": {"attempts": 2}})
    assert type(caught.value).__module__ == client.name
    assert caught.value.request.url.host == "llama"
    assert any(note.startswith("gpuroute: 2 attempts: a 503") and "b Re" in note for note in caught.value.__notes__)
    refused = caller([Endpoint("x", NOWHERE)])
    with pytest.raises(refused.library.ConnectError) as caught:
        refused.post()
    assert caught.value.__notes__ == ["gpuroute: 3 attempts: x ConnectError, x ConnectError, x ConnectError"]
    assert caught.value.__cause__ is not None


def test_a_request_that_kills_its_server_does_not_walk_through_the_fleet(stubs: Stage, caller: Make) -> None:
    servers = stubs("a", "b", "c", "d")
    for server in servers:
        server.behave = reset
    client = caller(servers, settings={"attempts": 4})
    with pytest.raises(client.library.TransportError):
        client.post(content=b"query of death")
    assert sum(len(server.came) for server in servers) == 2


# ------------------------------------------------------------------------------------------------ R3


def text(raw: bytes) -> str:
    lines = [line[6:] for line in raw.split(b"\n") if line.startswith(b"data: {")]
    return "".join(json.loads(line)["choices"][0]["delta"]["content"] for line in lines)


ERROR = b'data: {"error": {"message": "CUDA out of memory", "code": 500}}\n\n'
CUTS: dict[str, Any] = {
    "reset": lambda exchange: exchange.reset(),
    "close": lambda exchange: exchange.hang_up(),
    "clean end without its marker": lambda exchange: exchange.end(),
    "error event": lambda exchange: exchange.chunk(ERROR + DONE),
}


@pytest.mark.parametrize("cut", CUTS)
def test_r3_a_stream_that_has_begun_is_not_retried(stubs: Stage, caller: Make, cut: str) -> None:
    a, b = stubs("a", "b")
    a.behave = sse(*"abcde", pause=0.005, then=CUTS[cut])
    b.behave = sse("never")
    client = caller([a, b])
    response = client.open()
    seen = b""
    with pytest.raises(client.ours.StreamInterrupted) as caught:  # noqa: PT012
        for chunk in client.chunks(response):
            seen += chunk
    error = caught.value
    assert isinstance(error, client.library.RemoteProtocolError)
    assert isinstance(error, gpuroute.StreamInterrupted)
    assert b"".join(map(token, "abcde")).startswith(seen)
    assert seen.count(b"\n\n") == error.events_received
    assert (error.endpoint, error.bytes_received, error.partial_text) == ("a", len(seen), text(seen))
    if cut != "reset":  # a reset may overtake what was sent before it
        assert text(seen) == "abcde"
    assert b.came == []
    view = client.router.snapshot().pools["llama"].endpoints[0]
    assert (view.id, view.in_flight, bool(view.last_error)) == ("a", 0, True)


@pytest.mark.parametrize("cut", CUTS)
def test_r3_before_the_first_byte_another_endpoint_takes_over(stubs: Stage, caller: Make, cut: str) -> None:
    a, b = stubs("a", "b")
    a.behave = sse(then=CUTS[cut])  # the head is out, then it dies
    b.behave = sse("hello")
    client = caller([a, b])
    response = client.open()
    assert client.read(response) == token("hello") + DONE
    assert [name.split()[0] for name in attempts(response)] == ["a", "b"]


def test_r3_the_engines_own_words_reach_the_caller_when_nobody_can_take_over(stubs: Stage, caller: Make) -> None:
    (a,) = stubs("a")
    a.behave = sse(then=lambda exchange: exchange.chunk(ERROR + DONE) and _ended(exchange, ERROR + DONE))
    client = caller([a])
    response = client.open(extensions={"gpuroute": {"attempts": 1}})
    assert client.read(response) == ERROR + DONE


async def _ended(exchange: Exchange, data: bytes) -> None:
    await exchange.chunk(data)
    exchange.end()


def test_r3_a_refusal_inside_the_stream_is_the_callers(stubs: Stage, caller: Make) -> None:
    a, b = stubs("a", "b")
    refusal = b'data: {"error":{"message":"max_tokens is too large","type":"BadRequestError","code":400}}\n\n'
    a.behave = sse(then=lambda exchange: _ended(exchange, refusal))
    client = caller([a, b])
    assert client.read(client.open()) == refusal
    assert b.came == []


# ------------------------------------------------------------------------------------------------ R5


def failing(server: Stub, code: int = 503, *, read_body: bool = True) -> None:
    async def behave(exchange: Exchange) -> None:
        exchange.reply(code, b"overloaded" if code == 503 else b"broken")
        if not read_body:
            exchange.hang_up()

    server.behave = behave


def generator(parts: list[bytes], closed: list[bool]) -> Iterator[bytes]:
    try:
        yield from parts
    finally:
        closed.append(True)


async def async_generator(parts: list[bytes], closed: list[bool]) -> Any:
    try:
        for part in parts:
            yield part
    finally:
        closed.append(True)


class Again:
    """An iterable that can be iterated again and again."""

    def __iter__(self) -> Iterator[bytes]:
        return iter([b"x" * 1000] * 50)


class AsyncAgain:
    """The same for tasks."""

    async def __aiter__(self) -> Any:
        for part in Again():
            yield part


def test_r5_replayable_bodies_are_sent_again_byte_for_byte(stubs: Stage, caller: Make) -> None:
    a, b = stubs("a", "b")
    failing(a, 500)
    client = caller([a, b], settings={"breaker_failures": 1000, "retry_floor": "1000/s"})
    big = bytes(range(256)) * 200_000  # 50 MB
    bodies: list[dict[str, Any]] = [
        {"content": b"abc"},
        {"content": big},
        {"json": {"a": 1}},
        {"data": {"a": "1"}},
        {"files": {"file": ("f.bin", io.BytesIO(b"f" * 70_000))}, "data": {"model": "m"}},
        {"content": AsyncAgain() if client.is_async else Again()},
    ]
    if not client.is_async:
        bodies += [{"content": io.BytesIO(b"f" * 100_000)}, {"content": [b"x", b"y"]}]
    for body in bodies:
        assert attempts(client.post(**body)) == ["a 500 failed", "b success"]
        first, second = (hashlib.sha256(server.came.pop().body).digest() for server in (a, b))
        assert first == second != hashlib.sha256(b"").digest()


def test_r5_a_file_is_sent_again_from_where_it_stood(stubs: Stage, caller: Make) -> None:
    a, b = stubs("a", "b")
    failing(a)
    client = caller([a, b])
    if client.is_async:
        pytest.skip("async clients take no synchronous files")
    file = io.BytesIO(b"head" + b"f" * 100_000)
    file.seek(4)
    # The length is given because some versions of the libraries count what was read already.
    assert client.post(content=file, headers={"content-length": "100000"}).status_code == 200
    assert [server.came[0].body for server in (a, b)] == [b"f" * 100_000] * 2


@pytest.mark.parametrize("read_body", [True, False])
def test_r5_one_shot_bodies_are_not_retried(stubs: Stage, caller: Make, *, read_body: bool) -> None:
    a, b = stubs("a", "b")
    failing(a, read_body=read_body)
    client = caller([a, b])
    closed: list[bool] = []
    parts = [b"p" * 10_000] * 10
    body = async_generator(parts, closed) if client.is_async else generator(parts, closed)
    answer = client.post(content=body)
    assert (answer.status_code, answer.text) == (503, "overloaded"), "the original answer"
    assert (len(a.came), b.came, closed) == (1, [], [True])
    assert a.came[0].body == b"".join(parts)


def test_r5_a_one_shot_body_that_never_left_is_still_whole(stubs: Stage, caller: Make) -> None:
    (b,) = stubs("b")
    client = caller([Endpoint("a", NOWHERE), endpoint(b)])
    parts = [b"p" * 1000] * 3
    answer = client.post(content=async_generator(parts, []) if client.is_async else generator(parts, []))
    assert attempts(answer) == ["a ConnectError", "b success"]
    assert b.came[0].body == b"".join(parts)


def test_r5_a_body_that_raises_is_the_callers_error(stubs: Stage, caller: Make) -> None:
    a, b = stubs("a", "b")
    client = caller([a, b])

    def broken() -> Iterator[bytes]:
        yield b"x"
        raise KeyError("mine")

    async def async_broken() -> Any:
        yield b"x"
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        client.post(content=async_broken() if client.is_async else broken())
    views = client.router.snapshot().pools["llama"].endpoints
    assert [view.last_error for view in views] == ["", ""]
    assert client.post(content=b"fine").status_code == 200


# ------------------------------------------------------------------------------------------------ R9


def test_r9_the_deadline_holds_over_all_attempts(stubs: Stage, caller: Make, eventually: Any) -> None:
    servers = stubs("a", "b", "c")
    for server in servers:
        server.behave = hang
    client = caller(servers)

    def in_time() -> bool:
        """Whether a busy machine let the one attempt out before the deadline, and the deadline pass at its time."""
        before = sum(len(server.came) for server in servers)
        with (
            Stopwatch() as watch,
            pytest.raises(client.ours.DeadlineExceeded, match=r"deadline exceeded after [\d.]+ s") as caught,
        ):
            client.post(extensions={"gpuroute": {"timeout": 0.2}})
        assert watch.wall >= 0.2
        assert isinstance(caught.value, client.library.TimeoutException)
        assert isinstance(caught.value, TimeoutError)
        sent = sum(len(server.came) for server in servers) - before
        return sent == 1 and "1 attempt: " in str(caught.value) and watch.seconds < 0.2 + 0.15

    eventually(in_time, "the deadline holds", within=90)


def test_r9_a_backoff_beyond_the_deadline_is_not_waited_for(stubs: Stage, caller: Make) -> None:
    (a,) = stubs("a")
    a.behave = status(503, b"overloaded", retry_after="60")
    client = caller([a])
    with Stopwatch() as watch:
        answer = client.post(extensions={"gpuroute": {"timeout": 45}})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "60")
    assert watch.seconds < 2
    assert len(a.came) == 1


def test_r9_the_clients_own_timeouts_hold_per_attempt(stubs: Stage, caller: Make, eventually: Any) -> None:
    a, b = stubs("a", "b")
    a.behave = hang
    settings = {"breaker_failures": 10_000, "retry_floor": "1000/s"}  # who is late because of the machine is asked again
    client = caller([a, b], timeout=0.4, settings=settings)

    def tried() -> list[str]:
        with contextlib.suppress(client.library.TimeoutException):
            return attempts(client.post())
        return []

    wanted = ["a ReadTimeout", "b success"]
    eventually(lambda: tried() == wanted, "b answers in its own time, after a's is over", within=90)
    b.behave = hang
    with Stopwatch() as watch, pytest.raises(client.library.ReadTimeout):
        client.post(extensions={"gpuroute": {"timeout": 45}})
    assert watch.seconds < 0.4 * 2 + 0.3


@pytest.mark.parametrize("silent", [True, False])
def test_r9_a_stream_is_cut_at_the_deadline(stubs: Stage, caller: Make, eventually: Any, *, silent: bool) -> None:
    (a,) = stubs("a")
    a.behave = sse("x", then=hang) if silent else sse(*["x"] * 6000, pause=0.01)
    client = caller([a])
    begun: list[object] = []

    def stream() -> None:
        begun.append(client.open(extensions={"gpuroute": {"timeout": 0.4}}))
        client.read(begun[-1])

    def in_time() -> bool:
        """Whether a busy machine let it begin before the deadline, and the deadline pass at its time."""
        begun.clear()
        with Stopwatch() as watch, pytest.raises(client.ours.DeadlineExceeded):
            stream()
        assert watch.wall >= 0.4
        return bool(begun) and watch.seconds < 0.4 + 0.15

    eventually(in_time, "it is cut at the deadline", within=90)


def test_a_stream_that_falls_silent_is_a_read_timeout_too(stubs: Stage, caller: Make) -> None:
    (a,) = stubs("a")
    a.behave = sse("x", then=hang)
    client = caller([a], timeout=0.4, settings={"breaker_failures": 10_000, "retry_floor": "1000/s"})

    def opened() -> Any:
        with contextlib.suppress(client.library.ReadTimeout):  # of a machine that was busy for so long
            return client.open()
        return None

    response = next(filter(None, (opened() for _ in range(100))))
    with pytest.raises(client.library.ReadTimeout) as caught:
        client.read(response)
    assert isinstance(caught.value, gpuroute.StreamStalled)
    assert caught.value.partial_text == "x"


def test_connects_are_short_while_there_are_alternatives(
    stubs: Stage, caller: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A black hole: connects neither succeed nor fail. Only the last attempt may wait for the client's own timeout."""
    from gpuroute.transports import wires

    asked: list[float | None] = []

    def connect(core: Any, address: Any, timeout: float | None) -> Any:
        asked.append(timeout)
        raise core.ConnectTimeout("black hole")

    async def async_connect(core: Any, address: Any, timeout: float | None) -> Any:
        connect(core, address, timeout)

    monkeypatch.setattr(wires.Wire, "connect", staticmethod(connect))
    monkeypatch.setattr(wires.AsyncWire, "connect", staticmethod(async_connect))
    a, b = stubs("a", "b")
    client = caller([a, b], timeout=70.0, settings={"connect_timeout": "0.25"})
    with pytest.raises(client.library.ConnectTimeout):
        client.post(extensions={"gpuroute": {"attempts": 2}})
    assert asked == [0.25, 70.0]
    asked.clear()
    with pytest.raises(client.library.TimeoutException):
        client.post(extensions={"gpuroute": {"attempts": 1, "timeout": 60}})
    assert len(asked) == 1
    assert 1 < asked[0] <= 60


# ------------------------------------------------------------------------------------------------ X1, B3


def test_a_busy_endpoint_is_left_at_once_and_waited_for_when_all_are_busy(stubs: Stage, caller: Make) -> None:
    a, b = stubs("a", "b")
    a.behave = status(429, b"", retry_after="60")
    client = caller([a, b])
    with Stopwatch() as watch:
        for _ in range(4):
            assert client.post().json()["endpoint"] == "b"
    assert watch.seconds < 5
    assert len(a.came) == 1
    count = 0

    async def busy_once(exchange: Exchange) -> None:
        nonlocal count
        count += 1
        await (status(429, b"", retry_after="0.2") if count == 1 else ok)(exchange)

    b.behave = busy_once
    with Stopwatch() as watch:
        assert client.post().json()["endpoint"] == "b"
    assert watch.wall > 0.15
    assert watch.seconds < 5


def test_retry_after_in_milliseconds_wins(stubs: Stage, caller: Make) -> None:
    (a,) = stubs("a")
    a.behave = status(429, b"", retry_after="30", retry_after_ms="50")
    client = caller([a])
    assert client.post(extensions={"gpuroute": {"attempts": 2}}).status_code == 429
    assert len(a.came) == 2


def test_a_large_error_body_arrives_whole(stubs: Stage, caller: Make) -> None:
    (a,) = stubs("a")
    body = b"e" * 300_000
    a.behave = status(400, body)
    client = caller([a])
    assert client.post().content == body
    assert client.post().content == body
    assert a.connections == 1


def test_ready_waits_for_the_first_view_and_gives_up_in_time(stubs: Stage, caller: Make) -> None:
    from gpuroute.testing import FakeRegistry

    client = caller(gpuroute.Router(FakeRegistry(), ready_timeout="0.1s"))
    with Stopwatch() as watch, pytest.raises(gpuroute.RegistryUnavailable):
        client.post()
    assert watch.wall >= 0.1
    assert watch.seconds < 3
    client = caller(gpuroute.Router(FakeRegistry(), ready_timeout="20s"))
    with Stopwatch() as watch, pytest.raises(gpuroute.RegistryUnavailable):
        client.post(extensions={"gpuroute": {"timeout": 0.02}})
    assert watch.seconds < 0.5
