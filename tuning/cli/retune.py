"""`mgpu-tune retune`: tunes stored problems again."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_ops.tuning.cli.run import options_of, search_arguments
from mgpu_ops.tuning.cli.session import Session, studies_of
from mgpu_ops.tuning.cli.shared import OK, WRONG, answer, command, say
from mgpu_ops.tuning.devices import devices_for
from mgpu_ops.tuning.terminal import count

if TYPE_CHECKING:
    from mgpu_ops.registry.database import Entry, File
    from mgpu_ops.registry.spec import OpSpec
    from mgpu_ops.tuning.device import Device
    from mgpu_ops.tuning.problems import TuningJob


def register(commands: Any) -> None:
    parser = command(
        commands,
        "retune",
        run,
        """
        mgpu-tune validate --stale            # what would be tuned again
        mgpu-tune retune --stale              # on the GPU here
        mgpu-tune retune matmul --stale --budget 30s
        mgpu-tune retune --stale --workers all               # on every GPU of this machine
        mgpu-tune retune all_reduce --stale                  # a collective, on as many GPUs as its problems take: name it alone
        mgpu-tune retune --database tuned.json --trials 64   # every problem of the file
        mgpu-tune retune --stale --gpu h200   # no such GPU here: by the cost model
        """,
        needs=("optuna", "rich"),
    )
    parser.add_argument("op", nargs="?", help="an op (default: all)")
    parser.add_argument("--stale", action="store_true", help="only problems with no entry for this jax and kernel version")
    search_arguments(parser)
    parser.add_argument(
        "--database",
        type=Path,
        metavar="FILE",
        help="tune the problems of this file, and store in it (default: of your own and the shipped ones, in your own)",
    )


def run(arguments: argparse.Namespace) -> int:
    import mgpu_ops
    from mgpu_ops.registry import database

    specs = [mgpu_ops.spec_of(arguments.op)] if arguments.op else list(mgpu_ops.SPECS.values())
    given = database.read(arguments.database) if arguments.database else None
    arguments.gpu = arguments.gpu or (given.gpu if given else None)
    gpus = _gpus(specs[0], given) if arguments.op else 1
    with studies_of(arguments) as studies, devices_for(arguments.gpu, arguments.workers, gpus, say=say) as devices:
        gpu, kind = devices[0].gpu, devices[0].kind
        paths = {spec.name: arguments.database or database.user_path(gpu.key, spec.name) for spec in specs}
        jobs: list[TuningJob] = []
        skipped: list[dict[str, Any]] = []
        for spec in specs:
            stored = _entries(spec, gpu.key, given, arguments)
            entries = [entry for entry in stored if entry.evidence.objective == arguments.objective]
            jobs += _jobs(spec, _problems(spec, entries, kind, arguments.stale), devices[0], gpus, skipped)
        for op in {job.op for job in jobs}:
            database.require_writable(paths[op], gpu_key=gpu.key, op=op)
        session = Session(options_of(arguments), paths, studies)
        code = session.tune_all(jobs, devices) if jobs else OK
    tuned = [{"op": result["op"], "problem": result["problem"]} for result in session.results if result.get("entry")]
    failed = [{"op": result["op"], "name": result["name"]} for result in session.results if not result.get("entry")]
    say(f"{count(len(tuned), 'problem')} tuned again, {len(failed)} failed, {len(skipped)} skipped")
    answer(arguments, {"kind": kind, "tuned": tuned, "failed": failed, "skipped": skipped})
    return max(code, WRONG) if skipped else code


def _gpus(spec: OpSpec, given: File | None) -> int:
    """The most GPUs that a stored problem of the op takes and that are here."""
    from mgpu_ops.core import gpu
    from mgpu_ops.registry import database
    from mgpu_ops.tuning import neighbours

    paths = [path for _, _, path in database.existing_files([g.key for g in gpu.GPUS], spec.name)]
    files = [given] if given is not None else [database.read(path) for path in paths]
    taken = {1}
    for entry in (entry for file in files for entry in file.entries):
        with contextlib.suppress(ValueError):  # of another kernel version; `_jobs` says so
            taken.add(spec.devices(database.to_problem(spec, entry.problem)))
    return max(number for number in taken if number <= max(1, len(neighbours.visible())))


def _entries(spec: OpSpec, gpu_key: str, given: File | None, arguments: argparse.Namespace) -> list[Entry]:
    """What is stored of the op for a GPU; of the file that is given alone, if one is."""
    from mgpu_ops.registry import database

    paths = [path for _, _, path in database.existing_files([gpu_key], spec.name)]
    if given is not None:
        paths = [arguments.database] if given.op == spec.name else []
    return [entry for path in paths for entry in database.read(path, gpu_key=gpu_key, op=spec.name).entries]


def _problems(spec: OpSpec, entries: Sequence[Entry], kind: str, stale: bool) -> list[Mapping[str, Any]]:
    """The fields of the entries' problems, each problem once.

    With `stale`, a problem is left out that has an entry for this jax and kernel version, measured or of this kind.
    """
    from mgpu_ops.registry import database

    fresh = [e.problem for e in entries if not database.stale(e, spec) and e.evidence.kind in ("measured", kind)]
    problems: list[Mapping[str, Any]] = []
    for entry in entries:
        if entry.problem not in problems and not (stale and entry.problem in fresh):
            problems.append(entry.problem)
    return problems


def _jobs(
    spec: OpSpec, problems: Iterable[Mapping[str, Any]], device: Device, gpus: int, skipped: list[dict[str, Any]]
) -> list[TuningJob]:
    """The tuning jobs of these problems; `skipped` gets those that can no longer be tuned, or not here."""
    from mgpu_ops.registry import database
    from mgpu_ops.tuning.labels import describe
    from mgpu_ops.tuning.problems import TuningJob
    from mgpu_ops.tuning.tuner import check_supported

    found = []
    for fields in problems:
        try:
            problem = database.to_problem(spec, fields)
            check_supported(spec, problem, device.gpu)
            if device.kind == "measured" and (takes := spec.devices(problem)) > gpus:
                raise ValueError(f"{describe(problem)} takes {takes} GPUs: retune {spec.name} by itself where so many are")
        except ValueError as e:  # of a kernel version whose problems were others
            say(f"skipped: {e}")
            skipped.append({"op": spec.name, "problem": fields, "reason": str(e)})
        else:
            found.append(TuningJob(spec.name, problem, 1, describe(problem)))
    return found
