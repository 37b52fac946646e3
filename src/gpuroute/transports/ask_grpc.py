"""Asks over gRPC, where a mesh or a policy wants identity: the very same messages, as payload of one unary method.

Costs several times what a datagram does. The answer arrives on a thread of grpcio's, which only hands its bytes over.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc

from gpuroute.core.asking import GRPC_METHOD
from gpuroute.forms import read_pem, stamps

if TYPE_CHECKING:
    from collections.abc import Callable

OPTIONS = (("grpc.enable_retries", 0), ("grpc.max_receive_message_length", 1024), ("grpc.enable_http_proxy", 0))

UNUSED_S = 600.0
"""Channels that no ask went by for so long are those of agents that are gone: pods come and go for months."""

RENEWED_S = 60.0
"""How often it is looked at whether the files of certificates were replaced."""

_ABANDONED: list[object] = []  # of a forked child's parent: never touched there


class Open:
    """A channel, its method, and when it was last used."""

    __slots__ = ("channel", "say", "used_at")

    def __init__(self, channel: grpc.Channel, say: Any) -> None:
        self.channel, self.say, self.used_at = channel, say, 0.0


class Channels:
    """One channel for each agent. Safe from any thread; opens nothing before it is used."""

    def __init__(self, ca: str | None, cert: str | None, key: str | None) -> None:
        self._files = ca, cert, key
        self._lock = threading.Lock()
        self._open: dict[tuple[str, str], Open] = {}
        self._stamps: tuple[int, ...] = ()
        self._look_at = 0.0

    def say(self, data: bytes, scheme: str, target: str, timeout: float, deliver: Callable[[bytes], None]) -> None:
        """Send one message; an answer, if there is one, is delivered from another thread. Never raises or blocks."""
        with suppress(grpc.RpcError, OSError, ValueError):
            said = self._say(scheme, target).future(data, timeout=timeout)
            said.add_done_callback(lambda call: _deliver(call, deliver))

    def _say(self, scheme: str, target: str) -> Any:
        with self._lock:
            now, key = time.monotonic(), (scheme, target)
            if scheme == "grpcs" and now >= self._look_at:
                self._renew(now)
            found = self._open.pop(key, None)
            if found is None:
                channel = self._channel(scheme, target)
                found = Open(channel, channel.unary_unary(GRPC_METHOD))
            found.used_at = now
            self._open[key] = found  # as the last
            while now - (oldest := next(iter(self._open.items())))[1].used_at > UNUSED_S:
                self._open.pop(oldest[0]).channel.close()
            return found.say

    def _renew(self, now: float) -> None:
        """A channel keeps the certificates that it was opened with; those that were replaced end before long."""
        self._look_at = now + RENEWED_S
        with suppress(OSError):
            seen = stamps(*self._files)
            if seen != self._stamps:
                self._stamps = seen
                for key in [key for key in self._open if key[0] == "grpcs"]:
                    self._open.pop(key).channel.close()

    def _channel(self, scheme: str, target: str) -> grpc.Channel:
        if scheme == "grpc":
            return grpc.insecure_channel(target, OPTIONS)
        ca, cert, key = map(read_pem, self._files)
        return grpc.secure_channel(target, grpc.ssl_channel_credentials(ca, key, cert), OPTIONS)

    def abandon(self) -> None:
        """Forget the parent's channels, in a forked child."""
        _ABANDONED.append(self._open)
        self._lock, self._open = threading.Lock(), {}

    def __del__(self) -> None:
        for one in self._open.values():
            one.channel.close()


def _deliver(call: Any, deliver: Callable[[bytes], None]) -> None:
    if not call.cancelled() and call.code() is grpc.StatusCode.OK:
        answer = call.result()
        if answer:
            deliver(answer)
