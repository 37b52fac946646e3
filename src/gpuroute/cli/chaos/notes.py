"""Notes of a run that may be long: kept in a file, so that the memory of this process is that of what it tests.

A dictionary per call would be ten megabytes in ten minutes, and look like a leak of the library. So would the servers'
records, which grow with the run: they are copied into the file in small pieces, and read when all is over.
"""

from __future__ import annotations

import http.client
import json
import pickle
import shutil
import tempfile
import threading
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")
PIECE = 16 * 1024
PATIENCE_S = 10.0


class Notes(Generic[T]):
    """Objects that can be pickled, in the order in which they were added. One thread at a time."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="gpuroute-chaos-")  # noqa: SIM115  (closed in close)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, note: T) -> None:
        """Write one down."""
        pickle.dump(note, self._file, pickle.HIGHEST_PROTOCOL)
        self._count += 1

    def read(self) -> list[T]:
        """All of them. Adding goes on at the end."""
        self._file.seek(0)
        return [pickle.load(self._file) for _ in range(self._count)]

    def close(self) -> None:
        """Forget them."""
        self._file.close()


class Records:
    """What stand-in servers say of themselves, whole answers of theirs. Safe from any thread."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="gpuroute-chaos-")  # noqa: SIM115  (closed in close)
        self._lock = threading.Lock()

    def take(self, name: str, url: str) -> None:
        """Ask the server at this URL, and keep what it says under a name. Raises OSError, HTTPException."""
        place = urlsplit(url)
        asking = http.client.HTTPConnection(place.hostname or "", place.port, timeout=PATIENCE_S)
        with self._lock:
            start = self._file.seek(0, 2)
            try:
                asking.request("GET", f"{place.path}/_control")
                self._file.write(json.dumps(name).encode() + b"\n")
                shutil.copyfileobj(asking.getresponse(), self._file, PIECE)
                self._file.write(b"\n")
            except BaseException:
                self._file.truncate(start)
                raise
            finally:
                asking.close()

    def read(self) -> list[tuple[str, dict[str, Any]]]:
        """All of them, with their names."""
        with self._lock:
            self._file.seek(0)
            lines = [json.loads(line) for line in self._file]
        return list(zip(lines[::2], lines[1::2], strict=True))

    def close(self) -> None:
        """Forget them."""
        self._file.close()
