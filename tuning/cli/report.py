"""`mgpu-tune report`: one HTML page to look at and to hand on."""

from __future__ import annotations

import argparse
import datetime
import tempfile
from pathlib import Path
from typing import Any

from mgpu_ops.tuning.cli.plot import find, source_arguments
from mgpu_ops.tuning.cli.shared import OK, UsageError, answer, command, say, writable
from mgpu_ops.tuning.terminal import count


def register(commands: Any) -> None:
    parser = command(
        commands,
        "report",
        run,
        """
        mgpu-tune report --output report.html
        mgpu-tune report matmul --gpu h200 --output report.html
        mgpu-tune report --from tuned.json results/2025-11-21-h200-matmul.csv --output report.html
        mgpu-tune report --no-pictures --output report.html
        """,
        needs=("optuna", "matplotlib", "rich"),
    )
    source_arguments(parser)
    parser.add_argument("--no-pictures", action="store_true", help="tables only")
    parser.add_argument(
        "--output", type=Path, default=Path("report.html"), metavar="FILE", help="where to write (default: report.html)"
    )


def run(arguments: argparse.Namespace) -> int:
    import mgpu_ops
    from mgpu_ops.tuning import files
    from mgpu_ops.tuning.bench import page, plot

    writable(arguments.output, "--output")
    found = find(arguments)
    if not (found.files or found.runs or found.rows):
        raise UsageError("there is nothing to report: tune with `mgpu-tune run`, or name what to look at with --from")
    with tempfile.TemporaryDirectory() as folder:
        drawn = plot.draw(found.runs, found.rates(mgpu_ops.SPECS), Path(folder), (".svg",))  # a page embeds no PNG
        pictures = [] if arguments.no_pictures else list(drawn)
        text = page.page(found, mgpu_ops.SPECS, pictures, datetime.date.today().isoformat())
    try:
        files.replace(arguments.output, text.encode())
    except OSError as e:
        raise UsageError(f"{arguments.output}: cannot be written ({e.strerror}): name another --output") from None
    entries = len(found.taken(mgpu_ops.SPECS))
    told = [count(entries, "tuned problem"), count(len(found.runs), "search", "searches")]
    say(f"wrote {arguments.output}: {', '.join(told)}, {count(len(pictures), 'picture')}")
    answer(
        arguments,
        {"file": arguments.output, "sources": found.places, "skipped": found.skipped, "entries": entries}
        | {"searches": len(found.runs), "pictures": len(pictures)},
    )
    return OK
