"""What is told of this machine's GPUs, by a library that most machines do not have."""

from __future__ import annotations

import asyncio
import sys
import threading
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from gpuroute.agent import gpus
from gpuroute.agent.register import Rules
from gpuroute.agent.service import Agent, Engine, Options
from gpuroute.cli import main
from gpuroute.core.endpoint import Endpoint, Gpu
from gpuroute.core.speed import PREFILL_PRIOR

if TYPE_CHECKING:
    from collections.abc import Callable


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


class Hanging:
    """An NVML that hangs until it is let go, in what is named."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.asked, self.go_on = threading.Event(), threading.Event()
        real = library()

        def hang(name: str, *given: object) -> object:
            self.asked.set()
            assert self.go_on.wait(60)
            return getattr(real, name)(*given)

        monkeypatch.setitem(sys.modules, "pynvml", library(**{name: partial(hang, name) for name in names}))


@pytest.mark.parametrize("name", ["nvmlInit", "nvmlDeviceGetName", "nvmlDeviceGetCurrentClocksEventReasons"])
def test_an_agent_starts_beside_a_driver_that_hangs(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, eventually: Callable[..., None]
) -> None:
    """The command gets as far as serving, says why it knows no GPU, and knows it as soon as the driver does."""
    library, served = Hanging(monkeypatch, name), []

    async def serve(options: Options, *_: object) -> bool:
        served.append(options)
        return True

    monkeypatch.setattr("gpuroute.cli.agent._serve", serve)
    monkeypatch.setattr("gpuroute.cli.agent.gc.freeze", lambda: None)
    monkeypatch.setattr("logging.basicConfig", lambda **_: None)
    monkeypatch.setattr(gpus, "LIMIT_S", 0.05)
    assert main(["agent", "--url", "http://127.0.0.1:1", "--pool", "p"]) == 0
    assert library.asked.wait(60)
    (options,) = served
    eyes = options.eyes
    assert eyes is not None
    assert options.engines[0].endpoint.gpu in {Gpu(), eyes.gpu}
    eyes.check()
    assert caplog.text.count("NVML has not answered") == 1
    library.go_on.set()
    eventually(lambda: eyes.reasons == ("hw_thermal", "power_cap"), "the figures come late")
    assert eyes.gpu == Gpu("H100", 2, 80.0)


def test_a_driver_that_begins_to_hang_is_said_once_and_what_was_known_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, eventually: Callable[..., None]
) -> None:
    monkeypatch.setattr(gpus, "LOOK_S", 0.0)
    monkeypatch.setitem(sys.modules, "pynvml", library())
    eyes = gpus.Eyes(60.0)
    assert eyes.wait()
    hanging = Hanging(monkeypatch, "nvmlInit")
    assert hanging.asked.wait(60)
    eyes._limit = 0.01

    def warned() -> bool:
        eyes.check()
        return "NVML has not answered" in caplog.text

    eventually(warned, "it is noticed")
    eyes.check()
    assert caplog.text.count("NVML has not answered") == 1
    assert (eyes.gpu, eyes.reasons) == (Gpu("H100", 2, 80.0), ("hw_thermal", "power_cap"))
    caplog.set_level("INFO")
    monkeypatch.setattr(gpus, "LOOK_S", 60.0)
    hanging.go_on.set()
    eventually(lambda: "NVML answers again: 2 x H100" in caplog.text, "and that it is over")


def test_nothing_is_asked_twice_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert not gpus.Eyes(60.0).wait()


def test_figures_that_come_late_are_taken_in_by_all_records_and_the_agent_ends_without_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call of the driver that hangs keeps neither the loop nor the end of the agent waiting."""
    monkeypatch.setattr("gpuroute.agent.service.GPUS_S", 0.0)
    hanging = Hanging(monkeypatch, "nvmlInit")
    eyes = gpus.Eyes(0.0)
    assert eyes.wait()
    written: list[Endpoint] = []

    class Record:
        def __init__(self, endpoint: Endpoint) -> None:
            self.update(endpoint)

        def update(self, endpoint: Endpoint) -> None:
            written.append(endpoint)
            if endpoint.gpu == Gpu("H100", 2, 80.0):
                agent.stop()

        def close(self) -> None:
            pass

    engines = [
        Engine(url="http://127.0.0.1:1", endpoint=Endpoint(f"gpu-{gpu}", "http://127.0.0.1:1", engine="vllm", gpu=gpu))
        for gpu in (Gpu(), Gpu("L4"))
    ]
    agent: Agent

    async def run() -> None:
        nonlocal agent
        agent = Agent(Options(engines=engines, eyes=eyes, rules=Rules(drain_s=0.0)), Record)
        running = asyncio.ensure_future(agent.run())
        async with asyncio.timeout(60):
            while len(written) < 2:
                await asyncio.sleep(0)
            assert not any(endpoint.gpu.count == 2 for endpoint in written)
            hanging.go_on.set()
            await running

    asyncio.run(run())
    kinds = {endpoint.id: endpoint.gpu.kind for endpoint in written if "throttled" not in endpoint.labels}
    assert kinds == {f"gpu-{Gpu()}": "H100", f"gpu-{Gpu('L4')}": "L4"}
    fresh = agent.desks[0].book.rate
    assert fresh.seconds == pytest.approx(PREFILL_PRIOR["H100"])
