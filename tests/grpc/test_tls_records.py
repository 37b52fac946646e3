"""TLS records that are no good: one must not end the process, nor make a host look dead that is there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import httpx2 as library
import pytest
from test_connections import Authority, tls_endpoint
from world import PATIENT, Manner, Server, refused_url, router_of

import gpuroute
from gpuroute import Endpoint, httpx2
from gpuroute.core.endpoint import Tls
from gpuroute.core.hosts import host_of
from gpuroute.testing import FakeRegistry

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.real_time


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def mutual(authority: Authority) -> Iterator[Server]:
    """A server that wants to see certificates."""
    server = authority.server("127.0.0.1", mutual=True)
    yield server
    server.stop()


@pytest.fixture(params=["blocking", "asyncio"])
def manner(request: pytest.FixtureRequest) -> Manner:
    return Manner(request.param)


def test_one_file_may_hold_certificate_and_key(manner: Manner, authority: Authority, mutual: Server) -> None:
    """As it may for HTTP. grpcio ends the whole process when it gets one without the other (1.85)."""
    client = authority.client()
    both = authority.directory / "both.pem"
    both.write_bytes(Path(client["cert"]).read_bytes() + Path(client["key"]).read_bytes())
    endpoint = tls_endpoint(mutual, ca=authority.ca_file, cert=str(both))
    assert manner.call(router_of(endpoint), "Who", b"", timeout=60) == b"tls"


def bad_records(authority: Authority) -> dict[str, tuple[dict[str, str], str]]:
    garbage = authority.directory / "garbage.pem"
    garbage.write_text("this is no certificate")
    client = authority.client()
    return {
        "missing": ({"ca": str(authority.directory / "nothing.pem")}, "TLS file cannot be read: No such file"),
        "garbage": ({"ca": str(garbage)}, "its TLS ca is no PEM file"),
        "key alone": ({"ca": authority.ca_file, "key": client["key"]}, "its TLS record has a key and no cert"),
    }


BAD = "missing", "garbage", "key alone"


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_record_is_named_and_spares_its_host(bad: str, manner: Manner, authority: Authority) -> None:
    """The host may serve other pools, whose records are good."""
    tls, words = bad_records(authority)[bad]
    endpoint = Endpoint("a", "grpcs://127.0.0.1:1", tls=Tls(**tls))
    router = router_of(endpoint)
    with pytest.raises(gpuroute.ConfigError, match=f"endpoint 'a': {words}"):
        manner.call(router, "Who", b"")
    assert times_missed(router, endpoint) == 0
    (state,) = router.pool("p").snapshot.states
    assert state.failed == router.settings.attempts, "its own endpoint is left alone after some of them"


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_record_costs_the_pool_nothing(bad: str, manner: Manner, authority: Authority) -> None:
    tls, _ = bad_records(authority)[bad]
    good = authority.server("127.0.0.1")
    try:
        broken = Endpoint("bad", "grpcs://127.0.0.1:1", tls=Tls(**tls))
        router = router_of(broken, tls_endpoint(good, ca=authority.ca_file))
        assert {manner.call(router, "Who", b"", timeout=60) for _ in range(6)} == {b"tls"}
    finally:
        good.stop()


WRONG_NAME, STRANGER = "wrong name", "stranger's key"


@pytest.mark.parametrize("case", [WRONG_NAME, STRANGER])
def test_certificates_that_do_not_fit_spare_the_host(
    case: str, manner: Manner, authority: Authority, mutual: Server
) -> None:
    mine = authority.client()
    key = mine["key"]
    if case == STRANGER:
        (authority.directory / "other").mkdir()
        key = Authority(authority.directory / "other").client()["key"]
    name = "gpu-9.example" if case == WRONG_NAME else ""
    endpoint = tls_endpoint(mutual, ca=authority.ca_file, cert=mine["cert"], key=key, server_name=name)
    router = router_of(endpoint)
    with pytest.raises(grpc.RpcError) as error:
        manner.call(router, "Who", b"", timeout=60)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert times_missed(router, endpoint) == 0


def test_nor_is_it_gone_over_http(authority: Authority) -> None:
    """A gRPC server's port will do: the handshake ends before anything else is said."""
    server = authority.server("127.0.0.1")
    try:
        for tls in (
            Tls(ca=str(authority.directory / "nothing.pem")),
            Tls(ca=authority.ca_file, server_name="gpu-9.example"),
        ):
            endpoint = Endpoint("a", server.url.replace("grpc:", "https:"), tls=tls)
            router = gpuroute.Router(FakeRegistry({"p": [endpoint]}), **PATIENT)
            with (
                httpx2.Client(router=router, pool="p", timeout=60.0) as client,
                pytest.raises((library.ConnectError, gpuroute.ConfigError)),
            ):
                client.get("https://p/")
            assert times_missed(router, endpoint) == 0
    finally:
        server.stop()


def test_a_host_that_refuses_is_missed(manner: Manner) -> None:
    """So that the tests above mean something."""
    endpoint = Endpoint("a", refused_url().replace("grpc:", "grpcs:"))
    router = router_of(endpoint)
    with pytest.raises(grpc.RpcError):
        manner.call(router, "Who", b"", timeout=60)
    assert times_missed(router, endpoint) == router.settings.attempts


def times_missed(router: gpuroute.Router, endpoint: Endpoint) -> int:
    """How often in a row that host could not be reached, as far as all pools know."""
    return router.pool("p").shared.hosts.missed(host_of(endpoint.url), router.clock()) - 1


@pytest.mark.parametrize(
    "url", ["grpc://h:99999", "grpc://h:port", "grpc://[::1", "grpc://", "ftp://h:1", "grpc://h:1/path"]
)
def test_a_url_that_means_nothing_to_grpc_is_named(url: str, manner: Manner) -> None:
    endpoint: Any = Endpoint("a", url)
    with pytest.raises(gpuroute.ConfigError, match="endpoint 'a': expected grpc://HOST:PORT"):
        manner.call(router_of(endpoint), "Who", b"")
