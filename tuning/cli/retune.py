"""`mgpu-tune retune`: tunes again what is stored."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mgpu_ops.tuning.cli.run import search_arguments, studies_of, tune_all
from mgpu_ops.tuning.cli.shared import OK, WRONG, answer, command, count, say
from mgpu_ops.tuning.devices import devices_for


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
        mgpu-tune retune --stale --workers all               # on every GPU of this machine
        mgpu-tune retune all_reduce --stale                  # on as many GPUs as its problems take: by itself only
        mgpu-tune retune --database tuned.json --trials 64   # all that is in it
        mgpu-tune retune --stale --gpu h200   # no such GPU here: modelled, and said so
        """,
        needs=("optuna", "rich"),
    )
    parser.add_argument("op", nargs="?", help="an op; all by default")
    parser.add_argument("--stale", action="store_true", help="only problems with no entry for this jax and kernel version")
    search_arguments(parser)
    parser.add_argument(
        "--database", type=Path, metavar="FILE", help="what to tune again (default: yours and the shipped, stored in yours)"
    )


def run(arguments: argparse.Namespace) -> int:
    import mgpu_ops
    from mgpu_ops.registry import database

    specs = [mgpu_ops.spec_of(arguments.op)] if arguments.op else list(mgpu_ops.SPECS.values())
    given = database.read(arguments.database) if arguments.database else None
    arguments.gpu = arguments.gpu or (given.gpu if given else None)
    told: list[dict[str, Any]] = []
    gpus = _gpus(specs[0], given) if arguments.op else 1
    with studies_of(arguments) as studies, devices_for(arguments.gpu, arguments.workers, gpus, say=say) as devices:
        gpu, kind = devices[0].gpu, devices[0].kind
        paths = {spec.name: arguments.database or database.user_path(gpu.key, spec.name) for spec in specs}
        work, skipped = _work(specs, gpu.key, given, kind, gpus, arguments)
        for op in {w.op for w in work}:
            database.require_writable(paths[op], gpu_key=gpu.key, op=op)
        code = tune_all(work, devices, paths, studies, arguments, told) if work else OK
    tuned = [{"op": t["op"], "problem": t["problem"]} for t in told if t.get("entry")]
    failed = [{"op": t["op"], "name": t["name"]} for t in told if not t.get("entry")]
    say(f"{count(len(tuned), 'problem')} tuned again, {len(failed)} failed, {len(skipped)} skipped")
    answer(arguments, {"kind": kind, "tuned": tuned, "failed": failed, "skipped": skipped})
    return max(code, WRONG) if skipped else code


def _gpus(spec: Any, given: Any) -> int:
    """The most GPUs that a stored problem of the op takes, of those numbers that are here."""
    from mgpu_ops.core import gpu
    from mgpu_ops.registry import database
    from mgpu_ops.tuning import neighbours

    paths = [path for _, _, path in database.existing_files([g.key for g in gpu.GPUS], spec.name)]
    files = [given] if given is not None else [database.read(path) for path in paths]
    taken = {1}
    for entry in (entry for file in files for entry in file.entries):
        with contextlib.suppress(ValueError):  # of another kernel version; `_work` says so
            taken.add(spec.devices(database.to_problem(spec, entry.problem)))
    return max(number for number in taken if number <= max(1, len(neighbours.visible())))


def _work(
    specs: Iterable[Any], gpu_key: str, given: Any, kind: str, gpus: int, arguments: argparse.Namespace
) -> tuple[list[Any], list[dict[str, Any]]]:
    """The tuning jobs of what is stored for a GPU, or in the file that is given, and what can no longer be tuned."""
    from mgpu_ops.core import gpu
    from mgpu_ops.registry import database
    from mgpu_ops.tuning.labels import describe
    from mgpu_ops.tuning.problems import TuningJob
    from mgpu_ops.tuning.tuner import check_supported

    found, skipped = [], []
    for spec in specs:
        paths = [path for _, _, path in database.existing_files([gpu_key], spec.name)]
        if given is not None:
            paths = [arguments.database] if given.op == spec.name else []
        entries = [e for path in paths for e in database.read(path, gpu_key=gpu_key, op=spec.name).entries]
        for fields in _problems(spec, entries, kind, arguments.stale):
            try:
                problem = database.to_problem(spec, fields)
                check_supported(spec, problem, gpu.find(gpu_key))
                if kind == "measured" and (takes := spec.devices(problem)) > gpus:
                    raise ValueError(f"{describe(problem)} takes {takes} GPUs: retune {spec.name} by itself where so many are")
            except ValueError as e:  # of a kernel version whose problems were others
                say(f"skipped: {e}")
                skipped.append({"op": spec.name, "problem": fields, "reason": str(e)})
            else:
                found.append(TuningJob(spec.name, problem, 1, describe(problem)))
    return found, skipped


def _problems(spec: Any, entries: Iterable[Any], kind: str, stale: bool) -> list[dict[str, Any]]:
    """The problems of the entries, each once; with `stale` those that have no entry, as good as a new one, of today."""
    from mgpu_ops.registry import database

    entries = list(entries)
    fresh = [e.problem for e in entries if not database.stale(e, spec) and e.evidence.kind in ("measured", kind)]
    problems: list[dict[str, Any]] = []
    for entry in entries:
        if entry.problem not in problems and not (stale and entry.problem in fresh):
            problems.append(entry.problem)
    return problems
