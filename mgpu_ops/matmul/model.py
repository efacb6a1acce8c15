"""Configs worth trying for a matmul, and a model of their time. The tuner and the default use both."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from mgpu_ops.core import gemm, rates
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


# Measured on an H200 (docs/kernels/matmul.md).
_SWIZZLE_64 = 0.72  # of the rate is left with 64-byte swizzles: wgmma's reads have bank conflicts
_STRIP = 8  # tiles: the best width of strips
_ONE_WARPGROUP = 0.9  # of the rate is left with one consumer: nothing multiplies while it stores or waits


def cost(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Modelled time in seconds, with at least the time of HBM.

    step = max(2 tm tn tk / rate, bytes / load rate, latency / (steps in flight)), of one SM
    time = launch + latency + max(waves * (k steps * step + store), HBM bytes / HBM rate) + sum of the split_k parts
    """
    p, c = as_computed(partial_problem(problem, config), config)
    tiles = p.batch * math.ceil(p.m / c.tile_m) * math.ceil(p.n / c.tile_n)
    waves = math.ceil(tiles / (gpu.sms // c.split_k if c.cluster == "k" else gpu.sms))
    efficiency = gemm.efficiency(c)
    efficiency *= _ONE_WARPGROUP if c.compute_warpgroups == 1 else 1.0
    efficiency *= _SWIZZLE_64 if swizzle_bytes(p, c) == 64 else 1.0
    step = gemm.step_seconds(c, gpu, efficiency, rates.LOAD_LATENCY / (c.max_concurrent_steps - 1))
    store = gemm.store_seconds(c, itemsize_of(p.out_dtype), gpu)
    compute = waves * (k_steps(p, c) * step + store) * gemm.raster_factor(c.raster_width, _STRIP)
    hbm = gpu.memory_bytes_per_s * rates.HBM
    reduction = 0.0
    if c.cluster == "k":
        reduction = rates.LOAD_LATENCY + (c.split_k - 1) * gemm.store_seconds(c, 4, gpu)
    elif c.split_k > 1:  # most of the parts lie in L2, which is read at about twice HBM's rate
        reduction = rates.LAUNCH + p.batch * p.m * p.n * 4 / (2 * hbm)
    return rates.LAUNCH + rates.LOAD_LATENCY + max(compute, bytes_moved(problem) / hbm) + reduction


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
