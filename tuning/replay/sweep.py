"""Exhaustive sweeps: every legal config of a declared grid, measured on a GPU, raw samples kept, for `replay` to search again.

The grid of a problem is `GRIDS` of its op. While more than `limit` configs of it are legal, the parameters of `FIXED` are held
at the op's default, one after the other. `extras` adds the configs that a search or the database could name beside the grid,
so that a replay misses none. The order of measuring is random, so that a GPU that warms up slows no region of the grid.

A sweep is a gzipped JSON file, and beside it lies the same in the T4 format of the auto-tuning community (Kernel Tuner,
autotuning_methodology). It is saved as it goes; a sweep that was stopped goes on from there.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import gzip
import itertools
import json
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from mgpu_ops.core import gpu as gpus
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.registry import database
from mgpu_ops.registry.spec import Config, OpSpec, Problem
from mgpu_ops.tuning import measure
from mgpu_ops.tuning.device import Device
from mgpu_ops.tuning.outcome import Kind, Outcome

SCHEMA = 1
LIMIT = 250  # configs of a problem's grid
ANALYTIC = 6  # of an op's candidates are among the extras
_SAVE_SECONDS = 20.0  # between two saves of a sweep under way

# The problems of the suite "replay", by op: names of `OpSpec.shapes`. Small and large, square and flat, of three layouts and
# three kinds of mask, bound by arithmetic and by memory. rms_norm, rotary and embedding have 16 configs at most: nothing to
# search.
REPLAY: dict[str, tuple[str, ...]] = {
    "matmul": (
        "square-2048",
        "square-8192",
        "llama3-8b-qkv-128",
        "llama3-8b-out-256",
        "llama3-8b-gate_up-4096",
        "llama3-70b-down-128",
        "llama3-8b-qkv-4096-da",
        "llama3-8b-gate_up-128-db",
        "llama3-8b-down-4096-db",
        "square-4096",
        "llama3-8b-out-128",
        "llama3-8b-gate_up-256",
    ),
    "gated_matmul": ("llama3-8b-128", "llama3-8b-4096-gradient"),
    "quantized_matmul": ("llama3-8b-down-16-w8", "llama3-8b-gate_up-16-w4"),
    "quantize": ("llama3-8b-x", "llama3-8b-hidden"),
    "grouped_matmul": (
        "mixtral-8x7b-gate_up-2048-even",
        "mixtral-8x7b-down-128-random",
        "deepseek-v3-ep8-down-4096-random",
        "qwen3-30b-gate_up-64-random",
        "qwen3-235b-gate_up-8192-skewed",
        "qwen3-30b-gate_up-16384-random",
    ),
    "quantized_grouped_matmul": ("qwen3-30b-down-64-random-w8", "deepseek-v3-ep8-down-64-random-w4"),
    "gated_grouped_matmul": ("qwen3-30b-64-random", "mixtral-8x7b-2048-even-gradient"),
    "ragged_contraction": (
        "mixtral-8x7b-gate_up-2048-even-drhs",
        "deepseek-v3-ep8-down-4096-random-drhs",
        "qwen3-30b-gate_up-16384-random-drhs",
    ),
    "flash_attention": (
        "gpt2-1024-causal",
        "mha64-4096",
        "llama3-8b-2048-causal",
        "llama3-8b-8192-causal",
        "mistral-7b-16384-window",
        "llama3-8b-512-causal",
        "mha128-4096",
    ),
    "flash_attention_backward": ("gpt2-1024-causal", "mha64-4096-causal"),
    "cross_entropy": ("llama3-8b-512", "llama3-8b-4096-gradient"),
}

# Parameters left out have all choices of the op's space.
_GROUPED = {
    "tile_m": (64, 128, 256),
    "tile_n": (64, 128, 256),
    "max_concurrent_steps": (2, 3, 4, 6),
    "raster_width": (4, 16),
    "epilogue_slots": (1, 2),
    "memory_registers": (40,),
}
GRIDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "matmul": {
        "tile_m": (64, 128, 256),
        "tile_n": (64, 128, 192, 256),
        "tile_k": (64,),
        "max_concurrent_steps": (4, 6),
        "compute_warpgroups": (2,),
        "wg_dimension": ("m",),
        "cluster": ("none", "m", "k"),
        "raster_dimension": ("m",),
        "raster_width": (8,),
        "epilogue_tile_n": (32, 64),
        "split_k": (1, 2),
        "memory_registers": (40,),
    },
    "gated_matmul": {"tile_k": (64,), "raster_dimension": ("m",), "raster_width": (2, 8), "memory_registers": (40,)},
    "quantized_matmul": {"memory_registers": (40,)},
    "quantize": {},
    "quantized_grouped_matmul": {"memory_registers": (40,)},
    "grouped_matmul": _GROUPED | {"max_concurrent_steps": (2, 4, 6), "epilogue_tile_n": (64,)},
    "gated_grouped_matmul": _GROUPED | {"epilogue_tile_n": (64, 128)},
    "ragged_contraction": _GROUPED | {"epilogue_tile_n": (64, 128, 256)},
    "flash_attention": {
        "compute_warpgroups": (2, 3),
        "max_concurrent_steps": (2, 3),
        "q_slots": (1, 2),
        "section_waves": (1, 4, 1024),
        "memory_registers": (24, 32, 40),
    },
    "flash_attention_backward": {},
    "cross_entropy": {},
    "rms_norm": {},
    "rotary": {},
    "embedding": {},
}
FIXED: dict[str, tuple[str, ...]] = {
    "matmul": ("epilogue_tile_n", "raster_width", "cluster"),
    "gated_matmul": ("epilogue_tile_n", "raster_width", "cluster"),
    "quantized_matmul": ("memory_registers", "wg_dimension", "cluster", "tile_k", "exchange"),
    "quantize": ("order",),
    "quantized_grouped_matmul": ("memory_registers", "wg_dimension", "tile_k", "exchange"),
    "grouped_matmul": ("raster_width", "epilogue_slots", "compute_warpgroups"),
    "gated_grouped_matmul": ("raster_width", "epilogue_slots", "compute_warpgroups"),
    "ragged_contraction": ("raster_width", "epilogue_slots", "compute_warpgroups"),
    "flash_attention": ("memory_registers", "section_waves"),
    "flash_attention_backward": ("section_waves",),
    "cross_entropy": ("stages",),
    "rms_norm": ("stages",),
    "rotary": ("stages",),
    "embedding": ("loads",),
}


# --- the file


class SweepRow(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What became of one config: its indices into `Sweep.parameters`, field by field, and as in `Outcome`."""

    config: tuple[int, ...]
    kind: Kind
    samples: tuple[float, ...] = ()  # microseconds, in the order measured; one where the device gives its median only
    baseline_us: float | None = None  # the baseline's median in the same rounds
    error: float | None = None
    detail: str = ""

    @property
    def us(self) -> float:
        """The median of the samples; infinity for a config that did not work."""
        return measure.median_us(self.samples) if self.samples else float("inf")


Choices = tuple[int | str | bool, ...]  # of a parameter


class Sweep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: int
    op: str
    name: str  # of the problem, as in `OpSpec.shapes`
    problem: dict[str, int | str | bool]
    kind: Literal["measured"]
    gpu: str  # Gpu.key
    device: str  # its name
    driver: str | None
    jax: str
    jaxlib: str
    cuda: str | None
    kernel_version: int
    baseline: str | None
    seed: int  # of the inputs
    date: str  # of its end
    complete: bool
    grid: dict[str, Choices]  # what every legal combination of is measured
    parameters: dict[str, Choices] = msgspec.field(name="knobs")  # all values that occur, for `SweepRow.config`
    rows: tuple[SweepRow, ...]

    def configs(self, spec: OpSpec) -> list[Any]:
        """The Config of each row."""
        names, choices = self.parameters.keys(), self.parameters.values()
        values = ([of_one[i] for of_one, i in zip(choices, row.config, strict=True)] for row in self.rows)
        return [spec.Config(**dict(zip(names, chosen))) for chosen in values]

    @property
    def optimum(self) -> float:
        """The smallest median, in microseconds."""
        return min(row.us for row in self.rows)


class SweepError(ValueError):
    """A sweep's file that cannot be used; the message names it, and ends in the way out."""


def read(path: Path) -> Sweep:
    """The sweep in a file: data, checked against the schema; SweepError for anything else."""
    try:
        sweep = msgspec.json.decode(gzip.decompress(path.read_bytes()), type=Sweep)
    except (OSError, EOFError, ValueError) as error:  # msgspec's errors are ValueErrors; gzip's are OSErrors
        raise SweepError(f"{path} is no sweep ({error}): delete it and measure again") from None
    if sweep.schema != SCHEMA:
        raise SweepError(f"{path} has schema {sweep.schema}, this mgpu_ops reads {SCHEMA}: upgrade it or measure again")
    widths = [len(values) for values in sweep.parameters.values()]
    for row in sweep.rows:
        if len(row.config) != len(widths) or not all(0 <= i < n for i, n in zip(row.config, widths)):
            raise SweepError(f"{path}: config {row.config} is outside of its {len(widths)} parameters: measure again")
    return sweep


def write(sweep: Sweep, path: Path) -> None:
    _replace(path, gzip.compress(msgspec.json.encode(sweep), mtime=0))  # the same bytes for the same sweep


def write_t4(sweep: Sweep, path: Path) -> None:
    _replace(path, gzip.compress(json.dumps(t4(sweep)).encode(), mtime=0))


def _replace(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def paths(folder: Path, spec_name: str, gpu_key: str, name: str) -> tuple[Path, Path]:
    """The files of a problem's sweep: its own format and T4."""
    stem = f"{gpu_key}-{spec_name}-{name}"
    return folder / f"{stem}.json.gz", folder / f"{stem}.t4.json.gz"


# What T4 calls the kinds of failure; any other is "runtime".
_INVALIDITY = {
    "ok": "correct",
    "constraint": "constraints",
    "compile": "compile",
    "timeout": "timeout",
    "wrong": "correctness",
}


def t4(sweep: Sweep) -> dict[str, Any]:
    """A sweep in the T4 format, version 1.1.0: results as Kernel Tuner writes them, times in milliseconds, and metadata."""
    results = []
    for row in sweep.rows:
        measurements = []
        if row.kind == "ok":
            measurements.append({"name": "time", "value": _ms(row.us), "unit": "ms"})
        if row.baseline_us is not None:
            measurements.append({"name": "baseline_time", "value": _ms(row.baseline_us), "unit": "ms"})
        results.append(
            {
                "configuration": {k: v[i] for (k, v), i in zip(sweep.parameters.items(), row.config)},
                "objectives": ["time"],
                "times": {"runtimes": [_ms(us) for us in row.samples]},
                "invalidity": _INVALIDITY.get(row.kind, "runtime"),
                "correctness": int(row.kind != "wrong"),
                "measurements": measurements,
            }
        )
    metadata = {
        "compute_api": "CUDA",
        "device": sweep.device,
        "autotuner": "mgpu_ops",
        "timestamp": sweep.date,
        "timeunit": "milliseconds",
        "problem": {"op": sweep.op, "name": sweep.name, **sweep.problem},
    }
    return {"schema_version": "1.1.0", "metadata": metadata, "results": results}


def _ms(us: float) -> float:
    return round(us / 1e3, 6)


# --- what is measured


def grid(spec: OpSpec, problem: Problem, gpu: Gpu, limit: int = LIMIT) -> tuple[dict[str, tuple[Any, ...]], list[Any]]:
    """The declared grid of a problem, and its legal configs: no more than `limit`, unless no parameter is left to fix."""
    default = dataclasses.asdict(spec.default(problem, gpu))
    choices = {k: tuple(v) for k, v in spec.space(problem, gpu).items()} | GRIDS.get(spec.name, {})
    fixed = iter(FIXED.get(spec.name, ()))
    while len(legal := _legal(spec, problem, gpu, choices)) > limit:
        parameter = next(fixed, None)
        if parameter is None:
            break
        choices[parameter] = (default[parameter],)
    return choices, legal


def _legal(spec: OpSpec, problem: Problem, gpu: Gpu, choices: Mapping[str, Sequence[Any]]) -> list[Any]:
    every = (spec.Config(**dict(zip(choices, values))) for values in itertools.product(*choices.values()))
    return [config for config in every if spec.check(problem, config, gpu) is None]


def extras(spec: OpSpec, problem: Problem, gpu: Gpu) -> list[Any]:
    """Configs that a search or the database may name for a problem, whatever the grid.

    The default and the first of the op's candidates, for this problem and for the others of the suite "replay", whose best one
    may be its nearest; and what is shipped for this very problem.
    """
    others = [spec.shapes[name] for name in REPLAY.get(spec.name, ()) if name in spec.shapes]
    named = []
    for other in (problem, *others):
        named += [spec.default(other, gpu), *spec.candidates(other, gpu)[:ANALYTIC]]
    shipped = [location.path for location in database.existing_files([gpu.key], spec.name) if location.owner == "shipped"]
    key = database.key_of_fields(dataclasses.asdict(problem))
    for entry in (entry for path in shipped for entry in database.read(path).entries):
        if database.key_of_fields(entry.problem) == key and entry.evidence.kernel_version == spec.version:
            named.append(database.to_config(spec, entry.config))
    return [config for config in dict.fromkeys(named) if spec.check(problem, config, gpu) is None]


# --- measuring


@dataclasses.dataclass(frozen=True)
class SweepOptions:
    """Where sweeps are kept, how large they are, and the seed of their inputs and of the order of measuring."""

    folder: Path
    limit: int = LIMIT
    seed: int = 0


def measure_all(
    spec: OpSpec,
    name: str,
    problem: Problem,
    device: Device,
    options: SweepOptions,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Sweep:
    """Measures all configs of a problem that its file lacks, and writes it, in both formats.

    `progress(done, total)` is called after each config. What was measured is saved whatever ends it. Raises SweepError where
    the file is another GPU's, driver's or version's, or of another grid, and where the device does not measure.
    """
    if device.kind != "measured":
        raise SweepError(f"a sweep is measured, and this device's times are {device.kind}: run it on the GPU")
    path, other = paths(options.folder, spec.name, device.gpu.key, name)
    choices, configs = grid(spec, problem, device.gpu, options.limit)
    configs = list(dict.fromkeys(configs + extras(spec, problem, device.gpu)))
    device.open(spec, problem, options.seed)
    sweep = _empty(spec, name, problem, device, options.seed, choices, configs)
    rows = {row.config: row for row in _resumed(path, sweep)}
    indices = {c: tuple(v.index(getattr(c, k)) for k, v in sweep.parameters.items()) for c in configs}
    missing = [c for c in configs if indices[c] not in rows]
    random.Random(options.seed).shuffle(missing)
    saved = time.monotonic()
    try:
        for config, outcome in judged(device, missing):
            rows[indices[config]] = _row_of(indices[config], outcome)
            progress(len(rows), len(configs))
            if time.monotonic() - saved > _SAVE_SECONDS:
                write(_with(sweep, rows), path)
                saved = time.monotonic()
    finally:
        done = _with(sweep, rows, complete=len(rows) == len(configs))
        write(done, path)
    write_t4(done, other)
    return done


def judged(device: Device, configs: Sequence[Config]) -> Iterator[tuple[Config, Outcome]]:
    """What became of each config, as it becomes known; as many are in flight as the device takes."""
    waiting, in_flight = collections.deque(configs), 0
    while waiting or in_flight:
        while waiting and in_flight < device.slots:
            device.submit(waiting.popleft())
            in_flight += 1
        yield device.next()
        in_flight -= 1


def _empty(
    spec: OpSpec,
    name: str,
    problem: Problem,
    device: Device,
    seed: int,
    choices: Mapping[str, Sequence[Any]],
    configs: Sequence[Config],
) -> Sweep:
    """The sweep of these configs on a device that has opened the problem, without rows."""
    return Sweep(
        schema=SCHEMA,
        op=spec.name,
        name=name,
        problem=dataclasses.asdict(problem),
        kind="measured",
        gpu=device.gpu.key,
        device=device.gpu.name,
        driver=device.versions["driver"],
        jax=str(device.versions["jax"]),
        jaxlib=str(device.versions["jaxlib"]),
        cuda=device.versions["cuda"],
        kernel_version=spec.version,
        baseline=device.baseline,
        seed=seed,
        date=datetime.date.today().isoformat(),
        complete=False,
        grid={k: tuple(v) for k, v in choices.items()},
        parameters={k: tuple(sorted({getattr(c, k) for c in configs})) for k in choices},
        rows=(),
    )


def _with(sweep: Sweep, rows: Mapping[Any, SweepRow], complete: bool = False) -> Sweep:
    return msgspec.structs.replace(sweep, rows=tuple(rows[key] for key in sorted(rows)), complete=complete)


def _row_of(config: tuple[int, ...], outcome: Outcome) -> SweepRow:
    samples: tuple[float, ...] = ()
    if outcome.kind == "ok":
        samples = tuple(round(us, 3) for us in outcome.samples or (outcome.us or 0.0,))  # CUPTI counts nanoseconds
    baseline = None if outcome.baseline_us is None else round(outcome.baseline_us, 3)
    return SweepRow(config, outcome.kind, samples, baseline, _finite(outcome.error), outcome.detail)


def _finite(x: float | None) -> float | None:
    return x if x is not None and abs(x) < float("inf") else None


def _resumed(path: Path, sweep: Sweep) -> tuple[SweepRow, ...]:
    """The rows of an earlier run of the same sweep."""
    if not path.exists():
        return ()
    old = read(path)
    for what in ("device", "driver", "jax", "jaxlib", "seed", "kernel_version", "grid", "parameters"):
        its, mine = getattr(old, what), getattr(sweep, what)
        if its != mine:
            raise SweepError(f"{path} was measured with {what} {its}, here it is {mine}: move it away or name another --output")
    return old.rows


def suite(specs: Mapping[str, OpSpec], op: str | None = None) -> list[tuple[OpSpec, str, Any]]:
    """(spec, name, problem) of the suite "replay", of one op or of all."""
    return [(specs[o], name, specs[o].shapes[name]) for o, names in REPLAY.items() for name in names if op in (None, o)]


def read_all(folder: Path) -> list[Sweep]:
    """The complete sweeps in a folder."""
    found = [read(path) for path in sorted(folder.glob("*.json.gz")) if not path.name.endswith(".t4.json.gz")]
    return [sweep for sweep in found if sweep.complete]


def gpu_of(sweep: Sweep) -> Gpu:
    return gpus.find(sweep.gpu)
