"""Replays searches on recorded sweeps: how far from a sweep's optimum does a search end, and after how many trials?

A `Recorded` device answers as a GPU would: what failed fails, and a time is the median of samples drawn, with replacement,
from those that were measured. The search runs on it as it does on a GPU, with as many candidates in flight and its
re-ranking, cold: no stored config is among its seeds. Regret is the recorded median of the config it chose over the smallest
of the sweep, less 1.

The score is that of Willemsen et al. (10.1016/j.future.2024.05.021), with trials for time: 0 is a random search, as calculated
from the sweep, 1 the optimum from the first trial on.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import os
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import mgpu_ops
from mgpu_ops.registry import database, resolution
from mgpu_ops.registry.database import Entry, Evidence
from mgpu_ops.registry.spec import Config, OpSpec, Problem
from mgpu_ops.tuning import measure, tuner
from mgpu_ops.tuning.options import TuneOptions
from mgpu_ops.tuning.outcome import Final, Outcome
from mgpu_ops.tuning.replay.sweep import Sweep, gpu_of

OURS = "ours"  # the default search: seeds, tpe, local
SAMPLERS = (OURS, "tpe", "gp", "random", "brute")  # the others alone: without seeds, model and local search
FOUND = 0.01  # of regret: the optimum counts as found
_CUTOFF = 0.95  # of the way from the median to the optimum: a random search that is there ends the comparison


class Recorded:
    """A device that answers from a sweep; the seed draws the samples."""

    kind = "recorded"
    slots = 8  # as a GPU's

    def __init__(self, sweep: Sweep, spec: OpSpec, seed: int = 0):
        self.gpu, self.baseline = gpu_of(sweep), sweep.baseline
        self.versions = {"driver": sweep.driver, "jax": sweep.jax, "jaxlib": sweep.jaxlib, "cuda": sweep.cuda}
        self.notes: list[str] = []
        self.rows = dict(zip(sweep.configs(spec), sweep.rows, strict=True))
        self._random = random.Random(seed)
        self._flying: collections.deque[Any] = collections.deque()

    def open(self, spec: OpSpec, problem: Problem, seed: int) -> None:
        self._flying.clear()

    def submit(self, config: Config) -> None:
        self._flying.append(config)

    def next(self) -> tuple[Config, Outcome]:
        if not self._flying:
            raise LookupError("no candidate is under way")
        config = self._flying.popleft()
        row = self.rows[config]
        if row.kind != "ok":
            return config, Outcome(row.kind, detail=row.detail)
        samples = self._drawn(config, len(row.samples))
        us = measure.median_us(samples)
        return config, Outcome("ok", us, row.baseline_us, row.error, row.detail, tuple(samples))

    def finals(self, configs: Sequence[Config], seconds: float) -> Final:
        once = sum(self.rows[config].us for config in configs)
        rounds = measure.rounds_for(seconds, once, low=11, high=101)
        baseline = [b for config in configs[:1] if (b := self.rows[config].baseline_us)]
        return Final({config: self._drawn(config, rounds) for config in configs}, baseline)

    def close(self) -> None:
        pass

    def _drawn(self, config: Config, count: int) -> list[float]:
        return self._random.choices(self.rows[config].samples, k=count)


def recorded_spec(sweep: Sweep) -> tuple[OpSpec, Any]:
    """The op as far as it was measured, and the problem: other configs are refused, and nothing stored is near.

    Its space is all that occurs in the sweep, not the grid alone: regret is counted from the best of all rows.
    """
    spec = mgpu_ops.spec_of(sweep.op)
    problem, gpu = database.to_problem(spec, sweep.problem), gpu_of(sweep)
    measured = set(sweep.configs(spec))
    cost = functools.cache(lambda config: spec.cost(problem, config, gpu))
    default = spec.default(problem, gpu)
    if default not in measured:  # the model has changed since: what it would choose of what was measured, with most stages
        default = min(sweep.configs(spec), key=lambda config: (cost(config), -getattr(config, "max_concurrent_steps", 0)))
    analytic = [config for config in spec.candidates(problem, gpu) if config in measured] or [default]
    recorded = dataclasses.replace(
        spec,
        space=lambda problem, gpu: dict(sweep.parameters),
        check=lambda problem, config, gpu: None if config in measured else "it was not measured",
        candidates=lambda problem, gpu: analytic,
        default=lambda problem, gpu: default,
        cost=lambda problem, config, gpu: cost(config),
        distance=lambda x, y: None,
    )
    return recorded, problem


# --- one search


@dataclasses.dataclass(frozen=True)
class Played:
    """A search on a sweep: its regret in the end, and after each trial the regret of the best by the times it saw."""

    regret: float
    curve: tuple[float, ...]  # infinity until a candidate worked


def play(sweep: Sweep, sampler: str = OURS, trials: int = 32, seed: int = 0) -> Played:
    """One search on a sweep, by one of `SAMPLERS`."""
    spec, problem = recorded_spec(sweep)
    device = Recorded(sweep, spec, seed)
    if sampler != OURS:  # outside of the grid it would hardly ever name what was measured
        spec = dataclasses.replace(spec, space=lambda problem, gpu: dict(sweep.grid))
    options = TuneOptions(trials=trials, seed=seed, neighbours=())
    if sampler != OURS:
        options = dataclasses.replace(options, sampler=sampler, sampler_only=True)
    result = tuner.tune(spec, problem, device, options)
    if result.ended == "interrupted":
        raise KeyboardInterrupt  # a search that was cut off says nothing of the sampler
    curve, best, seen = [], math.inf, math.inf
    for trial in result.trials:
        if trial.outcome.us is not None and trial.outcome.us < seen:
            seen, best = trial.outcome.us, device.rows[trial.config].us / sweep.optimum - 1
        curve.append(best)
    curve += curve[-1:] * (trials - len(curve))  # the space was exhausted
    if result.entry is None:
        return Played(math.inf, tuple(curve))
    chosen = database.to_config(spec, result.entry.config)
    return Played(device.rows[chosen].us / sweep.optimum - 1, tuple(curve))


# --- all of them


@dataclasses.dataclass(frozen=True)
class Score:
    """A sampler's searches on all sweeps; regrets are shares: 0.01 is 1 %."""

    median_regret: float
    p95_regret: float
    score: float  # Willemsen's, the mean of the problems
    rerun_spread: float  # of a problem's reruns: the slowest choice over the fastest, less 1; the largest of the problems
    trials_to_1_percent: float | None  # the median of the searches; None: more than half never got there
    curve: tuple[float, ...]  # median regret after each trial


def score(played: Sequence[tuple[Sweep, Sequence[Played]]]) -> Score:
    """Of the searches of one sampler on each sweep."""
    every = [p for _, searches in played for p in searches]
    regrets = [p.regret for p in every]
    firsts = [next((n + 1 for n, regret in enumerate(p.curve) if regret <= FOUND), math.inf) for p in every]
    found = statistics.median(firsts)
    spreads = [(1 + max(p.regret for p in s)) / (1 + min(p.regret for p in s)) - 1 for _, s in played]
    return Score(
        median_regret=statistics.median(regrets),
        p95_regret=float(np.quantile(regrets, 0.95)),
        score=statistics.mean(willemsen(sweep, [p.curve for p in searches]) for sweep, searches in played),
        rerun_spread=max(spreads),
        trials_to_1_percent=None if math.isinf(found) else found,
        curve=tuple(statistics.median(p.curve[n] for p in every) for n in range(len(every[0].curve))),
    )


def random_curve(sweep: Sweep, trials: int) -> np.ndarray:
    """The expected time of the best of 1, 2, ... configs drawn without replacement; one that failed counts as the slowest."""
    times = np.sort([row.us for row in sweep.rows])
    times[np.isinf(times)] = times[np.isfinite(times)].max()
    n = len(times)
    expected, left = [], np.full(n, 1.0 / n)  # left: that the i-th fastest is the fastest of those drawn
    for drawn in range(1, min(trials, n) + 1):
        expected.append(float(left @ times))
        # C(n-i, t) / C(n, t+1) from C(n-i, t-1) / C(n, t), for i = 1 ... n
        left = left * np.maximum(n - np.arange(1, n + 1) - drawn + 1, 0) / drawn * (drawn + 1) / max(n - drawn, 1)
    return np.array(expected + expected[-1:] * (trials - len(expected)))


def willemsen(sweep: Sweep, curves: Sequence[Sequence[float]]) -> float:
    """The mean, until a random search is near the optimum, of how far beyond it a search is: 0 as random, 1 at the optimum."""
    finite = [row.us for row in sweep.rows if math.isfinite(row.us)]
    worst, median, best = max(finite), statistics.median(finite), min(finite)
    expected = random_curve(sweep, len(curves[0]))
    near = np.flatnonzero(expected <= best + (1 - _CUTOFF) * (median - best))
    until = int(near[0]) + 1 if len(near) else len(expected)
    seen = np.mean([[min(best * (1 + regret), worst) for regret in curve[:until]] for curve in curves], axis=0)
    return float(np.mean((expected[:until] - seen) / np.maximum(expected[:until] - best, 1e-9)))


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Without any trial: each problem with the config that the database finds when it holds the optima of the others only."""

    median_share: float  # of the optimum's speed
    smallest_share: float
    smallest_of_default: float  # of the default's speed


def held_out(sweeps: Sequence[Sweep]) -> HeldOut:
    shares, against = [], []
    for sweep in sweeps:
        us, default = _resolved(sweep, [other for other in sweeps if other is not sweep and other.op == sweep.op])
        shares.append(sweep.optimum / us)
        against.append(default / us)
    return HeldOut(statistics.median(shares), min(shares), min(against))


def _resolved(sweep: Sweep, others: Sequence[Sweep]) -> tuple[float, float]:
    """Times of the config that `resolve` finds for a sweep's problem with the others' optima stored, and of the default."""
    recorded, problem = recorded_spec(sweep)
    # Under another name no shipped entry is found, which may be one for this very problem.
    spec = dataclasses.replace(
        mgpu_ops.spec_of(sweep.op), name="held-out", check=recorded.check, default=recorded.default, cost=recorded.cost
    )
    rows, gpu = dict(zip(sweep.configs(spec), sweep.rows, strict=True)), gpu_of(sweep)
    with tempfile.TemporaryDirectory() as folder, _environment("MGPU_OPS_CONFIG_DIR", folder):
        database.update(database.user_path(gpu.key, spec.name), map(_optimum, others), gpu_key=gpu.key, op=spec.name)
        chosen = resolution.resolve(spec, problem, gpu).config
    return rows[chosen].us, rows[spec.default(problem, gpu)].us


def _optimum(sweep: Sweep) -> Entry:
    spec, problem = recorded_spec(sweep)
    rows = dict(zip(sweep.configs(spec), sweep.rows, strict=True))
    config, row = min(rows.items(), key=lambda pair: pair[1].us)
    default = rows[spec.default(problem, gpu_of(sweep))]
    evidence = Evidence(
        kind="measured", gpu=sweep.device, driver=sweep.driver, jax=sweep.jax, jaxlib=sweep.jaxlib, cuda=sweep.cuda,
        kernel_version=sweep.kernel_version, median_us=row.us, spread_us=measure.spread_us(row.samples),
        default_us=default.us if default.samples else None, baseline=None, baseline_us=None,
        error=None, trials=len(rows), seed=sweep.seed, date=sweep.date,
    )  # fmt: skip
    return database.to_entry(problem, config, evidence)


class _environment:
    """An environment variable for a while."""

    def __init__(self, name: str, value: str):
        self._name, self._value = name, value

    def __enter__(self) -> None:
        self._before = os.environ.get(self._name)
        os.environ[self._name] = self._value

    def __exit__(self, *_: object) -> None:
        os.environ.pop(self._name)
        if self._before is not None:
            os.environ[self._name] = self._before


def factors(sweeps: Sequence[Sweep], ours: Score) -> tuple[float, float] | None:
    """How many times the trials of the default search a random and an exhaustive one need to come within 1 % of the optimum.

    A random search's trials are expected ones, an exhaustive one's all configs; medians of the problems.
    """
    if ours.trials_to_1_percent is None:
        return None
    expected = []
    for sweep in sweeps:
        near = sum(row.us <= (1 + FOUND) * sweep.optimum for row in sweep.rows)
        expected.append((len(sweep.rows) + 1) / (near + 1))
    every = statistics.median(len(sweep.rows) for sweep in sweeps)
    return statistics.median(expected) / ours.trials_to_1_percent, every / ours.trials_to_1_percent


def play_all(
    sweeps: Sequence[Sweep],
    samplers: Sequence[str] = SAMPLERS,
    trials: int = 32,
    seeds: int = 10,
    progress: Callable[[], None] = lambda: None,
) -> Iterator[tuple[str, Score]]:
    """Each sampler's score, from `seeds` searches on each sweep."""
    for sampler in samplers:
        played = []
        for sweep in sweeps:
            searches = []
            for seed in range(1 if sampler == "brute" else seeds):  # its order is always the same
                searches.append(play(sweep, sampler, trials, seed))
                progress()
            played.append((sweep, searches))
        yield sampler, score(played)


_COLORS = {OURS: "#d62728", "tpe": "#1f77b4", "gp": "#9467bd", "random": "#7f7f7f", "brute": "#8c8d1a"}
_DASHES = {OURS: "-", "tpe": "--", "gp": "-.", "random": ":", "brute": (0, (1, 3))}  # so that colours are not all


def pictures(path: Path) -> list[Path]:
    """The files of `picture`."""
    name = path.stem if path.suffix in (".png", ".svg") else path.name
    return [path.parent / f"{name}{suffix}" for suffix in (".png", ".svg")]


def picture(scores: dict[str, Score], problems: int, path: Path) -> list[Path]:
    """Median regret against trials of every sampler, as PNG and SVG; the files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    for name, found in scores.items():
        shown = [(n + 1, 100 * regret) for n, regret in enumerate(found.curve) if math.isfinite(regret)]
        label = "mgpu-tune (seeds, tpe, local)" if name == OURS else f"{name} alone"
        look: Any = {"color": _COLORS[name], "linestyle": _DASHES[name], "linewidth": 2.5 if name == OURS else 1.5}
        axes.plot(*zip(*shown), label=label, **look)
    axes.set_yscale("symlog", linthresh=0.5)
    axes.set_ylim(bottom=0)
    axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set_xlabel("trials")
    axes.set_ylabel("regret, % (median)")
    axes.set_title(f"Distance from the optimum of {problems} recorded problems")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower left", ncols=3, frameon=False)
    files = pictures(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for file in files:
        figure.savefig(file, dpi=150)
    plt.close(figure)
    return files
