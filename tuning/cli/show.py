"""`mgpu-tune show`: lists what is tuned."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mgpu_ops.tuning.cli.shared import OK, WRONG, answer, command, say
from mgpu_ops.tuning.terminal import count

if TYPE_CHECKING:
    from mgpu_ops.registry.database import Entry
    from mgpu_ops.registry.spec import OpSpec


def register(commands: Any) -> None:
    parser = command(
        commands,
        "show",
        run,
        """
        mgpu-tune show
        mgpu-tune show matmul --gpu h200
        mgpu-tune show --json | jq '.files[].entries[].problem'
        """,
        needs=("rich",),
    )
    parser.add_argument("op", nargs="?", help="an op (default: all)")
    parser.add_argument("--gpu", help="which GPU: h200, h100-sxm ... (default: the one here, else all that have entries)")


def run(arguments: argparse.Namespace) -> int:
    import mgpu_ops
    from mgpu_ops.core import gpu
    from mgpu_ops.registry import database

    specs = [mgpu_ops.spec_of(arguments.op)] if arguments.op else list(mgpu_ops.SPECS.values())
    here = gpu.find(arguments.gpu) if arguments.gpu else gpu.current()
    keys = [here.key] if here else [g.key for g in gpu.GPUS]
    found: list[dict[str, Any]] = []
    tuned: dict[str, set[str]] = {}  # op -> its problems on each GPU, as text
    for spec in specs:
        for key, whose, path in database.existing_files(keys, spec.name):
            file = {"op": spec.name, "gpu": key, "whose": whose, "path": path}
            try:
                entries = database.read(path, gpu_key=key, op=spec.name).entries
            except database.DatabaseError as e:
                say(f"mgpu-tune: {e}")
                found.append(file | {"fault": e.reason})
                continue
            found.append(file | {"entries": entries})
            tuned.setdefault(spec.name, set()).update(f"{key} {database.key_of_fields(entry.problem)}" for entry in entries)
            _show(spec, f"{spec.name} on {key}, {whose}: {path}", entries)
    if not found:
        say(f"nothing is tuned for {', '.join(keys)}: `mgpu-tune run` stores in {database.user_path(keys[0], specs[0].name)}")
    counts = {op: len(problems) for op, problems in tuned.items()}
    if counts:
        say(f"{count(sum(counts.values()), 'tuned problem')}: {', '.join(f'{n} of {op}' for op, n in counts.items())}")
    answer(arguments, {"files": found, "problems": counts})
    return WRONG if any("fault" in file for file in found) else OK


def _show(spec: OpSpec, title: str, entries: Sequence[Entry]) -> None:
    """A table on a terminal, else a line for each entry."""
    from mgpu_ops.tuning import tables, terminal

    console, ordered = terminal.console(), tables.by_problem(entries, spec)
    if console.is_terminal:
        console.print(tables.entries_table(title, ordered, spec))
    else:
        say(title)
        for line in tables.entries_lines(ordered, spec):
            say(f"  {line}")
    if tables.between_gpus(spec):
        say(f"  {tables.BETWEEN_GPUS}")
