"""What the gRPC examples call: the fleet of GPUROUTE_REGISTRY, or two stand-in servers with a gRPC face."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

import gpuroute
from gpuroute.testing import GpuServer
from gpuroute.testing.grpc_face import GrpcFace

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
    with GpuServer(gpu="H100") as one, GpuServer(gpu="L40S") as two, GrpcFace(one) as here, GrpcFace(two) as there:
        os.environ["GPUROUTE_REGISTRY"] = f"llama={here.url},{there.url}"
        yield "llama"
