"""Triton's own clients over a pool: `gpuroute.triton.attach(client, router, "resnet")`.

    client = tritonclient.grpc.InferenceServerClient("any:8001")
    gpuroute.triton.attach(client, router, "resnet")
    client.infer("resnet", inputs)                     # routed call by call

Also `tritonclient.grpc.aio`. `infer` and `async_infer` are routed call by call, `start_stream` opens one stream to one
endpoint. `tritonclient.http` brings its own connections (gevent, aiohttp) and cannot be routed: use gRPC, or call the v2
HTTP API through a routed `httpx2` client.
"""

from __future__ import annotations

from gpuroute.grpc.attach import attach, detach

__all__ = ["attach", "detach"]
