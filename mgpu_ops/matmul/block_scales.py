"""Scales of blocks of 128 of k in the kernel: loaded with each step, and factors of its products before these are added up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.core import engine, scaled, tile_scheduler
from mgpu_ops.core.epilogue import along
from mgpu_ops.core.fp8 import BLOCK, SCALES_IN_LINE
from mgpu_ops.core.gemm import ROWS, warpgroup_tile
from mgpu_ops.core.tile_scheduler import Int
from mgpu_ops.matmul.work import Tile, Work, step_of_k, tile_of


def load_scales(work: Work, scale_a: Any, scale_b: Any) -> list[Any]:
    """Producer: the scales that step (tile, k) loads, of A's rows and of each 64 columns of B.

    scale_a: [..., k / 128, tiles, rows of a tile and what fills up 128 bytes]. scale_b: [..., n / 64, k / 128, 32], all 32 the
    same: TMA writes to multiples of 128 bytes of shared memory.
    """
    c, parts = work.config, work.config.tile_k // BLOCK
    columns = c.tile_m if work.transposed else c.tile_n  # of the output's tile

    def spec(ref: Any, block: tuple[int | None, ...], index: Callable[[Tile, Int], tuple[Int, ...]]) -> Any:
        lead = (None,) * (ref.ndim - 3)

        def where(t: jax.Array, k: jax.Array) -> tuple[Int, ...]:
            at = tile_of(work, t)
            return (*(at.batch for _ in lead), *index(at, step_of_k(work, at, k)))

        return plgpu.BlockSpec((*lead, *block), where, memory_space=plgpu.SMEM)

    def of_a(at: Tile, k: Int) -> tuple[Int, ...]:
        return k, at.column if work.transposed else at.row, 0

    def of_b(at: Tile, k: Int) -> tuple[Int, ...]:
        return at.row if work.transposed else at.column, k, 0

    return [
        spec(scale_a, (parts, None, scale_a.shape[-1]), of_a),
        spec(scale_b, (columns // ROWS, parts, scale_b.shape[-1]), of_b),
    ]


def add_scaled(work: Work, accs: tuple[Any, ...], a_smem: Any, b_smem: Any, a_scales: Any, b_scales: Any) -> None:
    """Consumer: sums += scales * (A tile @ B tile) in float32, by `scaled.add_scaled`."""
    c = work.config
    rows, columns = (1, 0) if work.transposed else (0, 1)  # the axes of the tile along the output's rows and columns
    share, width = tile_scheduler.warpgroup_origin(c), warpgroup_tile(c)[1]
    size = min(ROWS, width)

    def scale(i: int, j: int, part: int) -> jax.Array:
        start = [share[0] + i * ROWS, share[1] + j * size]
        of_rows = along(a_scales.at[part], start[rows], (ROWS, size), rows)
        return of_rows * b_scales[start[columns] // ROWS, part, 0]

    def multiply(product: Any, i: int, part: int) -> None:
        k = pl.ds(part * BLOCK, BLOCK)
        b = b_smem.at[pl.ds(share[1], width), k]
        engine.wgmma(product, a_smem.at[pl.ds(share[0] + i * ROWS, ROWS), k], engine.transpose_ref(b))

    scaled.add_scaled(c, accs, multiply, scale)


def scales_for_tma(scale_a: jax.Array, scale_b: jax.Array, tile: int) -> list[jax.Array]:
    """The scales of blocks as `load_scales` reads them, for tiles of so many rows of A."""
    a = scale_a.mT
    a = jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, -a.shape[-1] % tile)]).reshape(*a.shape[:-1], -1, tile)
    a = jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, -tile % SCALES_IN_LINE)])
    b = jnp.repeat(scale_b, BLOCK // ROWS, -2)[..., None]
    return [a, jnp.broadcast_to(b, (*b.shape[:-1], SCALES_IN_LINE))]
