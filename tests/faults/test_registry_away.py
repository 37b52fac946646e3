"""etcd goes away, calls go on: to endpoints that live, past one that dies meanwhile."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fault_world import PATIENCE_S, TEXT, ask, vllm

from gpuroute import Router, httpx2

sys.path.insert(0, str(Path(__file__).parents[1] / "registry"))

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuroute.testing import GpuServer


def test_no_call_fails_while_etcd_is_away(tmp_path: Path, gpus: Callable[..., list[GpuServer]]) -> None:
    from etcd_server import EtcdCluster

    from gpuroute.registry.etcd_config import EtcdConfig
    from gpuroute.registry.lease import Registration

    servers = gpus(3, time_scale=0.0)
    with EtcdCluster(tmp_path) as etcd:
        config = EtcdConfig.from_url(etcd.url)
        kept: list[Any] = [Registration(config, "llama", endpoint, ttl=60) for endpoint in vllm(servers)]
        assert all(one.wait(PATIENCE_S) for one in kept)
        with Router(registry=etcd.url) as router, httpx2.Client(router, timeout=PATIENCE_S) as client:
            assert client.post(TEXT, json=ask()).status_code == 200
            assert len(router.pool("llama").snapshot.states) == 3
            etcd.members[0].kill()
            for round_ in range(60):
                if round_ == 20:
                    servers[0].kill()
                assert client.post(TEXT, json=ask()).status_code == 200
            assert len(router.pool("llama").snapshot.states) == 3
        for one in kept:
            one._key._stop.set()  # nobody is there to take its leave from
            one._key._wake.set()
