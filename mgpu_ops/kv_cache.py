"""A KV cache: dtypes and scales of keys and values of 8 bits, and tables of pages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from mgpu_ops import floats, integers

DTYPES = ("float8_e4m3fn", "int8")


def array(function: str, name: str, x: ArrayLike) -> jax.Array:
    """Keys or values: floats, or integers of 8 bits."""
    found = floats.any_array(function, name, x, "floats")
    return found if found.dtype == jnp.int8 else floats.array(function, name, found)


def checked_scales(
    function: str, batch: int, heads: int, k_scale: ArrayLike | None, v_scale: ArrayLike | None
) -> tuple[jax.Array, jax.Array]:
    """The scales of keys and of values, float32 [batch or 1, heads] each; 1 where there is none.

    Raises for shapes and dtypes that do not fit, for known ones that are not finite, and for numbers of Python or NumPy
    that are not above 0.
    """

    def one(name: str, scale: ArrayLike | None) -> jax.Array:
        if scale is None:
            return jnp.ones((1, heads), jnp.float32)
        found = floats.scale(function, name, scale, jnp.float32)
        if found.shape not in ((), (heads,), (batch, heads)):
            raise ValueError(
                f"{name} has shape {found.shape}: it must be a scalar, [kv_heads] = {(heads,)} or [batch, kv_heads] = "
                f"{(batch, heads)}"
            )
        if not isinstance(scale, jax.Array) and not (np.asarray(scale, np.float64) > 0).all():  # without asking a device
            raise ValueError(f"{name}={scale!r:.80} must be above 0: the sign belongs to the keys or values")
        return jnp.broadcast_to(found, found.shape if found.ndim == 2 else (1, heads))

    return one("k_scale", k_scale), one("v_scale", v_scale)


def page_table(table: Any, batch: int, more: str = "") -> Any:
    """A table of pages, integers [batch, pages of a sequence]. Raises for what is none. more: what the error adds."""
    found = integers.array("page_table", table)
    if found.ndim != 2 or found.shape[0] != batch:
        raise ValueError(
            f"page_table has shape {found.shape}: it must be [batch, pages of a sequence], with batch = {batch}{more}"
        )
    if not isinstance(found.shape[1], int) or found.shape[1] == 0:
        raise ValueError(f"page_table has shape {found.shape}: each sequence needs room for one page or more, a known number")
    return found


def without_scales(dtype: Any, k_scale: ArrayLike | None, v_scale: ArrayLike | None) -> None:
    """Raises for a scale beside keys and values that are not of 8 bits."""
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            raise TypeError(f"{name} is for keys and values of 8 bits, and they are {dtype}: multiply them, or leave it out")
