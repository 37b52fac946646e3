"""An active health check asks an endpoint by the names that calls use, and as they reach it."""

from __future__ import annotations

import asyncio
import os
import ssl
from typing import TYPE_CHECKING

import httpx2
import pytest
import trustme
from http_caller import endpoint

import gpuroute.httpx2
from gpuroute.core.endpoint import Tls
from gpuroute.httpx2 import LIBRARY
from gpuroute.testing import FakeRegistry
from gpuroute.transports.health import _http
from gpuroute.transports.pools import Way

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from http_stub import Exchange, Stage, Stub

    from gpuroute import Endpoint

pytestmark = pytest.mark.real_time


def well(record: Endpoint, way: Way | None = None) -> bool:
    return asyncio.run(_http(record, way or Way(LIBRARY), 30.0))


@pytest.fixture
def authority(tmp_path: Path) -> trustme.CA:
    made = trustme.CA()
    (tmp_path / "ca.pem").write_bytes(made.cert_pem.bytes())
    return made


def secured(authority: trustme.CA, name: str) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(name).configure_cert(context)
    return context


def test_the_certificate_is_that_of_the_authority(stubs: Stage, authority: trustme.CA, tmp_path: Path) -> None:
    (a,) = stubs("a", tls=secured(authority, "gpu.example"))
    tls = Tls(ca=str(tmp_path / "ca.pem"))
    assert well(endpoint(a, tls=tls, authority="gpu.example:8443"))
    assert a.came[0].header("host") == "gpu.example:8443"
    with pytest.raises(ssl.SSLCertVerificationError):
        well(endpoint(a, tls=tls))


def test_a_context_is_built_once_until_its_files_change(
    stubs: Stage, authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (a,) = stubs("a", tls=secured(authority, "127.0.0.1"))
    built: list[str | None] = []
    build = ssl.create_default_context

    def counting(*, cafile: str | None = None) -> ssl.SSLContext:
        built.append(cafile)
        return build(cafile=cafile)

    monkeypatch.setattr(ssl, "create_default_context", counting)
    way = Way(LIBRARY)
    file = tmp_path / "ca.pem"
    record = endpoint(a, tls=Tls(ca=str(file)))
    assert [well(record, way) for _ in range(3)] == [True] * 3
    assert built == [str(file)]
    os.utime(file, ns=(1, 1))
    assert well(record, way)
    assert built == [str(file)] * 2


def test_userinfo_of_a_url_is_no_part_of_its_host(stubs: Stage) -> None:
    (a,) = stubs("a")
    assert well(endpoint(a, url=f"http://user:secret@127.0.0.1:{a.port}"))
    assert a.came[0].header("host") == f"127.0.0.1:{a.port}"


def trusting(authority: trustme.CA, identity: trustme.LeafCert | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    if identity is not None:
        identity.configure_cert(context)
    return context


def checks(stub: Stub) -> int:
    return [came.target for came in stub.came].count(b"/health")


def checking(**pools: list[Endpoint]) -> gpuroute.Router:
    return gpuroute.Router(FakeRegistry(pools), health_checks=True, health_interval="50ms", connect_timeout="20s")


@pytest.mark.parametrize("wrapped", [False, True])
def test_whom_a_client_trusts_its_checks_trust(
    stubs: Stage, authority: trustme.CA, eventually: Callable[..., None], *, wrapped: bool
) -> None:
    """A CA of the client's own; servers that want a certificate of its; each pool as the client that calls it."""
    other = trustme.CA()
    wants_one = secured(other, "127.0.0.1")
    other.configure_trust(wants_one)
    wants_one.verify_mode = ssl.CERT_REQUIRED
    servers = stubs("a", tls=secured(authority, "127.0.0.1")) + stubs("b", tls=wants_one) + stubs("c")
    mine, theirs, quiet = ([endpoint(stub, engine="vllm")] for stub in servers)
    trusts = {"mine": trusting(authority), "theirs": trusting(other, other.issue_cert("client@test"))}
    with checking(mine=mine, theirs=theirs, quiet=quiet) as router:
        for pool, trust in trusts.items():
            client = (
                gpuroute.wrap(httpx2.Client(verify=trust), router, pool=pool)
                if wrapped
                else gpuroute.httpx2.Client(router, pool=pool, verify=trust)
            )
            with client:
                assert client.post("http://x/v1/completions").status_code == 200
        eventually(lambda: min(map(checks, servers[:2])) >= 3, "both are asked, though their clients are closed")
    assert servers[2].came == [], "nobody has called it"


def test_checks_come_from_where_calls_come_from(stubs: Stage, eventually: Callable[..., None]) -> None:
    (a,) = stubs("a")
    came_from = []

    async def behave(exchange: Exchange) -> None:
        came_from.append(exchange.writer.get_extra_info("peername")[0])
        exchange.reply()

    a.behave = behave
    with (
        checking(llama=[endpoint(a, engine="vllm")]) as router,
        gpuroute.httpx2.Client(router, local_address="127.0.0.7") as client,
    ):
        client.post("http://llama/v1/completions")
        eventually(lambda: checks(a), "it is asked")
    assert set(came_from) == {"127.0.0.7"}
