"""Tuning one problem: a search asks, a device measures, the search is told; then the best are ranked, and an entry is made.

A device compiles some candidates while it measures others. Every result goes into an optuna study, from which a tuner that was
killed goes on, and which a fleet shares.

At the end the finalists, the default and the incumbent (what the database holds for the problem) are measured in turn
(`ranking`). The fastest is stored. The incumbent stays unless another is faster for sure: so reruns agree. With the objective
"sustained", the best of them then run without pause, in turns, and the fastest of these is stored too.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import logging
import time
from collections.abc import Callable, Sequence

import msgspec
import optuna

from mgpu_ops.core.gpu import Gpu
from mgpu_ops.registry import database
from mgpu_ops.registry.database import Entry, Evidence
from mgpu_ops.registry.spec import Config, OpSpec, Problem
from mgpu_ops.tuning import measure, ranking
from mgpu_ops.tuning.device import Device, Sustains
from mgpu_ops.tuning.ledger import Ledger
from mgpu_ops.tuning.options import TuneOptions
from mgpu_ops.tuning.outcome import Final, SustainedFinal, Trial
from mgpu_ops.tuning.search import Search, stored_config
from mgpu_ops.tuning.worker import WorkerError

FINALISTS = 8
SUSTAINED = 8  # configs run without pause, beside the default, the incumbent and the baseline: half a minute of turns
_WITHIN = 1.1  # of the fastest time in bursts: what is slower does not run without pause
_RESERVE = 0.1  # of the budget, kept for the ranking
_log = logging.getLogger("mgpu_ops")


@dataclasses.dataclass(frozen=True)
class Result:
    """All trials of a problem, the entry to store (None: no candidate worked) and how the search ended.

    The entry is of the objective that was asked for; beside a sustained one, `burst` is that of bursts. Where nothing could be
    measured sustained, `entry` is of bursts.
    """

    problem: Problem
    trials: tuple[Trial, ...]
    entry: Entry | None
    ended: str  # "trials", "budget", "target", "exhausted", "interrupted", "elsewhere"
    seconds: float
    confidence: float | None = None  # that no other finalist is faster by more than NEAR_TIE; None: they were not ranked again
    burst: Entry | None = None

    @property
    def entries(self) -> list[Entry]:
        """All that is to be stored."""
        return [entry for entry in (self.burst, self.entry) if entry is not None]

    @property
    def failures(self) -> dict[tuple[str, str], int]:
        """How many trials failed, by kind and reason."""
        failed = [t.outcome for t in self.trials if t.outcome.kind != "ok"]
        return dict(collections.Counter((outcome.kind, outcome.detail) for outcome in failed))


def tune(
    spec: OpSpec,
    problem: Problem,
    device: Device,
    options: TuneOptions = TuneOptions(),  # noqa: B008 frozen
    *,
    study: optuna.Study | None = None,
    final: Callable[[], bool] = lambda: True,
    progress: Callable[[Trial], None] = lambda trial: None,
) -> Result:
    """Searches for the fastest Config of `problem` on `device`; stores nothing but the trials, in `study`.

    Args:
      study: keeps the trials; other processes may work on it too. None: one in memory.
      final: asked once when the search is over; False leaves the ranking to another process of a fleet.
      progress: called with each trial as it ends.

    Ctrl-C ends the search and keeps what was measured. Raises ValueError where the kernel cannot run `problem`, where there is
    a target and no baseline, and where the objective is "sustained" and the device, the op or the budget does not allow it;
    WorkerError where the device fails altogether.
    """
    start = time.monotonic()
    check_supported(spec, problem, device.gpu)
    budget = options.budget - _sustained_seconds(spec, problem, device, options)
    search = Search(spec, problem, device.gpu, options)
    legal = lambda config: spec.check(problem, config, device.gpu) is None  # noqa: E731
    ledger = Ledger(study or _in_memory(), spec.Config, search.encode, legal)
    run = _Run(search, ledger, device, progress)
    best: _Best | None = None
    turns: SustainedFinal | None = None
    try:
        device.open(spec, problem, options.seed)
        if options.target is not None and device.baseline is None:
            raise ValueError(
                f"target={options.target:g} is a share of a baseline's speed, and times that are {device.kind} have none"
            )
        ended = run.search(options, start + budget * (1 - _RESERVE))
        if final():
            run.hear()  # what others of the fleet ended last
            best = _ranked(spec, problem, device, run.done, options.seed, until=start + budget)
            turns = _turns(spec, problem, device, best, run.done, options)
        else:
            ended = "elsewhere"
    except KeyboardInterrupt:
        ended = "interrupted"
        best = _by_trials(run.done)
    finally:
        ledger.close()
    trials, seconds = tuple(run.done), time.monotonic() - start
    if best is None:
        return Result(problem, trials, None, ended, seconds)
    entry = _entry(spec, problem, device, best, trials, options.seed)
    if turns is None:
        return Result(problem, trials, entry, ended, seconds, best.confidence)
    longest = _sustained_best(spec, problem, device, turns, options.seed)
    sustained = _entry(spec, problem, device, longest, trials, options.seed)
    evidence = _sustained_evidence(sustained.evidence, longest.config, turns, best.times)
    sustained = msgspec.structs.replace(sustained, evidence=evidence)
    return Result(problem, trials, sustained, ended, seconds, longest.confidence, burst=entry)


def check_supported(spec: OpSpec, problem: Problem, gpu: Gpu) -> None:
    """Raises ValueError, with the reason, where no config of the kernel can run `problem`."""
    reason = spec.supports(problem, gpu)
    if reason is not None:
        raise ValueError(f"{spec.name} {problem} cannot be tuned: {reason}")


def _in_memory() -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study()


# --- the search


class _Run:
    """Candidates on their way from a search to a device and back."""

    def __init__(self, search: Search, ledger: Ledger, device: Device, progress: Callable[[Trial], None]):
        self._search, self._ledger, self._device, self._progress = search, ledger, device, progress
        self._in_flight = 0
        self.done: list[Trial] = []

    def search(self, options: TuneOptions, until: float) -> str:
        """Runs candidates until a limit of `options`, or `until`, is reached; returns why it ended. None is left in flight."""
        self._began = time.monotonic()
        self.hear()
        self._heard = len(self.done)
        ended: str | None = None
        while True:
            if ended in (None, "exhausted"):  # a result may name new configs
                ended = self._ask(options, until)
            if not self._in_flight:
                return ended or "exhausted"
            self._tell()

    def _ask(self, options: TuneOptions, until: float) -> str | None:
        """Gives the device candidates for as long as it takes more; why the search ends, or None."""
        while self._in_flight < self._device.slots:
            if self._reached(options.target):
                return "target"
            if not self._in_time(until):
                return None if self._in_flight else "budget"  # when those are done, the pace is known better
            if (ended := self._submit(options.trials)) is not None:
                return ended
        return None

    def _tell(self) -> None:
        """Waits for a candidate, and tells the ledger and the search what came of it."""
        config, outcome = self._device.next()
        self._in_flight -= 1
        self._ledger.record(config, outcome)
        self.hear()

    def hear(self) -> None:
        """Takes in what was measured since the last time, here or elsewhere."""
        for found in self._ledger.new_results():
            trial = Trial(len(self.done), found.origin, found.config, found.outcome)
            self.done.append(trial)
            self._search.tell(found.config, found.outcome)
            self._progress(trial)

    def _submit(self, trials: int) -> str | None:
        """Gives the device one candidate; why there is none to give."""
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
        self._in_flight += 1
        return None

    def _in_time(self, until: float) -> bool:
        """Whether one more candidate, after those in flight, would be done in time at the pace so far."""
        now, measured = time.monotonic(), len(self.done) - self._heard
        if not measured:
            return (now < until or not self.done) if self._in_flight else not self.done or now < until
        return now + (self._in_flight + 1) * (now - self._began) / measured <= until

    def _reached(self, target: float | None) -> bool:
        """Whether a candidate has the target's share of the baseline's speed."""
        if target is None:
            return False
        return any(trial.outcome.kind == "ok" and (trial.outcome.speed or 0.0) >= target for trial in self.done)


# --- the best


@dataclasses.dataclass(frozen=True)
class _Best:
    """The config to store, the times that it was chosen by, and how sure the choice is."""

    config: Config
    times: Final
    confidence: float | None = None


def _by_trials(done: Sequence[Trial]) -> _Best | None:
    """The fastest by the trials' own times; None where none worked."""
    ok = _fastest_first(done)
    if not ok:
        return None
    baseline_us = ok[0].outcome.baseline_us
    times = Final({t.config: [t.outcome.us or 0.0] for t in ok}, [baseline_us] if baseline_us else [])
    return _Best(ok[0].config, times)


def _ranked(spec: OpSpec, problem: Problem, device: Device, done: Sequence[Trial], seed: int, *, until: float) -> _Best | None:
    """The fastest of the finalists, the default and the incumbent, measured again; None where none works."""
    best = _by_trials(done)
    if best is None or time.monotonic() >= until:
        return best
    default, incumbent = spec.default(problem, device.gpu), stored_config(spec, problem, device.gpu, device.kind)
    kept = [c for c in (default, incumbent) if c is not None]
    fastest = [t.config for t in _fastest_first(done)[:FINALISTS]]
    finalists = list(dict.fromkeys(fastest + [c for c in kept if c in best.times.samples]))
    times = ranking.rerank(device, finalists, kept, until, seed)
    if times is None:
        return best
    if not times.samples:
        return None
    samples = times.samples
    chosen = ranking.winner(samples, incumbent, seed)
    if default in samples and measure.median_us(samples[chosen]) > measure.median_us(samples[default]):
        chosen = default  # an incumbent that nothing beats for sure must be no slower than what it would hide
    return _Best(chosen, times, ranking.sureness(samples, chosen, seed))


# --- the best without pause


def _sustained_seconds(spec: OpSpec, problem: Problem, device: Device, options: TuneOptions) -> float:
    """How much of the budget the turns of the best take; ValueError where there can be none."""
    if options.objective == "burst":
        return 0.0
    if not isinstance(device, Sustains):
        raise ValueError(
            f'objective="sustained" is measured: times that are {device.kind} have none; run it on the GPU, or tune for "burst"'
        )
    if spec.devices(problem) > 1:
        raise ValueError(f'{spec.name} is not measured with objective="sustained": it runs between GPUs')
    needed = measure.sustained_seconds(SUSTAINED + 3, options.turn)
    if options.budget <= needed:
        raise ValueError(f'with objective="sustained", the turns alone may take {needed:.0f} s: give a larger budget')
    return needed


def _turns(
    spec: OpSpec, problem: Problem, device: Device, best: _Best | None, done: Sequence[Trial], options: TuneOptions
) -> SustainedFinal | None:
    """The turns of the best by bursts, the default and the incumbent.

    None without that objective; with a warning, where they cannot be measured.
    """
    if best is None or options.objective == "burst" or not isinstance(device, Sustains):
        return None
    worked = {trial.config for trial in done if trial.outcome.kind == "ok"}
    kept = (spec.default(problem, device.gpu), _sustained_incumbent(spec, problem, device))
    configs = [*_to_sustain(best, _fastest_first(done)), *(c for c in kept if c in worked)]
    try:
        found = device.sustained(list(dict.fromkeys(configs)), options.turn)
    except WorkerError as error:
        _log.warning("%s %s: %s: the entry is of bursts", spec.name, problem, error)
        return None
    return found if found.turns else None


def _to_sustain(best: _Best, fastest_first: Sequence[Trial]) -> list[Config]:
    """`SUSTAINED` configs: half are the fastest by the ranking, and the others the fastest of other kinds.

    Of another kind is what differs in two fields or more, such as tile and cluster: it may take less energy, and be the fastest
    at the power cap, where it is a little slower in bursts.
    """
    samples = best.times.samples
    chosen = sorted(samples, key=lambda config: measure.median_us(samples[config]))[: SUSTAINED // 2]
    limit = _WITHIN * (fastest_first[0].outcome.us or 0.0)
    near = [trial.config for trial in fastest_first if (trial.outcome.us or 0.0) <= limit]
    for config in near:
        if len(chosen) < SUSTAINED and all(_fields_apart(config, other) > 1 for other in chosen):
            chosen.append(config)
    return list(dict.fromkeys([*chosen, *near, *samples]))[:SUSTAINED]


def _fields_apart(a: Config, b: Config) -> int:
    """How many fields of two configs differ."""
    theirs = dataclasses.asdict(b)
    return sum(value != theirs[name] for name, value in dataclasses.asdict(a).items())


def _sustained_incumbent(spec: OpSpec, problem: Problem, device: Device) -> Config | None:
    return stored_config(spec, problem, device.gpu, device.kind, "sustained")


def _sustained_best(spec: OpSpec, problem: Problem, device: Device, found: SustainedFinal, seed: int) -> _Best:
    """The fastest by its turns."""
    samples = {config: [turn.us for turn in turns] for config, turns in found.turns.items()}
    default = spec.default(problem, device.gpu)
    chosen = ranking.winner(samples, _sustained_incumbent(spec, problem, device), seed)
    if default in samples and measure.median_us(samples[chosen]) > measure.median_us(samples[default]):
        chosen = default
    times = Final(samples, [turn.us for turn in found.baseline])
    return _Best(chosen, times, ranking.sureness(samples, chosen, seed))


def _sustained_evidence(evidence: Evidence, config: Config, found: SustainedFinal, bursts: Final) -> Evidence:
    """With what the turns took, and the times of bursts in the same run."""
    ours, theirs = measure.typical(found.turns[config]), measure.typical(found.baseline)
    return msgspec.structs.replace(
        evidence,
        objective="sustained",
        burst_us=_round(measure.median_us(bursts.samples[config])) if config in bursts.samples else None,
        baseline_burst_us=_round(measure.median_us(bursts.baseline)) if bursts.baseline else None,
        clock_mhz=_digits(ours.clock_mhz),
        watts=_digits(ours.watts),
        joules=_digits(ours.joules),
        baseline_watts=_digits(theirs.watts),
        baseline_joules=_digits(theirs.joules),
    )


def _digits(value: float | None) -> float | None:
    """Six digits of it."""
    return None if value is None else float(f"{value:.6g}")


def _fastest_first(done: Sequence[Trial]) -> list[Trial]:
    """The trials that worked."""
    return sorted((t for t in done if t.outcome.kind == "ok"), key=lambda t: t.outcome.us or 0.0)


def entry_of(
    spec: OpSpec, problem: Problem, device: Device, config: Config, times: Final, error: float | None, trials: int, seed: int
) -> Entry:
    """The entry that stores a config of an open problem, with the evidence for it. `times` are of one run."""
    samples, baseline = times.samples, times.baseline
    default = spec.default(problem, device.gpu)
    evidence = Evidence(
        kind=device.kind,  # type: ignore[arg-type]
        gpu=device.gpu.name,
        driver=device.versions["driver"],
        jax=str(device.versions["jax"]),
        jaxlib=str(device.versions["jaxlib"]),
        cuda=device.versions["cuda"],
        kernel_version=spec.version,
        median_us=_round(measure.median_us(samples[config])),
        spread_us=_round(measure.spread_us(samples[config])),
        default_us=_round(measure.median_us(samples[default])) if default in samples else None,
        baseline=device.baseline if baseline else None,
        baseline_us=_round(measure.median_us(baseline)) if baseline else None,
        error=error,
        trials=trials,
        seed=seed,
        date=datetime.date.today().isoformat(),
    )
    return database.to_entry(problem, config, evidence)


def _entry(spec: OpSpec, problem: Problem, device: Device, best: _Best, done: Sequence[Trial], seed: int) -> Entry:
    """The entry that stores the best config."""
    errors = {t.config: t.outcome.error for t in _fastest_first(done)}
    return entry_of(spec, problem, device, best.config, best.times, errors[best.config], len(done), seed)


def _round(us: float) -> float:
    return round(us, 3)
