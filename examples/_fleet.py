"""What the examples call: the fleet of GPUROUTE_REGISTRY, or two stand-in servers on this machine."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

import gpuroute
from gpuroute.testing import GpuServer

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def fleet() -> Iterator[str]:
    """The name of a pool that `Router.from_env()` will find."""
    if os.environ.get("GPUROUTE_REGISTRY"):
        with gpuroute.Router.from_env() as router:
            router.ready()
            pool = min(router.snapshot().pools)
        yield pool
        return
    with GpuServer.spawn(gpu="H100") as one, GpuServer.spawn(gpu="L40S") as two:
        os.environ["GPUROUTE_REGISTRY"] = f"llama={one.url},{two.url}"
        yield "llama"
