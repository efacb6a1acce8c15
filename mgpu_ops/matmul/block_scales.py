"""Scales of blocks of 128 of k in the kernel: loaded with each step, and factors of its products before these are added up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.core import engine, tile_scheduler
from mgpu_ops.core.epilogue import along
from mgpu_ops.core.gemm import ROWS, warpgroup_tile
from mgpu_ops.core.tile_scheduler import Int
from mgpu_ops.matmul.problem import BLOCK, SCALES_IN_LINE
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
    """Consumer: sums += scales * (A tile @ B tile) in float32, for products of 64 rows and 128 of k at a time.

    accs: the `Sums`, then accumulators that products take in turn. While a product is added, the tensor cores compute the next
    one, if there are two accumulators for them, or that of the other warpgroup.
    """
    c, sums = work.config, Sums.of(work, accs)
    products = accs[len(sums.accs) :]
    rows, columns = (1, 0) if work.transposed else (0, 1)  # the axes of the tile along the output's rows and columns
    share, shape = tile_scheduler.warpgroup_origin(c), products[0].shape
    units = [(i, part) for i in range(sums.rows) for part in range(c.tile_k // BLOCK)]
    size = min(ROWS, shape[1])

    def scale(i: int, j: int, part: int) -> jax.Array:
        start = [share[0] + i * ROWS, share[1] + j * size]
        of_rows = along(a_scales.at[part], start[rows], (ROWS, size), rows)
        return of_rows * b_scales[start[columns] // ROWS, part, 0]

    def start(unit: int) -> None:
        i, part = units[unit]
        k = pl.ds(part * BLOCK, BLOCK)
        product = products[unit % len(products)]
        product[...] = jnp.zeros(shape, jnp.float32)
        b = b_smem.at[pl.ds(share[1], shape[1]), k]
        engine.wgmma(product, a_smem.at[pl.ds(share[0] + i * ROWS, ROWS), k], engine.transpose_ref(b))

    # The scales arrive while the tensor cores multiply.
    scales = [[scale(i, j, part) for j in range(sums.columns)] for i, part in units]
    for unit in range(len(products)):
        start(unit)
    for unit, (i, _) in enumerate(units):
        left = min(len(units) - 1 - unit, len(products) - 1)
        value = engine.accumulated(products[unit % len(products)], left)
        for j in range(sums.columns):
            acc = sums.accs[i * sums.columns + j]
            acc[...] = engine.accumulated(acc, left) + value[:, j * size : (j + 1) * size] * scales[unit][j]
        if unit + len(products) < len(units):
            start(unit + len(products))


@dataclasses.dataclass(frozen=True)
class Sums:
    """A warpgroup's part of the output tile as accumulators of 64 x 64, each with one scale of B: what `store_tile` reads."""

    accs: tuple[Any, ...]
    rows: int
    columns: int
    dtype: Any = jnp.float32

    @staticmethod
    def of(work: Work, accs: tuple[Any, ...]) -> Sums:
        rows, columns = warpgroup_tile(work.config)
        rows, columns = rows // ROWS, max(1, columns // ROWS)
        return Sums(accs[: rows * columns], rows, columns)

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.accs[0].shape
        return self.rows * rows, self.columns * columns

    def astype(self, dtype: Any) -> Sums:
        return dataclasses.replace(self, dtype=dtype)

    def __getitem__(self, at: tuple[slice, slice]) -> jax.Array:
        rows, columns = at
        i, j = rows.start // ROWS, columns.start // ROWS
        start = columns.start - j * ROWS
        values: jax.Array = self.accs[i * self.columns + j][...]
        width = columns.stop - columns.start
        return (values if width == values.shape[1] else values[:, start : start + width]).astype(self.dtype)


def scales_for_tma(scale_a: jax.Array, scale_b: jax.Array, tile: int) -> list[jax.Array]:
    """The scales of blocks as `load_scales` reads them, for tiles of so many rows of A."""
    a = scale_a.mT
    a = jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, -a.shape[-1] % tile)]).reshape(*a.shape[:-1], -1, tile)
    a = jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, -tile % SCALES_IN_LINE)])
    b = jnp.repeat(scale_b, BLOCK // ROWS, -2)[..., None]
    return [a, jnp.broadcast_to(b, (*b.shape[:-1], SCALES_IN_LINE))]
