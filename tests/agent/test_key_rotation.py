"""The key of the agents is changed while calls go on, in the documented order, over both transports and the digest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from agent.process import AgentProcess
from agent.stage import call_of, router_of
from agent.test_digest import Collected, entries, fleet_of

from gpuroute.core.endpoint import Endpoint
from gpuroute.testing import GpuServer

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.real_time
ENGINES = ("--id", "gpu-0", "--id", "gpu-1", "--warmup", "0")


@pytest.mark.parametrize("options", [(), ("--grpc-listen", "127.0.0.1:0")])
def test_agents_with_two_keys_know_clients_of_either(
    options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None]
) -> None:
    monkeypatch.setenv("GPUROUTE_AGENT_KEY_NEXT", "next-key")
    with (
        GpuServer(time_scale=0.02) as server,
        AgentProcess(*ENGINES, "--url", server.url, "--url", server.url, *options, key="old-key") as agent,
    ):
        eventually(lambda: agent.load(0).get("state") == agent.load(1).get("state") == "ready", "both engines are ready")
        agent.meet("old-key")
        endpoints = [Endpoint(f"gpu-{n}", server.url, agent=f"{agent.lines['agent']}/{n}") for n in range(2)]

        def said(what: str) -> int:
            return sum(int(agent.load(n)[what]) for n in (0, 1))

        for count, (key, known) in enumerate({"old-key": True, "next-key": True, "foreign": False}.items()):
            timeout = "60s" if known else "300ms"
            router, asker = router_of(endpoints, agent_key=key, ask_timeout=timeout)
            call = call_of(router)
            asking = asker.ask(call)
            assert bool(asking.bids) is known
            attempt = call.next_attempt(router.clock())
            asking.take(attempt)
            asking.tell(attempt, 0.1)
            if known:
                eventually(lambda most=count + 1: said("tells") == most, "it was told")
            router.close()
            with Collected(fleet_of(endpoints[:1]), secret=key.encode()) as it:
                if known:
                    eventually(lambda: set(entries(it.digest)) == {"gpu-0"}, "it is collected")
                eventually(lambda: it.collector.rounds > 1, "it was asked")
                assert bool(entries(it.digest)) is known
        eventually(lambda: said("takes") == 2, "both takes were heard")
