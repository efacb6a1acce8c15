"""`mgpu-tune diff`: says what differs between two databases."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mgpu_ops.tuning.cli.shared import OK, answer, command, say


def register(commands: Any) -> None:
    parser = command(
        commands,
        "diff",
        run,
        """
        mgpu-tune diff before.json after.json
        mgpu-tune diff configs/ ~/.local/share/mgpu_ops
        """,
    )
    for side in ("before", "after"):
        parser.add_argument(side, type=Path, help="a database file, or a directory with files <gpu>/<op>.json")


def run(arguments: argparse.Namespace) -> int:
    import mgpu_ops
    from mgpu_ops.registry import database
    from mgpu_ops.tuning.fleet import merge
    from mgpu_ops.tuning.tables import problem_text

    before, after = (merge.entries_of(merge.files([side], mgpu_ops.SPECS)) for side in (arguments.before, arguments.after))
    found = merge.differences(before, after)
    for d in found:
        times = " -> ".join(f"{e.evidence.median_us:.4g} us" for e in (d.before, d.after) if e)
        ratio = f" ({d.ratio:.3f}x as fast)" if d.ratio else ""
        problem = problem_text(d.entry.problem, mgpu_ops.SPECS.get(d.op))
        say(f"{d.what:7}  {d.op} on {d.gpu} {problem}: {database.kind(d.entry)} {times}{ratio}")
        if d.before and d.after:
            old, new = d.before.config, d.after.config
            moved = [f"{k} {old.get(k)} -> {new.get(k)}" for k in {**old, **new} if old.get(k) != new.get(k)]
            say(f"         {', '.join(moved) or 'the same config'}")
    kinds = [d.what for d in found]
    say(", ".join(f"{kinds.count(kind)} {kind}" for kind in ("added", "removed", "changed")))
    rows = [
        {"gpu": d.gpu, "op": d.op, "what": d.what, "problem": d.entry.problem, "kind": d.entry.evidence.kind}
        | {"before": d.before, "after": d.after, "ratio": d.ratio}
        for d in found
    ]
    answer(arguments, {"differences": rows})
    return OK
