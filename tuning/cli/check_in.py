"""`mgpu-tune check-in`: checks a folder of databases before others get it."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_ops.tuning.cli.shared import OK, WRONG, UsageError, answer, command, say
from mgpu_ops.tuning.cli.validate import counted, faults_of, stale_of
from mgpu_ops.tuning.terminal import count

if TYPE_CHECKING:
    from mgpu_ops.registry.database import Entry

WIDEST = 0.2  # of the median: a spread above it does not measure the config, unless XLA is faster by more than the spread
_SAME = 0.01  # how far the median of the samples may be off the stored one


def register(commands: Any) -> None:
    parser = command(
        commands,
        "check-in",
        run,
        """
        mgpu-tune check-in tuned                # then: git add tuned
        mgpu-tune check-in mgpu_ops/configs     # what comes with mgpu_ops
        """,
    )
    parser.add_argument("folder", type=Path, help="of files <gpu>/<op>.json, as `mgpu-tune export` writes them")


def run(arguments: argparse.Namespace) -> int:
    folder = arguments.folder
    if not folder.is_dir():
        raise UsageError(f"{folder}: {'is a file: name its folder' if folder.exists() else 'no such folder'}")
    files = sorted({*folder.glob("*.json"), *folder.glob("*/*.json")})
    if not files:
        raise UsageError(f"{folder}: holds no database: they are <gpu>/<op>.json")
    found: list[dict[str, Any]] = []
    for path in files:
        faults, stale = [*_beyond_validate(path, folder), *faults_of(path)], stale_of(path)
        said = count(len(faults), "fault") if faults else f"{_summary(path)}{counted(stale)}"
        say(f"{path.relative_to(folder)}: {said}")
        for line in faults:
            say(f"  {line}")
        found.append({"path": path, "faults": faults, "stale": stale})
    answer(arguments, {"files": found})
    return WRONG if any(file["faults"] for file in found) else OK


def _summary(path: Path) -> str:
    from mgpu_ops.registry import database

    entries = database.read(path).entries
    gpus = ", ".join(sorted({entry.evidence.gpu for entry in entries}))
    number = count(len(entries), "entry", "entries")
    return f"{number}, all measured on {gpus}" if entries else number


def _beyond_validate(path: Path, folder: Path) -> Iterator[str]:
    """What `faults_of` leaves out, a line each: why no call finds the file, and what the evidence of its entries lacks."""
    from mgpu_ops.registry import database

    try:
        file = database.read(path)
    except database.DatabaseError:
        return  # `faults_of` says so
    place = Path(file.gpu) / f"{file.op}.json"
    if path.relative_to(folder) != place:
        yield f"no call looks here: move it to {place}"
    for entry in file.entries:
        for fault in evidence_faults(entry):
            yield f"{database.title(entry)}: {fault}"


def evidence_faults(entry: Entry) -> Iterator[str]:
    """What the evidence of an entry lacks, so that others cannot rely on it."""
    e = entry.evidence
    if e.kind == "modelled":
        yield "modelled, not measured: tune it on the GPU"
        return
    known = {"with which driver": e.driver, "with which CUDA": e.cuda}
    yield from (f"does not say {what}: measure again" for what, value in known.items() if not value)
    times = {"a baseline": e.baseline_us, "the default config": e.default_us or e.previous_us}
    yield from (f"has no time of {what} from the same run: measure again" for what, us in times.items() if us is None)
    if e.previous_us is not None and e.median_us > e.previous_us:
        yield f"{e.median_us:.4g} us are more than the {e.previous_us:.4g} us of the config stored before: measure again"
    if e.error is None:
        yield "has no error against the reference: measure again"
    xla_anyway = e.baseline_us is not None and e.median_us - e.spread_us > e.baseline_us
    if e.spread_us > WIDEST * e.median_us and not xla_anyway:
        wide = f"spread of {e.spread_us:.4g} us is more than {WIDEST * 100:.0f} % of {e.median_us:.4g} us"
        yield f"{wide}: measure again, with nothing else on the GPU"
    if e.samples_us and abs(statistics.median(e.samples_us) - e.median_us) > _SAME * e.median_us:
        yield f"the median of its samples is {statistics.median(e.samples_us):.4g} us, not {e.median_us:.4g}: measure again"
