"""Connections under a routed channel: TLS, peers that vanish, freeze or send GOAWAY, and processes that fork."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent import futures
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import trustme
from relay import Relay
from world import PATIENT, Manner, Server, drained, in_flight, method, refused_url, router_of, servers, soon, undisturbed

import gpuroute
import gpuroute.grpc
import gpuroute.grpc.aio
from gpuroute.core.endpoint import Endpoint, Tls
from gpuroute.testing import FakeRegistry
from gpuroute.transports.grpc_connectivity import Connectivity
from gpuroute.transports.grpc_peers import channel_options, read_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.real_time

HERE = Path(__file__).parent
OFTEN = (("grpc.keepalive_time_ms", 1000), ("grpc.http2.ping_timeout_ms", 30_000))
"""Pings whose answers may take their time: the machine may stand still for a while."""
QUICK_PINGS = (*OFTEN[:1], ("grpc.http2.ping_timeout_ms", 500))


@pytest.fixture(params=["blocking", "asyncio"])
def manner(request: pytest.FixtureRequest) -> Manner:
    return Manner(request.param)


# ------------------------------------------------------------------------------------------ addresses and options


@pytest.mark.parametrize(
    ("url", "target", "secure"),
    [
        ("grpc://127.0.0.1:8001", "ipv4:127.0.0.1:8001", False),
        ("http://gpu-7:8001", "dns:///gpu-7:8001", False),
        ("grpcs://gpu-7.example:443/", "dns:///gpu-7.example:443", True),
        ("https://[::1]:8001", "ipv6:[::1]:8001", True),
        ("gpu-7:8001", "dns:///gpu-7:8001", False),
        ("grpc://gpu-7", "dns:///gpu-7:80", False),
        ("grpcs://gpu-7", "dns:///gpu-7:443", True),
        ("unix:/run/triton.sock", "unix:/run/triton.sock", False),
    ],
)
def test_addresses(url: str, target: str, secure: bool) -> None:
    address = read_address(Endpoint("a", url))
    assert (address.target, address.secure) == (target, secure)


def test_options_that_keep_calls_safe() -> None:
    options = channel_options((("grpc.keepalive_time_ms", 5),), connect_timeout=1.0, idle=300, trust_env=False)
    assert options["grpc.enable_retries"] == 0
    assert options["grpc.enable_http_proxy"] == 0
    assert options["grpc.use_local_subchannel_pool"] == 1
    assert options["grpc.keepalive_time_ms"] == 5, "the user's own option does not win"
    defaults = channel_options((), connect_timeout=1.0, idle=300, trust_env=True)
    assert defaults["grpc.keepalive_time_ms"] + defaults["grpc.http2.ping_timeout_ms"] <= 13_000
    assert defaults["grpc.enable_http_proxy"] == 1
    assert "grpc.http2.max_pings_without_data" not in defaults, "servers answer unlimited pings with GOAWAY"


def test_a_proxy_in_the_environment_is_not_used(manner: Manner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", refused_url().replace("grpc:", "http:"))
    monkeypatch.delenv("no_proxy", raising=False)
    with servers(1) as (server,):
        assert manner.call(router_of(server.url), "Who", b"") == b"s0"


# ------------------------------------------------------------------------------------------ TLS


class Authority:
    """A certificate authority on disk, and servers and clients that it vouches for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ca = trustme.CA()
        self.ca_file = self._write("ca.pem", self.ca.cert_pem)

    def _write(self, name: str, blob: trustme.Blob) -> str:
        path = self.directory / name
        path.write_bytes(blob.bytes())
        return str(path)

    def server(self, *names: str, mutual: bool = False) -> Server:
        issued = self.ca.issue_cert(*names)
        chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
        pairs = [(issued.private_key_pem.bytes(), chain)]
        root = self.ca.cert_pem.bytes() if mutual else None
        return Server("tls", credentials=grpc.ssl_server_credentials(pairs, root, mutual))

    def client(self) -> dict[str, str]:
        issued = self.ca.issue_cert("client.example")
        return {
            "cert": self._write("cert.pem", issued.cert_chain_pems[0]),
            "key": self._write("key.pem", issued.private_key_pem),
        }


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def tls_endpoint(server: Server, **tls: str) -> Endpoint:
    return Endpoint("tls", server.url.replace("grpc:", "grpcs:"), tls=Tls(**tls))


def test_tls_by_the_endpoints_own_record(manner: Manner, authority: Authority) -> None:
    server = authority.server("127.0.0.1", "gpu-7.example")
    try:
        assert manner.call(router_of(tls_endpoint(server, ca=authority.ca_file)), "Who", b"", timeout=30) == b"tls"
        named = tls_endpoint(server, ca=authority.ca_file, server_name="gpu-7.example")
        assert manner.call(router_of(named), "Who", b"", timeout=30) == b"tls"
        wrong = tls_endpoint(server, ca=authority.ca_file, server_name="other.example")
        with pytest.raises(grpc.RpcError) as error:
            manner.call(router_of(wrong), "Who", b"", timeout=30)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        server.stop()


def test_mutual_tls_and_credentials_for_all(manner: Manner, authority: Authority) -> None:
    server = authority.server("127.0.0.1", mutual=True)
    client = authority.client()
    try:
        mutual = tls_endpoint(server, ca=authority.ca_file, **client)
        assert manner.call(router_of(mutual), "Who", b"", timeout=30) == b"tls"
        with pytest.raises(grpc.RpcError):
            manner.call(router_of(tls_endpoint(server, ca=authority.ca_file)), "Who", b"", timeout=30)
        files = (Path(path).read_bytes() for path in (authority.ca_file, client["key"], client["cert"]))
        credentials = grpc.ssl_channel_credentials(*files)
        plain = Endpoint("tls", server.url)
        assert manner.call(router_of(plain), "Who", b"", timeout=30, given={"credentials": credentials}) == b"tls"
    finally:
        server.stop()


def test_a_missing_certificate_file_is_named(manner: Manner, authority: Authority) -> None:
    endpoint = Endpoint("a", "grpcs://127.0.0.1:1", tls=Tls(ca=str(authority.directory / "nothing.pem")))
    with pytest.raises(gpuroute.ConfigError, match="endpoint 'a': TLS file cannot be read: No such file"):
        manner.call(router_of(endpoint, attempts=1), "Who", b"")


def test_authority_is_the_endpoints() -> None:
    """Read on the wire: grpcio shows it to no handler. A server's first frame (empty settings) makes the client speak."""
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def listen() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.sendall(b"\0\0\0\4\0\0\0\0\0")
                peer.settimeout(30)
                while method("Who").encode() not in heard or b"gpu-7.example" not in heard:
                    part = peer.recv(4096)
                    heard.extend(part)
                    if not part:
                        return

        thread = threading.Thread(target=listen)
        thread.start()
        url = f"grpc://127.0.0.1:{listener.getsockname()[1]}"
        router = router_of(Endpoint("a", url, authority="gpu-7.example"), attempts=1)
        with gpuroute.grpc.channel(router, "p") as channel:
            with pytest.raises(grpc.RpcError):
                channel.unary_unary(method("Who"))(b"", timeout=30)
        thread.join()
    assert b"gpu-7.example" in heard


# ------------------------------------------------------------------------------------------ peers in trouble


@pytest.fixture
def process() -> Iterator[Callable[[str], tuple[subprocess.Popen[str], str]]]:
    """Servers in processes of their own, which can be stopped and killed."""
    started: list[subprocess.Popen[str]] = []

    def start(name: str) -> tuple[subprocess.Popen[str], str]:
        code = (
            f"import sys, world; s = world.Server({name!r}); print(s.url, flush=True);"
            "s.service.heard = lambda: print('heard', flush=True); sys.stdin.read()"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", code], cwd=HERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(child)
        assert child.stdout is not None
        return child, child.stdout.readline().strip()

    yield start
    for child in started:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("pings", [QUICK_PINGS, ()], ids=["quick pings", "default"])
def test_a_frozen_peer_is_found_out(pings: Any, process: Any) -> None:
    """By HTTP/2 pings: by default 10 s after the last word and 2.5 s without an answer; thrice that on a busy machine."""
    child, url = process("frozen")
    router = router_of(url, connect_timeout="2s")
    with gpuroute.grpc.channel(router, "p", options=pings) as channel:
        assert undisturbed(lambda: channel.unary_unary(method("Who"))(b"", timeout=30) == b"frozen")
        pool = router.pool("p")
        pool.rules = replace(pool.rules, retry=replace(pool.rules.retry, attempts=1))
        call = channel.unary_unary(method("Slow")).future(b"", timeout=90)
        assert soon(lambda: in_flight(router) == 1 or call.done())  # by such a ping, as the machine stood still
        began = time.monotonic()
        os.kill(child.pid, signal.SIGSTOP)
        assert call.code() is grpc.StatusCode.UNAVAILABLE
        assert "ping timeout" in call.details()
        assert time.monotonic() - began < 40
        if pings:  # its port still accepts, its process says nothing: the limit of one connect applies
            with pytest.raises(grpc.RpcError) as error:
                channel.unary_unary(method("Who"))(b"", timeout=90)
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert drained(router)


class Between(Relay):
    """A relay that resets its clients when told to."""

    def reset(self) -> None:
        """RST to every client, and nobody is let in any more."""
        self.let_nobody_in()
        for sock in self.taken:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.shutdown(socket.SHUT_RD)  # wakes the thread that reads from it
            sock.close()


def test_a_reset_under_a_call_moves_it_and_under_a_stream_ends_it(manner: Manner) -> None:
    with servers(2) as (first, second), futures.ThreadPoolExecutor(2) as pool:
        between = Between(first)
        registry = FakeRegistry({"p": [between.url]})
        router = gpuroute.Router(registry, **PATIENT)
        with gpuroute.grpc.channel(router, "p") as channel:
            stream = channel.unary_stream(method("Count"))(b"2 wait", timeout=90)
            assert [next(stream), next(stream)] == [b"0", b"1"]
            call = pool.submit(manner.call, router, "Slow", b"x", timeout=90)
            assert soon(lambda: first.service.received == 2)
            registry.set({"p": [between.url, second.url]})
            second.service.release.set()
            between.reset()
            with pytest.raises(grpc.RpcError) as error:
                next(stream)
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
            assert call.result() == b"x"
        assert drained(router)
    assert second.service.received == 1


def test_long_silence_does_not_end_in_too_many_pings() -> None:
    """Two pings without data and no more, as servers want it: unlimited ones are answered with GOAWAY."""
    with servers(1) as (server,):
        ends: dict[str, Any] = {}

        def read(name: str, options: Any) -> None:
            with gpuroute.grpc.channel(router_of(server.url), "p", options=options) as channel:
                call = channel.unary_stream(method("Count"))(b"1 wait")
                ends[name] = None
                try:
                    list(call)
                except grpc.RpcError as error:
                    ends[name] = error

        ours = threading.Thread(target=read, args=("ours", OFTEN))
        unlimited = (*OFTEN, ("grpc.http2.max_pings_without_data", 0))
        theirs = threading.Thread(target=read, args=("unlimited", unlimited))
        ours.start()
        theirs.start()
        assert soon(lambda: ends.get("unlimited") is not None and "ours" in ends)
        assert "too many pings" in ends["unlimited"].details().lower().replace("_", " ")
        assert ends["ours"] is None, "it was sent away too"
        server.service.release.set()
        ours.join()
        assert ends["ours"] is None


def test_a_killed_peer_costs_the_caller_nothing(manner: Manner, process: Any) -> None:
    child, url = process("killed")
    with servers(1) as (other,):
        router = router_of(url, other.url)
        answers, failed, done = collections.Counter[bytes](), list[grpc.RpcError](), threading.Event()

        def work() -> None:
            while not done.is_set() and not failed:
                try:
                    answers[manner.call(router, "Who", b"", timeout=90)] += 1
                except grpc.RpcError as error:
                    failed.append(error)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            assert soon(lambda: len(answers) == 2 or failed)
            child.kill()
            until = answers[b"s0"] + 40
            assert soon(lambda: answers[b"s0"] >= until or failed, within=80)
        finally:
            done.set()
            for thread in threads:
                thread.join()
        assert not failed
        assert drained(router)


def test_a_query_of_death_does_not_walk_through_the_fleet(process: Any) -> None:
    """Each server is killed while it works on the call: two may be, no third."""
    children = [process(f"victim-{n}") for n in range(4)]
    router = router_of(*(url for _, url in children), attempts=4)
    for child, _ in children:
        threading.Thread(target=_kill_once_it_hears, args=(child,), daemon=True).start()
    with gpuroute.grpc.channel(router, "p") as channel, pytest.raises(grpc.RpcError) as error:
        channel.unary_unary(method("Slow"))(b"", timeout=90)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert soon(lambda: sum(child.poll() is not None for child, _ in children) == 2)


def _kill_once_it_hears(child: subprocess.Popen[str]) -> None:
    assert child.stdout is not None
    if child.stdout.readline():
        child.kill()


@pytest.mark.parametrize("grace", [30_000, 0])
def test_g4_goaway_by_age_costs_no_call_and_executes_none_twice(grace: int) -> None:
    """Case G4. With a grace, nothing that was executed is repeated even where only what never left may be; without
    one, the server cuts calls in progress, which the default repeats."""
    options = (("grpc.max_connection_age_ms", 300), ("grpc.max_connection_age_grace_ms", grace))
    with servers(2, options=options) as running:
        # A busy machine may need longer for a call than a connection lives: it is cut, or too late, again and again.
        router = router_of(*(server.url for server in running), attempts=20, retry_floor="1000/s")
        sent, failed = [0], collections.Counter[str]()
        until = time.monotonic() + 1.5

        def work(n: int) -> None:
            while time.monotonic() < until:
                sent[0] += 1  # one thread
                try:
                    assert call(b"%d" % sent[0], timeout=90)
                except grpc.RpcError as error:
                    failed[str(error)] += 1

        replay = "unsent" if grace else "unavailable"
        with gpuroute.grpc.channel(router, "p", replay=replay) as channel:
            call = channel.unary_unary(method("Echo"))
            work(0)
        assert not failed
        executed = [request for server in running for request in server.service.requests]
        if grace:
            assert len(executed) == len(set(executed)) == sent[0]
        assert all(view.breaker == "closed" for view in router.snapshot().pools["p"].endpoints)


def test_g4_a_stream_across_the_age_limit_is_cut_and_not_replayed() -> None:
    for age in (200, 800, 3200, 12_800):  # until both messages have come before the end, which is a matter of the machine
        options = (("grpc.max_connection_age_ms", age), ("grpc.max_connection_age_grace_ms", age))
        with servers(2, options=options) as running:
            router = router_of(*(server.url for server in running))
            messages, error = Manner("blocking").stream(router, "Count", b"2 wait", timeout=90)
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert messages == [b"0", b"1"][: len(messages)]
            received = sum(server.service.received for server in running)
        if len(messages) == 2 and received == 1:
            return
    assert (messages, received) == ([b"0", b"1"], 1)


# ------------------------------------------------------------------------------------------ fork (case G1)

FORK = """
import json, os, sys
import grpc, world, gpuroute, gpuroute.grpc
from gpuroute.testing import FakeRegistry

urls, warm = json.loads(sys.argv[1]), sys.argv[2] == "warm"
router = gpuroute.Router(FakeRegistry({"p": urls}), **world.PATIENT, policy="random")
channel = gpuroute.grpc.channel(router, "p")
call = channel.unary_unary(world.method("Who"))
if warm:
    call(b"", timeout=30)
children = []
for _ in range(4):
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            answers = [call(b"", timeout=60).decode() for _ in range(20)]
            result = {"answers": answers, "in_flight": world.in_flight(router)}
        except BaseException as error:
            result = {"error": repr(error)}
        os.write(write, json.dumps(result).encode())
        os._exit(0)
    os.close(write)
    children.append((pid, read))
found = []
for pid, read in children:
    with open(read) as pipe:
        found.append(json.loads(pipe.read() or "null"))
    os.waitpid(pid, 0)
parent = call(b"", timeout=30).decode()
print(json.dumps({"children": found, "parent": parent}))
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize("state", ["warm", "cold"])
def test_g1_forked_children_call_and_never_hang(state: str, process: Any) -> None:
    urls = [process(f"s{n}")[1] for n in range(3)]
    done = subprocess.run(
        [sys.executable, "-c", FORK, json.dumps(urls), state],
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={key: value for key, value in os.environ.items() if key != "GRPC_ENABLE_FORK_SUPPORT"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["parent"] in {"s0", "s1", "s2"}
    for child in found["children"]:
        assert "error" not in child, child
        assert len(child["answers"]) == 20
        assert child["in_flight"] == 0
    orders = {tuple(child["answers"]) for child in found["children"]}
    assert len(orders) > 1, "all children draw the same random numbers"


def test_g1_asyncio_in_a_forked_child(process: Any) -> None:
    _, url = process("s0")
    code = """
import asyncio, os, sys, world, gpuroute, gpuroute.grpc.aio
from gpuroute.testing import FakeRegistry
router = gpuroute.Router(FakeRegistry({"p": [sys.argv[1]]}), **world.PATIENT)
channel = gpuroute.grpc.aio.channel(router, "p")
call = channel.unary_unary(world.method("Who"))
async def run():
    return await call(b"", timeout=30)
pid = os.fork()
if not pid:
    os._exit(0 if asyncio.run(run()) == b"s0" else 1)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
assert asyncio.run(run()) == b"s0"
os._exit(status)
"""
    done = subprocess.run([sys.executable, "-c", code, url], cwd=HERE, timeout=110, check=False, capture_output=True)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------------------ connectivity


def test_a_pool_is_ready_when_one_endpoint_is() -> None:
    with servers(1) as (server,):
        router = router_of(refused_url(), refused_url(), server.url)
        with gpuroute.grpc.channel(router, "p") as channel:
            heard: list[grpc.ChannelConnectivity] = []
            hear = heard.append
            channel.subscribe(hear, try_to_connect=True)
            grpc.channel_ready_future(channel).result(timeout=30)
            assert soon(lambda: heard and heard[-1] is grpc.ChannelConnectivity.READY)
            assert heard[0] is grpc.ChannelConnectivity.IDLE
            # grpcio polls a subscribed channel from a thread, which raises if the channel is closed at that moment.
            channel.unsubscribe(hear)
            assert soon(lambda: not _polled(channel)), "channels are polled for nobody"


def _polled(channel: Any) -> list[Any]:
    return [peer for peer in channel._peers if peer.channel._connectivity_state.polling]


def test_who_subscribes_again_hears_again() -> None:
    with servers(1) as (server,), gpuroute.grpc.channel(router_of(server.url), "p") as channel:
        for _ in range(3):
            grpc.channel_ready_future(channel).result(timeout=30)
            assert soon(lambda: not _polled(channel))


def test_who_subscribes_again_hears_nothing_of_what_was() -> None:
    with servers(1) as (server,), gpuroute.grpc.channel(router_of(server.url), "p") as channel:
        grpc.channel_ready_future(channel).result(timeout=30)
        assert soon(lambda: not _polled(channel))
        server.stop()
        (peer,) = channel._peers
        ready = grpc.ChannelConnectivity.READY
        assert soon(lambda: peer.channel._channel.check_connectivity_state(False) != ready.value[0])
        heard: list[grpc.ChannelConnectivity] = []
        hear = heard.append
        channel.subscribe(hear)
        assert soon(lambda: heard)
        channel.unsubscribe(hear)
        assert ready not in heard, "nobody listens there any more"


def test_a_pool_is_ready_in_asyncio_when_one_endpoint_is() -> None:
    async def run(url: str) -> Any:
        async with gpuroute.grpc.aio.channel(router_of(refused_url(), refused_url(), url), "p") as channel:
            await asyncio.wait_for(channel.channel_ready(), 30)
            return channel.get_state()

    with servers(1) as (server,):
        assert asyncio.run(run(server.url)) is grpc.ChannelConnectivity.READY


def test_who_subscribes_is_told_no_state_before_the_channels_have_told_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, changed, begun = Connectivity._begin, Connectivity._changed, threading.Event()
    monkeypatch.setattr(Connectivity, "_begin", lambda self: (begin(self), begun.set()))
    monkeypatch.setattr(Connectivity, "_changed", lambda *told: begun.wait(30) and changed(*told))
    with servers(1) as (server,), gpuroute.grpc.channel(router_of(server.url), "p") as channel:
        channel.unary_unary(method("Who"))(b"", timeout=30)
        heard: queue.Queue[Any] = queue.Queue()
        channel.subscribe(heard.put)
        assert heard.get(timeout=30) is grpc.ChannelConnectivity.READY
        channel.unsubscribe(heard.put)
