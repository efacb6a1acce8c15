"""`mgpu-tune run`: tunes problems and stores the best configs."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_ops.tuning.cli.arguments import positive_int, problem_arguments, seconds, seed, workers_argument
from mgpu_ops.tuning.cli.selection import jobs_of, runnable, supported
from mgpu_ops.tuning.cli.session import ALL, Session, studies_of
from mgpu_ops.tuning.cli.shared import OK, UsageError, answer, command, database_at, gpu_or_current, is_directory, say
from mgpu_ops.tuning.cli.storages import required_storage, storage_argument
from mgpu_ops.tuning.devices import devices_for
from mgpu_ops.tuning.options import OBJECTIVES, SAMPLERS, TRIALS, TuneOptions
from mgpu_ops.tuning.terminal import count

if TYPE_CHECKING:
    from mgpu_ops.core.gpu import Gpu
    from mgpu_ops.tuning.problems import TuningJob


def register(commands: Any) -> None:
    parser = command(
        commands,
        "run",
        run,
        """
        mgpu-tune run matmul --m 4096 --n 4096 --k 4096 --dtype bf16
        mgpu-tune run matmul --shape llama3-8b-qkv-128 --trials 64 --budget 60s
        mgpu-tune run matmul --suite llm --budget 30s --database tuned.json
        mgpu-tune run grouped_matmul --suite moe --budget 60s
        mgpu-tune run grouped_matmul --m 16384 --n 28672 --k 4096 --groups 8 --spread skewed --dtype bf16
        mgpu-tune run ragged_contraction --suite mixtral-8x7b
        mgpu-tune run flash_attention --suite llm --budget 60s
        mgpu-tune run flash_attention_backward --shape llama3-8b-8192-causal
        mgpu-tune run --suite llama3-8b --tokens 1,16,4096              # all ops of a model, what takes most time first
        mgpu-tune run --suite mixtral-8x7b --tokens 4096 --grad         # and its gradients
        mgpu-tune run --from problems.json                              # what `mgpu-tune capture` found in your program
        mgpu-tune run --from problems.json --database tuned             # the same, into files tuned/<gpu>/<op>.json
        mgpu-tune run matmul --suite llm --workers all                  # on every GPU of this machine
        mgpu-tune run all_reduce --devices 4 --bytes 1KiB:256MiB        # between four GPUs of this machine
        mgpu-tune run matmul --suite sustained --objective sustained    # where the power cap decides
        mgpu-tune run matmul --suite llm --target 1.05 --sampler gp     # until it is 5 % faster than XLA
        mgpu-tune run --suite llama3-8b --storage postgresql://tuner@db.example/studies --queue   # for `mgpu-tune worker`
        mgpu-tune run matmul --m 8192 --n 8192 --k 8192 --gpu h100-sxm   # no such GPU here: by the cost model
        """,
        needs=("optuna", "rich"),
    )
    problem_arguments(parser, many=True, every_op=True)
    search_arguments(parser)
    parser.add_argument("--queue", action="store_true", help="do not tune: put the problems into --storage for workers")
    parser.add_argument(
        "--database",
        type=Path,
        metavar="PLACE",
        help="where to store: a file of one op, named *.json, or a directory, for files <gpu>/<op>.json "
        "(default: your own, see `mgpu-tune show`)",
    )


def search_arguments(parser: argparse.ArgumentParser) -> None:
    """How to search, on what, and where the studies are; `options_of` and `studies_of` read them."""
    parser.add_argument(
        "--trials",
        type=positive_int,
        metavar="N",
        help="candidates to try for each problem (default 32; with --sampler brute, all there are)",
    )
    parser.add_argument(
        "--budget",
        type=seconds,
        default=math.inf,
        metavar="TIME",
        help="time for each problem, e.g. 60s, 2m (default: no limit)",
    )
    parser.add_argument(
        "--target",
        type=_share,
        metavar="SHARE",
        help="stop once a candidate reaches this share of the baseline's speed (XLA's, cuDNN's), e.g. 0.98 or 1.1",
    )
    parser.add_argument(
        "--sampler", choices=SAMPLERS, default="tpe", help="how to choose candidates (default tpe); brute: every legal config"
    )
    parser.add_argument(
        "--objective",
        choices=OBJECTIVES,
        default="burst",
        help="what to optimize: the time of single calls (burst, default), or of calls without pause, at the clock that the "
        "power cap leaves (sustained; stores both entries, and calls use the second with MGPU_OPS_OBJECTIVE=sustained)",
    )
    parser.add_argument(
        "--turn",
        type=seconds,
        default=1.0,
        metavar="TIME",
        help="sustained: how long each of the best runs without pause, three times (default 1s)",
    )
    workers_argument(parser)
    storage_argument(
        parser, otherwise="a journal file of your own for measured trials, from which a tuner that was killed goes on"
    )
    parser.add_argument("--fresh", action="store_true", help="do not go on from an unfinished run: measure everything again")
    parser.add_argument("--seed", type=seed, default=0, help="seed of the inputs and of the search (default 0)")
    parser.add_argument("--gpu", help="tune for this GPU: h200, h100-sxm ...; if it is not the one here, by the cost model")


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0, such as 0.98")
    return value


def options_of(arguments: argparse.Namespace) -> TuneOptions:
    trials = arguments.trials or (ALL if arguments.sampler == "brute" else TRIALS)
    return TuneOptions(
        trials,
        arguments.budget,
        arguments.target,
        arguments.seed,
        arguments.sampler,
        objective=arguments.objective,
        turn=arguments.turn,
    )


def run(arguments: argparse.Namespace) -> int:
    from mgpu_ops.registry import database

    jobs = jobs_of(arguments)
    ops = {job.op for job in jobs}
    place = arguments.database
    if place and len(ops) > 1 and not is_directory(place):
        several = ", ".join(sorted(ops))
        raise UsageError(
            f"--database {place} is a file of one op, these problems are of {several}: name one op, or a directory"
        )
    if arguments.queue:
        return _queue(jobs, arguments)
    gpus = max(job.spec.devices(job.problem) for job in jobs)
    with studies_of(arguments) as studies, devices_for(arguments.gpu, arguments.workers, gpus, say=say) as devices:
        gpu = devices[0].gpu
        paths = {op: database_at(place, gpu.key, op) if place else database.user_path(gpu.key, op) for op in ops}
        for op, path in paths.items():
            database.require_writable(path, gpu_key=gpu.key, op=op)  # refused now, not after an hour of tuning
        session = Session(options_of(arguments), paths, studies)
        code = session.tune_all(runnable(jobs, gpu), devices)
        answer(arguments, {"problems": session.results})
        return code


# --- The queue of a fleet -------------------------------------------------------------------------


def _queue(jobs: Sequence[TuningJob], arguments: argparse.Namespace) -> int:
    """Puts the problems into the storage's queue."""
    from mgpu_ops.core import gpu as gpus
    from mgpu_ops.tuning import storage
    from mgpu_ops.tuning.fleet import queue as fleet_queue

    where = required_storage(arguments)
    given = {"--database": arguments.database, "--fresh": arguments.fresh, "--workers": arguments.workers != 1}
    for option, is_given in given.items():
        if is_given:
            raise UsageError(f"{option} is the workers' to say, not of --queue: leave it out")
    if arguments.objective != "burst":
        raise UsageError(f"--objective {arguments.objective} is not for --queue: run it on a machine with the GPU")
    gpu = gpu_or_current(arguments.gpu) if arguments.gpu else None
    options = options_of(arguments)
    wanted = [
        fleet_queue.Job(
            op=job.op,
            problem=dataclasses.asdict(job.problem),
            name=job.name,
            trials=options.trials,
            budget=None if math.isinf(options.budget) else options.budget,
            target=options.target,
            sampler=options.sampler,
            seed=options.seed,
            gpu=gpu.key if gpu else None,
        )
        for job in _for_workers(jobs, [gpu] if gpu else gpus.GPUS)
    ]
    with storage.opened(where) as backend:
        queued = fleet_queue.enqueue(backend, wanted)
    say(
        f"queued {count(len(queued), 'problem')}: start `mgpu-tune worker` with this storage on the hosts that are to tune them"
    )
    answer(arguments, {"queued": queued})
    return OK


def _for_workers(jobs: Sequence[TuningJob], gpus: Sequence[Gpu]) -> Sequence[TuningJob]:
    """The jobs that a kernel runs on one of these GPUs; UsageError where there are none."""
    if len(jobs) == 1:
        reasons = [jobs[0].spec.supports(jobs[0].problem, gpu) for gpu in gpus]
        if None not in reasons:
            raise UsageError(f"{jobs[0].op} {jobs[0].name} cannot be tuned: {reasons[0]}")
        return jobs
    found = supported(jobs, gpus)
    if not found:
        raise UsageError("no kernel runs any of these problems: nothing to queue")
    return found
