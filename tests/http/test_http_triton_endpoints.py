"""`tritonclient.http` over a pool: what an endpoint's record says holds as for the other clients, and a place in its
library's connection pool is not lost with a call that ran out of time."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from typing import TYPE_CHECKING, Any

import pytest
import trustme
from http_caller import endpoint, router_for

import gpuroute
from gpuroute.core.endpoint import Tls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from http_stub import Came, Stage

client = pytest.importorskip("tritonclient.http", reason="the package tritonclient[http] is not installed")
aio_client = pytest.importorskip("tritonclient.http.aio")

pytestmark = pytest.mark.real_time


def blocking(router: gpuroute.Router, **headers: str) -> Any:
    routed = gpuroute.wrap(client.InferenceServerClient("127.0.0.1:1"), router, pool="llama")
    try:
        return routed.get_server_metadata(headers=headers)
    finally:
        routed.close()


def in_tasks(router: gpuroute.Router, **headers: str) -> Any:
    async def run() -> Any:
        async with aio_client.InferenceServerClient("127.0.0.1:1") as routed:
            gpuroute.wrap(routed, router, pool="llama")
            return await routed.get_server_metadata(headers=headers)

    return asyncio.run(run())


@pytest.fixture(params=[blocking, in_tasks])
def ask(request: pytest.FixtureRequest) -> Any:
    return request.param


def hosts(came: Came) -> list[str]:
    return [value for name, value in came.headers if name.lower() == "host"]


def test_the_authority_of_an_endpoint_is_its_host(stubs: Stage, ask: Any) -> None:
    (a,) = stubs("a")
    assert ask(router_for([endpoint(a, authority="gpu.example:8443")]), host="mine")["endpoint"] == "a"
    assert hosts(a.came[0]) == ["gpu.example:8443"]


@pytest.mark.parametrize("record", [{"authority": "gpu.example"}, {"server_name": "gpu.example"}])
def test_the_tls_name_is_that_of_the_record(stubs: Stage, ask: Any, tmp_path: Path, record: dict[str, str]) -> None:
    authority = trustme.CA()
    served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("gpu.example").configure_cert(served)
    (tmp_path / "ca.pem").write_bytes(authority.cert_pem.bytes())
    (a,) = stubs("a", tls=served)
    tls = Tls(ca=str(tmp_path / "ca.pem"), server_name=record.get("server_name", ""))
    assert ask(router_for([endpoint(a, tls=tls, authority=record.get("authority", ""))]))["endpoint"] == "a"


def test_an_endpoint_whose_tls_files_are_missing_here_is_left_for_another(stubs: Stage, ask: Any) -> None:
    (b,) = stubs("b")
    useless = gpuroute.Endpoint("a", "https://127.0.0.1:9", tls=Tls(ca="/nowhere/ca.pem"))
    assert ask(router_for([useless, endpoint(b)]))["endpoint"] == "b"


@pytest.fixture
def deaf() -> Iterator[tuple[int, list[socket.socket]]]:
    """A server that never reads what is posted: its port, and the connections of those. Other requests are answered."""
    listener = socket.create_server(("127.0.0.1", 0))
    unread: list[socket.socket] = []

    def serve() -> None:
        with contextlib.suppress(OSError):  # closed, or a caller that was too late hung up
            while True:
                one = listener.accept()[0]
                if one.recv(4, socket.MSG_PEEK) == b"POST":
                    unread.append(one)
                    continue
                with one, contextlib.suppress(OSError):
                    one.recv(65536)
                    one.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield listener.getsockname()[1], unread
    listener.shutdown(socket.SHUT_RDWR)
    thread.join(60)
    for one in (listener, *unread):
        one.close()


def test_a_call_that_ran_out_of_time_while_it_was_sent_leaves_its_place(
    deaf: tuple[int, list[socket.socket]], eventually: Callable[..., None]
) -> None:
    np = pytest.importorskip("numpy")
    port, unread = deaf
    router = router_for([gpuroute.Endpoint("a", f"http://127.0.0.1:{port}")], breaker_failures=10_000)
    tensor = client.InferInput("text", [64 * 1024 * 1024], "UINT8")
    tensor.set_data_from_numpy(np.zeros(64 * 1024 * 1024, dtype=np.uint8))
    routed = gpuroute.wrap(client.InferenceServerClient("127.0.0.1:1", network_timeout=60.0), router, pool="llama")

    def sent_in_vain() -> bool:
        with pytest.raises(gpuroute.DeadlineExceeded):
            routed.infer("echo", [tensor], headers={"x-gpuroute-timeout": "300ms"})
        return bool(unread)  # a busy machine may let the time pass before it is sent

    eventually(sent_in_vain, "a call runs out of time while it is sent")
    assert routed.get_server_metadata(headers={"x-gpuroute-timeout": "30s"}) == {}
    routed.close()
