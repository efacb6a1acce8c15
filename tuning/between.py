"""Benchmarks of collectives: ours beside XLA's, between the GPUs of this machine, as a CSV file and a picture.

Times say different things. `own_us` and `around_us`, from CUPTI, are the kernel that moves the data and those before it, XLA's
barrier of all GPUs and the fill of zeros; both on the GPU that comes last, whose kernels wait for no other's start. `call_us`,
by the clock on the wall, is what one more call adds to a chain in one jit, where each waits for the one before, with programs
queued as JAX does by itself: the host's part is in it where the host is slower than the GPUs, that of dispatching a program is
not. `chain_us` is a program of 16 calls alone, from its dispatch to its end. All are taken in turn, in one run.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import functools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import PartitionSpec

import mgpu_ops
from mgpu_ops.collectives.problem import size_text
from mgpu_ops.collectives.workspace import config_for
from mgpu_ops.core import gpu as gpus
from mgpu_ops.core import resolution
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.op import OpSpec
from mgpu_ops.tuning import measure
from mgpu_ops.tuning.bench import write_table
from mgpu_ops.tuning.peers import brief, compiled
from mgpu_ops.tuning.report import save_figure
from mgpu_ops.tuning.sharing import first_devices, shared_out

OURS, IN_WORKSPACE, XLA = "mgpu_ops", "mgpu_ops, workspace", "xla"
_LONGER = 3  # times as many calls in a program: the difference is free of what it takes to dispatch and to start one
_AROUND = re.compile(r"barrier|memset|memcpy|fill|broadcast", re.IGNORECASE)  # kernels that prepare a collective


@dataclasses.dataclass(frozen=True)
class Row:
    """One implementation of one problem; the fields are the CSV file's columns, in this order."""

    op: str
    devices: int
    bytes: int  # of the payload, on each device
    dtype: str
    reduction: str
    transport: str
    impl: str  # "mgpu_ops", "mgpu_ops, workspace" or "xla"
    config: str
    own_us: float  # of the kernels that move data, on the device that comes last
    around_us: float  # of those before them, likewise
    call_us: float  # that a call adds to a chain, programs queued
    chain_us: float  # of one program of 16 calls
    bus_gbs: float  # 10^9 bytes/s, as nccl-tests counts: bytes that must cross a device's link, by call_us
    error: float
    gpu: str
    driver: str
    jax: str
    date: str


COLUMNS = tuple(field.name for field in dataclasses.fields(Row))


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
    for name, problem in problems.items():
        try:
            new = _measured(spec, problem, gpu, seconds, backend, seed)
        except Exception as error:
            progress(f"{name}: failed: {brief(error)}")
            continue
        rows += new
        progress(
            f"{name}: " + ", ".join(f"{row.impl} {row.own_us:.4g} us of its own, {row.call_us:.4g} us a call" for row in new)
        )
        if save:
            save(rows)
    return rows


def _measured(spec: OpSpec, problem: Any, gpu: Gpu, seconds: float, backend: str | None, seed: int) -> list[Row]:
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
    rows = []
    for impl in functions:
        added = (_undisturbed(long[impl]) - _undisturbed(short[impl])) / (measure.QUEUED * (_LONGER - 1) * spec.turns)
        times = (measure.median_us(own[impl]), measure.median_us(around[impl]), added, _undisturbed(alone[impl]))
        rows.append(_row(spec, problem, gpu, impl, times, errors[impl]))
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


def _row(spec: OpSpec, p: Any, gpu: Gpu, impl: str, times: Sequence[float], error: float) -> Row:
    own, around, call, chain = times
    size = p.size * jax.numpy.dtype(p.dtype).itemsize
    config = ""
    if impl == OURS:
        found = resolution.resolve(spec, p, gpu)
        config = (
            " ".join(f"{key}={value}" for key, value in dataclasses.asdict(found.config).items()) + f"; source={found.source}"
        )
    return Row(
        op=spec.name,
        devices=p.devices,
        bytes=size,
        dtype=p.dtype,
        reduction=p.reduction,
        transport=p.transport,
        impl=impl,
        config=config,
        own_us=_digits(own),
        around_us=_digits(around),
        call_us=_digits(call),
        chain_us=_digits(chain),
        bus_gbs=_digits(bus_bytes(spec.name, size, p.devices) / call / 1e3),
        error=_digits(error),
        gpu=gpu.name,
        driver=gpus.driver_version() or "",
        jax=jax.__version__,
        date=datetime.date.today().isoformat(),
    )


def _digits(x: float) -> float:
    return float(f"{x:.6g}")


def write_csv(rows: Iterable[Row], path: str | os.PathLike[str]) -> None:
    write_table(COLUMNS, map(dataclasses.astuple, rows), path)


def faults(rows: Sequence[Row], spec: OpSpec, problems: Mapping[str, Any]) -> list[str]:
    """Problems for which ours has no row or a wrong result: what an exit status should tell."""
    found = []
    for name, p in problems.items():
        key = (p.devices, p.size * jax.numpy.dtype(p.dtype).itemsize, p.dtype, p.reduction, p.transport)
        ours = [r for r in rows if r.impl != XLA and (r.devices, r.bytes, r.dtype, r.reduction, r.transport) == key]
        if not ours:
            found.append(f"{name}: no result")
        found += [
            f"{name}: {r.impl}: error {r.error:.2g} is above {spec.tolerance(p):.2g}"
            for r in ours
            if not r.error <= spec.tolerance(p)
        ]
    return found


def _pairs(rows: Iterable[Row]) -> list[tuple[Row, Row]]:
    """Each of ours and XLA's of the same problem, by devices and size."""
    groups: dict[Any, dict[str, Row]] = {}
    for row in rows:
        key = (row.op, row.devices, row.bytes, row.dtype, row.reduction, row.transport)
        groups.setdefault(key, {})[row.impl] = row
    pairs = [(row, group[XLA]) for group in groups.values() for row in group.values() if XLA in group and row.impl != XLA]
    return sorted(pairs, key=lambda pair: (pair[0].op, pair[0].devices, pair[0].bytes, pair[0].impl))


def table(rows: Iterable[Row]) -> Any:
    """A line for each problem and way: times, and ours over XLA's, below 1 where ours is faster."""
    from rich.table import Table

    shown = Table(title="times in us; ratios are ours over XLA's; * in a workspace")
    for column in (
        "GPUs",
        "payload",
        "own",
        "XLA's own",
        "ratio",
        "call",
        "XLA's call",
        "ratio",
        "chain",
        "ratio",
        "GB/s (bus)",
    ):
        shown.add_column(column, justify="right")
    for ours, xla in _pairs(rows):
        shown.add_row(
            str(ours.devices), size_text(ours.bytes, " ") + ("*" if ours.impl == IN_WORKSPACE else " "),
            f"{ours.own_us:.4g}", f"{xla.own_us:.4g}", f"{ours.own_us / xla.own_us:.2f}",
            f"{ours.call_us:.4g}", f"{xla.call_us:.4g}", f"{ours.call_us / xla.call_us:.2f}",
            f"{ours.chain_us:.4g}", f"{ours.chain_us / xla.chain_us:.2f}", f"{ours.bus_gbs:.4g}",
        )  # fmt: skip
    return shown


def picture(rows: Sequence[Row], path: str | os.PathLike[str]) -> list[Path]:
    """Draws time and bus bandwidth against size, a line for each implementation and number of GPUs, as PNG and SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if not rows:
        raise ValueError("there are no rows to draw: run the benchmark first")
    figure, (times, rates) = pyplot.subplots(1, 2, figsize=(12, 4.6), layout="constrained")
    try:
        for number, devices in enumerate(sorted({row.devices for row in rows})):
            for impl, colour in ((OURS, "#0b6e99"), (IN_WORKSPACE, "#4a8f3c"), (XLA, "#b36a00")):
                some = sorted((r for r in rows if (r.devices, r.impl) == (devices, impl)), key=lambda row: row.bytes)
                style = {"color": colour, "marker": "os^D"[number % 4], "ms": 4, "alpha": 1 - 0.25 * number}
                sizes = [row.bytes for row in some]
                times.plot(sizes, [row.call_us for row in some], label=f"{impl}, {devices} GPUs, a call in a chain", **style)
                times.plot(
                    sizes, [row.own_us for row in some], ls=":", label=f"{impl}, {devices} GPUs, its kernel alone", **style
                )
                rates.plot(sizes, [row.bus_gbs for row in some], label=f"{impl}, {devices} GPUs", **style)
        for ax, name in ((times, "us"), (rates, "GB/s, bus bandwidth")):
            ax.set_xscale("log", base=2)
            ticks = sorted({row.bytes for row in rows})
            ax.set_xticks(
                ticks[:: max(1, len(ticks) // 10)], [size_text(t, " ") for t in ticks[:: max(1, len(ticks) // 10)]], rotation=25
            )
            ax.minorticks_off()
            ax.set_ylabel(name)
            ax.grid(color="#dddddd")
            ax.set_axisbelow(True)
            ax.spines[["top", "right"]].set_visible(False)
            ax.legend(frameon=False, fontsize=8)
        times.set_yscale("log")
        row = rows[0]
        figure.suptitle(
            f"{row.op} on {row.gpu} | driver {row.driver or 'unknown'} | jax {row.jax} | {row.date}", x=0.01, ha="left"
        )
        return save_figure(figure, path)
    finally:
        pyplot.close(figure)
