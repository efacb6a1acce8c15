"""The re-ranking of a search's finalists: which config is fastest, and how sure that is.

The finalists are measured in turn, in rounds. Two of them are compared by the ratio of their times in each round, with a
bootstrap over the rounds: A is faster than B by more than a margin, with confidence p, if the median ratio is beyond the margin
in a share p of `RESAMPLES` resamplings. Configs that are not told apart are measured again, up to `RUNS` times in all.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from mgpu_ops.registry.spec import Config
from mgpu_ops.tuning import measure
from mgpu_ops.tuning.device import Device
from mgpu_ops.tuning.outcome import Final
from mgpu_ops.tuning.worker import WorkerError

SECONDS = 1.0  # of measuring, a run
RUNS = 3  # the later ones for configs that are not yet told apart
NEAR_TIE = 0.003  # of the time: less is no difference
CONFIDENCE = 0.95
RESAMPLES = 1000


def rerank(device: Device, finalists: Sequence[Config], kept: Collection[Config], until: float, seed: int) -> Final | None:
    """Samples of the finalists in common rounds, until `until` on the clock `time.monotonic`.

    A config that is slower for sure has the samples of the first runs only, unless it is one of `kept`. One that fails when it
    runs again is left out. None where nothing could be measured: the trials' own times then decide.
    """
    samples: dict[Config, list[float]] = {}
    baseline: list[float] = []
    contenders = list(finalists)
    for run in range(RUNS if device.kind != "modelled" else 1):
        if run and time.monotonic() + SECONDS > until:
            break
        try:
            found = device.finals(contenders, SECONDS)
        except WorkerError:
            break
        if not run and not found.samples:
            return found
        samples = _joined(samples, found.samples, contenders) if run else {c: list(s) for c, s in found.samples.items()}
        baseline += found.baseline
        contenders = _open(samples, kept, seed)
        if not contenders:
            break
    return Final(samples, baseline) if samples else None


def _joined(
    samples: Mapping[Config, list[float]], more: Mapping[Config, list[float]], measured: Sequence[Config]
) -> dict[Config, list[float]]:
    """The samples with those of one more run; a config that was `measured` in it and failed is left out."""
    failed = {config for config in measured if config not in more}
    return {config: old + more.get(config, []) for config, old in samples.items() if config not in failed}


def _open(samples: Mapping[Config, list[float]], kept: Collection[Config | None], seed: int) -> list[Config]:
    """The configs to measure again, in the order of `samples`: the fastest and its rivals; none if it is sure."""
    alive = _with_all_rounds(samples)
    if len(alive) < 2:
        return []
    leader = min(alive, key=lambda config: measure.median_us(samples[config]))
    rivals = [
        config
        for config in alive
        if config != leader and confidence_faster(samples[leader], samples[config], 0.0, seed) < CONFIDENCE
    ]
    return [config for config in alive if config == leader or config in rivals or config in kept] if rivals else []


def winner(samples: Mapping[Config, Sequence[float]], incumbent: Config | None, seed: int) -> Config:
    """The config with the smallest median among those with all rounds.

    The `incumbent`, which the database holds, wins unless the other is more than `NEAR_TIE` faster for sure: so reruns agree.
    """
    best = min(_with_all_rounds(samples), key=lambda config: measure.median_us(samples[config]))
    if incumbent is None or incumbent not in samples:
        return best
    faster = confidence_faster(samples[best], samples[incumbent], NEAR_TIE, seed)
    return best if faster >= CONFIDENCE else incumbent


def _with_all_rounds(samples: Mapping[Config, Sequence[float]]) -> list[Config]:
    """The configs that were measured in every run."""
    most = max(map(len, samples.values()), default=0)
    return [config for config, of_one in samples.items() if len(of_one) == most]


def confidence_faster(a: Sequence[float], b: Sequence[float], margin: float, seed: int) -> float:
    """How sure it is that `a` takes less time than `b` by more than `margin`, from samples of common rounds."""
    rounds = min(len(a), len(b))
    ratios = np.asarray(b[:rounds]) / np.asarray(a[:rounds])
    return float(np.mean(np.median(ratios[_resampled(rounds, seed)], axis=1) > 1 + margin))


def sureness(samples: Mapping[Config, Sequence[float]], best: Config, seed: int) -> float:
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
