"""The norm of a row, found by a warpgroup on its way to something else."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def row_factor(row: Any, epsilon: jax.Array) -> jax.Array:
    """1 / sqrt(mean of row^2 + epsilon) in float32, of a row in registers or in memory, of whatever shape."""
    row = row[...].astype(jnp.float32)
    return factor_of_squares(jnp.sum(row * row), row.size, epsilon)


def factor_of_squares(squares: jax.Array, width: int, epsilon: jax.Array) -> jax.Array:
    """The same of sums of the squares of `width` numbers."""
    return lax.rsqrt(squares * (1.0 / width) + epsilon)
