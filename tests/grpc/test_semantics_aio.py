"""Every behaviour of a plain asyncio channel, run against a plain one and a routed one: they must not differ."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from world import Server, drained, method, router_of, soon

import gpuroute.grpc.aio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

pytestmark = pytest.mark.real_time


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(options=(("grpc.max_send_message_length", -1),))
    yield server
    server.stop()


def pairs(metadata: Any) -> list[tuple[str, Any]]:
    return [tuple(pair) for pair in metadata]


async def fate(awaitable: Awaitable[Any]) -> Any:
    """The result of an awaitable, or what its error tells."""
    try:
        return await awaitable
    except grpc.aio.AioRpcError as error:
        details = error.details() or ""
        return error.code().name, "Stream removed" if "Stream removed" in details else details
    except asyncio.CancelledError:
        return "CancelledError"
    except Exception as error:
        return type(error).__name__, str(error)


async def ending(call: Any) -> tuple[Any, ...]:
    details = await call.details()
    return (await call.code()).name, details, pairs(await call.trailing_metadata()), call.done(), call.cancelled()


async def collected(messages: Any) -> list[Any]:
    return [message async for message in messages]


async def arrived(service: Any) -> None:
    """Once the call has reached its handler."""
    assert await asyncio.to_thread(soon, lambda: service.received)


async def heard(event: Any, within: float = 30) -> bool:
    return await asyncio.to_thread(event.wait, within)


# ------------------------------------------------------------------------------------------ the behaviours


async def unary(channel: Any, service: Any) -> Any:
    call = channel.unary_unary(method("Echo"))
    return await call(b"one"), await call(b""), await call(b"two", timeout=30, compression=grpc.Compression.Gzip)


async def unary_call(channel: Any, service: Any) -> Any:
    call = channel.unary_unary(method("Echo"))(b"one", metadata=(("echo-a", "1"), ("echo-a", "2")), timeout=60)
    remaining = 50 < call.time_remaining() <= 60
    before = call.done(), call.cancelled()
    initial = pairs(await call.initial_metadata())
    first, second = await call, await call
    return remaining, before, initial, first, second, await ending(call), call.cancel(), isinstance(call, grpc.aio.Call)


async def unary_metadata_object(channel: Any, service: Any) -> Any:
    metadata = grpc.aio.Metadata(("echo-a", "1"), ("echo-b-bin", b"\x00"))
    call = channel.unary_unary(method("Echo"))(b"", metadata=metadata)
    return pairs(await call.initial_metadata()), type(await call.trailing_metadata()).__name__


async def unary_not_awaited(channel: Any, service: Any) -> Any:
    call = channel.unary_unary(method("Echo"))(b"one")
    told: asyncio.Queue[Any] = asyncio.Queue()
    call.add_done_callback(told.put_nowait)
    same = await asyncio.wait_for(told.get(), 30) is call
    late: list[Any] = []
    call.add_done_callback(late.append)
    return same, late == [call], await call


async def unary_gathered(channel: Any, service: Any) -> Any:
    call = channel.unary_unary(method("Echo"))
    return await asyncio.gather(*(call(b"%d" % i) for i in range(20)))


async def unary_statuses(channel: Any, service: Any) -> Any:
    call = channel.unary_unary(method("Fail"))
    found = {}
    for code in grpc.StatusCode:
        if code is not grpc.StatusCode.OK:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call(code.name.encode(), timeout=30)
            value = error.value
            found[code.name] = value.code(), value.details(), pairs(value.trailing_metadata())
    return found


async def unary_failed_call(channel: Any, service: Any) -> Any:
    call = channel.unary_unary(method("Fail"))(b"NOT_FOUND")
    return await ending(call), await fate(call), await fate(call), await fate(call.wait_for_connection())


async def unary_bug(channel: Any, service: Any) -> Any:
    return await fate(channel.unary_unary(method("Explode"))(b""))


async def unary_unknown_method(channel: Any, service: Any) -> Any:
    return await fate(channel.unary_unary(method("Nothing"))(b""))


async def unary_deadline(channel: Any, service: Any) -> Any:
    for timeout in (1.0, 4.0, 16.0):  # until it reaches the server before its end, which is a matter of the machine
        found = await fate(channel.unary_unary(method("Slow"))(b"", timeout=timeout))
        if await heard(service.cancelled, 5):
            break
    return found[0], await heard(service.cancelled)


async def unary_no_time(channel: Any, service: Any) -> Any:
    return (await fate(channel.unary_unary(method("Slow"))(b"", timeout=0)))[0]


async def unary_wait_for_ready(channel: Any, service: Any) -> Any:
    return await channel.unary_unary(method("Echo"))(b"x", wait_for_ready=True, timeout=30)


async def unary_big(channel: Any, service: Any) -> Any:
    call = channel.unary_unary(method("Big"))
    return len(await call(b"3000000")), (await fate(call(b"5000000")))[0]


async def unary_cancel(channel: Any, service: Any) -> Any:
    call = channel.unary_unary(method("Slow"))(b"")
    await arrived(service)
    cancelled = call.cancel(), call.cancel(), call.cancelled(), call.done()
    return cancelled, await fate(call), await ending(call)


async def unary_cancel_at_once(channel: Any, service: Any) -> Any:
    call = channel.unary_unary(method("Slow"))(b"")
    return call.cancel(), await fate(call), await ending(call)


async def unary_task_cancelled(channel: Any, service: Any) -> Any:
    call = channel.unary_unary(method("Slow"))(b"")

    async def wait() -> None:
        await call

    task = asyncio.create_task(wait())
    await arrived(service)
    task.cancel()
    return await fate(task), call.cancelled(), await ending(call), await heard(service.cancelled)


async def unary_waited_for(channel: Any, service: Any) -> Any:
    call = channel.unary_unary(method("Slow"))(b"")
    return (await fate(asyncio.wait_for(call, 0.05)))[0], call.cancelled()


async def stream(channel: Any, service: Any) -> Any:
    call = channel.unary_stream(method("Count"))(b"5", timeout=30)
    return await collected(call), pairs(await call.initial_metadata()), await ending(call)


async def stream_read(channel: Any, service: Any) -> Any:
    call = channel.unary_stream(method("Count"))(b"2")
    read = [await call.read(), await call.read(), await call.read(), await call.read()]
    return [message is grpc.aio.EOF or message for message in read], await ending(call)


async def stream_mixed_styles(channel: Any, service: Any) -> Any:
    call = channel.unary_stream(method("Count"))(b"3")
    first = await call.read()
    return first, await fate(collected(call))


async def stream_headers_first(channel: Any, service: Any) -> Any:
    call = channel.unary_stream(method("Count"))(b"2")
    return pairs(await call.initial_metadata()), await collected(call)


async def stream_error_at_start(channel: Any, service: Any) -> Any:
    call = channel.unary_stream(method("Count"))(b"0 PERMISSION_DENIED")
    return await fate(collected(call)), await ending(call)


async def stream_error_later(channel: Any, service: Any) -> Any:
    call = channel.unary_stream(method("Count"))(b"2 UNAVAILABLE")
    messages = [await call.read(), await call.read()]
    return messages, await fate(call.read()), await ending(call)


async def stream_break_and_go_on(channel: Any, service: Any) -> Any:
    call = channel.unary_stream(method("Count"))(b"4")
    found = []
    async for message in call:
        found.append(message)
        if len(found) == 2:
            break
    return found, await collected(call), call.__aiter__() is call.__aiter__()


async def stream_cancel(channel: Any, service: Any) -> Any:
    call = channel.unary_stream(method("Count"))(b"2 wait")
    messages = [await call.read(), await call.read()]
    return messages, call.cancel(), await fate(call.read()), await ending(call), await heard(service.cancelled)


async def stream_cancel_at_once(channel: Any, service: Any) -> Any:
    call = channel.unary_stream(method("Count"))(b"2 wait")
    return call.cancel(), await fate(collected(call)), await ending(call)


async def stream_task_cancelled(channel: Any, service: Any) -> Any:
    call = channel.unary_stream(method("Count"))(b"1 wait")
    task = asyncio.create_task(collected(call))
    await arrived(service)
    task.cancel()
    return await fate(task), call.cancelled(), await heard(service.cancelled)


async def stream_deadline(channel: Any, service: Any) -> Any:
    for timeout in (1.5, 6.0, 24.0):  # until a message comes before the end, which is a matter of the machine
        call = channel.unary_stream(method("Count"))(b"1 wait", timeout=timeout)
        if (first := await fate(call.read())) == b"0":
            break
    return first, (await fate(call.read()))[0], (await call.code()).name


async def client_stream(channel: Any, service: Any) -> Any:
    call = channel.stream_unary(method("Collect"))

    async def several() -> AsyncIterator[bytes]:
        yield b"x"
        yield b"y"

    return await call([b"a", b"b"], timeout=30), await call(several()), await call(iter(())), await call(iter([b"z"]))


async def client_stream_written(channel: Any, service: Any) -> Any:
    call = channel.stream_unary(method("Collect"))()
    for message in (b"a", b"b"):
        await call.write(message)
    await call.done_writing()
    await call.done_writing()
    return await fate(call.write(b"c")), await call, await fate(call.write(b"c")), await ending(call)


async def client_stream_refused(channel: Any, service: Any) -> Any:
    found = await fate(channel.stream_unary(method("Refuse"))([b"a"]))
    return ("FAILED_PRECONDITION", "reads nothing") if found[0] == "INTERNAL" else found  # the write may be too late


async def client_stream_mixed_styles(channel: Any, service: Any) -> Any:
    call = channel.stream_unary(method("Collect"))([b"a"])
    return await fate(call.write(b"b")), await call


async def client_stream_bad_iterator(channel: Any, service: Any) -> Any:
    async def broken() -> AsyncIterator[bytes]:
        yield b"a"
        raise ValueError("the caller's own bug")

    call = channel.stream_unary(method("Collect"))(broken())
    return await fate(call), call.cancelled()


async def chat(channel: Any, service: Any) -> Any:
    call = channel.stream_stream(method("Chat"))(timeout=30)
    await call.wait_for_connection()
    answers = []
    for word in (b"one", b"two"):
        await call.write(word)
        answers.append(await call.read())
    await call.done_writing()
    end = await call.read()
    return answers, end is grpc.aio.EOF, pairs(await call.initial_metadata()), await ending(call)


async def chat_iterated(channel: Any, service: Any) -> Any:
    call = channel.stream_stream(method("Chat"))(iter([b"one", b"two"]))
    return await collected(call), await ending(call)


async def chat_ended_by_server(channel: Any, service: Any) -> Any:
    call = channel.stream_stream(method("Chat"))()
    await call.write(b"one")
    await call.write(b"end")
    return await collected(call), await ending(call), await fate(call.write(b"late"))


async def chat_failed(channel: Any, service: Any) -> Any:
    call = channel.stream_stream(method("Chat"))([b"one", b"fail"])
    return await call.read(), await fate(call.read()), (await call.code()).name


async def chat_cancelled(channel: Any, service: Any) -> Any:
    call = channel.stream_stream(method("Chat"))()
    await call.write(b"one")
    first = await call.read()
    return first, call.cancel(), await fate(call.read()), await fate(call.write(b"x")), await heard(service.cancelled)


async def connectivity(channel: Any, service: Any) -> Any:
    idle = channel.get_state()
    await asyncio.wait_for(channel.channel_ready(), 30)
    return idle, channel.get_state(), await channel.unary_unary(method("Echo"))(b"x")


async def closed(channel: Any, service: Any) -> Any:
    call, streaming = channel.unary_unary(method("Slow")), channel.unary_stream(method("Count"))
    running, reading = call(b""), streaming(b"1 wait")
    first = await reading.read()
    await channel.close()
    await channel.close()
    if not hasattr(channel, "by_loop") and not hasattr(channel, "_register_call"):
        reading.cancel()  # older releases of grpcio never wake a reader of a closed channel; ours does, with any
    ends = await fate(asyncio.wait_for(running, 30)), await fate(asyncio.wait_for(reading.read(), 30)), running.done()

    async def after() -> Any:
        return await call(b"")

    return first, ends, await fate(after()), channel.get_state()


async def closed_with_grace(channel: Any, service: Any) -> Any:
    running = channel.unary_unary(method("Slow"))(b"late")
    await arrived(service)
    closing = asyncio.create_task(channel.close(30))
    await asyncio.sleep(0.05)
    service.release.set()
    await closing
    return await fate(running)


async def closed_with_grace_while_read(channel: Any, service: Any) -> Any:
    reading = channel.unary_stream(method("Count"))(b"1 wait")
    first = await reading.read()
    closing = asyncio.create_task(channel.close(30))
    await asyncio.sleep(0.05)
    service.release.set()
    await asyncio.wait_for(closing, 20)
    return first, await fate(reading.read()), await fate(reading.code())


async def context_manager(channel: Any, service: Any) -> Any:
    async with channel as entered:
        return entered is channel, await entered.unary_unary(method("Echo"))(b"in")


BEHAVIOURS = [
    unary, unary_call, unary_metadata_object, unary_not_awaited, unary_gathered, unary_statuses, unary_failed_call,
    unary_bug, unary_unknown_method, unary_deadline, unary_no_time, unary_wait_for_ready, unary_big, unary_cancel,
    unary_cancel_at_once, unary_task_cancelled, unary_waited_for, stream, stream_read, stream_mixed_styles,
    stream_headers_first, stream_error_at_start, stream_error_later, stream_break_and_go_on, stream_cancel,
    stream_cancel_at_once, stream_task_cancelled, stream_deadline, client_stream,
    client_stream_written, client_stream_refused, client_stream_mixed_styles, client_stream_bad_iterator, chat,
    chat_iterated, chat_ended_by_server, chat_failed, chat_cancelled, connectivity, closed, closed_with_grace,
    closed_with_grace_while_read,
    context_manager,
]  # fmt: skip


@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=lambda behaviour: behaviour.__name__)
def test_a_routed_channel_behaves_as_a_plain_one(behaviour: Callable[..., Any], server: Server) -> None:
    async def on_plain() -> Any:
        async with grpc.aio.insecure_channel(server.target, options=(("grpc.enable_retries", 0),)) as channel:
            return await behaviour(channel, server.service)

    router = router_of(server.url)

    async def on_routed() -> Any:
        async with gpuroute.grpc.aio.channel(router, "p") as channel:
            found = await behaviour(channel, server.service)
            return found, await asyncio.to_thread(drained, router)

    expected = asyncio.run(on_plain())
    server.service.__init__()
    found, empty = asyncio.run(on_routed())
    assert found == expected
    assert empty, "something is still counted as in flight"


def test_a_dropped_stream_is_cancelled(server: Server) -> None:
    """A plain channel of grpcio 1.85 lets it run on: its call is kept alive by its own done-callback."""
    router = router_of(server.url)

    async def drop() -> Any:
        async with gpuroute.grpc.aio.channel(router, "p") as channel:
            call = channel.unary_stream(method("Count"))(b"3 wait")
            async for _message in call:
                break
            del call
            return await heard(server.service.cancelled), await asyncio.to_thread(drained, router)

    assert asyncio.run(drop()) == (True, True)
