"""Ray Serve, whatever runs in it. Its health is that of the proxy, not of a replica; its gauges are 10 s old."""

from __future__ import annotations

from .engine import Engine, Meaning, reading, rule

ENGINE = Engine(
    name="ray_serve",
    ready="/-/healthz",
    live="/-/healthz",
    ready_text="success",
    metrics_port=8080,  # the node's metrics agent
    report={
        "running": reading("ray_serve_replica_processing_queries"),
        "waiting": reading("ray_serve_deployment_queued_queries"),
    },
    answers=(
        rule(Meaning.OVERLOADED, (429, 503), "dropped due to backpressure"),
        rule(Meaning.DRAINING, 503, "node is being drained"),
    ),
    request_id_header="x-request-id",
    signs=(("/-/healthz", r"^success"), ("/metrics", r"(?m)^ray_serve_")),
)
