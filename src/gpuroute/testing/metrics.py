"""What a balancer may read from the stand-in: `/metrics` with vLLM's names, and the ORCA response header."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuroute.sim.gpu import Gpu

_BUCKETS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 160.0, 640.0)


class Histogram:
    """A Prometheus histogram of seconds."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BUCKETS) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        """Count one value."""
        self.total += seconds
        self._counts[next((i for i, bound in enumerate(_BUCKETS) if seconds <= bound), -1)] += 1

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """Its text form."""
        running = 0
        for bound, count in zip((*_BUCKETS, "+Inf"), self._counts, strict=True):
            running += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {float(running)}'
        yield f"{name}_count{{{labels}}} {float(running)}"
        yield f"{name}_sum{{{labels}}} {self.total}"


class EngineMetrics:
    """Counts of one engine, in the engine's own seconds (not scaled)."""

    def __init__(self) -> None:
        self.started = time.time()
        self.queries = self.hits = self.prompt_tokens = self.generation_tokens = 0
        self.finished = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self.rejected = 0
        self.ttft = Histogram()
        self.e2e = Histogram()
        self.queue = Histogram()

    def page(self, gpu: Gpu, model: str) -> bytes:
        """The text of `/metrics`."""
        return ("\n".join(self._lines(gpu, f'engine="0",model_name="{model}"')) + "\n").encode()

    def _lines(self, gpu: Gpu, labels: str) -> Iterator[str]:
        yield f"process_start_time_seconds {self.started}"
        for name, kind, value in self._scalars(gpu):
            yield f"# TYPE vllm:{name.removesuffix('_total')} {kind}"
            yield f"vllm:{name}{{{labels}}} {float(value)}"
        for reason, count in self.finished.items():
            yield f'vllm:request_success_total{{finished_reason="{reason}",{labels}}} {float(count)}'
        yield f'vllm:admission_rejections_total{{{labels},reason="max_num_queued_reqs"}} {float(self.rejected)}'
        histograms = {"time_to_first_token": self.ttft, "e2e_request_latency": self.e2e, "request_queue_time": self.queue}
        for name, histogram in histograms.items():
            yield f"# TYPE vllm:{name}_seconds histogram"
            yield from histogram.lines(f"vllm:{name}_seconds", labels)
        blocks = gpu.kv.capacity // gpu.kv.block
        yield f'vllm:cache_config_info{{block_size="{gpu.kv.block}",engine="0",num_gpu_blocks="{blocks}"}} 1.0'

    def _scalars(self, gpu: Gpu) -> tuple[tuple[str, str, float], ...]:
        return (
            ("num_requests_running", "gauge", gpu.running),
            ("num_requests_waiting", "gauge", gpu.waiting),
            ("kv_cache_usage_perc", "gauge", gpu.kv_usage),
            ("prefix_cache_queries_total", "counter", self.queries),
            ("prefix_cache_hits_total", "counter", self.hits),
            ("num_preemptions_total", "counter", gpu.preemptions),
            ("prompt_tokens_total", "counter", self.prompt_tokens),
            ("generation_tokens_total", "counter", self.generation_tokens),
        )


def orca_header(gpu: Gpu, wanted: str) -> str | None:
    """The value of `endpoint-load-metrics` in the format asked for; None for those vLLM does not know (BIN)."""
    waiting, usage = float(gpu.waiting), gpu.kv_usage
    if wanted.upper() == "JSON":
        return f'JSON {{"named_metrics": {{"num_requests_waiting": {waiting}, "kv_cache_usage_perc": {usage}}}}}'
    if wanted.upper() == "TEXT":
        return f"TEXT named_metrics.num_requests_waiting={waiting}, named_metrics.kv_cache_usage_perc={usage}"
    return None
