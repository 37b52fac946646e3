"""Where an agent says that it is reached: IPv6 over every transport, and never `0.0.0.0`."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import httpx2
import pytest
from agent.process import AgentProcess
from agent.stage import call_of, router_of
from agent.test_digest import Collected, entries, fleet_of

from gpuroute.core.endpoint import Endpoint
from gpuroute.testing import GpuServer

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.real_time
KEY = "key-of-the-agents"


@pytest.fixture
def over_ipv6() -> None:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sock:
            sock.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 loopback here")


@pytest.mark.usefixtures("over_ipv6")
@pytest.mark.parametrize(("options", "scheme"), [((), "udp"), (("--grpc-listen", "[::1]:0"), "grpc")])
def test_agents_over_ipv6(options: tuple[str, ...], scheme: str, eventually: Callable[..., None]) -> None:
    everything = ("--listen", "[::1]:0", "--status", "[::1]:0", *options)
    with (
        GpuServer(time_scale=0.02) as server,
        AgentProcess("--url", server.url, "--id", "gpu-0", "--warmup", "0", *everything) as agent,
    ):
        eventually(lambda: agent.state() == "ready", "its pages are served")
        assert agent.lines["agent"].startswith(f"{scheme}://[::1]:")
        assert agent.lines["status"].startswith("http://[::1]:")
        assert httpx2.get(f"{agent.lines['status']}/healthz", timeout=60).text == "ok\n"
        endpoints = [Endpoint(f"gpu-{n}", server.url, agent=agent.lines["agent"]) for n in range(2)]
        router, asker = router_of(endpoints, agent_key=KEY, ask_timeout="60s")
        assert set(asker.ask(call_of(router)).bids) == {"gpu-0"}
        router.close()
        with Collected(fleet_of(endpoints[:1]), secret=KEY.encode()) as it:
            eventually(lambda: set(entries(it.digest)) == {"gpu-0"}, "it is collected")


@pytest.mark.parametrize(
    ("options", "host"),
    [
        (("--advertise", "http://gpu-7.test:8000"), "gpu-7.test"),
        (("--advertise", "http://[2001:db8::7]:8000"), "[2001:db8::7]"),
        (("--advertise", "http://gpu-7.test:8000", "--agent-host", "10.0.0.7"), "10.0.0.7"),
        (("--grpc-listen", "0.0.0.0:0", "--advertise", "http://gpu-7.test:8000"), "gpu-7.test"),
    ],
)
def test_who_listens_everywhere_is_reached_where_the_engine_is(options: tuple[str, ...], host: str) -> None:
    """`udp://0.0.0.0` in a record would be each client's own machine."""
    with AgentProcess("--url", "http://127.0.0.1:1", "--listen", "0.0.0.0:0", *options) as agent:
        assert agent.lines["agent"].split("://")[1].rpartition(":")[0] == host
