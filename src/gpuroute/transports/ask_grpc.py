"""Asks over gRPC, where a mesh or a policy wants identity: the very same messages, as payload of one unary method.

Costs several times what a datagram does. The answer arrives on a thread of grpcio's, which only hands its bytes over.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from gpuroute.core.asking import GRPC_METHOD

if TYPE_CHECKING:
    from collections.abc import Callable

OPTIONS = (("grpc.enable_retries", 0), ("grpc.max_receive_message_length", 1024), ("grpc.enable_http_proxy", 0))

_ABANDONED: list[object] = []  # of a forked child's parent: never touched there


class Channels:
    """One channel for each agent. Safe from any thread; opens nothing before it is used."""

    def __init__(self, ca: str | None, cert: str | None, key: str | None) -> None:
        self._files = ca, cert, key
        self._lock = threading.Lock()
        self._says: dict[tuple[str, str], Any] = {}
        self._channels: list[grpc.Channel] = []

    def say(self, data: bytes, scheme: str, target: str, timeout: float, deliver: Callable[[bytes], None]) -> None:
        """Send one message; an answer, if there is one, is delivered from another thread. Never raises or blocks."""
        with suppress(grpc.RpcError, OSError, ValueError):
            said = self._say(scheme, target).future(data, timeout=timeout)
            said.add_done_callback(lambda call: _deliver(call, deliver))

    def _say(self, scheme: str, target: str) -> Any:
        with self._lock:
            found = self._says.get((scheme, target))
            if found is None:
                channel = self._open(scheme, target)
                self._channels.append(channel)
                found = self._says[scheme, target] = channel.unary_unary(GRPC_METHOD)
            return found

    def _open(self, scheme: str, target: str) -> grpc.Channel:
        if scheme == "grpc":
            return grpc.insecure_channel(target, OPTIONS)
        ca, cert, key = (Path(path).read_bytes() if path else None for path in self._files)
        return grpc.secure_channel(target, grpc.ssl_channel_credentials(ca, key, cert), OPTIONS)

    def abandon(self) -> None:
        """Forget the parent's channels, in a forked child."""
        _ABANDONED.append((self._says, self._channels))
        self._lock, self._says, self._channels = threading.Lock(), {}, []

    def __del__(self) -> None:
        for channel in self._channels:
            channel.close()


def _deliver(call: Any, deliver: Callable[[bytes], None]) -> None:
    if not call.cancelled() and call.code() is grpc.StatusCode.OK:
        answer = call.result()
        if answer:
            deliver(answer)
