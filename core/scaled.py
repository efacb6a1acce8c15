"""The main loop of products of 8-bit floats with scales of blocks: sums of 128 of k, scaled, and added up in float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mgpu_ops.core import engine, gemm
from mgpu_ops.core.fp8 import BLOCK
from mgpu_ops.core.gemm import ROWS


def add_scaled(
    c: gemm.Tiled,
    accs: tuple[Any, ...],
    multiply: Callable[[Any, int, int], None],
    scale: Callable[[int, int, int], jax.Array],
) -> None:
    """Consumer: sums += scales * (A tile @ B tile) in float32, for products of 64 rows and 128 of k at a time.

    accs: `fp8.accumulators`, the `Sums` and then those that products take in turn. While a product is added, the tensor cores
    compute the next one, if there are two accumulators for them, or that of the other warpgroup.
    multiply(acc, i, part): starts acc += the product of the i-th 64 rows of this warpgroup's part and the part-th 128 of k.
    scale(i, j, part): of the i-th 64 rows and the j-th 64 columns of it.
    """
    sums = Sums.of(c, accs)
    products = accs[len(sums.accs) :]
    shape = products[0].shape
    units = [(i, part) for i in range(sums.rows) for part in range(c.tile_k // BLOCK)]
    size = min(ROWS, shape[1])

    def start(unit: int) -> None:
        product = products[unit % len(products)]
        product[...] = jnp.zeros(shape, jnp.float32)
        multiply(product, *units[unit])

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
    def of(c: gemm.Tiled, accs: tuple[Any, ...]) -> Sums:
        """The first of `fp8.accumulators`."""
        rows, columns = gemm.warpgroup_tile(c)
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
