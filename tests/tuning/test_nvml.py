"""Power and energy of a GPU, by an NVML that is played here."""

from __future__ import annotations

import sys
import threading
import types
from typing import Any

import pytest

from mgpu_ops.tuning import nvml


class NVMLError(Exception):
    pass


def played(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> types.SimpleNamespace:
    """pynvml with a GPU at 1500 MHz and 650 W, whose counter of energy moves on; `functions` replace its own."""
    handles: list[Any] = []

    def refuse(*arguments: Any) -> None:
        raise NVMLError("Not Supported")

    module = types.SimpleNamespace(
        NVMLError=NVMLError,
        NVML_CLOCK_SM=1,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda i: handles.append(i) or i,
        nvmlDeviceGetHandleByUUID=lambda name: handles.append(name) or name,
        nvmlDeviceGetClockInfo=lambda handle, which: 1500,
        nvmlDeviceGetPowerUsage=lambda handle: 650_000,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: 10_000,
        handles=handles,
    )
    for name, value in functions.items():
        setattr(module, name, refuse if value is None else value)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return module


def readings(meter: nvml.Meter, *rows: tuple[float, float | None]) -> None:
    meter._readings = [nvml._Reading(at, 1500.0 + at, 650.0, joules) for at, joules in rows]


def test_energy_is_the_difference_of_the_counter_between_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    played(monkeypatch)
    meter = nvml.Meter()
    readings(meter, (0.0, 5.0), (1.0, 70.0), (1.5, 70.0), (2.0, 770.0), (3.0, 1370.0))
    power = meter.between(1.5, 2.5)  # half of the step to 770 J, half of the step to 1370 J
    assert power.joules == pytest.approx(350 + 300)
    assert power.watts == pytest.approx(650)
    assert power.clock_mhz == pytest.approx(1501.75)


@pytest.mark.parametrize("joules", [None, 70.0])
def test_without_steps_around_the_time_energy_is_power_by_time(joules: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    played(monkeypatch)
    meter = nvml.Meter()
    readings(meter, (0.0, joules), (1.0, joules), (2.0, joules))
    assert meter.between(0.5, 2.5) == nvml.Power(1501.5, 650.0, 1300.0)
    assert meter.between(5.0, 6.0) == nvml.Power(None, None, None)


def test_a_meter_reads_while_it_is_open_and_then_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    read = threading.Semaphore(0)

    def power(handle: Any) -> int:
        read.release()
        return 650_000

    played(monkeypatch, nvmlDeviceGetPowerUsage=power, nvmlDeviceGetClockInfo=None)
    monkeypatch.setattr(nvml, "EVERY", 0.001)
    with nvml.Meter() as meter:
        for _ in range(4):
            assert read.acquire(timeout=60)
    count = len(meter._readings)
    assert count >= 2
    assert meter.between(0.0, float("inf")).clock_mhz is None
    assert not meter._thread.is_alive()


@pytest.mark.parametrize(
    ("visible", "ordinal", "handle"), [(None, 1, 1), ("3,5", 1, 5), ("GPU-17ab", 0, "GPU-17ab"), ("", 0, 0), ("3", 1, 1)]
)
def test_the_gpu_is_the_one_that_this_process_sees(
    visible: str | None, ordinal: int, handle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = played(monkeypatch)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    nvml.Meter(ordinal)
    assert module.handles == [handle]


def test_why_there_is_no_power_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    refuses: dict[str, Any] = {"nvmlDeviceGetPowerUsage": None, "nvmlDeviceGetTotalEnergyConsumption": None}
    played(monkeypatch, **refuses)
    with pytest.raises(nvml.Unavailable, match="NVML tells neither power nor energy of this GPU"):
        nvml.Meter()
    played(monkeypatch, nvmlInit=lambda: (_ for _ in ()).throw(NVMLError("Driver Not Loaded")))
    with pytest.raises(nvml.Unavailable, match="NVML: Driver Not Loaded"):
        nvml.Meter()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(nvml.Unavailable, match="pynvml is missing: run `pip install"):
        nvml.Meter()
