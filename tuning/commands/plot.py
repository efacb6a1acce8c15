"""`mgpu-tune plot`: draws searches and what they found."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mgpu_ops.tuning.commands import OK, UsageError, answer, command, count, say, writable
from mgpu_ops.tuning.commands.storages import finished_argument, finished_storage, refuse_password


def register(commands: Any) -> None:
    parser = command(
        commands,
        "plot",
        run,
        "draw pictures of trials, tuned problems and benchmarks, as PNG and SVG",
        """
        mgpu-tune plot --output pictures                    # your databases and journals
        mgpu-tune plot matmul --gpu h200 --output pictures
        mgpu-tune plot --from results/replay --output pictures
        mgpu-tune plot --from results/2025-11-21-h200-matmul.csv tuned.json --output pictures
        mgpu-tune plot --storage --output pictures          # the trials of $MGPU_OPS_STORAGE, whose URL may have a password
        """,
        needs=("optuna", "matplotlib"),
    )
    source_arguments(parser)
    parser.add_argument("--output", type=Path, default=Path("pictures"), metavar="DIR", help="default: pictures")


def source_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", nargs="?", help="an op; all by default")
    parser.add_argument("--gpu", help="h200, h100-sxm ...; default: all there are")
    parser.add_argument(
        "--from",
        dest="sources",
        nargs="+",
        metavar="PLACE",
        help="journals, databases, sweeps, CSV files of `bench`, directories of these, or a storage's URL (default: your own)",
    )
    finished_argument(parser, "the trials")


def run(arguments: argparse.Namespace) -> int:
    import mgpu_ops
    from mgpu_ops.tuning import plot

    writable(arguments.output, "--output", folder=True)
    found = find(arguments)
    pictures = []
    try:
        for what, paths in plot.draw(found.runs, found.rates(mgpu_ops.SPECS), arguments.output):
            pictures.append({"what": what, "files": paths})
            say(f"{what}: {', '.join(map(str, paths))}")
    except OSError as e:
        raise UsageError(f"{arguments.output}: cannot be written ({e.strerror}): name another --output") from None
    if not pictures:
        raise UsageError("there is nothing to draw: no trial has a time, and no entry is measured; tune with `mgpu-tune run`")
    say(count(len(pictures), "picture"))
    answer(arguments, {"sources": found.places, "skipped": found.skipped, "pictures": pictures})
    return OK


def find(arguments: argparse.Namespace) -> Any:
    """What the arguments ask to look at."""
    import mgpu_ops
    from mgpu_ops.core import gpu
    from mgpu_ops.tuning import sources

    specs = mgpu_ops.SPECS
    if arguments.op:
        mgpu_ops.spec_of(arguments.op)  # refuses another
    device = gpu.find(arguments.gpu) if arguments.gpu else None
    keys = [device.key] if device else [g.key for g in gpu.GPUS]
    for place in arguments.sources or ():
        refuse_password("--from", place, "say --storage")
    shared = finished_storage(arguments)
    places = [*(arguments.sources or ()), *([shared] if shared else ())] or sources.own(specs, keys)
    found = sources.find(places, specs).of(arguments.op, device)
    for reason in found.skipped:
        say(f"skipped: {reason}")
    return found
