"""Seats in etcd: which of how many clients this one is.

`{prefix}/clients/{ordinal}` is held under a lease by each client that takes part, and its key is its ordinal, so that
etcd itself sees to it that nobody shares one. A client that has a zone or region also holds a key under
`{prefix}/places/{region}/{zone}/`, even if it needs no ordinal. Every few seconds it renews its lease and counts the
keys, of all clients and of those around it, in two small requests; nobody watches, since a thousand clients that restart
would tell a thousand others. Whoever has an ordinal beyond the count moves into a hole below it: after a client left, one
other moves, and after a restart, nobody.

While etcd is away the last seat holds. A client that comes back takes its old ordinal again if it is free, and that the
others are fewer is believed after a while only: an etcd that lost its data must not make everybody talk to everything.

One daemon thread. A forked child has to take a seat of its own.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from typing import TYPE_CHECKING
from urllib.parse import quote

from gpuroute.core.subset import Seat, free_ordinal, repacked
from gpuroute.registry.etcd_client import EtcdClient, EtcdError, retrying
from gpuroute.registry.publish import log

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuroute.registry.etcd_config import EtcdConfig

TTL_S = 15.0
SETTLE_S = 15.0  # longer than a client takes to restart, or to come back after etcd did
CLOSE_S = 1.0  # an etcd that is away must not hold up a shutdown; the lease ends by itself
MOST_GUESSES = 12
_64_BITS = (1 << 64) - 1


def clients_prefix(prefix: str) -> str:
    """Where the keys of clients are, below the registry's prefix."""
    return f"{prefix}/clients/"


def count_clients(config: EtcdConfig) -> int:
    """How many clients hold a seat now. RegistryError if etcd does not say."""
    client = EtcdClient(config)
    try:
        prefix = clients_prefix(config.prefix)
        return client.count([prefix])[0][0]
    finally:
        client.close()


class EtcdSeat:
    """One client's seat, kept until `close`; `on_seat` hears of it and of every change, in the thread that keeps it.

    `numbered`: it needs an ordinal; may be switched on later.
    """

    def __init__(
        self,
        config: EtcdConfig,
        on_seat: Callable[[Seat], None],
        place: tuple[str, str] = ("", ""),
        *,
        numbered: bool = True,
        ttl: float = TTL_S,
        every: float = TTL_S / 3,
        settle: float = SETTLE_S,
    ) -> None:
        self.error: str | None = None
        self.seat: Seat | None = None
        self.numbered = numbered
        self._on_seat = on_seat
        self._random = config.random
        self._client = EtcdClient(config)
        self._prefix = clients_prefix(config.prefix)
        region, zone = (quote(name, safe="") or "-" for name in place)
        places = f"{config.prefix}/places/"
        self._region = f"{places}{region}/"
        self._zone = f"{self._region}{zone}/"
        self._placed = any(place)
        self._counted = [self._prefix, *((self._zone, self._region, places) if self._placed else ())]
        self._ttl = ttl
        self._every = every
        self._settle = settle
        self._lease = 0
        self._ordinal: int | None = None
        self._outside_since: float | None = None
        self._fewer_since: float | None = None
        self._stop = threading.Event()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="gpuroute-seat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Give the seat up, at once if etcd answers within a second, else when its lease ends. Idempotent; any thread."""
        self._stop.set()
        if self._pid == os.getpid() and threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S)

    # ------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        keeping = retrying(self._stop, self._lost)
        while not self._stop.is_set():
            try:
                keeping(self._keep)
            except EtcdError as error:
                self._lost(error)
            except Exception as error:
                log.exception("keeping a seat below %s failed; it goes on", self._prefix)
                self.error = type(error).__name__
            self._stop.wait(self._every * (0.8 + 0.2 * self._random()))
        self._leave()

    def _keep(self) -> None:
        """One round: the lease lives, the ordinal is ours and not out of range, and what changed is told."""
        if not self._lease or not self._client.keep_alive(self._lease):
            self._lease = self._client.grant(self._ttl)
        counts, held = self._client.count(self._counted, self._own(), self._lease)
        if not held or (self.numbered and self._ordinal is None):
            if self._placed:
                self._client.put(self._place(), self._value(), self._lease)
            if self.numbered:
                self._ordinal = self._claim(self._ordinal)
            counts, _ = self._client.count(self._counted)
        now = time.monotonic()
        if self._ordinal is not None:
            self._pack(self._ordinal, counts[0], now)
        self._show(Seat(self._ordinal, self._believed(counts[0], now), *counts[1:]))
        if self.error:
            log.info("the seat below %s is kept again", self._prefix)
        self.error = None

    def _own(self) -> list[str]:
        """The keys that are to be there under our lease."""
        places = [self._place()] if self._placed else []
        return places if self._ordinal is None else [*places, self._key(self._ordinal)]

    def _claim(self, wanted: int | None) -> int:
        """An ordinal of our own: the one we had if it is free, else a low one.

        Guesses spread twice as wide after each miss: five hundred that start at once are seated in ten rounds.
        """
        taken: set[int] = set()
        for kv in self._client.list(self._prefix)[1]:
            ordinal = self._ordinal_of(kv.key)
            if kv.lease == self._lease and ordinal is not None:
                return ordinal  # etcd did it, though its answer never came
            taken |= {ordinal} if ordinal is not None else set()
        for guess in range(MOST_GUESSES):
            ordinal = wanted if wanted is not None else free_ordinal(taken, int(self._random() * 2**guess))
            if ordinal not in taken and self._client.create(self._key(ordinal), self._value(), self._lease):
                return ordinal
            taken.add(ordinal)
            wanted = None
        raise EtcdError("other clients took every ordinal that was tried")

    def _pack(self, ordinal: int, count: int, now: float) -> None:
        """Move down into a hole, once there has been one for a while."""
        if ordinal < count:
            self._outside_since = None
            return
        self._outside_since = now if self._outside_since is None else self._outside_since
        if now - self._outside_since < self._settle:
            return
        self._outside_since = None
        others = (self._ordinal_of(kv.key) for kv in self._client.list(self._prefix)[1])
        hole = repacked(ordinal, {other for other in others if other is not None})
        key = self._key(ordinal)
        if hole != ordinal and self._client.create(self._key(hole), self._value(), self._lease, instead_of=key):
            self._ordinal = hole

    def _believed(self, count: int, now: float) -> int:
        """More clients are believed at once, fewer after a while."""
        shown = self.seat.clients if self.seat is not None else 0
        if count >= shown:
            self._fewer_since = None
            return count
        self._fewer_since = now if self._fewer_since is None else self._fewer_since
        if now - self._fewer_since < self._settle:
            return shown
        self._fewer_since = None
        return count

    def _show(self, seat: Seat) -> None:
        if seat == self.seat or self._stop.is_set():
            return
        self.seat = seat
        try:
            self._on_seat(seat)
        except Exception:
            log.exception("who asked for a seat below %s failed on it", self._prefix)

    def _lost(self, error: EtcdError) -> None:
        self._client.rotate()
        if not self.error:
            log.warning("the seat below %s: %s", self._prefix, error)
        self.error = str(error)

    def _leave(self) -> None:
        try:
            if self._lease:
                self._client.revoke(self._lease)
        except EtcdError as error:
            log.info("a seat below %s was not given up (%s); it goes with its lease", self._prefix, error)
        finally:
            self._client.close()

    def _place(self) -> str:
        return f"{self._zone}{self._lease & _64_BITS:x}"

    def _key(self, ordinal: int) -> str:
        return f"{self._prefix}{ordinal}"

    def _ordinal_of(self, key: str) -> int | None:
        """None for a key that is no seat, as somebody may have written it by hand."""
        text = key.removeprefix(self._prefix)
        return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None

    def _value(self) -> bytes:
        """For people who look into etcd."""
        return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": round(time.time())}).encode()
