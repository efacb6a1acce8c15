"""Benchmarks of collectives: ours beside XLA's, between the GPUs of this machine.

`Measurement` defines each kind of time; all are taken in turn, in one run. The `median_us` of a collective is a call in a
chain: the difference between programs of 48 and of 16 calls, which JAX queues, so that the time to dispatch a program is not in
it. Of each program's times the lower quartile counts, as the host's other work only ever adds. Payloads stay in the L2 where
they fit: nothing is flushed.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

import mgpu_ops
from mgpu_ops import CollectiveProblem
from mgpu_ops.collectives.problem import payload_bytes
from mgpu_ops.collectives.workspace import Workspace, config_for
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.registry import resolution
from mgpu_ops.registry.spec import OpSpec, baseline_of
from mgpu_ops.tuning import measure
from mgpu_ops.tuning.bench.results import OURS, Measurement, Stamp, Texts, six_digits
from mgpu_ops.tuning.bench.runner import BenchOptions, config_text, stamp_of
from mgpu_ops.tuning.bench.settings import CompiledCall, Function, compiled
from mgpu_ops.tuning.labels import label
from mgpu_ops.tuning.sharing import first_devices, shared_out
from mgpu_ops.tuning.terminal import brief
from mgpu_ops.tuning.timing import Timing, timing_of

IN_WORKSPACE, XLA = f"{OURS}, workspace", "xla"
_LONGER = 3  # times as many calls in a program: the difference is free of what it takes to dispatch and to start one
_AROUND = re.compile(r"barrier|memset|memcpy|fill|broadcast", re.IGNORECASE)  # kernels that prepare a collective


def run(
    spec: OpSpec,
    problems: Mapping[str, CollectiveProblem],
    options: BenchOptions,
    *,
    progress: Callable[[str], None],
    save: Callable[[list[Measurement]], None] | None = None,
) -> list[Measurement]:
    """Measures each problem: ours through the public function, also in a workspace where it has a config, and XLA's.

    `progress` gets a line for each problem, `save` all measurements so far. A problem that fails is told and left out. Of the
    options, those of gradients and competitors are not used.
    """
    measured: list[Measurement] = []
    stamp = stamp_of(spec.name, options.gpu)
    for name, problem in problems.items():
        text = label(spec, name, problem)
        try:
            new = _measured(spec, problem, text, options, stamp)
        except Exception as error:
            progress(f"{text}: failed: {brief(error)}")
            continue
        measured += new
        times = (f"{row.impl} {row.median_us:.4g} us a call, {row.own_us:.4g} us of its own" for row in new)
        progress(f"{text}: {', '.join(times)}")
        if save:
            save(measured)
    return measured


def _measured(spec: OpSpec, problem: CollectiveProblem, text: str, options: BenchOptions, stamp: Stamp) -> list[Measurement]:
    devices = spec.devices(problem)
    if devices > len(jax.local_devices()):
        raise ValueError(f"it takes {devices} GPUs, and {len(jax.local_devices())} are here")
    inputs = jax.jit(functools.partial(spec.inputs, problem))(jax.random.key(options.seed))
    arrays = shared_out(inputs, devices, first_devices(devices))
    expected = jax.jit(functools.partial(spec.reference, problem))(*arrays)
    functions = _functions(spec, problem, options)
    timing = timing_of(spec.name)
    longer = dataclasses.replace(timing, calls=_LONGER * timing.calls)
    workspaces = {IN_WORKSPACE: _workspace(devices)} if IN_WORKSPACE in functions else {}
    programs = {impl: _chain(timing, f, arrays, workspaces.get(impl)) for impl, f in functions.items()}
    longer_programs = {impl: _chain(longer, f, arrays, workspaces.get(impl)) for impl, f in functions.items()}
    errors = {impl: measure.error(timing.result(call()), expected) for impl, call in programs.items()}
    samples = _sampled(programs, longer_programs, devices, options.seconds)
    found = []
    for impl in functions:
        backend = options.backend or ("mosaic" if _kernel_runs(spec, problem, options.gpu) else None)
        config = config_text(spec, problem, options.gpu, backend) if impl == OURS else ""
        texts: Texts = {**stamp, "problem": text, "impl": impl, "config": config}
        found.append(measurement(spec, problem, texts, samples[impl].times(timing.calls), errors[impl]))
    return found


def _functions(spec: OpSpec, problem: CollectiveProblem, options: BenchOptions) -> dict[str, Function]:
    """What is measured, by name: functions of the arrays, of which that in a workspace takes an open one first."""
    devices = spec.devices(problem)
    functions: dict[str, Function] = {OURS: public(spec, problem, options.gpu, options.backend)}
    kind: Any = spec.name
    if options.backend != "xla" and problem.transport == "peer" and config_for(kind, problem, _workspace(devices)):
        functions[IN_WORKSPACE] = in_workspace(spec, problem, first_devices(devices))
    return functions | {XLA: functools.partial(baseline_of(spec, problem).run, problem)}


def _chain(timing: Timing, function: Function, arrays: tuple, workspace: Workspace | None) -> CompiledCall:
    """The program that is timed: calls in a row, each of which waits for the one before. It opens the workspace first."""
    if workspace is None:
        return compiled(timing.program(function), arrays)
    opening = lambda x, memory: timing.program(functools.partial(function, memory.open()))(x)  # noqa: E731
    return compiled(opening, (*arrays, workspace))


# --- Times ----------------------------------------------------------------------------------------


@dataclass
class _Samples:
    """Times of one implementation in microseconds: of its kernels, and by the wall clock of programs of calls."""

    own: list[float] = field(default_factory=list)  # kernels that move data, in one program
    around: list[float] = field(default_factory=list)  # kernels that prepare a call, in one program
    alone: list[float] = field(default_factory=list)  # one program
    short: list[float] = field(default_factory=list)  # a program of several that are queued
    long: list[float] = field(default_factory=list)  # a program of `_LONGER` times as many calls, likewise

    def times(self, calls: int) -> dict[str, float]:
        """By column; `calls` calls are in one program."""
        more = measure.QUEUED * (_LONGER - 1) * calls  # calls in a long sample than in a short one
        return {
            "median_us": (_undisturbed(self.long) - _undisturbed(self.short)) / more,
            "spread_us": measure.spread_us([(b - a) / more for a, b in zip(self.short, self.long, strict=True)]),
            "own_us": measure.median_us(self.own) / calls,
            "around_us": measure.median_us(self.around) / calls,
            "chain_us": _undisturbed(self.alone),
        }


def _sampled(
    programs: Mapping[str, CompiledCall], longer: Mapping[str, CompiledCall], devices: int, seconds: float
) -> dict[str, _Samples]:
    """Rounds of all implementations in turn: for a third of `seconds` with CUPTI, then by the wall clock."""
    samples = {impl: _Samples() for impl in programs}
    once_us = sum(measure.wall(program, 1) for program in programs.values() for _ in range(2)) / 2
    for _ in range(measure.rounds_for(seconds / 3, once_us, low=5, high=20)):
        for impl, program in programs.items():
            kernels = measure.kernels(program)
            samples[impl].own.append(measure.last(((n, us) for n, us in kernels if not _AROUND.search(n)), devices))
            samples[impl].around.append(measure.last(((n, us) for n, us in kernels if _AROUND.search(n)), devices))
    round_us = (1 + measure.QUEUED * (1 + _LONGER)) * once_us
    for _ in range(measure.rounds_for(seconds, round_us, low=7, high=100)):
        for impl, program in programs.items():
            samples[impl].alone.append(measure.wall(program, 1))
            samples[impl].short.append(measure.wall(program, measure.QUEUED))
            samples[impl].long.append(measure.wall(longer[impl], measure.QUEUED))
    return samples


def _undisturbed(walls: Sequence[float]) -> float:
    """The lower quartile: the host's other work only ever adds."""
    return sorted(walls)[len(walls) // 4]


def measurement(
    spec: OpSpec, problem: CollectiveProblem, texts: Texts, times: Mapping[str, float], error: float
) -> Measurement:
    """The measurement that has these times, by column; the rates are computed from `median_us`."""
    us, size = times["median_us"], payload_bytes(problem)
    if not us > 0:
        noise = f"a call of {texts['impl']} takes less than the host's noise ({us:.3g} us): measure it again"
        raise measure.MeasurementError(noise)
    numbers = {
        **times,
        "tflops": spec.flops(problem) / us / 1e6,
        "gbs": spec.bytes(problem) / us / 1e3,
        "error": error,
        "bus_gbs": bus_bytes(spec.name, size, problem.devices) / us / 1e3,
    }
    rounded: dict[str, Any] = {name: six_digits(value) for name, value in numbers.items()}
    return Measurement(devices=problem.devices, bytes=size, **rounded, **texts)


def bus_bytes(op: str, size: int, devices: int) -> float:
    """Bytes that must cross a device's link in one direction, without a switch that adds."""
    return (2 if op == "all_reduce" else 1) * (devices - 1) / devices * size


# --- Functions ------------------------------------------------------------------------------------


@functools.cache
def _workspace(devices: int) -> Workspace:
    """One for all problems, as its memory is never freed."""
    return mgpu_ops.collective_workspace(first_devices(devices), "device")


def public(spec: OpSpec, problem: CollectiveProblem, gpu: Gpu, backend: str | None = None) -> Callable[[jax.Array], jax.Array]:
    """The public function on x of all devices, [devices, elements].

    It names the problem's transport, which makes a kernel run, unless XLA is known to be faster.
    """
    transport = problem.transport if _kernel_runs(spec, problem, gpu) else None
    return _on_mesh(_on_each_device(spec, problem, transport=transport, backend=backend), first_devices(problem.devices))


def _kernel_runs(spec: OpSpec, problem: CollectiveProblem, gpu: Gpu) -> bool:
    """Whether the kernel is measured: also where nothing is tuned, though a call that names no transport runs XLA there."""
    found = resolution.resolve(spec, problem, gpu)
    return found.runs == "kernel" or (found.source == "default" and found.times is None)


def in_workspace(spec: OpSpec, problem: CollectiveProblem, mesh: Mesh) -> Callable[[Any, jax.Array], jax.Array]:
    """The same in a workspace: a function of an open workspace and x."""
    return _on_mesh(lambda memory, x: _on_each_device(spec, problem, workspace=memory)(x), mesh)


def _on_each_device(spec: OpSpec, problem: CollectiveProblem, **how: Any) -> Callable[[jax.Array], jax.Array]:
    if spec.name != "all_gather":
        how["op"] = problem.reduction
    function: Any = getattr(mgpu_ops, spec.name)
    return lambda x: function(x[0], "device", **how)[None]


def _on_mesh(function: Function, mesh: Mesh) -> Function:
    own = PartitionSpec("device")
    return jax.shard_map(function, mesh=mesh, in_specs=own, out_specs=own, check_vma=False)
