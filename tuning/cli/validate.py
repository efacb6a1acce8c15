"""`mgpu-tune validate`: checks database files."""

from __future__ import annotations

import argparse
import collections
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mgpu_ops.tuning.cli.shared import OK, WRONG, UsageError, answer, command, say
from mgpu_ops.tuning.terminal import count


def register(commands: Any) -> None:
    parser = command(
        commands,
        "validate",
        run,
        """
        mgpu-tune validate
        mgpu-tune validate tuned.json configs/h200/matmul.json
        mgpu-tune validate tuned               # a folder: its <gpu>/<op>.json
        mgpu-tune validate --stale             # then: mgpu-tune retune --stale
        mgpu-tune validate --stale --details   # each entry
        """,
    )
    parser.add_argument(
        "files",
        nargs="*",
        type=Path,
        help="database files, or folders of <gpu>/<op>.json (default: your own and the shipped ones)",
    )
    parser.add_argument(
        "--stale",
        action="store_true",
        help="also count the entries that were tuned with another jax; calls use them all the same",
    )
    parser.add_argument("--details", action="store_true", help="with --stale: list them")


def run(arguments: argparse.Namespace) -> int:
    import mgpu_ops
    from mgpu_ops.core import gpu
    from mgpu_ops.registry import database

    if arguments.details and not arguments.stale:
        raise UsageError("--details lists what --stale counts: say --stale too")
    files = [file for place in arguments.files for file in (databases_in(place) if place.is_dir() else [place])]
    if not files:
        keys = [g.key for g in gpu.GPUS]
        files = [path for spec in mgpu_ops.SPECS.values() for _, _, path in database.existing_files(keys, spec.name)]
    found: list[dict[str, Any]] = []
    for path in files:
        faults, old = faults_of(path), stale_of(path) if arguments.stale else []
        say(f"{path}: {count(len(faults), 'fault') if faults else 'ok'}{counted(old)}{_left_to_xla(path)}")
        for line in faults + (old if arguments.details else []):
            say(f"  {line}")
        found.append({"path": path, "faults": faults} | ({"stale": old} if arguments.stale else {}))
    number = sum(len(file.get("stale", ())) for file in found)
    if number:
        say(f"{count(number, 'entry', 'entries')} of another jax: used all the same; "
            "`mgpu-tune retune --stale` tunes them again")  # fmt: skip
    answer(arguments, {"files": found})
    return WRONG if any(file["faults"] for file in found) else OK


def databases_in(folder: Path) -> list[Path]:
    """The databases of a folder: <gpu>/<op>.json; the folder itself, which is none, where it has none."""
    return sorted(folder.glob("*/*.json")) or [folder]


def counted(old: Sequence[str]) -> str:
    """How many entries of a file there are for each reason."""
    reasons = collections.Counter(line.rpartition(": ")[2] for line in old)
    return "".join(f"; {number} {reason}" for reason, number in reasons.items())


def _left_to_xla(path: Path) -> str:
    """For how many problems of a database file XLA is faster, and runs; `mgpu-tune show` has the times."""
    import mgpu_ops
    from mgpu_ops.registry import database, winner

    try:
        file = database.read(path)
    except database.DatabaseError:
        return ""
    spec = mgpu_ops.SPECS.get(file.op)
    number = sum(winner.of_entry(entry, spec) == "xla" for entry in file.entries) if spec else 0
    return f"; {number} of {len(file.entries)} run XLA, which is faster" if number else ""


def faults_of(path: Path) -> list[str]:
    """What is wrong with a database file, a line for each fault."""
    import mgpu_ops
    from mgpu_ops.registry import database

    try:
        file = database.read(path)
    except database.DatabaseError as e:
        return [e.reason]
    spec = mgpu_ops.SPECS.get(file.op)
    if spec is None:
        return [*database.validate(path, None), f"op {file.op!r} is not one of {', '.join(mgpu_ops.SPECS)}"]
    return database.validate(path, spec)


def stale_of(path: Path) -> list[str]:
    """Which entries of a database file were tuned with another jax, a line each. One of another kernel version is a fault."""
    import mgpu_ops
    from mgpu_ops.registry import database

    try:
        file = database.read(path)
    except database.DatabaseError:
        return []
    if (spec := mgpu_ops.SPECS.get(file.op)) is None:
        return []
    of_today = [e for e in file.entries if e.evidence.kernel_version == spec.version]
    return [f"{database.title(e)}: {reason}" for e in of_today if (reason := database.stale(e, spec))]
