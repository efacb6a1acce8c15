"""What is worth trying for a ragged contraction, and a model of its time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from mgpu_ops.core.gemm import epilogue_tiles
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import first_of, itemsize_of, require
from mgpu_ops.grouped import model as common
from mgpu_ops.grouped.config import SCHEDULES, Config, defers, is_dynamic, panel
from mgpu_ops.grouped.ragged_contraction.problem import Problem, bytes_moved, check, supports

_HIDDEN = 0.60  # of the store of a tile that is deferred, where the next one has steps enough
# Where no group has steps enough a deferred store takes this part longer: 41 rows in 13 groups took 175 us, 168 without. A
# modelled half of a group that has them counts: 457 rows in six groups gained 2 %.
_LATE, _HALF_A_GROUP = 0.05, 0.5

# Tiles handed out (results/2026-11-22-h200-grouped-handed-out.jsonl and -23-h200-grouped-deferred-short.jsonl) take XLA's
# kernels that order the groups, and are a little slower; in turn, the block with most to do is behind the others.
_HANDED_OUT, _OUT_OF_TURN = 5e-6, 1.01  # s, and times as long
_BEHIND = 1.5  # standard deviations of a block's time
_SQUARES = {"even": 0.0, "sparse": 1.5}  # of groups' sizes, less the mean, over its square; of random ones
_RANDOM = 0.25


def space(problem: Problem, gpu: Gpu) -> dict[str, Sequence[Any]]:
    """`common.space`, and the registers that the producer of some tiles takes."""
    return common.space(problem, gpu) | {"memory_registers": (24, 40, _OF_WIDE_TILES)}


# A producer of 40 registers that loads two parts of 128 columns beside 64, in windows of rows, spills 32 to 352 bytes, and
# one of 48 up to 160 (compiled for an H200 by jax 0.11.2 and 0.12.0.1: 7 problems, steps of 64 and 128). One of 56 spills up to
# 128 with steps of 128, since warps share the initialisation of barriers.
_WIDE, _OF_WIDE_TILES = (64, 256), 64


def cost(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Modelled time in seconds: `common.cost` of the tiles of all groups, each as many steps as an average group takes."""
    p, c = problem, config
    common.require_rows(p)
    tiles = p.groups * math.ceil(p.k / c.tile_m) * math.ceil(p.n / c.tile_n)
    blocks = p.m / c.tile_k if p.transposed else common.row_blocks(p.spread, p.m, p.groups, c.tile_k)  # m counts the padding
    steps = blocks / p.groups
    written = p.groups * p.k * p.n * itemsize_of(p.out_dtype)
    moved, rows = (bytes_moved(p) - written, written), (p.m, p.m) if p.transposed else (p.k, p.n)
    hidden = 0.0
    if defers(c):
        enough = _long_enough(p, epilogue_tiles(c) * c.tile_k)
        hidden = _HIDDEN * enough if enough else -_LATE
    rate = gpu.flops(p.dtype) / gpu.bf16_flops
    seconds = common.cost(p, c, tiles, steps, moved, rows, gpu, rate, hidden)
    return _HANDED_OUT + _OUT_OF_TURN * seconds if is_dynamic(c) else seconds + _uneven(p, c, tiles / p.groups, gpu)


def _long_enough(p: Problem, rows: int) -> float:
    """Of how many groups, about, the tiles take so many rows that the store of the tile before is hidden."""
    if p.spread == "skewed":
        groups = p.m / (rows * common.harmonic(p.groups))
        return min(1.0, groups / p.groups) if groups > _HALF_A_GROUP else 0.0
    used = 0.5 if p.spread == "sparse" else 1.0
    return used * (p.m >= rows * p.groups * used)


def _uneven(p: Problem, c: Config, tiles: float, gpu: Gpu) -> float:
    """Seconds that the last block is behind where each has every so many-th tile: some have a tile more of large groups."""
    more = tiles / gpu.sms % 1
    mean = p.m / p.groups
    squares = 1.6 / common.harmonic(p.groups) ** 2 * p.groups if p.spread == "skewed" else _SQUARES.get(p.spread, _RANDOM)
    squares *= p.groups
    seconds_of_row = 2 * c.tile_m * c.tile_n * gpu.sms / gpu.flops(p.dtype)
    return _BEHIND * mean * math.sqrt(more * (1 - more) * squares) * seconds_of_row


def candidates(problem: Problem, gpu: Gpu) -> list[Config]:
    """Analytic choices, none measured, the least modelled `cost` first. Raises ValueError where `supports` has a reason."""
    require("ragged_contraction", supports(problem, gpu), problem, gpu)
    row = 128 // itemsize_of(problem.out_dtype)
    # One epilogue tile for the whole tile waits for nothing: tiles of few steps gain more from that than from more stages.
    epilogues = lambda wg_n: ((wg_n, 1), (row, 2), (row, 1))  # noqa: E731
    runs = lambda c: check(problem, c, gpu) is None  # noqa: E731
    legal = common.candidates(epilogues, runs, schedules=SCHEDULES, row=panel(problem.dtype))
    legal = [dataclasses.replace(c, memory_registers=_OF_WIDE_TILES) if (c.tile_m, c.tile_n) == _WIDE else c for c in legal]
    return sorted(legal, key=lambda c: cost(problem, c, gpu))


def default(problem: Problem, gpu: Gpu) -> Config:
    """The first of the `candidates`. Raises ValueError where there is none."""
    return first_of(candidates(problem, gpu), problem, gpu)


def distance(x: Problem, y: Problem) -> float | None:
    """`common.distance`, and what the other of two dtypes adds. None also between operands in rows and stored transposed."""
    if x.transposed != y.transposed:
        return None
    return common.distance(x, y, 0.05 * (x.rhs_dtype != y.rhs_dtype))
