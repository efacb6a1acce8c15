"""A warpgroup's registers in wgmma's layout: a tile [64, columns], and vectors with one value for each row or column of it."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

TILE = plgpu.Layout.WGMMA
PER_ROW = plgpu.Layout.WGMMA.reduce(1)
PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)


def load_tile(ref: Any) -> jax.Array:
    """A tile in shared memory."""
    return plgpu.load(ref, layout=TILE, optimized=False)


def load_per_row(ref: Any) -> jax.Array:
    """64 values in shared or global memory, one for each row."""
    return plgpu.load(ref, layout=PER_ROW, optimized=False)


def load_per_column(ref: Any) -> jax.Array:
    """Values in shared or global memory, one for each column."""
    return plgpu.load(ref, layout=PER_COLUMN, optimized=False)


def along_rows(values: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """tile[i, j] = values[i]."""
    return lax.broadcast_in_dim(values, shape, (0,))


def along_columns(values: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """tile[i, j] = values[j]."""
    return lax.broadcast_in_dim(values, shape, (1,))


def opaque(index: jax.Array) -> jax.Array:
    """The index, but the compiler does not know that.

    Addresses that depend on it are computed where they are used. Otherwise LLVM computes them once for the whole block, keeps
    them in registers, and spills.
    """
    return lax.optimization_barrier(index)
