"""What is told of this machine's GPUs, by a library that most machines do not have."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from gpuroute.agent import gpus
from gpuroute.core.endpoint import Gpu


def library(**named: object) -> SimpleNamespace:
    """An NVML with one throttled GPU of two."""
    given = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda _: b"NVIDIA H100 80GB HBM3",
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(total=80 * 2**30),
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda index: 0x44 if index else 0x01,
    }
    return SimpleNamespace(**{**given, **named})


def test_gpus_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library())
    assert gpus.found() == Gpu("H100", 2, 80.0)
    assert gpus.throttled() == ("hw_thermal", "power_cap")


def test_no_library_and_a_broken_one_are_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("driver not loaded")

    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert (gpus.found(), gpus.throttled()) == (None, ())
    for name in ("nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"):
        monkeypatch.setitem(sys.modules, "pynvml", library(**{name: broken}))
        assert (gpus.found(), gpus.throttled()) == (None, ())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "GeForce RTX 4090"),
        ("Strange", "Strange"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert gpus.kind_of(name) == kind
