"""What a routed channel does that a plain one cannot: other endpoints, deadlines over all attempts, keys, reports."""

from __future__ import annotations

import _thread
import asyncio
import signal
import socket
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from stopwatch import Stopwatch
from world import PATIENT, WAITING, Manner, Server, drained, in_flight, method, refused_url, router_of, servers, soon

import gpuroute
import gpuroute.grpc
import gpuroute.grpc.aio
from gpuroute.core.endpoint import Endpoint, State
from gpuroute.core.prefix import Prompt
from gpuroute.core.wire import encode
from gpuroute.testing import FakeRegistry
from gpuroute.transports import grpc_reports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.real_time

CODE = grpc.StatusCode


@pytest.fixture
def two() -> Iterator[list[Server]]:
    with servers(2) as running:
        yield running


@pytest.fixture(params=["blocking", "future", "asyncio"])
def manner(request: pytest.FixtureRequest) -> Manner:
    return Manner(request.param)


def urls(running: list[Server]) -> list[str]:
    return [server.url for server in running]


def received(running: list[Server]) -> int:
    return sum(server.service.received for server in running)


# ------------------------------------------------------------------------------------------ other endpoints


def test_a_dead_endpoint_costs_nothing_but_an_attempt(manner: Manner, two: list[Server]) -> None:
    dead = [refused_url() for _ in range(2)]
    for _ in range(4):
        router = router_of(*dead, two[0].url)
        assert manner.call(router, "Who", b"", timeout=30) == b"s0"
        tried = [view for view in router.snapshot().pools["p"].endpoints if view.url in dead and view.served > 1]
        assert not tried, "a dead endpoint was tried again while another was untried"
        assert drained(router)


def test_the_last_error_tells_of_all_attempts(manner: Manner) -> None:
    router = router_of(refused_url(), refused_url())
    with pytest.raises(grpc.RpcError) as error:
        manner.call(router, "Echo", b"", timeout=30)
    assert error.value.code() is CODE.UNAVAILABLE
    assert "refused" in error.value.details()
    (note,) = error.value.__notes__
    assert note.startswith("gpuroute: 3 attempts: ")


@pytest.mark.parametrize("code", [CODE.UNAVAILABLE, CODE.RESOURCE_EXHAUSTED, CODE.CANCELLED])
def test_an_endpoint_that_cannot_is_left_for_one_that_can(manner: Manner, two: list[Server], code: Any) -> None:
    two[0].service.fail_next = [code] * 100
    router = router_of(*urls(two), policy="round_robin")
    for _ in range(4):
        assert manner.call(router, "Who", b"", timeout=30) == b"s1"
        assert drained(router)
    assert two[0].service.received, "the failing endpoint was never met"


@pytest.mark.parametrize("code", [CODE.INVALID_ARGUMENT, CODE.UNKNOWN, CODE.INTERNAL, CODE.DATA_LOSS, CODE.ABORTED])
def test_other_failures_are_the_callers_to_judge(manner: Manner, two: list[Server], code: Any) -> None:
    for server in two:
        server.service.fail_next = [code]
    with pytest.raises(grpc.RpcError) as error:
        manner.call(router_of(*urls(two)), "Echo", b"x", timeout=30)
    assert error.value.code() is code
    assert received(two) == 1


@pytest.mark.parametrize("code", [CODE.UNKNOWN, CODE.INTERNAL, CODE.DATA_LOSS])
def test_they_are_repeated_where_repeating_is_said_to_be_harmless(manner: Manner, code: Any) -> None:
    with servers(1) as one:
        one[0].service.fail_next = [code]
        assert manner.call(router_of(one[0].url), "Echo", b"x", timeout=30, given={"replay": "failed"}) == b"x"


def test_nothing_that_left_is_repeated_where_that_was_asked(manner: Manner, two: list[Server]) -> None:
    for server in two:
        server.service.fail_next = [CODE.UNAVAILABLE]
    with pytest.raises(grpc.RpcError):
        manner.call(router_of(*urls(two)), "Echo", b"x", timeout=30, given={"replay": "unsent"})
    assert received(two) == 1
    two[0].service.fail_next = []
    for _ in range(4):
        router = router_of(refused_url(), two[0].url)
        assert manner.call(router, "Echo", b"x", timeout=30, given={"replay": "unsent"}) == b"x"


def test_a_bad_replay_is_an_error() -> None:
    with pytest.raises(gpuroute.ConfigError, match="expected one of unsent, unavailable, failed"):
        gpuroute.grpc.channel(router_of("grpc://127.0.0.1:1"), "p", replay="always")


def test_a_rejection_says_nothing_about_the_endpoint(two: list[Server]) -> None:
    router = router_of(two[0].url, breaker_failures=1)
    with gpuroute.grpc.channel(router, "p") as channel:
        for request, name in ((b"INVALID_ARGUMENT", "Fail"), (b"5000000", "Big"), (b"NOT_FOUND", "Fail")):
            with pytest.raises(grpc.RpcError):
                channel.unary_unary(method(name))(request)
        call = channel.unary_unary(method("Echo"), None, lambda _: 1 / 0)
        with pytest.raises(grpc.RpcError, match="deserializing"):
            call(b"")
        assert channel.unary_unary(method("Echo"))(b"x") == b"x"
    (view,) = router.snapshot().pools["p"].endpoints
    assert (view.breaker, view.last_error) == ("closed", "")


# ------------------------------------------------------------------------------------------ streams


@pytest.mark.parametrize("name", ["blocking", "asyncio"])
def test_a_stream_moves_on_until_its_first_message(name: str, two: list[Server]) -> None:
    for _ in range(4):
        two[0].service.fail_next = [CODE.UNAVAILABLE]
        router = router_of(refused_url(), *urls(two))
        assert Manner(name).stream(router, "Count", b"3", timeout=30) == ([b"0", b"1", b"2"], None)
        assert drained(router)


@pytest.mark.parametrize("name", ["blocking", "asyncio"])
def test_a_stream_that_began_is_never_replayed(name: str, two: list[Server]) -> None:
    """Case R3: what was delivered is a prefix of one endpoint's answer, and the failure is that endpoint's."""
    router = router_of(*urls(two))
    messages, error = Manner(name).stream(router, "Count", b"2 UNAVAILABLE", timeout=30)
    assert messages == [b"0", b"1"]
    assert error.code() is CODE.UNAVAILABLE
    assert received(two) == 1
    assert sum(bool(view.last_error) for view in router.snapshot().pools["p"].endpoints) == 1


def test_requests_that_never_left_go_elsewhere_whole(manner: Manner, two: list[Server]) -> None:
    for _ in range(4):
        router = router_of(refused_url(), two[0].url)
        assert manner.call(router, "Collect", iter([b"a", b"b", b"c"]), timeout=30) == b"a,b,c"
        assert drained(router)


def test_requests_that_left_are_never_replayed(manner: Manner, two: list[Server]) -> None:
    """Case R5: an iterator gives its messages once."""
    for server in two:
        server.service.fail_next, server.service.reads_first = [CODE.UNAVAILABLE], True
    with pytest.raises(grpc.RpcError) as error:
        manner.call(router_of(*urls(two)), "Collect", iter([b"a", b"b"]), timeout=30)
    assert error.value.code() is CODE.UNAVAILABLE
    assert received(two) == 1


def test_written_requests_that_never_left_are_written_elsewhere(two: list[Server]) -> None:
    async def chat() -> Any:
        async with gpuroute.grpc.aio.channel(router_of(refused_url(), two[0].url), "p") as channel:
            call = channel.stream_stream(method("Chat"))(timeout=30)
            await call.write(b"one")
            first = await call.read()
            await call.write(b"two")
            await call.done_writing()
            return first, await call.read(), await call.read() is grpc.aio.EOF

    for _ in range(4):
        assert asyncio.run(chat()) == (b"re:one", b"re:two", True)


# ------------------------------------------------------------------------------------------ time


def test_a_timeout_spans_all_attempts(manner: Manner, two: list[Server]) -> None:
    """Case R9."""
    router = router_of(*urls(two), attempts=8)
    for server in two:
        server.service.trailing = (("grpc-retry-pushback-ms", "400"),)
        server.service.fail_next = [CODE.UNAVAILABLE] * 8
    with Stopwatch() as watch, pytest.raises(grpc.RpcError) as error:
        manner.call(router, "Slow", b"", timeout=0.6)
    assert watch.seconds < 3
    # Eight attempts at two servers would take 1.2 s; what ends it is the deadline, or the word of who asks for longer.
    assert error.value.code() in {CODE.DEADLINE_EXCEEDED, CODE.UNAVAILABLE}
    assert received(two) < 8
    for server in two:
        server.service.fail_next = []
    with Stopwatch() as watch, pytest.raises(grpc.RpcError) as error:
        manner.call(router_of(*urls(two)), "Slow", b"", timeout=0.4)
    assert error.value.code() is CODE.DEADLINE_EXCEEDED
    assert watch.wall >= 0.39
    assert watch.seconds < 3
    assert drained(router)


def with_timeout(seconds: float, server: Server) -> gpuroute.Router:
    """Of the pool itself; connecting has more time, which its settings would not allow."""
    router = router_of(server.url)
    router.ready()
    pool = router.pool("p")
    pool.rules = replace(pool.rules, timeout=seconds)
    return router


def test_the_pools_own_timeout_holds_for_unary_calls(manner: Manner, two: list[Server]) -> None:
    router = with_timeout(0.2, two[0])
    with pytest.raises(grpc.RpcError) as error:
        manner.call(router, "Slow", b"")
    assert error.value.code() is CODE.DEADLINE_EXCEEDED


@pytest.mark.parametrize("name", ["blocking", "asyncio"])
def test_the_pools_own_timeout_does_not_cut_streams(name: str, two: list[Server]) -> None:
    router = with_timeout(0.5, two[0])
    threading.Timer(1.0, two[0].service.release.set).start()
    assert Manner(name).stream(router, "Count", b"2 wait") == ([b"0", b"1"], None)


def test_pushback_is_waited_for(manner: Manner) -> None:
    with servers(1) as (server,):
        server.service.trailing = (("grpc-retry-pushback-ms", "300"),)
        server.service.fail_next = [CODE.UNAVAILABLE]
        began = time.monotonic()
        assert manner.call(router_of(server.url), "Echo", b"x", timeout=30) == b"x"
        assert time.monotonic() - began >= 0.3


def test_negative_pushback_ends_the_call(manner: Manner, two: list[Server]) -> None:
    for server in two:
        server.service.trailing = (("grpc-retry-pushback-ms", "-1"),)
        server.service.fail_next = [CODE.UNAVAILABLE]
    with pytest.raises(grpc.RpcError):
        manner.call(router_of(*urls(two)), "Echo", b"x", timeout=30)
    assert received(two) == 1


def test_overload_pauses_and_spares_the_breaker(two: list[Server]) -> None:
    # The clock stands still, so that no pause ends; in turn, so that only a pause keeps calls away.
    router = router_of(*urls(two), breaker_failures=1, clock=lambda: 100.0, policy="round_robin")
    two[0].service.fail_next = [CODE.RESOURCE_EXHAUSTED] * 50
    with gpuroute.grpc.channel(router, "p") as channel:
        call = channel.unary_unary(method("Echo"))
        for _ in range(20):
            assert call(b"x", timeout=30) == b"x"
    assert {view.breaker for view in router.snapshot().pools["p"].endpoints} == {"closed"}
    assert two[0].service.received <= 2, "an endpoint that said it is full was not left alone"


def test_a_cancelled_call_makes_no_further_attempt() -> None:
    """Case R10, between attempts: the endpoint asked for a pause, during which the caller gives up."""
    with servers(1) as (server,):
        server.service.trailing = (("grpc-retry-pushback-ms", "2000"),)
        router = router_of(server.url)
        with gpuroute.grpc.channel(router, "p") as channel:

            def cancelled() -> bool:
                """A machine that stands still through the whole pause cancels nothing."""
                nonlocal call
                server.service.received, server.service.fail_next = 0, [CODE.UNAVAILABLE]
                call = channel.unary_unary(method("Echo")).future(b"x", timeout=90)
                assert soon(lambda: server.service.received and not in_flight(router))
                return bool(call.cancel()) and server.service.received == 1

            call: Any = None
            assert any(cancelled() for _ in range(10))
            assert (call.code(), call.cancelled(), call.done()) == (CODE.CANCELLED, True, True)
            with pytest.raises(grpc.FutureCancelledError):
                call.result()
            time.sleep(2.2)  # past the pause
        assert server.service.received == 1


def test_an_interrupted_call_is_let_go_of(two: list[Server]) -> None:
    router = router_of(two[0].url)
    with gpuroute.grpc.channel(router, "p") as channel:
        two[0].service.heard = _thread.interrupt_main
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process of a shell ignores it
        try:
            with pytest.raises(KeyboardInterrupt):
                channel.unary_unary(method("Slow"))(b"", timeout=90)
        finally:
            signal.signal(signal.SIGINT, handler)
        assert in_flight(router) == 0


# ------------------------------------------------------------------------------------------ wait_for_ready (case G5)


def test_g5_waiting_for_ready_does_not_hide_a_live_endpoint(manner: Manner, two: list[Server]) -> None:
    """A channel that waited for the broken endpoint would wait until the deadline."""
    for _ in range(4):
        router = router_of(refused_url(), two[0].url)
        with Stopwatch() as watch:
            assert manner.call(router, "Who", b"", wait_for_ready=True, timeout=60) == b"s0"
        assert watch.seconds < 10
        assert router.snapshot().pools["p"].signals["deadlines"] == 0


def test_g5_waiting_for_ready_names_its_cause_in_the_end(manner: Manner) -> None:
    said = ""
    for timeout in (0.6, 2.4, 9.6, 38.4):  # a busy machine may need longer until the first connect has failed
        with pytest.raises(grpc.RpcError) as error:
            manner.call(router_of(refused_url()), "Who", b"", wait_for_ready=True, timeout=timeout)
        assert error.value.code() in {CODE.DEADLINE_EXCEEDED, CODE.UNAVAILABLE}
        said = f"{error.value.details()} {getattr(error.value, '__notes__', '')}"
        if "refused" in said:
            break
    assert "refused" in said


def test_waiting_for_ready_outlasts_the_attempts(manner: Manner) -> None:
    url = refused_url()
    started: list[Server] = []
    timer = threading.Timer(0.5, lambda: started.append(Server("late", port=int(url.rpartition(":")[2]))))
    timer.start()
    try:
        assert manner.call(router_of(url, retry_floor="1/s"), "Who", b"", wait_for_ready=True, timeout=90) == b"late"
    finally:
        timer.join()
        started[0].stop()


# ------------------------------------------------------------------------------------------ keys, metadata, reports


def test_a_key_in_the_metadata_is_kept_to_one_endpoint(manner: Manner) -> None:
    with servers(4) as running:
        router = router_of(*urls(running), policy="session")
        answers = {
            key: {manner.call(router, "Who", b"", metadata=(("x-gpuroute-key", key), ("kept", "1"))) for _ in range(5)}
            for key in map(str, range(24))  # homes follow from ports: at one of four by chance less than once in 10^11
        }
        assert all(len(answer) == 1 for answer in answers.values())
        assert len(set.union(*answers.values())) > 1
        seen = [pair for server in running for metadata in server.service.metadata for pair in metadata]
        assert ("kept", "1") in seen
        assert not [name for name, _ in seen if name == "x-gpuroute-key"]


def test_later_attempts_say_so(manner: Manner, two: list[Server]) -> None:
    for server in two:
        server.service.fail_next = [CODE.UNAVAILABLE]
    router = router_of(*urls(two))
    assert manner.call(router, "Echo", b"x", timeout=30, metadata=(("mine", "1"),), given={"replay": "failed"}) == b"x"
    seen = [dict(metadata) for server in two for metadata in server.service.metadata]
    assert sorted(metadata.get("x-gpuroute-attempt", "") for metadata in seen) == ["", "2", "3"]
    assert {metadata["mine"] for metadata in seen} == {"1"}


def test_options_hold_for_a_block_and_metadata_win(two: list[Server]) -> None:
    router = router_of(*urls(two), policy="session")
    with gpuroute.grpc.channel(router, "p") as channel:
        call = channel.unary_unary(method("Who"))
        keys = map(str, range(64))  # homes follow from ports: no key lives at one of two less than once in 10^15
        homes = {key: call(b"", metadata=(("x-gpuroute-key", key),)) for key in keys}
        one, other = (next(key for key, home in homes.items() if home == name) for name in (b"s0", b"s1"))
        with gpuroute.grpc.options(key=one):
            assert {call(b"") for _ in range(8)} == {b"s0"}
            assert {call(b"", metadata=(("x-gpuroute-key", other),)) for _ in range(8)} == {b"s1"}
        with gpuroute.grpc.options(timeout=0.1), pytest.raises(grpc.RpcError) as error:
            channel.unary_unary(method("Slow"))(b"", timeout=30)
        assert error.value.code() is CODE.DEADLINE_EXCEEDED


def test_options_reach_asyncio_calls(two: list[Server]) -> None:
    async def run() -> Any:
        async with gpuroute.grpc.aio.channel(router_of(two[0].url), "p") as channel:
            with gpuroute.grpc.options(timeout=0.1):
                call = channel.unary_unary(method("Slow"))(b"")
            return await call.code()

    assert asyncio.run(run()) is CODE.DEADLINE_EXCEEDED


@pytest.mark.parametrize("bad", [("x-gpuroute-timeout", "soon"), ("x-gpuroute-atempts", "3")])
def test_malformed_options_are_named(bad: tuple[str, str], two: list[Server]) -> None:
    with gpuroute.grpc.channel(router_of(two[0].url), "p") as channel, pytest.raises(gpuroute.ConfigError):
        channel.unary_unary(method("Echo"))(b"", metadata=(bad,))


def test_prompts_in_known_messages_have_homes() -> None:
    def infer(text: bytes, noise: bytes) -> bytes:
        tensor = encode((1, "text_input"), (2, "BYTES"))
        image = encode((1, "image"), (2, "UINT8"))
        raw = len(text).to_bytes(4, "little") + text
        return encode((1, "llama"), (3, noise), (5, image), (5, tensor), (7, noise * 2000), (7, raw))

    with servers(4) as running:
        router = router_of(*urls(running), policy="prefix")
        with gpuroute.grpc.channel(router, "p", prompt=_as_infer) as channel:
            call = channel.unary_unary(method("Who"))
            homes = [{call(infer(b"%d" % n * 600, b"%d" % noise)) for noise in range(3)} for n in range(24)]
        assert all(
            len(home) == 1 for home in homes
        )  # at one of four by chance less than once in 10^11: they follow from ports
        assert len(set.union(*homes)) > 1


def _as_infer(name: str, request: bytes) -> Any:
    from gpuroute.engines.messages import read_message

    assert name == method("Who")
    return read_message("/inference.GRPCInferenceService/ModelInfer", request)


@pytest.mark.parametrize(
    "trailer",
    [
        ("x-endpoint-load-metrics-bin", WAITING),
        ("endpoint-load-metrics", "TEXT named_metrics.num_requests_waiting=5"),
        ("endpoint-load-metrics", 'JSON {"named_metrics": {"num_requests_waiting": 5.0}}'),
    ],
)
def test_load_reports_in_trailers_are_learned(manner: Manner, trailer: tuple[str, Any]) -> None:
    with servers(1) as (server,):
        server.service.trailing = (trailer,)
        router = router_of(server.url)
        manner.call(router, "Echo", b"")
        (state,) = router.pool("p").snapshot.states
        assert soon(lambda: state.report is not None)
        assert (state.report.waiting, state.report.source) == (5, "orca")


@pytest.mark.parametrize("name", ["blocking", "asyncio"])
def test_load_reports_out_of_band_are_followed_if_asked_for(name: str) -> None:
    with servers(1) as (server,):
        router = router_of(server.url)
        assert Manner(name).call(router, "Who", b"", given={"load_reports": None}) == b"s0"
        followed = router_of(server.url)
        assert _called_until(name, followed, lambda: followed.pool("p").snapshot.states[0].report is not None)
        (state,) = followed.pool("p").snapshot.states
        assert state.report is not None
        assert state.report.waiting == 5
        every = b"\n\x07\x08\x00\x10\x80\xc2\xd7/"  # 0.1 s, and the first channel asked for none
        assert set(server.service.followed) == {every}
        assert router.pool("p").snapshot.states[0].report is None
        assert soon(lambda: not server.service.following), "the stream outlives its channel"


def test_a_stream_of_reports_that_never_come_ends_with_the_endpoints_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_reports, "AGAIN_S", 0.05)
    with servers(2) as (mute, other):
        mute.service.mute = True
        registry = FakeRegistry({"p": [mute.url]})
        with (
            gpuroute.Router(registry, **PATIENT) as router,
            gpuroute.grpc.channel(router, "p", load_reports=0.1) as channel,
        ):
            who = channel.unary_unary(method("Who"))
            assert who(b"") == b"s0"
            assert soon(lambda: mute.service.following == 1)
            registry.set({"p": [other.url]})
            assert who(b"") == b"s1"
            assert soon(lambda: mute.service.following == 0), "the stream outlives its endpoint"
            assert soon(lambda: other.service.following == 1)


def _called_until(name: str, router: gpuroute.Router, condition: Callable[[], bool]) -> bool:
    """Keep a channel with load reports open until the condition holds."""
    if name == "blocking":
        with gpuroute.grpc.channel(router, "p", load_reports=0.1) as channel:
            assert channel.unary_unary(method("Who"))(b"") == b"s0"
            return soon(condition)

    async def run() -> bool:
        async with gpuroute.grpc.aio.channel(router, "p", load_reports=0.1) as channel:
            assert await channel.unary_unary(method("Who"))(b"") == b"s0"
            return await asyncio.to_thread(soon, condition)

    return asyncio.run(run())


def test_a_server_without_reports_is_called_as_ever(two: list[Server]) -> None:
    two[0].service.follows = False
    with gpuroute.grpc.channel(router_of(two[0].url), "p", load_reports=0.1) as channel:
        who = channel.unary_unary(method("Who"))
        assert {who(b"") for _ in range(5)} == {b"s0"}


@pytest.mark.parametrize("every", [0, -1.0, float("nan"), float("inf"), "1", True])
@pytest.mark.parametrize("make", [gpuroute.grpc.channel, gpuroute.grpc.aio.channel])
def test_load_reports_are_asked_for_in_seconds(make: Any, every: Any) -> None:
    with pytest.raises(gpuroute.ConfigError, match=r"load_reports=.*: expected seconds above 0"):
        make(router_of(refused_url()), "p", load_reports=every)


def test_a_closed_router_takes_no_call(manner: Manner, two: list[Server]) -> None:
    router = router_of(two[0].url)
    assert manner.call(router, "Who", b"", timeout=30) == b"s0"
    with gpuroute.grpc.channel(router, "p") as channel:
        who = channel.unary_unary(method("Who"))
        assert who(b"", timeout=30) == b"s0"
        router.close()
        for call in (who, who.future):
            with pytest.raises(gpuroute.RouterClosed):
                call(b"", timeout=30)
    with pytest.raises(gpuroute.RouterClosed):
        manner.call(router, "Who", b"", timeout=30)


def test_a_server_that_never_reports_is_still_heard_now_and_then() -> None:
    with servers(1) as (server,):
        router = router_of(server.url)
        with gpuroute.grpc.channel(router, "p") as channel:
            call = channel.unary_unary(method("Echo"))
            for _ in range(40):
                call(b"")
            server.service.trailing = (("x-endpoint-load-metrics-bin", WAITING),)
            (state,) = router.pool("p").snapshot.states
            assert soon(lambda: call(b"") == b"" and state.report is not None)


def test_an_endpoints_headers_are_sent_and_never_shown(two: list[Server]) -> None:
    secret = Endpoint("a", two[0].url, headers={"Authorization": "Bearer hush"})
    router = router_of(secret)
    with gpuroute.grpc.channel(router, "p") as channel:
        channel.unary_unary(method("Echo"))(b"", metadata=(("authorization", "the caller's"), ("other", "1")))
        with pytest.raises(grpc.RpcError) as error:
            channel.unary_unary(method("Fail"))(b"INTERNAL")
    (sent, *_) = two[0].service.metadata
    assert ("authorization", "Bearer hush") in sent
    assert ("authorization", "the caller's") not in sent
    assert ("other", "1") in sent
    assert "hush" not in f"{error.value} {router.snapshot()!r}"


def test_futures_that_ask_agents_wait_in_one_thread(two: list[Server]) -> None:
    """Of agents that say nothing. Each such call is sent when the wait is over; its caller has gone on long before."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        agent = f"udp://127.0.0.1:{silent.getsockname()[1]}"
        endpoints = [Endpoint(server.url, server.url, agent=f"{agent}/{n}") for n, server in enumerate(two)]
        router = router_of(*endpoints, asks="on", ask_timeout="500ms")
        prompt, before = Prompt(b"hello", 5_000), set(threading.enumerate())
        with gpuroute.grpc.channel(router, "p", prompt=lambda *_: prompt) as channel:
            who = channel.unary_unary(method("Who"))
            calls = [who.future(b"hello", timeout=60) for _ in range(30)]
            new = [thread for thread in threading.enumerate() if thread not in before]
            assert sum(thread.name == "gpuroute-grpc-aside" for thread in threading.enumerate()) == 1
            assert not [thread for thread in new if isinstance(thread, threading.Timer)]
            assert {call.result() for call in calls} <= {b"s0", b"s1"}
        assert drained(router)


# ------------------------------------------------------------------------------------------ accounting (cases G7, L2)


def test_g7_open_streams_count_as_load(two: list[Server]) -> None:
    router = router_of(*urls(two), policy="least_request")
    with gpuroute.grpc.channel(router, "p") as channel:
        count, who = channel.unary_stream(method("Count")), channel.unary_unary(method("Who"))
        open_streams = [count(b"1 wait") for _ in range(10)]
        for stream in open_streams:
            next(stream)
        loads = sorted(view.in_flight for view in router.snapshot().pools["p"].endpoints)
        assert loads == [5, 5]
        # A server that ends its half of the streams has no load any more, and gets the short calls.
        two[0].service.release.set()
        for stream in open_streams:
            threading.Thread(target=_exhaust, args=(stream,), daemon=True).start()
        assert soon(lambda: _loads(router) == {two[0].url: 0, two[1].url: 5}), _loads(router)
        assert {who(b"") for _ in range(20)} == {b"s0"}
        for stream in open_streams:
            stream.cancel()
        assert drained(router)


def _loads(router: gpuroute.Router) -> dict[str, int]:
    return {view.url: view.in_flight for view in router.snapshot().pools["p"].endpoints}


def _exhaust(stream: Any) -> None:
    try:
        list(stream)
    except grpc.RpcError:
        pass


def test_g7_nothing_leaks_whatever_the_end(two: list[Server]) -> None:
    """Case L1 for every kind of call: cancelled, dropped, timed out, failed."""
    router = router_of(*urls(two))
    with gpuroute.grpc.channel(router, "p") as channel:
        slow, count = channel.unary_unary(method("Slow")), channel.unary_stream(method("Count"))
        chat, collect = channel.stream_stream(method("Chat")), channel.stream_unary(method("Collect"))
        for n in range(40):
            calls = [slow.future(b""), count(b"1 wait"), chat(iter([b"a"])), collect.future(iter([b"x"]))]
            if n % 4 == 0:
                [call.cancel() for call in calls]
            elif n % 4 == 1:
                slow.future(b"", timeout=0.01), count(b"1 wait", timeout=0.01)
            elif n % 4 == 2:
                next(calls[1]), next(calls[2])
            del calls
        assert drained(router)


def test_nothing_leaks_in_asyncio(two: list[Server]) -> None:
    router = router_of(*urls(two))

    async def run() -> bool:
        async with gpuroute.grpc.aio.channel(router, "p") as channel:
            slow, count = channel.unary_unary(method("Slow")), channel.unary_stream(method("Count"))
            chat = channel.stream_stream(method("Chat"))
            for n in range(40):
                calls = [slow(b""), count(b"1 wait"), chat([b"a"]), chat()]
                if n % 4 == 1:
                    await calls[1].read(), await calls[2].read()
                if n % 4 == 2:
                    await asyncio.sleep(0.001)
                if n % 4 == 3:
                    task = asyncio.ensure_future(calls[0])
                    await asyncio.sleep(0)
                    task.cancel()
                calls[0].cancel()  # grpcio keeps a dropped unary call going, and so do we
                del calls
            return await asyncio.to_thread(drained, router)

    assert asyncio.run(run())


# ------------------------------------------------------------------------------------------ the fleet changes


def test_a_new_endpoint_serves_an_old_stub_and_a_gone_one_ends_its_streams(two: list[Server]) -> None:
    registry = FakeRegistry({"p": [two[0].url]})
    router = gpuroute.Router(registry, **PATIENT)
    with gpuroute.grpc.channel(router, "p") as channel:
        who, count = channel.unary_unary(method("Who")), channel.unary_stream(method("Count"))
        assert who(b"") == b"s0"
        stream = count(b"2 wait")
        assert next(stream) == b"0"
        registry.set({"p": [two[1].url]})
        assert {who(b"") for _ in range(5)} == {b"s1"}
        peers = channel._peers
        assert len(peers) == 1, "the gone endpoint's channel is still offered"
        two[0].service.release.set()
        assert list(stream) == [b"1"], "a stream was cut because its endpoint left the registry"


def test_g3_endpoints_that_come_and_go_leave_nothing_behind() -> None:
    """Case G3."""
    with servers(2) as running:
        registry = FakeRegistry({"p": [running[0].url]})
        router = gpuroute.Router(registry, **PATIENT)
        with gpuroute.grpc.channel(router, "p") as channel:
            call = channel.unary_unary(method("Who"))
            before, never = _descriptors(), Endpoint("never", refused_url(), weight=0)
            for n in range(60):
                server = running[n % 2]
                registry.set({"p": [Endpoint(f"e{n}", server.url), never]})
                assert call(b"") == server.service.name
            assert len(channel._peers) == 1
            soon(lambda: _descriptors() <= before + 10)
            assert _descriptors() <= before + 10


def _descriptors() -> int:
    from pathlib import Path

    return len(list(Path("/proc/self/fd").iterdir()))


def test_an_address_that_changes_under_one_id_is_followed(two: list[Server]) -> None:
    registry = FakeRegistry({"p": [Endpoint("a", two[0].url)]})
    with gpuroute.grpc.channel(gpuroute.Router(registry, **PATIENT), "p") as channel:
        call = channel.unary_unary(method("Who"))
        assert call(b"") == b"s0"
        registry.set({"p": [Endpoint("a", two[1].url)]})
        assert call(b"") == b"s1"


def test_a_thousand_endpoints_cost_no_channel_until_they_are_called(two: list[Server]) -> None:
    idle = [Endpoint(f"idle-{n}", f"grpc://127.0.0.1:{n + 1}", state=State.DRAINING) for n in range(1000)]
    router = router_of(*idle, two[0].url)
    with gpuroute.grpc.channel(router, "p") as channel:
        assert len(channel._peers) == 0
        assert channel.unary_unary(method("Who"))(b"") == b"s0"
        assert len(channel._peers) == 1


def test_an_idle_channel_is_closed(two: list[Server]) -> None:
    now = [0.0]
    router = gpuroute.Router(FakeRegistry({"p": [two[0].url]}), clock=lambda: now[0], **PATIENT)
    with gpuroute.grpc.channel(router, "p", idle_timeout=60) as channel:
        call = channel.unary_unary(method("Who"))
        call(b"")
        first = next(iter(channel._peers))
        now[0] = 30
        call(b"")
        assert next(iter(channel._peers)) is first
        now[0] = 200
        assert call(b"") == b"s0"
        assert next(iter(channel._peers)) is not first
        assert first.gone


# ------------------------------------------------------------------------------------------ no endpoint, no pool, no view


def test_nobody_to_call_is_unavailable_and_our_own_error(manner: Manner) -> None:
    router = router_of(Endpoint("a", "grpc://127.0.0.1:1", state=State.DRAINING))
    with pytest.raises(grpc.RpcError) as error:
        manner.call(router, "Echo", b"")
    assert isinstance(error.value, gpuroute.NoEndpointAvailable)
    assert error.value.code() is CODE.UNAVAILABLE
    assert "none of its 1 endpoints is in service" in error.value.details()


def test_an_unknown_pool_is_named(two: list[Server]) -> None:
    with gpuroute.grpc.channel(router_of(two[0].url), "q") as channel:
        with pytest.raises(gpuroute.UnknownPool, match="known pools: p"):
            channel.unary_unary(method("Echo"))(b"")


def test_a_view_that_does_not_come_is_unavailable(manner: Manner) -> None:
    router = gpuroute.Router(FakeRegistry(), ready_timeout=0.1)
    with pytest.raises(grpc.RpcError) as error:
        manner.call(router, "Echo", b"")
    assert isinstance(error.value, gpuroute.RegistryUnavailable)
    assert error.value.code() is CODE.UNAVAILABLE


def test_a_view_that_comes_late_is_waited_for(manner: Manner, two: list[Server]) -> None:
    registry = FakeRegistry()
    threading.Timer(0.2, lambda: registry.set({"p": [two[0].url]})).start()
    assert manner.call(gpuroute.Router(registry, ready_timeout="60s", **PATIENT), "Who", b"", timeout=90) == b"s0"


def test_a_url_that_grpc_cannot_use_is_left_for_another(manner: Manner, two: list[Server]) -> None:
    bad = Endpoint("bad", "ftp://nowhere/x")
    for _ in range(4):
        assert manner.call(router_of(bad, two[0].url), "Who", b"") == b"s0"
    with pytest.raises(gpuroute.ConfigError, match="'bad': expected grpc://HOST:PORT"):
        manner.call(router_of(bad, attempts=1), "Who", b"")


@pytest.mark.parametrize("how", ["disabled", "rollout"])
def test_the_kill_switch_and_the_rollout_leave_calls_unrouted(how: str, manner: Manner, two: list[Server]) -> None:
    switch: dict[str, Any] = {"disabled": True} if how == "disabled" else {"rollout": "0%"}
    router = router_of(two[0].url, fallback_url=two[1].url.replace("grpc:", "http:"), **switch)
    assert manner.call(router, "Who", b"", metadata=(("x-gpuroute-key", "k"),)) == b"s1"
    assert not [pair for pair in two[1].service.metadata[0] if pair[0].startswith("x-gpuroute")]


def test_calls_outside_the_rollout_do_not_wait_for_the_registry(manner: Manner, two: list[Server]) -> None:
    url = two[1].url.replace("grpc:", "http:")
    registry = FakeRegistry()
    router = gpuroute.Router(registry, rollout="50%", fallback_url=url, ready_timeout="50ms", **PATIENT)
    for _ in range(2):
        assert manner.call(router, "Who", b"") == b"s1"
        with pytest.raises(grpc.RpcError):  # the other half is the router's
            manner.call(router, "Who", b"")
    registry.set({"p": [two[0].url]})
    assert [manner.call(router, "Who", b"") for _ in range(4)] == [b"s1", b"s0", b"s1", b"s0"]


def test_a_storm_of_failures_is_bounded_by_the_budget() -> None:
    with servers(3) as running:
        for server in running:
            server.service.fail_next = [CODE.UNAVAILABLE] * 10_000
        router = router_of(*urls(running), retry_floor="1/s", retry_budget="20%", panic="fail_open")
        with gpuroute.grpc.channel(router, "p") as channel:
            call = channel.unary_unary(method("Echo"))
            began = time.monotonic()
            for _ in range(200):
                with pytest.raises(grpc.RpcError):
                    call(b"", timeout=30)
            floor = 1 * (time.monotonic() - began)
        assert received(running) <= 200 * 1.2 + 20 + floor


# ------------------------------------------------------------------------------------------ interceptors, endpoint, loops


def test_asyncio_interceptors_see_every_attempt(two: list[Server]) -> None:
    seen: list[tuple[str, Any]] = []

    class Watcher(grpc.aio.UnaryUnaryClientInterceptor):
        async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
            call = await continuation(details, request)
            seen.append((request, await call.code()))
            return call

    class Broken(grpc.aio.UnaryUnaryClientInterceptor):
        async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
            raise ValueError("the interceptor's own bug")

    router = router_of(*urls(two), policy="round_robin")

    async def run() -> Any:
        async with gpuroute.grpc.aio.channel(router, "p", interceptors=[Watcher()]) as channel:
            return await channel.unary_unary(method("Echo"), lambda text: text.encode())("hello")

    async def broken() -> Any:
        async with gpuroute.grpc.aio.channel(router, "p", interceptors=[Broken()]) as channel:
            with pytest.raises(ValueError, match="own bug"):
                await channel.unary_unary(method("Echo"))(b"")

    two[0].service.fail_next = [CODE.UNAVAILABLE] * 4
    for _ in range(2):
        seen.clear()
        assert asyncio.run(run()) == b"hello"
        if len(seen) == 2:
            break
    assert seen == [("hello", CODE.UNAVAILABLE), ("hello", CODE.OK)]
    asyncio.run(broken())
    assert drained(router)


def test_one_asyncio_channel_serves_several_loops(two: list[Server]) -> None:
    router = router_of(*urls(two))
    channel = gpuroute.grpc.aio.channel(router, "p")
    call = channel.unary_unary(method("Who"))

    async def run() -> set[bytes]:
        return set(await asyncio.gather(*(call(b"") for _ in range(20))))

    found: list[set[bytes]] = []
    threads = [threading.Thread(target=lambda: found.append(asyncio.run(run()))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found += [asyncio.run(run()) for _ in range(3)]
    assert len(found) == 6
    assert set.union(*found) == {b"s0", b"s1"}
    assert len(channel.by_loop) <= 2, "the channels of ended loops were kept"


def test_many_threads_share_a_channel(two: list[Server]) -> None:
    router = router_of(refused_url(), *urls(two))
    wrong: list[object] = []
    with gpuroute.grpc.channel(router, "p") as channel:
        call = channel.unary_unary(method("Echo"))

        def work(n: int) -> None:
            for i in range(25):
                body = b"%d-%d" % (n, i)
                if call(body, timeout=30) != body:
                    wrong.append(body)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert drained(router)
