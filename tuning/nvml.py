"""Clock, power and energy of a GPU while it works, through NVML."""

from __future__ import annotations

import dataclasses
import os
import statistics
import threading
import time
from types import TracebackType
from typing import Any, Self

import numpy as np

from mgpu_ops.core import extras

EVERY = 0.02  # seconds between two readings; the counter of energy itself is renewed at most so often


class Unavailable(RuntimeError):
    """NVML does not tell what the GPU takes: the message says why."""


@dataclasses.dataclass(frozen=True)
class Power:
    """Means over some time, and the energy in it; None for what NVML does not tell."""

    clock_mhz: float | None = None  # of the SMs
    watts: float | None = None
    joules: float | None = None


@dataclasses.dataclass(frozen=True)
class _Reading:
    at: float  # seconds on the clock of time.perf_counter
    clock_mhz: float | None
    watts: float | None
    joules: float | None  # since the driver was loaded


class Meter:
    """Reads a GPU's clock, power and energy, while it is open, in a thread: `with Meter(0) as meter: ...`.

    `ordinal`: among the GPUs that this process sees. Raises Unavailable where there is no NVML, or it refuses.
    """

    def __init__(self, ordinal: int = 0):
        try:
            import pynvml
        except ImportError:
            raise Unavailable(f"pynvml is missing: {extras.way_to(['pynvml'])}") from None
        self._nvml = pynvml
        self._readings: list[_Reading] = []
        self._closed = threading.Event()
        try:
            pynvml.nvmlInit()
            self._handle = _handle(pynvml, ordinal)
            first = self._read()
        except (pynvml.NVMLError, ValueError) as error:
            raise Unavailable(f"NVML: {error}") from None
        if first.watts is None and first.joules is None:
            raise Unavailable("NVML tells neither power nor energy of this GPU")
        self._thread = threading.Thread(target=self._watch, daemon=True, name="power")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._closed.set()
        self._thread.join()
        self._nvml.nvmlShutdown()

    def between(self, start: float, end: float) -> Power:
        """Means and the energy from `start` to `end`, on the clock of time.perf_counter.

        The energy is the difference of NVML's counter, between whose steps power is taken as constant. Without the counter it
        is power x time, where a reading of the power is a mean over up to a second before.
        """
        inside = [reading for reading in self._readings if start <= reading.at <= end]
        clock = _mean([reading.clock_mhz for reading in inside])
        joules = self._counted(start, end)
        if joules is not None:
            return Power(clock, joules / (end - start), joules)
        watts = _mean([reading.watts for reading in inside])
        return Power(clock, watts, None if watts is None else watts * (end - start))

    def _counted(self, start: float, end: float) -> float | None:
        """By the counter; None where its steps do not enclose the time."""
        steps: list[tuple[float, float]] = []  # when the counter was first seen to have each value
        for reading in list(self._readings):
            if reading.joules is not None and (not steps or reading.joules > steps[-1][1]):
                steps.append((reading.at, reading.joules))
        steps = steps[1:]  # the first value may be older than its reading
        if not steps or not steps[0][0] <= start < end <= steps[-1][0]:
            return None
        times, values = np.array(steps).T
        return float(np.interp(end, times, values) - np.interp(start, times, values))

    def _watch(self) -> None:
        while not self._closed.wait(EVERY):
            self._readings.append(self._read())

    def _read(self) -> _Reading:
        return _Reading(
            time.perf_counter(),
            self._asked("nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_SM),
            self._asked("nvmlDeviceGetPowerUsage", scale=1e-3),
            self._asked("nvmlDeviceGetTotalEnergyConsumption", scale=1e-3),
        )

    def _asked(self, name: str, *arguments: int, scale: float = 1.0) -> float | None:
        try:
            value: Any = getattr(self._nvml, name)(self._handle, *arguments)
            return float(value) * scale
        except self._nvml.NVMLError:
            return None


def _handle(pynvml: Any, ordinal: int) -> Any:
    """NVML's handle of a GPU, which CUDA_VISIBLE_DEVICES may name by its number or its UUID."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in named.split(",")] if named else []
    name = names[ordinal] if ordinal < len(names) else str(ordinal)
    return pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(name)


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
