"""Every behaviour of a plain channel, run against a plain channel and against a routed one: they must not differ."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from world import Server, drained, method, router_of

import gpuroute.grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.real_time

NO_MESSAGE_LIMIT = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(options=NO_MESSAGE_LIMIT)
    yield server
    server.stop()


def pairs(metadata: Any) -> list[tuple[str, Any]]:
    return [tuple(pair) for pair in metadata]


def fate(action: Callable[[], Any]) -> Any:
    """The result of an action, or what its error tells."""
    try:
        return action()
    except grpc.RpcError as error:
        details = error.details() or ""
        return error.code().name, "Stream removed" if "Stream removed" in details else details
    except Exception as error:
        return type(error).__name__, str(error)


def ending(call: Any) -> tuple[Any, ...]:
    return call.code().name, call.details(), pairs(call.trailing_metadata()), call.done(), call.is_active()


# ------------------------------------------------------------------------------------------ the behaviours
# Each takes a channel and the server's Service, and returns what a caller can observe.


def unary(channel: grpc.Channel, service: Any) -> Any:
    call = channel.unary_unary(method("Echo"))
    return [call(b"one"), call(b""), call(b"two", timeout=30, compression=grpc.Compression.Gzip)]


def unary_with_call(channel: grpc.Channel, service: Any) -> Any:
    response, call = channel.unary_unary(method("Echo")).with_call(b"one", metadata=(("echo-a", "1"), ("echo-a", "2")))
    return response, pairs(call.initial_metadata()), ending(call)


def unary_serializers(channel: grpc.Channel, service: Any) -> Any:
    call = channel.unary_unary(method("Echo"), lambda text: text.encode(), lambda data: data.decode() + "!")
    return call("one"), call.future("two").result()


def unary_statuses(channel: grpc.Channel, service: Any) -> Any:
    call = channel.unary_unary(method("Fail"))
    found = {}
    for code in grpc.StatusCode:
        if code is grpc.StatusCode.OK:
            continue
        with pytest.raises(grpc.RpcError) as error:
            call(code.name.encode(), timeout=30)
        value = error.value
        found[code.name] = value.code(), value.details(), pairs(value.trailing_metadata()), isinstance(value, grpc.Call)
    return found


def unary_bug(channel: grpc.Channel, service: Any) -> Any:
    return fate(lambda: channel.unary_unary(method("Explode"))(b""))


def unary_unknown_method(channel: grpc.Channel, service: Any) -> Any:
    return fate(lambda: channel.unary_unary(method("Nothing"))(b""))


def unary_deadline(channel: grpc.Channel, service: Any) -> Any:
    call = channel.unary_unary(method("Slow"))
    for timeout in (1.0, 4.0, 16.0):  # until it reaches the server before its end, which is a matter of the machine
        code = fate(lambda timeout=timeout: call(b"", timeout=timeout))[0]
        if service.cancelled.wait(5):
            break
    return code, service.cancelled.wait(30)


def unary_no_time(channel: grpc.Channel, service: Any) -> Any:
    call = channel.unary_unary(method("Slow"))
    return fate(lambda: call(b"", timeout=0))[0], fate(lambda: call(b"", timeout=-1))[0]


def unary_wait_for_ready(channel: grpc.Channel, service: Any) -> Any:
    return channel.unary_unary(method("Echo"))(b"x", wait_for_ready=True, timeout=30)


def unary_big(channel: grpc.Channel, service: Any) -> Any:
    call = channel.unary_unary(method("Big"))
    return len(call(b"3000000")), fate(lambda: call(b"5000000"))[0]


def unary_bad_serializer(channel: grpc.Channel, service: Any) -> Any:
    call = channel.unary_unary(method("Echo"), lambda _: 1 / 0)
    return fate(lambda: call(b"")), fate(lambda: call.future(b"")), service.received


def unary_bad_deserializer(channel: grpc.Channel, service: Any) -> Any:
    call = channel.unary_unary(method("Echo"), None, lambda _: 1 / 0)
    return fate(lambda: call(b"")), fate(lambda: call.future(b"").result())


def unary_call_credentials(channel: grpc.Channel, service: Any) -> Any:
    token = grpc.access_token_call_credentials("secret")
    return fate(lambda: channel.unary_unary(method("Echo"))(b"", credentials=token))[0]


def future(channel: grpc.Channel, service: Any) -> Any:
    call = channel.unary_unary(method("Echo")).future(b"one", timeout=30)
    heard: queue.Queue[Any] = queue.Queue()
    call.add_done_callback(heard.put)
    result = call.result(timeout=30)
    return (
        result,
        heard.get(timeout=30) is call,
        call.exception(),
        call.traceback(),
        call.cancelled(),
        call.running(),
        call.cancel(),
        pairs(call.initial_metadata()),
        ending(call),
        isinstance(call, grpc.Future),
        isinstance(call, grpc.Call),
    )


def future_late_callbacks(channel: grpc.Channel, service: Any) -> Any:
    call = channel.unary_unary(method("Echo")).future(b"one")
    call.result()
    call.code()
    heard: list[Any] = []
    call.add_done_callback(heard.append)
    return heard == [call]


def future_failed(channel: grpc.Channel, service: Any) -> Any:
    call = channel.unary_unary(method("Fail")).future(b"NOT_FOUND")
    error = call.exception(timeout=30)
    return fate(lambda: call.result(timeout=30)), error.code().name, call.traceback() is not None, ending(call)


def future_timeout(channel: grpc.Channel, service: Any) -> Any:
    call = channel.unary_unary(method("Slow")).future(b"one")
    early = fate(lambda: call.result(timeout=0.02)), fate(lambda: call.exception(timeout=0.02))
    running = call.running(), call.done(), call.is_active(), call.time_remaining()
    service.release.set()
    return early, running, call.result(timeout=30)


def future_cancel(channel: grpc.Channel, service: Any) -> Any:
    call = channel.unary_unary(method("Slow")).future(b"one", timeout=60)
    remaining = 50 < call.time_remaining() <= 60
    first, second = call.cancel(), call.cancel()
    after = fate(lambda: call.result(timeout=30)), fate(lambda: call.exception(timeout=30)), call.cancelled(), call.done()
    return remaining, first, second, after, call.code().name, call.details()


def future_deadline(channel: grpc.Channel, service: Any) -> Any:
    call = channel.unary_unary(method("Slow")).future(b"one", timeout=0.05)
    return fate(lambda: call.result())[0], call.code().name, call.cancelled(), call.done()


def stream(channel: grpc.Channel, service: Any) -> Any:
    call = channel.unary_stream(method("Count"))(b"5", timeout=30)
    messages = list(call)
    again = fate(lambda: next(call))
    return messages, again, pairs(call.initial_metadata()), ending(call)


def stream_empty(channel: grpc.Channel, service: Any) -> Any:
    call = channel.unary_stream(method("Count"))(b"0")
    return list(call), ending(call)


def stream_headers_first(channel: grpc.Channel, service: Any) -> Any:
    call = channel.unary_stream(method("Count"))(b"2")
    return pairs(call.initial_metadata()), list(call), call.code().name


def stream_error_at_start(channel: grpc.Channel, service: Any) -> Any:
    call = channel.unary_stream(method("Count"))(b"0 PERMISSION_DENIED")
    return fate(lambda: next(call)), pairs(call.initial_metadata()), ending(call)


def stream_error_later(channel: grpc.Channel, service: Any) -> Any:
    call = channel.unary_stream(method("Count"))(b"3 UNAVAILABLE")
    messages = [next(call), next(call), next(call)]
    return messages, fate(lambda: next(call)), fate(lambda: next(call)), ending(call)


def stream_break(channel: grpc.Channel, service: Any) -> Any:
    call = channel.unary_stream(method("Count"))(b"3 wait")
    messages = [next(call), next(call)]
    cancelled = call.cancel(), call.cancel()
    return messages, cancelled, fate(lambda: list(call)), call.code().name, service.cancelled.wait(30)


def stream_cancel_at_once(channel: grpc.Channel, service: Any) -> Any:
    call = channel.unary_stream(method("Count"))(b"3 wait")
    return call.cancel(), fate(lambda: next(call)), call.code().name, call.details(), call.cancelled()


def stream_cancel_while_reading(channel: grpc.Channel, service: Any) -> Any:
    call = channel.unary_stream(method("Count"))(b"1 wait")
    first = next(call)
    threading.Timer(0.05, call.cancel).start()
    return first, fate(lambda: next(call)), call.cancelled()


def stream_dropped(channel: grpc.Channel, service: Any) -> Any:
    call = channel.unary_stream(method("Count"))(b"3 wait")
    first = next(call)
    del call
    return first, service.cancelled.wait(30)


def stream_deadline(channel: grpc.Channel, service: Any) -> Any:
    for timeout in (1.5, 6.0, 24.0):  # until both come before the end, which is a matter of the machine
        call = channel.unary_stream(method("Count"))(b"2 wait", timeout=timeout)
        messages = [fate(lambda call=call: next(call)) for _ in range(2)]
        if messages == [b"0", b"1"]:
            break
    return messages, fate(lambda: next(call))[0], call.code().name


def stream_done_callback(channel: grpc.Channel, service: Any) -> Any:
    call = channel.unary_stream(method("Count"))(b"2")
    heard: queue.Queue[Any] = queue.Queue()
    call.add_done_callback(heard.put)
    nullary: queue.Queue[Any] = queue.Queue()
    added = call.add_callback(lambda: nullary.put(1))
    messages = list(call)
    return messages, heard.get(timeout=30) is call, added, nullary.get(timeout=30), call.add_callback(print)


def client_stream(channel: grpc.Channel, service: Any) -> Any:
    call = channel.stream_unary(method("Collect"))
    response, end = call.with_call(iter([b"a", b"b"]), timeout=30)
    return call(iter([b"a", b"b", b"c"])), call(iter(())), response, end.code().name, call.future(iter([b"z"])).result()


def client_stream_refused(channel: grpc.Channel, service: Any) -> Any:
    call = channel.stream_unary(method("Refuse"))
    endless = iter(lambda: b"x", None)
    return fate(lambda: call(endless)), fate(lambda: call.future(iter([b"a"])).result())


def client_stream_bad_iterator(channel: grpc.Channel, service: Any) -> Any:
    def broken() -> Iterator[bytes]:
        yield b"a"
        raise ValueError("the caller's own bug")

    return fate(lambda: channel.stream_unary(method("Collect"))(broken()))


def chat(channel: grpc.Channel, service: Any) -> Any:
    asked: queue.Queue[bytes | None] = queue.Queue()
    call = channel.stream_stream(method("Chat"))(iter(asked.get, None), timeout=30)
    answers = []
    for word in (b"one", b"two"):
        asked.put(word)
        answers.append(next(call))
    asked.put(None)  # half-close
    return answers, list(call), pairs(call.initial_metadata()), ending(call)[:2]


def chat_ended_by_server(channel: grpc.Channel, service: Any) -> Any:
    asked: queue.Queue[bytes | None] = queue.Queue()
    call = channel.stream_stream(method("Chat"))(iter(asked.get, None))
    for word in (b"one", b"end"):
        asked.put(word)
    result = list(call), ending(call)
    asked.put(None)
    return result


def chat_failed(channel: grpc.Channel, service: Any) -> Any:
    call = channel.stream_stream(method("Chat"))(iter([b"one", b"fail", b"two"]))
    return next(call), fate(lambda: next(call)), call.code().name


def chat_cancelled(channel: grpc.Channel, service: Any) -> Any:
    asked: queue.Queue[bytes | None] = queue.Queue()
    call = channel.stream_stream(method("Chat"))(iter(asked.get, None))
    asked.put(b"one")
    first = next(call)
    call.cancel()
    asked.put(None)
    return first, fate(lambda: next(call)), call.cancelled(), service.cancelled.wait(30)


def intercepted(channel: grpc.Channel, service: Any) -> Any:
    seen: list[str] = []

    class Watcher(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
        def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
            seen.append(details.method)
            call = continuation(details, request + b"!")
            seen.append(call.code().name)
            return call

        def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
            seen.append(details.method)
            return continuation(details, request)

    top = grpc.intercept_channel(channel, Watcher())
    call = top.unary_unary(method("Echo"))
    failing = fate(lambda: top.unary_unary(method("Explode"))(b""))
    return (
        call(b"a"),
        call.with_call(b"b")[0],
        call.future(b"c").result(),
        list(top.unary_stream(method("Count"))(b"2")),
        failing,
        seen,
    )


def connectivity(channel: grpc.Channel, service: Any) -> Any:
    grpc.channel_ready_future(channel).result(timeout=30)
    heard: queue.Queue[Any] = queue.Queue()
    channel.subscribe(heard.put)
    state = heard.get(timeout=30)
    channel.unsubscribe(heard.put)
    return state.name


def closed(channel: grpc.Channel, service: Any) -> Any:
    call, streaming = channel.unary_unary(method("Slow")), channel.unary_stream(method("Count"))
    running, reading = call.future(b""), streaming(b"1 wait")
    first = next(reading)
    channel.close()
    channel.close()
    ends = fate(running.result), fate(lambda: next(reading)), running.code().name
    return first, ends, fate(lambda: call(b""))[0], fate(lambda: call.future(b""))[0], fate(lambda: streaming(b"1"))[0]


def context_manager(channel: grpc.Channel, service: Any) -> Any:
    with channel as entered:
        same = entered is channel
        response = entered.unary_unary(method("Echo"))(b"in")
    return same, response, fate(lambda: channel.unary_unary(method("Echo"))(b"out"))[0]


BEHAVIOURS = [
    unary, unary_with_call, unary_serializers, unary_statuses, unary_bug, unary_unknown_method, unary_deadline,
    unary_no_time, unary_wait_for_ready, unary_big, unary_bad_serializer, unary_bad_deserializer,
    unary_call_credentials, future, future_late_callbacks, future_failed, future_timeout, future_cancel,
    future_deadline, stream, stream_empty, stream_headers_first, stream_error_at_start, stream_error_later,
    stream_break, stream_cancel_at_once, stream_cancel_while_reading, stream_dropped, stream_deadline,
    stream_done_callback, client_stream, client_stream_refused, client_stream_bad_iterator, chat,
    chat_ended_by_server, chat_failed, chat_cancelled, intercepted, connectivity, closed, context_manager,
]  # fmt: skip


@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=lambda behaviour: behaviour.__name__)
def test_a_routed_channel_behaves_as_a_plain_one(behaviour: Callable[..., Any], server: Server) -> None:
    with grpc.insecure_channel(server.target, options=(("grpc.enable_retries", 0),)) as channel:
        expected = behaviour(channel, server.service)
    server.service.__init__()
    router = router_of(server.url)
    with gpuroute.grpc.channel(router, "p") as channel:
        found = behaviour(channel, server.service)
    assert found == expected
    assert drained(router), "something is still counted as in flight"
