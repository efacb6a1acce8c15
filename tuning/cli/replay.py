"""`mgpu-tune replay`: searches recorded sweeps again, without a GPU."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mgpu_ops.core import extras
from mgpu_ops.tuning.cli.arguments import positive_int
from mgpu_ops.tuning.cli.shared import OK, UsageError, answer, command, count, say, writable
from mgpu_ops.tuning.cli.sweep import OUTPUT


def register(commands: Any) -> None:
    parser = command(
        commands,
        "replay",
        run,
        "search recorded sweeps again, without a GPU, and say how far from the optimum each sampler ends",
        """
        mgpu-tune replay
        mgpu-tune replay --trials 32 --json
        mgpu-tune replay --sampler ours --sampler random --seeds 20
        mgpu-tune replay --from sweeps --picture regret      # regret.png and regret.svg
        """,
        needs=("optuna", "rich"),
    )
    parser.add_argument("--from", dest="folder", type=Path, default=OUTPUT, metavar="FOLDER", help=f"sweeps (default {OUTPUT})")
    parser.add_argument("--trials", type=positive_int, default=32, metavar="N", help="of a search (default 32)")
    parser.add_argument(
        "--seeds", type=positive_int, default=10, metavar="N", help="searches of a sampler on a problem (default 10)"
    )
    parser.add_argument(
        "--sampler",
        action="append",
        choices=("ours", "tpe", "gp", "random", "brute"),
        help="several times for several; default: all, gp where PyTorch is installed",
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="regret against trials, as FILE.png and FILE.svg")


def run(arguments: argparse.Namespace) -> int:
    from rich.progress import Progress
    from rich.table import Table

    from mgpu_ops.tuning import search, terminal
    from mgpu_ops.tuning.replay import replay, sweep

    if arguments.picture:
        extras.require("--picture", ["matplotlib"])
        if not arguments.picture.name:
            raise UsageError(f"--picture {arguments.picture} names no file: say FILE, for FILE.png and FILE.svg")
        for path in replay.pictures(arguments.picture):
            writable(path, "--picture")
    sweeps = sweep.read_all(arguments.folder)
    if not sweeps:
        raise UsageError(
            f"no complete sweep in {arguments.folder}: record some with `mgpu-tune sweep` on a GPU, or name --from"
        )
    samplers = list(dict.fromkeys(arguments.sampler or replay.SAMPLERS))
    if "gp" in samplers and (lacks := search.lacks_for_gp()):
        if arguments.sampler:
            raise UsageError(f"sampler gp {lacks}, or leave it out")
        samplers.remove("gp")
        say(f"gp is left out: it {lacks}")
    if replay.OURS not in samplers:
        samplers.insert(0, replay.OURS)
    total = len(sweeps) * sum(1 if name == "brute" else arguments.seeds for name in samplers)
    with Progress(console=terminal.console()) as bar:
        task = bar.add_task(f"{count(total, 'search')[:-1]}es" if total != 1 else "1 search", total=total)
        scores = dict(replay.play_all(sweeps, samplers, arguments.trials, arguments.seeds, lambda: bar.update(task, advance=1)))
    held = replay.held_out(sweeps)
    ours = scores[replay.OURS]
    table = Table(title=f"{count(len(sweeps), 'problem')}, {arguments.trials} trials, {count(arguments.seeds, 'seed')}")
    for heading in ("search", "median regret", "p95 regret", "score", "spread of reruns", "trials to 1 %"):
        table.add_column(heading, justify="left" if heading == "search" else "right")
    for name, s in scores.items():
        table.add_row(
            name if name == replay.OURS else f"{name} alone",
            f"{s.median_regret:.2%}",
            f"{s.p95_regret:.2%}",
            f"{s.score:.2f}",
            f"{s.rerun_spread:.2%}",
            "more" if s.trials_to_1_percent is None else f"{s.trials_to_1_percent:g}",
        )
    terminal.console().print(table)
    say(
        f"with no trial, from the other problems' optima: {held.median_share:.3f} of the optimum in the median, "
        f"{held.smallest_share:.3f} at least; {held.smallest_of_default:.3f} of the default's speed at least"
    )
    factors = replay.factors(sweeps, ours)
    if factors:
        say(f"within 1 %: a random search takes {factors[0]:.1f} times the trials, an exhaustive one {factors[1]:.0f} times")
    pictures = replay.picture(scores, len(sweeps), arguments.picture) if arguments.picture else []
    for path in pictures:
        say(f"wrote {path}")
    answer(
        arguments,
        {
            "problems": len(sweeps),
            "trials": arguments.trials,
            "median_regret": ours.median_regret,
            "p95_regret": ours.p95_regret,
            "held_out": held,
            "samplers": {name: {k: v for k, v in vars(s).items() if k != "curve"} for name, s in scores.items()},
        },
    )
    return OK
