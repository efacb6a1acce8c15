"""Tuning one problem: a search's candidates go to a device, within a budget, and a re-ranking of the best decides.

A device compiles some candidates while it measures others. Every result goes into an optuna study, from which a tuner that was
killed goes on, and which a fleet shares.

The re-ranking: the finalists, the default, and what the database holds for the problem are measured in turn, in rounds. Which
of two is faster is judged by the ratio of their times in each round, with a bootstrap over the rounds: A is faster than B by
more than a margin with confidence p if the median ratio is beyond the margin in a share p of `RESAMPLES` resamplings. What
nobody is sure of is measured again, up to `RUNS` times. The fastest is stored, unless it is less than `NEAR_TIE` faster, or
not so with `CONFIDENCE`, than what the database holds: then that stays, and reruns agree.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import optuna

from mgpu_ops.core.gpu import Gpu
from mgpu_ops.registry import database
from mgpu_ops.registry.database import Entry, Evidence
from mgpu_ops.registry.spec import OpSpec
from mgpu_ops.tuning import measure
from mgpu_ops.tuning.device import Device
from mgpu_ops.tuning.ledger import Ledger
from mgpu_ops.tuning.outcome import Final, Outcome
from mgpu_ops.tuning.search import Search, stored_config
from mgpu_ops.tuning.worker import WorkerError

FINALISTS = 8
FINAL_SECONDS = 1.0  # of measuring, a run of the re-ranking
RUNS = 3  # of the re-ranking, the later ones for those that are not yet told apart
NEAR_TIE = 0.003  # of the time: less is no difference
CONFIDENCE = 0.95
RESAMPLES = 1000
_RESERVE = 0.1  # of the budget, kept for the final


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
    ended: str  # "trials", "budget", "target", "exhausted", "interrupted", "elsewhere"
    seconds: float
    confidence: float | None = None  # that no other finalist is faster by more than NEAR_TIE; None: they were not re-ranked

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
    target: float | None = None,
    seed: int = 0,
    sampler: str = "tpe",
    study: optuna.Study | None = None,
    search: Search | None = None,
    final: Callable[[], bool] = lambda: True,
    progress: Callable[[Trial], None] = lambda trial: None,
) -> Result:
    """Searches for the fastest Config of `problem` on `device`; stores nothing but the trials, in `study`.

    Args:
      trials: candidates given to devices, failed ones and those that `study` holds already included.
      budget: seconds in all, from the call to the entry. The default config is tried whatever it is.
      target: ends the search once a candidate has this share of the baseline's speed: 0.98 is 2 % slower than XLA, say, 1.1 is
        10 % faster.
      seed: of the inputs and of the search; with the same seed and times, the same trials.
      sampler: one of `search.SAMPLERS`.
      study: keeps the trials; other processes may work on it too. None: one in memory.
      search: names the candidates; None: one of `sampler`.
      final: asked once when the search is over; False leaves the re-ranking to another process of a fleet.
      progress: called with each trial as it ends.

    Ctrl-C ends the search and keeps what was measured. Raises ValueError where the kernel cannot run `problem`, and where there
    is a target and no baseline; WorkerError where the device fails altogether.
    """
    start = time.monotonic()
    check_supported(spec, problem, device.gpu)
    search = search or Search(spec, problem, device.gpu, trials=trials, seed=seed, sampler=sampler)
    ledger = Ledger(
        study or _in_memory(), spec.Config, search.encode, lambda config: spec.check(problem, config, device.gpu) is None
    )
    run = _Run(search, ledger, device, progress)
    entry, confidence = None, None
    try:
        device.open(spec, problem, seed)
        if target is not None and device.baseline is None:
            raise ValueError(f"target={target:g} is a share of a baseline's speed, and times that are {device.kind} have none")
        ended = run.search(trials, start + budget * (1 - _RESERVE), target)
        if final():
            run.hear()  # what others of the fleet ended last
            entry, confidence = _entry(spec, problem, device, run.done, seed, until=start + budget)
        else:
            ended = "elsewhere"
    except KeyboardInterrupt:
        ended = "interrupted"
        entry, confidence = _entry(spec, problem, device, run.done, seed, until=-math.inf)
    finally:
        ledger.close()
    return Result(problem, tuple(run.done), entry, ended, time.monotonic() - start, confidence)


def check_supported(spec: OpSpec, problem: Any, gpu: Gpu) -> None:
    """Raises ValueError, with the reason, where no config of the kernel can run `problem`."""
    reason = spec.supports(problem, gpu)
    if reason is not None:
        raise ValueError(f"{spec.name} {problem} cannot be tuned: {reason}")


def _in_memory() -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study()


class _Run:
    """Candidates on their way from a search to a device and back."""

    def __init__(self, search: Search, ledger: Ledger, device: Device, progress: Callable[[Trial], None]):
        self._search, self._ledger, self._device, self._progress = search, ledger, device, progress
        self._flying = 0
        self.done: list[Trial] = []

    def search(self, trials: int, until: float, target: float | None) -> str:
        """Until one of them is reached or the space exhausted; why it ended. What is under way is waited for."""
        began = time.monotonic()
        self.hear()
        heard = len(self.done)
        ended: str | None = None
        while True:
            while ended is None and self._flying < self._device.slots:
                ended = self._reached(target)
                if ended is None and not self._in_time(began, len(self.done) - heard, until):
                    if self._flying:
                        break  # when those are done, the pace is known better
                    ended = "budget"
                ended = ended or self._submit(trials)
            if not self._flying:
                return ended or "exhausted"
            config, outcome = self._device.next()
            self._flying -= 1
            self._ledger.record(config, outcome)
            self.hear()
            if ended == "exhausted":
                ended = None

    def hear(self) -> None:
        """What was measured since the last time, here or elsewhere."""
        for found in self._ledger.news():
            trial = Trial(len(self.done), found.origin, found.config, found.outcome)
            self.done.append(trial)
            self._search.tell(found.config, found.outcome)
            self._progress(trial)

    def _submit(self, trials: int) -> str | None:
        """Gives the device a candidate; why there is none to give."""
        asked = self._ledger.adopt()
        while asked is None:
            if self._ledger.count() >= trials:
                return "trials"
            asked = self._search.ask()
            if asked is None:
                return "exhausted"
            if not self._ledger.claim(*asked):
                self._search.drop(asked[0])
                asked = None
        self._device.submit(asked[0])
        self._flying += 1
        return None

    def _in_time(self, began: float, measured: int, until: float) -> bool:
        """Whether one more candidate, after those under way, would be done in time at the pace so far."""
        now = time.monotonic()
        if not measured:
            return (now < until or not self.done) if self._flying else not self.done or now < until
        return now + (self._flying + 1) * (now - began) / measured <= until

    def _reached(self, target: float | None) -> str | None:
        for trial in self.done if target is not None else ():
            o = trial.outcome
            if o.kind == "ok" and o.us and o.baseline_us and o.baseline_us / o.us >= (target or 0.0):
                return "target"
        return None


# --- the final


def _entry(
    spec: OpSpec, problem: Any, device: Device, done: Sequence[Trial], seed: int, *, until: float
) -> tuple[Entry | None, float | None]:
    """The entry of the fastest candidate, re-ranked until `until`, and how sure that is."""
    ok = sorted((t for t in done if t.outcome.kind == "ok"), key=lambda t: t.outcome.us or 0.0)
    if not ok:
        return None, None
    default, incumbent = spec.default(problem, device.gpu), stored_config(spec, problem, device.gpu, device.kind)
    working = {t.config: t for t in ok}
    baseline_us = ok[0].outcome.baseline_us
    measured = Final({c: [t.outcome.us or 0.0] for c, t in working.items()}, [baseline_us] if baseline_us else [])
    best, confidence = ok[0].config, None
    if time.monotonic() < until:
        finalists = list(dict.fromkeys([t.config for t in ok[:FINALISTS]] + [c for c in (default, incumbent) if c in working]))
        ranked = _rerank(device, finalists, {default, incumbent}, until, seed)
        if ranked is not None and not ranked.samples:
            return None, None
        if ranked is not None:
            measured = ranked
            best = winner(measured.samples, incumbent, seed)
            if default in measured.samples and _median(measured, best) > _median(measured, default):
                best = default  # an incumbent that nothing beats for sure is stored as no slower than what it would hide
            confidence = sureness(measured.samples, best, seed)
    samples, baseline = measured.samples, measured.baseline
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
    return database.to_entry(problem, best, evidence), confidence


def _median(found: Final, config: Any) -> float:
    return measure.median_us(found.samples[config])


def _rerank(device: Device, finalists: Sequence[Any], kept: set[Any], until: float, seed: int) -> Final | None:
    """Samples of the finalists in common rounds; those that lag for sure have those of the first runs only, unless `kept`.

    None where they could not be measured again: the trials' own times then decide.
    """
    samples: dict[Any, list[float]] = {}
    baseline: list[float] = []
    contenders = list(finalists)
    for run in range(RUNS if device.kind != "modelled" else 1):
        if run and time.monotonic() + FINAL_SECONDS > until:
            break
        try:
            found = device.finals(contenders, FINAL_SECONDS)
        except WorkerError:
            break
        if not run:
            samples = {config: [] for config in found.samples}
            if not samples:
                return found  # all failed when they ran again
        for config in contenders:
            if config in found.samples and config in samples:
                samples[config] += found.samples[config]
            else:
                samples.pop(config, None)  # it failed when it ran again
        baseline += found.baseline
        longest = max(map(len, samples.values()), default=0)
        alive = {c: s for c, s in samples.items() if len(s) == longest}
        if len(alive) < 2:
            break
        leader = min(alive, key=lambda c: measure.median_us(alive[c]))
        open_ = [c for c in alive if c != leader and confidence_faster(alive[leader], alive[c], 0.0, seed) < CONFIDENCE]
        if not open_:
            break
        contenders = [c for c in alive if c == leader or c in open_ or c in kept]
    return Final(samples, baseline) if samples else None


def winner(samples: Mapping[Any, Sequence[float]], incumbent: Any, seed: int) -> Any:
    """The config of the smallest median of those with all rounds; the incumbent's, unless that is faster for sure."""
    longest = max(map(len, samples.values()))
    best = min((c for c in samples if len(samples[c]) == longest), key=lambda c: measure.median_us(samples[c]))
    if incumbent in samples and confidence_faster(samples[best], samples[incumbent], NEAR_TIE, seed) < CONFIDENCE:
        return incumbent
    return best


def confidence_faster(a: Sequence[float], b: Sequence[float], margin: float, seed: int) -> float:
    """How sure it is that `a` takes less time than `b` by more than `margin`, from samples of common rounds."""
    rounds = min(len(a), len(b))
    ratios = np.asarray(b[:rounds]) / np.asarray(a[:rounds])
    return float(np.mean(np.median(ratios[_resampled(rounds, seed)], axis=1) > 1 + margin))


def sureness(samples: Mapping[Any, Sequence[float]], best: Any, seed: int) -> float:
    """How sure it is that no other is faster than `best` by more than `NEAR_TIE`."""
    ours = np.asarray(samples[best])
    beaten = np.zeros(RESAMPLES, bool)
    for config, theirs in samples.items():
        rounds = min(len(theirs), len(ours))
        ratios = ours[:rounds] / np.asarray(theirs[:rounds])
        if config != best:
            beaten |= np.median(ratios[_resampled(rounds, seed)], axis=1) > 1 + NEAR_TIE
    return float(1 - np.mean(beaten))


def _resampled(rounds: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(rounds, size=(RESAMPLES, rounds))


def _round(us: float) -> float:
    return round(us, 3)
