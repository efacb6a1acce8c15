"""Benchmarks of collectives: ours beside XLA's, between the GPUs of this machine, as rows of `bench`.

`bench.Row` says what each kind of time is; all are taken in turn, in one run. The `median_us` of a collective is a call in a
chain: the difference between programs of 48 and of 16 calls, queued as JAX does by itself, so that dispatching a program is not
in it; of each the lower quartile, as the host's other work only ever adds. Payloads are in the L2 where they fit: nothing is
flushed.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

import mgpu_ops
from mgpu_ops.collectives.problem import payload_bytes
from mgpu_ops.collectives.workspace import config_for
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.registry import resolution
from mgpu_ops.registry.spec import OpSpec
from mgpu_ops.tuning import measure
from mgpu_ops.tuning.bench.implementations import brief, compiled
from mgpu_ops.tuning.bench.runner import OURS, Row, six_digits, stamp_of
from mgpu_ops.tuning.labels import label
from mgpu_ops.tuning.sharing import first_devices, shared_out

IN_WORKSPACE, XLA = f"{OURS}, workspace", "xla"
_LONGER = 3  # times as many calls in a program: the difference is free of what it takes to dispatch and to start one
_AROUND = re.compile(r"barrier|memset|memcpy|fill|broadcast", re.IGNORECASE)  # kernels that prepare a collective


def run(
    spec: OpSpec,
    problems: Mapping[str, Any],
    *,
    gpu: Gpu,
    seconds: float,
    progress: Callable[[str], None],
    save: Callable[[list[Row]], None] | None = None,
    backend: str | None = None,
    seed: int = 0,
) -> list[Row]:
    """Measures each problem, ours through the public function; `progress` gets a line for each, `save` all rows so far.

    A problem that fails is said and left out. `seconds` is the time for the rounds of one problem.
    """
    rows: list[Row] = []
    stamp = stamp_of(spec.name, gpu)
    for name, problem in problems.items():
        text = label(spec, name, problem)
        try:
            new = _measured(spec, problem, gpu, seconds, backend, seed, {**stamp, "problem": text})
        except Exception as error:
            progress(f"{text}: failed: {brief(error)}")
            continue
        rows += new
        times = (f"{row.impl} {row.median_us:.4g} us a call, {row.own_us:.4g} us of its own" for row in new)
        progress(f"{text}: {', '.join(times)}")
        if save:
            save(rows)
    return rows


def _measured(
    spec: OpSpec, problem: Any, gpu: Gpu, seconds: float, backend: str | None, seed: int, stamp: Mapping[str, Any]
) -> list[Row]:
    devices = spec.devices(problem)
    if devices > len(jax.local_devices()):
        raise ValueError(f"it takes {devices} GPUs, and {len(jax.local_devices())} are here")
    inputs = jax.jit(functools.partial(spec.inputs, problem))(jax.random.key(seed))
    arrays = shared_out(inputs, devices, first_devices(devices))
    expected = jax.jit(functools.partial(spec.reference, problem))(*arrays)
    assert spec.baseline is not None
    baseline = spec.baseline(problem)
    assert baseline is not None
    functions: dict[str, Callable[..., Any]] = {OURS: public(spec, problem, gpu, backend)}
    kind: Any = spec.name
    if backend != "xla" and problem.transport == "peer" and config_for(kind, problem, _workspace(devices)):
        functions[IN_WORKSPACE] = in_workspace(spec, problem, first_devices(devices))
    functions[XLA] = functools.partial(baseline.run, problem)
    longer = dataclasses.replace(spec, turns=_LONGER * spec.turns)

    def chain(spec: OpSpec, impl: str) -> Callable[[], Any]:
        if impl != IN_WORKSPACE:
            return compiled(spec.timed(functions[impl]), arrays)
        opening = lambda x, memory: spec.timed(functools.partial(functions[impl], memory.open()))(x)  # noqa: E731
        return compiled(opening, (*arrays, _workspace(devices)))

    calls = {impl: chain(spec, impl) for impl in functions}
    longs = {impl: chain(longer, impl) for impl in functions}
    errors = {impl: measure.error(spec.result(call()), expected) for impl, call in calls.items()}
    once = sum(measure.wall(call, 1) for call in calls.values() for _ in range(2)) / 2
    own, around, short, long, alone = (collections.defaultdict[str, list[float]](list) for _ in range(5))
    for _ in range(measure.rounds_for(seconds / 3, once, low=5, high=20)):
        for impl, call in calls.items():
            kernels = measure.kernels(call)
            own[impl].append(measure.last(((n, us) for n, us in kernels if not _AROUND.search(n)), devices) / spec.turns)
            around[impl].append(measure.last(((n, us) for n, us in kernels if _AROUND.search(n)), devices) / spec.turns)
    for _ in range(measure.rounds_for(seconds, (1 + measure.QUEUED * (1 + _LONGER)) * once, low=7, high=100)):
        for impl, call in calls.items():
            for walls, program, queued in (
                (alone, call, 1),
                (short, call, measure.QUEUED),
                (long, longs[impl], measure.QUEUED),
            ):
                walls[impl].append(measure.wall(program, queued))
    many = measure.QUEUED * (_LONGER - 1) * spec.turns  # calls more
    rows = []
    for impl in functions:
        times = {
            "median_us": (_undisturbed(long[impl]) - _undisturbed(short[impl])) / many,
            "spread_us": measure.spread_us([(b - a) / many for a, b in zip(short[impl], long[impl], strict=True)]),
            "own_us": measure.median_us(own[impl]),
            "around_us": measure.median_us(around[impl]),
            "chain_us": _undisturbed(alone[impl]),
        }
        config = _config(spec, problem, gpu) if impl == OURS else ""
        rows.append(row_of(spec, problem, stamp, impl, config, times, errors[impl]))
    return rows


@functools.cache
def _workspace(devices: int) -> Any:
    """One for all problems: its memory is not given back."""
    return mgpu_ops.collective_workspace(first_devices(devices), "device")


def _undisturbed(walls: Sequence[float]) -> float:
    """The lower quartile: the host's other work only ever adds."""
    return sorted(walls)[len(walls) // 4]


def public(spec: OpSpec, problem: Any, gpu: Gpu, backend: str | None = None) -> Callable[[jax.Array], jax.Array]:
    """The public function on x of all devices, [devices, elements]: by the problem's transport, unless XLA is tuned for it."""
    transport = problem.transport if resolution.resolve(spec, problem, gpu).config.algorithm != "xla" else None
    return _shared(_one(spec, problem, transport=transport, backend=backend), first_devices(problem.devices))


def in_workspace(spec: OpSpec, problem: Any, mesh: Any) -> Callable[[Any, jax.Array], jax.Array]:
    """The same of an open workspace and x."""
    return _shared(lambda memory, x: _one(spec, problem, workspace=memory)(x), mesh)


def _one(spec: OpSpec, problem: Any, **how: Any) -> Callable[[jax.Array], jax.Array]:
    if spec.name != "all_gather":
        how["op"] = problem.reduction
    function: Any = getattr(mgpu_ops, spec.name)
    return lambda x: function(x[0], "device", **how)[None]


def _shared(function: Callable[..., Any], mesh: Any) -> Callable[..., Any]:
    own = PartitionSpec("device")
    return jax.shard_map(function, mesh=mesh, in_specs=own, out_specs=own, check_vma=False)


def bus_bytes(op: str, size: int, devices: int) -> float:
    """Bytes that must cross a device's link in one direction, without a switch that adds."""
    return (2 if op == "all_reduce" else 1) * (devices - 1) / devices * size


def _config(spec: OpSpec, problem: Any, gpu: Gpu) -> str:
    found = resolution.resolve(spec, problem, gpu)
    fields = dataclasses.asdict(found.config).items()
    return f"{' '.join(f'{key}={value}' for key, value in fields)}; source={found.source}"


def row_of(
    spec: OpSpec, p: Any, stamp: Mapping[str, Any], impl: str, config: str, times: Mapping[str, float], error: float
) -> Row:
    """A row of times by their column's name: the rates are of `median_us`."""
    us, size = times["median_us"], payload_bytes(p)
    if not us > 0:
        raise measure.MeasurementError(f"a call of {impl} takes less than the host's noise ({us:.3g} us): measure it again")
    numbers = {
        **times,
        "tflops": spec.flops(p) / us / 1e6,
        "gbs": spec.bytes(p) / us / 1e3,
        "error": error,
        "bus_gbs": bus_bytes(spec.name, size, p.devices) / us / 1e3,
    }
    rounded: dict[str, Any] = {name: six_digits(value) for name, value in numbers.items()}
    return Row(impl=impl, config=config, devices=p.devices, bytes=size, **rounded, **stamp)
