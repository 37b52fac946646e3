"""What the gRPC tests share as fixtures; the servers themselves are in `world`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from world import Server, servers

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def server() -> Iterator[Server]:
    """One server, called s0."""
    with servers(1) as (one,):
        yield one
