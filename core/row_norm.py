"""The norm of a row, found by a warpgroup on its way to something else."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def row_factor(row: Any, epsilon: jax.Array) -> jax.Array:
    """1 / sqrt(mean of row^2 + epsilon) in float32, of a row in global memory, [width]: a multiple of 128."""
    values = row[...].astype(jnp.float32)
    return lax.rsqrt(jnp.sum(values * values) * (1.0 / row.shape[0]) + epsilon)
