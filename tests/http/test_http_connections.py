"""Connections: per endpoint, per event loop, TLS names, stale ones, those of endpoints that left, forked children."""

from __future__ import annotations

import asyncio
import gc
import importlib
import multiprocessing
import ssl
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trustme
from http_caller import attempts, endpoint, in_flight, router_for
from http_stub import Exchange, hang, ok, sse, status

import gpuroute
from gpuroute import Endpoint
from gpuroute.core.endpoint import Tls

if TYPE_CHECKING:
    from collections.abc import Callable

    from http_caller import Caller
    from http_stub import Stage

    Make = Callable[..., Caller]

pytestmark = pytest.mark.real_time

NAMES = ("httpx2", "httpx")


def fds() -> int:
    """Open files of this process, where the system tells."""
    table = Path("/proc/self/fd")
    return len(list(table.iterdir())) if table.is_dir() else 0


# ------------------------------------------------------------------------------------------------ H3


@pytest.mark.parametrize("name", NAMES)
def test_h3_one_client_over_several_event_loops(stubs: Stage, name: str, eventually: Any) -> None:
    a, b = stubs("a", "b")
    library = importlib.import_module(f"gpuroute.{name}")
    router = router_for([a, b])
    client = library.AsyncClient(router)

    async def calls() -> None:
        for _ in range(4):
            assert (await client.post("http://llama/v1/x")).status_code == 200

    asyncio.run(calls())
    gc.collect()
    eventually(lambda: a.open == b.open == 0, "the servers see all connections closed")
    before = fds()
    for _ in range(5):
        asyncio.run(calls())
    gc.collect()
    assert in_flight(router) == 0
    eventually(lambda: a.open == b.open == 0, "the servers see all connections closed")
    eventually(lambda: fds() <= before, "each loop's connections end with it")


@pytest.mark.parametrize("name", NAMES)
def test_h3_a_loop_that_ends_with_an_open_stream(stubs: Stage, name: str, eventually: Any) -> None:
    (a,) = stubs("a")
    a.behave = sse("x", then=hang)
    library = importlib.import_module(f"gpuroute.{name}")
    router = router_for([a])
    client = library.AsyncClient(router)
    kept: list[Any] = []

    async def leave_open(*, begin: bool) -> None:
        response = await client.send(client.build_request("POST", "http://llama/v1/x"), stream=True)
        if begin:
            chunks = response.aiter_raw()
            await anext(chunks)
            kept.append(chunks)
        kept.append(response)

    for begin in (True, False):
        asyncio.run(leave_open(begin=begin))
        kept.clear()
        gc.collect()
        eventually(lambda: in_flight(router) == 0, "the stream of the ended loop is let go")
    a.behave = ok

    async def call() -> int:
        return (await client.post("http://llama/v1/x")).status_code

    assert asyncio.run(call()) == 200


@pytest.mark.parametrize("name", NAMES)
def test_h3_two_threads_with_a_loop_each_and_a_sync_client_share_one_router(stubs: Stage, name: str) -> None:
    servers = stubs("a", "b")
    library = importlib.import_module(f"gpuroute.{name}")
    router = router_for(servers)
    client, sync = library.AsyncClient(router), library.Client(router)
    failures: list[BaseException] = []

    async def calls() -> None:
        answers = await asyncio.gather(*(client.post("http://llama/v1/x") for _ in range(20)))
        assert {answer.status_code for answer in answers} == {200}

    def guarded(work: Callable[[], Any]) -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    works = [lambda: asyncio.run(calls())] * 2 + [lambda: [sync.post("http://llama/v1/x") for _ in range(20)]]
    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert sum(len(server.came) for server in servers) == 60
    assert in_flight(router) == 0
    assert sum(view.served for view in router.snapshot().pools["llama"].endpoints) == 60
    sync.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_client_that_is_dropped_closes_its_connections(stubs: Stage, name: str, eventually: Any) -> None:
    (a,) = stubs("a")
    library = importlib.import_module(f"gpuroute.{name}")
    router = router_for([a])

    async def scenario() -> None:
        client = library.AsyncClient(router)
        await client.post("http://llama/v1/x")
        assert a.open == 1
        del client
        gc.collect()
        deadline = time.monotonic() + 60
        while a.open and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        assert a.open == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("name", NAMES)
def test_uvloop_serves_as_well(stubs: Stage, authority: trustme.CA, name: str) -> None:
    uvloop = pytest.importorskip("uvloop", reason="uvloop is not installed")
    (a,) = stubs("a", tls=server_context(authority, "a.test"))
    (b,) = stubs("b")
    library = importlib.import_module(f"gpuroute.{name}")
    router = router_for([endpoint(a, tls=Tls(server_name="a.test")), endpoint(b)])
    client = library.AsyncClient(router, verify=client_context(authority))

    async def calls() -> set[str]:
        answers = [await client.post("http://llama/v1/x", content=b"x" * 300_000) for _ in range(4)]
        return {answer.json()["endpoint"] for answer in answers}

    for _ in range(2):
        assert uvloop.run(calls()) == {"a", "b"}
    assert in_flight(router) == 0


# ------------------------------------------------------------------------------------------------ H5


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


def server_context(authority: trustme.CA, *names: str, client_ca: trustme.CA | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(*names).configure_cert(context)
    if client_ca is not None:
        client_ca.configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def test_h5_tls_checks_the_name_of_the_registry(stubs: Stage, caller: Make, authority: trustme.CA) -> None:
    seen: list[str | None] = []
    context = server_context(authority, "backend-a.test")
    context.sni_callback = lambda _, name, __: seen.append(name)
    (a,) = stubs("a", tls=context)
    trust = client_context(authority)
    named = endpoint(a, tls=Tls(server_name="backend-a.test"))
    client = caller([named], verify=trust)
    assert client.post(headers={"host": "caller.test"}).status_code == 200
    assert seen == ["backend-a.test"]
    assert a.came[0].header("host") == f"127.0.0.1:{a.port}", "the endpoint's own authority"
    by_authority = caller([endpoint(a, authority="backend-a.test:8443")], verify=trust)
    assert by_authority.post().status_code == 200
    assert a.came[1].header("host") == "backend-a.test:8443"
    for wrong in (Tls(server_name="backend-b.test"), Tls()):
        strict = caller([endpoint(a, tls=wrong)], verify=trust)
        with pytest.raises(strict.library.ConnectError, match=r"(?i)certificate|hostname|mismatch"):
            strict.post(extensions={"gpuroute": {"attempts": 1}})
    untrusted = caller([named])
    with pytest.raises(untrusted.library.ConnectError, match=r"(?i)certificate"):
        untrusted.post(extensions={"gpuroute": {"attempts": 1}})
    assert len(a.came) == 2


def test_h5_every_endpoint_may_have_its_own_ca_and_client_certificate(
    stubs: Stage, caller: Make, authority: trustme.CA, tmp_path: Path
) -> None:
    other = trustme.CA()
    (a,) = stubs("a", tls=server_context(authority, "127.0.0.1", client_ca=authority))
    (b,) = stubs("b", tls=server_context(other, "127.0.0.1"))
    mine = authority.issue_cert("client.test")
    files = {"ca": authority.cert_pem, "other": other.cert_pem, "key": mine.private_key_pem}
    paths = {name: str(tmp_path / f"{name}.pem") for name in (*files, "cert")}
    for name, blob in files.items():
        blob.write_to_path(paths[name])
    mine.cert_chain_pems[0].write_to_path(paths["cert"])
    own = Tls(ca=paths["ca"], cert=paths["cert"], key=paths["key"])
    client = caller([endpoint(a, tls=own), endpoint(b, tls=Tls(ca=paths["other"]))])
    assert {client.post().json()["endpoint"] for _ in range(2)} == {"a", "b"}
    missing = caller([endpoint(a, tls=Tls(ca=str(tmp_path / "none.pem")))])
    with pytest.raises(gpuroute.ConfigError, match="TLS files of an endpoint cannot be used"):
        missing.post()


def test_h5_userinfo_reaches_no_endpoint_by_chance(stubs: Stage, caller: Make) -> None:
    (a,) = stubs("a")
    client = caller([endpoint(a, url=f"http://user:secret@127.0.0.1:{a.port}")])
    client.post()
    assert a.came[0].header("authorization") is None
    assert a.came[0].header("host") == f"127.0.0.1:{a.port}"
    client.post("http://me:mine@llama/v1/x")  # the client library makes this an Authorization header of the caller's
    assert a.came[1].header("authorization") == "Basic bWU6bWluZQ=="
    assert b"@" not in a.came[1].target


def test_h4_hosts_and_ports(caller: Make) -> None:
    from gpuroute.transports.pools import Limits, Pools, Way

    client = caller(router_for([Endpoint("x", "http://h")]))
    library = client.ours.LIBRARY
    pools = Pools(library, Way(library, verify=False), Limits(), loop=None)
    cases = {
        "http://h": ("h", 80, b"h"),
        "http://h:80": ("h", 80, b"h"),
        "https://h:443/x": ("h", 443, b"h"),
        "https://h:8443": ("h", 8443, b"h:8443"),
        "http://[::1]:8000/v1": ("::1", 8000, b"[::1]:8000"),
        "http://[::1]": ("::1", 80, b"[::1]"),
        "http://HOST.Example:81": ("host.example", 81, b"host.example:81"),
    }
    for url, wanted in cases.items():
        client.router.registry.set({"llama": [Endpoint("x", url)]})
        pool = client.router.pool("llama")
        link = pools.link(pool.snapshot.states[0], pool, client.router.version)
        assert (link.address.host, link.address.port, link.headers[0][1]) == wanted
    client.router.registry.set({"llama": [Endpoint("x", "grpc://h:1")]})
    with pytest.raises(gpuroute.NoEndpointAvailable, match="no endpoint for it, or none in the protocol of this client"):
        client.post()


# ------------------------------------------------------------------------------------------------ stale connections


def test_a_connection_that_the_server_closed_is_not_used(stubs: Stage, caller: Make, eventually: Any) -> None:
    (a,) = stubs("a", idle=0.4)
    client = caller([a])
    for _ in range(3):
        before = a.connections
        answer = client.post(extensions={"gpuroute": {"attempts": 1}})
        assert answer.extensions["gpuroute"]["timings"]["connect_s"] is not None
        assert a.connections > before
        eventually(lambda: client.breathe() or a.open == 0, "the server hangs up")


def test_a_close_that_crosses_the_request_is_retried_on_a_new_connection(stubs: Stage, caller: Make) -> None:
    """The server closes an idle connection at the moment when the request is written: it has not been processed."""
    (a,) = stubs("a")

    async def closes_the_kept_ones(exchange: Exchange) -> None:
        served = sum(came.connection == exchange.came.connection for came in a.came)
        if served > 1:
            exchange.hang_up()
        else:
            exchange.reply(200, b"x")

    a.behave = closes_the_kept_ones
    client = caller([a])
    for _ in range(3):
        assert attempts(client.post(extensions={"gpuroute": {"attempts": 1}})) == ["a success"]
    view = client.router.snapshot().pools["llama"].endpoints[0]
    assert (view.last_error, view.served) == ("", 3)
    parts = [b"one", b"shot"]

    def one_shot() -> Any:
        yield from parts

    async def async_one_shot() -> Any:
        for part in parts:
            yield part

    with pytest.raises((client.library.RemoteProtocolError, client.library.ReadError)):
        client.post(content=async_one_shot() if client.is_async else one_shot())


def test_a_server_that_dies_on_a_new_connection_is_not_asked_again(stubs: Stage, caller: Make) -> None:
    (a,) = stubs("a")
    a.behave = lambda exchange: _hang_up(exchange)
    client = caller([a])
    with pytest.raises((client.library.RemoteProtocolError, client.library.ReadError)):
        client.post(extensions={"gpuroute": {"attempts": 1}})
    assert len(a.came) == 1


async def _hang_up(exchange: Exchange) -> None:
    exchange.hang_up()


# ------------------------------------------------------------------------------------------------ bounds and departures


def test_idle_connections_expire(stubs: Stage, caller: Make, eventually: Any) -> None:
    a, b = stubs("a", "b")
    client = caller([a, b])
    limits = client.library.Limits(max_keepalive_connections=5, keepalive_expiry=0.5)
    client = caller(client.router, limits=limits)

    def both_are_kept() -> bool:  # if the machine does both within the half second
        client.post()
        client.post()
        client.breathe()
        return (a.open, b.open) == (1, 1)

    eventually(both_are_kept, "both connections are kept")
    before = a.connections
    time.sleep(0.51)
    client.post()  # to a: which also closes b's
    eventually(lambda: client.breathe() or (a.open, b.open) == (1, 0), "idle connections are closed")
    assert a.connections == before + 1


def test_idle_connections_are_bounded_over_all_endpoints(stubs: Stage, caller: Make, eventually: Any) -> None:
    from gpuroute.transports.pools import Limits

    servers = stubs(*"abcdefgh")
    client = caller(list(servers))
    client.transport()._limits = Limits(idle=2, idle_total=3)
    pools = client.transport()._make_pools(None)
    if not client.is_async:
        client.transport()._all = pools
    for _ in range(16):
        client.post()
    eventually(lambda: client.breathe() or sum(server.open for server in servers) == 3, "three connections are kept")


def test_departed_endpoints_keep_their_streams_and_lose_their_connections(
    stubs: Stage, caller: Make, eventually: Any
) -> None:
    a, b = stubs("a", "b")
    gate, both, answer = asyncio.Event(), asyncio.Event(), status(200)
    together: list[Exchange] = []

    async def half(exchange: Exchange) -> None:
        exchange.start(content_type="text/plain")
        await exchange.chunk(b"one")
        await gate.wait()
        await exchange.chunk(b"two")
        exchange.end()

    async def pair(exchange: Exchange) -> None:
        together.append(exchange)
        if len(together) == 2:
            both.set()
        await both.wait()  # so that neither finds the other's connection free
        await answer(exchange)

    client = caller([a])
    client.post()
    a.behave = half
    stream = client.open()
    a.behave = pair
    client.many(2)
    assert a.open == 3
    client.router.registry.set({"llama": [endpoint(b)]})
    assert client.post().json()["endpoint"] == "b"
    eventually(lambda: client.breathe() or a.open == 1, "idle connections of a are closed, its stream goes on")
    a.loop.call_soon_threadsafe(gate.set)
    assert client.read(stream) == b"onetwo"
    eventually(lambda: client.breathe() or a.open == 0, "its last connection is closed too")
    client.router.registry.set({"llama": [endpoint(a), endpoint(b)]})
    assert {client.post().status_code for _ in range(2)} == {200}


def test_a_changed_record_takes_effect(stubs: Stage, caller: Make) -> None:
    (a,) = stubs("a")
    client = caller([a])
    client.post()
    client.router.registry.set({"llama": [endpoint(a)]})  # read again, the same
    client.post()
    assert a.connections == 1
    client.router.registry.set({"llama": [endpoint(a, headers={"x-new": "1"})]})
    client.post()
    assert a.came[-1].header("x-new") == "1"


def test_warm_endpoints_are_known(stubs: Stage, caller: Make) -> None:
    a, b = stubs("a", "b")
    client = caller([a, b])
    client.post()
    pool = client.router.pool("llama")

    def warm() -> dict[str, bool]:
        return {state.id: client.transport().is_warm(state) for state in pool.snapshot.states}

    async def later() -> dict[str, bool]:
        return warm()

    assert (client.run(later()) if client.is_async else warm()) == {"a": True, "b": False}


# ------------------------------------------------------------------------------------------------ fork


def _child(name: str, kind: str, client: Any, results: Any) -> None:
    try:
        if kind == "sync":
            answers = [client.post("http://llama/v1/x", timeout=60.0).json()["endpoint"] for _ in range(4)]
        else:

            async def calls() -> list[str]:
                return [(await client.post("http://llama/v1/x", timeout=60.0)).json()["endpoint"] for _ in range(4)]

            answers = asyncio.run(calls())
        results.put((name, answers))
    except BaseException as error:
        results.put((name, repr(error)))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_forked_children_use_connections_of_their_own(stubs: Stage, kind: str) -> None:
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("this system cannot fork")
    context = multiprocessing.get_context("fork")
    a, b = stubs("a", "b")
    library = importlib.import_module("gpuroute.httpx2")
    router = router_for([a, b])
    client = library.Client(router) if kind == "sync" else library.AsyncClient(router)
    if kind == "sync":
        client.post("http://llama/v1/x")
    else:

        async def call() -> None:
            await client.post("http://llama/v1/x")

        asyncio.run(call())
    results = context.Queue()
    children = [context.Process(target=_child, args=(f"child {n}", kind, client, results)) for n in range(3)]
    for child in children:
        child.start()
    found = dict(results.get(timeout=90) for _ in children)
    for child in children:
        child.join(60)
    assert {tuple(sorted(answers)) for answers in found.values()} == {("a", "a", "b", "b")}, found
    if kind == "sync":
        connections = a.connections + b.connections
        client.post("http://llama/v1/x")
        client.post("http://llama/v1/x")
        assert a.connections + b.connections <= connections + 1, "the parent's own connection lives on"
