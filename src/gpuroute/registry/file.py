"""The registry in a JSON or TOML file, read again when it changes.

The file is polled by name, so it may be edited in place or replaced atomically, also through a symlink (as Kubernetes
does with config maps). A version that cannot be read, or has another shape, is reported and the last good one stays.
"""

from __future__ import annotations

import json
import stat
import threading
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from gpuroute.errors import InvalidRecord
from gpuroute.registry.publish import Publisher
from gpuroute.registry.view import View, document_records

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuroute.core.fleet import Fleet

SETTLED_S = 2.0  # the longest tick of a file system's clock
FILE_GRACE_S = 2.0


class FileRegistry:
    """Implements `Registry` over `{"pools": {NAME: {"config": {}, "endpoints": [...]}}}`.

    `poll` and `grace` in seconds; the grace (see `view`) covers a file that is caught half-written.
    """

    def __init__(self, path: str | Path, *, poll: float = 0.5, grace: float = FILE_GRACE_S) -> None:
        self.path = lasting(path)
        self.poll = poll
        self.grace = grace

    def subscribe(self, on_change: Callable[[Fleet], None]) -> FileSubscription:
        """Read the file and deliver its fleet before returning; if that fails, `error` says why and polling goes on."""
        return FileSubscription(self, on_change)


class FileSubscription:
    """A running poll, in one daemon thread."""

    def __init__(self, registry: FileRegistry, on_change: Callable[[Fleet], None]) -> None:
        self._path = registry.path
        self._poll = registry.poll
        self._view = View(grace=registry.grace, where=f"{registry.path}: ")
        self._publisher = Publisher(on_change, f"file://{registry.path.absolute()}")
        self._seen: object = None
        self._seen_at = 0.0  # when it was first found so
        self._settled = False
        self._stop = threading.Event()
        self._look()
        self._thread = threading.Thread(target=self._run, name="gpuroute-file", daemon=True)
        self._thread.start()

    @property
    def error(self) -> str | None:
        """Why the file's present content is not in use, or None."""
        return self._publisher.error

    def age(self, now: float) -> float:
        """Seconds at `now` (epoch) since the file was last found as it is in use; 0.0 before the first view."""
        return self._publisher.age(now)

    def close(self) -> None:
        """Stop polling. Idempotent; any thread."""
        self._publisher.closed = True
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)

    def _run(self) -> None:
        while not self._stop.wait(self._poll):
            self._look()

    def _look(self) -> None:
        """Read the file if it is not the one seen last, and deliver what is new."""
        try:
            self._read_if_changed()
        except (OSError, InvalidRecord) as error:
            self._publisher.trouble(str(error))
        except Exception as error:  # whatever a file leads to must not end the polling
            self._publisher.trouble(f"{self._path}: {error!r}")
        if not self._publisher.error:
            self._publisher.as_of = time.time()
        if self._publisher.as_of is not None:
            self._publisher.publish(self._view, time.monotonic(), stale=self._publisher.error is not None)

    def _read_if_changed(self) -> None:
        last, self._seen = self._seen, None
        status = self._path.stat()
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):  # to read a pipe may take for ever
            raise InvalidRecord(f"{self._path}: is no regular file; accepted: one that can be read again")
        seen = status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, status.st_dev
        now = time.monotonic()
        if seen != last:
            self._seen_at, self._settled = now, False
        if not self._settled:
            self._view.replace(document_records(_read(self._path), str(self._path)), now)
            self._publisher.trouble(None)
        # Within a tick of its file system's clock, whatever that clock says, a file may change without a sign.
        self._settled = now - self._seen_at > SETTLED_S
        self._seen = seen


def _read(path: Path) -> object:
    data = path.read_bytes()
    try:
        return tomllib.loads(data.decode()) if path.suffix == ".toml" else json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidRecord(f"{path}: {error or 'too deep'}; accepted: JSON, or TOML in a .toml file") from None


def lasting(path: str | Path) -> Path:
    """The path as it is to be understood from now on, also when the process changes its directory, as daemons do."""
    try:
        return Path(path).absolute()
    except OSError:  # the present directory is gone
        return Path(path)
