"""What is worth trying for a ragged contraction, and a model of its time."""

from __future__ import annotations

import math

from mgpu_ops.core.gemm import epilogue_tiles
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import first_of, itemsize_of
from mgpu_ops.grouped import model as common
from mgpu_ops.grouped.config import Config, defers
from mgpu_ops.grouped.ragged_contraction.problem import Problem, bytes_moved, check, supports

# Tiles whose stores are deferred have as many steps as epilogue tiles at least. Of 16 drawn contractions on an H200, most with
# small or empty groups, 15 took 1.06 to 1.55 times as long so (results/2026-11-23-h200-grouped_matmul-anywhere.jsonl).
_FURTHER = 0.8  # times as long, at most, more
_EMPTY = 0.4  # of it where half of the groups are empty


def cost(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Modelled time in seconds: `common.cost` of the tiles of all groups, each as many steps as an average group takes."""
    p, c = problem, config
    common.require_rows(p)
    tiles = p.groups * math.ceil(p.k / c.tile_m) * math.ceil(p.n / c.tile_n)
    steps = common.row_blocks(p.spread, p.m, p.groups, c.tile_k) / p.groups
    few = max(0.0, 1 - steps / epilogue_tiles(c), _EMPTY * (p.spread == "sparse")) if defers(c) else 0.0
    written = p.groups * p.k * p.n * itemsize_of(p.out_dtype)
    seconds = common.cost(p, c, tiles, steps, (bytes_moved(p) - written, written), (p.k, p.n), gpu)
    return seconds * (1 + _FURTHER * few)


def candidates(problem: Problem, gpu: Gpu) -> list[Config]:
    """Analytic choices, none measured, the least modelled `cost` first. Raises ValueError where `supports` has a reason.

    Tiles of skewed groups, of which few take most of the time, are handed out as blocks become free.
    """
    reason = supports(problem, gpu)
    if reason is not None:
        raise ValueError(f"no config of ragged_contraction fits {problem} on {gpu.name}: {reason}")
    row = 128 // itemsize_of(problem.out_dtype)
    # One epilogue tile for the whole tile waits for nothing: tiles of few steps gain more from that than from more stages.
    schedule = "dynamic" if problem.spread == "skewed" else "static"
    epilogues = lambda wg_n: ((wg_n, 1), (row, 2), (row, 1))  # noqa: E731
    legal = common.candidates(epilogues, lambda c: check(problem, c, gpu) is None, schedule=schedule)
    return sorted(legal, key=lambda c: cost(problem, c, gpu))


def default(problem: Problem, gpu: Gpu) -> Config:
    """The first of the `candidates`. Raises ValueError where there is none."""
    return first_of(candidates(problem, gpu), problem, gpu)
