"""What is worth trying for a grouped matmul, and a model of its time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from mgpu_ops.core.fp8 import BLOCK
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import FLOAT8, first_of, itemsize_of, require
from mgpu_ops.grouped import model as common
from mgpu_ops.grouped.config import PANEL, Config, panel
from mgpu_ops.grouped.grouped_matmul.problem import Problem, bytes_moved, bytes_written, check, supports, whole_tiles_of

# Of 8-bit floats: fitted to 18 problems of an H200 (docs/kernels/grouped_matmul.md, "Eight bits").
_BLOCKS_OF_A_STEP = {1: 0.77, 2: 0.82}  # of the rate is left with scales of blocks, by how many of k a step has,
_TWO_STAGES = 0.93  # and of that, where two long steps are all that fits
_SHORT_STEPS = 1.03  # times as many bytes, so to say, where a step has 128 of k
_TILES_OF_BLOCKS = (*common.TILES, (128, 192), (256, 64))


def space(problem: Problem, gpu: Gpu) -> dict[str, Sequence[Any]]:
    """`common.space`, with short tiles where they run."""
    return common.space(problem, gpu) | {"short_tiles": (False,) if whole_tiles_of(problem) else (False, True)}


def cost(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Modelled time in seconds: `common.cost` of the tiles of all groups, the last of each on average half empty."""
    p, c = problem, config
    common.require_rows(p)
    if common.has_few_rows(p) and not p.second:
        return common.cost_of_few_rows(p, c, 1, gpu)
    tiles = common.row_blocks(p.spread, p.m, p.groups, c.tile_m) * math.ceil(p.n / c.tile_n)
    rate = gpu.flops(p.dtype) / gpu.bf16_flops
    if p.scales == "block":
        rate *= _BLOCKS_OF_A_STEP.get(c.tile_k // BLOCK, 1.0)
        rate *= _TWO_STAGES if c.tile_k > BLOCK and c.max_concurrent_steps == 2 else 1.0
    written = bytes_written(p)
    read = (bytes_moved(p) - written) * (_SHORT_STEPS if p.dtype in FLOAT8 and c.tile_k == BLOCK else 1.0)
    lengths = p.k, p.k if p.layout == "nt" else p.n
    steps = (1 + p.second) * math.ceil(p.k / c.tile_k)
    seconds = common.cost(p, c, tiles, steps, (read, written), lengths, gpu, rate)
    return common.as_run(p, c, seconds, read, bytes_moved(p), gpu)


def candidates(problem: Problem, gpu: Gpu) -> list[Config]:
    """Analytic choices, none measured, the least modelled `cost` first. Raises ValueError where `supports` has a reason."""
    require("grouped_matmul", supports(problem, gpu), problem, gpu)
    row = 128 // itemsize_of(problem.out_dtype)  # stores of several swizzle rows were slower wherever they were tried
    tiles = _TILES_OF_BLOCKS if problem.scales == "block" else common.TILES
    legal = common.candidates(
        lambda wg_n: ((row, 2), (row, 1)),
        lambda c: check(problem, c, gpu) is None,
        tiles,
        ("static", "deferred"),
        panel(problem.dtype),
        common.short_tiles(problem, "dynamic-deferred"),
    )
    if problem.gated_gradient:
        # Its epilogue takes more registers than consumers have with a producer of 40. Gate and up come through the stages: four
        # of 64 were 4 % faster than two of 128 (docs/kernels/moe.md).
        legal = [dataclasses.replace(c, memory_registers=24) for c in legal if c.tile_k == PANEL]
    return sorted(legal, key=lambda c: cost(problem, c, gpu))


def default(problem: Problem, gpu: Gpu) -> Config:
    """The first of the `candidates`. Raises ValueError where there is none."""
    return first_of(candidates(problem, gpu), problem, gpu)


def distance(x: Problem, y: Problem) -> float | None:
    """`common.distance`, and what layout, bias, activation, offset, scale and residual add."""
    own = 0.5 * (x.layout != y.layout) + 0.05 * (x.bias != y.bias) + 0.05 * (x.activation != y.activation)
    own += 0.05 * (x.group_offset != y.group_offset) + 0.05 * (x.row_scale != y.row_scale)
    own += 0.05 * (x.second != y.second) + 0.05 * (x.scales != y.scales) + 0.05 * (x.rhs_dtype != y.rhs_dtype)
    own += 0.25 * (x.gated_gradient != y.gated_gradient) + 0.05 * (x.residual != y.residual)
    if (x.scales == "block") != (y.scales == "block"):
        return None
    return common.distance(x, y, own)
