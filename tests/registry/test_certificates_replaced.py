"""Certificates of etcd's clients that are replaced while a watch runs, by tools that do not rename."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import trustme
from ports import own_port

from gpuroute.forms import read_pem
from gpuroute.registry.etcd_client import EtcdClient, EtcdError
from gpuroute.registry.etcd_config import EtcdConfig

FILES = ("ca", "cert", "key")


@pytest.fixture
def pem(tmp_path: Path) -> dict[str, str]:
    authority = trustme.CA()
    mine = authority.issue_cert("client@test")
    blobs = {"ca": authority.cert_pem, "cert": mine.cert_chain_pems[0], "key": mine.private_key_pem}
    for name, blob in blobs.items():
        blob.write_to_path(str(tmp_path / name))
    return {name: str(tmp_path / name) for name in FILES}


READ = """
import sys
from gpuroute.registry.etcd_client import EtcdClient, EtcdError
from gpuroute.registry.etcd_config import EtcdConfig
url, ca, cert, key = sys.argv[1:]
try:
    EtcdClient(EtcdConfig.from_url(url, ca=ca, cert=cert, key=key)).read("x")
except EtcdError as error:
    print(error)
"""


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_empty_for_a_moment_is_a_trouble_and_not_the_end_of_the_process(
    pem: dict[str, str], name: str
) -> None:
    """grpcio aborts the process over half a pair, and takes an empty CA for its own roots."""
    Path(pem[name]).write_text("")
    command = [sys.executable, "-c", READ, f"etcds://127.0.0.1:{own_port()}", *pem.values()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{pem[name]}: is empty" in done.stdout


ASK = """
import sys
from gpuroute.transports.ask_grpc import Channels
url, ca, cert, key = sys.argv[1:]
Channels(ca, cert, key).say(b"x", "grpcs", url.partition("://")[2], 0.2, print)
print("goes on")
"""


def test_nor_does_an_ask_over_tls_end_it(pem: dict[str, str]) -> None:
    Path(pem["cert"]).write_text("")
    command = [sys.executable, "-c", ASK, f"grpcs://127.0.0.1:{own_port()}", *pem.values()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "goes on\n"), done.stderr


def test_a_file_that_is_no_pem_is_named(pem: dict[str, str]) -> None:
    Path(pem["cert"]).write_bytes(b"\0\1\2")
    client = EtcdClient(EtcdConfig.from_url("etcds://127.0.0.1:1", **pem))
    with pytest.raises(EtcdError, match="cert: is no PEM file"):
        client.read("x")
    assert read_pem("") is None
    assert read_pem(None) is None
