from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def patient_relays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asks over gRPC are given up, and late bids no longer listened to, when no busy machine is the reason."""
    monkeypatch.setattr("gpuroute.transports.ask_lines.LATE_S", 60.0)


@pytest.fixture
def eventually(eventually: Callable[..., None]) -> Callable[..., None]:
    """The shared one, with more patience: these tests start processes, on machines that may be busy."""

    def wait(condition: Callable[[], object], what: str = "the condition", within: float = PATIENCE_S) -> None:
        eventually(condition, what, within)

    return wait
