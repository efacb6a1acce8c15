"""`mgpu-tune merge`: joins databases."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_ops.tuning.cli.shared import OK, WRONG, UsageError, answer, command, database_at, is_directory, say
from mgpu_ops.tuning.cli.storages import finished_argument, finished_storage
from mgpu_ops.tuning.terminal import count

if TYPE_CHECKING:
    from mgpu_ops.registry.database import Entry, File
    from mgpu_ops.tuning.fleet.merge import Conflict, Key


def register(commands: Any) -> None:
    parser = command(
        commands,
        "merge",
        run,
        """
        mgpu-tune merge node1.json node2.json --into tuned.json
        mgpu-tune merge node1/ node2/ --into all/ --dry-run
        mgpu-tune merge tuned.json --into ~/.local/share/mgpu_ops/h200/matmul.json
        mgpu-tune merge --storage postgresql://tuner@db.example/studies   # what a fleet has tuned, into your own databases
        mgpu-tune merge --storage --into tuned                            # that of $MGPU_OPS_STORAGE, into a directory
        """,
    )
    parser.add_argument(
        "sources", nargs="*", type=Path, metavar="FILE", help="database files, or directories of <gpu>/<op>.json"
    )
    finished_argument(parser, "also the entries")
    parser.add_argument(
        "--into",
        "--output",
        type=Path,
        metavar="PLACE",
        help="a database file, which is joined too if it exists; or a directory, for files <gpu>/<op>.json "
        "(default, with --storage alone: your own databases)",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be written, and write nothing")


def run(arguments: argparse.Namespace) -> int:
    import mgpu_ops
    from mgpu_ops.registry import database
    from mgpu_ops.tuning.fleet import merge

    where = finished_storage(arguments)
    if not arguments.sources and where is None:
        raise UsageError("name the databases to join, or the --storage of a fleet")
    if arguments.sources and arguments.into is None:
        raise UsageError("name where they go with --into: a database or a directory")
    found = merge.entries_of([*merge.files(arguments.sources, mgpu_ops.SPECS), *shared_files(where)])
    written, every, left_out = [], [], []
    places = _places(list(found), arguments.into)
    for (gpu, op), path in places.items() if not arguments.dry_run else ():
        database.require_writable(path, gpu_key=gpu, op=op)
    for key, path in places.items():

        def join(old: Iterable[Entry], new: Iterable[Entry], key: Key = key) -> tuple[Entry, ...]:
            return merge.best(*(merge.usable(key, entries, mgpu_ops.SPECS)[0] for entries in (old, new)))

        gpu, op = key
        there = database.read(path, gpu_key=gpu, op=op).entries if path.exists() else ()
        good, bad = merge.usable(key, [*there, *found[key]], mgpu_ops.SPECS)
        left_out += [{"gpu": gpu, "op": op, "problem": e.problem, "fault": fault} for e, fault in bad]
        every += [(key, conflict) for conflict in merge.conflicts(good)]
        result = merge.best(good)
        if not arguments.dry_run:  # joined again, under a lock: the file may have changed since
            result = database.update(path, join((), found[key]), gpu_key=gpu, op=op, join=join).entries
        written.append({"path": path, "gpu": gpu, "op": op, "before": len(there), "after": len(result)})
    _tell(written, every, left_out, arguments.dry_run)
    conflicts = [{"gpu": gpu, "op": op, "problem": c.kept.problem, **c._asdict()} for (gpu, op), c in every]
    answer(arguments, {"files": written, "conflicts": conflicts, "left_out": left_out, "dry_run": arguments.dry_run})
    return WRONG if left_out else OK


def shared_files(where: str | None) -> list[tuple[Path, File]]:
    """The entries of a storage, as a file for each GPU and op; says what is left out."""
    if where is None:
        return []
    import mgpu_ops
    from mgpu_ops.tuning import storage
    from mgpu_ops.tuning.fleet import merge

    files, left_out = merge.tuned_in(where, mgpu_ops.SPECS)
    for reason in left_out:
        say(f"left out: {reason}")
    if not files:
        say(f"nothing is tuned in {storage.redact(where)} yet")
    return files


def _places(keys: list[Key], into: Path | None) -> dict[Key, Path]:
    """The file for the entries of each GPU and op: one file, files of a directory, or (None) your own databases."""
    from mgpu_ops.registry import database

    if into is None:
        return {(gpu, op): database.user_path(gpu, op) for gpu, op in keys}
    if is_directory(into):
        return {(gpu, op): database_at(into, gpu, op) for gpu, op in keys}
    if not keys:
        return {}
    if len(keys) > 1:
        several = ", ".join(f"{op} on {gpu}" for gpu, op in keys)
        raise UsageError(f"{into}: one file holds one op on one GPU, and these are {several}: name a directory")
    return {keys[0]: into}


def _tell(
    written: list[dict[str, Any]], conflicts: list[tuple[Key, Conflict]], left_out: list[dict[str, Any]], dry_run: bool
) -> None:
    import mgpu_ops
    from mgpu_ops.registry import database, winner
    from mgpu_ops.tuning.tables import problem_text

    for (gpu, op), (kept, dropped, why) in conflicts:
        ours, theirs = (
            f"{e.evidence.median_us:.4g} us {database.kind(e)} on {e.evidence.date}{winner.text(e, mgpu_ops.SPECS[op])}"
            for e in (kept, dropped)
        )
        say(f"conflict: {op} on {gpu} {problem_text(kept.problem)}: kept {ours}, dropped {theirs} ({why})")
    for entry in left_out:
        say(f"left out: {entry['op']} on {entry['gpu']} {problem_text(entry['problem'])}: {entry['fault']}")
    for file in written:
        verb = "would hold" if dry_run else "holds"
        say(f"{file['path']} {verb} {file['after']} of {file['op']} on {file['gpu']}, {file['before']} before")
    say(f"{count(len(conflicts), 'conflict')}, {len(left_out)} left out")
