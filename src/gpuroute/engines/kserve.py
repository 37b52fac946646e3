"""Any other server of the KServe v2 ("open inference") protocol, MLServer among them."""

from __future__ import annotations

from .engine import Engine, Meaning, rule

ENGINE = Engine(
    name="kserve",
    ready="/v2/models/{model}/ready",
    ready_any="/v2/health/ready",
    live="/v2/health/live",
    answers=(rule(Meaning.LOADING, (400, 503), "not ready"), rule(Meaning.MISSING, (400, 404), "model .*not found")),
    request_id_field="id",
    signs=(("/v2", r'(?s)\A(?=.*"name"\s*:).*"extensions"'),),
)
