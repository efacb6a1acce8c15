"""What is worth trying for a grouped matmul, and a model of its time."""

from __future__ import annotations

import math

from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import first_of, itemsize_of
from mgpu_ops.grouped import model as common
from mgpu_ops.grouped.config import Config
from mgpu_ops.grouped.grouped_matmul.problem import Problem, bytes_moved, check, supports


def cost(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Modelled time in seconds: `common.cost` of the tiles of all groups, the last of each on average half empty."""
    p, c = problem, config
    common.require_rows(p)
    rows = common.row_blocks(p.spread, p.m, p.groups, c.tile_m)
    tiles = rows * math.ceil(p.n / c.tile_n)
    return common.cost(p, c, tiles, (1 + p.second) * math.ceil(p.k / c.tile_k), bytes_moved(p), gpu)


def candidates(problem: Problem, gpu: Gpu) -> list[Config]:
    """Analytic choices, none measured, the least modelled `cost` first. Raises ValueError where `supports` has a reason."""
    reason = supports(problem, gpu)
    if reason is not None:
        raise ValueError(f"no config of grouped_matmul fits {problem} on {gpu.name}: {reason}")
    row = 128 // itemsize_of(problem.out_dtype)  # stores of several swizzle rows were slower wherever they were tried
    legal = common.candidates(lambda wg_n: ((row, 2), (row, 1)), lambda c: check(problem, c, gpu) is None)
    return sorted(legal, key=lambda c: cost(problem, c, gpu))


def default(problem: Problem, gpu: Gpu) -> Config:
    """The first of the `candidates`. Raises ValueError where there is none."""
    return first_of(candidates(problem, gpu), problem, gpu)


def distance(x: Problem, y: Problem) -> float | None:
    """`common.distance`, and what layout, bias, activation, offset and scale add."""
    own = 0.5 * (x.layout != y.layout) + 0.05 * (x.bias != y.bias) + 0.05 * (x.activation != y.activation)
    own += 0.05 * (x.group_offset != y.group_offset) + 0.05 * (x.row_scale != y.row_scale)
    own += 0.05 * (x.second != y.second)
    return common.distance(x, y, own)
