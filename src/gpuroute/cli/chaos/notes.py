"""Notes of a run that may be long: kept in a file, so that the memory of this process is that of what it tests.

A dictionary per call would be ten megabytes in ten minutes, and look like a leak of the library.
"""

from __future__ import annotations

import pickle
import tempfile
from typing import Generic, TypeVar

T = TypeVar("T")


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
