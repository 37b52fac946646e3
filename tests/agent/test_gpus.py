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
        "nvmlDeviceGetHandleByUUID": lambda uuid: {"GPU-b": 1}[uuid],
        "nvmlDeviceGetCurrentClocksEventReasons": lambda index: 0x44 if index else 0x01,
    }
    return SimpleNamespace(**{**given, **named})


@pytest.fixture(autouse=True)
def all_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_gpus_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library())
    assert gpus.found() == Gpu("H100", 2, 80.0)
    assert gpus.throttled() == ("hw_thermal", "power_cap")


@pytest.mark.parametrize(
    ("visible", "count", "reasons"),
    [("0", 1, ()), ("1", 1, ("hw_thermal", "power_cap")), ("GPU-b", 1, ("hw_thermal", "power_cap")), ("0, 1", 2, None)],
)
def test_only_the_gpus_of_the_engine_count(
    visible: str, count: int, reasons: tuple[str, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus.found() == Gpu("H100", count, 80.0)
    assert reasons is None or gpus.throttled() == reasons


@pytest.mark.parametrize("visible", ["", "7", "MIG-x", "GPU-a"])
def test_no_gpu_that_it_may_use_is_no_gpu(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_index(index: int) -> int:
        if index > 1:
            raise RuntimeError("invalid argument")
        return index

    monkeypatch.setitem(sys.modules, "pynvml", library(nvmlDeviceGetHandleByIndex=by_index))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert (gpus.found(), gpus.throttled()) == (None, ())


def test_an_older_driver_is_asked_by_the_older_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: object) -> int:
        raise RuntimeError("function not found")

    older = {"nvmlDeviceGetCurrentClocksThrottleReasons": lambda _: 0x08}
    monkeypatch.setitem(sys.modules, "pynvml", library(nvmlDeviceGetCurrentClocksEventReasons=unknown, **older))
    assert gpus.throttled() == ("hw_slowdown",)


def test_the_real_library_fails_softly_without_a_gpu_and_names_things_as_we_do() -> None:
    """Whatever machine this is: nothing is raised, and the bits are those of the library."""
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    gpus.found()
    gpus.throttled()
    reasons = {
        "power_cap": pynvml.nvmlClocksEventReasonSwPowerCap,
        "hw_slowdown": pynvml.nvmlClocksThrottleReasonHwSlowdown,
        "sync_boost": pynvml.nvmlClocksEventReasonSyncBoost,
        "sw_thermal": pynvml.nvmlClocksEventReasonSwThermalSlowdown,
        "hw_thermal": pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
        "hw_power_brake": pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
    }
    assert {word: bit for bit, word in gpus._REASONS.items() if word in reasons} == reasons
    assert any(hasattr(pynvml, name) for name in gpus._ASK_REASONS)


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
