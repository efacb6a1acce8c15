"""What is worth trying for a gated grouped matmul, and a model of its time: that of a grouped matmul of twice the columns."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from mgpu_ops.core import gemm
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import first_of, itemsize_of, require
from mgpu_ops.grouped import model as common
from mgpu_ops.grouped.config import Config, panel
from mgpu_ops.grouped.gated.problem import Problem, bytes_moved, check, of_one, results, supports, whole_tiles_of
from mgpu_ops.grouped.grouped_matmul import model as grouped

_TILES = ((128, 128), (256, 64), (64, 256), (64, 128), (128, 64), (64, 64))  # of one product; both take twice the registers

_BLOCKS = 0.8  # of the rate is left with scales of blocks, as in grouped_matmul


def space(problem: Problem, gpu: Gpu) -> dict[str, Sequence[Any]]:
    """The choices for each field of Config, in order: those whose tiles leave room for a second matrix and accumulator."""
    return common.space(of_one(problem), gpu) | {
        "tile_n": (64, 128, 256),
        "max_concurrent_steps": (2, 3, 4, 5, 6, 8),
        "epilogue_tile_n": (32, 64, 128),
        "schedule": ("static", "dynamic"),
        "short_tiles": (False,) if whole_tiles_of(problem) else (False, True),
    }


def cost(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Modelled time in seconds: `common.cost` with tiles of both products, whose wgmma is as wide as one of them."""
    p, c = problem, config
    common.require_rows(p)
    if common.has_few_rows(p):
        return common.cost_of_few_rows(p, c, 2, gpu)
    wide = dataclasses.replace(c, tile_n=2 * c.tile_n, epilogue_slots=2 * c.epilogue_slots)
    tiles = common.row_blocks(p.spread, p.m, p.groups, c.tile_m) * math.ceil(p.n / c.tile_n)
    narrow = gemm.efficiency(c) / gemm.efficiency(wide)
    steps = math.ceil(p.k / c.tile_k)
    written = results(p) * p.m * p.n * itemsize_of(p.out_dtype)
    rows = p.k, p.k if p.layout == "nt" else p.n
    rate = gpu.flops(p.dtype) / gpu.bf16_flops * (_BLOCKS if p.scales == "block" else 1.0)
    seconds = common.cost(p, wide, tiles, steps, (bytes_moved(p) - written, written), rows, gpu, rate=rate) / narrow
    seconds = max(seconds, 1.01 * bytes_moved(p) / gpu.memory_bytes_per_s)
    return common.as_run(p, c, seconds, bytes_moved(p) - written, bytes_moved(p), gpu)


def candidates(problem: Problem, gpu: Gpu) -> list[Config]:
    """Analytic choices, none measured, the least modelled `cost` first. Raises ValueError where `supports` has a reason."""
    require("gated_grouped_matmul", supports(problem, gpu), problem, gpu)
    row = 128 // itemsize_of(problem.out_dtype)
    legal = common.candidates(
        lambda wg_n: ((row, 2), (row, 1)),
        lambda c: check(problem, c, gpu) is None,
        _TILES,
        row=panel(problem.dtype),
        short_tiles=common.short_tiles(problem, "dynamic"),
    )
    return sorted(legal, key=lambda c: cost(problem, c, gpu))


def default(problem: Problem, gpu: Gpu) -> Config:
    """The first of the `candidates`. Raises ValueError where there is none."""
    return first_of(candidates(problem, gpu), problem, gpu)


def distance(x: Problem, y: Problem) -> float | None:
    """That of one of both products; None between a result and gradients."""
    if x.gradient != y.gradient:
        return None
    apart = grouped.distance(of_one(x), of_one(y))
    own = 0.05 * (x.activation != y.activation)
    return None if apart is None or apart + own > 4.0 else apart + own
