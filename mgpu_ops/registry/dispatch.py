"""How a public call reaches a backend: `run`."""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import Any, Literal, get_args

from mgpu_ops.core import gpu
from mgpu_ops.registry import capture, resolution
from mgpu_ops.registry.spec import OpSpec

type Backend = Literal["mosaic", "interpret", "xla"]
BACKENDS: tuple[Backend, ...] = get_args(Backend.__value__)
_log = logging.getLogger("mgpu_ops")
_said: set[tuple[str, str]] = set()


def requested_backend(name: str | None) -> Backend | None:
    """The backend a call asks for: its argument, else $MGPU_OPS_BACKEND, else None (choose by GPU and problem)."""
    where = "backend"
    if name is None:
        where, name = "MGPU_OPS_BACKEND", os.environ.get("MGPU_OPS_BACKEND") or None
    if name is not None and name not in BACKENDS:
        raise ValueError(f"{where}={name!r} is not one of {', '.join(BACKENDS)}")
    return name


def run(spec: OpSpec, problem: Any, arrays: tuple, *, config: Any, backend: str | None, reason: str | None = None) -> Any:
    """Runs `problem` on a backend: the kernel with the database's config, compiled or interpreted, or XLA.

    `reason` says why the kernel cannot run, where that is not a matter of problem and GPU. A named backend runs or raises
    ValueError. With None, a problem that the kernel cannot run goes through XLA, and why is logged once per reason.
    While `capture` traces, nothing runs: the call is marked.
    """
    if backend == "xla":
        if capture.capturing():
            return capture.mark(spec, problem, "runs through XLA: backend='xla'", arrays)
        return spec.reference(problem, *arrays)
    device = gpu.current()
    if backend == "interpret":  # four SMs: enough for blocks to meet and tiles to follow each other, few threads to simulate
        hopper = device if device is not None and device.architecture == "hopper" else gpu.find("h200")
        device = dataclasses.replace(hopper, sms=4)
    reason = "no NVIDIA GPU is in use" if device is None else spec.supports(problem, device) or reason
    if backend is not None and (reason is not None or device is None):
        raise ValueError(f"backend={backend!r} cannot run {spec.name} {problem}: {reason}")
    if capture.capturing():
        given = None if config is None else f"runs with the config that the call gives it: {config}"
        return capture.mark(spec, problem, f"runs through XLA: {reason}" if reason else given, arrays)
    if reason is not None or device is None:
        if (spec.name, str(reason)) not in _said:
            _said.add((spec.name, str(reason)))
            _log.warning("%s runs through XLA: %s", spec.name, reason)
        return spec.reference(problem, *arrays)
    chosen = resolution.resolve(spec, problem, device, config).config
    return spec.run(problem, chosen, device, *arrays, interpret=backend == "interpret")
