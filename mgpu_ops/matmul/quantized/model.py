"""Configs worth trying for a product with quantized weights, and a model of their time. The tuner and the default use both."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mgpu_ops.core import gemm, rates
from mgpu_ops.core.gemm import ROWS
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import first_of, itemsize_of, require, resident_clusters
from mgpu_ops.matmul import xla
from mgpu_ops.matmul.quantized.problem import (
    PANEL,
    Config,
    Problem,
    Product,
    as_matmul,
    bytes_moved,
    check,
    cluster_size,
    clusters_of_tiles,
    k_steps,
    readers,
    smem_bytes,
    supports,
    weights_bytes,
)


def space(problem: Product, gpu: Gpu) -> dict[str, Sequence[Any]]:
    """The values of each Config field, in order. `check` tells which combinations run."""
    del problem, gpu
    return {
        "tile_m": (8, 16, 24, 32, 48, 64, 96, 128, 192, 256),
        "tile_n": (64, 128, 192, 256),
        "tile_k": (128, 256, 512),
        "max_concurrent_steps": STEPS,
        "compute_warpgroups": (1, 2, 3, 4),
        "wg_dimension": ("n", "k", "steps"),
        "cluster": ("none", "n", "k"),
        "split_k": (1, 2, 4, 8),
        "memory_registers": (24, 40),
        "exchange": ("weights", "x"),
    }


STEPS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16)

# Fitted to an H200: 1 to 64 rows (results/2026-11-30-h200-quantized_matmul-few-rows.jsonl.gz), more rows
# (results/2026-11-22-h200-quantized_matmul-rows.jsonl) and sweeps of products by group (results/replay).
_UPCAST = {
    "weights": {"int8": 3.17, "int4": 2.34},
    "x": {"int8": 2.07, "int4": 1.02},
}  # instructions for each of a thread's weights, with wgmma
_UNIT, _STEP = 37.3, 81.8  # beside for each 64 x 128 weights, and for each step
_SCALED = 1.2  # for each row of x of a tile and 64 x 128 weights of a group of 128: scaling a sum
_ISSUED = {1: 1.62, 2: 2.15, 3: 2.53, 4: 2.6}  # instructions a clock that so many warpgroups issue
_ISSUED_IN_TURN = {2: 2.1, 3: 1.91, 4: 1.82}  # where they take whole steps
_ALONE, _ALONE_UNIT, _ALONE_ROW = 206.0, 80.1, 8.77  # clocks of a warpgroup's own part of a step: for each unit, and its rows
_SMEM = 128.0  # bytes a clock that an SM's shared memory reads or writes
_LOADED = 60.0  # bytes a clock that TMA brings an SM
_HBM = 0.939  # of the datasheet's bandwidth
_SUM, _SUM_IN_TURN = 0.869e-6, 0.187e-6  # s that adding up the sums of warpgroups takes; where they take whole steps
_SUM_OF_CLUSTER = 0.9e-6  # and those of two blocks
_SHARED = 1.08  # times as long a step takes where two blocks share copies of x
_START = 1.6e-6  # s from a launch to the first data, and that storing a tile takes
_LAST = 1.19  # times a warpgroup's own part of a step: the last one overlaps with no load
_WIDENING = 2.0  # times the time of HBM take XLA's kernels that write the weights in 16 bits
_NORM = 5.8  # arithmetic, loads and HBM overlap (`gemm.together`)


def cost(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Modelled time in seconds, with at least the time of HBM.

    step = |instructions / issued, shared memory, 2 tm tn tk / rate, bytes / load rate, latency / (stages - 1), alone / turns|
    time = start + |waves * k steps * step, HBM bytes / HBM rate| + last alone + sums
    |...|: the times joined by a norm (`gemm.together`), not much more than the longest; alone: a warpgroup's part of a step by
    itself, which overlaps with others' where they take steps in turn.
    """
    return cost_of_tiles(problem, config, clusters_of_tiles(problem, config), bytes_moved(problem), gpu)


def cost_of_tiles(p: Product, c: Config, tiles: float, moved: int, gpu: Gpu) -> float:
    """`cost` of so many output tiles, or clusters of them, that move so many bytes of HBM."""
    waves = math.ceil(tiles / resident_clusters(cluster_size(c), gpu))
    units = c.tile_n * c.tile_k / (ROWS * PANEL)
    alone = (_ALONE + units / readers(c) * (_ALONE_UNIT + _ALONE_ROW * c.tile_m)) / gpu.clock_hz
    memory = moved / gpu.memory_bytes_per_s
    blocks = waves * k_steps(p, c) * _step(p, c, alone, gpu)
    return _START + max(gemm.together(_NORM, blocks, memory / _HBM), 1.001 * memory) + _LAST * alone + _sums(c)


def _step(p: Product, c: Config, alone: float, gpu: Gpu) -> float:
    """Seconds of a step of an SM, of which a warpgroup's own part takes `alone`."""
    in_turn = c.wg_dimension == "steps"
    weights, x = c.tile_n * c.tile_k, c.tile_m * c.tile_k * itemsize_of(p.dtype)
    packed = weights_bytes(p, weights)
    step = gemm.together(
        _NORM,
        _instructions(p, c) / (_ISSUED_IN_TURN if in_turn else _ISSUED)[c.compute_warpgroups] / gpu.clock_hz,
        (packed * 2 + x * (1 + 2 * (c.exchange == "x") + c.tile_n / ROWS)) / _SMEM / gpu.clock_hz,
        2 * c.tile_m * weights * gpu.sms / gpu.bf16_flops,
        (packed + x) / _LOADED / gpu.clock_hz,
        rates.LOAD_LATENCY / (c.max_concurrent_steps - 1),
        alone / (c.compute_warpgroups if in_turn else 1),
    )
    return step * (_SHARED if c.cluster == "n" else 1.0)


def _sums(c: Config) -> float:
    """Seconds that adding up sums takes."""
    own = {"n": 0.0, "k": _SUM, "steps": _SUM_IN_TURN}[c.wg_dimension] if c.compute_warpgroups > 1 else 0.0
    return own + (c.cluster == "k") * c.split_k**2 / 4 * _SUM_OF_CLUSTER


def _instructions(p: Product, c: Config) -> float:
    """Instructions of a step, by a warp, of all consumers."""
    units = c.tile_n * c.tile_k / (ROWS * PANEL)
    scaled = _SCALED * c.tile_m * PANEL / p.group_size if p.group_size else 0.0
    each = _UPCAST[c.exchange].get(p.w_dtype, 2.7) * 64 + scaled + _UNIT
    ordered = 1.2 * c.tile_m * c.tile_k / 32 if c.exchange == "x" else 0.0
    return 4 * (units * each + readers(c) * _STEP) + ordered


def baseline_cost(problem: Problem, gpu: Gpu) -> float:
    """Modelled time in seconds of XLA: it writes the weights in 16 bits, and multiplies them."""
    p = problem
    widened = _WIDENING * (weights_bytes(p, p.n * p.k) + 2 * p.n * p.k) / (rates.HBM * gpu.memory_bytes_per_s)
    return widened + xla.cost(as_matmul(p), gpu)


def candidates(problem: Problem, gpu: Gpu) -> list[Config]:
    """Configs chosen without measurements, the least modelled `cost` first: one for each tile, cluster and share of it.

    The pipeline is as deep as shared memory allows. Raises ValueError where `supports` has a reason.
    """
    require("quantized_matmul", supports(problem, gpu), problem, gpu)
    found = (deepest(problem, config, gpu) for config in _shapes(problem) if not is_short_of_registers(problem, config))
    return sorted((c for c in found if c is not None), key=lambda c: cost(problem, c, gpu))


def is_short_of_registers(p: Product, c: Config) -> bool:
    """Whether ptxas spills, or lets a wgmma wait for the one before it, by what was compiled: long steps, most of many rows.

    With a residual also wide tiles of several warpgroups that add up sums.
    """
    adds_up = c.wg_dimension == "k" or c.cluster == "k"
    if p.residual and p.group_size and adds_up and c.tile_n > 128 and c.compute_warpgroups > 2:
        return True
    if c.tile_m <= ROWS and (p.group_size or c.wg_dimension == "steps") and _held(p, c) > _MOST_HELD[c.compute_warpgroups]:
        return True
    if c.exchange != "x" or c.wg_dimension == "steps" or c.tile_m < 48:
        return False
    if c.compute_warpgroups > 2:
        return c.tile_k > 128
    return p.group_size > 0 and (c.tile_k > 256 or c.tile_n * c.tile_k > 128 * 256)


# By 443 kinds of tiles of 8 to 64 rows, warpgroups, what these share, exchange and dtype of weights, of which 63 spilled
# (results/2026-11-30-h200-quantized_matmul-few-rows.jsonl.gz).
_MOST_HELD = {1: 120, 2: 120, 3: 75, 4: 60}  # registers, by warpgroups


def _held(p: Product, c: Config) -> float:
    """About how many registers of a thread a warpgroup's sums take, and of groups two products and a step's weights."""
    blocks = c.tile_n / ROWS / (c.compute_warpgroups if c.wg_dimension == "n" else 1)
    sums = blocks * c.tile_m / 2
    if not p.group_size:  # fitted: three warpgroups have half the room that two have, which wait for no single wgmma
        return sums * (1 + (c.compute_warpgroups > 2))
    units = c.tile_n * c.tile_k / (ROWS * PANEL) / readers(c)
    return sums + c.tile_m + 12 * units  # 8 of packed weights, and scales


DIVISIONS = ((2, "n"), (3, "n"), (4, "n"), (2, "k"), (4, "k"))  # consumer warpgroups, and what they share
_CLUSTERS = (("none", 1), ("n", 1), ("k", 2), ("k", 4))  # cluster, split_k
_FEW = 64  # rows, up to which tiles may have a part of them, and warpgroups take steps in turn


def _shapes(problem: Problem) -> Iterator[Config]:
    """Tiles and how they are divided, with as many steps as any of them may have.

    Of few rows tiles may have a half or a quarter: more of them then share the work, and each weight is read again from L2.
    """
    tile_ms = [m for m in (8, 16, 24, 32, 48, 64, 128, 256) if m >= min(problem.m, 64)]
    few = next(m for m in tile_ms if m >= min(problem.m, 256))
    rows, in_turn = {few, min(tile_ms)}, problem.m <= _FEW
    if in_turn:
        rows |= {part for part in (8, 16, 32) if problem.m / 4 <= part < problem.m}
    divisions = (*DIVISIONS, *(((2, "steps"), (3, "steps")) if in_turn else ()))
    choices = itertools.product(sorted(rows), (64, 128, 192, 256), (128, 256, 512), divisions, _CLUSTERS, ("weights", "x"))
    for tile_m, tile_n, tile_k, (warpgroups, wg_dimension), (cluster, split_k), exchange in choices:
        if wg_dimension != "steps" or tile_n <= 128:
            yield Config(tile_m, tile_n, tile_k, STEPS[-1], warpgroups, wg_dimension, cluster, split_k, 40, exchange)


def deepest(problem: Any, config: Config, gpu: Gpu, check: Callable[[Any, Config, Gpu], str | None] = check) -> Config | None:
    """The config with as many steps as fit, if it passes `check`. A deeper pipeline is never slower."""
    turns = config.compute_warpgroups if config.wg_dimension == "steps" else 1
    for steps in (steps for steps in reversed(STEPS) if steps % turns == 0):
        found = dataclasses.replace(config, max_concurrent_steps=steps)
        if smem_bytes(problem, found) <= gpu.smem_per_block:
            return found if check(problem, found, gpu) is None else None
    return None


@functools.lru_cache(maxsize=256)  # `resolve` compares each near entry with it
def default(problem: Problem, gpu: Gpu) -> Config:
    """The first of the `candidates`. Raises ValueError where there is none."""
    return first_of(candidates(problem, gpu), problem, gpu)


def distance(x: Product, y: Product) -> float | None:
    """How far problem `y` is from `x`, for which a config was tuned; None where the config does not carry over.

    The sum of |log2| of the ratios of m, n and k, and a small step for another group, zero points, bias, residual, or dtype of
    as many bits.
    """
    sides = ((x.m, y.m), (x.n, y.n), (x.k, y.k))
    if x.w_dtype != y.w_dtype or itemsize_of(x.out_dtype) != itemsize_of(y.out_dtype) or 0 in itertools.chain(*sides):
        return None
    near = sum(abs(math.log2(u / v)) for u, v in sides)
    near += 0.05 * (x.dtype != y.dtype) + 0.05 * (x.scale_dtype != y.scale_dtype) + 0.1 * (x.zero_points != y.zero_points)
    near += 0.2 * (x.group_size != y.group_size) + 0.5 * (x.layout != y.layout)
    near += 0.05 * (x.bias != y.bias) + 0.1 * (x.residual != y.residual)
    return near if near <= 4.0 else None
