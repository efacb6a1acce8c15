"""Numbers rounded to 8-bit floats with scales, and the scales of largest numbers: plain JAX."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from mgpu_ops.core.eight_bits import with_scale
from mgpu_ops.core.fp8 import BLOCK


def scale_of(largest: jax.Array, dtype: Any) -> jax.Array:
    """The scale with which an absolute value, float32, becomes the largest number of the dtype."""
    return jnp.maximum(largest / float(jnp.finfo(dtype).max), jnp.finfo(jnp.float32).tiny)


def scale_or_one(largest: jax.Array, dtype: Any) -> jax.Array:
    """The same; 1 where the value is 0."""
    return jnp.where(largest == 0.0, 1.0, scale_of(largest, dtype))


def largest_finite(x: jax.Array) -> jax.Array:
    """The largest absolute value that is finite, float32 []; 0 where there is none."""
    return jnp.max(finite_size(x), initial=0.0)


def finite_size(x: jax.Array) -> jax.Array:
    """Absolute values in float32, 0 for NaN and infinities."""
    wide = x.astype(jnp.float32)
    return jnp.where(jnp.isfinite(wide), jnp.abs(wide), 0.0)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def rounded(x: jax.Array, scheme: str, axis: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """x in 8 bits, and the scales that are found from it: `quantize`, whose schemes and `axis` these are."""
    size = finite_size(x)
    blocks = {"block": (axis,), "square": (-1, -2)}.get(scheme, ())  # dimensions of which each 128 share a scale
    shared = axis if scheme == "row" else None
    for dimension in blocks:
        size = _largest_of_blocks(size, dimension)
    if not blocks:
        size = jnp.max(size, shared, initial=0.0)
    scales = scale_or_one(size, dtype)
    of_each = scales if shared is None else jnp.expand_dims(scales, shared)
    for dimension in blocks:
        of_each = jnp.repeat(of_each, BLOCK, dimension)
        of_each = jax.lax.slice_in_dim(of_each, 0, x.shape[dimension], axis=dimension % x.ndim)
    return with_scale(x, of_each, dtype), scales


def _largest_of_blocks(x: jax.Array, axis: int) -> jax.Array:
    """The largest of each 128 numbers along an axis; the last block may have fewer. Numbers are not negative."""
    axis %= x.ndim
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, -x.shape[axis] % BLOCK)
    padded = jnp.pad(x, pad)
    return jnp.max(padded.reshape(*x.shape[:axis], padded.shape[axis] // BLOCK, BLOCK, *x.shape[axis + 1 :]), axis + 1)
