"""`mgpu-tune retune`: tunes again what is stored."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mgpu_ops.tuning.commands import INTERRUPTED, OK, WRONG, answer, command, count, device_for, say, stored_files
from mgpu_ops.tuning.commands.arguments import positive_int, seconds, seed


def register(commands: Any) -> None:
    parser = command(
        commands,
        "retune",
        run,
        "tune again what another jax or kernel version left in your database",
        """
        mgpu-tune validate --stale            # what that would be
        mgpu-tune retune --stale              # on the GPU here
        mgpu-tune retune matmul --stale --budget 30s
        mgpu-tune retune --database tuned.json --trials 64   # all that is in it
        mgpu-tune retune --stale --gpu h200   # no such GPU here: modelled, and said so
        """,
    )
    parser.add_argument("op", nargs="?", help="an op; all by default")
    parser.add_argument("--stale", action="store_true", help="only problems with no entry for this jax and kernel version")
    parser.add_argument("--trials", type=positive_int, default=32, metavar="N", help="candidates a problem (default 32)")
    parser.add_argument(
        "--budget", type=seconds, default=math.inf, metavar="TIME", help="a problem, e.g. 60s, 2m (default: no limit)"
    )
    parser.add_argument("--seed", type=seed, default=0, help="of the inputs and of the search (default 0)")
    parser.add_argument("--gpu", help="tune for this GPU, by the model unless it is the one here: h200, h100-sxm ...")
    parser.add_argument(
        "--database", type=Path, metavar="FILE", help="what to tune again (default: yours and the shipped, stored in yours)"
    )


def run(arguments: argparse.Namespace) -> int:
    import mgpu_ops
    from mgpu_ops.core import database
    from mgpu_ops.tuning.bench import describe
    from mgpu_ops.tuning.commands.run import tune_one

    wanted = [mgpu_ops.spec_of(arguments.op)] if arguments.op else list(mgpu_ops.SPECS.values())
    given = database.read(arguments.database) if arguments.database else None
    device = device_for(arguments.gpu or (given.gpu if given else None))
    tuned: list[Any] = []
    failed: list[Any] = []
    skipped: list[Any] = []
    try:
        for spec in wanted:
            own = database.user_path(device.gpu.key, spec.name)
            paths = [path for _, _, path in stored_files(spec, [device.gpu.key])]
            if given is not None:
                own, paths = arguments.database, [arguments.database] if given.op == spec.name else []
            entries = [e for path in paths for e in database.read(path, gpu_key=device.gpu.key, op=spec.name).entries]
            for fields in _problems(spec, entries, device.kind, arguments.stale):
                try:
                    problem = database.to_problem(spec, fields)
                except ValueError as e:  # of a kernel version whose problems were others
                    say(f"skipped: {e}")
                    skipped.append({"op": spec.name, "problem": fields, "reason": str(e)})
                    continue
                code = tune_one(
                    spec, describe(problem), problem, device, own, arguments.trials, arguments.budget, arguments.seed
                )
                (tuned if code == OK else failed).append({"op": spec.name, "problem": problem})
                if code == INTERRUPTED:
                    return code
        say(f"{count(len(tuned), 'problem')} tuned again, {len(failed)} failed, {len(skipped)} skipped")
        answer(arguments, {"kind": device.kind, "tuned": tuned, "failed": failed, "skipped": skipped})
        return WRONG if failed or skipped else OK
    finally:
        device.close()


def _problems(spec: Any, entries: Iterable[Any], kind: str, stale: bool) -> list[dict[str, Any]]:
    """The problems of the entries, each once; with `stale` those that have no entry, as good as a new one, of today."""
    from mgpu_ops.core import database

    entries = list(entries)
    fresh = [e.problem for e in entries if not database.stale(e, spec) and e.evidence.kind in ("measured", kind)]
    problems: list[dict[str, Any]] = []
    for entry in entries:
        if entry.problem not in problems and not (stale and entry.problem in fresh):
            problems.append(entry.problem)
    return problems
