"""Tunes matmul's suite `anywhere` beside XLA, about a second and a half of a Hopper GPU for each problem.

    python -m scripts.tune_drawn --output results/DATE-GPU-matmul-anywhere-tuned.csv [--part 0/2] [--names 0,24] [--seconds 90]

`mgpu-tune run matmul --suite anywhere` searches longer and stores entries. This shows what the kernel reaches on problems that
nobody chose, and stores none. Of each problem the default and the most promising configs by the model compile in processes
without a GPU, and are timed in turn with XLA. Then the fastest is timed beside XLA alone, and these two times are written as
`mgpu-tune bench` writes them; all configs' times go to a file of the same name that ends in .jsonl, and the fastest that it has
of earlier runs are tried again (--again). Rows of problems that the CSV file has already are kept, but for those measured
again, so that parts of the suite may be measured one after the other.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax

from mgpu_ops import MatmulConfig, MatmulProblem, spec_of
from mgpu_ops.core import aot
from mgpu_ops.core import gpu as gpus
from mgpu_ops.core.aot import Executable
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.tuning import measure, suites
from mgpu_ops.tuning.bench import results
from mgpu_ops.tuning.bench.results import OURS, Measurement, Stamp, six_digits
from mgpu_ops.tuning.bench.runner import stamp_of
from mgpu_ops.tuning.compile_pool import CompileJob, Pool
from mgpu_ops.tuning.labels import label
from scripts.measure_drawn import Arrays

MATMUL = spec_of("matmul")
CONFIGS = 6
_MOST_ELEMENTS = 5 * 2**28  # of an operand: a vocabulary of 152064 by 8192
_NEAR = 1.6  # times the least modelled time: configs behind that are not tried
_NO_SEARCH = {"xla_gpu_autotune_level": "0"}  # for the reference, whose time does not count


def promising(problem: MatmulProblem, gpu: Gpu, count: int = CONFIGS) -> list[MatmulConfig]:
    """The default, then the candidates with the least modelled times: no two of the same tile, schedule, cluster and split.

    Where one is near enough, the last is one of a kind (schedule, cluster, or tiles of few rows) that none before it has.
    """

    def tile(c: MatmulConfig) -> tuple[Any, ...]:
        return c.tile_m, c.tile_n, c.tile_k, c.schedule, c.cluster, c.split_k

    def kind(c: MatmulConfig) -> tuple[Any, ...]:
        return c.schedule, c.cluster, c.tile_m < 64

    found = {tile(c): c for c in [MATMUL.default(problem, gpu)]}
    ranked = sorted(MATMUL.candidates(problem, gpu), key=lambda c: MATMUL.cost(problem, c, gpu))
    near = [c for c in ranked if MATMUL.cost(problem, c, gpu) <= _NEAR * MATMUL.cost(problem, ranked[0], gpu)]
    for c in near:
        if len(found) < count - 1:
            found.setdefault(tile(c), c)
    kinds = {kind(c) for c in found.values()}
    for c in [*(c for c in near if kind(c) not in kinds), *near]:
        if len(found) < count:
            found.setdefault(tile(c), c)
    return list(found.values())


@dataclasses.dataclass(frozen=True)
class Tuned:
    """Of one problem: times in microseconds of XLA and of each config, in turn; then of XLA and the fastest config alone."""

    configs: list[dict[str, Any]]  # "config", and "us", "error" and "spills", or "failed"
    xla_us: float
    fastest: MatmulConfig
    last: tuple[list[float], list[float]]  # samples of XLA and of the fastest
    errors: tuple[float, float]


def tuned(
    problem: MatmulProblem,
    made: Sequence[tuple[MatmulConfig, Any]],
    arrays: Callable[[Sequence[int], int], jax.Array],
    timer: Callable[[Sequence[Callable[[], Any]], int], list[list[float]]] | None = None,
) -> Tuned:
    """Measures a problem whose configs are compiled. ValueError where none of them is right."""
    gpu = gpus.current()
    time_in_turn = timer or (lambda calls, rounds: measure.interleaved(calls, gpu, rounds))  # type: ignore[arg-type]
    shapes = jax.eval_shape(functools.partial(MATMUL.inputs, problem), jax.random.key(0))
    inputs = [arrays(x.shape, 7919 * 1024 * number) for number, x in enumerate(shapes)]
    xla = functools.partial(jax.jit(functools.partial(MATMUL.reference, problem)).lower(*inputs).compile(), *inputs)
    exact = jax.jit(functools.partial(MATMUL.reference, dataclasses.replace(problem, out_dtype="float32"))).lower(*inputs)
    truth = exact.compile(compiler_options=_NO_SEARCH)(*inputs)
    calls, records, right = [xla], [], []
    for config, found in made:
        record: dict[str, Any] = {"config": dataclasses.asdict(config)}
        records.append(record)
        if not isinstance(found, Executable):
            record["failed"] = found.detail
            continue
        call = functools.partial(aot.load(found), *inputs)
        record |= {"spills": found.spills, "error": measure.error(call(), truth)}
        if record["error"] <= MATMUL.tolerance(problem):
            right.append((config, record))
            calls.append(call)
    error = measure.error(xla(), truth)
    del truth
    if not right:
        raise ValueError(f"no config of {problem} is right: {records}")
    first, *times = map(measure.median_us, time_in_turn(calls, 5))
    for (_, record), us in zip(right, times, strict=True):
        record["us"] = us
    best = min(range(len(times)), key=times.__getitem__)
    theirs, ours = time_in_turn([xla, calls[1 + best]], 9)
    return Tuned(records, first, right[best][0], (theirs, ours), (error, right[best][1]["error"]))


def rows(problem: MatmulProblem, name: str, found: Tuned, stamp: Stamp) -> list[Measurement]:
    """Ours and XLA's, as in the files of `mgpu-tune bench`."""
    flops, moved = MATMUL.flops(problem), MATMUL.bytes(problem)

    def row(impl: str, config: str, samples: Sequence[float], error: float) -> Measurement:
        us = measure.median_us(samples)
        return Measurement(
            problem=label(MATMUL, name, problem),
            impl=impl,
            config=config,
            median_us=six_digits(us),
            spread_us=six_digits(measure.spread_us(samples)),
            tflops=six_digits(flops / us / 1e6),
            gbs=six_digits(moved / us / 1e3),
            error=six_digits(error),
            **stamp,
        )

    fields = " ".join(f"{name}={value}" for name, value in dataclasses.asdict(found.fastest).items())
    ours = row(OURS, f"{fields}; tuned, fastest of {len(found.configs)}", found.last[1], found.errors[1])
    return [ours, row("xla", "jit", found.last[0], found.errors[0])]


def told(ratios: Sequence[float]) -> str:
    """One line: XLA's times over ours."""
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return f"{len(ratios)} problems: {mean:.3f}x of XLA, worst {min(ratios):.3f}, below 0.95 {sum(x < 0.95 for x in ratios)}"


def told_of(name: str, problem: MatmulProblem, found: Tuned) -> str:
    """One line for a problem."""
    theirs, ours = map(measure.median_us, found.last)
    c, default = found.fastest, next((f"{r['us']:.1f}" for r in found.configs[:1] if "us" in r), "failed")
    number = next(i for i, r in enumerate(found.configs) if r["config"] == dataclasses.asdict(c))
    tile = f"{c.tile_m}x{c.tile_n}x{c.tile_k} {c.schedule} {c.cluster} {c.split_k}"
    return (
        f"{label(MATMUL, name, problem)}: XLA {theirs:.1f}, ours {ours:.1f} ({theirs / ours:.3f}) by config {number}, {tile}; "
        f"default {default} beside XLA's {found.xla_us:.1f}"
    )


def fastest_before(path: Path, problem: MatmulProblem, gpu: Gpu, count: int) -> list[MatmulConfig]:
    """The fastest configs of a problem in a .jsonl file of earlier runs, by their times over XLA's in the same run."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    times = [
        (config["us"] / line["xla_us"], MatmulConfig(**config["config"]))
        for line in lines
        if MatmulProblem(**line["problem"]) == problem
        for config in line["configs"]
        if "us" in config
    ]
    ranked = dict.fromkeys(config for _, config in sorted(times, key=lambda pair: pair[0]))
    return [config for config in ranked if MATMUL.check(problem, config, gpu) is None][:count]


def named(problems: Mapping[str, MatmulProblem], names: str) -> dict[str, MatmulProblem]:
    """Those of a suite that are asked for, in that order; all for "". ValueError for a name that there is not."""
    asked = [name for name in names.split(",") if name]
    short = {name.rpartition("-")[2]: name for name in problems}
    if unknown := [name for name in asked if name not in problems and name not in short]:
        raise ValueError(f"no problem {', '.join(unknown)} in the suite: --names takes names such as {next(iter(problems))}")
    return {short.get(name, name): problems[short.get(name, name)] for name in asked} if asked else dict(problems)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--suite", default="anywhere")
    parser.add_argument("--part", default="0/1", help="which part of the problems, as 0/2 and 1/2")
    parser.add_argument("--names", default="", help="only these problems, by name or by what follows its last '-', as 0,24")
    parser.add_argument("--configs", type=int, default=CONFIGS, help="of each problem")
    parser.add_argument("--again", type=int, default=3, help="of each problem, so many of the fastest of earlier runs")
    parser.add_argument("--seconds", type=float, default=300.0, help="stop after this time")
    arguments = parser.parse_args()
    start = time.monotonic()
    with Pool(seconds=60.0) as pool:  # its processes start while this one does
        gpu = gpus.current()
        if gpu is None:
            parser.error("this machine has no Hopper GPU")
        part, parts = map(int, arguments.part.split("/"))
        try:
            suite = cast(dict[str, MatmulProblem], suites.problems(MATMUL, arguments.suite))
            problems = named(suite, arguments.names)
        except ValueError as error:
            parser.error(str(error))
        topology, queued = aot.attached(), []
        for name, problem in list(problems.items())[part::parts]:
            before = fastest_before(arguments.output.with_suffix(".jsonl"), problem, gpu, arguments.again)
            configs = list(dict.fromkeys([*promising(problem, gpu, arguments.configs), *before]))
            queued.append((name, problem, [(c, pool.submit(CompileJob("matmul", problem, c, gpu, topology))) for c in configs]))
        _measure(queued, arguments.output, stamp_of("matmul", gpu), lambda: time.monotonic() - start < arguments.seconds)


def _measure(queued: Sequence[tuple[str, Any, Any]], output: Path, stamp: Stamp, in_time: Callable[[], bool]) -> None:
    """Measures problems whose configs are being compiled, and writes the files after each."""
    arrays, ratios = Arrays("bfloat16", _MOST_ELEMENTS), []
    done = results.read_csv(output) if output.exists() else []
    for name, problem, tasks in queued:
        if not in_time():
            print("out of time")
            break
        try:
            found = tuned(problem, [(c, task.result()) for c, task in tasks], arrays)
        except Exception as error:
            print(name, "failed:", str(error)[:300], flush=True)
            continue
        done = results.merge(done, rows(problem, name, found, stamp))
        results.write_csv(done, output)
        record = {"name": name, "problem": dataclasses.asdict(problem), "xla_us": found.xla_us, "configs": found.configs}
        with output.with_suffix(".jsonl").open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record | dict(stamp)) + "\n")
        theirs, ours = map(measure.median_us, found.last)
        ratios.append(theirs / ours)
        print(told_of(name, problem, found), flush=True)
    if ratios:
        print(told(ratios))


if __name__ == "__main__":
    main()
