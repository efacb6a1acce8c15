"""Configs worth trying for a matmul, and a model of their time. The tuner and the default use both."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from mgpu_ops.core import gemm
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import first_of, itemsize_of
from mgpu_ops.matmul.problem import (
    Config,
    Problem,
    as_computed,
    bytes_moved,
    check,
    k_steps,
    partial_problem,
    supports,
    swizzle_bytes,
    transposed,
)


def space(problem: Problem, gpu: Gpu) -> dict[str, Sequence[Any]]:
    """The values of each Config field, in order. `check` tells which combinations run."""
    del gpu
    return {
        "tile_m": (8, 16, 24, 32, 48, 64, 128, 192, 256),
        "tile_n": (64, 96, 128, 160, 192, 224, 256),
        "tile_k": (64, 128),
        "max_concurrent_steps": (2, 3, 4, 5, 6, 7, 8, 10, 12),
        "compute_warpgroups": (1, 2),
        "wg_dimension": ("m", "n"),
        "cluster": ("none", "m", "n", "k"),
        "raster_dimension": ("m", "n"),
        "raster_width": (1, 2, 4, 8, 16),
        "epilogue_tile_n": (32, 64, 128),
        "split_k": (1, 2, 3, 4, 6, 8),
        "memory_registers": (24, 40),
    }


# Fitted to nine recorded sweeps and 102 drawn problems of an H200 (docs/kernels/matmul.md).
_RATE = 1.12  # of rates.POWER: bursts draw less power than what a program sustains
_LEAST = 0.86  # of the rate is left with the narrowest tiles
_ONE_WARPGROUP = 0.75  # of the rate is left with one consumer: nothing multiplies while it stores or waits
_SWIZZLE_64 = 0.77  # of the rate is left with 64-byte swizzles: wgmma's reads have bank conflicts
_LOADS = 0.88  # of the time at rates.LOAD_BYTES_PER_CLOCK
_ACROSS_LINES = 1.5  # times as long take the loads of rows that do not begin at 128-byte lines: each lies in two of them
_MULTICAST = 0.84  # of the time is left to loads of an operand that two blocks share
_LATENCY = 0.83e-6  # s from a TMA request to its data
_LAUNCH = 1.0e-6  # s
_PARTS = 3.4  # times the parts of a split k at HBM's rate: they are written, read, and partly in L2
_STEP_NORM = 4.7  # arithmetic, loads and latency of a step overlap nearly wholly,
_MEMORY_NORM = 1.7  # all steps and HBM less so
_STRIP = 8  # tiles: the best width of strips


def cost(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Modelled time in seconds, with at least the time of HBM.

    step = |2 tm tn tk / rate, bytes / load rate, latency / (steps in flight)|, of one SM
    time = launch + latency + |waves * (k steps * step + store), HBM bytes / HBM rate| + sum of the split_k parts
    |...|: the times joined by a norm (`gemm.together`), not much more than the longest
    """
    p, c = as_computed(partial_problem(problem, config), config)
    tiles = p.batch * math.ceil(p.m / c.tile_m) * math.ceil(p.n / c.tile_n)
    waves = math.ceil(tiles / (gpu.sms // c.split_k if c.cluster == "k" else gpu.sms))
    efficiency = _RATE * gemm.efficiency(c, _LEAST)
    efficiency *= _ONE_WARPGROUP if c.compute_warpgroups == 1 else 1.0
    efficiency *= _SWIZZLE_64 if swizzle_bytes(p, c) == 64 else 1.0
    step = gemm.step_seconds(c, gpu, efficiency, _LATENCY / (c.max_concurrent_steps - 1), _loaded(p, c), _STEP_NORM)
    store = _LOADS * gemm.store_seconds(c, itemsize_of(p.out_dtype), gpu)
    steps = waves * (k_steps(p, c) * step + store) * gemm.raster_factor(c.raster_width, _STRIP)
    memory = bytes_moved(problem) / gpu.memory_bytes_per_s
    reduction = 0.0
    if c.cluster == "k":
        reduction = _LATENCY + (c.split_k - 1) * gemm.store_seconds(c, 4, gpu)
    elif c.split_k > 1:
        reduction = _LAUNCH + _PARTS * p.batch * p.m * p.n * 4 / (2 * gpu.memory_bytes_per_s)
    return _LAUNCH + _LATENCY + gemm.together(_MEMORY_NORM, steps, memory) + reduction


def _loaded(p: Problem, c: Config) -> float:
    """What the loads of a pipeline step count as, in bytes: rows across lines take longer, shared operands less long."""
    a_t, b_t = transposed(p)
    a = c.tile_m * (_ACROSS_LINES if (p.m if a_t else p.k) % 64 else 1.0) * (_MULTICAST if c.cluster == "n" else 1.0)
    b = c.tile_n * (_ACROSS_LINES if (p.k if b_t else p.n) % 64 else 1.0) * (_MULTICAST if c.cluster == "m" else 1.0)
    return _LOADS * 2 * c.tile_k * (a + b)


_TILES = ((128, 256), (256, 128), (128, 192), (128, 128), (128, 64), (64, 128), (64, 64))


def candidates(problem: Problem, gpu: Gpu) -> list[Config]:
    """Configs chosen without measurements, the least modelled `cost` first: one for each tile, split of k and wg_dimension.

    tile_k is one 128-byte swizzle row (64), the pipeline is as deep as shared memory allows, and strips are 8 tiles wide.
    Raises ValueError where `supports` has a reason.
    """
    reason = supports(problem, gpu)
    if reason is not None:
        raise ValueError(f"no config of matmul fits {problem} on {gpu.name}: {reason}")
    shapes = [
        (tile_m, tile_n, wg_dimension, cluster, split_k)
        for tile_m, tile_n in _TILES
        for wg_dimension in ("n", "m")
        for cluster in ("none", "m")
        for split_k in (1, 2, 4, 8)
    ]
    best: dict[tuple[Any, ...], Config] = {}
    for tile_m, tile_n, wg_dimension, cluster, split_k in shapes:
        for steps in range(8, 1, -1):
            config = Config(
                tile_m=tile_m,
                tile_n=tile_n,
                tile_k=64,
                max_concurrent_steps=steps,
                compute_warpgroups=2 if tile_m * tile_n > 64 * 64 else 1,
                wg_dimension=wg_dimension,
                cluster=cluster,
                raster_dimension="m",
                raster_width=8,
                epilogue_tile_n=64 if split_k == 1 and itemsize_of(problem.out_dtype) == 2 else 32,
                split_k=split_k,
                memory_registers=40,
            )
            if check(problem, config, gpu) is None:
                key = (tile_m, tile_n, wg_dimension, split_k)
                if key not in best or cost(problem, config, gpu) < cost(problem, best[key], gpu):
                    best[key] = config
                break  # a deeper pipeline is never slower
    return sorted(best.values(), key=lambda c: cost(problem, c, gpu))


def default(problem: Problem, gpu: Gpu) -> Config:
    """The first of the `candidates`. Raises ValueError where there is none."""
    return first_of(candidates(problem, gpu), problem, gpu)


def distance(x: Problem, y: Problem) -> float | None:
    """How far problem `y` is from `x`, for which a config was tuned; None where the config does not carry over.

    The sum of |log2| of the ratios of m, n, k and batch, and a small step for another 16-bit dtype or layout, which tile alike.
    """
    sides = ((x.m, y.m), (x.n, y.n), (x.k, y.k), (x.batch, y.batch))
    if itemsize_of(x.out_dtype) != itemsize_of(y.out_dtype) or 0 in itertools.chain(*sides):
        return None
    near = sum(abs(math.log2(u / v)) for u, v in sides)
    near += 0.05 * (x.dtype != y.dtype) + 0.5 * (x.layout != y.layout)
    return near if near <= 4.0 else None
