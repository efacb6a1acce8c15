"""`mgpu_ops.autotune`: tunes what a function would run, within the program that runs it."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import numpy as np

from mgpu_ops import floats
from mgpu_ops.ops import SPECS
from mgpu_ops.registry import database, job, winner
from mgpu_ops.registry.capture import capture
from mgpu_ops.registry.database import Entry
from mgpu_ops.registry.resolution import use_configs
from mgpu_ops.registry.spec import OpSpec, Problem
from mgpu_ops.tuning import devices, problems, tuner
from mgpu_ops.tuning.device import Device
from mgpu_ops.tuning.options import TuneOptions
from mgpu_ops.tuning.search import stored_entry

_log = logging.getLogger("mgpu_ops")
_calls = itertools.count()
_WAIT = 24 * 3600.0  # seconds for process 0 to tune: a process of the job that dies ends the job sooner


class _Choice(msgspec.Struct):
    op: str
    problem: dict[str, Any]
    config: dict[str, Any] | None  # None: XLA is faster


def autotuned(
    function: Callable[..., Any], args: tuple[Any, ...], *, gpu: str | None, trials: int, budget: float, store: bool
) -> AbstractContextManager[None]:
    """See `mgpu_ops.autotune`."""

    if isinstance(trials, bool) or not isinstance(trials, int | np.integer) or trials < 1:
        raise ValueError(f"trials={trials!r:.80} must be a whole number of at least 1")
    seconds = floats.number(budget)
    if seconds is None or not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"budget={budget!r:.80} must be a finite number of seconds above 0, such as 60.0")
    options = TuneOptions(int(trials), seconds)

    def choose() -> str:
        device = devices.device_for(gpu, say=_log.info, option="gpu=")
        try:
            work = problems.of(capture(function, device.gpu)(*args))
            for op in {w.spec.name for w in work if store and _stored(w.spec, w.problem, device) is None}:
                database.require_writable(database.user_path(device.gpu.key, op), gpu_key=device.gpu.key, op=op)
            chosen = [(w, _entry(w, device, options, store)) for w in work]
        finally:
            device.close()
        found = [
            _Choice(w.spec.name, dataclasses.asdict(w.problem), None if winner.of_entry(e, w.spec) == "xla" else e.config)
            for w, e in chosen
            if e
        ]
        return msgspec.json.encode(found).decode()

    configs: dict[str, list[tuple[Any, Any]]] = {}
    for choice in msgspec.json.decode(job.from_zero(f"autotune/{next(_calls)}", choose, _WAIT), type=list[_Choice]):
        spec = SPECS[choice.op]
        config = "xla" if choice.config is None else database.to_config(spec, choice.config)
        configs.setdefault(choice.op, []).append((database.to_problem(spec, choice.problem), config))
    return use_configs(configs)


def _entry(work: problems.TuningJob, device: Device, options: TuneOptions, store: bool) -> Entry | None:
    """The entry there is for exactly this problem, else a new one; None: no candidate worked."""
    spec, problem = work.spec, work.problem
    there = _stored(spec, problem, device)
    if there is not None:
        return there
    result = tuner.tune(spec, problem, device, options)
    if result.entry is not None and store:
        path = database.user_path(device.gpu.key, spec.name)
        database.update(path, [result.entry], gpu_key=device.gpu.key, op=spec.name)
    if result.ended == "interrupted":
        raise KeyboardInterrupt
    if result.entry is None:
        _log.warning("autotune: no candidate of %s %s worked: %s", spec.name, problem, result.failures)
        return None
    e = result.entry.evidence
    versus = winner.text(result.entry, spec)
    _log.info("autotune: %s %s: %.1f us %s after %d trials%s", spec.name, problem, e.median_us, e.kind, e.trials, versus)
    return result.entry


def _stored(spec: OpSpec, problem: Problem, device: Device) -> Entry | None:
    """A stored entry for exactly this problem that is as good as a new one would be; None if there is none."""
    kinds = dict.fromkeys(("measured", device.kind))
    return next((found for kind in kinds if (found := stored_entry(spec, problem, device.gpu, kind)) is not None), None)
