"""TensorFlow Serving. It has no gauge of its queue; a model is ready when one of its versions is AVAILABLE."""

from __future__ import annotations

from .engine import Engine, Meaning, reading, rule

ENGINE = Engine(
    name="tf_serving",
    ready="/v1/models/{model}",
    live="/v1/models/{model}",
    ready_text='"state":"AVAILABLE"',
    metrics="/monitoring/prometheus/metrics",  # only with a monitoring configuration
    counters={"steps": reading(":tensorflow:serving:request_count")},
    answers=(
        rule(Meaning.OVERLOADED, (500, 503), "batch scheduling queue"),
        rule(Meaning.MISSING, 404, "servable not found|could not find any versions"),
    ),
    signs=(
        ("/v1/models", r"Malformed request: GET"),
        ("/monitoring/prometheus/metrics", r"(?m)^:tensorflow:"),
    ),
)
