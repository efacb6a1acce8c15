"""`mgpu-tune sweep`: measures every config of a grid, for `mgpu-tune replay` to search again without a GPU."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from mgpu_ops.tuning.commands import INTERRUPTED, OK, UsageError, answer, command, count, device_for, has_gpu, say
from mgpu_ops.tuning.commands.arguments import positive_int, seed

OUTPUT = Path("results/replay")


def register(commands: Any) -> None:
    parser = command(
        commands,
        "sweep",
        run,
        "measure every config of a grid, with raw samples, for `replay` (needs a Hopper GPU)",
        """
        mgpu-tune sweep --suite replay --output results/replay       # what `replay` is judged by; goes on where it stopped
        mgpu-tune sweep matmul --suite replay
        mgpu-tune sweep flash_attention --shape mha128-4096 --output sweeps
        mgpu-tune sweep grouped_matmul --suite mixtral-8x7b --configs 200
        """,
    )
    parser.add_argument("op", nargs="?", help="default, of the suite replay: every op that is in it")
    parser.add_argument("--shape", metavar="NAME", help="a named problem of the op")
    parser.add_argument("--suite", metavar="NAME", help="replay, or a suite of the op")
    parser.add_argument("--configs", type=positive_int, metavar="N", help="at most so many of a problem's grid (default 400)")
    parser.add_argument("--seed", type=seed, default=0, help="of the inputs and of the order (default 0)")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="FOLDER", help=f"default {OUTPUT}")


def run(arguments: argparse.Namespace) -> int:
    problems = _problems(arguments)
    if not has_gpu():
        raise UsageError("a sweep is measured and no NVIDIA GPU is here: run it on a machine with a Hopper GPU")
    device = device_for(None)
    try:
        return sweep_all(problems, device, arguments)
    finally:
        device.close()


def sweep_all(problems: list[tuple[Any, str, Any]], device: Any, arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from mgpu_ops.tuning import sweep

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    told = []
    for number, (spec, name, problem) in enumerate(problems):
        try:
            with Progress(*columns, console=Console()) as bar:
                task = bar.add_task(f"{spec.name} {name} ({number + 1} of {len(problems)})", total=None)

                def progress(done: int, total: int, bar: Any = bar, task: Any = task) -> None:
                    bar.update(task, completed=done, total=total)

                limit = arguments.configs or sweep.LIMIT
                found = sweep.measure_all(
                    spec, name, problem, device, arguments.output, limit=limit, seed=arguments.seed, progress=progress
                )
        except KeyboardInterrupt:
            say(f"stopped: what was measured is in {arguments.output}; the same command goes on from there")
            return INTERRUPTED
        failed = sum(row.kind != "ok" for row in found.rows)
        best = f"best {found.optimum:.1f} us" if failed < len(found.rows) else "none worked"
        say(f"{spec.name} {name}: {count(len(found.rows), 'config')}, {failed} failed, {best}")
        told.append(
            {"op": spec.name, "name": name, "configs": len(found.rows), "failed": failed, "best_us": _finite(found.optimum)}
        )
    answer(arguments, told)
    return OK


def _finite(us: float) -> float | None:
    return us if math.isfinite(us) else None


def _problems(arguments: argparse.Namespace) -> list[tuple[Any, str, Any]]:
    """(spec, name, problem) of what is asked for."""
    import mgpu_ops
    from mgpu_ops.tuning import sweep

    op, shape, suite = arguments.op, arguments.shape, arguments.suite
    if bool(shape) == bool(suite):
        raise UsageError("name what to sweep in one way: --suite replay, or an op with --shape NAME or --suite NAME")
    spec = mgpu_ops.spec_of(op) if op else None
    if suite == "replay":
        return sweep.suite(mgpu_ops.SPECS, op)
    if spec is None:
        raise UsageError(
            f"--{'shape' if shape else 'suite'} {shape or suite} is an op's: name the op ({', '.join(mgpu_ops.SPECS)})"
        )
    if suite and suite not in spec.suites:
        raise UsageError(f"suite {suite!r} is not one of replay, {', '.join(spec.suites)}")
    if shape and shape not in spec.shapes:
        raise UsageError(f"shape {shape!r} is not one of {', '.join(spec.shapes)}")
    names = dict.fromkeys(spec.suites[suite]) if suite else [shape]
    return [(spec, name, spec.shapes[name]) for name in names]
