"""gRPC over a pool: a channel for any generated stub, routed call by call.

    import gpuroute, gpuroute.grpc
    router = gpuroute.Router.from_env()
    stub = GRPCInferenceServiceStub(gpuroute.grpc.channel(router, "llama"))

`gpuroute.grpc.aio.channel` is its asyncio twin. See docs/grpc.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpuroute.engines.messages import read_message
from gpuroute.transports.grpc_options import options
from gpuroute.transports.grpc_sync import RoutedChannel

if TYPE_CHECKING:
    from collections.abc import Sequence

    import grpc

    from gpuroute.router import Router
    from gpuroute.transports.grpc_hub import ReadPrompt

__all__ = ["channel", "options"]
# gpuroute.grpc.aio is a module of its own, so that synchronous users do not load asyncio.


def channel(
    router: Router,
    pool: str,
    *,
    options: Sequence[tuple[str, Any]] = (),
    credentials: grpc.ChannelCredentials | None = None,
    compression: grpc.Compression | None = None,
    prompt: ReadPrompt | None = read_message,
    replay: str = "unavailable",
    idle_timeout: float = 200.0,
    load_reports: float | None = None,
) -> grpc.Channel:
    """A `grpc.Channel` that sends every RPC to the endpoint of `pool` which will answer soonest.

    `options`, `compression`: for every endpoint's channel. `credentials`: use TLS with these for every endpoint; without,
    the endpoint's URL (`grpcs://`) and its `tls` record decide. `prompt(method, request)`: reads the prompt of a request
    (a `Prompt`, its bytes, or None) where the policy uses prefixes; None: never. `replay`: which failures of a single
    request may be tried elsewhere: "unsent" (it never left), "unavailable" (and UNAVAILABLE), "failed" (and UNKNOWN,
    INTERNAL, DATA_LOSS: only if repeating is harmless). `idle_timeout`: seconds after which an unused channel closes;
    gateways that forget connections in silence do so after 240 s or later.
    `load_reports`: follow the load that endpoints report by the ORCA service, every so many seconds; None: do not.
    Any thread. Raises ConfigError.
    """
    return RoutedChannel(
        router,
        pool,
        options=options,
        credentials=credentials,
        compression=compression,
        prompt=prompt,
        replay=replay,
        idle_timeout=idle_timeout,
        load_reports=load_reports,
    )
