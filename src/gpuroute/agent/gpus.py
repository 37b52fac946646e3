"""What NVIDIA's management library says of the GPUs of this machine, if it is here (`nvidia-ml-py`, optional)."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

from gpuroute.core.endpoint import Gpu
from gpuroute.core.speed import PREFILL_PRIOR

_REASONS = {
    0x04: "power_cap",
    0x08: "hw_slowdown",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
}
"""NVML's clock throttle reasons that make a GPU slower than its kind."""


def found() -> Gpu | None:
    """Kind, number and memory of this machine's GPUs; None without the library or without a GPU."""
    nvml = _library()
    if nvml is None:
        return None
    with suppress(Exception):
        count = nvml.nvmlDeviceGetCount()
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        name = nvml.nvmlDeviceGetName(handle)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30
        return Gpu(kind_of(name if isinstance(name, str) else name.decode()), count, round(memory, 1))
    return None


def throttled() -> tuple[str, ...]:
    """Why a GPU of this machine is slower than its kind, now; () if none is, or nothing is known."""
    nvml = _library()
    reasons: set[str] = set()
    if nvml is not None:
        with suppress(Exception):
            for index in range(nvml.nvmlDeviceGetCount()):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
                reasons |= {word for bit, word in _REASONS.items() if bits & bit}
    return tuple(sorted(reasons))


def kind_of(name: str) -> str:
    """The short kind in a product's name: "NVIDIA H100 80GB HBM3" is an H100."""
    words = re.split(r"[\s-]+", name)
    return next((word for word in words if word in PREFILL_PRIOR), name.removeprefix("NVIDIA "))


def _library() -> Any:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        return None
    return pynvml
