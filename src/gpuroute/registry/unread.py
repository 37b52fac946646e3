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


def unread_settings(config: Mapping[str, object]) -> str:
    """What to say of a pool's config with settings that this release does not have; "" if there are none."""
    unread = _unread(config, CONFIG_FIELDS)
    if not unread:
        return ""
    shown = [f"{name!r}{f' (did you mean {near}?)' if near else ''}" for name, near in _near(unread, CONFIG_FIELDS, 0.6)]
    more = f" and {len(unread) - len(shown)} more" if len(unread) > len(shown) else ""
    return f"nobody reads {', '.join(shown)}{more}; accepted: {', '.join(CONFIG_FIELDS)}"


def slips(record: Mapping[str, object]) -> list[str]:
    """What to say of fields of an endpoint's record, or of an object in it, that are nearly called like known ones."""
    found = list(_slips(record, ENDPOINT_FIELDS))
    for name, names in _INNER.items():
        inner = record.get(name)
        found += [f"{text} in {name}" for text in _slips(inner, names)] if isinstance(inner, dict) else []
    return found


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
