"""An active health check asks an endpoint by the names that calls use."""

from __future__ import annotations

import asyncio
import os
import ssl
from typing import TYPE_CHECKING

import pytest
import trustme
from http_caller import endpoint

from gpuroute.core.endpoint import Tls
from gpuroute.transports.health import _http

if TYPE_CHECKING:
    from pathlib import Path

    from http_stub import Stage

    from gpuroute import Endpoint

pytestmark = pytest.mark.real_time


def well(record: Endpoint) -> bool:
    return asyncio.run(_http(record, 30.0))


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
    file = tmp_path / "ca.pem"
    record = endpoint(a, tls=Tls(ca=str(file)))
    assert [well(record) for _ in range(3)] == [True] * 3
    assert built == [str(file)]
    os.utime(file, ns=(1, 1))
    assert well(record)
    assert built == [str(file)] * 2


def test_userinfo_of_a_url_is_no_part_of_its_host(stubs: Stage) -> None:
    (a,) = stubs("a")
    assert well(endpoint(a, url=f"http://user:secret@127.0.0.1:{a.port}"))
    assert a.came[0].header("host") == f"127.0.0.1:{a.port}"
