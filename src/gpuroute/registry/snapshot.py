"""The last good fleet on disk, so that a process can start while its registry is down.

One JSON document in the format of the file registry, plus where it came from and when. It may hold endpoint headers,
which are secret: mode 0600, and a file that others could have written is not believed. Written to a sibling, synced
and renamed: a reader sees the old document or the new one, never a part. What cannot be read counts as absent.
"""

from __future__ import annotations

import json
import math
import os
import stat
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from gpuroute.errors import InvalidRecord
from gpuroute.registry.publish import log
from gpuroute.registry.view import document_of, document_records

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from gpuroute.core.fleet import Fleet, PoolSpec

SAVE_INTERVAL_S = 5.0
SAVE_AGAIN_S = 600.0  # though nothing changed: its age tells how long the registry has been away
MAX_AS_OF = 1e12
LEFTOVER_S = 60.0  # a sibling that old belongs to a writer that was killed


class Snapshot(NamedTuple):
    """What was on disk: records as `View.replace` takes them, and the epoch second when they were true."""

    records: Mapping[str, object]
    as_of: float


class Keeper:
    """Keeps the last good fleet of one registry on disk; without a path it does nothing. One thread, beside which another
    one writes: a disk that hangs, as of a lost file server, must not keep the news of the fleet from its calls."""

    def __init__(self, path: Path | None, source: str) -> None:
        self._path = path
        self._source = source
        self._saved: Fleet | None = None
        self._saved_at = -math.inf
        self._trouble = ""
        self._writer: threading.Thread | None = None

    def load(self) -> Snapshot | None:
        """What was kept, by this process or an earlier one. Raises as `load` does; None without a path."""
        return None if self._path is None else load(self._path, source=self._source)

    def due(self, fleet: Fleet | None) -> float:
        """When this fleet is to be saved (a time as given to `keep`), or infinity."""
        if self._path is None or fleet is None or not any(spec.endpoints for spec in fleet.pools.values()):
            return math.inf  # a fleet without endpoints is nothing to start from
        return self._saved_at + (SAVE_AGAIN_S if fleet is self._saved else SAVE_INTERVAL_S)

    def keep(self, fleet: Fleet, now: float) -> None:
        """Begin to save the fleet if that is due and the last one is saved."""
        if now < self.due(fleet) or self._path is None:
            return
        self._saved_at = now
        if self._writer is None or not self._writer.is_alive():
            writer = threading.Thread(target=self._save, args=(self._path, fleet), name="gpuroute-snapshot", daemon=True)
            with suppress(RuntimeError):  # no more threads: the next time
                writer.start()
                self._saved, self._writer = fleet, writer  # even if it fails: the next attempt comes with the next change

    def wait(self, timeout: float) -> None:
        """Wait until what was begun is saved, at most for so many seconds."""
        if self._writer is not None:
            self._writer.join(timeout)

    def _save(self, path: Path, fleet: Fleet) -> None:
        try:
            save(path, fleet.pools, source=self._source, as_of=time.time())
            self._trouble = ""
        except OSError as error:
            before, self._trouble = self._trouble, str(error)
            if self._trouble != before:  # a fleet that changes all the time would say it every few seconds
                log.warning("the registry snapshot cannot be written: %s", error)


def save(path: Path, pools: Mapping[str, PoolSpec], *, source: str, as_of: float) -> None:
    """Replace the snapshot atomically. Raises OSError; other processes may save to the same path."""
    text = json.dumps({"source": source, "as_of": as_of, **document_of(pools)})
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path)
    sibling = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        _write(sibling, text)
        sibling.replace(path)
    finally:
        sibling.unlink(missing_ok=True)


def load(path: Path, *, source: str) -> Snapshot:
    """The snapshot of `source`. Raises OSError or InvalidRecord with the reason why there is none to use."""
    with path.open(encoding="utf-8") as file:
        status = os.fstat(file.fileno())
        if status.st_uid not in {os.geteuid(), 0} or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise InvalidRecord(f"snapshot {path}: may have been written by others; accepted: own file, mode 0600")
        try:
            document = json.load(file)
        except (ValueError, RecursionError):
            raise InvalidRecord(f"snapshot {path}: is not JSON; it is ignored") from None
    records = document_records(document, f"snapshot {path}")
    as_of = document.get("as_of")
    if document.get("source") != source:
        raise InvalidRecord(f"snapshot {path}: is of another registry than {source}; it is ignored")
    if type(as_of) not in {int, float} or not 0 <= as_of < MAX_AS_OF:
        raise InvalidRecord(f"snapshot {path}: does not say since when it is true; it is ignored")
    return Snapshot(records, float(as_of))


def _write(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _remove_leftovers(path: Path) -> None:
    for other in path.parent.iterdir():
        try:
            ours = other.name.startswith(f"{path.name}.") and other.suffix == ".tmp"
            if ours and time.time() - other.stat().st_mtime > LEFTOVER_S:
                other.unlink()
        except OSError:
            continue  # another process was quicker
