"""What callers noticed, against what they may."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from .script import SILENT
from .sends import late

if TYPE_CHECKING:
    from gpuroute.router import Router

    from .callers import Crowd, Seen
    from .fleet import ChaosFleet
    from .script import Happened, Script

GRACE_S = 0.1
BUSY_S = 0.25
GROWTH = 0.02
FILES = 4
STEADY = 20
"""That many calls in a row must end well for an outage to be over."""


class Verdict:
    """All counts of one run; read when everything has ended."""

    def __init__(
        self,
        crowd: Crowd,
        script: Script,
        fleet: ChaosFleet,
        router: Router,
        *,
        continuation: bool,
        soak: bool = False,
    ) -> None:
        self._crowd = crowd
        self._script = script
        self._continuation = continuation
        self._soak = soak
        self._seen = crowd.notes.read()
        self._wire = fleet.wire.read()
        self._lag_s = crowd.lag_s
        pool = router.pool(fleet.pool)
        self._signals = pool.shared.signals.as_dict()
        self._residual = sum(len(state.in_flight) for state in pool.snapshot.states) + len(pool.shared.in_flight)
        self._failed = [seen for seen in self._seen if seen.error and not seen.interrupted]
        self._noticed = [seen for seen in self._failed if not self._in_outage(seen)]

    def counts(self) -> dict[str, Any]:
        """The counts, by the names that are documented."""
        seen, signals = self._seen, self._signals
        return {
            "calls": len(seen),
            "caller_failures": len(self._noticed),
            "interrupted": sum(one.interrupted for one in seen),
            "doubled_after_first_byte": self._doubled(),
            "lost_events": sum(one.lost for one in seen),
            "duplicated_events": sum(one.wrong for one in seen),
            "residual_in_flight": self._residual,
            "beyond_deadline": sum(self._is_late(one, self._crowd.lag_at(one.ended)) for one in seen),
            "retries": signals["retries"],
            "hedges": signals["hedges"] + signals["reroutes"],
            "recovery_s": self._recovery(),
        }

    def missed(self) -> list[str]:
        """The bars that were not met."""
        counts, calls = self.counts(), max(1, len(self._seen))
        normal = self._normal_p99()
        found = [f"{name} is {counts[name]}, must be 0" for name in _ZEROES if counts[name]]
        if self._continuation and counts["interrupted"]:
            found.append(f"interrupted is {counts['interrupted']}, must be 0 with continuation")
        if counts["caller_failures"] > 0.001 * calls:
            found.append(f"caller_failures is {counts['caller_failures']} of {calls}, may be 0.1 %")
        if counts["recovery_s"] is not None and counts["recovery_s"] > 1:
            found.append(f"recovery_s is {counts['recovery_s']}, may be 1")
        greedy = [one for one in self._script.happened if one.share is not None and one.share > 0.05]
        found += [f"{one.target} got {one.share:.1%} of attempts after 2 s, may be 5 %" for one in greedy]
        late = [(one, out) for one in self._script.happened if (out := self._out_s(one) or 0.0) > 2 * normal]
        found += [f"{one.kind} {one.target} out after {out:.2f} s, may be {2 * normal:.2f}" for one, out in late]
        return [*found, *self._grown()] if self._soak else found

    def kept(self) -> dict[str, Any]:
        """How memory and open files of this process grew after its warm-up."""
        growth = self._script.footprints.growth()
        return {
            "memory_growth": None if growth is None else round(growth[0], 4),
            "files_growth": None if growth is None else growth[1],
        }

    def _grown(self) -> list[str]:
        growth = self._script.footprints.growth()
        if growth is None:
            return ["memory and open files could not be judged: too short a run, or no /proc"]
        found = [f"memory grew by {growth[0]:.1%} after the warm-up, may be {GROWTH:.0%}"] if growth[0] >= GROWTH else []
        return found + ([f"open files grew by {growth[1]}, may be {FILES}"] if growth[1] > FILES else [])

    def lines(self) -> list[str]:
        """For people."""
        counts, seen = self.counts(), self._seen
        lines = ["", *(f"{name:26} {value}" for name, value in counts.items()), ""]
        silent = [out for one in self._script.happened if (out := self._out_s(one)) is not None]
        outage = [one for one in self._failed if self._in_outage(one)]
        worst = max((one.ended - one.began for one in outage), default=0.0)
        kinds = Counter(one.kind for one in self._script.happened)
        outs = ", ".join(f"{one:.2f}" for one in sorted(silent)) or "never"
        shares = [f"{one.share:.1%}" for one in self._script.happened if one.share is not None]
        sdk = "" if self._crowd.has_openai else "; openai is not installed, so all callers used httpx2"
        lines += [
            f"faults: {', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))}",
            f"normal p99 of a call {self._normal_p99():.2f} s; hung or frozen ones out after {outs} s",
            f"black holes' share of attempts after 2 s: {', '.join(shares) or 'none dug'}",
            f"in the outage of everybody: {len(outage)} calls failed, the slowest after {worst:.2f} s",
            f"signals: {', '.join(f'{name} {value}' for name, value in self._signals.items() if value)}",
            f"the callers' own process stood still for up to {self._lag_s * 1e3:.0f} ms{sdk}",
            f"memory and open files of this process: {self._script.footprints.series()}",
            f"growth after the warm-up: {self.kept()}",
            f"calls that ended late, if that is not allowed for: {sum(self._is_late(one, 0.0) for one in seen)}",
        ]
        told = [*self._noticed, *(one for one in seen if one.interrupted and self._continuation)]
        for text, count in Counter(one.error for one in told).most_common(10):
            lines.append(f"failed {count}x: {text}")
        missed = self.missed()
        if missed and self._lag_s > BUSY_S:
            lines.append(
                f"the machine was busy: this process stood still for {self._lag_s:.1f} s, so this run tells little"
            )
        return [*lines, *(f"MISSED: {text}" for text in missed), "" if missed else "all bars met"]

    def _out_s(self, one: Happened) -> float | None:
        """For how long a silent endpoint was still sent calls while this process ran; None if that was not looked for."""
        if one.kind not in SILENT or one.out_s is None or one.noticed is None:
            return None
        return max(0.0, one.out_s - self._crowd.stood_still(one.noticed, one.noticed + one.out_s))

    @staticmethod
    def _is_late(seen: Seen, lag_s: float) -> bool:
        """Ended after its deadline, though this process ran."""
        return seen.ended - seen.began > seen.timeout + GRACE_S + lag_s

    def _in_outage(self, seen: Seen) -> bool:
        outage = self._script.outage
        return outage is not None and seen.ended >= outage[0] and seen.began <= outage[1] + 1.0

    def _doubled(self) -> int:
        """Calls that reached a server after their first byte had reached the caller, other than to continue."""
        received: dict[str, list[tuple[str, list[Any]]]] = {}
        for server, state in self._wire:
            for ident, rows in state["wire"].items():
                received.setdefault(ident, []).extend((server, row) for row in rows)
        return sum(late(received.get(one.ident, ()), one.sends) for one in self._seen)

    def _recovery(self) -> float | None:
        """Seconds from everybody's return until the last call began that failed; None if there was no outage."""
        if self._script.outage is None:
            return None
        back = self._script.outage[1]
        later = sorted((one for one in self._seen if one.began >= back), key=lambda one: one.began)
        last = max((n for n, one in enumerate(later) if one.error), default=-1)
        if len(later) - 1 - last < STEADY:
            return 99.0
        return 0.0 if last < 0 else round(later[last].began - back, 3)

    def _normal_p99(self) -> float:
        """Of the calls before the first fault."""
        times = sorted(one.ended - one.began for one in self._seen if one.ended <= self._script.calm_until)
        return times[int(0.99 * (len(times) - 1))] if times else 0.0


_ZEROES = ("doubled_after_first_byte", "lost_events", "duplicated_events", "residual_in_flight", "beyond_deadline")
