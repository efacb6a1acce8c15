"""Numbers rounded to 8 bits, in plain JAX; `narrow.py` has the instructions of kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def with_scale(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """x / scale in 8 bits, saturated at the dtype's largest number, +-127 in int8.

    NaN and infinities stay what they are in floats (float8_e4m3fn has NaN for both); in int8 NaN is 0.
    """
    wide = x.astype(jnp.float32)
    scaled = wide / scale
    if jnp.dtype(dtype) == jnp.int8:
        return jnp.nan_to_num(jnp.clip(jnp.round(scaled), -127, 127)).astype(dtype)
    largest = float(jnp.finfo(dtype).max)
    return jnp.where(jnp.isfinite(wide), jnp.clip(scaled, -largest, largest), scaled).astype(dtype)
