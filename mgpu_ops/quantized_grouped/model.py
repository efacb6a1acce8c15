"""Configs worth trying for a grouped product with quantized weights, and a model of their time, which is quantized_matmul's."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import first_of, require
from mgpu_ops.grouped import model as grouped
from mgpu_ops.matmul.quantized import model as quantized
from mgpu_ops.matmul.quantized.problem import Config
from mgpu_ops.quantized_grouped.problem import Problem, bytes_moved, check, supports, used_groups


def space(problem: Problem, gpu: Gpu) -> dict[str, Sequence[Any]]:
    """The values of each Config field, in order. `check` tells which combinations run."""
    return quantized.space(problem, gpu) | {"cluster": ("none",), "split_k": (1,)}


def cost(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Modelled time in seconds: `quantized.cost_of_tiles` of the tiles of all groups, the last of each half empty."""
    p, c = problem, config
    grouped.require_rows(p)
    tiles = grouped.row_blocks(p.spread, p.m, p.groups, c.tile_m) * math.ceil(p.n / c.tile_n)
    return quantized.cost_of_tiles(p, c, tiles, bytes_moved(p), gpu)


def candidates(problem: Problem, gpu: Gpu) -> list[Config]:
    """Configs chosen without measurements, the least modelled `cost` first: one for each tile and share of it.

    The pipeline is as deep as shared memory allows. Raises ValueError where `supports` has a reason.
    """
    require("quantized_grouped_matmul", supports(problem, gpu), problem, gpu)
    few = (config for config in _shapes(problem) if not _is_short_of_registers(problem, config))
    found = (quantized.deepest(problem, _divided(problem, config), gpu, check) for config in few)
    return sorted((c for c in found if c is not None), key=lambda c: cost(problem, c, gpu))


def _divided(p: Problem, c: Config) -> Config:
    """The config with registers for four consumers of long steps with groups of scales: at 96 they spill, at 104 they do not.

    Producer and helper are left 24 and 40 (`helper_registers`), which is enough without zero points.
    """
    long = c.exchange == "x" and (c.tile_m, c.tile_k, c.compute_warpgroups, c.wg_dimension) == (8, 512, 4, "n")
    return dataclasses.replace(c, memory_registers=24) if long and p.group_size and not p.zero_points else c


def _is_short_of_registers(p: Problem, c: Config) -> bool:
    """Whether ptxas spills in the loop, by what was compiled: beside quantized_matmul's, all long steps with groups of scales.

    Those of 8 rows are 2 % faster than steps of 256; with zero points they spill 16 bytes outside of the loop.
    """
    return quantized.is_short_of_registers(p, c) or (c.exchange == "x" and p.group_size > 0 and c.tile_m > 8 and c.tile_k > 256)


def _shapes(p: Problem) -> Iterator[Config]:
    """Tiles and how they are divided, with as many steps as any of them may have.

    Tiles have about as many rows as a group, or twice as many: a further tile of a group takes as long as the first. Some have
    no more than 64: of larger ones, not all problems leave registers for a sum and two products.
    """
    rows = p.m / used_groups(p)
    most = (min(rows, 64), rows, 2 * rows)
    tile_ms = sorted({next(m for m in (8, 16, 24, 32, 48, 64, 96, 128) if m >= min(wanted, 128)) for wanted in most})
    choices = itertools.product(tile_ms, (64, 128, 192, 256), (128, 256, 512), quantized.DIVISIONS, ("weights", "x"))
    for tile_m, tile_n, tile_k, (warpgroups, wg_dimension), exchange in choices:
        yield Config(tile_m, tile_n, tile_k, quantized.STEPS[-1], warpgroups, wg_dimension, "none", 1, 40, exchange)


@functools.lru_cache(maxsize=256)  # `resolve` compares each near entry with it
def default(problem: Problem, gpu: Gpu) -> Config:
    """The first of the `candidates`. Raises ValueError where there is none."""
    return first_of(candidates(problem, gpu), problem, gpu)


def distance(x: Problem, y: Problem) -> float | None:
    """`quantized.distance` of one group, by how many rows it has; and what the number of groups, spread and offset add.

    None where a config does not carry over.
    """
    if 0 in (x.m, y.m, x.groups, y.groups):
        return None
    near = quantized.distance(x, dataclasses.replace(y, m=x.m))
    if near is None:
        return None
    groups = math.log2(x.groups / y.groups)
    near += abs(math.log2(x.m / y.m) - groups) + 0.25 * abs(groups)
    near += 0.25 * (x.spread != y.spread) + 0.05 * (x.group_offset != y.group_offset)
    return near if near <= 4.0 else None
