"""`mgpu-tune show`: lists what is tuned."""

from __future__ import annotations

import argparse
from typing import Any

from mgpu_ops.tuning.commands import OK, WRONG, answer, command, say, stored_files


def register(commands: Any) -> None:
    parser = command(
        commands,
        "show",
        run,
        "list the tuned problems of a GPU",
        """
        mgpu-tune show
        mgpu-tune show matmul --gpu h200
        mgpu-tune show --json | jq '.files[].entries[].problem'
        """,
    )
    parser.add_argument("op", nargs="?", help="an op; all by default")
    parser.add_argument("--gpu", help="h200, h100-sxm ...; default: the one here, else all that have entries")


def run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    import mgpu_ops
    from mgpu_ops.core import database, gpu
    from mgpu_ops.tuning import tables

    specs = [mgpu_ops.spec_of(arguments.op)] if arguments.op else list(mgpu_ops.SPECS.values())
    here = gpu.find(arguments.gpu) if arguments.gpu else gpu.current()
    keys = [here.key] if here else [g.key for g in gpu.GPUS]
    console, found = Console(), []
    for spec in specs:
        for key, whose, path in stored_files(spec, keys):
            file = {"op": spec.name, "gpu": key, "whose": whose, "path": path}
            try:
                entries = database.read(path, gpu_key=key, op=spec.name).entries
            except database.DatabaseError as e:
                say(f"mgpu-tune: {e}")
                found.append(file | {"fault": e.reason})
                continue
            found.append(file | {"entries": entries})
            console.print(tables.entries_table(f"{spec.name} on {key}, {whose}: {path}", entries))
    if not found:
        say(f"nothing is tuned for {', '.join(keys)}: `mgpu-tune run` stores in {database.user_path(keys[0], specs[0].name)}")
    answer(arguments, {"files": found})
    return WRONG if any("fault" in file for file in found) else OK
