"""Which engine is it? Told from a handful of harmless GET answers, when the registry does not say."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from .catalog import ENGINES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .engine import Engine

PATHS = tuple(dict.fromkeys(path for engine in ENGINES for path, _ in engine.signs))
"""What to ask an endpoint, one GET each; `/metrics` last of use, since only some answer it."""


class Probed(NamedTuple):
    """One answer: its status and (the head of) its body."""

    status: int
    body: bytes


def detect(answers: Mapping[str, Probed]) -> Engine | None:
    """The first engine with a sign among the answers by path; None if none of them is known."""
    return next((engine for engine in ENGINES if _shown(engine, answers)), None)


def _shown(engine: Engine, answers: Mapping[str, Probed]) -> bool:
    return any(
        (answer := answers.get(path)) is not None
        and answer.status < 500
        and re.search(pattern.encode(), answer.body) is not None
        for path, pattern in engine.signs
    )


def ready(engine: Engine, answer: Probed) -> bool:
    """Whether this answer on the engine's `ready` path means that it serves."""
    return 200 <= answer.status < 300 and engine.ready_text.encode() in re.sub(rb"\s", b"", answer.body)
