"""`mgpu-tune validate`: checks database files."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mgpu_ops.tuning.commands import OK, WRONG, answer, command, count, say, stored_files


def register(commands: Any) -> None:
    parser = command(
        commands,
        "validate",
        run,
        "check database files: schema, fields, and that every config can run",
        """
        mgpu-tune validate
        mgpu-tune validate tuned.json configs/h200/matmul.json
        mgpu-tune validate --stale   # then: mgpu-tune retune --stale
        """,
    )
    parser.add_argument("files", nargs="*", type=Path, help="default: your own and the shipped ones")
    parser.add_argument("--stale", action="store_true", help="also list what another jax or kernel version was tuned for")


def run(arguments: argparse.Namespace) -> int:
    import mgpu_ops
    from mgpu_ops.core import gpu

    files = list(arguments.files)
    if not files:
        keys = [g.key for g in gpu.GPUS]
        files = [path for spec in mgpu_ops.SPECS.values() for _, _, path in stored_files(spec, keys)]
    found = [{"path": path, "faults": faults_of(path, arguments.stale)} for path in files]
    for file in found:
        faults = file["faults"]
        say(f"{file['path']}: {count(len(faults), 'fault') if faults else 'ok'}")
        for fault in faults:
            say(f"  {fault}")
    answer(arguments, {"files": found})
    return WRONG if any(file["faults"] for file in found) else OK


def faults_of(path: Path, stale: bool) -> list[str]:
    """What is wrong with a database file, with `stale` also which entries are out of date; a line each."""
    import mgpu_ops
    from mgpu_ops.core import database

    try:
        file = database.read(path)
    except database.DatabaseError as e:
        return [e.reason]
    spec = mgpu_ops.SPECS.get(file.op)
    if spec is None:
        return [*database.validate(path, None), f"op {file.op!r} is not one of {', '.join(mgpu_ops.SPECS)}"]
    # An entry of another kernel version is a fault anyway.
    of_today = [e for e in file.entries if e.evidence.kernel_version == spec.version] if stale else []
    old = [(e, reason) for e in of_today if (reason := database.stale(e, spec))]
    lines = [f"{path}: {e.evidence.kind} {e.problem}: {reason}: `mgpu-tune retune --stale`" for e, reason in old]
    return [*database.validate(path, spec), *lines]
