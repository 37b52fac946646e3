"""The same questions and answers over gRPC: plain, with TLS, and with certificates on both sides."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, Self

import grpc
import pytest
import trustme
from agent.process import AgentProcess
from agent.stage import AgentThread, call_of, desks, hear, met, router_of
from ports import closed_udp_port

from gpuroute.agent.answers import Answers
from gpuroute.agent.grpc_server import Listening, serve
from gpuroute.core.asking import GRPC_METHOD
from gpuroute.core.endpoint import Endpoint
from gpuroute.errors import ConfigError
from gpuroute.testing import GpuServer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gpuroute.agent.desk import Desk

pytestmark = pytest.mark.real_time


class GrpcAgent:
    """An agent of these desks on a loopback port, on a loop of its own."""

    def __init__(self, given: list[Desk], keys: tuple[bytes, ...] = (), **files: str) -> None:
        self.desks = given
        self.answers = met(Answers(given, keys))
        self._listening = Listening(host="127.0.0.1", port=0, **files)
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server, self.port = await serve(self._listening, self.answers)
        self._started.set()
        await self._stop.wait()
        await server.stop(None)

    def endpoints(self) -> list[Endpoint]:
        where = f"{self._listening.scheme}://localhost:{self.port}"
        return [Endpoint(d.id, "http://127.0.0.1:1", agent=f"{where}/{n}") for n, d in enumerate(self.desks)]

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths of a CA, of the agent's and of a client's certificate."""
    directory = tmp_path_factory.mktemp("pem")
    authority, foreign = trustme.CA(), trustme.CA()
    found = {}
    for name, issued in {
        "agent": authority.issue_cert("localhost"),
        "client": authority.issue_cert("client.test"),
        "foreign": foreign.issue_cert("client.test"),
    }.items():
        found[name], found[f"{name}_key"] = str(directory / f"{name}.pem"), str(directory / f"{name}.key")
        issued.cert_chain_pems[0].write_to_path(found[name])
        issued.private_key_pem.write_to_path(found[f"{name}_key"])
    found["ca"] = str(directory / "ca.pem")
    authority.cert_pem.write_to_path(found["ca"])
    return found


def asked(agent: GrpcAgent, how: str, **settings: Any) -> int:
    """How many agents answered one call."""
    router, asker = router_of(agent.endpoints(), **{"ask_timeout": "60s", **settings})
    call = call_of(router)
    asking = asker.ask(call) if how == "sync" else asyncio.run(asker.ask_async(call))
    attempt = call.next_attempt(router.clock())
    asking.take(attempt)
    asking.tell(attempt, 0.5)
    return len(asking.bids)


@pytest.mark.parametrize("how", ["sync", "async"])
def test_grpc_asks_are_answered_taken_and_told(how: str, eventually: Callable[..., None]) -> None:
    with GrpcAgent(desks(2), (b"k",)) as agent:
        assert asked(agent, how, agent_key="k") >= 1
        eventually(lambda: sum(desk.tells for desk in agent.desks) == 1, "the tell has arrived")
        eventually(lambda: sum(desk.takes for desk in agent.desks) == 1, "and so has the take")


def test_both_transports_serve_one_call(eventually: Callable[..., None]) -> None:
    with GrpcAgent(desks(1), (b"k",)) as one, AgentThread(desks(2), key="k") as other:
        endpoints = [one.endpoints()[0], other.endpoints()[1]]
        router, asker = router_of(endpoints, agent_key="k", ask_timeout="60s")
        asking = asker.ask(call_of(router))
        (line,) = asker._lines

        def all_here() -> bool:
            hear(line)
            return set(asking.bids) == {"gpu-0", "gpu-1"}

        eventually(all_here, "both have answered")


def test_mutual_tls_needs_no_key(pem: dict[str, str]) -> None:
    own = {"agent_ca": pem["ca"], "agent_cert": pem["client"], "agent_cert_key": pem["client_key"], "agent_key": ""}
    with GrpcAgent(desks(2), cert=pem["agent"], key=pem["agent_key"], ca=pem["ca"]) as agent:
        assert asked(agent, "sync", **{**own, "agent_key": None}) >= 1
        foreign = {"agent_cert": pem["foreign"], "agent_cert_key": pem["foreign_key"], "agent_key": None}
        assert asked(agent, "sync", **{**own, **foreign, "ask_timeout": "300ms"}) == 0
        nobody = {"agent_cert": None, "agent_cert_key": None, "agent_key": None}
        assert asked(agent, "sync", **{**own, **nobody, "ask_timeout": "300ms"}) == 0
        assert sum(desk.asks for desk in agent.desks) <= 2


def test_an_agent_of_another_authority_is_not_believed(pem: dict[str, str]) -> None:
    with GrpcAgent(desks(2), (b"k",), cert=pem["agent"], key=pem["agent_key"]) as agent:
        assert asked(agent, "sync", agent_key="k", agent_ca=pem["ca"]) >= 1
        assert asked(agent, "sync", agent_key="k", agent_ca=pem["foreign"], ask_timeout="300ms") == 0


def test_garbage_over_grpc_is_dropped() -> None:
    with GrpcAgent(desks(1), (b"k",)) as agent, grpc.insecure_channel(f"127.0.0.1:{agent.port}") as channel:
        say = channel.unary_unary(GRPC_METHOD)
        for data in (b"", b"x" * 900, b"GR\x01\x01" + b"\0" * 44):
            assert say(data, timeout=60) == b""
        with pytest.raises(grpc.RpcError) as caught:
            say(b"x" * 5_000, timeout=60)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/gpuroute.Agent/Else")(b"", timeout=60)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert (agent.answers.dropped["garbled"], agent.answers.dropped["key"]) == (2, 1)


def test_other_hosts_need_to_be_known() -> None:
    everywhere = {"host": "0.0.0.0", "port": 0}
    with pytest.raises(ConfigError, match="GPUROUTE_AGENT_KEY"):
        Listening(**everywhere).check(authenticated=False, insecure=False)
    with pytest.raises(ConfigError, match="GPUROUTE_AGENT_CA"):
        Listening(**everywhere, cert="c", key="k").check(authenticated=False, insecure=False)
    Listening(**everywhere, cert="c", key="k", ca="a").check(authenticated=False, insecure=False)
    Listening(**everywhere).check(authenticated=True, insecure=False)
    Listening(**everywhere).check(authenticated=False, insecure=True)
    Listening(host="127.0.0.1", port=0).check(authenticated=False, insecure=False)


def test_the_command_serves_and_registers_grpc(
    pem: dict[str, str], eventually: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GPUROUTE_AGENT_CERT", pem["agent"])
    monkeypatch.setenv("GPUROUTE_AGENT_CERT_KEY", pem["agent_key"])
    with (
        GpuServer(time_scale=0.02) as server,
        AgentProcess("--url", server.url, "--id", "gpu-0", "--warmup", "1", "--grpc-listen", "127.0.0.1:0") as process,
    ):
        eventually(lambda: process.state() == "ready", "the engine is ready")
        agent = process.lines["agent"].replace("127.0.0.1", "localhost")
        assert agent.startswith("grpcs://localhost:")
        other = Endpoint("other", server.url, agent=f"udp://127.0.0.1:{closed_udp_port()}")
        router, asker = router_of([Endpoint("gpu-0", server.url, agent=agent), other], **KEYED, agent_ca=pem["ca"])
        assert set(asker.ask(call_of(router)).bids) == {"gpu-0"}


KEYED = {"agent_key": "key-of-the-agents", "ask_timeout": "60s"}
