"""What came out: percentiles, the JSON object, and the closing lines."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .replay import Replay

_LISTED = 5


@dataclass(frozen=True, slots=True)
class Figures:
    """One policy. Times are wall seconds, as the caller saw them."""

    policy: str
    calls: int
    failed: int
    interrupted: int
    retried: int
    ttft: tuple[float, float, float]
    tokens_per_s: float
    shares: dict[str, float]
    errors: tuple[tuple[str, int], ...]

    def as_json(self) -> dict[str, Any]:
        """The figures of one policy."""
        p50, p95, p99 = (round(value, 4) for value in self.ttft)
        return {
            "ttft_p50": p50,
            "ttft_p95": p95,
            "ttft_p99": p99,
            "tokens_per_s": round(self.tokens_per_s, 1),
            "failed": self.failed,
            "interrupted": self.interrupted,
        }


def measure(policy: str, replay: Replay, retried: int) -> Figures:
    """The figures of a finished replay."""
    answers = replay.answers
    reached = Counter(answer.endpoint for answer in answers if answer.endpoint)
    failed = [answer.error for answer in answers if answer.error and not answer.interrupted]
    times = sorted(answer.ttft for answer in answers if answer.ttft is not None)
    return Figures(
        policy=policy,
        calls=len(answers),
        failed=len(failed),
        interrupted=sum(answer.interrupted for answer in answers),
        retried=retried,
        ttft=(percentile(times, 50), percentile(times, 95), percentile(times, 99)),
        tokens_per_s=sum(answer.tokens for answer in answers) / replay.seconds,
        shares={ident: reached[ident] / reached.total() for ident in sorted(reached)},
        errors=tuple(Counter(failed).most_common(_LISTED)),
    )


def percentile(ordered: Sequence[float], rank: float) -> float:
    """The smallest value that `rank` percent of the values do not exceed; 0.0 of none."""
    if not ordered:
        return 0.0
    return ordered[max(0, math.ceil(len(ordered) * rank / 100) - 1)]


def as_json(figures: Sequence[Figures]) -> dict[str, Any]:
    """The one object that `--json` prints; the totals are over all policies."""
    return {
        "calls": sum(one.calls for one in figures),
        "failed": sum(one.failed for one in figures),
        "interrupted": sum(one.interrupted for one in figures),
        "retried": sum(one.retried for one in figures),
        "policies": {one.policy: one.as_json() for one in figures},
    }


def closing_lines(figures: Sequence[Figures]) -> list[str]:
    """The comparison, for people."""
    head = f"{'policy':<12} {'calls':>5} {'failed':>6} {'interrupted':>11} {'retried':>7}"
    lines = [f"{head}   {'TTFT p50':>8} {'p95':>8} {'p99':>8}   {'tokens/s':>8}"]
    for one in figures:
        counts = f"{one.policy:<12} {one.calls:>5} {one.failed:>6} {one.interrupted:>11} {one.retried:>7}"
        p50, p95, p99 = (f"{value * 1e3:.0f} ms" for value in one.ttft)
        lines.append(f"{counts}   {p50:>8} {p95:>8} {p99:>8}   {one.tokens_per_s:>8.0f}")
    for one in figures:
        shares = "  ".join(f"{ident} {share:.0%}" for ident, share in one.shares.items())
        lines.append(f"share of calls, {one.policy}: {shares}")
        lines += [f"failed under {one.policy}, {count} times: {error}" for error, count in one.errors]
    return lines
