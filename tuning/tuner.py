"""The search: seeds, then optuna (TPE), then one knob at a time around the best, then a re-measured final.

Candidates that `check` refuses, or that the op's model puts far behind the best it knows, never reach the device.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import optuna

from mgpu_ops.core import database
from mgpu_ops.core.database import Entry, Evidence
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.op import OpSpec
from mgpu_ops.tuning import measure
from mgpu_ops.tuning.device import Device
from mgpu_ops.tuning.outcome import Final, Outcome
from mgpu_ops.tuning.worker import WorkerError

BATCH = 8  # candidates asked for at a time: they compile side by side
SLACK = 1.6  # a candidate modelled this much slower than the best modelled one is not tried
FINALISTS = 5
FINAL_SECONDS = 1.0  # of measuring, shared by the finalists
_RESERVE = 0.1  # of the budget, kept for the final
_PATIENCE = 32  # times in a row that TPE may name what was seen before or cannot run
_WALKED = 500_000  # a space of no more configs can be walked from end to end, in seconds


@dataclasses.dataclass(frozen=True)
class Trial:
    number: int
    origin: str  # default, near, model, search, local
    config: Any
    outcome: Outcome


@dataclasses.dataclass(frozen=True)
class Result:
    """All trials of a problem, the entry to store (None: no candidate worked) and how the search ended."""

    problem: Any
    trials: tuple[Trial, ...]
    entry: Entry | None
    ended: str  # "trials", "budget", "exhausted", "interrupted"
    seconds: float

    @property
    def failures(self) -> dict[tuple[str, str], int]:
        """How many trials failed, by kind and reason."""
        failed = [t.outcome for t in self.trials if t.outcome.kind != "ok"]
        return dict(collections.Counter((outcome.kind, outcome.detail) for outcome in failed))


def tune(
    spec: OpSpec,
    problem: Any,
    device: Device,
    *,
    trials: int = 32,
    budget: float = math.inf,
    seed: int = 0,
    progress: Callable[[Trial], None] = lambda trial: None,
) -> Result:
    """Searches for the fastest Config of `problem` on `device`; stores nothing.

    Args:
      trials: candidates given to the device, failed ones included.
      budget: seconds in all, from the call to the entry. The default config is tried whatever it is.
      seed: of the inputs and of the search; with the same seed and times, the same trials.
      progress: called with each trial as it ends.

    Ctrl-C ends the search and keeps what was measured. Raises ValueError where the kernel cannot run `problem`, and
    WorkerError where the device fails altogether.
    """
    start = time.monotonic()
    check_supported(spec, problem, device.gpu)
    search = _Search(spec, problem, device, seed)
    done: list[Trial] = []
    ended = "trials"
    try:
        device.open(spec, problem, seed)
        while len(done) < trials:
            elapsed = time.monotonic() - start
            if done and elapsed > budget * (1 - _RESERVE):
                ended = "budget"
                break
            left = budget * (1 - _RESERVE) - elapsed
            fits = left * len(done) / elapsed if done and elapsed > 0 else BATCH  # at the pace so far
            batch = search.ask(max(1, int(min(BATCH, trials - len(done), fits))), done, trials)
            if not batch:
                ended = "exhausted"
                break
            origins = dict(batch)
            for config, outcome in device.judge(list(origins)):
                trial = Trial(len(done), origins[config], config, outcome)
                done.append(trial)
                search.tell(trial)
                progress(trial)
                if time.monotonic() - start > budget * (1 - _RESERVE) and device.kind == "modelled":
                    break
        entry = _entry(spec, problem, device, done, seed, final=True)
    except KeyboardInterrupt:
        ended = "interrupted"
        entry = _entry(spec, problem, device, done, seed, final=False)
    return Result(problem, tuple(done), entry, ended, time.monotonic() - start)


def check_supported(spec: OpSpec, problem: Any, gpu: Gpu) -> None:
    """Raises ValueError, with the reason, where no config of the kernel can run `problem`."""
    reason = spec.supports(problem, gpu)
    if reason is not None:
        raise ValueError(f"{spec.name} {problem} cannot be tuned: {reason}")


class _Search:
    def __init__(self, spec: OpSpec, problem: Any, device: Device, seed: int):
        self.spec, self.problem, self.gpu = spec, problem, device.gpu
        self.space = {k: list(v) for k, v in spec.space(problem, device.gpu).items()}
        self.random = random.Random(seed)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=8)
        self.study = optuna.create_study(sampler=sampler)
        self.open: dict[Any, optuna.Trial] = {}
        self.seen: set[Any] = set()
        self.walked: list[Any] | None = None
        pool = self._pool(4000)
        self.limit = SLACK * min((self._cost(c) for c in pool), default=math.inf)
        self.seeds = self._seeds(pool)

    def ask(self, count: int, done: Sequence[Trial], trials: int) -> list[tuple[Any, str]]:
        """Up to `count` new legal configs with their origins; fewer or none once the space is exhausted."""
        batch: list[tuple[Any, str]] = []
        while self.seeds and len(batch) < count:
            config, origin = self.seeds.pop(0)
            if self._new(config, modelled=False):
                batch.append((config, origin))
        if batch:
            return batch
        if len(done) >= trials // 2:  # TPE first finds the region, then one knob at a time is quicker
            batch = [(c, "local") for c in self._neighbours(done, count)]
        misses = 0
        while len(batch) < count and misses < _PATIENCE:
            trial = self.study.ask()
            config = self._config(trial)
            if self._new(config):
                self.open[config] = trial
                batch.append((config, "search"))
                misses = 0
            else:
                self.study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                misses += 1
        rest = (c for c in self._rest() if self._new(c)) if len(batch) < count else ()
        return batch + [(c, "search") for c in itertools.islice(rest, count - len(batch))]

    def tell(self, trial: Trial) -> None:
        """Lets optuna learn from a trial, whoever thought of it."""
        value = trial.outcome.us if trial.outcome.kind == "ok" else None
        asked = self.open.pop(trial.config, None)
        if asked is not None:
            failed = optuna.trial.TrialState.PRUNED  # TPE learns from pruned trials, not from failed ones
            self.study.tell(asked, value) if value else self.study.tell(asked, state=failed)
        elif value:
            self.study.add_trial(
                optuna.trial.create_trial(
                    params=self._indices(trial.config),
                    distributions=self._distributions(),
                    value=value,
                )
            )

    def _new(self, config: Any, modelled: bool = True) -> bool:
        """Whether a config was not seen before, can run and may be fast; it counts as seen from now on."""
        if config in self.seen:
            return False
        self.seen.add(config)
        if self.spec.check(self.problem, config, self.gpu) is not None:
            return False
        return not modelled or self._cost(config) <= self.limit

    def _cost(self, config: Any) -> float:
        return self.spec.cost(self.problem, config, self.gpu)

    def _pool(self, draws: int) -> list[Any]:
        """Random legal configs."""
        drawn = (self.spec.Config(**{k: self.random.choice(v) for k, v in self.space.items()}) for _ in range(draws))
        return [c for c in drawn if self.spec.check(self.problem, c, self.gpu) is None]

    def _rest(self) -> Sequence[Any]:
        """Legal configs in random order: all there are in a space that can be walked, else some."""
        if math.prod(map(len, self.space.values())) > _WALKED:
            return self._pool(4000)
        if self.walked is None:
            every = (self.spec.Config(**dict(zip(self.space, v))) for v in itertools.product(*self.space.values()))
            self.walked = [c for c in every if self.spec.check(self.problem, c, self.gpu) is None]
            self.random.shuffle(self.walked)
        return self.walked

    def _seeds(self, pool: Sequence[Any]) -> list[tuple[Any, str]]:
        """The default, the nearest stored entries, the op's analytic candidates, and the best of the pool by the model."""
        default = [(self.spec.default(self.problem, self.gpu), "default")]
        near = [(c, "near") for c in _nearest(self.spec, self.problem, self.gpu, 3)]
        analytic = [(c, "model") for c in self.spec.candidates(self.problem, self.gpu)[:6]]
        return default + near + analytic + [(c, "model") for c in sorted(pool, key=self._cost)[:2]]

    def _neighbours(self, done: Sequence[Trial], count: int) -> Iterator[Any]:
        """New configs that differ from one of the best in one field, by one or two steps along its choices."""
        ok = sorted((t for t in done if t.outcome.kind == "ok"), key=lambda t: t.outcome.us or 0.0)
        for best in ok[:3]:
            moves = [(k, step) for k in self.space for step in (-1, 1, -2, 2)]
            self.random.shuffle(moves)
            for field, step in moves:
                choices = self.space[field]
                value = getattr(best.config, field)
                if value not in choices or not 0 <= choices.index(value) + step < len(choices):
                    continue
                moved = dataclasses.replace(best.config, **{field: choices[choices.index(value) + step]})
                if count and self._new(moved):
                    count -= 1
                    yield moved

    def _config(self, trial: optuna.Trial) -> Any:
        chosen = {k: v[trial.suggest_int(k, 0, len(v) - 1)] for k, v in self.space.items()}
        return self.spec.Config(**chosen)

    def _distributions(self) -> dict[str, Any]:
        return {k: optuna.distributions.IntDistribution(0, len(v) - 1) for k, v in self.space.items()}

    def _indices(self, config: Any) -> dict[str, int]:
        """A config as indices into the choices; a value that is none of them stands at its nearest."""
        indices = {}
        for field, choices in self.space.items():
            value = getattr(config, field)
            if value in choices:
                indices[field] = choices.index(value)
            elif isinstance(value, str):
                indices[field] = 0
            else:
                indices[field] = min(range(len(choices)), key=lambda i: abs(choices[i] - value))
        return indices


def _nearest(spec: OpSpec, problem: Any, gpu: Any, count: int) -> list[Any]:
    """Configs of the stored entries nearest to a problem, its own first."""
    found = []
    for path in (database.user_path(gpu.key, spec.name), database.shipped_path(gpu.key, spec.name)):
        for entry in _entries(path, gpu.key, spec.name):
            try:
                other = database.to_problem(spec, entry.problem)
                config = database.to_config(spec, entry.config)
            except ValueError:
                continue  # of another version of the kernel
            distance = spec.distance(other, problem)
            if distance is not None:
                found.append((distance, config))
    found.sort(key=lambda pair: pair[0])
    return list(dict.fromkeys(config for _, config in found))[:count]


def _entries(path: Path, gpu_key: str, op: str) -> Sequence[Entry]:
    try:
        return database.read(path, gpu_key=gpu_key, op=op).entries if path.exists() else ()
    except database.DatabaseError:
        return ()  # a broken file gives no seeds; `resolve` warns of it


def _entry(spec: OpSpec, problem: Any, device: Device, done: Sequence[Trial], seed: int, *, final: bool) -> Entry | None:
    """The entry of the fastest candidate: re-measured beside the next best, the default and the baseline if `final`."""
    ok = sorted((t for t in done if t.outcome.kind == "ok"), key=lambda t: t.outcome.us or 0.0)
    if not ok:
        return None
    default = spec.default(problem, device.gpu)
    working = {t.config: t for t in ok}
    baseline_us = ok[0].outcome.baseline_us
    once = Final({c: [t.outcome.us or 0.0] for c, t in working.items()}, [baseline_us] if baseline_us else [])
    measured = once
    if final:
        finalists = [t.config for t in ok[:FINALISTS]]
        if default in working and default not in finalists:
            finalists.append(default)
        measured = _finals(device, finalists) or once
    samples, baseline = measured.samples, measured.baseline
    best = min(samples, key=lambda c: measure.median_us(samples[c]))
    evidence = Evidence(
        kind=device.kind,  # type: ignore[arg-type]
        gpu=device.gpu.name,
        driver=device.versions["driver"],
        jax=str(device.versions["jax"]),
        jaxlib=str(device.versions["jaxlib"]),
        cuda=device.versions["cuda"],
        kernel_version=spec.version,
        median_us=_round(measure.median_us(samples[best])),
        spread_us=_round(measure.spread_us(samples[best])),
        default_us=_round(measure.median_us(samples[default])) if default in samples else None,
        baseline=device.baseline if baseline else None,
        baseline_us=_round(measure.median_us(baseline)) if baseline else None,
        error=working[best].outcome.error,
        trials=len(done),
        seed=seed,
        date=datetime.date.today().isoformat(),
    )
    return database.to_entry(problem, best, evidence)


def _finals(device: Device, configs: Sequence[Any]) -> Final | None:
    """None where they could not be measured again: the trials' own times then decide."""
    try:
        return device.finals(configs, FINAL_SECONDS)
    except WorkerError:
        return None


def _round(us: float) -> float:
    return round(us, 3)
