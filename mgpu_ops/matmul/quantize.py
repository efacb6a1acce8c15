"""quantize: numbers as 8-bit floats and float32 scales, as `matmul` takes them."""

from __future__ import annotations

import functools
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from mgpu_ops import floats
from mgpu_ops.core.fp8 import BLOCK
from mgpu_ops.core.limits import FLOAT8

type Scheme = Literal["tensor", "row", "block", "square"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme.__value__)


def quantize(
    x: ArrayLike, scheme: Scheme, *, axis: int = -1, dtype: DTypeLike = jnp.float8_e4m3fn, transpose: bool = False
) -> tuple[jax.Array, ...]:
    """x as 8-bit floats and float32 scales, x = values * scales up to rounding, for `matmul`'s operands.

    scale = max abs(x) of the numbers that share it / the dtype's largest (448 of e4m3, 57344 of e5m2), 1 where they are zero.

    Args:
      x: floats, [..., rows, k].
      scheme: what shares a scale: "tensor", all of x; "row", what lies along `axis`; "block", each 128 along it; "square",
        128 along both of the last two dimensions.
      axis: the dimension that the product sums over, one of the last two. Default: the last one, as `matmul`'s kernel reads
        8-bit floats.
      dtype: of the values, float8_e4m3fn (default) or float8_e5m2.
      transpose: also returns x with its last two dimensions exchanged, stored so and with scales of its own along the same
        `axis`: in a backward pass the product sums over the other dimension.

    Returns:
      values, of x's shape, and scales: [] for "tensor", x's shape without `axis` for "row", with blocks in place of its `axis`
      for "block" and of both dimensions for "square", rounded up. With `transpose` (values, scales, values_t, scales_t).

    Values are rounded to the nearest: abs(x - values * scales) <= max(2^-4 abs(x), 2^-10 scale) for e4m3, and for e5m2
    max(2^-3 abs(x), 2^-17 scale), up to 2^-22 abs(x) from float32. No finite number becomes infinite or NaN. NaN and infinities
    stay what they are (e4m3 has no infinity: NaN) and count for no scale.

    It is plain JAX: XLA makes one or two kernels of it. Gradients through it are 8-bit floats' own: train with
    `fp8_matmul`.

    Raises ValueError for an unknown scheme, axis or dtype; TypeError for what is no array of floats.
    """
    array = floats.array("quantize", "x", x)
    if scheme not in SCHEMES:
        raise ValueError(f"scheme={scheme!r} is not one of {', '.join(SCHEMES)}")
    kind = _checked_dtype(dtype)
    if array.ndim < 2 and (scheme != "tensor" or transpose):
        raise ValueError(f"x has shape {array.shape}: scheme={scheme!r} takes arrays of rank 2 or more; add a dimension")
    if not isinstance(axis, int | np.integer) or axis not in (-1, -2, array.ndim - 1, array.ndim - 2):
        raise ValueError(f"axis={axis} is none of the last two dimensions of x{array.shape}: pass -1 or -2")
    axis = int(axis if axis < 0 else axis - array.ndim)
    one: tuple[jax.Array, ...] = _quantize(array, scheme, axis, kind)
    return (*one, *_quantize(array.mT, scheme, axis, kind)) if transpose else one


def _checked_dtype(dtype: DTypeLike) -> Any:
    try:
        kind = jnp.dtype(dtype)
    except TypeError:
        kind = None
    if kind is None or kind.name not in FLOAT8:
        raise ValueError(f"dtype={dtype if kind is None else kind.name} is not one of {', '.join(FLOAT8)}")
    return kind


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _quantize(x: jax.Array, scheme: Scheme, axis: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    size = _finite_size(x)
    blocks = {"block": (axis,), "square": (-1, -2)}.get(scheme, ())  # dimensions of which each 128 share a scale
    shared = axis if scheme == "row" else None
    for dimension in blocks:
        size = _largest_of_blocks(size, dimension)
    if not blocks:
        size = jnp.max(size, shared, initial=0.0)
    scales = jnp.where(size == 0.0, 1.0, scale_of(size, dtype))
    of_each = scales if shared is None else jnp.expand_dims(scales, shared)
    for dimension in blocks:
        of_each = jnp.repeat(of_each, BLOCK, dimension)
        of_each = jax.lax.slice_in_dim(of_each, 0, x.shape[dimension], axis=dimension % x.ndim)
    return with_scale(x, of_each, dtype), scales


def scale_of(largest: jax.Array, dtype: Any) -> jax.Array:
    """The scale with which an absolute value, float32, becomes the largest number of the dtype."""
    return jnp.maximum(largest / float(jnp.finfo(dtype).max), jnp.finfo(jnp.float32).tiny)


def with_scale(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """x / scale in 8 bits, saturated at the dtype's largest number; NaN and infinities stay what they are."""
    largest, wide = float(jnp.finfo(dtype).max), x.astype(jnp.float32)
    scaled = wide / scale
    return jnp.where(jnp.isfinite(wide), jnp.clip(scaled, -largest, largest), scaled).astype(dtype)


def largest_finite(x: jax.Array) -> jax.Array:
    """The largest absolute value that is finite, float32 []; 0 where there is none."""
    return jnp.max(_finite_size(x), initial=0.0)


def _finite_size(x: jax.Array) -> jax.Array:
    """Absolute values in float32, 0 for NaN and infinities."""
    wide = x.astype(jnp.float32)
    return jnp.where(jnp.isfinite(wide), jnp.abs(wide), 0.0)


def _largest_of_blocks(x: jax.Array, axis: int) -> jax.Array:
    """The largest of each 128 numbers along an axis; the last block may have fewer. Numbers are not negative."""
    axis %= x.ndim
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, -x.shape[axis] % BLOCK)
    padded = jnp.pad(x, pad)
    return jnp.max(padded.reshape(*x.shape[:axis], padded.shape[axis] // BLOCK, BLOCK, *x.shape[axis + 1 :]), axis + 1)
