"""The fleet digest: collected from agents, served in deltas, read by a router; and what it must not be talked into."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import httpx2
import pytest
import trustme
from agent.process import KEY as PROCESS_KEY
from agent.process import AgentProcess
from agent.stage import KEY, AgentThread, desks
from agent.test_agent_grpc import GrpcAgent
from hypothesis import given
from hypothesis import strategies as st
from ports import closed_udp_port, own_port

from gpuroute.agent.book import Sample
from gpuroute.agent.collect import Collector, target_of
from gpuroute.agent.digest import REMEMBERED, Digest
from gpuroute.agent.digest_server import DigestServer
from gpuroute.core import digest
from gpuroute.core.asking import EngineState, Garbled, decode_ask, encode_bid, open_message
from gpuroute.core.digest import Entry, View, encode, learn_digest, mac_of, tag_of
from gpuroute.core.endpoint import Endpoint
from gpuroute.core.fleet import Fleet, PoolSpec
from gpuroute.core.pool import Pool, PoolRules
from gpuroute.core.report import Report
from gpuroute.errors import ConfigError
from gpuroute.registry import digest as reading
from gpuroute.registry import static_registry
from gpuroute.registry.digest import DigestWatch
from gpuroute.router import Router
from gpuroute.testing import GpuServer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpuroute.core.digest import Key

pytestmark = pytest.mark.real_time

SECRET = KEY.encode()
IDLE = Entry(0, 0, 0, 0, 0, 1)


def busy(waiting: int) -> Entry:
    return Entry(0, 4, waiting, waiting * 100, 500, 1)


# ------------------------------------------------------------------------------------------ versions and bodies

NAMES = st.sampled_from([("p", "gpu-0"), ("p", "gpu-1"), ("q", "gpu-0"), ("q", "gpu-9")])
ROUNDS = st.lists(
    st.tuples(
        st.dictionaries(NAMES, st.integers(0, 3).map(busy)), st.sets(NAMES), st.sets(st.integers(0, 2)), st.booleans()
    ),
    min_size=1,
    max_size=25,
)


@given(ROUNDS)
def test_every_reader_knows_what_the_digest_knows(
    rounds: list[tuple[dict[Key, Entry], set[Key], set[int], bool]],
) -> None:
    """Whenever it reads, and whatever it has missed: the same endpoints and counts, and only what was heard is fresh."""
    digest, views = Digest("one"), [View() for _ in range(3)]
    known: dict[Key, Entry] = {}
    for number, (said, more, readers, zipped) in enumerate(rounds):
        members = {*said, *more}
        digest.update(said, members, float(number))
        known = {key: entry for key, entry in {**known, **said}.items() if key in members}
        for reader in readers:
            view = views[reader]
            body, encoding = digest.body(view.id, view.version, compressed=zipped)
            heard = view.apply(gzip.decompress(body) if encoding else body, float(number))
            assert view._entries == known
            fresh = {(pool, name): r for pool, reports in heard.items() for name, r in reports.items()}
            assert fresh == {key: entry.report(float(number)) for key, entry in said.items()}


def test_a_delta_holds_only_what_changed_and_old_readers_get_all() -> None:
    digest = Digest("one")
    entries = {("p", f"gpu-{number}"): busy(number) for number in range(200)}
    digest.update(entries, entries, 0.0)
    whole = json.loads(digest.body("", 0).data)
    assert (whole["since"], len(whole["pools"]["p"])) == (0, 200)
    changed = {**entries, ("p", "gpu-7"): busy(70)}
    digest.update(changed, changed, 1.0)
    delta = digest.body("one", 1).data
    assert json.loads(delta)["pools"] == {"p": {"gpu-7": list(busy(70))}}
    assert len(delta) < 200 < len(digest.body("another", 1).data)
    for number in range(REMEMBERED):
        digest.update(changed, changed, 2.0 + number)
    assert json.loads(digest.body("one", 1).data)["since"] == 0, "too long ago for a delta"
    assert digest.body("one", digest.version + 5).data == digest.body("", 0).data, "a version of the future"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=7) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=20,
)


@given(
    st.one_of(
        st.binary(max_size=100),
        VALUES.map(lambda value: json.dumps(value).encode()),
        st.fixed_dictionaries(
            {"v": st.just(1)} | dict.fromkeys(("id", "version", "since", "pools", "silent", "gone"), VALUES)
        ).map(lambda value: json.dumps(value).encode()),
        st.lists(VALUES, min_size=6, max_size=6).map(lambda said: encode("x", 2, 0, {("p", "a"): said}, (), ())),
    )
)
def test_what_is_no_digest_is_garbled_and_changes_nothing(body: bytes) -> None:
    view = View()
    view.apply(encode("one", 1, 0, {("p", "a"): IDLE}, (), ()), 0.0)
    try:
        heard = view.apply(body, 1.0)
    except Garbled:
        assert (view.id, view.version, view._entries) == ("one", 1, {("p", "a"): IDLE})
    else:
        for reports in heard.values():
            assert all(r.running >= 0 and r.waiting >= 0 and 0 <= r.kv_usage <= 1 for r in reports.values())


@pytest.mark.parametrize("said", [(9, 0, 0, 0, 0, 0), (0, -1, 0, 0, 0, 0), (0, 0, 0, -2, 0, 0), (0, 0, 0, 0, 1001, 0),
                                  (0, 0, 0, 0, 0, 1 << 60), (0, True, 0, 0, 0, 0), (0, 0, 0, 0, 0)])  # fmt: skip
def test_counts_that_cannot_be_are_garbled(said: tuple[int, ...]) -> None:
    with pytest.raises(Garbled):
        View().apply(encode("one", 1, 0, {("p", "a"): said}, (), ()), 0.0)  # type: ignore[dict-item]


def test_a_delta_to_something_else_is_garbled() -> None:
    view = View()
    view.apply(encode("one", 1, 0, {}, (), ()), 0.0)
    for ident, since in (("two", 1), ("one", 7)):
        with pytest.raises(Garbled):
            view.apply(encode(ident, 8, since, {}, (), ()), 0.0)


# ------------------------------------------------------------------------------------------ what a pool learns


def test_deltas_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "MOST", 3)
    view = View()
    view.apply(encode("a", 1, 0, {("p", str(n)): IDLE for n in range(2)}, (), ()), 0.0)
    with pytest.raises(Garbled, match="too many"):
        view.apply(encode("a", 2, 1, {("p", f"more-{n}"): IDLE for n in range(2)}, (), ()), 0.0)
    assert (len(view), view.version) == (2, 1)


def pool_of(count: int) -> Pool:
    endpoints = tuple(Endpoint(f"gpu-{number}", f"http://127.0.0.1:{number + 1}") for number in range(count))
    return Pool(PoolSpec("p", endpoints), PoolRules(), random=lambda: 0.5)


def test_a_digest_says_how_long_queues_were_and_not_who_is_idle() -> None:
    """All clients have the same one: endpoints that it would make candidates, all would run to."""
    pool = pool_of(20)
    reports = {f"gpu-{number}": busy(number % 2).report(10.0) for number in range(20)}
    assert learn_digest(pool, {**reports, "unknown": IDLE.report(10.0)}) == 20
    assert [state.report for state in pool.snapshot.states] == list(reports.values())
    assert list(pool.shared.speeds.calm()) == []
    assert learn_digest(pool, reports) == 0, "the same again is no news"


def test_fresher_news_stay() -> None:
    pool = pool_of(1)
    state = pool.snapshot.by_id["gpu-0"]
    state.report = fresh = Report(11.0, source="agent:READY")
    learn_digest(pool, {"gpu-0": busy(3).report(10.0)})
    assert state.report is fresh
    learn_digest(pool, {"gpu-0": busy(3).report(12.0)})
    assert state.report.source == "digest:READY"


def test_an_engine_that_takes_no_calls_is_dear_and_does_not_count_as_backlog() -> None:
    pool = pool_of(2)
    hung = Entry(int(EngineState.HUNG), 3, 0, -1, 0, 1).report(1.0)
    learn_digest(pool, {"gpu-0": hung, "gpu-1": IDLE.report(1.0)})
    assert hung.queued_tokens >= 1_000_000
    assert pool.shared.speeds.backlog == 0


# ------------------------------------------------------------------------------------------ collecting


class Collected:
    """A collector, and if it is asked for a server, on a loop in a thread."""

    def __init__(
        self,
        fleet: Fleet | None = None,
        secret: bytes = SECRET,
        keys: Sequence[bytes] | None = None,
        pair: tuple[str, str] | None = None,
    ) -> None:
        self.digest = Digest("it")
        self.collector = Collector(self.digest, secret)
        pools = {name: pool.endpoints for name, pool in fleet.pools.items()} if fleet else {"p": []}
        accepted = ([secret] if secret else []) if keys is None else keys
        self.server = DigestServer(self.collector, static_registry(pools), accepted, pair=pair)
        self.url = ""
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.url = await self.server.start("127.0.0.1", 0)
        self._started.set()
        await self._stop.wait()
        await self.server.close()

    def ask(self, path: str = "/digest", headers: dict[str, str] | None = None) -> Any:
        return httpx2.get(self.url + path, headers=headers, timeout=60, trust_env=False)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


@pytest.fixture(scope="module", name="pem")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths of a CA, of the digest's certificate and its key, and of a foreign CA."""
    directory, authority = tmp_path_factory.mktemp("pem"), trustme.CA()
    issued = authority.issue_cert("localhost")
    found = {name: str(directory / name) for name in ("ca", "agent", "agent_key", "foreign")}
    authority.cert_pem.write_to_path(found["ca"])
    trustme.CA().cert_pem.write_to_path(found["foreign"])
    issued.cert_chain_pems[0].write_to_path(found["agent"])
    issued.private_key_pem.write_to_path(found["agent_key"])
    return found


def fleet_of(endpoints: Sequence[Endpoint], pool: str = "p") -> Fleet:
    return Fleet({pool: PoolSpec(pool, tuple(endpoints))})


def entries(digest: Digest) -> dict[str, Entry]:
    return {key[1]: known.entry for key, known in digest._known.items()}


def test_agents_are_collected_over_both_transports(eventually: Callable[..., None]) -> None:
    given_udp, given_grpc = desks(3), desks(5)[3:]
    given_udp[1].sampled(Sample(math.inf, running=3, waiting=2, kv_usage=0.25))
    given_udp[2].state = EngineState.DRAINING
    with AgentThread(given_udp) as udp, GrpcAgent(given_grpc, (SECRET,)) as grpc:
        silent = Endpoint("silent", "http://127.0.0.1:1", agent=f"udp://127.0.0.1:{closed_udp_port()}")
        bare = Endpoint("bare", "http://127.0.0.1:1")
        with Collected(fleet_of([*udp.endpoints(), *grpc.endpoints(), silent, bare])) as it:
            eventually(lambda: len(entries(it.digest)) == 5, "all agents have answered")
            assert entries(it.digest)["gpu-1"] == Entry(0, 3, 2, -1, 250, 1), "requests that nobody announced: no tokens"
            assert entries(it.digest)["gpu-2"].state == EngineState.DRAINING
            assert (len(it.collector.targets), it.collector.without) == (6, 1)
            rows = {"gpuroute_digest_agents 6", "gpuroute_digest_silent 1", "gpuroute_digest_without_agent 1"}
            eventually(lambda: rows <= {*it.ask("/metrics").text.splitlines()}, "all but one are heard in one round")
            eventually(lambda: it.ask("/healthz").text == "ok\n", "a round is over")


def test_who_does_not_answer_becomes_silent_and_who_leaves_is_gone(eventually: Callable[..., None]) -> None:
    lost: list[bool] = []
    with AgentThread(desks(2), lose=lambda data: bool(lost) and data[7] == 1) as agent:
        endpoints = agent.endpoints()
        with Collected(fleet_of(endpoints)) as it:
            eventually(lambda: len(entries(it.digest)) == 2 and not it.digest.silent, "both have answered")
            lost.append(True)
            eventually(lambda: it.digest.silent == {("p", "gpu-1")}, "one is silent")
            it.collector.adopt(fleet_of(endpoints[:1]))
            eventually(lambda: list(entries(it.digest)) == ["gpu-0"], "and gone with its record")


def test_names_are_looked_up(eventually: Callable[..., None]) -> None:
    with AgentThread(desks(1)) as agent:
        named = Endpoint("gpu-0", "http://127.0.0.1:1", agent=f"udp://localhost:{agent.port}/0")
        nowhere = Endpoint("x", "http://127.0.0.1:1", agent="udp://no-such-host.invalid:1")
        with Collected(fleet_of([named, nowhere])) as it:
            eventually(lambda: "gpu-0" in entries(it.digest) or it.digest.version > 60, "it is found")
            if "gpu-0" not in entries(it.digest):
                pytest.skip("localhost is not 127.0.0.1 here")


def test_answers_that_are_not_the_agents_are_not_believed(eventually: Callable[..., None]) -> None:
    """Of another key, for another endpoint: a wrong port or a forger moves nobody's load."""
    with AgentThread(desks(1), key="another") as foreign, AgentThread(desks(2)) as agent:
        wrong = Endpoint("gpu-7", "http://127.0.0.1:1", agent=f"udp://127.0.0.1:{agent.port}/1")
        with Collected(fleet_of([*foreign.endpoints(), wrong])) as it:
            eventually(lambda: it.collector.garbled >= 2, "the stranger has answered")
            assert entries(it.digest) == {}


def test_a_bid_from_elsewhere_or_recorded_is_not_believed() -> None:
    collector = Collector(Digest("it"), SECRET)
    (desk,) = desks(1)
    sent: list[bytes] = []

    class Wire:
        def sendto(self, data: bytes, address: object) -> None:
            sent.append(data)

    async def rounds() -> None:
        collector.adopt(fleet_of([Endpoint("gpu-0", "http://127.0.0.1:1", agent="udp://127.0.0.1:7/0")]))
        collector._socket = lambda family: Wire()  # type: ignore[method-assign,assignment,return-value]
        for number in range(2):
            asked = asyncio.ensure_future(collector.round())
            while len(sent) < 2 * number + 1:
                await asyncio.sleep(0)
            header, body = open_message(sent[-1], (SECRET,))
            answer = encode_bid(desk.bid(header.id, *decode_ask(body), 0.0), header.id, header.sent_ms, 0, 0, SECRET)
            if number == 0:
                collector._heard(answer, None, ("127.0.0.1", 8))
                collector._heard(answer[:-1], None, ("127.0.0.1", 7))
                recorded = answer
            else:
                collector._heard(recorded, None, ("127.0.0.1", 7))
                assert collector._said == {}
                collector._heard(answer, None, ("127.0.0.1", 7))
            await asked

    asyncio.run(rounds())
    assert collector.garbled == 3
    assert list(entries(collector.digest)) == ["gpu-0"]


@given(st.binary(max_size=120))
def test_garbage_never_ends_a_collector(data: bytes) -> None:
    collector = Collector(Digest("it"))
    collector._heard(data, None, ("127.0.0.1", 1))
    assert collector.garbled == 1


@pytest.mark.parametrize(
    ("agent", "found"),
    [
        ("udp://h:1/2", ("udp", "h", 1, 2)),
        ("grpcs://h:1", ("grpcs", "h", 1, 0)),
        ("udp://[::1]:5", ("udp", "::1", 5, 0)),
        ("", None),
        ("udp://h", None),
        ("udp://h:99999", None),
        ("udp://h:1/70000", ("udp", "h", 1, 0)),
        ("udp://h:1/" + "9" * 5_000, ("udp", "h", 1, 0)),
        ("http://h:1", None),
    ],
)
def test_addresses(agent: str, found: tuple[str, str, int, int] | None) -> None:
    target = target_of(("p", "e"), agent)
    assert (target[1:] if target else None) == found


# ------------------------------------------------------------------------------------------ serving


def signed(secret: bytes = SECRET, nonce: str = "n", off_ms: int = 0) -> dict[str, str]:
    sent = int(time.time() * 1000) + off_ms
    return {"Gpuroute-Auth": f"{sent} {nonce} {mac_of(secret, sent, nonce)}"}


def test_only_who_knows_the_key_is_answered_and_answers_are_authentic(eventually: Callable[..., None]) -> None:
    with AgentThread(desks(1)) as agent, Collected(fleet_of(agent.endpoints()), keys=[SECRET, b"next"]) as it:
        eventually(lambda: entries(it.digest), "it is collected")
        wrong = [{}, signed(b"foreign"), signed(off_ms=-60_000), signed(off_ms=60_000), {"Gpuroute-Auth": "x y z"},
                 {"Gpuroute-Auth": "1 2"}, {"Gpuroute-Auth": f"{'9' * 400} n m"}]  # fmt: skip
        for headers in wrong:
            assert it.ask(headers=headers).status_code == 401
        assert it.server.refused == len(wrong)
        for secret in (SECRET, b"next"):
            answer = it.ask(headers=signed(secret, "question"))
            assert answer.status_code == 200
            age = int(answer.headers["Gpuroute-Age"])
            body = answer.content
            assert answer.headers["Gpuroute-Tag"] == tag_of(secret, "question", age, body)
            assert tag_of(secret, "another", age, body) != tag_of(secret, "question", age, body)


def test_deltas_unchanged_compressed_and_bad_questions(eventually: Callable[..., None]) -> None:
    with Collected(secret=b"") as it:
        assert it.ask().status_code in {200, 503}
        eventually(lambda: it.digest.version, "a round is over")
        known = {("p", f"gpu-{number}"): busy(number) for number in range(100)}
        it.collector.digest = frozen = Digest("frozen")
        frozen.update(known, known, time.monotonic())
        frozen.update = lambda *_: None  # type: ignore[method-assign]
        whole = it.ask()
        assert (whole.status_code, whole.headers["Content-Encoding"]) == (200, "gzip")
        assert len(whole.json()["pools"]["p"]) == 100
        plain = it.ask(headers={"Accept-Encoding": "identity"})
        assert "Content-Encoding" not in plain.headers
        version = whole.json()["version"]
        same = it.ask(f"/digest?of=frozen&since={version}")
        assert (same.status_code, same.content) == (304, b"")
        for query in ("of=frozen&since=-1", "of=frozen&since=x", "since=%b2", "of=other&since=1", "a=b&of"):
            assert it.ask(f"/digest?{query}").json()["since"] == 0
        assert it.ask("/else").status_code == 404
        assert httpx2.post(it.url + "/digest", content=b"x", timeout=60, trust_env=False).status_code == 400
        with httpx2.Client(timeout=60, trust_env=False) as client:
            ports = {client.get(it.url + "/digest").extensions["network_stream"].get_extra_info("client_addr")
                     for _ in range(5)}  # fmt: skip
        assert len(ports) == 1, "connections are kept"


def test_an_open_address_needs_a_key() -> None:
    async def start(**options: Any) -> None:
        server = DigestServer(Collector(Digest("it")), static_registry(["http://127.0.0.1:1"]), **options)
        await server.start("0.0.0.0", 0)
        await server.close()

    with pytest.raises(ConfigError, match="GPUROUTE_AGENT_KEY"):
        asyncio.run(start())
    asyncio.run(start(keys=[b"k"]))
    asyncio.run(start(insecure=True))


# ------------------------------------------------------------------------------------------ reading


class Reader:
    """A watch that keeps what it hears."""

    def __init__(self, *urls: str, secret: bytes = SECRET, ca: str | None = None) -> None:
        self.heard: list[dict[str, Any]] = []
        own: dict[str, Any] = {"clock": time.monotonic, "random": lambda: 0.0}
        self.watch = DigestWatch(urls, self._deliver, secret=secret, ca=ca, **own)

    def _deliver(self, heard: Any) -> bool:
        self.heard.append(heard)
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.watch.close()


def test_ages_are_never_younger_than_the_truth(eventually: Callable[..., None]) -> None:
    with AgentThread(desks(1)) as agent, Collected(fleet_of(agent.endpoints())) as it, Reader(it.url) as reader:

        def times() -> list[float]:
            return [heard["p"]["gpu-0"].at for heard in reader.heard if "gpu-0" in heard.get("p", {})]

        eventually(lambda: max(times(), default=0.0) > min(times(), default=0.0), "it is read, and read again")
        assert max(times()) <= it.digest.as_of + 0.002


def test_a_spare_takes_over_at_once_and_trouble_is_said(
    eventually: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    nobody = f"http://127.0.0.1:{own_port()}"
    with AgentThread(desks(1)) as agent:
        with Collected(fleet_of(agent.endpoints())) as it, Reader(nobody, it.url) as reader:
            eventually(lambda: reader.heard, "the spare is read")
            eventually(lambda: (reader.watch.url, reader.watch.error) == (it.url, None), "and is kept to")
        with Reader(nobody, nobody) as reader:
            eventually(lambda: reader.watch.error, "the trouble is known")
        assert "calls go on without" in caplog.text


@pytest.mark.parametrize("secret", [b"foreign", b""])
def test_a_digest_of_another_key_is_not_believed(secret: bytes, eventually: Callable[..., None]) -> None:
    with AgentThread(desks(1)) as agent, Collected(fleet_of(agent.endpoints())) as it:
        eventually(lambda: entries(it.digest), "it is collected")
        with Reader(it.url, secret=secret) as reader:
            eventually(lambda: "401" in str(reader.watch.error), "it is refused")
            assert reader.heard == []
    with Collected(secret=b"") as unsigned, Reader(unsigned.url) as reader:
        eventually(lambda: unsigned.digest.version and "not authentic" in str(reader.watch.error), "nor an unsigned one")
        assert reader.heard == []


@pytest.mark.parametrize("answer", [
    b"", b"HTTP/1.1 200 OK\r\n\r\n", b"SSH-2.0\r\n", b"HTTP/1.1 500 No\r\nContent-Length: 2\r\n\r\nno",
    b"HTTP/1.1 200 OK\r\nGpuroute-Age: 99999999\r\nContent-Length: 2\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\nGpuroute-Age: 1\r\nContent-Length: 2\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\nGpuroute-Age: 1\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\nGpuroute-Age: 1\r\nContent-Length: 99999999\r\n\r\n{}",
])  # fmt: skip
def test_whatever_is_served_instead_is_trouble_and_never_a_crash(answer: bytes, eventually: Callable[..., None]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)
        stop = threading.Event()

        def serve() -> None:
            while not stop.is_set():
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                with connection, suppress(OSError):
                    connection.recv(4_096)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with Reader(f"http://127.0.0.1:{listener.getsockname()[1]}", secret=b"") as reader:
                eventually(lambda: reader.watch.error, "the trouble is known")
                assert reader.heard == []
        finally:
            stop.set()
            thread.join()


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nGpuroute-Age: 1\r\nContent-Length: 9999\r\n\r\n", b"HTTP/1.1 "])
def test_who_drips_is_left_for_the_spare(
    head: bytes, eventually: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "READ_S", 0.3)
    stop = threading.Event()

    def drip(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.recv(4_096)
            connection.sendall(head)
            while not stop.wait(0.05):
                connection.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener, AgentThread(desks(1)) as agent:
        thread = threading.Thread(target=drip, args=(listener,), daemon=True)
        thread.start()
        slow = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with Collected(fleet_of(agent.endpoints())) as it, Reader(slow, it.url) as reader:
            eventually(lambda: reader.heard, "the spare is read")
        stop.set()
        thread.join(10)


def test_a_router_learns_from_it_without_asking(eventually: Callable[..., None]) -> None:
    given = desks(2)
    given[0].sampled(Sample(math.inf, running=9, waiting=8, kv_usage=0.9))
    with AgentThread(given) as agent, Collected(fleet_of(agent.endpoints())) as it:
        settings = {"digest": it.url, "agent_key": KEY, "asks": "off"}
        with Router(endpoints={"p": agent.endpoints()}, **settings) as router:
            router.ready(60)

            def sources() -> list[str]:
                views = router.snapshot().pools["p"].endpoints
                return [view.report.source if view.report else "" for view in views]

            eventually(lambda: sources() == ["digest:READY"] * 2, "both are reported")

            def all_is_well() -> bool:
                view = router.snapshot()
                return view.pools["p"].reporting == 1.0 and view.digest_error is None

            eventually(all_is_well, "their reports are fresh")
            view = router.snapshot()
            report = view.pools["p"].endpoints[0].report
            assert report is not None
            assert (report.running, report.waiting) == (9, 8)

            def pick() -> str:
                call = router.call("p", tokens=1_000)
                attempt = call.next_attempt(router.clock())
                call.close(router.clock())
                return attempt.endpoint.id

            eventually(lambda: {pick() for _ in range(60)} == {"gpu-1"}, "nobody goes where a queue is reported")


def test_the_reading_ends_with_the_router(eventually: Callable[..., None]) -> None:
    others = set(threading.enumerate())  # of other tests, perhaps

    def readers() -> int:
        return sum(thread.name == "gpuroute-digest" for thread in set(threading.enumerate()) - others)

    with Collected() as it:
        router = Router(endpoints=["http://127.0.0.1:1"], digest=it.url, agent_key=KEY)
        assert readers() == 0, "nothing starts in the constructor"
        router.start()
        eventually(lambda: readers() == 1, "it reads")
        router.close()
        eventually(lambda: readers() == 0, "it ends with close")
        dropped = [Router(endpoints=["http://127.0.0.1:1"], digest=it.url, agent_key=KEY)]
        dropped[0].start()
        eventually(lambda: dropped[0]._digest is not None and dropped[0]._digest.rounds > 0, "it reads")
        reference = weakref.ref(dropped.pop())
        # While the thread delivers what it has read it holds the router, and it counts a round before that.
        eventually(lambda: gc.collect() is not None and reference() is None, "the thread does not hold it")
        eventually(lambda: readers() == 0, "and ends by itself")


def test_a_forked_child_reads_for_itself(eventually: Callable[..., None]) -> None:
    with Collected() as it, Router(endpoints=["http://127.0.0.1:1"], digest=it.url, agent_key=KEY) as router:
        router.start()
        eventually(lambda: router._digest is not None and router._digest.rounds, "the parent reads")
        child = os.fork()
        if child == 0:
            ok = False
            try:
                fresh, deadline = router._digest is None, time.monotonic() + 60
                router.start()
                while router._digest is not None and not router._digest.rounds and time.monotonic() < deadline:
                    time.sleep(0.02)
                ok = fresh and router._digest is not None and router._digest.rounds > 0
            finally:
                os._exit(0 if ok else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_over_tls_only_with_the_right_authority(pem: dict[str, str], eventually: Callable[..., None]) -> None:
    with Collected(pair=(pem["agent"], pem["agent_key"])) as it:
        url = it.url.replace("127.0.0.1", "localhost")
        assert url.startswith("https://")
        with Reader(url, ca=pem["ca"]) as reader:
            eventually(lambda: reader.watch.rounds, "it is read")
        with Reader(url, ca=pem["foreign"]) as reader:
            eventually(lambda: "CERTIFICATE_VERIFY_FAILED" in str(reader.watch.error), "another authority's is not")


# ------------------------------------------------------------------------------------------ the command


def test_the_command_collects_what_real_agents_say(
    tmp_path: Path, eventually: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        GpuServer(time_scale=1.0) as server,
        AgentProcess("--url", server.url, "--id", "gpu-0", "--warmup", "0") as agent,
    ):
        eventually(lambda: agent.state() == "ready", "the engine is ready")
        record = {"id": "gpu-0", "url": server.url, "agent": agent.lines["agent"]}
        path = tmp_path / "fleet.json"
        path.write_text(json.dumps({"pools": {"p": {"endpoints": [record]}}}))
        with AgentProcess("--digest", "127.0.0.1:0", "--registry", f"file://{path}") as digest:
            url = digest.lines["digest"]
            with Router(registry=f"file://{path}", digest=url, agent_key=PROCESS_KEY, asks="off") as router:
                router.ready(60)

                def running() -> int:
                    report = router.snapshot().pools["p"].endpoints[0].report
                    return -1 if report is None else report.running

                eventually(lambda: running() == 0, "it is idle")
                body = {"prompt": "x", "max_tokens": 2_000, "stream": True}
                with httpx2.stream("POST", f"{server.url}/v1/completions", json=body, timeout=90) as response:
                    chunks = response.iter_raw()
                    next(chunks)
                    server.hang()  # until it has been seen
                    eventually(lambda: running() == 1, "the call is seen")
                    server.resume()
                eventually(lambda: running() == 0, "and its end")
            with urllib.request.urlopen(f"{url}/healthz", timeout=60) as answer:
                assert answer.read() == b"ok\n"
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(f"{url}/digest", timeout=60)
            digest.terminate()
            assert digest.process.wait(90) == 0


class Clients:
    """Client processes that all read one digest."""

    def __init__(self, count: int, registry: str, digest: str) -> None:
        command = [sys.executable, str(Path(__file__).with_name("digest_client.py")), registry, digest, PROCESS_KEY]
        pipe = subprocess.PIPE
        self._all = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(count)]

    def look(self) -> list[dict[str, Any]]:
        for one in self._all:
            assert one.stdin is not None
            print(file=one.stdin, flush=True)
        return [json.loads(one.stdout.readline()) for one in self._all if one.stdout is not None]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._all:
            one.kill()
            one.communicate()


def test_eight_processes_share_one_digest_and_go_on_without_it(tmp_path: Path, eventually: Callable[..., None]) -> None:
    given, path = desks(2), tmp_path / "fleet.json"

    def queues(busy: set[str]) -> dict[str, int]:
        for desk in given:
            desk.sampled(Sample(math.inf, running=9, waiting=40 * (desk.id in busy), kv_usage=0.5))
        return {desk.id: 40 * (desk.id in busy) for desk in given}

    def digest(port: int) -> AgentProcess:
        return AgentProcess("--digest", f"127.0.0.1:{port}", "--registry", f"file://{path}")

    def all_know(expected: dict[str, int]) -> bool:
        """And nobody goes where a queue is reported."""
        idle = {name for name, waiting in expected.items() if not waiting}
        looks = clients.look()
        return all((one["waiting"], one["error"], {*one["picks"]}) == (expected, None, idle) for one in looks)

    with AgentThread(given, key=PROCESS_KEY) as agent:
        records = [
            {"id": e.id, "url": f"http://127.0.0.1:{n + 1}", "agent": e.agent} for n, e in enumerate(agent.endpoints())
        ]
        path.write_text(json.dumps({"pools": {"p": {"endpoints": records}}}))
        expected, port = queues({"gpu-0"}), own_port()
        url = f"http://127.0.0.1:{port}"
        with Clients(8, f"file://{path}", url) as clients:
            with digest(port):
                eventually(lambda: all_know(expected), "each knows all queues")
                assert all(one["sources"] == ["digest:READY"] and one["age"] > 0 for one in clients.look())
                with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
                    rows = dict(line.split(" ") for line in answer.read().decode().splitlines() if line[0] != "#")
                assert int(rows["gpuroute_digest_served_total"]) >= 8
                assert int(rows["gpuroute_digest_sent_bytes_total"]) > 8 * 200
            eventually(lambda: all(one["error"] for one in clients.look()), "each knows that it is gone")
            assert all(sum(one["picks"].values()) == 20 for one in clients.look()), "calls go on"
            expected = queues({"gpu-1"})
            with digest(port):
                eventually(lambda: all_know(expected), "its successor is read, from its beginning")


@pytest.mark.parametrize(("policy", "complains"), [("p2c", True), ("auto", False), ("queue_depth", False)])
def test_a_digest_that_no_policy_looks_at_is_mentioned_once(
    policy: str, complains: bool, eventually: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    with AgentThread(desks(1)) as agent, Collected(fleet_of(agent.endpoints())) as it:
        with Router(endpoints={"p": agent.endpoints()}, digest=it.url, agent_key=KEY, policy=policy) as router:
            router.ready(60)
            eventually(lambda: router._digest is not None and router._digest.rounds >= 3, "it is read")
        said = [record.getMessage() for record in caplog.records if "is read for nothing" in record.getMessage()]
        assert len(said) == complains
        assert all(text.startswith("digest is read for nothing: the policy p2c looks at no reports") for text in said)


def test_one_process_can_do_both(
    tmp_path: Path, eventually: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "fleet.json"
    path.write_text(json.dumps({"pools": {"p": {"endpoints": []}}}))
    monkeypatch.setenv("GPUROUTE_REGISTRY", f"file://{path}")
    with (
        GpuServer(time_scale=0.02) as server,
        AgentProcess("--url", server.url, "--warmup", "0", "--digest", "127.0.0.1:0") as agent,
    ):
        assert set(agent.lines) == {"agent", "status", "digest"}
        eventually(lambda: agent.state() == "ready", "the engine is ready")
        agent.terminate()
        assert agent.process.wait(90) == 0


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("http://[::1]", "::1", 80),
        ("http://[::1]:94", "::1", 94),
        ("http://h/base", "h", 80),
        ("https://[::1]", "::1", 443),
    ],
)
def test_where_a_digest_is_read(url: str, host: str, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DigestWatch, "_run", lambda _: None)
    watch = DigestWatch([url], lambda _: True, clock=time.monotonic, random=lambda: 0.0)
    watch.url = url
    connection = watch._connect()
    assert (connection.host, connection.port) == (host, port)
