"""Proxies of the environment: gRPC uses them for etcd if it is told to, and only then."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

import pytest
from registry.watching import quick

from gpuroute.registry.etcd_client import EtcdClient, EtcdError

if TYPE_CHECKING:
    from registry.etcd_server import EtcdCluster

pytestmark = pytest.mark.real_time


def test_etcd_is_asked_through_the_proxy_only_if_the_environment_is_trusted(
    shared_etcd: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[bytes] = []

    def refuse() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                heard.append(connection.recv(1_000))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=refuse, daemon=True).start()
        for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy", "grpc_proxy", "https_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{listener.getsockname()[1]}")
        direct = EtcdClient(quick(shared_etcd.url, timeout=20.0))
        assert direct.read("nothing") is None
        assert heard == []
        trusting = EtcdClient(quick(shared_etcd.url, trust_env=True, timeout=20.0))
        with pytest.raises(EtcdError):
            trusting.read("nothing")
        assert heard[0].startswith(f"CONNECT {shared_etcd.addresses} ".encode())
        direct.close()
        trusting.close()
        listener.shutdown(socket.SHUT_RDWR)
