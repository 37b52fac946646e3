"""Certificates of agents and of those who ask them are replaced while all go on: meshes do so every few hours."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
from typing import TYPE_CHECKING

import httpx2
import pytest
import trustme
from agent.stage import call_of, desks, router_of
from agent.test_agent_grpc import GrpcAgent, asked
from agent.test_digest import Collected, entries, fleet_of

from gpuroute.agent import collect, digest_server
from gpuroute.agent.answers import Answers
from gpuroute.agent.grpc_server import Listening, serve
from gpuroute.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.real_time


def test_an_agent_does_not_start_with_an_empty_certificate(tmp_path: Path) -> None:
    for name in ("ca", "cert", "key"):
        (tmp_path / f"{name}.pem").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"pem: is empty"):
        asyncio.run(serve(Listening(host="127.0.0.1", port=0, **files(tmp_path)), Answers(desks(1))))


class Authority:
    """The files that one authority gives to `localhost`."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        authority = trustme.CA()
        issued = authority.issue_cert("localhost", "client.test")
        self.ca, self.cert, self.key = (directory / name for name in ("ca.pem", "cert.pem", "key.pem"))
        authority.cert_pem.write_to_path(str(self.ca))
        issued.cert_chain_pems[0].write_to_path(str(self.cert))
        issued.private_key_pem.write_to_path(str(self.key))

    def give(self, directory: Path) -> None:
        """As the present files, later than any before."""
        for file in (self.ca, self.cert, self.key):
            shutil.copy(file, directory / file.name)
            stamp = 2_000_000_000 + self.number
            os.utime(directory / file.name, (stamp, stamp))

    number = 0


@pytest.fixture
def authorities(tmp_path: Path) -> tuple[Authority, Authority]:
    first, second = Authority(tmp_path / "first"), Authority(tmp_path / "second")
    second.number = 1
    return first, second


def files(directory: Path) -> dict[str, str]:
    return {name: str(directory / f"{name}.pem") for name in ("ca", "cert", "key")}


def own(directory: Path) -> dict[str, str]:
    """What a client is configured with."""
    given = files(directory)
    return {"agent_ca": given["ca"], "agent_cert": given["cert"], "agent_cert_key": given["key"]}


def test_an_agent_shows_the_certificate_that_its_files_hold_now(
    tmp_path: Path, authorities: tuple[Authority, Authority]
) -> None:
    first, second = authorities
    first.give(tmp_path)
    with GrpcAgent(desks(2), **files(tmp_path)) as agent:
        old, new = own(tmp_path / "first"), own(tmp_path / "second")
        assert asked(agent, "sync", **old, agent_key=None) >= 1
        assert asked(agent, "sync", **new, agent_key=None, ask_timeout="300ms") == 0
        second.give(tmp_path)
        assert asked(agent, "sync", **new, agent_key=None) >= 1
        assert asked(agent, "sync", **old, agent_key=None, ask_timeout="300ms") == 0
        for name in ("ca", "cert", "key"):
            (tmp_path / f"{name}.pem").write_bytes(b"")  # as somebody writes it just now
            assert asked(agent, "sync", **new, agent_key=None) >= 1, "what was read last stays"
            (tmp_path / f"{name}.pem").unlink()
        assert asked(agent, "sync", **new, agent_key=None) >= 1


def test_a_client_shows_and_believes_what_its_files_hold_now(
    tmp_path: Path, authorities: tuple[Authority, Authority], eventually: Callable[..., None]
) -> None:
    first, second = authorities
    first.give(tmp_path)
    with GrpcAgent(desks(2), **files(tmp_path / "second")) as agent:
        router, asker = router_of(agent.endpoints(), **own(tmp_path), agent_key=None, ask_timeout="1s")
        asking = asker.ask(call_of(router))
        assert asking.bids == {}
        second.give(tmp_path)
        asker._channels._look_at = 0.0

        def is_answered() -> bool:
            asking = asker.ask(call_of(router))
            return asking is not None and bool(asking.bids)

        eventually(is_answered, "the agents are believed, and believe this client")
        router.close()


def test_a_collector_does_so_too(
    tmp_path: Path,
    authorities: tuple[Authority, Authority],
    eventually: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = authorities
    first.give(tmp_path)
    monkeypatch.setattr(collect, "RENEWED_S", 0.1)
    given = files(tmp_path)
    with GrpcAgent(desks(1), **files(tmp_path / "second")) as agent:
        it = Collected(fleet_of(agent.endpoints()), secret=b"")
        it.collector._files = given["ca"], given["cert"], given["key"]
        with it:
            eventually(lambda: it.collector.rounds > 1, "it was asked")
            assert not entries(it.digest)
            second.give(tmp_path)
            eventually(lambda: entries(it.digest), "the new files are read")


def test_a_digest_is_served_by_the_certificate_that_its_files_hold_now(
    tmp_path: Path,
    authorities: tuple[Authority, Authority],
    eventually: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = authorities
    first.give(tmp_path)
    monkeypatch.setattr(digest_server, "RENEWED_S", 0.05)
    given = files(tmp_path)
    with Collected(pair=(given["cert"], given["key"])) as it:
        url = it.url.replace("127.0.0.1", "localhost") + "/metrics"

        def is_served(authority: Authority) -> bool:
            try:
                context = ssl.create_default_context(cafile=str(authority.ca))
                return httpx2.get(url, verify=context, timeout=60, trust_env=False).status_code == 200
            except httpx2.ConnectError:
                return False

        assert is_served(first)
        assert not is_served(second)
        second.give(tmp_path)
        eventually(lambda: is_served(second), "the new certificate is shown")
