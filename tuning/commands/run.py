"""`mgpu-tune run`: tunes problems and stores the best configs."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from mgpu_ops.tuning.commands import INTERRUPTED, OK, WRONG, command, device_for, say
from mgpu_ops.tuning.commands.arguments import positive_int, problem_arguments, problems_of, seconds, seed


def register(commands: Any) -> None:
    parser = command(
        commands,
        "run",
        run,
        "tune one problem, or a suite of them, and store the best configs",
        """
        mgpu-tune run matmul --m 4096 --n 4096 --k 4096 --dtype bf16
        mgpu-tune run matmul --shape llama3-8b-qkv-128 --trials 64 --budget 60s
        mgpu-tune run matmul --suite llm --budget 30s --database tuned.json
        mgpu-tune run grouped_matmul --suite moe --budget 60s
        mgpu-tune run grouped_matmul --m 16384 --n 28672 --k 4096 --groups 8 --spread skewed --dtype bf16
        mgpu-tune run ragged_contraction --suite mixtral-8x7b
        mgpu-tune run flash_attention --suite llm --budget 60s
        mgpu-tune run flash_attention_backward --shape llama3-8b-8192-causal
        mgpu-tune run matmul --m 8192 --n 8192 --k 8192 --gpu h100-sxm   # no GPU here: modelled, and said so
        """,
    )
    problem_arguments(parser, many=True)
    parser.add_argument("--trials", type=positive_int, default=32, metavar="N", help="candidates a problem (default 32)")
    parser.add_argument(
        "--budget", type=seconds, default=math.inf, metavar="TIME", help="a problem, e.g. 60s, 2m (default: no limit)"
    )
    parser.add_argument("--seed", type=seed, default=0, help="of the inputs and of the search (default 0)")
    parser.add_argument("--gpu", help="tune for this GPU, by the model unless it is the one here: h200, h100-sxm ...")
    parser.add_argument("--database", type=Path, metavar="FILE", help="where to store (default: your own, see `show`)")


def run(arguments: argparse.Namespace) -> int:
    import mgpu_ops
    from mgpu_ops.core import database

    spec = mgpu_ops.spec_of(arguments.op)
    problems = problems_of(spec, arguments)
    device = device_for(arguments.gpu)
    path = arguments.database or database.user_path(device.gpu.key, spec.name)
    try:
        if path.exists():
            database.read(path, gpu_key=device.gpu.key, op=spec.name)  # refused now, not after an hour of tuning
        worst = OK
        for name, problem in problems.items():
            code = tune_one(spec, name, problem, device, path, arguments.trials, arguments.budget, arguments.seed)
            if code == INTERRUPTED:
                return code
            worst = max(worst, code)
        return worst
    finally:
        device.close()


def tune_one(spec: Any, name: str, problem: Any, device: Any, path: Path, trials: int, budget: float, seed: int) -> int:
    """Tunes one problem with a progress bar, prints its trials, stores its entry; the exit code."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from mgpu_ops.core import database
    from mgpu_ops.tuning import tables, tuner

    tuner.check_supported(spec, problem, device.gpu)  # before a progress bar is on the screen
    console = Console()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[best]}"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(f"{spec.name} {name}", total=trials, best="")
        best = math.inf

        def progress(trial: Any) -> None:
            nonlocal best
            best = min(best, trial.outcome.us or math.inf)
            bar.update(task, advance=1, best=f"best {best:.1f} us" if best < math.inf else "")

        result = tuner.tune(spec, problem, device, trials=trials, budget=budget, seed=seed, progress=progress)
    code = INTERRUPTED if result.ended == "interrupted" else OK
    console.print(tables.trials_table(result.trials, device.baseline))
    for (kind, detail), count in result.failures.items():
        say(f"failed: {count} {kind}: {detail}")
    if result.entry is None:
        say(f"no candidate worked: nothing is stored for {name}")
        return code or WRONG
    e = result.entry.evidence
    against = f", {e.baseline} {e.baseline_us:.1f} us ({e.baseline_us / e.median_us:.3f}x)" if e.baseline_us else ""
    default = f", default {e.default_us:.1f} us" if e.default_us else ""
    say(f"best of {len(result.trials)} in {result.seconds:.1f} s: {e.median_us:.1f} us {e.kind}{default}{against}")
    database.update(path, [result.entry], gpu_key=device.gpu.key, op=spec.name)
    say(f"stored as {e.kind} in {path}")
    return code
