"""What a test ordered the stand-in to do wrong, and how often."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Literal

FaultKind = Literal["answer", "drop", "stall"]

_BUSY = "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
_MESSAGES = {
    429: ("Too many requests", "rate_limit_error"),
    500: ("cannot schedule new futures after shutdown", "InternalServerError"),
    503: (_BUSY, "Service Unavailable"),
}


@dataclass(slots=True)
class Fault:
    """One order. `count` None = until `resume`. `path` "" = every inference request."""

    kind: FaultKind
    count: int | None = None
    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    body: str | None = None
    path: str = ""
    delay: float = 0.0
    after_events: int = 0
    reset: bool = False


class Faults:
    """The orders in force, oldest first; a later one of the same kind waits until the first is used up."""

    def __init__(self) -> None:
        self._orders: list[Fault] = []

    def add(self, fault: Fault) -> None:
        """Give an order. Raises ValueError for a count that would never apply."""
        if fault.count is not None and fault.count < 1:
            msg = f"count must be at least 1, or None for all: {fault.count}"
            raise ValueError(msg)
        self._orders.append(fault)

    def take(self, path: str, *, inference: bool) -> Fault | None:
        """The order that applies to this request, used up by one."""
        for fault in self._orders:
            if fault.path == path or (inference and not fault.path):
                self._use(fault)
                return fault
        return None

    def clear(self) -> None:
        """Forget all orders."""
        self._orders.clear()

    def _use(self, fault: Fault) -> None:
        if fault.count is None:
            return
        fault.count -= 1
        if fault.count == 0:
            self._orders.remove(fault)


def error_body(status: int, message: str = "", kind: str = "", param: str | None = None) -> bytes:
    """An error as vLLM words it."""
    default_message, default_kind = _MESSAGES.get(status, (f"stand-in says {status}", "Error"))
    error = {"message": message or default_message, "type": kind or default_kind, "param": param, "code": status}
    return json.dumps({"error": error}, separators=(",", ":")).encode()
