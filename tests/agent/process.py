"""The agent as a process, and what a router sees of the registry meanwhile."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from typing import TYPE_CHECKING, Any, Self

import grpc

from gpuroute.core.asking import GRPC_METHOD, TakeBody, encode_take
from gpuroute.registry import open_registry

if TYPE_CHECKING:
    from gpuroute.core.endpoint import Endpoint
    from gpuroute.core.fleet import Fleet

KEY = "key-of-the-agents"


class AgentProcess:
    """`gpuroute agent` with these options, killed at the end."""

    def __init__(self, *options: str, key: str = KEY) -> None:
        command = [sys.executable, "-m", "gpuroute", "agent", "--listen", "127.0.0.1:0", "--status", "127.0.0.1:0"]
        environ = {**os.environ, "GPUROUTE_AGENT_KEY": key}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([*command, *options], stdout=pipe, stderr=pipe, env=environ, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        self.lines: dict[str, str] = json.loads(line)

    def page(self, path: str) -> str:
        with urllib.request.urlopen(self.lines["status"] + path, timeout=60) as answer:
            return str(answer.read().decode())

    def meet(self, key: str = KEY) -> None:
        """Say something that counts for nothing: what was said a second before an agent's first message its predecessor
        may have heard as well, so a first take that a busy machine holds up would count for nothing."""
        message = encode_take(TakeBody(0, 0), 0, 0, 0, 0, key.encode())
        scheme, _, place = self.lines["agent"].partition("://")
        if scheme == "udp":
            host, _, port = place.rpartition(":")
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                sock.sendto(message, (host, int(port)))
        else:
            with grpc.insecure_channel(place) as channel:
                channel.unary_unary(GRPC_METHOD)(message, timeout=60)
        deadline = time.monotonic() + 60
        while 'gpuroute_agent_dropped_total{why="clock"} 1' not in self.page("/metrics"):
            assert time.monotonic() < deadline, "it has not heard that"
            time.sleep(0.02)

    def load(self, index: int = 0) -> dict[str, Any]:
        engines = json.loads(self.page("/load"))["engines"]
        return engines[index] if len(engines) > index else {}

    def state(self) -> str:
        return str(self.load().get("state"))

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


class Eyes:
    """What a router would see of pool `p`."""

    def __init__(self, url: str) -> None:
        self.fleets: list[Fleet] = []
        self._subscription = open_registry(url).subscribe(self.fleets.append)

    def endpoints(self) -> dict[str, Endpoint]:
        pool = self.fleets[-1].pools.get("p") if self.fleets else None
        return {endpoint.id: endpoint for endpoint in pool.endpoints} if pool else {}

    def state(self, ident: str) -> str:
        endpoint = self.endpoints().get(ident)
        return str(endpoint.state) if endpoint else ""

    def states(self, ident: str) -> list[str]:
        """The states that it went through."""
        seen = [{e.id: str(e.state) for e in fleet.pools["p"].endpoints} for fleet in self.fleets if "p" in fleet.pools]
        found = [states.get(ident, "absent") for states in seen]
        return [state for number, state in enumerate(found) if not number or found[number - 1] != state]

    def close(self) -> None:
        self._subscription.close()
