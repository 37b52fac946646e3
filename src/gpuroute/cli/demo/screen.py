"""What the demo shows while it runs: a live table on a terminal, plain lines elsewhere, nothing for `--json`."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter, defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .figures import percentile

if TYPE_CHECKING:
    from gpuroute.router import Router

    from .fleet import DemoFleet
    from .replay import Replay

_REFRESH_S = 0.25
_RECENT = 40
_BAR = 24


class Screen:
    """Lines for people on standard output; `quiet` says nothing."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._console: Any = None
        if not quiet and sys.stdout.isatty():
            from rich.console import Console

            self._console = Console()
        self._started = time.monotonic()

    def say(self, text: str) -> None:
        """One line."""
        if self._quiet:
            return
        if self._console is not None:
            self._console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def event(self, text: str) -> None:
        """One line with the time since the replay began."""
        self.say(f"  {time.monotonic() - self._started:5.1f} s  {text}")

    async def watch(self, policy: str, replay: Replay, router: Router, fleet: DemoFleet) -> None:
        """Show the table until cancelled."""
        self._started = time.monotonic()
        if self._console is None:
            return
        from rich.live import Live

        live = Live(console=self._console, auto_refresh=False, transient=True)
        with live:
            with suppress(asyncio.CancelledError):
                while True:
                    live.update(self._table(policy, replay, router, fleet), refresh=True)
                    await asyncio.sleep(_REFRESH_S)
            live.update(self._table(policy, replay, router, fleet), refresh=True)  # who joined last is seen too

    def _table(self, policy: str, replay: Replay, router: Router, fleet: DemoFleet) -> Any:
        from rich.table import Table

        answers = replay.answers
        bad = sum(bool(answer.error) and not answer.interrupted for answer in answers)
        title = f"{policy}: {len(answers)} of {len(replay.rows)} calls done, {bad} failed"
        table = Table("endpoint", "GPU", "", "in flight", "share", "", "TTFT p50", title=title)
        for column in (3, 4, 6):
            table.columns[column].justify = "right"
        shares, times = _recent(replay)
        pool = router.snapshot().pools.get(fleet.book.pool)
        in_flight = {view.id: view.in_flight for view in pool.endpoints} if pool else {}
        for ident, member in list(fleet.members.items()):
            table.add_row(
                ident,
                member.endpoint.gpu.kind,
                member.note,
                str(in_flight.get(ident, "-")),
                f"{shares.get(ident, 0.0):.0%}",
                "█" * round(shares.get(ident, 0.0) * _BAR),
                f"{percentile(times[ident], 50) * 1e3:.0f} ms" if times[ident] else "-",
            )
        return table


def _recent(replay: Replay) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Shares and sorted TTFTs of the last calls, by endpoint."""
    last = replay.begun[-_RECENT:]
    times: dict[str, list[float]] = defaultdict(list)
    for answer in last:
        if answer.ttft is not None:
            times[answer.endpoint].append(answer.ttft)
    counts = Counter(answer.endpoint for answer in last)
    shares = {ident: count / len(last) for ident, count in counts.items()}
    return shares, defaultdict(list, {ident: sorted(values) for ident, values in times.items()})
