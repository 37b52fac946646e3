"""What one process collects of all agents, in versions, and as bodies for those who know an older one. Pure.

Each round of asks is a version. A client that knows one of the last gets what changed since, any other all of it; bodies
are made once for each of these and kept until the next round.
"""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING, NamedTuple

from gpuroute.core.digest import encode

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from gpuroute.core.digest import Entry, Key

REMEMBERED = 120
"""Versions back to which a delta is given: a minute."""

MOST_BODIES = 64
SMALL = 512
"""Bodies below that are not compressed."""


class Body(NamedTuple):
    """What is sent, and as `gzip` or "" for as it is."""

    data: bytes
    encoding: str


class Known(NamedTuple):
    """What an agent said last, and in which version that was new."""

    entry: Entry
    version: int


class Digest:
    """One process's digest. Not locked: one loop owns it. Times in seconds of one monotonic clock."""

    def __init__(self, ident: str) -> None:
        self.id = ident
        self.version = 0
        self.as_of = 0.0
        self.silent: frozenset[Key] = frozenset()
        self._known: dict[Key, Known] = {}
        self._gone: dict[Key, int] = {}
        self._bodies: dict[tuple[int, bool], Body] = {}

    def __len__(self) -> int:
        return len(self._known)

    def update(self, said: Mapping[Key, Entry], members: Collection[Key], as_of: float) -> None:
        """One round, begun at `as_of`: what agents said, and all endpoints that have one now."""
        self.version += 1
        self.as_of = as_of
        for key in [key for key in self._known if key not in members]:
            del self._known[key]
            self._gone[key] = self.version
        for key, entry in said.items():
            known = self._known.get(key)
            if known is None or known.entry != entry:
                self._known[key] = Known(entry, self.version)
                self._gone.pop(key, None)
        self.silent = frozenset(key for key in self._known if key not in said)
        self._gone = {key: version for key, version in self._gone.items() if version > self.version - REMEMBERED}
        self._bodies.clear()

    def body(self, ident: str, since: int, *, compressed: bool = False) -> Body:
        """For who knows version `since` of the digest `ident`."""
        if ident != self.id or not self.version - REMEMBERED <= since < self.version or since < 1:
            since = 0
        found = self._bodies.get((since, compressed))
        if found is None:
            if len(self._bodies) >= MOST_BODIES:
                self._bodies.clear()
            found = self._bodies[since, compressed] = self._body(since, compressed)
        return found

    def _body(self, since: int, compressed: bool) -> Body:
        changed = {key: known.entry for key, known in self._known.items() if known.version > since}
        gone = [key for key, version in self._gone.items() if since and version > since]
        data = encode(self.id, self.version, since, changed, self.silent, gone)
        if compressed and len(data) > SMALL:
            return Body(gzip.compress(data, compresslevel=1, mtime=0), "gzip")
        return Body(data, "")
