"""The step model against real vLLM: recorded runs are replayed and the times compared.

Two of the four recorded runs have constants: Llama-3.1-8B on an RTX PRO 6000 (kernel fit, `h` tuned on this
very run) and on an RTX 4090 (nothing tuned: the L40S fit scaled by the data sheets, same generation of
chip). Qwen3 runs have none.
"""

from __future__ import annotations

import csv
import gzip
import io
from dataclasses import dataclass
from importlib import resources
from math import inf
from typing import Final

from .gpu import Gpu
from .job import Job
from .measure import mean_of, quantile
from .spec import GpuSpec, gpu_spec

# Llama-3.1-8B on an RTX 4090 by its data sheet: 1,008 GB/s (90 % of it reached), 165 Tflop/s dense BF16; KV as reported.
_BANDWIDTH, _FLOPS, _KV_4090 = 0.9 * 1.008e12, 165.2e12, 41_408
_WEIGHT_BYTES, _PARAMETERS, _KV_BYTES, _PAIR_FLOPS = 16.06e9, 8.03e9, 131_072, 4 * 32 * 4096
_CLOCKS: Final = ("queued_s", "first_token_s", "last_token_s")
METRICS: Final = ("ttft", "tpot", "latency")


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric of one run: seconds measured and simulated."""

    run: str
    metric: str
    statistic: str
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        """Relative error of the simulation."""
        return self.simulated / self.measured - 1


def rtx4090() -> GpuSpec:
    """Constants from the data sheet only: weights and KV read once per step, two operations per
    parameter and token.
    """
    return GpuSpec(
        kind="RTX4090",
        h=0.002,
        c0=0.0,
        w=_WEIGHT_BYTES / _BANDWIDTH,
        a=2 * _PARAMETERS / _FLOPS,
        k=_KV_BYTES / _BANDWIDTH,
        q=_PAIR_FLOPS / _FLOPS,
        s=0.0,
        kv_tokens=_KV_4090,
    )


def validate() -> list[Comparison]:
    """Replay every recorded run that has constants."""
    specs = {"RTXPRO6000_Llama-3.1-8B": (gpu_spec("RTXPRO6000"), 128), "RTX4090_Llama-3.1-8B": (rtx4090(), 256)}
    found: list[Comparison] = []
    for run, (spec, seqs) in specs.items():
        found += _compare(run, [row for row in _rows() if row["run"] == run], spec, seqs)
    return found


def _rows() -> list[dict[str, str]]:
    path = resources.files(__package__).joinpath("data/vllm_measured_runs.csv.gz")
    return list(csv.DictReader(io.StringIO(gzip.decompress(path.read_bytes()).decode())))


def _compare(run: str, rows: list[dict[str, str]], spec: GpuSpec, seqs: int) -> list[Comparison]:
    arrivals = [(float(row["queued_s"]), int(row["in_tok"]), int(row["out_tok"])) for row in rows]
    jobs = replay(arrivals, spec, seqs)
    ours = [_times([job.submitted_at, job.first_token_at, job.done_at], job.output_tokens) for job in jobs]
    real = [_times([float(row[key]) for key in _CLOCKS], int(row["out_tok"])) for row in rows]
    found = []
    for index, metric in enumerate(METRICS):
        measured, simulated = (sorted(times[index] for times in each) for each in (real, ours))
        found.append(Comparison(run, metric, "mean", mean_of(measured), mean_of(simulated)))
        found += [
            Comparison(run, metric, f"p{round(100 * q)}", quantile(measured, q), quantile(simulated, q))
            for q in (0.5, 0.9, 0.99)
        ]
    return found


def _times(clocks: list[float], tokens: int) -> tuple[float, float, float]:
    queued, first, last = clocks
    return first - queued, (last - first) / max(1, tokens - 1), last - queued


def replay(arrivals: list[tuple[float, int, int]], spec: GpuSpec, seqs: int = 256) -> list[Job]:
    """Jobs of (arrival, prompt, output) on one engine, run to the end, in the order given."""
    gpu = Gpu(spec, seqs)
    jobs = [Job(prompt, output) for _, prompt, output in arrivals]
    for job, (at, _, _) in sorted(zip(jobs, arrivals, strict=True), key=lambda pair: pair[1][0]):
        while gpu.next_at <= at:
            gpu.advance(gpu.next_at)
        gpu.submit(job, at)
        gpu.advance(at)
    while gpu.next_at < inf:
        gpu.advance(gpu.next_at)
    return jobs
