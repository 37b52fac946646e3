"""Any server of the OpenAI API of which nothing more is known. Its models answering means that it is ready."""

from __future__ import annotations

from .engine import Engine

ENGINE = Engine(
    name="openai",
    ready="/v1/models",
    live="/v1/models",
    signs=(("/v1/models", r'(?s)\A(?=.*"object"\s*:\s*"list").*"data"'),),
)
