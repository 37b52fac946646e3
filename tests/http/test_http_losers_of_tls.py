"""Whoever loses a race is hung up on from another thread, while it may still be sending: never a byte in the clear."""

from __future__ import annotations

import socket
import ssl
from typing import TYPE_CHECKING, Any

import httpcore
import pytest
import trustme

from gpuroute.transports.reach import Address
from gpuroute.transports.wires import Wire

if TYPE_CHECKING:
    from http_stub import Stage

pytestmark = pytest.mark.real_time


def test_an_aborted_connection_sends_nothing_in_the_clear(stubs: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = trustme.CA()
    served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(served)
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    (a,) = stubs("a", tls=served)
    wire = Wire.connect(httpcore, Address("127.0.0.1", a.port, trust), 30)
    sent: list[bytes] = []
    shutdown = socket.socket.shutdown

    def meanwhile(self: socket.socket, how: int) -> None:
        """What the thread that sends does in the moment before the socket is shut down."""
        plain = socket.socket.send

        def seen(one: socket.socket, data: Any, *flags: int) -> int:
            sent.append(bytes(data))
            return plain(one, data, *flags)

        with monkeypatch.context() as patch:
            patch.setattr(socket.socket, "send", seen)
            wire.write(b"the prompt")
        shutdown(self, how)

    monkeypatch.setattr(socket.socket, "shutdown", meanwhile)
    wire.abort()
    monkeypatch.undo()
    assert b"the prompt" not in sent
    with pytest.raises(httpcore.WriteError):
        wire.write(b"more")
    wire.abort()
    wire.close()
    wire.abort()
