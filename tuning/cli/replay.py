"""`mgpu-tune replay`: searches recorded sweeps again, without a GPU."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_ops.core import extras
from mgpu_ops.tuning.cli.arguments import positive_int
from mgpu_ops.tuning.cli.shared import OK, UsageError, answer, command, say, writable
from mgpu_ops.tuning.cli.sweep import OUTPUT
from mgpu_ops.tuning.terminal import count

if TYPE_CHECKING:
    from mgpu_ops.tuning.replay.replay import HeldOut, Score
    from mgpu_ops.tuning.replay.sweep import Sweep


def register(commands: Any) -> None:
    parser = command(
        commands,
        "replay",
        run,
        """
        mgpu-tune replay
        mgpu-tune replay --trials 32 --json
        mgpu-tune replay --sampler ours --sampler random --seeds 20
        mgpu-tune replay --from sweeps --picture regret      # regret.png and regret.svg
        """,
        needs=("optuna", "rich"),
    )
    parser.add_argument(
        "--from", dest="folder", type=Path, default=OUTPUT, metavar="FOLDER", help=f"where the sweeps are (default {OUTPUT})"
    )
    parser.add_argument("--trials", type=positive_int, default=32, metavar="N", help="trials in each search (default 32)")
    parser.add_argument(
        "--seeds",
        type=positive_int,
        default=10,
        metavar="N",
        help="searches of each sampler on each problem (default 10)",
    )
    parser.add_argument(
        "--sampler",
        action="append",
        choices=("ours", "tpe", "gp", "random", "brute"),
        help="may be given several times (default: all; gp where PyTorch is installed)",
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw regret against trials, as FILE.png and FILE.svg")


def run(arguments: argparse.Namespace) -> int:
    from mgpu_ops.tuning.replay import replay, sweep

    if arguments.picture:
        _check_picture(arguments.picture)
    sweeps = sweep.read_all(arguments.folder)
    if not sweeps:
        raise UsageError(
            f"no complete sweep in {arguments.folder}: record some with `mgpu-tune sweep` on a GPU, or name --from"
        )
    scores = _played(sweeps, _samplers(arguments.sampler), arguments)
    held_out = replay.held_out(sweeps)
    _print(sweeps, scores, held_out, arguments)
    for path in replay.picture(scores, len(sweeps), arguments.picture) if arguments.picture else ():
        say(f"wrote {path}")
    ours = scores[replay.OURS]
    document = {
        "problems": len(sweeps),
        "trials": arguments.trials,
        "median_regret": ours.median_regret,
        "p95_regret": ours.p95_regret,
        "held_out": held_out,
        "samplers": {name: {k: v for k, v in vars(s).items() if k != "curve"} for name, s in scores.items()},
    }
    answer(arguments, document)
    return OK


def _check_picture(picture: Path) -> None:
    """Refuses, before the searches, a picture that cannot be drawn or written."""
    from mgpu_ops.tuning.replay import replay

    extras.require("--picture", ["matplotlib"])
    if not picture.name:
        raise UsageError(f"--picture {picture} names no file: say FILE, for FILE.png and FILE.svg")
    for path in replay.pictures(picture):
        writable(path, "--picture")


def _samplers(asked: Sequence[str] | None) -> list[str]:
    """The samplers to compare: those asked for or all, ours always among them."""
    from mgpu_ops.tuning import search
    from mgpu_ops.tuning.replay import replay

    samplers = list(dict.fromkeys(asked or replay.SAMPLERS))
    if "gp" in samplers and (lacks := search.lacks_for_gp()):
        if asked:
            raise UsageError(f"sampler gp {lacks}, or leave it out")
        samplers.remove("gp")
        say(f"gp is left out: it {lacks}")
    return samplers if replay.OURS in samplers else [replay.OURS, *samplers]


def _played(sweeps: Sequence[Sweep], samplers: Sequence[str], arguments: argparse.Namespace) -> dict[str, Score]:
    """The score of each sampler, with a progress bar over all searches."""
    from rich.progress import Progress

    from mgpu_ops.tuning import terminal
    from mgpu_ops.tuning.replay import replay

    total = len(sweeps) * sum(1 if name == "brute" else arguments.seeds for name in samplers)
    with Progress(console=terminal.console()) as bar:
        task = bar.add_task(count(total, "search", "searches"), total=total)
        return dict(replay.play_all(sweeps, samplers, arguments.trials, arguments.seeds, lambda: bar.update(task, advance=1)))


def _print(sweeps: Sequence[Sweep], scores: dict[str, Score], held_out: HeldOut, arguments: argparse.Namespace) -> None:
    from rich.table import Table

    from mgpu_ops.tuning import terminal
    from mgpu_ops.tuning.replay import replay

    counted = (len(sweeps), "problem"), (arguments.trials, "trial"), (arguments.seeds, "seed")
    table = Table(title=", ".join(count(*each) for each in counted))
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
        f"with no trial, from the other problems' optima: {held_out.median_share:.3f} of the optimum in the median, "
        f"{held_out.smallest_share:.3f} at least; {held_out.smallest_of_default:.3f} of the default's speed at least"
    )
    factors = replay.factors(sweeps, scores[replay.OURS])
    if factors:
        say(f"within 1 %: a random search takes {factors[0]:.1f} times the trials, an exhaustive one {factors[1]:.0f} times")
