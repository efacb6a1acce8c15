"""The surrogate model of a search: predicts the times of configs that were not measured from a few that were.

log(time) = log(modelled time) + offset + tilt of the model + an effect of each parameter + an effect of all together + noise

It is a Gaussian process with fixed standard deviations. A parameter's effect has `_PARAMETER`, and is alike at neighbouring
choices. A dozen parameters and thirty measurements can teach additive effects; full interactions could not be learned yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mgpu_ops.registry.spec import Config

# Standard deviations, of the logarithm of the time.
_OFFSET = 0.2  # of the model everywhere
_TILT = 0.3  # of the exponent of the modelled time
_PARAMETER = 0.05  # of a parameter's effect
_TOGETHER = 0.06  # of what only the combination tells
_NOISE = 0.01  # of a measurement

_NEXT = 0.7  # correlation of a parameter's effect at neighbouring choices
_OTHER = 0.3  # at two choices without an order


class Surrogate:
    """Learns from measured times of one problem which configs may be faster."""

    def __init__(
        self, space: Mapping[str, Sequence[Any]], index: Callable[[Config], Mapping[str, int]], cost: Callable[[Config], float]
    ):
        """`index` gives a config's places in the choices of `space`, `cost` its modelled time."""
        self._alike = []
        for choices in space.values():
            steps = np.abs(np.subtract.outer(range(len(choices)), range(len(choices))))
            ordered = not isinstance(choices[0], str)
            self._alike.append(np.where(steps == 0, 1.0, _NEXT**steps if ordered else _OTHER))
        self._index, self._cost = index, cost
        self._known: dict[Any, tuple[tuple[int, ...], float]] = {}

    def improvement(self, times: Mapping[Config, float], pending: Sequence[Config], configs: Sequence[Config]) -> np.ndarray:
        """By how much each config is expected to be faster than the fastest measured, in log(time).

        Those that are `pending` count as measured at what is expected of them, so that the next one is not their double.
        """
        tried, measured = list(times), np.log(list(times.values()))
        if pending:
            measured = np.append(measured, self._expected(tried, measured, pending)[0])
            tried += pending
        mean, deviation = self._expected(tried, measured, configs)
        gain = (math.log(min(times.values())) - mean) / deviation
        below = 0.5 * (1.0 + np.array([math.erf(x / math.sqrt(2.0)) for x in gain]))
        return deviation * (gain * below + np.exp(-0.5 * gain**2) / math.sqrt(2.0 * math.pi))

    def _expected(
        self, tried: Sequence[Config], measured: np.ndarray, configs: Sequence[Config]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of log(time) of configs, given those of the tried ones."""
        (at, model), (where, modelled) = self._places(tried), self._places(configs)
        lowest = model.min()
        residual = measured - model
        covariance = self._covariance(at, model - lowest, at, model - lowest) + _NOISE**2 * np.eye(len(at))
        cross = self._covariance(at, model - lowest, where, modelled - lowest)
        lower = np.linalg.cholesky(covariance)
        weights = np.linalg.solve(lower.T, np.linalg.solve(lower, residual - residual.mean()))
        explained = np.linalg.solve(lower, cross)
        prior = _OFFSET**2 + _TILT**2 * (modelled - lowest) ** 2 + _PARAMETER**2 * at.shape[1] + _TOGETHER**2
        variance = np.maximum(prior - (explained**2).sum(axis=0), 1e-9)
        return modelled + residual.mean() + cross.T @ weights, np.sqrt(variance)

    def _covariance(self, a: np.ndarray, model_a: np.ndarray, b: np.ndarray, model_b: np.ndarray) -> np.ndarray:
        covariance = _OFFSET**2 + _TILT**2 * np.outer(model_a, model_b)
        together = np.ones_like(covariance)
        for parameter, alike in enumerate(self._alike):
            same = alike[a[:, parameter][:, None], b[:, parameter]]
            covariance += _PARAMETER**2 * same
            together *= same
        return covariance + _TOGETHER**2 * together

    def _places(self, configs: Sequence[Config]) -> tuple[np.ndarray, np.ndarray]:
        """[config, parameter] places, and the logarithms of the modelled times."""
        for config in configs:
            if config not in self._known:
                self._known[config] = tuple(self._index(config).values()), math.log(self._cost(config))
        found = [self._known[config] for config in configs]
        return np.array([places for places, _ in found]), np.array([cost for _, cost in found])
