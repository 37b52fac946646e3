"""The connectivity of a pool, for those who ask a channel: `subscribe`, `grpc.channel_ready_future`.

A pool is as ready as its most ready endpoint, which is how grpc's own balancers aggregate subchannels. Asking to connect
tries endpoints one after another until one is ready. Endpoints without a channel count as idle. Nothing here runs unless
somebody is subscribed: grpcio polls each subscribed channel from a thread of its own.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from grpc import ChannelConnectivity

from gpuroute.core.endpoint import GRPC
from gpuroute.errors import GpurouteError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gpuroute.core.endpoint import Endpoint
    from gpuroute.transports.grpc_hub import Hub
    from gpuroute.transports.grpc_peers import Peer, Peers

    Callback = Callable[[ChannelConnectivity], None]

READY, IDLE, BROKEN = ChannelConnectivity.READY, ChannelConnectivity.IDLE, ChannelConnectivity.TRANSIENT_FAILURE
_RANK = (READY, ChannelConnectivity.CONNECTING, IDLE, BROKEN)


def aggregate(states: Iterable[ChannelConnectivity]) -> ChannelConnectivity:
    """The best of several states; IDLE if there is none."""
    return min((state for state in states if state in _RANK), key=_RANK.index, default=IDLE)


def untried(hub: Hub, peers: Peers) -> Endpoint | None:
    """An endpoint in service that has no channel yet, any of them."""
    known = {peer.endpoint.id for peer in peers}
    try:
        routable = hub.router.pool(hub.pool, GRPC).snapshot.routable
    except GpurouteError:
        return None
    start = int(hub.router.random() * len(routable))
    states = (*routable[start:], *routable[:start])
    return next((state.endpoint for state in states if state.id not in known), None)


class Connectivity:
    """Tells subscribers about changes, in order, from grpcio's threads. Safe from any thread."""

    def __init__(self, hub: Hub, peers: Peers) -> None:
        self._hub = hub
        self._peers = peers
        self._lock = threading.RLock()
        self._told: list[tuple[Callback, list[Any]]] = []
        self._states: dict[Peer, ChannelConnectivity] = {}
        self._watched: dict[Peer, Callback] = {}
        self._connect = False
        peers.on_open = self._watch

    def subscribe(self, callback: Callback, *, connect: bool) -> None:
        """Add a subscriber; `connect`: try to make the pool ready."""
        with self._lock:
            self._told.append((callback, [None]))
            self._connect |= connect
        threading.Thread(target=self._begin, daemon=True).start()

    def unsubscribe(self, callback: Callback) -> None:
        """Remove a subscriber. With the last one the polling ends."""
        with self._lock:
            entry = next((entry for entry in self._told if entry[0] == callback), None)
            if entry is not None:
                self._told.remove(entry)
        if not self._told:
            self._rest()

    def close(self) -> None:
        """Forget everyone."""
        with self._lock:
            self._told.clear()
        self._rest()

    def _rest(self) -> None:
        with self._lock:
            if self._told:
                return
            watched, self._watched, self._connect = self._watched, {}, False
            self._states.clear()  # nobody keeps them true from here on
        for peer, callback in watched.items():
            peer.channel.unsubscribe(callback)

    def _begin(self) -> None:
        try:
            self._hub.router.ready()
        except GpurouteError:
            return
        for peer in self._peers:
            self._watch(peer)
        self._go_on()

    def _go_on(self) -> None:
        """Open the next channel if a subscriber wants one and none is on its way; then tell the news."""
        with self._lock:
            for peer in [peer for peer in self._watched if peer.gone]:
                del self._watched[peer]
                self._states.pop(peer, None)
            if len(self._states) < len(self._watched):  # grpcio is about to tell the present state of the others
                return
            now = aggregate(self._states.values())
            wanted = self._connect and bool(self._told) and now in {IDLE, BROKEN}
        endpoint = untried(self._hub, self._peers) if wanted else None
        if endpoint is not None:
            peer = self._peers.hold(endpoint, self, self._hub.clock())
            self._peers.release(peer, self)
        self._tell()

    def _watch(self, peer: Peer) -> None:
        with self._lock:
            if not self._told or peer in self._watched:
                return
            callback = self._watched[peer] = partial(self._changed, peer)
            peer.channel.subscribe(callback, try_to_connect=self._connect)

    def _changed(self, peer: Peer, state: ChannelConnectivity) -> None:
        with self._lock:
            if peer not in self._watched:
                return
            self._states[peer] = state
        self._go_on()

    def _tell(self) -> None:
        with self._lock:
            now = aggregate(self._states.values())
            news = [(callback, last) for callback, last in self._told if last[0] is not now]
            for _, last in news:
                last[0] = now
        for callback, _ in news:
            callback(now)
