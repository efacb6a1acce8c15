"""Tuning the jobs of a command: on each device one at a time, with progress bars; results are printed and stored."""

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

from mgpu_ops.tuning.cli.shared import INTERRUPTED, OK, WRONG, say
from mgpu_ops.tuning.cli.storages import storage_of
from mgpu_ops.tuning.options import TuneOptions
from mgpu_ops.tuning.terminal import printable

if TYPE_CHECKING:
    import optuna
    from rich.progress import Progress, TaskID

    from mgpu_ops.registry.spec import OpSpec, Problem
    from mgpu_ops.tuning.device import Device
    from mgpu_ops.tuning.outcome import Trial
    from mgpu_ops.tuning.problems import TuningJob
    from mgpu_ops.tuning.tuner import Result

ALL = 2**31  # trials of the sampler "brute", which ends with the last legal config

# (spec, problem, device) -> context of the problem's study; of None where trials are kept in memory only
Studies = Callable[["OpSpec", "Problem", "Device"], AbstractContextManager["optuna.Study | None"]]


@dataclasses.dataclass
class Session:
    """What the jobs of one command have in common, and their results."""

    options: TuneOptions
    paths: Mapping[str, Path]  # op -> the database file that gets its entries
    studies: Studies = lambda spec, problem, device: contextlib.nullcontext()
    results: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # for --json

    def tune_all(self, jobs: Sequence[TuningJob], devices: Sequence[Device]) -> int:
        """Tunes the jobs; the worst exit code. Where there are several, one that fails does not end the others."""
        from mgpu_ops.tuning import many, worker

        worst = OK
        with progress_bar() as bar:

            def work(job: TuningJob, device: Device) -> int:
                code = self.tune(job, device, bar)
                if code == INTERRUPTED:
                    raise KeyboardInterrupt
                return code

            try:
                for done in many.each(jobs, devices, work):
                    worst = max(worst, done.result or OK)
                    failed = isinstance(done.error, worker.WorkerError) and not isinstance(done.error, worker.Lost)
                    if len(jobs) > 1 and failed:
                        say(f"{done.job.op} {done.job.name}: {done.error}")
                        self.results.append({"op": done.job.op, "name": done.job.name, "fault": str(done.error)})
                        worst = max(worst, WRONG)
                    elif done.error is not None:
                        raise done.error
            except KeyboardInterrupt:
                return INTERRUPTED
        return worst

    def tune(self, job: TuningJob, device: Device, bar: Progress) -> int:
        """Tunes one job, prints its trials, stores its entry; the exit code."""
        from mgpu_ops.registry import database
        from mgpu_ops.tuning import storage, tables, tuner

        tuner.check_supported(job.spec, job.problem, device.gpu)  # before a progress bar is on the screen
        with self.studies(job.spec, job.problem, device) as study:
            with _BarOfJob(bar, job, self.options.trials) as progress:
                result = tuner.tune(job.spec, job.problem, device, self.options, study=study, progress=progress)
            path = self.paths[job.op]
            about = {"op": job.op, "name": job.name, "gpu": device.gpu.key, "kind": device.kind, "database": path}
            self.results.append(about | _document(result))
            bar.console.print(tables.trials_table(result.trials, device.baseline))
            _say_result(result, job.spec, job.name, device.kind)
            if result.entry is not None:
                database.update(path, result.entries, gpu_key=device.gpu.key, op=job.op)
                say(f"stored as {' and '.join(map(database.kind, result.entries))} in {path}")
            if study is not None and result.ended != "interrupted":
                storage.finish(study, result.entry)  # last: a tuner that is killed before goes on from the trials
        if result.ended == "interrupted":
            return INTERRUPTED
        return OK if result.entry is not None else WRONG


@contextlib.contextmanager
def studies_of(arguments: argparse.Namespace) -> Iterator[Studies]:
    """The studies of --storage, which is opened once, or of a journal file.

    Without --storage, modelled trials are not kept. A storage that is lost on the way ends the command with a StorageError; the
    trials in it stay, and the same command goes on from them.
    """
    from mgpu_ops.tuning import storage

    where = storage_of(arguments)
    with storage.opened(where) if where else contextlib.nullcontext() as shared:

        @contextlib.contextmanager
        def study(spec: OpSpec, problem: Problem, device: Device) -> Iterator[optuna.Study | None]:
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


# --- Progress -------------------------------------------------------------------------------------


def progress_bar() -> Progress:
    """A bar for each problem: trials, time, time left, the best so far and failures by kind."""
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


class _BarOfJob:
    """The bar of one job: a context in which it moves on with each trial that it is called with."""

    def __init__(self, bar: Progress, job: TuningJob, trials: int):
        self._bar, self._text, self._trials = bar, printable(f"{job.op} {job.name}"), trials
        self._best, self._failures = math.inf, collections.Counter[str]()
        self._task: TaskID | None = None

    def __enter__(self) -> Callable[[Trial], None]:
        task = self._task = self._bar.add_task(self._text, total=None if self._trials == ALL else self._trials, best="")

        def progress(trial: Trial) -> None:
            self._best = min(self._best, trial.outcome.us or math.inf)
            self._failures.update([] if trial.outcome.kind == "ok" else [trial.outcome.kind])
            words = [f"best {self._best:.1f} us"] if self._best < math.inf else []
            words += [f"{number} {kind}" for kind, number in self._failures.items()]
            self._bar.update(task, advance=1, best=", ".join(words))

        return progress

    def __exit__(self, *_: object) -> None:
        assert self._task is not None
        self._bar.stop_task(self._task)


# --- Results --------------------------------------------------------------------------------------


def _say_result(result: Result, spec: OpSpec, name: str, kind: str) -> None:
    from mgpu_ops.registry import database, winner
    from mgpu_ops.tuning import ranking

    for (fault, detail), number in result.failures.items():
        say(f"failed: {number} {fault}: {detail}")
    if result.entry is None:
        say(f"no candidate {'worked' if result.trials else 'was tried yet'}: nothing is stored for {name}")
        return
    e = result.entry.evidence
    against = f", {e.baseline} {e.baseline_us:.1f} us ({e.baseline_us / e.median_us:.3f}x)" if e.baseline_us else ""
    default = f", default {e.default_us:.1f} us" if e.default_us else ""
    kind_of_entry = database.kind(result.entry)
    say(f"best of {len(result.trials)} in {result.seconds:.1f} s: {e.median_us:.1f} us {kind_of_entry}{default}{against}")
    if versus := winner.text(result.entry, spec):
        say(versus.removeprefix("; "))
    if e.joules is not None and e.baseline_joules is not None:
        say(f"{e.joules:.4g} J a call, {e.baseline} {e.baseline_joules:.4g} J ({e.baseline_joules / e.joules:.3f}x)")
    if result.confidence is not None and kind == "measured":
        margin = f"{ranking.NEAR_TIE:.1%}"
        say(f"no other finalist is faster by more than {margin}, with a confidence of {result.confidence:.0%}")


def _document(result: Result) -> dict[str, Any]:
    """A result for JSON: all of it but the raw samples of the trials."""
    trials = [
        {"number": t.number, "origin": t.origin, "config": t.config, "kind": t.outcome.kind, "us": t.outcome.us}
        | ({"detail": t.outcome.detail} if t.outcome.detail else {})
        for t in result.trials
    ]
    fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    failures = [{"kind": kind, "detail": detail, "trials": n} for (kind, detail), n in result.failures.items()]
    return fields | {"trials": trials, "failures": failures}
