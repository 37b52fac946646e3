"""Text Generation Inference. Its `/health` turns unhealthy when the queue is full: it must never eject."""

from __future__ import annotations

from .engine import Engine, Meaning, reading, rule

ENGINE = Engine(
    name="tgi",
    queue_fails_health=True,
    report={"running": reading("tgi_batch_current_size"), "waiting": reading("tgi_queue_size")},
    counters={
        "prompt_tokens": reading("tgi_request_input_length_sum"),
        "generated_tokens": reading("tgi_request_generated_tokens_sum"),
        "rejected": reading("tgi_request_failure", where=("err", "overloaded")),
    },
    answers=(
        rule(Meaning.OVERLOADED, (429, 503), "overloaded"),
        rule(Meaning.FAILED, 424),  # generation failed on the server
    ),
    signs=(("/info", r'"router"\s*:\s*"text-generation-router"'), ("/metrics", r"(?m)^tgi_")),
)
