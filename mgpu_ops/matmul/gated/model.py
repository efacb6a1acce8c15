"""Configs worth trying for a gated matmul, and a model of their time: that of one matmul with twice the columns."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from mgpu_ops.core import gemm
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import WARPGROUP, first_of, itemsize_of, require
from mgpu_ops.matmul import choices, xla
from mgpu_ops.matmul import model as matmul
from mgpu_ops.matmul.gated.problem import Config, Problem, as_matmul, bytes_moved, check, of_one, smem_bytes, supports
from mgpu_ops.matmul.quantities import bytes_moved as matmul_bytes


def space(problem: Problem, gpu: Gpu) -> dict[str, Sequence[Any]]:
    """The values of each Config field, in order. `check` tells which combinations run."""
    del gpu
    return {
        "tile_m": (64, 128, 192, 256),
        "tile_n": (64, 96, 128, 160, 192, 224, 256) if problem.stored else (32, 64, 96, 128, 192, 256),
        "tile_k": (64, 128),
        "max_concurrent_steps": (2, 3, 4, 5, 6, 7, 8),
        "compute_warpgroups": (1, 2),
        "wg_dimension": ("m", "n"),
        "cluster": ("none", "m", "n"),
        "raster_dimension": ("m", "n"),
        "raster_width": (1, 2, 4, 8, 16),
        "epilogue_tile_n": (32, 64, 128),
        "memory_registers": (24, 40),
        "schedule": gemm.SCHEDULES[1:] if problem.stored else gemm.SCHEDULES[:1],
    }


# Fitted to 58 configs of ten problems on an H200, in a run that was not kept. On an H100 the 16 drawn problems that run the
# kernel take 0.97 to 1.12 times what the model says (results/2026-11-27-h100-gated_matmul-anywhere.csv).
_NARROWEST = 0.73  # of the rate is left to the narrowest wgmma, as in matmul's model
_SWIZZLE_64 = 1.24  # times as long with 64-byte swizzles of both weights,
_SHALLOW = 1.33  # with two steps in flight,
_BESIDE, _BESIDE_NARROW = 0.88, 1.25  # and for warpgroups side by side, as wide as 64 columns of each weight, or as 32
_NOT_HIDDEN = 0.45  # with a stored gate, of the time of what else is read and written
# Of few rows, in a step of decoding (results/2026-11-23-h200-llama-decode-sets.jsonl).
_FEW_ROWS = 1.5e-6  # s more
# Of 16 to 64 rows by two matrices of so many weights, times that, and XLA's joined product of both, on an H200
# (results/2026-11-30-h200-gated_matmul-few-rows.jsonl.gz, -few-rows-joined.jsonl).
_LARGE, _OF_LARGE, _OF_LARGE_JOINED = 20_000_000, 0.92, 1.14
_MOST_OF_A_TILE = 48  # rows
_COMBINED = 1e-6  # s of the kernel of XLA that makes the result of gate and up, beside its bytes
# `DotMerger` of openxla/xla makes one product of two up to this size of a weight and a result together: seen in the HLO of 13
# problems. Times of copying both weights that joining them takes, of the same two runs; up to 64 rows that costs nothing.
_MERGED_BYTES = 64 * 2**20
_JOINED, _JOINED_AS_LOADED, _JOINED_ROWS = 0.95, 0.4, 256


def cost(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Modelled time in seconds: of a matmul with the columns of both weights, whose output is smaller or larger.

    But a wgmma is as wide as a warpgroup's part of one product. With a stored gate: of a matmul, whose warpgroups have most of
    what else is read and written under way while they multiply.
    """
    if problem.stored:
        moved = bytes_moved(problem) / gpu.memory_bytes_per_s
        more = (bytes_moved(problem) - matmul_bytes(of_one(problem))) / gpu.memory_bytes_per_s
        return max(matmul.cost(of_one(problem), as_matmul(config), gpu) + _NOT_HIDDEN * more, 1.01 * moved)
    one = as_matmul(config)
    both = dataclasses.replace(of_one(problem), n=2 * problem.n, normalised=problem.normalised)
    wide = dataclasses.replace(one, tile_n=2 * config.tile_n)
    narrow = gemm.efficiency(wide, _NARROWEST) / gemm.efficiency(one, _NARROWEST)
    if problem.layout == "nn" and config.tile_n % gemm.ROWS:  # of such tiles together is no multiple
        narrow *= _SWIZZLE_64
    if config.max_concurrent_steps == 2:
        narrow *= _SHALLOW
    if config.wg_dimension == "n" and config.compute_warpgroups == 2:
        narrow *= _BESIDE if config.tile_n > gemm.ROWS else _BESIDE_NARROW
    more = 0.0
    if problem.m <= gemm.ROWS and not problem.gradient:  # which wait for memory
        narrow, more = 1.0, _FEW_ROWS
    memory, of_both = (size / gpu.memory_bytes_per_s for size in (bytes_moved(problem), matmul_bytes(both)))
    seconds = more + narrow * matmul.cost(both, wide, gpu) + (memory - of_both) / 2
    return max(seconds * (_OF_LARGE if _is_few_by_large(problem, gpu) else 1.0), 1.01 * memory)


def baseline_cost(problem: Problem, gpu: Gpu) -> float:
    """Modelled time in seconds of XLA: of the products, whose results are written, read and combined.

    XLA makes one product of two where a weight and a result are small: of weights that it joins, first or as it loads them.
    """
    p, one = problem, of_one(problem)
    if p.stored:  # by two kernels for the gradient
        return xla.cost(one, gpu) + (5.3 if p.gradient else 3) * p.m * p.n * itemsize_of(p.dtype) / gpu.memory_bytes_per_s
    seconds = _COMBINED + (5 if p.gradient else 3) * p.m * p.n * itemsize_of(p.out_dtype) / gpu.memory_bytes_per_s
    both = xla.cost(dataclasses.replace(one, n=2 * p.n, normalised=p.normalised), gpu)
    size = itemsize_of(p.dtype)
    if p.joined:
        return seconds + both
    if (p.k + p.m) * p.n * size > _MERGED_BYTES:
        rows_normalised = xla.cost(dataclasses.replace(one, normalised=True), gpu) - xla.cost(one, gpu) if p.normalised else 0.0
        return seconds + 2 * xla.cost(one, gpu) + rows_normalised
    if _is_few_by_large(p, gpu) and not p.normalised:
        return _OF_LARGE_JOINED * (seconds + both)
    copied = 4 * p.k * p.n * size / gpu.memory_bytes_per_s  # read and written
    if p.layout == "nt" or p.m > _JOINED_ROWS:
        return seconds + both + _JOINED * copied
    return seconds + both + (_JOINED_AS_LOADED * copied if p.m > gemm.ROWS else 0.0)


def margin(problem: Problem) -> float:
    """How much of XLA's modelled time the kernel may take by its model to run.

    Of 23 problems with more than 64 rows it was faster in all, by 4 % at least; the models have 0 to 56 %. XLA writes both
    products and reads them again. With few rows both wait for the weights (docs/kernels/gated_matmul.md).
    """
    return 1.0 if problem.m > gemm.ROWS else 0.95


def _is_few_by_large(p: Problem, gpu: Gpu) -> bool:
    """Whether 16 to 64 rows are multiplied by two large matrices [k, n] on an H200.

    With fewer columns than SMs have tiles of 64 for, 48 to 64: TMA fills such a tile's other rows with zeros in each step.
    """
    rows = 16 <= p.m <= gemm.ROWS and (p.m >= _MOST_OF_A_TILE or p.n > gemm.ROWS * gpu.sms)
    return gpu.key == "h200" and p.layout == "nn" and not (p.gradient or p.stored) and rows and p.n * p.k >= _LARGE


_IN_TURN = ((128, 192), (128, 160), (128, 128), (64, 256), (64, 128), (64, 64))  # with a stored gate
_MOST_OF_GRADIENT = 160  # registers of an accumulator: beside more, those of the gradients' epilogue spill
_TILES = ((128, 128), (64, 256), (256, 64), (192, 64), (128, 96), (64, 128), (128, 64), (64, 64))


def candidates(problem: Problem, gpu: Gpu) -> list[Config]:
    """Configs chosen without measurements, the least modelled `cost` first: one for each tile and wg_dimension.

    The pipeline is as deep as shared memory allows, and strips are 8 tiles wide. ValueError where `supports` has a reason.
    """
    require("gated_matmul", supports(problem, gpu), problem, gpu)
    found = []
    for tile_m, tile_n in _IN_TURN if problem.stored else _TILES:
        for wg_dimension in ("m",) if problem.stored else ("m", "n"):
            for cluster in ("none", "m", "n"):
                config = _deepest(problem, tile_m, tile_n, wg_dimension, cluster, gpu)
                found += [config] if config is not None else []
    best: dict[tuple[int, int, str], Config] = {}
    for config in sorted(found, key=lambda c: cost(problem, c, gpu)):
        best.setdefault((config.tile_m, config.tile_n, config.wg_dimension), config)
    return list(best.values())


def _deepest(problem: Problem, tile_m: int, tile_n: int, wg_dimension: str, cluster: str, gpu: Gpu) -> Config | None:
    """The config of a tile with as many steps as fit, or, of few rows, as have enough bytes of the weights on their way."""
    if problem.stored and problem.gradient and tile_m * tile_n > _MOST_OF_GRADIENT * WARPGROUP:
        return None
    most, tile_k = 8, 64
    if problem.m <= gemm.ROWS and not (problem.gradient or problem.stored):  # more were slower (docs/kernels/gated_matmul.md)
        most = min(most, choices.steps_in_flight(2 * tile_n * tile_k * itemsize_of(problem.dtype)))
    for columns in (64, 32):
        for steps in range(most, 1, -1):
            config = Config(
                tile_m=tile_m,
                tile_n=tile_n,
                tile_k=tile_k,
                max_concurrent_steps=steps,
                compute_warpgroups=2 if tile_m * tile_n > gemm.ROWS * gemm.ROWS or problem.stored else 1,
                wg_dimension=wg_dimension,
                cluster=cluster,
                raster_dimension="m",
                raster_width=8,
                epilogue_tile_n=columns,
                memory_registers=40,
                schedule="pingpong" if problem.stored else "cooperative",
            )
            if smem_bytes(problem, config) <= gpu.smem_per_block:
                if check(problem, config, gpu) is None:
                    return config
                break  # as for fewer steps
    return None


def default(problem: Problem, gpu: Gpu) -> Config:
    """The first of the `candidates`. Raises ValueError where there is none."""
    return first_of(candidates(problem, gpu), problem, gpu)


def distance(x: Problem, y: Problem) -> float | None:
    """How far problem `y` is from `x`, for which a config was tuned; None where the config does not carry over.

    The sum of |log2| of the ratios of m, n and k, and a small step for another 16-bit dtype, layout or activation.
    """
    sides = ((x.m, y.m), (x.n, y.n), (x.k, y.k))
    same = (itemsize_of(x.out_dtype), x.gradient, x.stored) == (itemsize_of(y.out_dtype), y.gradient, y.stored)
    if not same or any(0 in side for side in sides):
        return None
    near = sum(abs(math.log2(u / v)) for u, v in sides)
    near += 0.05 * (x.dtype != y.dtype) + 0.5 * (x.layout != y.layout) + 0.05 * (x.activation != y.activation)
    return near if near <= 4.0 else None
