"""`mgpu-tune plot`: draws searches and what they found."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_ops.tuning.cli.shared import OK, UsageError, answer, command, say, writable
from mgpu_ops.tuning.cli.storages import finished_argument, finished_storage, refuse_password
from mgpu_ops.tuning.terminal import count

if TYPE_CHECKING:
    from mgpu_ops.tuning.bench.sources import Sources


def register(commands: Any) -> None:
    parser = command(
        commands,
        "plot",
        run,
        """
        mgpu-tune plot --output pictures                    # your databases and journals
        mgpu-tune plot matmul --gpu h200 --output pictures
        mgpu-tune plot --from results/replay --output pictures
        mgpu-tune plot --from results/2025-11-21-h200-matmul.csv tuned.json --output pictures
        mgpu-tune plot --from results/*.csv --in-place      # of each CSV file of `bench`, the picture beside it
        mgpu-tune plot --storage --output pictures          # the trials of $MGPU_OPS_STORAGE, whose URL may have a password
        """,
        needs=("optuna", "matplotlib"),
    )
    source_arguments(parser)
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--output", type=Path, default=Path("pictures"), metavar="DIR", help="where to write (default: pictures)"
    )
    where.add_argument("--in-place", action="store_true", help="draw the picture of each CSV file of `bench` next to the file")


def source_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", nargs="?", help="an op (default: all)")
    parser.add_argument("--gpu", help="which GPU: h200, h100-sxm ... (default: all there are)")
    parser.add_argument(
        "--from",
        dest="sources",
        nargs="+",
        metavar="PLACE",
        help="journals, databases, sweeps, CSV files of `bench`, directories of these, or the URL of a storage "
        "(default: your own journals and databases)",
    )
    finished_argument(parser, "the trials")


def run(arguments: argparse.Namespace) -> int:
    import mgpu_ops
    from mgpu_ops.tuning.bench import plot

    if arguments.in_place:
        return _in_place(arguments)
    writable(arguments.output, "--output", folder=True)
    found = find(arguments)
    pictures = []
    try:
        for _, what, paths in plot.draw(found.runs, found.rates(mgpu_ops.SPECS), arguments.output):
            pictures.append({"what": what, "files": paths})
            say(f"{what}: {', '.join(map(str, paths))}")
    except OSError as e:
        raise UsageError(f"{arguments.output}: cannot be written ({e.strerror}): name another --output") from None
    if not pictures:
        raise UsageError("there is nothing to draw: no trial has a time, and no entry is measured; tune with `mgpu-tune run`")
    say(count(len(pictures), "picture"))
    answer(arguments, {"sources": found.places, "skipped": found.skipped, "pictures": pictures})
    return OK


def _in_place(arguments: argparse.Namespace) -> int:
    """Draws the pictures of `bench` again, from the CSV files that it wrote."""
    from mgpu_ops.tuning.bench import report, results

    places = [Path(place) for place in arguments.sources or ()]
    if not places or any(place.suffix != ".csv" for place in places) or arguments.op or arguments.gpu or arguments.storage:
        raise UsageError("--in-place draws whole CSV files of `bench`: name them with --from, such as --from results/*.csv")
    pictures = []
    for place in places:
        try:
            paths = report.picture(results.read_csv(place), place.with_suffix(".png"))
        except OSError as e:
            raise UsageError(f"{e.filename or place}: cannot be read or written ({e.strerror}): name another file") from None
        except UnicodeDecodeError:
            raise UsageError(f"{place}: is no text: name a CSV file of `bench`") from None
        pictures.append({"what": str(place), "files": paths})
        say(f"{place}: {', '.join(map(str, paths))}")
    say(count(len(pictures), "picture"))
    answer(arguments, {"sources": places, "skipped": [], "pictures": pictures})
    return OK


def find(arguments: argparse.Namespace) -> Sources:
    """The journals, databases, sweeps and benchmarks that the arguments name."""
    import mgpu_ops
    from mgpu_ops.core import gpu
    from mgpu_ops.tuning.bench import sources

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
