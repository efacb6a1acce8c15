"""How a public call reaches a backend: `run`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Callable
from typing import Any, Literal, get_args

from mgpu_ops.core import gpu, latency, mesh
from mgpu_ops.registry import capture, resolution
from mgpu_ops.registry.spec import Config, OpSpec, Problem, baseline_of

type Backend = Literal["mosaic", "interpret", "xla"]
BACKENDS: tuple[Backend, ...] = get_args(Backend.__value__)
_log = logging.getLogger("mgpu_ops")
_said: set[tuple[str, str]] = set()


def requested_backend(name: str | None) -> Backend | None:
    """The backend a call asks for: its argument, else $MGPU_OPS_BACKEND, else None (choose by GPU and problem)."""
    where = "backend"
    if name is None:
        where, name = "MGPU_OPS_BACKEND", os.environ.get("MGPU_OPS_BACKEND") or None
    if name is not None and not (isinstance(name, str) and name in BACKENDS):
        raise ValueError(f"{where}={name!r:.80} is not one of {', '.join(BACKENDS)}")
    return name


@dataclasses.dataclass(frozen=True)
class Choice:
    """Where a call runs: on which backend, and through the kernel for which GPU.

    device: None through XLA. reason: why the call runs through XLA, None for the kernel.
    """

    backend: Backend
    device: gpu.Gpu | None
    reason: str | None

    def skipped(self, config: Config | None) -> str | None:
        """Why tuning cannot change this call, which was given `config` (None: it takes the database's), or None."""
        if self.reason is not None:
            return f"runs through XLA: {self.reason}"
        return None if config is None else f"runs with the config that the call gives it: {config}"


def choose(spec: OpSpec, problem: Problem, backend: str | None, reason: str | None = None) -> Choice:
    """The backend of a call. `reason` says why the kernel cannot run, where that is not a matter of problem and GPU.

    A named backend is taken, or raises ValueError. With None, a problem that the kernel cannot run goes through XLA, and why is
    logged once per reason.
    """
    return choose_for(spec.name, problem, lambda device: spec.supports(problem, device) or reason, backend)


def choose_for(name: str, what: Any, supports: Callable[[gpu.Gpu], str | None], backend: str | None) -> Choice:
    """`choose` for what is not an op of the database too: the function `name`, called with `what`.

    supports: why its kernel cannot run on a GPU, or None.
    """
    if backend == "xla":
        return Choice("xla", None, "backend='xla'")
    device = gpu.current()
    if backend == "interpret":  # four SMs: enough for blocks to meet and tiles to follow each other, few threads to simulate
        hopper = device if device is not None and device.architecture == "hopper" else gpu.find("h200")
        device = dataclasses.replace(hopper, sms=4)
    if device is not None and mesh.is_for_several_devices():
        device = dataclasses.replace(device, shares_sms=True)
    reason = "no NVIDIA GPU is in use" if device is None else supports(device)
    if reason is None:
        return Choice("interpret" if backend == "interpret" else "mosaic", device, None)
    if backend is not None:
        raise ValueError(f"backend={backend!r} cannot run {name} {what}: {reason}")
    if not capture.capturing() and (name, reason) not in _said:
        _said.add((name, reason))
        _log.warning("%s runs through XLA: %s", name, reason)
    return Choice("xla", None, reason)


def run(
    spec: OpSpec,
    problem: Problem,
    arrays: tuple,
    *,
    config: Config | None,
    backend: str | None,
    instead: Callable[..., Any] | str | None = None,
) -> Any:
    """Runs `problem` on the backend that `choose` gives: the kernel with the database's config, or XLA.

    Without a named backend, the op's baseline runs where `resolution.resolve` says that XLA is the faster. `instead` is then
    this call's own way to run it on `arrays`, or why it cannot; None: by `Baseline.run`, if that takes the op's arrays.
    While `capture` traces, nothing runs: the call is marked.
    """
    choice = choose(spec, problem, backend)
    if capture.capturing():
        return capture.mark(spec, problem, choice.skipped(config), arrays)
    if choice.device is None:
        return spec.reference(problem, *arrays)
    found = resolution.resolve(spec, problem, choice.device, config)
    if backend is None and found.runs == "xla":
        baseline = baseline_of(spec, problem)
        if instead is None and baseline.arrays is None:
            instead = functools.partial(baseline.run, problem)
        if callable(instead):
            return instead(*arrays)
    with told(spec, problem, found.config, choice.device):
        return spec.run(problem, found.config, choice.device, *arrays, interpret=choice.backend == "interpret")


def told(spec: OpSpec, problem: Problem, config: Config, device: gpu.Gpu) -> contextlib.AbstractContextManager[None]:
    """Where an op's kernels are launched: XLA's scheduler then knows their time, in programs with collectives to hide."""
    return latency.of_call(spec.cost(problem, config, device) if device.shares_sms else 0.0)


def kernel_of(
    spec: OpSpec, problem: Problem, *, config: Config | None, backend: str | None
) -> tuple[Config, gpu.Gpu, bool] | None:
    """The config of the kernel that `run` would run, its GPU, and whether it is interpreted. None: it would run no kernel."""
    if capture.capturing():
        return None
    choice = choose(spec, problem, backend)
    if choice.device is None:
        return None
    found = resolution.resolve(spec, problem, choice.device, config)
    runs_kernel = backend is not None or found.runs == "kernel"
    return (found.config, choice.device, choice.backend == "interpret") if runs_kernel else None
