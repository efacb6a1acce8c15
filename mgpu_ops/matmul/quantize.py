"""quantize: numbers as 8-bit floats and float32 scales, as `matmul` takes them."""

from __future__ import annotations

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from mgpu_ops import flags, floats
from mgpu_ops.core.limits import FLOAT8
from mgpu_ops.matmul import quantizing
from mgpu_ops.matmul.rounding import rounded
from mgpu_ops.registry import dispatch

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

    With `transpose`, an x of rank 2 whose sides are multiples of 16 is read once by a kernel that writes both copies; else XLA
    makes two kernels or more of it. Gradients through it would be 8-bit floats: train with `fp8_matmul`.

    Raises ValueError for an unknown scheme, axis or dtype; TypeError for what is no array of floats.
    """
    array = floats.array("quantize", "x", x)
    flags.one_of("scheme", scheme, SCHEMES)
    kind, transpose = _checked_dtype(dtype), flags.checked("transpose", transpose)
    if array.ndim < 2 and (scheme != "tensor" or transpose):
        raise ValueError(f"x has shape {array.shape}: scheme={scheme!r} takes arrays of rank 2 or more; add a dimension")
    if not isinstance(axis, int | np.integer) or isinstance(axis, bool) or axis not in (-1, -2, array.ndim - 1, array.ndim - 2):
        raise ValueError(f"axis={axis!r} is none of the last two dimensions of x{array.shape}: pass -1 or -2")
    axis = int(axis if axis < 0 else axis - array.ndim)
    if transpose and array.ndim == 2 and axis == -1:
        return quantizing.quantized(array, (scheme, scheme), kind, dispatch.requested_backend(None))
    one: tuple[jax.Array, ...] = rounded(array, scheme, axis, kind)
    return (*one, *rounded(array.mT, scheme, axis, kind)) if transpose else one


def _checked_dtype(dtype: DTypeLike) -> Any:
    try:
        kind = jnp.dtype(dtype)
    except TypeError:
        kind = None
    if kind is None or kind.name not in FLOAT8:
        raise ValueError(f"dtype={dtype if kind is None else kind.name} is not one of {', '.join(FLOAT8)}")
    return kind
