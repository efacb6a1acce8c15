"""A fleet: workers on any hosts that tune the problems of one storage's queue, each on its own GPU.

The queue is a study named `FLEET`, whose user attributes are the jobs. A job is done once for each kind of GPU and
toolchain, in a study of its own (`storage.Identity`), which the workers of that kind share: each claims candidates and
measures its own. The worker that ends last ranks the finalists. It claims that right (`FinalClaim`) as it claims candidates,
by a trial of `FLEET`; the trial stays as the record that the job is done. What a worker had claimed when it died is taken over
by the next one that looks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import optuna

from mgpu_ops.registry import database
from mgpu_ops.registry.database import Entry
from mgpu_ops.registry.spec import Config, OpSpec, Problem
from mgpu_ops.tuning import options, search, storage, tuner
from mgpu_ops.tuning.device import Device
from mgpu_ops.tuning.ledger import Ledger
from mgpu_ops.tuning.options import TuneOptions
from mgpu_ops.tuning.outcome import Outcome
from mgpu_ops.tuning.storage import Identity, StorageError
from mgpu_ops.tuning.worker import Lost, WorkerError

FLEET = "mgpu_ops fleet"
POLL = 5.0  # seconds between looks at a queue on which there is nothing to do


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A problem to tune, once for each kind of GPU that has workers."""

    op: str
    problem: dict[str, int | str | bool]
    name: str  # for people
    trials: int
    budget: float | None = None  # seconds; None: no limit
    target: float | None = None
    sampler: str = "tpe"
    seed: int = 0
    gpu: str | None = None  # Gpu.key: for workers with this GPU only
    number: int = 1  # raised when a job that is done is queued again

    def fault(self) -> str | None:
        """Why no search can be what the job asks for, whatever the device; None where one can."""
        if not 0 <= self.seed < 2**32:
            return f"seed {self.seed} must be a whole number from 0 to 2**32 - 1"
        if self.trials < 1:
            return f"trials {self.trials} must be at least 1"
        if self.sampler not in options.SAMPLERS:
            return f"sampler {self.sampler!r} is not one of {', '.join(options.SAMPLERS)}"
        for name, value in (("budget", self.budget), ("target", self.target)):
            if value is not None and not (math.isfinite(value) and value > 0):
                return f"{name} {value} must be a number above 0"
        return None

    @property
    def key(self) -> str:
        what = json.dumps([self.op, self.problem, self.gpu], sort_keys=True)
        return f"job {hashlib.sha256(what.encode()).hexdigest()[:16]}"

    @property
    def options(self) -> TuneOptions:
        budget = math.inf if self.budget is None else self.budget
        return TuneOptions(self.trials, budget, self.target, self.seed, self.sampler)

    @property
    def run(self) -> str:
        return f"fleet {self.number}"


@dataclasses.dataclass(frozen=True)
class FinalClaim:  # a Ledger's config
    """The right to end a job for one kind of GPU: to measure the finalists and to say what is best."""

    job: str
    study: str


@dataclasses.dataclass(frozen=True)
class TunedJob:
    """A job that this worker ended. `entry` is None where no candidate worked, with the reason."""

    job: Job
    spec: OpSpec
    entry: Entry | None
    reason: str
    trials: int
    hosts: tuple[str, ...]  # who measured


# --- the queue


def enqueue(backend: optuna.storages.BaseStorage, jobs: Sequence[Job]) -> list[Job]:
    """Puts jobs into the queue. One that is there already is joined; where it is done for some GPU, it is tuned anew.

    ValueError, with none put there, for a job that no worker could do.
    """
    for job in jobs:
        if (fault := job.fault()) is not None:
            raise ValueError(f"{job.op} {job.name} cannot be queued: {fault}")
    fleet = _fleet(backend)
    known = {job.key: job for job in queued(backend)}
    done = {(d.config.job, d.config.study.rpartition(" | run ")[2]) for d in Ledger(fleet, FinalClaim).new_results()}
    queue = []
    for job in jobs:
        if (old := known.get(job.key)) is not None:
            job = msgspec.structs.replace(job, number=old.number + ((old.key, old.run) in done))
        fleet.set_user_attr(job.key, msgspec.to_builtins(job))
        queue.append(job)
    return queue


def queued(backend: optuna.storages.BaseStorage) -> list[Job]:
    """All jobs, done or not. What is no job of this version is passed over."""
    found = []
    for key, fields in _fleet(backend).user_attrs.items():
        try:
            job = msgspec.convert(fields, Job)
        except (msgspec.ValidationError, ValueError):  # text that is not Unicode
            continue
        if job.key == key:
            found.append(job)
    return found


def entries(backend: optuna.storages.BaseStorage) -> Iterator[tuple[str, str, Entry]]:
    """(GPU's name, op, entry) of all that is done in a storage, checked like a file's. The newest of a problem comes last."""
    done = [study for study in backend.get_all_studies() if "done" in study.user_attrs]
    for study in sorted(done, key=lambda study: study._study_id):
        identity = study.user_attrs.get("identity", {})
        try:
            entry = msgspec.convert(study.user_attrs["done"]["entry"], Entry | None)
            gpu, op = str(identity["gpu"]), str(identity["op"])
        except (msgspec.ValidationError, ValueError, KeyError, TypeError):
            continue
        if entry is not None:
            yield gpu, op, entry


def _fleet(backend: optuna.storages.BaseStorage) -> optuna.Study:
    return optuna.create_study(storage=backend, study_name=FLEET, load_if_exists=True)


# --- a worker


@dataclasses.dataclass(frozen=True)
class _Plan:
    """A job as a worker's device would do it."""

    job: Job
    spec: OpSpec
    problem: Problem
    identity: Identity

    @property
    def claim(self) -> FinalClaim:
        return FinalClaim(self.job.key, self.identity.name(self.job.run))


class Worker:
    """Tunes the jobs of a storage's queue that its device can do."""

    def __init__(
        self,
        backend: optuna.storages.BaseStorage,
        device: Device,
        spec_of: Callable[[str], OpSpec],
        say: Callable[[str], None] = lambda text: None,
    ):
        """`spec_of` raises ValueError for an op that this version does not have."""
        self._backend, self._device, self._spec_of, self._say = backend, device, spec_of, say
        self._pause: Callable[[float], None] = getattr(device, "wait", time.sleep)  # a GPU of several hears of Ctrl-C that way
        self._plans: dict[bytes, _Plan | None] = {}  # by the job, in JSON
        self._done: set[FinalClaim] = set()
        self._searched: set[FinalClaim] = set()  # this worker's part of the search is over

    def work(self, wanted: Callable[[Job], bool] = lambda job: True, wait: float = 0.0) -> Iterator[TunedJob]:
        """Takes part in every job that is `wanted` until all are done, and for `wait` seconds more; gives those it ended.

        A job that other workers are at is joined only when all others are taken or done.
        """
        idle = time.monotonic()
        self._claims = Ledger(_fleet(self._backend), FinalClaim)
        try:
            while True:
                self._done.update(done.config for done in self._claims.new_results())
                plans = [plan for job in queued(self._backend) if wanted(job) and (plan := self._plan(job)) is not None]
                plans = [plan for plan in plans if plan.claim not in self._done]
                if (plan := self._next(plans)) is not None:
                    if (ended := self._tune_if_possible(plan)) is not None:
                        yield ended
                    idle = time.monotonic()
                elif not plans and time.monotonic() - idle >= wait:
                    return
                else:
                    self._pause(POLL)
        finally:
            self._claims.close()

    def _plan(self, job: Job) -> _Plan | None:
        """How this worker's device would do a job. None if it cannot, which is reported once."""
        key = msgspec.json.encode(job)
        if key not in self._plans:
            self._plans[key] = None
            if job.gpu in (None, self._device.gpu.key):
                try:
                    self._plans[key] = self._planned(job)
                except (ValueError, ArithmeticError) as error:  # the latter of sizes that are none
                    self._leave_out(job, error)
        return self._plans[key]

    def _planned(self, job: Job) -> _Plan:
        spec, device = self._spec_of(job.op), self._device
        problem = database.to_problem(spec, job.problem)
        tuner.check_supported(spec, problem, device.gpu)
        if (fault := job.fault()) is not None:
            raise ValueError(fault)
        search.sampler_of(job.sampler, job.seed)  # may lack a library here
        if job.target is not None and device.kind == "modelled":
            raise ValueError("a target is a share of a baseline's speed, and modelled times have none")
        return _Plan(job, spec, problem, Identity.of(spec, problem, device.gpu, device.kind, device.versions))

    def _next(self, plans: Sequence[_Plan]) -> _Plan | None:
        """The next job: one that a worker was about to end when it died, else one without workers, else one to help with."""
        by_claim = {plan.claim: plan for plan in plans}
        if (adopted := self._claims.adopt(by_claim.__contains__)) is not None:
            return by_claim[adopted[0]]
        helped = None
        for plan in plans:
            ledger: Ledger[Config] = Ledger(self._study(plan), plan.spec.Config)
            others = ledger.running()
            search = ledger.waiting() > 0 or (plan.claim not in self._searched and ledger.count() < plan.job.trials)
            if search and not others:
                return plan
            if search or (not others and not self._claims.taken(plan.claim)):
                helped = helped or plan
        return helped

    def _tune_if_possible(self, plan: _Plan) -> TunedJob | None:
        """As `_tune`. A job that turns out to be impossible here is reported once; other workers may do it."""
        try:
            return self._tune(plan)
        except StorageError:
            raise
        except (WorkerError, ValueError) as error:
            if isinstance(error, Lost):
                raise
            self._leave_out(plan.job, error)
            return None

    def _leave_out(self, job: Job, error: Exception) -> None:
        self._plans[msgspec.json.encode(job)] = None
        self._say(f"{job.op} {job.name} is left to other workers: {error}")

    def _tune(self, plan: _Plan) -> TunedJob | None:
        """Takes part in a job. The tuned job if this worker was the one to end it, else None."""
        job, study = plan.job, self._study(plan)
        ledger: Ledger[Config] = Ledger(study, plan.spec.Config)
        again = plan.claim in self._searched and not ledger.waiting()
        self._searched.add(plan.claim)

        def ours() -> bool:
            if self._claims.holds(plan.claim):
                return True
            return not ledger.unfinished() and self._claims.claim(plan.claim, "final")

        result = tuner.tune(
            plan.spec,
            plan.problem,
            self._device,
            dataclasses.replace(job.options, trials=ledger.count() if again else job.trials),
            study=study,
            final=ours,
        )
        if result.ended == "interrupted":
            raise KeyboardInterrupt
        if not self._claims.holds(plan.claim):
            return None
        entry, reason = result.entry, "" if result.entry else "no candidate worked"
        storage.finish(study, entry)
        us = entry.evidence.median_us if entry else None
        self._claims.record(plan.claim, Outcome("ok", us) if us else Outcome("crash", detail=reason))
        hosts = sorted({str(trial.user_attrs.get("host")) for trial in study.get_trials(deepcopy=False)})
        return TunedJob(job, plan.spec, entry, reason, len(result.trials), tuple(hosts))

    def _study(self, plan: _Plan) -> optuna.Study:
        return storage.open_study(self._backend, plan.identity, plan.job.run)
