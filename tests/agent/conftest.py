from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE_S = 40.0


@pytest.fixture
def eventually(eventually: Callable[..., None]) -> Callable[..., None]:
    """The shared one, with more patience: these tests start processes, on machines that may be busy."""

    def wait(condition: Callable[[], object], what: str = "the condition", within: float = PATIENCE_S) -> None:
        eventually(condition, what, within)

    return wait
