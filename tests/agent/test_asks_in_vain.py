"""Whoever asks in vain learns why: from the agent's log, or from the client's."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import pytest
from agent.process import AgentProcess
from agent.stage import KEY, AgentThread, call_of, desks, router_of
from ports import closed_udp_port

from gpuroute.core.asking import TakeBody, TellBody, encode_take, encode_tell
from gpuroute.core.endpoint import Endpoint
from gpuroute.core.fleet import Fleet, PoolSpec
from gpuroute.router import Router
from gpuroute.testing import FakeRegistry, GpuServer
from gpuroute.transports.asking import asker_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuroute.transports.asking import Asker

pytestmark = pytest.mark.real_time


def lines(caplog: pytest.LogCaptureFixture, about: str) -> list[str]:
    """The warnings of that text; threads of other tests may have something to say as well."""
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    return [line for line in said if about in line]


def asking(agent: str, **settings: Any) -> Callable[[], Asker]:
    """What makes calls to two endpoints whose agents are at that address, one at a time."""
    endpoints = [Endpoint(f"gpu-{n}", "http://127.0.0.1:1", agent=f"{agent}/{n}") for n in range(2)]
    router, asker = router_of(endpoints, **settings)

    def ask() -> Asker:
        asker.ask(call_of(router))
        return asker

    return ask


def test_agents_that_never_answer_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    ask = asking(f"udp://127.0.0.1:{closed_udp_port()}", ask_timeout="5ms")
    for _ in range(5):
        ask()
    (line,) = lines(caplog, "answered none")
    assert line.startswith("gpu-")
    assert "GPUROUTE_AGENT_KEY" in line


def test_an_agent_without_the_key_is_not_believed_and_said_so(
    caplog: pytest.LogCaptureFixture, eventually: Callable[..., None]
) -> None:
    with AgentThread(desks(2), key="") as agent:
        ask = asking(f"udp://127.0.0.1:{agent.port}", ask_timeout="100ms")
        eventually(lambda: ask().counts.garbled > 0, "its answers are garbled")
    (line,) = lines(caplog, "not signed with the GPUROUTE_AGENT_KEY of this process")
    assert KEY not in line


def test_an_agent_of_other_endpoints_is_noticed(
    caplog: pytest.LogCaptureFixture, eventually: Callable[..., None]
) -> None:
    with AgentThread(list(reversed(desks(2)))) as agent:
        ask = asking(f"udp://127.0.0.1:{agent.port}", ask_timeout="100ms")
        eventually(lambda: ask().counts.strangers > 0, "its answers are another's")
    assert lines(caplog, "was not asked for there")


def test_the_agents_log_names_clocks_and_keys(eventually: Callable[..., None]) -> None:
    """And a client whose clock is off is answered all the same."""
    import socket

    with (
        GpuServer(time_scale=0.02) as server,
        AgentProcess("--url", server.url, "--id", "gpu-0", "--warmup", "0") as agent,
    ):
        eventually(lambda: agent.state() == "ready", "the engine is ready")
        host, _, port = agent.lines["agent"].removeprefix("udp://").rpartition(":")
        hour_off = int(time.time() * 1000) - 3_600_000
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect((host, int(port)))
            sock.send(encode_take(TakeBody(10, 10), 1, hour_off, 0, 0, b"key-of-the-agents"))
            sock.send(encode_tell(TellBody(10, None), 1, hour_off, 0, 0, b"another-key"))
        stderr = agent.process.stderr
        assert stderr is not None
        said = ""
        while "GPUROUTE_AGENT_KEY differs there" not in said or "behind or 5 s ahead of ours" not in said:
            line = stderr.readline()
            assert line, said
            said += line
        assert "from 127.0.0.1" in said
        dropped = [line for line in agent.page("/metrics").splitlines() if "dropped_total{" in line]
        assert 'gpuroute_agent_dropped_total{why="clock"} 1' in dropped
        assert 'gpuroute_agent_dropped_total{why="key"} 1' in dropped
    assert "key-of-the-agents" not in said


@pytest.mark.parametrize("agent", ["udp://[::1", "udp://h:99999", "udp://h:0", "x"])
def test_an_address_that_is_none_costs_nobody_a_call(agent: str) -> None:
    """A registry of one's own may say anything; ours refuses such a record."""
    registry = FakeRegistry()
    made = tuple(Endpoint(f"gpu-{n}", "http://127.0.0.1:1", agent=agent) for n in range(2))
    registry.set(Fleet({"llm": PoolSpec("llm", made)}))
    router = Router(registry, asks="on")
    asker = asker_of(router)
    assert asker is not None
    call = router.call("llm", tokens=6_000)
    assert asker.ask(call) is None
    assert call.next_attempt(router.clock()).state.id in {"gpu-0", "gpu-1"}
    router.close()


def test_where_no_thread_can_start_a_name_stays_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("gpuroute.transports.ask_peers.threading.Thread.start", refuse)
    endpoints = [Endpoint(f"gpu-{n}", "http://127.0.0.1:1", agent="udp://agent.test:5") for n in range(2)]
    router = Router(endpoints={"p": endpoints}, asks="on")
    asker = asker_of(router)
    assert asker is not None
    router.call("p")
    assert asker.ask(call_of(router)) is None
