"""The fleet digest: what all agents say, collected by one of them, for clients that cannot ask.

A digest is old when it arrives (0.5 to 1.5 s), and every client has the same one. So it says how long a queue was, never
who is idle now: nothing in it makes an endpoint a candidate (all clients would run to the same few), and what this
process has sent since is added. Fresher news, such as answers to own asks, are never overwritten.

The body is JSON, kept small by lists: `{"v": 1, "id": of the digest's process, "version": of this state, "since": the
version that it completes (0: it is whole), "pools": {pool: {endpoint: [state, running, waiting, queued prompt tokens (-1
unknown), KV use in thousandths, epoch]}}, "silent": {pool: [endpoints not heard in the last round]}, "gone": {pool:
[endpoints]}}`. Only what changed since that version is in it, but all endpoints that are not silent were heard. How old
the round is stands in the header `Gpuroute-Age`, in milliseconds. With a key, the header `Gpuroute-Auth` of the request
is `milliseconds nonce mac`, and `Gpuroute-Tag` of the answer authenticates its age and body for that nonce.

Pure; malformed bodies raise Garbled, nothing else.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import TYPE_CHECKING, Any, NamedTuple

from gpuroute.core.asking import EngineState, Garbled
from gpuroute.core.report import Report

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gpuroute.core.pool import Pool

VERSION = 1
PATH = "/digest"
AGE_HEADER, AUTH_HEADER, TAG_HEADER = "Gpuroute-Age", "Gpuroute-Auth", "Gpuroute-Tag"
SOURCES = tuple(f"digest:{state.name}" for state in EngineState)
BACKLOG_STEP = 0.2  # of the way to the mean queue of all, each time
MOST = 500_000  # endpoints: deltas must not pile up for ever
NOT_READY_TOKENS = 1_000_000  # what an engine that takes no calls is charged, as with asks

Key = tuple[str, str]
"""Pool and endpoint."""


class Entry(NamedTuple):
    """What the agent of one endpoint said. `queued_tokens` -1: it counts requests only; `kv`: thousandths in use."""

    state: int
    running: int
    waiting: int
    queued_tokens: int
    kv: int
    epoch: int

    def report(self, at: float) -> Report:
        """The same as a load report."""
        queued = self.queued_tokens
        if self.state != EngineState.READY:
            queued = max(0, queued) + NOT_READY_TOKENS
        return Report(
            at, self.running, self.waiting, queued, self.kv / 1000, epoch=self.epoch, source=SOURCES[self.state]
        )


class View:
    """What a client knows of a digest: whole after the first body, kept up by deltas. One thread."""

    def __init__(self) -> None:
        self.id = ""
        self.version = 0
        self._entries: dict[Key, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def apply(self, body: bytes, at: float) -> dict[str, dict[str, Report]]:
        """Take over a body whose round began `at`; the reports of all that were heard in it, by pool and endpoint.

        Raises Garbled, and then nothing was taken over.
        """
        try:
            data = json.loads(body)
            if data["v"] != VERSION:
                raise Garbled(f"a digest of version {data['v']!r} is not understood")
            ident, version, since = str(data["id"]), int(data["version"]), int(data["since"])
            changed = {(pool, name): _entry(said) for pool, name, said in _pairs(data["pools"])}
            silent, gone = _keys(data["silent"]), _keys(data["gone"])
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
            raise Garbled(f"not a digest: {type(error).__name__}") from None
        if since and (ident, since) != (self.id, self.version):
            raise Garbled("a delta to something else than what is known")
        entries = {**self._entries, **changed} if since else changed
        if len(entries) > MOST:
            raise Garbled("a digest of too many endpoints")
        self._entries = {key: entry for key, entry in entries.items() if key not in gone}
        self.id, self.version = ident, version
        heard: dict[str, dict[str, Report]] = {}
        for (pool, name), entry in self._entries.items():
            if (pool, name) not in silent:
                heard.setdefault(pool, {})[name] = entry.report(at)
        return heard


def encode(
    ident: str, version: int, since: int, changed: Mapping[Key, Entry], silent: Iterable[Key], gone: Iterable[Key]
) -> bytes:
    """A body."""
    pools: dict[str, dict[str, Entry]] = {}
    for (pool, name), entry in changed.items():
        pools.setdefault(pool, {})[name] = entry
    head = {"v": VERSION, "id": ident, "version": version, "since": since}
    data = {**head, "pools": pools, "silent": _by_pool(silent), "gone": _by_pool(gone)}
    return json.dumps(data, separators=(",", ":")).encode()


def tag_of(secret: bytes, nonce: str, age_ms: int, body: bytes) -> str:
    """What authenticates an answer: its age and body, for the question of this nonce."""
    digest = hashlib.sha256(body).hexdigest()
    return hmac.new(secret, f"{nonce} {age_ms} {digest}".encode(), "sha256").hexdigest()


def mac_of(secret: bytes, sent_ms: int, nonce: str) -> str:
    """What authenticates a question."""
    return hmac.new(secret, f"digest {sent_ms} {nonce}".encode(), "sha256").hexdigest()


def learn_digest(pool: Pool, reports: Mapping[str, Report]) -> int:
    """What a digest says of a pool's endpoints, by id; how many of them are known here and were older. Any thread."""
    by_id, mean, learned, queued = pool.snapshot.by_id, pool.mean_tokens, 0, 0.0
    for ident, report in reports.items():
        state = by_id.get(ident)
        if state is not None and (state.report is None or report.at > state.report.at):
            state.report = report
            if report.source == SOURCES[0]:
                queued += report.queue_tokens(mean)
                learned += 1
    if learned:
        speeds = pool.shared.speeds
        speeds.backlog += BACKLOG_STEP * (queued / learned - speeds.backlog)
    return learned


def _entry(said: Any) -> Entry:
    state, running, waiting, queued, kv, epoch = (_whole(value) for value in said)
    if not (0 <= state < len(SOURCES) and min(running, waiting, kv, epoch) >= 0 and queued >= -1 and kv <= 1000):
        raise ValueError("an entry out of range")
    return Entry(state, running, waiting, queued, kv, epoch)


def _whole(value: Any) -> int:
    if type(value) is not int or abs(value) >= 1 << 53:
        raise TypeError("not a whole number")
    return value


def _pairs(pools: Any) -> Iterable[tuple[str, str, Any]]:
    return ((pool, name, said) for pool, entries in pools.items() for name, said in entries.items())


def _keys(pools: Any) -> set[Key]:
    return {(pool, str(name)) for pool, names in pools.items() for name in names}


def _by_pool(keys: Iterable[Key]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for pool, name in keys:
        found.setdefault(pool, []).append(name)
    return found
