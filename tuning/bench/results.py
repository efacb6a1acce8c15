"""Results of benchmarks: measurements, the CSV files that hold them, and how ours compares with its competitors.

All implementations of a problem are timed in turn within one run; ratios between measurements of different runs mean little.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import mgpu_ops
from mgpu_ops.registry.spec import OpSpec, Problem
from mgpu_ops.tuning.labels import label, problem_of

OURS = "mgpu_ops"
ROOFLINE = "roofline"
BEST = "best competitor"  # stands for a competitor's name: on each problem, the fastest one
GRAD = "+grad"  # ends an op's name where forward and backward are measured together
SUSTAINED = "-sustained"  # ends it where calls run without pause
_COMPUTE_BOUND = 2048  # rows from which on a matmul is bound by arithmetic


# --- Measurements ---------------------------------------------------------------------------------


class Libraries(TypedDict, total=False):
    """Versions of the libraries that XLA calls, and of the assembler; see `Measurement`."""

    cudnn: str
    cublas: str
    ptxas: str


class Stamp(Libraries):
    """What all measurements of a run have in common."""

    op: str
    gpu: str
    driver: str
    jax: str
    date: str


class Texts(Stamp):
    """The columns of a measurement that are text."""

    problem: str
    impl: str
    config: str


@dataclass(frozen=True)
class Measurement:
    """One implementation of one problem; the fields are the CSV file's columns, in this order.

    The kinds of time, all in microseconds:

    - `median_us`, what a call takes; every ratio and rate is computed from it. On one GPU: all kernels that a call launches, by
      CUPTI, with a cold L2. Of a collective: what one more call adds to a chain of calls in one jit, each waiting for the one
      before, by the wall clock; where the host is slower than the GPUs, this is the host's time.
    - `warm_us`, as `median_us` on one GPU, right after the same call with the same inputs.
    - Of an op "...-sustained", `median_us` is that of calls without pause, by the wall clock, at the clock that the power cap
      leaves; `watts`, `clock_mhz` and `joules` are of the same turns.
    - Of a program ("llama-step"), `median_us` is that of a step by the wall clock, with what lies between its kernels.
    - `own_us` and `around_us`, of a collective, by CUPTI on the GPU that starts last, whose kernels wait for no other GPU's
      start: the kernels that move data, and those before them (XLA's barrier of all GPUs, fills).
    - `chain_us`, of a collective, by the wall clock: a program of 16 calls alone, from its dispatch to its end.

    None, an empty cell, stands for what was not measured or does not apply to the op.
    """

    op: str  # "matmul", "matmul+grad" or "matmul-sustained"
    problem: str  # as `label` writes it
    impl: str  # "mgpu_ops", or a variant of it such as "mgpu_ops, workspace"; a competitor; or "roofline"
    config: str
    median_us: float
    spread_us: float | None  # distance of the 10th and 90th percentile of the samples that median_us is the median of
    tflops: float
    gbs: float  # 10^9 bytes per second: inputs read once and outputs written once
    error: float | None  # measure.error against float32, NaN for infinities and NaN; None of a yardstick, which has no result
    gpu: str
    driver: str
    jax: str
    date: str
    warm_us: float | None = None
    cudnn: str = ""  # its version, as "9.19.0"
    cublas: str = ""
    ptxas: str = ""  # the newest PTX ISA that the ptxas of Mosaic GPU knows, as "9.3": that of CUDA 13.3
    devices: int | None = None  # of a collective, as all that follow
    bytes: int | None = None  # of the payload, on each device
    own_us: float | None = None
    around_us: float | None = None
    chain_us: float | None = None
    bus_gbs: float | None = None  # 10^9 bytes/s, as nccl-tests counts: bytes that must cross a device's link, over median_us
    watts: float | None = None  # the GPU's mean power, by NVML
    clock_mhz: float | None = None  # the mean of its SMs' clock
    joules: float | None = None  # of one call
    peak_bytes: int | None = None  # of GPU memory that a program's step needs (`bench/program.py`)

    @property
    def is_yardstick(self) -> bool:
        """Whether it computes something else of the same cost, so that it has no error."""
        return self.error is None

    @property
    def variant(self) -> str | None:
        """Of ours, how it was called: "", or "workspace" of "mgpu_ops, workspace". None of other implementations."""
        name, _, variant = self.impl.partition(", ")
        return variant if name == OURS else None


def base_op(op: str) -> str:
    """The op of `mgpu_ops.SPECS` that a measurement's op is about: "matmul" of "matmul+grad" and "matmul-sustained"."""
    return op.removesuffix(SUSTAINED).removesuffix(GRAD)


def six_digits(x: float) -> float:
    return float(f"{x:.6g}")


def merge(*runs: Iterable[Measurement]) -> list[Measurement]:
    """The measurements of several runs; those of an (op, problem, gpu) come from the last run that has any.

    Those of one problem stay together, as only times that were taken in turn may be compared.
    """
    latest: dict[tuple[str, str, str], list[Measurement]] = {}
    for rows in runs:
        latest |= _grouped(rows)
    return [row for rows in latest.values() for row in rows]


def _grouped(rows: Iterable[Measurement]) -> dict[tuple[str, str, str], list[Measurement]]:
    groups: dict[tuple[str, str, str], list[Measurement]] = {}
    for row in rows:
        groups.setdefault((row.op, row.problem, row.gpu), []).append(row)
    return groups


# --- Files ----------------------------------------------------------------------------------------

_FIELDS = dataclasses.fields(Measurement)
COLUMNS = tuple(field.name for field in _FIELDS)
_NEEDED = tuple(field.name for field in _FIELDS if field.default is dataclasses.MISSING)  # the first columns of every file
_READ: dict[str, Callable[[str], Any]] = {  # annotations are text here
    field.name: {"str": str, "int": int, "float": float}[str(field.type).partition(" ")[0]] for field in _FIELDS
}
_ABOVE_ZERO = ("median_us", "warm_us", "chain_us", "devices", "bytes", "watts", "clock_mhz", "joules", "peak_bytes")
_MAY_BE_EMPTY = {field.name for field in _FIELDS if str(field.type).endswith("None")}


def output_path(
    directory: str | os.PathLike[str],
    date: str,
    gpu_key: str,
    op: str,
    what: str | None = None,
    suffix: str = ".csv",
) -> Path:
    """directory/date-gpu-op[-what].csv, such as results/2025-01-31-h200-matmul-square.csv."""
    return Path(directory) / ("-".join(filter(None, (date, gpu_key, op, what))) + suffix)


def write_csv(rows: Iterable[Measurement], path: str | os.PathLike[str]) -> None:
    """Replaces the file at `path`; floats keep every digit. No text may hold a carriage return."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(map(dataclasses.astuple, rows))
    temporary.replace(path)


def read_csv(path: str | os.PathLike[str]) -> list[Measurement]:
    """The measurements that `write_csv` wrote; columns that an older version did not write yet are empty.

    ValueError, with path and line, for another file.
    """
    with open(path, newline="", encoding="utf-8") as stream:
        reader = csv.reader(stream)
        header = tuple(next(reader, []))
        further = header[len(_NEEDED) :]
        if header[: len(_NEEDED)] != _NEEDED or not set(further) <= set(COLUMNS) or len(set(header)) != len(header):
            raise ValueError(f"{path}: has columns {list(header)}, not {list(COLUMNS)}: run the benchmark again")
        try:
            return [_parsed(path, reader.line_num, header, values) for values in reader]
        except csv.Error as error:
            raise ValueError(f"{path}, line {reader.line_num}: {error}: run the benchmark again") from None


def _parsed(path: str | os.PathLike[str], line: int, header: Sequence[str], values: Sequence[str]) -> Measurement:
    try:
        texts = dict(zip(header, values, strict=True))
        fields: dict[str, Any] = {c: None if text == "" and c in _MAY_BE_EMPTY else _READ[c](text) for c, text in texts.items()}
        if not all(fields[c] for c in ("op", "problem", "impl")):
            raise ValueError("op, problem and impl must not be empty")
        for c in _ABOVE_ZERO:
            if (value := fields.get(c)) is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{c}={texts[c]} must be a finite number above 0")
        for c, value in fields.items():
            if isinstance(value, float) and c != "error" and not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{c}={texts[c]} must be a finite number, 0 or more")
    except ValueError as error:
        raise ValueError(f"{path}, line {line}: {error}: run the benchmark again") from None
    return Measurement(**fields)


# --- Right and wrong ------------------------------------------------------------------------------


def tolerance(spec: OpSpec, problem: Problem, grad: bool) -> float:
    """The largest error that is right.

    With `grad`, also that of results in the inputs' dtype, which gradients have; or twice that of the op's backward op: its
    reference is given the forward output as it is stored, while forward and backward together compare with a float32 output.
    Its rounding moves delta = sum(out * d out), and with it queries of few visible keys, whose gradient is small.
    """
    limits, fields = [spec.tolerance(problem)], dataclasses.asdict(problem)
    if grad and spec.name == "moe":
        # That of the logits is zero but for the experts chosen, so that its errors are held against an rms that is smaller by
        # sqrt(experts / top_k).
        limits.append(max(2.0, math.sqrt(fields["groups"] / fields["top_k"])) * spec.tolerance(problem))
    if grad and spec.name in ("matmul", "grouped_matmul") and fields["activation"] != "none":
        # The argument of the activation is kept rounded, and so is its gradient, of which both products are computed.
        limits.append(2 * spec.tolerance(problem))
    backward = mgpu_ops.SPECS.get(f"{spec.name}_backward")
    if grad and backward is not None:
        limits.append(2 * backward.tolerance(problem))
    if grad and "out_dtype" in fields:
        limits.append(spec.tolerance(dataclasses.replace(problem, out_dtype=fields["dtype"])))
    return max(limits)


def wrong(row: Measurement) -> bool:
    """Whether the error is above the tolerance of the op and problem, so that its time says nothing; of a yardstick never.

    `failures` asks the same. For a problem that cannot be read, the largest tolerance of the op's named problems counts; for an
    unknown op, the largest of all ops.
    """
    return row.error is not None and not row.error <= _limit(row.op, row.problem)


@functools.lru_cache(1024)
def _limit(name: str, text: str) -> float:
    base = base_op(name)
    if base not in mgpu_ops.SPECS:
        return max(_largest(known) for known in mgpu_ops.SPECS)
    spec, grad = mgpu_ops.SPECS[base], name.removesuffix(SUSTAINED).endswith(GRAD)
    try:
        return tolerance(spec, problem_of(spec, text), grad)
    except ValueError:
        return _largest(base, grad)


@functools.cache
def _largest(name: str, grad: bool = False) -> float:
    spec = mgpu_ops.SPECS[name]
    return max(tolerance(spec, problem, grad) for problem in spec.shapes.values())


def failures(rows: Iterable[Measurement], spec: OpSpec, problems: Mapping[str, Problem], *, grad: bool) -> list[str]:
    """The problems for which ours has no measurement or a wrong result; where there are any, `bench` exits with 1."""
    op = spec.name + GRAD * grad
    ours = [row for row in rows if row.op.removesuffix(SUSTAINED) == op and row.variant is not None]
    found = []
    for name, problem in problems.items():
        text, limit = label(spec, name, problem), tolerance(spec, problem, grad)
        its = [row for row in ours if row.problem == text]
        if not its:
            found.append(f"{text}: no result")
        found += [
            f"{_with_variant(text, row.variant)}: error {row.error:.2g} is above {limit:.2g}"
            for row in its
            if not (row.error or 0.0) <= limit
        ]
    return found


def _with_variant(problem: str, variant: str | None) -> str:
    return f"{problem} ({variant})" if variant else problem


# --- Comparisons ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """One problem: ours, the competitors that ran it by name, yardsticks among them, and the roofline."""

    op: str
    problem: str
    gpu: str
    ours: Measurement | None
    competitors: dict[str, Measurement]
    roofline: Measurement | None

    @property
    def rivals(self) -> list[Measurement]:
        """The competitors but for yardsticks."""
        return [row for row in self.competitors.values() if not row.is_yardstick]

    @property
    def best(self) -> Measurement | None:
        """The fastest competitor whose result is right; never a yardstick."""
        return self._fastest(lambda row: row.median_us)

    def _fastest(self, us: Callable[[Measurement], float | None]) -> Measurement | None:
        right = [row for row in self.rivals if not wrong(row) and us(row) is not None]
        return min(right, key=lambda row: us(row) or 0.0, default=None)

    def ratio(self, competitor: str, *, warm: bool = False) -> float | None:
        """The time of a competitor, or of the `BEST`, over ours, above 1 where ours is faster. None unless both are right.

        `warm`: with a warm L2, where the best may be another; None where that was not measured.
        """

        def us(row: Measurement) -> float | None:
            return row.warm_us if warm else row.median_us

        theirs = self._fastest(us) if competitor == BEST else self.competitors.get(competitor)
        if self.ours is None or theirs is None or wrong(self.ours) or wrong(theirs):
            return None
        mine, other = us(self.ours), us(theirs)
        return None if mine is None or other is None else other / mine

    def energy(self, competitor: str) -> float | None:
        """The energy of a competitor's call over that of ours. None unless both are right and NVML told it."""
        theirs = self.competitors.get(competitor)
        if self.ours is None or theirs is None or wrong(self.ours) or wrong(theirs):
            return None
        return None if self.ours.joules is None or theirs.joules is None else theirs.joules / self.ours.joules


@dataclass(frozen=True)
class Summary:
    """Ours beside one competitor, over the problems that both got right."""

    op: str
    gpu: str
    competitor: str
    problems: int
    geomean: float  # of the competitor's time over ours; NaN without a problem
    worst: float
    worst_problem: str
    wins: int  # problems where the ratio is at least 1
    wrong: int  # problems that are left out, as a result is wrong
    warm_geomean: float = math.nan  # as geomean, with a warm L2; NaN where that was not measured
    part: str = ""  # which of the op's problems, "" for all: as "m >= 2048"
    best: float = math.nan

    @property
    def losses(self) -> int:
        return self.problems - self.wins


def comparisons(rows: Iterable[Measurement]) -> list[Comparison]:
    """One Comparison for each (op, problem, gpu), in the order of the measurements.

    Where ours ran in several variants, as with a workspace and without, each has a Comparison with the same competitors.
    """
    found = []
    for (name, problem, gpu), group in _grouped(rows).items():
        ours: dict[str, Measurement | None] = {row.variant: row for row in group if row.variant is not None}
        others = {row.impl: row for row in group if row.variant is None}
        roof = others.pop(ROOFLINE, None)
        found += [
            Comparison(name, _with_variant(problem, variant), gpu, row, others, roof)
            for variant, row in (ours or {"": None}).items()
        ]
    return found


def compared(every: Iterable[Comparison]) -> list[str]:
    """What ours is compared with: competitors, the `BEST` of them where there are several, and last the yardsticks."""
    names = {name: row.is_yardstick for each in every for name, row in each.competitors.items()}
    rivals = [name for name, yardstick in names.items() if not yardstick]
    return rivals + [BEST] * (len(rivals) > 1) + [name for name, yardstick in names.items() if yardstick]


def yardsticks(every: Iterable[Comparison]) -> set[str]:
    """The competitors that compute something else of the same cost."""
    return {name for each in every for name, row in each.competitors.items() if row.is_yardstick}


def summary(rows: Iterable[Measurement]) -> list[Summary]:
    """For each op, GPU and what it is `compared` with: the geometric mean of its time over ours, worst and wins."""
    return _summaries(comparisons(rows), "")


def split(rows: Iterable[Measurement]) -> list[Summary]:
    """As `summary`, of the parts of an op's problems: matmul from 2048 rows on and below, attention by its head dim.

    An op whose problems all belong to one part is left out.
    """
    parts: dict[str, dict[str, list[Comparison]]] = {}
    for each in comparisons(rows):
        if part := _part(each):
            parts.setdefault(each.op, {}).setdefault(part, []).append(each)
    several = (by_part for by_part in parts.values() if len(by_part) > 1)
    return [one for by_part in several for part, of_part in by_part.items() for one in _summaries(of_part, part)]


def _part(comparison: Comparison) -> str | None:
    spec = mgpu_ops.SPECS.get(base_op(comparison.op))
    if spec is None:
        return None
    try:
        problem = problem_of(spec, comparison.problem)
    except ValueError:
        return None
    if spec.name == "matmul":
        return f"m {'>=' if problem.m >= _COMPUTE_BOUND else '<'} {_COMPUTE_BOUND}"
    return f"head dim {problem.head_dim}" if hasattr(problem, "head_dim") else None


def by_op_and_gpu(every: Iterable[Comparison]) -> dict[tuple[str, str], list[Comparison]]:
    sets: dict[tuple[str, str], list[Comparison]] = {}
    for each in every:
        sets.setdefault((each.op, each.gpu), []).append(each)
    return sets


def _summaries(every: Iterable[Comparison], part: str) -> list[Summary]:
    found = []
    for both in by_op_and_gpu(every).values():
        for name in compared(both):
            ran = [each for each in both if each.ours and (name in each.competitors or (name == BEST and each.rivals))]
            found += [_summary(name, ran, part)] if ran else []
    return found


def _summary(competitor: str, ran: Sequence[Comparison], part: str) -> Summary:
    ratios = [(ratio, each.problem) for each in ran if (ratio := each.ratio(competitor)) is not None]
    worst, worst_problem = min(ratios, default=(math.nan, ""))
    return Summary(
        op=ran[0].op,
        gpu=ran[0].gpu,
        competitor=competitor,
        problems=len(ratios),
        geomean=_geomean([ratio for ratio, _ in ratios]),
        worst=worst,
        worst_problem=worst_problem,
        wins=sum(ratio >= 1.0 for ratio, _ in ratios),
        wrong=len(ran) - len(ratios),
        warm_geomean=_geomean([ratio for each in ran if (ratio := each.ratio(competitor, warm=True)) is not None]),
        part=part,
        best=max((ratio for ratio, _ in ratios), default=math.nan),
    )


def _geomean(ratios: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan
