"""`mgpu-tune run`: tunes problems and stores the best configs."""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_ops.tuning.cli.arguments import (
    positive_int,
    problem_arguments,
    runnable,
    seconds,
    seed,
    work_of,
    workers_argument,
)
from mgpu_ops.tuning.cli.shared import (
    INTERRUPTED,
    OK,
    WRONG,
    UsageError,
    answer,
    command,
    count,
    gpu_or_current,
    say,
)
from mgpu_ops.tuning.cli.storages import required_storage, storage_argument, storage_of
from mgpu_ops.tuning.devices import devices_for
from mgpu_ops.tuning.options import SAMPLERS, TRIALS, TuneOptions
from mgpu_ops.tuning.terminal import printable

if TYPE_CHECKING:
    from rich.progress import Progress

    from mgpu_ops.tuning.device import Device
    from mgpu_ops.tuning.problems import TuningJob

ALL = 2**31  # of the sampler "brute"


def register(commands: Any) -> None:
    parser = command(
        commands,
        "run",
        run,
        "tune one problem, or a suite of them, and store the best configs",
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
        mgpu-tune run matmul --suite llm --workers all                  # on every GPU of this machine
        mgpu-tune run all_reduce --devices 4 --bytes 1KiB:256MiB        # between four GPUs of this machine
        mgpu-tune run matmul --suite llm --target 1.05 --sampler gp     # until 5 % faster than XLA
        mgpu-tune run --suite llama3-8b --storage postgresql://tuner@db.example/studies --queue   # for `mgpu-tune worker`
        mgpu-tune run matmul --m 8192 --n 8192 --k 8192 --gpu h100-sxm   # no GPU here: modelled, and said so
        """,
        needs=("optuna", "rich"),
    )
    problem_arguments(parser, many=True, every_op=True)
    search_arguments(parser)
    parser.add_argument("--queue", action="store_true", help="leave the problems to the workers of --storage")
    parser.add_argument("--database", type=Path, metavar="FILE", help="where to store (default: your own, see `show`)")


def search_arguments(parser: argparse.ArgumentParser) -> None:
    """How to search, on what, and where the studies are; `tune_all` takes them."""
    parser.add_argument(
        "--trials",
        type=positive_int,
        metavar="N",
        help="candidates a problem (default 32; of the sampler brute: all there are)",
    )
    parser.add_argument(
        "--budget", type=seconds, default=math.inf, metavar="TIME", help="a problem, e.g. 60s, 2m (default: no limit)"
    )
    parser.add_argument(
        "--target",
        type=_share,
        metavar="SHARE",
        help="stop once a candidate has this share of the baseline's speed (XLA's, cuDNN's), e.g. 0.98 or 1.1",
    )
    parser.add_argument("--sampler", choices=SAMPLERS, default="tpe", help="default tpe; brute tries every legal config")
    workers_argument(parser)
    storage_argument(parser, otherwise="a journal file of your own, from which a tuner that was killed goes on")
    parser.add_argument("--fresh", action="store_true", help="measure again what an unfinished run of the problem measured")
    parser.add_argument("--seed", type=seed, default=0, help="of the inputs and of the search (default 0)")
    parser.add_argument("--gpu", help="tune for this GPU, by the model unless it is the one here: h200, h100-sxm ...")


def run(arguments: argparse.Namespace) -> int:
    from mgpu_ops.registry import database

    work = work_of(arguments)
    ops = {w.op for w in work}
    if arguments.database and len(ops) > 1:
        raise UsageError(f"--database is a file of one op, these problems are of {', '.join(sorted(ops))}: name one op")
    if arguments.queue:
        return _queue(work, arguments)
    gpus = max(w.spec.devices(w.problem) for w in work)
    with studies_of(arguments) as studies, devices_for(arguments.gpu, arguments.workers, gpus, say=say) as devices:
        gpu = devices[0].gpu
        paths = {op: arguments.database or database.user_path(gpu.key, op) for op in ops}
        for op, path in paths.items():
            database.require_writable(path, gpu_key=gpu.key, op=op)  # refused now, not after an hour of tuning
        told: list[dict[str, Any]] = []
        code = tune_all(list(runnable(work, gpu)), devices, paths, studies, arguments, told)
        answer(arguments, {"problems": told})
        return code


def tune_all(
    work: Sequence[Any],
    devices: Sequence[Any],
    paths: Mapping[str, Path],
    studies: Studies,
    arguments: argparse.Namespace,
    told: list[dict[str, Any]],
) -> int:
    """Tunes the problems, on each device one at a time; the worst exit code. One of several that fails does not end the run."""
    from mgpu_ops.tuning import many, worker

    options = options_of(arguments)
    with progress_bar() as bar:

        def tune(w: Any, device: Any) -> int:
            code = tune_one(w, device, paths[w.op], options, told, bar=bar, studies=studies)
            if code == INTERRUPTED:
                raise KeyboardInterrupt
            return code

        worst = OK
        try:
            for done in many.each(work, devices, tune):
                worst = max(worst, done.result or OK)
                if len(work) > 1 and isinstance(done.error, worker.WorkerError) and not isinstance(done.error, worker.Lost):
                    say(f"{done.job.op} {done.job.name}: {done.error}")
                    told.append({"op": done.job.op, "name": done.job.name, "fault": str(done.error)})
                    worst = max(worst, WRONG)
                elif done.error is not None:
                    raise done.error
        except KeyboardInterrupt:
            return INTERRUPTED
        return worst


def options_of(arguments: argparse.Namespace) -> TuneOptions:
    trials = arguments.trials or (ALL if arguments.sampler == "brute" else TRIALS)
    return TuneOptions(trials, arguments.budget, arguments.target, arguments.seed, arguments.sampler)


def _for_some_worker(work: Sequence[Any], gpus: Sequence[Any]) -> list[Any]:
    """The problems that a kernel runs on one of these GPUs; the others are said, and of one alone, or all, it is refused."""
    found = []
    for w in work:
        reasons = [w.spec.supports(w.problem, gpu) for gpu in gpus]
        if None in reasons:
            found.append(w)
        elif len(work) == 1:
            raise UsageError(f"{w.op} {w.name} cannot be tuned: {reasons[0]}")
        else:
            say(f"left out, it runs through XLA: {w.op} {w.name}: {reasons[0]}")
    if not found:
        raise UsageError("no kernel runs any of these problems: nothing to queue")
    return found


def _queue(work: list[Any], arguments: argparse.Namespace) -> int:
    """Puts the problems into the storage's queue."""
    from mgpu_ops.core import gpu as gpus
    from mgpu_ops.tuning import storage
    from mgpu_ops.tuning.fleet import queue as fleet_queue

    where = required_storage(arguments)
    given = {"--database": arguments.database, "--fresh": arguments.fresh, "--workers": arguments.workers != 1}
    for option, is_given in given.items():
        if is_given:
            raise UsageError(f"{option} is the workers' to say, not of --queue: leave it out")
    gpu = gpu_or_current(arguments.gpu) if arguments.gpu else None
    work = _for_some_worker(work, [gpu] if gpu else gpus.GPUS)
    options = options_of(arguments)
    with storage.opened(where) as backend:
        jobs = fleet_queue.enqueue(
            backend,
            [
                fleet_queue.Job(
                    op=w.op,
                    problem=dataclasses.asdict(w.problem),
                    name=w.name,
                    trials=options.trials,
                    budget=None if math.isinf(options.budget) else options.budget,
                    target=options.target,
                    sampler=options.sampler,
                    seed=options.seed,
                    gpu=gpu and gpu.key,
                )
                for w in work
            ],
        )
    say(f"queued {count(len(jobs), 'problem')}: start `mgpu-tune worker` with this storage on the hosts that are to tune them")
    answer(arguments, {"queued": jobs})
    return OK


# (spec, problem, device) -> context of the problem's study; of None, in memory, where the times are modelled.
Studies = Callable[[Any, Any, Any], AbstractContextManager[Any]]


@contextlib.contextmanager
def studies_of(arguments: argparse.Namespace) -> Iterator[Studies]:
    """The studies are those of --storage, which is opened once, else of a journal file.

    A storage that is lost in the middle ends the command with a StorageError; what it holds stays: the same command goes on.
    """
    from mgpu_ops.tuning import storage

    where = storage_of(arguments)
    with storage.opened(where) if where else contextlib.nullcontext() as shared:

        @contextlib.contextmanager
        def study(spec: Any, problem: Any, device: Any) -> Iterator[Any]:
            if shared is None and device.kind != "measured":
                yield None
                return
            identity = storage.Identity.of(spec, problem, device.gpu, device.kind, device.versions)
            own = storage.journal_path(device.gpu.key, spec.name)
            with storage.opened(own) if shared is None else contextlib.nullcontext(shared) as backend:
                opened = storage.open_study(backend, identity, fresh=arguments.fresh)
                try:
                    yield opened
                except Exception as error:
                    if storage.of_storage(error):
                        say("the storage is gone; what was measured is kept there, and the same command goes on from it")
                    raise

        yield study


def progress_bar() -> Progress:
    """A bar a problem: trials, time, time left, the best so far and failures by kind."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from mgpu_ops.tuning import terminal

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[best]}", markup=False),
    )
    return Progress(*columns, console=terminal.console())


def tune_one(
    job: TuningJob,
    device: Device,
    path: Path,
    options: TuneOptions,
    told: list[dict[str, Any]],
    *,
    bar: Progress,
    studies: Studies = lambda spec, problem, device: contextlib.nullcontext(),
) -> int:
    """Tunes one problem with a progress bar, prints its trials, stores its entry; the exit code. `told` gets the result."""
    from mgpu_ops.registry import database
    from mgpu_ops.tuning import storage, tables, tuner

    spec, name, problem = job.spec, job.name, job.problem
    tuner.check_supported(spec, problem, device.gpu)  # before a progress bar is on the screen
    best, failures = math.inf, collections.Counter[str]()

    def progress(trial: Any) -> None:
        nonlocal best
        best = min(best, trial.outcome.us or math.inf)
        failures.update([] if trial.outcome.kind == "ok" else [trial.outcome.kind])
        words = [f"best {best:.1f} us"] if best < math.inf else []
        bar.update(task, advance=1, best=", ".join(words + [f"{n} {kind}" for kind, n in failures.items()]))

    with studies(spec, problem, device) as study:
        task = bar.add_task(printable(f"{spec.name} {name}"), total=None if options.trials == ALL else options.trials, best="")
        try:
            result = tuner.tune(spec, problem, device, options, study=study, progress=progress)
        finally:
            bar.stop_task(task)
        told.append(
            {"op": spec.name, "name": name, "gpu": device.gpu.key, "kind": device.kind, "database": path} | _document(result)
        )
        bar.console.print(tables.trials_table(result.trials, device.baseline))
        _tell(result, name, device.kind)
        if result.entry is not None:
            database.update(path, [result.entry], gpu_key=device.gpu.key, op=spec.name)
            say(f"stored as {device.kind} in {path}")
        if study is not None and result.ended != "interrupted":
            storage.finish(study, result.entry)  # last: until then a tuner that is killed goes on here
    if result.ended == "interrupted":
        return INTERRUPTED
    return OK if result.entry is not None else WRONG


def _tell(result: Any, name: str, kind: str) -> None:
    from mgpu_ops.tuning import ranking

    for (fault, detail), number in result.failures.items():
        say(f"failed: {number} {fault}: {detail}")
    if result.entry is None:
        say(f"no candidate worked: nothing is stored for {name}")
        return
    e = result.entry.evidence
    against = f", {e.baseline} {e.baseline_us:.1f} us ({e.baseline_us / e.median_us:.3f}x)" if e.baseline_us else ""
    default = f", default {e.default_us:.1f} us" if e.default_us else ""
    say(f"best of {len(result.trials)} in {result.seconds:.1f} s: {e.median_us:.1f} us {e.kind}{default}{against}")
    if result.confidence is not None and kind == "measured":
        margin = f"{ranking.NEAR_TIE:.1%}"
        say(f"no other finalist is faster by more than {margin}, with a confidence of {result.confidence:.0%}")


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0, such as 0.98")
    return value


def _document(result: Any) -> dict[str, Any]:
    """A tuner's Result as JSON tells it: all of it, but for the raw samples of the trials."""
    trials = [
        {"number": t.number, "origin": t.origin, "config": t.config, "kind": t.outcome.kind, "us": t.outcome.us}
        | ({"detail": t.outcome.detail} if t.outcome.detail else {})
        for t in result.trials
    ]
    fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    failures = [{"kind": kind, "detail": detail, "trials": n} for (kind, detail), n in result.failures.items()]
    return fields | {"trials": trials, "failures": failures}
