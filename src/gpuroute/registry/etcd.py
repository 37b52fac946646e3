"""The registry in etcd: list, then watch, and whenever in doubt list again and compare.

Every end of a watch (a lost connection, a compacted revision, an expired token, silence) leads to a new listing, never
to a resumed watch: a delete that was missed would otherwise keep a dead endpoint in use for ever. While there is no
watch the last view stays in use, flagged stale. If there never was one, it is taken from the snapshot on disk.

One daemon thread, started by `subscribe`. A forked child has to subscribe anew.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

import grpc

from gpuroute.core.wire import WireError
from gpuroute.errors import InvalidRecord
from gpuroute.registry.clients import EtcdSeat, count_clients
from gpuroute.registry.etcd_client import EtcdClient, EtcdError, retrying
from gpuroute.registry.file import lasting
from gpuroute.registry.publish import Publisher, log
from gpuroute.registry.schema import shown
from gpuroute.registry.snapshot import Keeper
from gpuroute.registry.trtllm import DEFAULT_POOL, place_of, read_record
from gpuroute.registry.view import View

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuroute.core.fleet import Fleet
    from gpuroute.core.subset import Seat
    from gpuroute.registry.etcd_config import EtcdConfig
    from gpuroute.registry.etcd_watch import WatchStream
    from gpuroute.registry.view import Record

RELIST_JITTER_S = 0.5  # a restarted etcd meets its clients spread over this long
REFUSED_PAUSE_S = 5.0
COALESCE_S = 0.05  # a burst of joins is delivered in slices this long, its first event at once
QUIET = 3.0  # and a slice lasts so many times what the last one took to deliver: calls need the processor too
MAX_QUIET_S = 1.0


class EtcdReader:
    """Implements `Registry` over records in etcd. Immutable: every subscription has its own connection."""

    def __init__(self, config: EtcdConfig, *, snapshot_path: str | None = None, grace: float = 10.0) -> None:
        self.config = config
        self.snapshot_path = lasting(snapshot_path) if snapshot_path else None
        self.grace = grace

    def subscribe(self, on_change: Callable[[Fleet], None]) -> EtcdSubscription:
        """Start to watch; returns at once. Problems of etcd are in the subscription's `error`, never raised."""
        return EtcdSubscription(self, on_change)


class EtcdRegistry(EtcdReader):
    """The same over `{prefix}/pools/`; and clients that use it can be counted."""

    def take_seat(
        self, on_seat: Callable[[Seat], None], place: tuple[str, str] = ("", ""), *, numbered: bool = True
    ) -> EtcdSeat:
        """Be one of the clients that are counted, in this region and zone; returns at once. Troubles: its `error`."""
        return EtcdSeat(self.config, on_seat, place, numbered=numbered)

    def count_clients(self) -> int:
        """How many clients hold a seat. Blocks for one call to etcd; RegistryError if that fails."""
        return count_clients(self.config)


class EtcdSubscription:
    """A running watch of etcd."""

    def __init__(self, registry: EtcdReader, on_change: Callable[[Fleet], None]) -> None:
        self._config = registry.config
        self._keeper = Keeper(registry.snapshot_path, self._config.source)
        ours = not self._config.dialect
        self._prefix = f"{self._config.prefix}/pools/" if ours else f"{self._config.prefix.lstrip('/')}/"
        self._read = _as_it_is if ours else self._translated
        self._places: dict[str, str] = {}  # keys in the view, by those in etcd
        self._view = View(grace=registry.grace, where=self._prefix if ours else "", below=self._prefix)
        self._publisher = Publisher(on_change, self._config.source)
        self._client = EtcdClient(self._config)
        self._stream: WatchStream | None = None
        self._dirty = False  # events that are not delivered yet
        self._quiet_until = 0.0
        self._stop = threading.Event()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="gpuroute-etcd", daemon=True)
        self._thread.start()

    @property
    def error(self) -> str | None:
        """Why the view is not live, or None."""
        return self._publisher.error

    def age(self, now: float) -> float:
        """Seconds at `now` (epoch) since etcd last confirmed the view; 0.0 before the first view."""
        return self._publisher.age(now)

    def close(self) -> None:
        """Stop the watch and disconnect, in well under a second. Idempotent; any thread."""
        self._publisher.closed = True
        self._stop.set()
        if self._pid != os.getpid():
            return  # the thread and the connection are the parent's
        stream = self._stream
        if stream is not None:
            stream.close()
        self._client.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)

    # ------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        listing = retrying(self._stop, self._lost)
        while not self._stop.is_set():
            pause = RELIST_JITTER_S
            try:
                self._follow(listing(self._list))
            except EtcdError as error:
                self._lost(error)
                pause = REFUSED_PAUSE_S if error.refused else pause
            except Exception as error:
                log.exception("the watch of %s failed and starts again", self._config.source)
                self._lost(EtcdError(f"{type(error).__name__} in the watch"))
                pause = REFUSED_PAUSE_S
            self._stop.wait(pause * self._config.random())
        self._client.close()
        self._keeper.wait(1.0)

    def _list(self) -> int:
        revision, found = self._client.list(self._prefix)
        now = time.monotonic()
        if not found and self._publisher.fleet is None:
            self._boot()  # a process that starts while the keys are gone has the same grace as its elders
        records = [(key := kv.key.removeprefix(self._prefix), *self._read(key, kv.value)) for kv in found]
        self._places = {key: place for key, place, _ in records}
        self._view.replace({place: record for _, place, record in records}, now)
        self._dirty = True
        self._confirmed(now)
        return revision

    def _follow(self, revision: int) -> None:
        """Apply events until the revision is compacted away; EtcdError when the watch ends otherwise."""
        self._stream = stream = self._client.watch(self._prefix, revision + 1)
        if self._stop.is_set():
            stream.close()
        try:
            for response in stream:
                if response.compacted:
                    return
                if response.canceled:  # to be seen before anything else: such a stream stays open, and silent
                    raise EtcdError(f"etcd refused the watch: {response.reason}", refused=True)
                now = time.monotonic()
                for put, kv in response.events:
                    self._apply(put, kv.key.removeprefix(self._prefix), kv.value, now)
                self._confirmed(now)
                self._ask_again(stream)
        except (grpc.RpcError, WireError) as error:
            raise EtcdError("the watch is open but silent") if stream.silent else self._client.error(error) from None
        finally:
            stream.close()
        raise EtcdError("etcd ended the watch")

    def _apply(self, put: bool, key: str, value: bytes, now: float) -> None:
        self._dirty = True
        place, before = "", self._places.get(key)
        if put:
            place, record = self._read(key, value)
            self._view.put(place, record)
            self._places[key] = place
        else:
            self._places.pop(key, None)
        if before is not None and before != place:
            self._view.delete(before, now)

    def _translated(self, key: str, value: bytes) -> tuple[str, Record]:
        """Where a record of another dialect belongs, and what it says; a bad one stays where it was."""
        try:
            record = read_record(shown(f"{self._prefix}{key}"), value)
        except InvalidRecord as error:
            return self._places.get(key, f"{DEFAULT_POOL}/endpoints/{key}"), error
        return place_of(key, record), record

    def _confirmed(self, now: float) -> None:
        """The view is what etcd has: deliver it, now or soon, and keep it on disk."""
        self._publisher.as_of = time.time()
        self._publisher.trouble(None)
        if now >= self._quiet_until:
            self._dirty = False
            news = self._publisher.publish(self._view, now)
            after = time.monotonic()
            self._quiet_until = after + min(MAX_QUIET_S, max(COALESCE_S if news else 0.0, QUIET * (after - now)))
        if self._publisher.fleet is not None:
            self._keeper.keep(self._publisher.fleet, now)

    def _ask_again(self, stream: WatchStream) -> None:
        """Have etcd confirm the view again when something is due: a held slice, an end of grace, a save."""
        change = self._quiet_until if self._dirty else self._view.due()
        stream.ask(min(max(change, self._quiet_until), self._keeper.due(self._publisher.fleet)))

    def _lost(self, error: EtcdError) -> None:
        """No watch: the view gets old. The next attempt goes to the next member."""
        self._client.rotate()
        trouble = str(error) if self._publisher.fleet else f"{error}{self._boot()}"
        self._publisher.trouble(trouble)
        if self._publisher.as_of is not None:
            self._publisher.publish(self._view, time.monotonic(), stale=True)

    def _boot(self) -> str:
        """Take the view from the snapshot, or return why not."""
        try:
            found = self._keeper.load()
            if found is not None:
                self._view.replace(found.records, time.monotonic())
                self._publisher.as_of = found.as_of
        except (OSError, InvalidRecord) as error:
            return f"; {error}"
        except Exception as error:  # whatever a damaged file leads to must not end this thread
            return f"; the snapshot cannot be used: {error!r}"
        return ""


def _as_it_is(key: str, value: bytes) -> tuple[str, Record]:
    return key, value
