"""Fields of records that nobody reads: kept, since a newer writer may mean something by them, but not in silence.

In a pool's config every such field is told, for what it was to change stays as it was. Of an endpoint's record only what
looks like a slip of the pen is, since agents of a newer release may well say more. Pure; any thread.
"""

from __future__ import annotations

import difflib
from dataclasses import fields
from functools import lru_cache
from typing import TYPE_CHECKING

from gpuroute.core.endpoint import Capacity, Gpu, Tls
from gpuroute.registry.schema import CONFIG_FIELDS, ENDPOINT_FIELDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MAX_NAMES = 10
MAX_NAME = 60
SLIP = 0.8
"""So alike, from 0 to 1, are a name and a slip of the pen. Less alike may be a field that is to come."""

_INNER = {
    name: tuple(row.name for row in fields(cls)) for name, cls in (("gpu", Gpu), ("capacity", Capacity), ("tls", Tls))
}


def unread(record: Mapping[str, object], known: tuple[str, ...] = CONFIG_FIELDS) -> str:
    """What to say of a pool's config, or another record, with fields that this release does not have; "" without any."""
    found = _unread(record, known)
    if not found:
        return ""
    shown = [f"{name!r}{f' (did you mean {near}?)' if near else ''}" for name, near in _near(found, known, 0.6)]
    more = f" and {len(found) - len(shown)} more" if len(found) > len(shown) else ""
    return f"nobody reads {', '.join(shown)}{more}; accepted: {', '.join(known)}"


def unwritten(record: Mapping[str, object]) -> list[str]:
    """What to say to who writes this record of an endpoint: no reader will see what this release does not know."""
    found = unread(record, ENDPOINT_FIELDS)
    return [*([found] if found else []), *_inner_slips(record)]


def slips(record: Mapping[str, object]) -> list[str]:
    """What to say of fields of an endpoint's record, or of an object in it, that are nearly called like known ones."""
    return [*_slips(record, ENDPOINT_FIELDS), *_inner_slips(record)]


def _inner_slips(record: Mapping[str, object]) -> list[str]:
    objects = ((name, record.get(name), known) for name, known in _INNER.items())
    return [
        f"{text} in {name}" for name, item, known in objects if isinstance(item, dict) for text in _slips(item, known)
    ]


def _slips(record: Mapping[str, object], known: tuple[str, ...]) -> Iterator[str]:
    pairs = _near(_unread(record, known), known, SLIP)
    return (f"nobody reads {name!r} (did you mean {near}?)" for name, near in pairs if near and near not in record)


def _unread(record: Mapping[str, object], known: tuple[str, ...]) -> list[str]:
    """Null counts as absent."""
    return [str(name)[:MAX_NAME] for name, value in record.items() if name not in known and value is not None]


def _near(names: list[str], known: tuple[str, ...], cutoff: float) -> list[tuple[str, str]]:
    """A few names with the known one that each is most like, or ""."""
    return [(name, _nearest(name.lower().replace("-", "_"), known, cutoff)) for name in sorted(names)[:MAX_NAMES]]


@lru_cache(maxsize=256)  # ten thousand records of one writer have the same fields
def _nearest(name: str, known: tuple[str, ...], cutoff: float) -> str:
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=cutoff)), "")
