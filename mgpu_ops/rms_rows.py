"""Rows that are divided by their root mean square, through XLA; and a product of such rows, divided by it afterwards.

A product of normalised rows is that of the rows as they are, divided row by row: sum_k (x[k] r) w[k] = r sum_k x[k] w[k].
So a small kernel behind the product, which reads it anyway, can do what would take one in front of it.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from mgpu_ops import floats

_LANES, _MAX_WIDTH = 128, 16384  # threads of a warpgroup, which hold a row in registers


def checked_norm(function: str, count: int, rows: ArrayLike | None, epsilon: float) -> list[jax.Array]:
    """The rows, and epsilon as [1] float32; neither without rows. Raises for what is none, epsilon without rows too."""
    checked = checked_epsilon("rms_epsilon", epsilon)
    if rows is None:
        return []
    found = floats.array(function, "rms_rows", rows)
    if found.ndim != 2 or found.shape[0] != count or not found.shape[1]:
        raise ValueError(f"rms_rows has shape {found.shape}: it must be [rows, width] with {count} rows")
    return [found, jnp.full((1,), checked, np.float32)]


def checked_epsilon(name: str, epsilon: Any) -> float:
    """epsilon as a float. TypeError for what is no number, or traced; ValueError for one that is not finite or below 0."""
    number = floats.number(epsilon)
    if number is None:
        raise TypeError(f"{name}={epsilon!r:.80} is no Python number")
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{name}={epsilon!r:.80} must be a finite number of at least 0")
    return number


def normalised(rows: jax.Array, epsilon: jax.Array) -> jax.Array:
    """rows [..., n] divided by sqrt(mean of rows^2 + epsilon), in float32 at least, rounded to their dtype."""
    return divided(rows, rows, epsilon)


def divided(x: jax.Array, rows: jax.Array, epsilon: jax.Array) -> jax.Array:
    """x [..., n], in float32 at least divided by sqrt(mean of rows^2 + epsilon) row by row, rounded to its dtype."""
    of_rows = factors(rows, epsilon)
    return (x.astype(of_rows.dtype) * of_rows).astype(x.dtype)


def factors(rows: jax.Array, epsilon: jax.Array) -> jax.Array:
    """1 / sqrt(mean of rows^2 + epsilon[0]), [..., 1], in float32 at least."""
    wide = rows.astype(np.promote_types(rows.dtype, np.float32))
    return lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + epsilon[0])


def supports_rows(rows: jax.Array) -> str | None:
    """Why no kernel finds the norms of these rows, or None."""
    if rows.dtype.name not in ("bfloat16", "float16"):
        return f"rms_rows has dtype {rows.dtype}: bfloat16 or float16"
    if rows.shape[1] % _LANES or rows.shape[1] > _MAX_WIDTH:
        return f"rms_rows has width {rows.shape[1]}: a multiple of {_LANES} up to {_MAX_WIDTH}"
    return None
