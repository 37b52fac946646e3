"""The records of a registry as whole pools, with the distrust that a control plane deserves.

A registry fault must not become an outage of the fleet, so three rules stand between what it says and what is shown:

* a record that turned bad keeps its last good form, as long as its key exists;
* endpoints of which too many vanished within `grace` seconds (more than half of those that took calls, and more than
  two; or all of them) stay in view for that long. Draining endpoints may leave at any time: they had announced it;
* a pool that was seen once stays a pool, if an empty one: its callers get "no endpoint", not "no such pool" (up to
  `MAX_GONE` of them, then the longest gone is forgotten).

Keys are relative to the registry's prefix: `{pool}/endpoints/{id}` and `{pool}/config`; others are ignored. Not
thread-safe: a subscription's one thread owns it. No clock: `now` is any steady clock in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from gpuroute.core.fleet import PoolConfig, PoolSpec
from gpuroute.errors import InvalidRecord
from gpuroute.registry.schema import (
    ID_ACCEPTS,
    check_pool,
    config_record,
    decode,
    default_id,
    endpoint_record,
    parse_config,
    parse_endpoint,
    shown,
    valid_id,
)
from gpuroute.registry.unread import slips, unread

if TYPE_CHECKING:
    from gpuroute.core.endpoint import Endpoint

    Record = bytes | object

MAX_LEAVING = 2  # that few may leave together: a rolling restart, a scale-down
MAX_SHARE = 0.5
MAX_GONE = 1_000  # pools of which only the name is left


class _Pool:
    """One pool: what the registry says of it, and whoever vanished of late."""

    __slots__ = ("config", "endpoints", "held", "left_at", "name", "spec", "vanished", "warnings")

    def __init__(self, name: str) -> None:
        self.name = name
        self.endpoints: dict[str, Endpoint] = {}
        self.vanished: dict[str, tuple[Endpoint, float]] = {}
        self.config = PoolConfig()
        self.spec: PoolSpec | None = None
        self.warnings: tuple[str, ...] = ()
        self.held = False  # some that vanished are shown
        self.left_at = 0.0  # when a record of it last went

    def remove(self, ident: str, now: float) -> None:
        endpoint = self.endpoints.pop(ident, None)
        if endpoint is not None and endpoint.takes_calls:
            self.vanished[ident] = endpoint, now
        self.spec = None

    def show(self, now: float, grace: float) -> PoolSpec:
        young = {ident: item for ident, item in self.vanished.items() if now - item[1] < grace}
        kept = {ident: item for ident, item in young.items() if ident not in self.endpoints}
        fewer = len(kept) < len(self.vanished)
        self.vanished = kept
        if self.spec is None or (fewer and self.held):
            self._rebuild()
        assert self.spec is not None
        return self.spec

    def _rebuild(self) -> None:
        shown, warnings = self.endpoints, self._duplicates()
        self.held = self._implausible()
        if self.held:
            shown = {ident: item[0] for ident, item in self.vanished.items()} | shown
            warnings.append(f"{self.name}: most endpoints vanished at once; they are kept for a while")
        self.warnings = tuple(warnings)
        self.spec = PoolSpec(self.name, tuple(shown[ident] for ident in sorted(shown)), self.config)

    def _implausible(self) -> bool:
        gone = len(self.vanished)
        if gone <= MAX_LEAVING:
            return gone > 0 and not any(endpoint.takes_calls for endpoint in self.endpoints.values())
        left = sum(endpoint.takes_calls for endpoint in self.endpoints.values())
        return gone > MAX_SHARE * (gone + left)

    def _duplicates(self) -> list[str]:
        ids: dict[str, str] = {}
        for ident, endpoint in self.endpoints.items():
            ids.setdefault(endpoint.url.rstrip("/"), ident)
        if len(ids) == len(self.endpoints):
            return []
        pairs = ((ids[item.url.rstrip("/")], ident) for ident, item in self.endpoints.items())
        return [f"{self.name}: {b} has the same URL as {a}; both are used" for a, b in pairs if a != b]


class View:
    """A registry's records in, whole pools out. Messages name a record by `where` and its key.

    `below`: where records are looked for, if that there is none at all is worth saying: it may be the wrong place.
    """

    def __init__(self, *, grace: float, where: str = "", below: str = "") -> None:
        self.grace = grace
        self.where = where
        self.below = below
        self.problems: dict[str, str] = {}
        self._unread: dict[str, list[str]] = {}
        self._records: dict[str, bytes | str] = {}
        self._pools: dict[str, _Pool] = {}

    def replace(self, records: Mapping[str, Record], now: float) -> None:
        """Take over a whole listing."""
        for key in [key for key in self._records if key not in records]:
            self.delete(key, now)
        for key, record in records.items():
            self.put(key, record)

    def put(self, key: str, record: Record) -> None:
        """Take over one record: bytes of JSON, or the object itself, or the InvalidRecord that it led to."""
        said = record if isinstance(record, bytes) else repr(record)  # in Python, 1 and true are equal
        if self._records.get(key) == said:
            return
        self._records[key] = said
        try:
            self._read(key, record)
            self.problems.pop(key, None)
        except InvalidRecord as error:
            self._unread.pop(key, None)
            self.problems[key] = str(error)

    def delete(self, key: str, now: float) -> None:
        """Forget one record."""
        self._records.pop(key, None)
        self.problems.pop(key, None)
        self._unread.pop(key, None)
        name, kind, ident = _parts(key)
        pool = self._pools.get(name)
        if pool is not None and kind == "endpoints":
            pool.remove(ident, now)
        elif pool is not None and kind == "config":
            pool.config, pool.spec = PoolConfig(), None
        if pool is not None:
            pool.left_at = now

    def pools(self, now: float) -> Mapping[str, PoolSpec]:
        """Every pool as it shall be shown; the spec of a pool that did not change is the same object as before."""
        shown_pools = {name: pool.show(now, self.grace) for name, pool in sorted(self._pools.items())}
        for name in self._too_many_gone():
            del self._pools[name], shown_pools[name]
        return shown_pools

    def _too_many_gone(self) -> list[str]:
        """Who makes a pool for each job must not make every view longer than the one before."""
        gone = [pool for pool in self._pools.values() if not ((pool.spec and pool.spec.endpoints) or self._said(pool))]
        gone.sort(key=lambda pool: pool.left_at)
        return [pool.name for pool in gone[: max(0, len(gone) - MAX_GONE)]]

    def _said(self, pool: _Pool) -> bool:
        """Whether there is a record of the pool."""
        return bool(pool.endpoints) or f"{pool.name}/config" in self._records

    def warnings(self) -> tuple[str, ...]:
        """What is odd but used, as of the last `pools`."""
        nothing = [] if self._records or not self.below else [f"nothing is registered below {self.below}"]
        return (*nothing, *(text for pool in self._pools.values() for text in pool.warnings))

    def unread(self) -> dict[str, str]:
        """What is said in records and read by nobody, by the key that says it. Of a pool's endpoints only the first one
        with each such text is named: what one writer writes wrong it writes wrong everywhere."""
        found: dict[str, str] = {}
        told: set[tuple[str, str]] = set()
        for key in sorted(self._unread):
            texts = [text for text in self._unread[key] if (key.partition("/")[0], text) not in told]
            told.update((key.partition("/")[0], text) for text in texts)
            if texts:
                found[key] = f"{shown(self.where + key)}: {'; '.join(texts)}"
        return found

    def due(self) -> float:
        """When `pools` will change by itself, or infinity."""
        times = (since for pool in self._pools.values() for _, since in pool.vanished.values())
        return min(times, default=math.inf) + self.grace

    def _read(self, key: str, record: Record) -> None:
        if isinstance(record, InvalidRecord):
            raise record
        name, kind, ident = _parts(key)
        if kind not in {"endpoints", "config"}:
            return
        named = shown(self.where + key)
        check_pool(name, named)
        value = decode(record, named) if isinstance(record, bytes) else record
        pool = self._pools.get(name) or _Pool(name)
        if kind == "endpoints":
            pool.endpoints[ident] = parse_endpoint(value, id=ident, key=named)
            texts = slips(cast("Mapping[str, object]", value))
        else:
            pool.config = parse_config(value, key=named)
            texts = [unread(cast("Mapping[str, object]", value))]
        pool.spec = None
        self._pools[name] = pool
        self._unread.pop(key, None)
        if any(texts):
            self._unread[key] = texts


def _parts(key: str) -> tuple[str, str, str]:
    name, _, rest = key.partition("/")
    kind, _, ident = rest.partition("/")
    return name, rest if kind == "config" else kind, ident


# -------------------------------------------------------------- the same records as one JSON document


def document_records(document: object, where: str) -> dict[str, Record]:
    """The records of `{"pools": {NAME: {"config": {}, "endpoints": [...]}}}`, by key.

    An endpoint is an object with an optional `id`, or a URL. Raises InvalidRecord if the document has another shape.
    """
    pools = document.get("pools") if isinstance(document, Mapping) else None
    if not isinstance(pools, Mapping):
        raise InvalidRecord(f"{where}: has no pools; accepted: an object (table) `pools` of pools by name")
    records: dict[str, Record] = {}
    for name, pool in pools.items():
        endpoints = pool.get("endpoints", []) if isinstance(pool, Mapping) else None
        if not isinstance(endpoints, list):
            raise InvalidRecord(
                f"{where}: pool {shown(str(name))}: accepted: an object of `endpoints` (a list) and `config`"
            )
        config = pool.get("config")
        records[f"{name}/config"] = {} if config is None else config
        if text := unread(pool, ("endpoints", "config")):
            records[f"{name}/"] = InvalidRecord(f"{where}: pool {shown(str(name))}: {text}")
        for number, item in enumerate(endpoints, 1):
            _add(records, str(name), number, {"url": item} if isinstance(item, str) else item)
    return records


def _add(records: dict[str, Record], pool: str, number: int, item: object) -> None:
    fields = item if isinstance(item, Mapping) else {}
    given = fields.get("id")
    stated = given is not None and given != ""
    ident = str(given) if stated else default_id(str(fields.get("url", "")))
    fine = valid_id(ident) and (not stated or type(given) in {str, int})
    key = f"{pool}/endpoints/{ident if fine else f'item-{number}'}"
    if stated and not fine:
        item = InvalidRecord(f"{shown(key)}: bad id; accepted: {ID_ACCEPTS}")
    if key in records:
        key, item = (
            f"{key}#{number}",
            InvalidRecord(f"{shown(key)}: item {number} repeats this id; the first one is used"),
        )
    records[key] = item


def document_of(pools: Mapping[str, PoolSpec]) -> dict[str, object]:
    """The document of these pools; `document_records` reads it back."""
    return {
        "pools": {
            name: {
                "config": config_record(spec.config),
                "endpoints": [{"id": endpoint.id, **endpoint_record(endpoint)} for endpoint in spec.endpoints],
            }
            for name, spec in pools.items()
        }
    }
