"""`mgpu-tune validate`: checks database files."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mgpu_ops.tuning.commands import OK, WRONG, command, count, say, stored_files


def register(commands: Any) -> None:
    parser = command(
        commands,
        "validate",
        run,
        "check database files: schema, fields, and that every config can run",
        """
        mgpu-tune validate
        mgpu-tune validate tuned.json configs/h200/matmul.json
        """,
    )
    parser.add_argument("files", nargs="*", type=Path, help="default: your own and the shipped ones")


def run(arguments: argparse.Namespace) -> int:
    import mgpu_ops
    from mgpu_ops.core import database, gpu

    files = list(arguments.files)
    if not files:
        keys = [g.key for g in gpu.GPUS]
        files = [path for spec in mgpu_ops.SPECS.values() for _, _, path in stored_files(spec, keys)]
    bad = 0
    for path in files:
        try:
            file = database.read(path)
            faults = database.validate(path, mgpu_ops.SPECS.get(file.op))
            if file.op not in mgpu_ops.SPECS:
                faults.append(f"op {file.op!r} is not one of {', '.join(mgpu_ops.SPECS)}")
        except database.DatabaseError as e:
            faults = [e.reason]
        bad += bool(faults)
        say(f"{path}: {count(len(faults), 'fault') if faults else 'ok'}")
        for fault in faults:
            say(f"  {fault}")
    return WRONG if bad else OK
