from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import pytest
from registry.etcd_server import EtcdCluster
from registry.watching import Writer, quick

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuroute.registry.etcd_config import EtcdConfig


@pytest.fixture(scope="session")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """One etcd for all tests that do it no harm; each has a prefix of its own."""
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@pytest.fixture
def etcd_url(shared_etcd: EtcdCluster) -> str:
    return f"{shared_etcd.url}/{uuid.uuid4().hex}"


@pytest.fixture
def config(etcd_url: str) -> EtcdConfig:
    return quick(etcd_url)


@pytest.fixture
def writer(config: EtcdConfig) -> Iterator[Writer]:
    writer = Writer(config)
    yield writer
    writer.client.close()
