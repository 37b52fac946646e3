"""Results for people and for machines: a table, JSON, CSV, a plot."""

from __future__ import annotations

import csv
import io
import json
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from .measure import confidence
from .run import KEYS, Result

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_COLUMNS: Final = (
    *(("ttft_mean", "TTFT mean s"), ("ttft_p50", "p50"), ("ttft_p95", "p95"), ("ttft_p99", "p99")),
    *(("e2e_mean", "end to end s"), ("tpot_p99", "TPOT p99 s"), ("goodput", "goodput /s"), ("success", "success")),
    *(("hit", "hit"), ("max_over_mean", "max/mean"), ("utilisation", "GPU use")),
)


def as_json(results: Sequence[Result]) -> str:
    """A list of rows with exactly the documented keys."""
    return json.dumps([{key: result.row[key] for key in KEYS} for result in results], indent=1) + "\n"


def as_csv(results: Sequence[Result]) -> str:
    """One line per run: the JSON keys, then the extra figures."""
    extra = list(results[0].extra) if results else []
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*KEYS, *extra])
    for result in results:
        writer.writerow([*(result.row[key] for key in KEYS), *(result.extra[key] for key in extra)])
    return text.getvalue()


def table_rows(results: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    """Header and one row per policy: means over seeds, with the 95 % confidence half width of the mean
    TTFT.
    """
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.row["policy"], []).append(result)
    header = ["policy", "reports", "seeds", *(title for _, title in _COLUMNS)]
    rows = []
    for name, runs in groups.items():
        cells = [name, runs[0].row["reports"], str(len(runs))]
        for key, _ in _COLUMNS:
            mean, half = confidence([{**run.row, **run.extra}[key] for run in runs])
            spread = f" ±{half:.2g}" if key == "ttft_mean" and half else ""
            cells.append(f"{mean:.{2 if mean >= 100 else 3}f}{spread}")
        rows.append(cells)
    return header, rows


def print_table(results: Sequence[Result], title: str = "") -> None:
    """The table on stdout, with rich if it is installed."""
    header, rows = table_rows(results)
    if find_spec("rich"):
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title or None, title_justify="left")
        for index, name in enumerate(header):
            table.add_column(name, justify="left" if index < 2 else "right", no_wrap=index == 0)
        for row in rows:
            table.add_row(*row)
        console = Console()
        Console(width=max(console.width, 165)).print(table)
        return
    widths = [max(len(row[index]) for row in [header, *rows]) for index in range(len(header))]
    for row in [[title], header, *rows] if title else [header, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip())


def print_claims(table: Sequence[dict[str, Any]]) -> None:
    """The rows of a suite on stdout, as Markdown: they go into the docs as they are."""
    print("| | claim | figure | measured | bar | | case |")
    print("|---|---|---|---|---|---|---|")
    for row in table:
        verdict = {True: "met", False: "**missed**", None: ""}[row["met"]]
        spread = f" ± {row['plus_minus']:.2g}" if row.get("plus_minus") else ""
        figure = f"`{row['figure']}` | {row['value']:.3g}{spread} | {row['bar']}"
        print(f"| {row['item']} | {row['name']} | {figure} | {verdict} | `{row['case']}` |")


def plot(results: Sequence[Result], path: Path) -> None:
    """Three panels of the first seed of each policy: TTFT distribution, load over time, share per
    endpoint.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.5), layout="constrained")
    times, loads, shares = figure.subplots(1, 3)
    seen: set[str] = set()
    for result in results:
        name = result.row["policy"]
        if name in seen or not result.ttft:
            continue
        seen.add(name)
        ordered = sorted(result.ttft)
        step = max(1, len(ordered) // 2000)
        times.plot(ordered[::step], [index / len(ordered) for index in range(0, len(ordered), step)], label=name)
        loads.plot([at for at, _, _ in result.samples], [high for _, _, high in result.samples], label=name, lw=0.8)
        shares.plot(sorted(result.shares), label=name)
    times.set(xscale="log", xlabel="time to first token, s", ylabel="share of calls", title="TTFT")
    loads.set(xlabel="time, s", ylabel="calls on the fullest server", title="Load")
    shares.set(xlabel="endpoint, by rank", ylabel="attempts", title="Share per endpoint")
    for axes in (times, loads, shares):
        axes.grid(alpha=0.3)
    times.legend(fontsize=8)
    figure.savefig(path, dpi=75)
