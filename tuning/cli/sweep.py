"""`mgpu-tune sweep`: measures every config of a grid, so that `mgpu-tune replay` can search it without a GPU."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_ops.tuning.cli.arguments import positive_int, seed, workers_argument
from mgpu_ops.tuning.cli.selection import shape_of
from mgpu_ops.tuning.cli.shared import (
    INTERRUPTED,
    OK,
    WRONG,
    UsageError,
    answer,
    command,
    say,
    writable,
)
from mgpu_ops.tuning.devices import devices_for, has_gpu
from mgpu_ops.tuning.terminal import count

if TYPE_CHECKING:
    from rich.progress import Progress

    from mgpu_ops.registry.spec import OpSpec, Problem
    from mgpu_ops.tuning.device import Device
    from mgpu_ops.tuning.replay.sweep import Sweep

OUTPUT = Path("results/replay")
NamedProblem = tuple["OpSpec", str, "Problem"]  # (spec, name, problem)


def register(commands: Any) -> None:
    parser = command(
        commands,
        "sweep",
        run,
        """
        mgpu-tune sweep --suite replay --output results/replay       # what `replay` reads; goes on where it stopped
        mgpu-tune sweep --suite replay --workers all                 # on every GPU of this machine, each a problem at a time
        mgpu-tune sweep matmul --suite replay
        mgpu-tune sweep flash_attention --shape mha128-4096 --output sweeps
        mgpu-tune sweep grouped_matmul --suite mixtral-8x7b --configs 200
        """,
        needs=("rich",),
    )
    parser.add_argument("op", nargs="?", help="an op (default, with --suite replay: every op in it)")
    parser.add_argument("--shape", metavar="NAME", help="a named problem of the op")
    parser.add_argument("--suite", metavar="NAME", help="replay, or a list of problems of the op")
    parser.add_argument("--configs", type=positive_int, metavar="N", help="at most N configs of a problem (default 250)")
    workers_argument(parser)
    parser.set_defaults(gpu=None)  # the one here
    parser.add_argument("--seed", type=seed, default=0, help="of the inputs and of the order of configs (default 0)")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="FOLDER", help=f"default {OUTPUT}")


def run(arguments: argparse.Namespace) -> int:
    problems = _problems(arguments)
    if not has_gpu():
        raise UsageError("a sweep is measured and no NVIDIA GPU is here: run it on a machine with a Hopper GPU")
    writable(arguments.output, "--output", folder=True)
    with devices_for(arguments.gpu, arguments.workers, say=say) as devices:
        return sweep_all(problems, devices, arguments)


def sweep_all(problems: Sequence[NamedProblem], devices: Sequence[Device], arguments: argparse.Namespace) -> int:
    """Sweeps each problem into a file of its own; one that fails does not end the others. Each device has one at a time."""
    from mgpu_ops.tuning import compile_pool, many, worker
    from mgpu_ops.tuning.replay import sweep

    for device in devices:  # the order of configs is fixed, so that all cores may compile ahead
        device.slots = max(device.slots, 2 * compile_pool.cores() // len(devices))
    results: list[dict[str, Any]] = []
    code = OK
    with _progress_bar() as bar:

        def work(one: NamedProblem, device: Device) -> Sweep:
            return _sweep_one(one, device, bar, f"{problems.index(one) + 1} of {len(problems)}", arguments)

        try:
            for done in many.each(problems, devices, work):
                spec, name, _ = done.job
                if done.error is None:
                    results.append(_said(spec.name, name, done.result))
                elif not isinstance(done.error, worker.WorkerError | sweep.SweepError) or isinstance(done.error, worker.Lost):
                    raise done.error
                else:
                    say(f"{spec.name} {name}: {done.error}")
                    results.append({"op": spec.name, "name": name, "fault": str(done.error)})
                    code = WRONG
        except KeyboardInterrupt:
            say(f"stopped: what was measured is in {arguments.output}; the same command goes on from there")
            code = INTERRUPTED
    answer(arguments, results)
    return code


def _sweep_one(one: NamedProblem, device: Device, bar: Progress, place: str, arguments: argparse.Namespace) -> Sweep:
    from mgpu_ops.tuning.replay import sweep
    from mgpu_ops.tuning.terminal import printable

    spec, name, problem = one
    task = bar.add_task(f"{printable(f'{spec.name} {name}')} ({place})", total=None)

    def progress(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)

    options = sweep.SweepOptions(arguments.output, arguments.configs or sweep.LIMIT, arguments.seed)
    try:
        return sweep.measure_all(spec, name, problem, device, options, progress)
    finally:
        bar.stop_task(task)


def _progress_bar() -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from mgpu_ops.tuning import terminal

    words = TextColumn("{task.description}", markup=False)
    columns = (words, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=terminal.console())


def _said(op: str, name: str, found: Sweep) -> dict[str, Any]:
    """Says what came of a problem's sweep; returns it for JSON."""
    failed = sum(row.kind != "ok" for row in found.rows)
    best = f"best {found.optimum:.1f} us" if failed < len(found.rows) else "none worked"
    say(f"{op} {name}: {count(len(found.rows), 'config')}, {failed} failed, {best}")
    best_us = found.optimum if math.isfinite(found.optimum) else None
    return {"op": op, "name": name, "configs": len(found.rows), "failed": failed, "best_us": best_us}


def _problems(arguments: argparse.Namespace) -> list[NamedProblem]:
    """The problems that are asked for."""
    import mgpu_ops
    from mgpu_ops.tuning import suites
    from mgpu_ops.tuning.replay import sweep

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
    if not suite:
        return [(spec, shape, shape_of(spec, shape))]
    if suite not in suites.names(spec):
        raise UsageError(f"suite {suite!r} is not one of replay, {', '.join(suites.names(spec))}")
    return [(spec, name, problem) for name, problem in suites.problems(spec, suite).items()]
