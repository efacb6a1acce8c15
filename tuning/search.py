"""The search alone: which config of a problem to try next. It knows nothing of devices, times or budgets.

It begins with seeds: the default, the nearest stored configs, the op's analytic candidates. A sampler follows: optuna's, or a
walk over all configs. Last come the configs from which the `surrogate` expects most, given the times so far: configs one
parameter off the best, or others of the pool. Configs that `check` refuses, or that the op's model puts far behind the best it
knows, are never named.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import optuna

from mgpu_ops.core import extras
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.registry import database
from mgpu_ops.registry.database import Entry
from mgpu_ops.registry.spec import Config, OpSpec, Problem
from mgpu_ops.tuning.options import SAMPLERS, TuneOptions
from mgpu_ops.tuning.outcome import Outcome
from mgpu_ops.tuning.surrogate import Surrogate

SLACK = 1.4  # a candidate modelled this much slower than the best modelled one is not tried
NEAREST = 3  # stored configs among the seeds
ANALYTIC = 6  # of the op's candidates among the seeds
LOCAL = 0.375  # of the trials have been told when the search becomes local
AROUND = 3  # of the best configs, whose neighbours are tried
_PATIENCE = 32  # times in a row that a sampler may name what was seen before or cannot run
_WALKED = 500_000  # a space of no more configs can be walked from end to end, in seconds
_POOLED = 20_000  # a space of no more configs is its own pool
_WEIGHED = 1000  # configs of the pool whose promise is weighed at each step
_DRAWS = 4000  # random configs that stand for a larger one


class Search:
    """Names configs (`ask`) and learns what became of them (`tell`), in any order and from anybody.

    From `LOCAL` of `options.trials` results on, the search is local.
    """

    def __init__(self, spec: OpSpec, problem: Problem, gpu: Gpu, options: TuneOptions = TuneOptions()):  # noqa: B008 frozen
        self._spec, self._problem, self._gpu, self._options = spec, problem, gpu, options
        self._brute, self._alone = options.sampler == "brute", options.sampler_only
        self._space = {k: list(v) for k, v in spec.space(problem, gpu).items()}
        self._random = random.Random(options.seed)
        self._study = optuna.create_study(sampler=sampler_of(options.sampler, options.seed))
        self._open: dict[Config, optuna.Trial] = {}  # named by the sampler, and nothing told yet
        self._pending: dict[Config, None] = {}  # named by whatever, and nothing told yet
        self._seen: set[Config] = set()
        self._times: dict[Config, float] = {}  # of what worked
        self._told = 0
        self._patience = _PATIENCE
        self._walk: Iterator[Config] | None = None
        self._costs: dict[Config, float] = {}
        self._limit = math.inf  # of the modelled time, in seconds
        self._fast: list[Config] | None = None  # all that may be named, where that is known
        self._pool: list[Config] = []
        self._seeds: collections.deque[tuple[Config, str]] = collections.deque()
        if self._brute and not self._alone:
            self._seeds.append((spec.default(problem, gpu), "default"))
        elif not self._alone:
            self._use_model()

    def _use_model(self) -> None:
        """Seeds, the pool and the surrogate: all that the op's model of time gives a search."""
        pool = self._pooled()
        self._limit = SLACK * min((self._cost(c) for c in pool), default=math.inf)
        self._seeds.extend(self._seeded(pool))
        fast = [c for c in pool if self._cost(c) <= self._limit]
        self._fast = fast if self._size() <= _POOLED else None
        self._pool = self._random.sample(fast, min(len(fast), _WEIGHED))
        self._surrogate = Surrogate(self._space, self._indices, self._cost)

    def ask(self) -> tuple[Config, str] | None:
        """A new legal config and where it comes from: default, near, model, local or search. None once there is no more."""
        while self._seeds:
            config, origin = self._seeds.popleft()
            if self._new(config, modelled=False):
                return self._named(config, origin)
        if self._fast is not None and all(config in self._seen for config in self._fast):
            return None
        if not self._brute:
            if not self._alone and self._told >= LOCAL * self._options.trials and (promising := self._promising()) is not None:
                return promising
            if (sampled := self._sampled()) is not None:
                return self._named(sampled, "search")
        left = next(filter(self._new, self._rest()), None)
        return None if left is None else self._named(left, "search")

    def tell(self, config: Config, outcome: Outcome) -> None:
        """What became of a config, whoever thought of it and whoever measured it."""
        self._seen.add(config)
        self._pending.pop(config, None)
        self._told += 1
        us = outcome.us if outcome.kind == "ok" else None
        asked = self._open.pop(config, None)
        pruned = optuna.trial.TrialState.PRUNED  # TPE learns from pruned trials, not from failed ones
        if us is not None:
            self._times[config] = us
        if asked is not None:
            self._study.tell(asked, us) if us is not None else self._study.tell(asked, state=pruned)
            return
        params, distributions = self.encode(config)
        state = optuna.trial.TrialState.COMPLETE if us is not None else pruned
        self._study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=us, state=state))

    def drop(self, config: Config) -> None:
        """Says of a config that `ask` named that somebody else measures it."""
        asked = self._open.pop(config, None)
        if asked is not None:
            self._study.tell(asked, state=optuna.trial.TrialState.FAIL)

    def encode(self, config: Config) -> tuple[dict[str, int], dict[str, Any]]:
        """A config as optuna's params, indices into the choices, and their distributions.

        A value that is none of the choices stands at its nearest.
        """
        return self._indices(config), {k: optuna.distributions.IntDistribution(0, len(v) - 1) for k, v in self._space.items()}

    def _indices(self, config: Config) -> dict[str, int]:
        return {k: _index(v, getattr(config, k)) for k, v in self._space.items()}

    def _named(self, config: Config, origin: str) -> tuple[Config, str]:
        self._pending[config] = None
        return config, origin

    # --- which configs may be named

    def _new(self, config: Config, modelled: bool = True) -> bool:
        """`_nameable`; the config counts as seen from now on."""
        nameable = self._nameable(config, modelled)
        self._seen.add(config)
        return nameable

    def _nameable(self, config: Config, modelled: bool = True) -> bool:
        """Whether a config was not seen before, can run and may be fast."""
        if config in self._seen or self._spec.check(self._problem, config, self._gpu) is not None:
            return False
        return not modelled or self._limit == math.inf or self._cost(config) <= self._limit

    def _cost(self, config: Config) -> float:
        if config not in self._costs:
            self._costs[config] = self._spec.cost(self._problem, config, self._gpu)
        return self._costs[config]

    def _size(self) -> int:
        return math.prod(map(len, self._space.values()))

    def _every(self) -> Iterator[Config]:
        return (self._spec.Config(**dict(zip(self._space, v))) for v in itertools.product(*self._space.values()))

    def _drawn(self) -> Iterator[Config]:
        return (self._spec.Config(**{k: self._random.choice(v) for k, v in self._space.items()}) for _ in range(_DRAWS))

    def _pooled(self) -> list[Config]:
        """Legal configs: all there are in a small space, else random ones."""
        configs = self._every() if self._size() <= _POOLED else self._drawn()
        return [c for c in dict.fromkeys(configs) if self._spec.check(self._problem, c, self._gpu) is None]

    def _rest(self) -> Iterator[Config]:
        """Legal configs that nobody named: all there are in a space that can be walked, else random ones.

        In the order of the space for "brute", else in random order.
        """
        if self._walk is None:
            if self._brute:
                self._walk = self._every()
            else:
                configs = self._every() if self._size() <= _WALKED else self._drawn()
                legal = [c for c in configs if self._spec.check(self._problem, c, self._gpu) is None]
                self._random.shuffle(legal)
                self._walk = iter(legal)
        return self._walk

    # --- where they come from

    def _seeded(self, pool: Sequence[Config]) -> Iterator[tuple[Config, str]]:
        """The default, the nearest stored entries, the op's analytic candidates, and the best of the pool by the model.

        For times without pause also the op's `thrifty` ones, which the model of bursts may put behind.
        """
        yield self._spec.default(self._problem, self._gpu), "default"
        named = self._options.neighbours
        objective = self._options.objective
        near = stored_neighbours(self._spec, self._problem, self._gpu, objective) if named is None else named
        yield from ((c, "near") for c in near[:NEAREST])
        if objective == "sustained":
            yield from ((c, "model") for c in self._spec.thrifty(self._problem, self._gpu))
        analytic = self._spec.candidates(self._problem, self._gpu)[:ANALYTIC]
        yield from ((c, "model") for c in analytic if self._cost(c) <= self._limit)
        yield from ((c, "model") for c in sorted(pool, key=self._cost)[:2])

    def _sampled(self) -> Config | None:
        """A new config that optuna names; None where it names only what was seen before or cannot run."""
        for _ in range(self._patience):
            trial = self._study.ask()
            config = self._spec.Config(**{k: v[trial.suggest_int(k, 0, len(v) - 1)] for k, v in self._space.items()})
            if self._new(config):
                self._open[config] = trial
                return config
            self._study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        self._patience = max(1, self._patience // 2)  # it will hardly do better: the rest is walked
        return None

    def _promising(self) -> tuple[Config, str] | None:
        """The config, of the pool and of those one parameter off the best ones, that may gain most."""
        if not self._times:
            return None
        near = [c for c in dict.fromkeys(self._neighbours()) if self._nameable(c)]
        configs = list(dict.fromkeys(near + [c for c in self._pool if c not in self._seen]))
        if not configs:
            return None
        gains = self._surrogate.improvement(self._times, list(self._pending), configs)
        config = configs[int(gains.argmax())]
        self._seen.add(config)
        return self._named(config, "local" if config in near else "model")

    def _neighbours(self) -> Iterator[Config]:
        """Configs that differ from one of the best in one field."""
        for best in sorted(self._times, key=lambda c: self._times[c])[:AROUND]:
            for field, choices in self._space.items():
                yield from (dataclasses.replace(best, **{field: value}) for value in choices)


def sampler_of(name: str, seed: int) -> optuna.samplers.BaseSampler:
    """optuna's sampler of one of `SAMPLERS`. Raises ValueError for another name, and where "gp" lacks torch."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if name == "tpe":
        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=8)
    if name in ("random", "brute"):
        return optuna.samplers.RandomSampler(seed=seed)
    if name == "gp":
        if lacks := lacks_for_gp():
            raise ValueError(f"sampler 'gp' {lacks}, or choose another of {', '.join(SAMPLERS)}")
        return optuna.samplers.GPSampler(seed=seed, n_startup_trials=8, deterministic_objective=False)
    raise ValueError(f"sampler {name!r} is not one of {', '.join(SAMPLERS)}")


def lacks_for_gp() -> str | None:
    """What the sampler "gp" needs and is not installed, and the way to it; None where all is there."""
    lacking = [module for module in extras.BRINGS["gp"] if not extras.installed(module)]
    return f"needs {' and '.join(lacking)}: {extras.install('gp')}" if lacking else None


def stored_neighbours(spec: OpSpec, problem: Problem, gpu: Gpu, objective: database.Objective = "burst") -> list[Config]:
    """Configs of the stored entries nearest to a problem, its own first; of those equally near, the objective's first."""
    found = []
    for entry in _stored(spec.name, gpu):
        try:
            other = database.to_problem(spec, entry.problem)
            config = database.to_config(spec, entry.config)
        except ValueError:
            continue  # of another version of the kernel
        distance = spec.distance(other, problem)
        if distance is not None and not spec.leaves_to_xla(config):
            found.append((distance, entry.evidence.objective != objective, config))
    found.sort(key=lambda near: near[:2])
    return list(dict.fromkeys(config for *_, config in found))[:NEAREST]


def stored_config(
    spec: OpSpec, problem: Problem, gpu: Gpu, kind: str, objective: database.Objective = "burst"
) -> Config | None:
    """The config of the `stored_entry`; None if there is none, or one that leaves the problem to XLA."""
    entry = stored_entry(spec, problem, gpu, kind, objective)
    config = None if entry is None else database.to_config(spec, entry.config)
    return None if config is None or spec.leaves_to_xla(config) else config


def stored_entry(spec: OpSpec, problem: Problem, gpu: Gpu, kind: str, objective: database.Objective = "burst") -> Entry | None:
    """The user's entry, else the shipped one, for exactly this problem, of this kind and objective.

    None if there is none that can run.
    """
    key = database.key_of_fields(dataclasses.asdict(problem))
    for entry in _stored(spec.name, gpu):
        e, its = entry.evidence, database.key_of_fields(entry.problem)
        if (its, e.kind, e.objective, e.kernel_version) == (key, kind, objective, spec.version):
            with contextlib.suppress(ValueError):  # of fields that somebody edited
                if spec.check(problem, database.to_config(spec, entry.config), gpu) is None:
                    return entry
    return None


def _stored(op: str, gpu: Gpu) -> Iterator[Entry]:
    """The user's entries, then the shipped ones. A broken file has none here; `resolve` warns of it."""
    for location in database.existing_files([gpu.key], op):
        with contextlib.suppress(database.DatabaseError):
            yield from database.read(location.path, gpu_key=gpu.key, op=op).entries


def _index(choices: Sequence[Any], value: Any) -> int:
    if value in choices:
        return choices.index(value)
    return 0 if isinstance(value, str) else min(range(len(choices)), key=lambda i: abs(choices[i] - value))
