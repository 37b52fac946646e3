"""Which endpoints a client talks to, when it should not talk to all: subsetting by leased ordinal.

Five hundred clients of a thousand endpoints each see a hundredth of a call in flight per endpoint, so their counters say
nothing; with fifty endpoints each they say more, and keep connections warm. The ordinal (0, 1, 2, ... from a lease) makes
it deterministic: endpoints stand in a circle in the order of their hashes, client n starts at the n-th point of a golden
ratio sequence, which is even for any number of clients, and takes its neighbours. An endpoint that comes or goes changes
at most two members of any subset.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from gpuroute.core.candidates import GOLDEN

if TYPE_CHECKING:
    from collections.abc import Sequence

LEAST = 20
"""Members of a subset at least: fewer make two choices poor and a failed rack fatal."""

CLIENTS_EACH = 8
"""Clients that each endpoint should have at least, so that their traffic evens out."""


def subset_size(endpoints: int, clients: int, *, least: int = LEAST) -> int:
    """Members for each of `clients`, so that each endpoint has `CLIENTS_EACH` of those at least."""
    wanted = math.ceil(CLIENTS_EACH * endpoints / max(1, clients))
    return min(endpoints, max(least, wanted))


def subset(ids: Sequence[str], ordinal: int, size: int) -> list[str]:
    """The members of one client's subset. The order of `ids` does not matter. ValueError for a negative ordinal."""
    if ordinal < 0 or size < 0:
        raise ValueError(f"subset: ordinal and size must not be negative; got {ordinal} and {size}")
    circle = sorted(ids, key=lambda id_: (xxh3_64_intdigest(id_.encode("utf-8", "surrogatepass")), id_))
    start = int(((ordinal + 0.5) * GOLDEN) % 1.0 * len(circle))
    return [circle[(start + step) % len(circle)] for step in range(min(size, len(circle)))]
