"""The asyncio channel over a pool: `gpuroute.grpc.aio.channel(router, "llama")`. See docs/grpc.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpuroute.engines.messages import read_message
from gpuroute.transports.grpc_aio import RoutedAioChannel

if TYPE_CHECKING:
    from collections.abc import Sequence

    import grpc

    from gpuroute.router import Router
    from gpuroute.transports.grpc_hub import ReadPrompt

__all__ = ["channel"]


def channel(
    router: Router,
    pool: str,
    *,
    options: Sequence[tuple[str, Any]] = (),
    credentials: grpc.ChannelCredentials | None = None,
    compression: grpc.Compression | None = None,
    interceptors: Sequence[grpc.aio.ClientInterceptor] = (),
    prompt: ReadPrompt | None = read_message,
    replay: str = "unavailable",
    idle_timeout: float = 200.0,
    load_reports: float | None = None,
) -> grpc.aio.Channel:
    """A `grpc.aio.Channel` that sends every RPC to the endpoint of `pool` which will answer soonest.

    Arguments are those of `gpuroute.grpc.channel`; `interceptors` see every attempt. May be made outside a loop and used
    in several, each of which gets connections of its own. Raises ConfigError.
    """
    return RoutedAioChannel(
        router,
        pool,
        options=options,
        credentials=credentials,
        compression=compression,
        interceptors=interceptors,
        prompt=prompt,
        replay=replay,
        idle_timeout=idle_timeout,
        load_reports=load_reports,
    )
