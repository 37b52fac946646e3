"""What an engine's KV cache events say of the prefixes that clients ask about. Pure: bytes in, a point in time out.

vLLM and SGLang publish which blocks enter and leave their cache (BlockStored, BlockRemoved, AllBlocksCleared; batches in
msgpack, events as arrays or, in newer versions, as maps). Their hashes are over token ids with a seed of the engine's,
and the text of a prompt cannot be had back from token ids without its template, so a block is never matched with a
prefix hash of ours. What can be known is *when* what leaves had come: the cache evicts what was used longest ago, so a
prefix whose last use is older than the arrival of what leaves now is gone too. That moment, `gone_before`, replaces the
guess of how many prefixes fit, and it sees what takes do not: calls of strangers, generated tokens, real sizes.

Limits: a block's last use is not told, only when it came. Blocks that generation fills are left out, since they come
long after their prompt. What is left is an error of about the time that one answer takes.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, NamedTuple

STRAYS = 3
"""Of the last `LOOK_BACK` blocks that left, so many may be younger than their neighbours without a meaning."""

LOOK_BACK = 16
MAX_BLOCKS = 4_000_000
MAX_TIERS = 8
_ALL_LAYERS = ("full", "mla", "sink", "unknown")
"""Kinds of cache whose blocks leave by age; blocks of the others (sliding windows, state) leave as they are used up."""


class Garbled(ValueError):
    """A message that is not a batch of events."""


class Stored(NamedTuple):
    """Blocks came into a tier ("GPU", "CPU", ...). `counts`: False if they leave otherwise than by age."""

    keys: tuple[Any, ...]
    parent: Any
    block_size: int
    tier: str
    counts: bool = True


class Removed(NamedTuple):
    """Blocks left a tier."""

    keys: tuple[Any, ...]
    tier: str


class Cleared(NamedTuple):
    """The whole cache was emptied."""


class Batch(NamedTuple):
    """The events of one step of the engine. `at`: its clock, seconds since 1970."""

    at: float
    events: tuple[Stored | Removed | Cleared, ...]


def read_batch(data: Any) -> Batch:
    """A batch from what msgpack made of its bytes; events of kinds that are not known are left out. Raises Garbled."""
    try:
        at, events = float(data[0]), data[1]
        read = tuple(event for raw in events if (event := _event(raw)) is not None)
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
        raise Garbled(f"not a batch of KV cache events: {type(error).__name__}") from None
    if not math.isfinite(at):
        raise Garbled("not a batch of KV cache events: its time is no number")
    return Batch(at, read)


def _event(raw: Any) -> Stored | Removed | Cleared | None:
    if not isinstance(raw, dict):
        raw = dict(zip(_FIELDS.get(raw[0], ("type",)), raw, strict=False))
    kind = raw["type"]
    if kind == "AllBlocksCleared":
        return Cleared()
    if kind not in _FIELDS or raw.get("locality") == "REMOTE":
        return None
    tier, group = str(raw.get("medium") or "GPU"), _hash(raw.get("group_idx") or 0)
    keys = tuple((group, _hash(value)) for value in raw["block_hashes"])
    if kind == "BlockRemoved":
        return Removed(keys, tier)
    layers = str(raw.get("kv_cache_spec_kind") or "full")
    parent = raw.get("parent_block_hash")
    key = None if parent is None else (group, _hash(parent))
    return Stored(keys, key, int(raw.get("block_size") or 0), tier, layers.startswith(_ALL_LAYERS))


_FIELDS = {
    "BlockStored": ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    "BlockRemoved": ("type", "block_hashes", "medium"),
    "AllBlocksCleared": ("type",),
}


def _hash(value: Any) -> int | bytes:
    if not isinstance(value, int | bytes):
        raise TypeError("a block's hash, or group, is a number or bytes")
    return value


class Blocks:
    """The blocks that an engine holds, by the time at which they came. One loop owns it; times of one clock."""

    def __init__(self) -> None:
        self.block_size = 0
        self.stored = self.removed = 0
        self.gone_before = -math.inf
        self._tiers: dict[str, dict[Any, float]] = {}
        self._left: deque[float] = deque(maxlen=LOOK_BACK)

    def __len__(self) -> int:
        return len(self._tiers.get("GPU", ()))

    def apply(self, batch: Batch, at: float) -> bool:
        """Follow one batch, which happened `at`; True if the cache was emptied."""
        emptied = False
        generated = _generated(batch)
        for event in batch.events:
            if isinstance(event, Stored):
                self._store(event, math.nan if event.keys[:1] and event.keys[0] in generated else at)
            elif isinstance(event, Removed):
                self._remove(event)
            else:
                self.clear()
                emptied = True
        return emptied

    def clear(self) -> None:
        """Nothing is held, or nothing is known of what is."""
        self._tiers.clear()
        self._left.clear()

    def _store(self, event: Stored, at: float) -> None:
        self.stored += len(event.keys)
        self.block_size = event.block_size or self.block_size
        if event.counts and (event.tier in self._tiers or len(self._tiers) < MAX_TIERS):
            tier = self._tiers.setdefault(event.tier, {})
            if len(tier) < MAX_BLOCKS:
                tier.update(dict.fromkeys(event.keys, at))

    def _remove(self, event: Removed) -> None:
        self.removed += len(event.keys)
        tier = self._tiers.get(event.tier, {})
        for key in event.keys:
            came = tier.pop(key, math.nan)
            if not math.isnan(came) and not any(key in other for other in self._tiers.values()):
                self._left.append(came)
        if len(self._left) > STRAYS:
            self.gone_before = max(self.gone_before, sorted(self._left)[-1 - STRAYS])


def _generated(batch: Batch) -> set[Any]:
    """Blocks that generation has filled: single ones that continue what was there before."""
    stored = [event for event in batch.events if isinstance(event, Stored)]
    here = {key for event in stored for key in event.keys}
    parents = {event.parent for event in stored}
    return {
        event.keys[0]
        for event in stored
        if len(event.keys) == 1 and event.parent is not None and event.parent not in here and event.keys[0] not in parents
    }
