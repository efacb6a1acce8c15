"""What is worth trying for a grouped matmul, and a model of its time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mgpu_ops import groups
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.grouped_matmul.problem import Problem, bytes_moved, check, supports
from mgpu_ops.groups import Config, itemsize_of


def space(problem: Problem, gpu: Gpu) -> dict[str, Sequence[Any]]:
    """The choices for each field of Config, in order; `check` says which combinations run."""
    del problem, gpu
    return groups.space()


def cost(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Modelled time in seconds: `groups.cost` of the tiles of all groups, the last of each on average half empty."""
    p, c = problem, config
    rows = groups.pieces(p.spread, p.m, p.groups, c.tile_m)
    tiles = rows * math.ceil(p.n / c.tile_n)
    return groups.cost(c, tiles, math.ceil(p.k / c.tile_k), itemsize_of(p.out_dtype), bytes_moved(p), gpu)


def candidates(problem: Problem, gpu: Gpu) -> list[Config]:
    """Analytic choices, none measured, the least modelled `cost` first. Raises ValueError where `supports` has a reason."""
    reason = supports(problem, gpu)
    if reason is not None:
        raise ValueError(f"no config of grouped_matmul fits {problem} on {gpu.name}: {reason}")
    row = 128 // itemsize_of(problem.out_dtype)  # stores of several swizzle rows were slower wherever they were tried
    legal = groups.candidates(lambda wg_n: ((row, 2), (row, 1)), lambda c: check(problem, c, gpu) is None)
    return sorted(legal, key=lambda c: cost(problem, c, gpu))


def default(problem: Problem, gpu: Gpu) -> Config:
    """The first of the `candidates`."""
    return candidates(problem, gpu)[0]


def distance(x: Problem, y: Problem) -> float | None:
    """How far a config tuned for `x` is from `y`: |log2| ratios of m, n, k and groups; None where it does not carry over."""
    if itemsize_of(x.out_dtype) != itemsize_of(y.out_dtype):
        return None
    sides = ((x.m, y.m), (x.n, y.n), (x.k, y.k), (x.groups, y.groups))
    near = sum(abs(math.log2(u / v)) for u, v in sides)
    near += 0.05 * (x.dtype != y.dtype) + 0.5 * (x.layout != y.layout) + 0.25 * (x.spread != y.spread)
    near += 0.05 * (x.bias != y.bias) + 0.05 * (x.activation != y.activation)
    return near if near <= 4.0 else None
