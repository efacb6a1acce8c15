"""The norm of a row, found by a warpgroup on its way to something else."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.mosaic.gpu import utils as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir.dialects import arith, vector

from mgpu_ops.core.interpreter import interpreting
from mgpu_ops.core.limits import WARP, WARPGROUP
from mgpu_ops.core.registers import laid_out


def row_factor(row: Any, epsilon: jax.Array) -> jax.Array:
    """1 / sqrt(mean of row^2 + epsilon) in float32, of a row in registers or in memory, of whatever shape."""
    row = row[...].astype(jnp.float32)
    return factor_of_squares(jnp.sum(row * row), row.size, epsilon)


def factor_of_squares(squares: jax.Array, width: int, epsilon: jax.Array) -> jax.Array:
    """The same of sums of the squares of `width` numbers."""
    return lax.rsqrt(squares * (1.0 / width) + epsilon)


def sums_of_rows(x: jax.Array) -> jax.Array:
    """The sum of each row of x [rows, columns], float32, in all places of the row.

    x is a number to four for each thread of a warpgroup, in Layout.WG_STRIDED with all numbers of a thread in one vector. A row
    lies within a warp, whose threads exchange their sums: Mosaic's own sums go through shared memory, and are of all rows.
    """
    if interpreting():
        return jnp.broadcast_to(jnp.sum(x, 1, keepdims=True), x.shape)
    of_a_thread = x.size // WARPGROUP
    threads = x.shape[1] // of_a_thread
    if threads > WARP or threads & (threads - 1):
        raise ValueError(f"a row of {x.shape} lies in {threads} threads, which are not a part of a warp")
    layout = plgpu.Layout.WG_STRIDED(x.shape, of_a_thread)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout))
    def add(_: Any, x: Any) -> Any:
        register = x.registers.item()
        own = (vector.extract(register, dynamic_position=[], static_position=[i]) for i in range(of_a_thread))
        total, distance = functools.reduce(arith.addf, own), 1
        while distance < threads:
            total, distance = arith.addf(total, mosaic.shfl_bfly(total, distance)), 2 * distance
        found = np.empty_like(x.registers)
        found[...] = vector.from_elements(register.type, [total] * of_a_thread)
        return fragmented_array.FragmentedArray(_registers=found, _layout=x.layout, _is_signed=None)

    found: jax.Array = add(laid_out(x, layout))
    return found
