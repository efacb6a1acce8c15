"""`mgpu-tune diff`: says what differs between two databases."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_ops.tuning.cli.shared import OK, answer, command, say

if TYPE_CHECKING:
    from mgpu_ops.registry.database import Entry
    from mgpu_ops.registry.spec import OpSpec


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
        if d.op in mgpu_ops.SPECS and (versus := _versus(mgpu_ops.SPECS[d.op], d.before, d.after)):
            say(f"         {versus}")
    kinds = [d.what for d in found]
    say(", ".join(f"{kinds.count(kind)} {kind}" for kind in ("added", "removed", "changed")))
    rows = [
        {"gpu": d.gpu, "op": d.op, "what": d.what, "problem": d.entry.problem, "kind": d.entry.evidence.kind}
        | {"before": d.before, "after": d.after, "ratio": d.ratio}
        for d in found
    ]
    answer(arguments, {"differences": rows})
    return OK


def _versus(spec: OpSpec, before: Entry | None, after: Entry | None) -> str:
    """What a call runs by the entries, if one of them says XLA: "kernel -> xla: kernel 12 us, xla 11 us, measured"."""
    from mgpu_ops.registry import winner

    entries = [entry for entry in (before, after) if entry]
    runs = [winner.of_entry(entry, spec) or "what the models choose" for entry in entries]
    text = "".join(winner.text(entry, spec) for entry in entries[-1:]).partition(": ")[2]
    told = " -> ".join(dict.fromkeys(runs))
    return f"runs {told}{f': {text}' if text else ''}" if "xla" in runs else ""
