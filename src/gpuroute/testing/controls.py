"""What a test may do to a running stand-in, the same for one in this process and one in its own."""

from __future__ import annotations

import base64
from typing import Any

from .counters import Received


class Controls:
    """Orders to a stand-in server. Each returns when it is in force. Any thread may call them.

    From anywhere else, POST the same as JSON to `/_control`: `{"do": "slow", "factor": 2}`; GET it for the state.
    """

    def control(self, do: str, **arguments: Any) -> Any:
        """Give an order by name. Raises ValueError or TypeError for a wrong one, ConnectionError if nobody is there."""
        raise NotImplementedError

    def slow(self, factor: float) -> None:
        """Every engine step takes `factor` times as long; 1 = the speed of the GPU."""
        self.control("slow", factor=factor)

    def hang(self, *, everything: bool = False) -> None:
        """The engine makes no progress while `/health` says 200; with `everything` no request is answered at all."""
        self.control("hang", everything=everything)

    def resume(self) -> None:
        """Undo every order: normal speed, listening, healthy."""
        self.control("resume")

    def answer(
        self,
        status: int,
        *,
        headers: dict[str, str] | None = None,
        body: str | None = None,
        count: int | None = None,
        path: str = "",
        delay: float = 0.0,
    ) -> None:
        """Answer the next `count` (None = all) inference requests, or those to `path`, with this, after `delay` s."""
        self.control("answer", status=status, headers=headers or {}, body=body, count=count, path=path, delay=delay)

    def drop_mid_stream(self, after_events: int = 3, *, count: int | None = None, reset: bool = False) -> None:
        """Close the connection of the next `count` answers after so many events (whole answers: in mid-body).

        0 = after the request was read, before any byte of the answer. `reset` sends RST, not FIN.
        """
        self.control("drop_mid_stream", after_events=after_events, count=count, reset=reset)

    def stall_mid_stream(self, after_events: int = 3, *, count: int | None = None) -> None:
        """Fall silent after so many events, with the connection open."""
        self.control("stall_mid_stream", after_events=after_events, count=count)

    def refuse(self) -> None:
        """Stop listening: connects are refused, idle connections closed, running answers finish."""
        self.control("refuse")

    def drain(self) -> None:
        """As vLLM after SIGTERM: running answers finish, new ones get 500, `/health` stays 200."""
        self.control("drain")

    def health(self, status: int) -> None:
        """The status that `/health` answers."""
        self.control("health", status=status)

    def state(self) -> dict[str, Any]:
        """Counters (`received`, `finished`, `cancelled`, `answered`, `rejected`, `dropped`, `resent`,
        `resent_after_first_byte`, `wire`: request id -> [arrived, first byte, end, attempt, milliseconds left by
        `x-request-timeout`]) and what runs now.
        """
        state: dict[str, Any] = self.control("state")
        return state

    def reset_counters(self) -> None:
        """Counters start again from zero."""
        self.control("reset_counters")

    @property
    def requests(self) -> list[Received]:
        """The last inference requests (at most 32), oldest first, as they were on the wire."""
        return [_received(row) for row in self.control("requests")]

    @property
    def last_request(self) -> Received:
        """The last inference request. Raises LookupError if none came."""
        requests = self.requests
        if not requests:
            raise LookupError("no inference request has reached this server")
        return requests[-1]


def _received(row: dict[str, Any]) -> Received:
    return Received(
        method=row["method"],
        target=row["target"].encode("latin-1"),
        headers=tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in row["headers"]),
        body=base64.b64decode(row["body"]),
        connection=row["connection"],
    )
