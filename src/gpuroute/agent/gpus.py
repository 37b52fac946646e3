"""What NVIDIA's management library says of the GPUs of this machine, if it is here (`nvidia-ml-py`, optional).

Without the library, a driver or a GPU nothing is known, and nothing fails. A driver that is ill may never answer, so it
is asked in a thread (`Eyes`). An engine that was given some GPUs only (`CUDA_VISIBLE_DEVICES`, which the library itself
does not heed) is told of these, if the agent has the same variable.
"""

from __future__ import annotations

import logging
import math
import os
import re
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from gpuroute.core.endpoint import Gpu
from gpuroute.core.speed import PREFILL_PRIOR

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger("gpuroute.agent")

LIMIT_S = 5.0
"""How long the library may take before the agent goes on without it: a GPU that sleeps takes a second or two."""

LOOK_S = 10.0
"""How often it is asked why GPUs are slower than their kind."""

_REASONS = {
    0x004: "power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal",
    0x040: "hw_thermal",
    0x080: "hw_power_brake",
    0x200: "board_limit",
    0x400: "reliability",
}
"""NVML's reasons for clocks that make a GPU slower than its kind; being idle and settings of the operator are none."""

_ASK_REASONS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
"""The function by its present and by its older name: a driver may know only one of them."""


class Eyes:
    """What is known by now of the GPUs here. To read it takes no time; a thread, which no end of the process waits for,
    asks the library, and stays with it for ever if it hangs; after `limit` seconds it is gone on without.
    `gpu`: as of `found`; `reasons`: as of `throttled`."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self.gpu: Gpu | None = None
        self.reasons: tuple[str, ...] = ()
        self._asked_at = time.monotonic()
        self._answered = threading.Event()
        self._warned = False
        threading.Thread(target=self._look, name="gpuroute-nvml", daemon=True).start()

    def wait(self) -> bool:
        """Wait for the first figures, if need be. False if there is no GPU here, or no way to know one."""
        self._answered.wait(self._limit)
        self.check()
        return self.gpu is not None or not self._answered.is_set()

    def check(self) -> None:
        """Say so in the log, once, if the library owes an answer for too long."""
        late = time.monotonic() - self._asked_at
        if late >= self._limit and not self._warned:
            self._warned = True
            known = "the record is without a GPU until it does" if self.gpu is None else "the record stays as it is"
            log.warning("NVML has not answered for %.1f s: %s (does nvidia-smi hang?)", late, known)

    def _look(self) -> None:
        while True:
            self.gpu = self.gpu or found()
            self.reasons = throttled() if self.gpu else ()
            self._asked_at = math.inf
            self._answered.set()
            if self.gpu is None:
                return
            if self._warned:
                self._warned = False
                log.info("NVML answers again: %d x %s", self.gpu.count, self.gpu.kind)
            time.sleep(LOOK_S)
            self._asked_at = time.monotonic()


def found() -> Gpu | None:
    """Kind, number and memory (GiB of one) of this machine's GPUs; None without the library or without a GPU."""
    nvml = _library()
    if nvml is None:
        return None
    with suppress(Exception):
        handles = list(_handles(nvml))
        name = nvml.nvmlDeviceGetName(handles[0])
        memory = nvml.nvmlDeviceGetMemoryInfo(handles[0]).total / 2**30
        return Gpu(kind_of(name if isinstance(name, str) else name.decode()), len(handles), round(memory, 1))
    return None


def throttled() -> tuple[str, ...]:
    """Why a GPU of this machine is slower than its kind, now; () if none is, or nothing is known. Takes milliseconds."""
    nvml = _library()
    reasons: set[str] = set()
    if nvml is not None:
        with suppress(Exception):
            for handle in _handles(nvml):
                bits = _bits(nvml, handle)
                reasons |= {word for bit, word in _REASONS.items() if bits & bit}
    return tuple(sorted(reasons))


def kind_of(name: str) -> str:
    """The short kind in a product's name: "NVIDIA H100 80GB HBM3" is an H100."""
    words = re.split(r"[\s-]+", name)
    return next((word for word in words if word in PREFILL_PRIOR), name.removeprefix("NVIDIA "))


def _handles(nvml: Any) -> Iterator[Any]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        yield from (nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount()))
        return
    for word in (word.strip() for word in visible.split(",")):
        if word.isdecimal():
            yield nvml.nvmlDeviceGetHandleByIndex(int(word))
        elif word.startswith("GPU-"):
            yield nvml.nvmlDeviceGetHandleByUUID(word)


def _bits(nvml: Any, handle: Any) -> int:
    """The reasons of one GPU; 0 if it does not say."""
    for name in _ASK_REASONS:
        with suppress(Exception):
            return int(getattr(nvml, name)(handle))
    return 0


def _library() -> Any:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        return None
    return pynvml
