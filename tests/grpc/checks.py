"""An active health check of a gRPC server, on its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

from gpuroute.transports import health
from gpuroute.transports.grpc_peers import Dialer, channel_options

if TYPE_CHECKING:
    from gpuroute import Endpoint


def checked(endpoint: Endpoint) -> bool:
    """Whether a check finds this endpoint well."""
    options = channel_options((), connect_timeout=20.0, idle=60.0, trust_env=False)
    return health._grpc(endpoint, Dialer(grpc.insecure_channel, grpc.secure_channel, options, None, None), 60.0)
