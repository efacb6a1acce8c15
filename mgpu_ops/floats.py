"""A caller's arrays, floats above all, and an error that names what is none."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def array(op: str, name: str, x: Any) -> jax.Array:
    """x as an array. TypeError where it is none, or none of floats."""
    found = any_array(op, name, x, "floats")
    if not jnp.issubdtype(found.dtype, jnp.floating):
        raise TypeError(f"{name} has dtype {found.dtype}: {op} takes floats; cast it first")
    return found


def any_dtype(name: str, x: Any) -> Any:
    """x as a dtype. TypeError where it is none."""
    try:
        return jnp.dtype(x)
    except (TypeError, ValueError):
        raise TypeError(f"{name}={x!r:.80} is no dtype: name a float's, such as jnp.float32") from None


def dtype(name: str, x: Any) -> Any:
    """x as the dtype of a result. TypeError where it is none, or none of floats."""
    found = any_dtype(name, x)
    if not jnp.issubdtype(found, jnp.floating):
        raise TypeError(f"{name} {found} is not a float: cast the result instead")
    return found


def any_array(op: str, name: str, x: Any, of: str) -> jax.Array:
    """x as an array of any dtype. TypeError where it is none, which says that it should be one `of` something."""
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError):
        shapes = "; jax.eval_shape takes shapes" if isinstance(x, jax.ShapeDtypeStruct) else ""
        raise TypeError(f"{name} is {x!r:.80}, which is no array: {op} takes arrays of {of}{shapes}") from None


def number(x: Any) -> float | None:
    """x as a float, infinite where it is too large for one. None for what is traced or no number: True is none."""
    numbers = isinstance(x, int | float | np.generic | np.ndarray | jax.Array) and not isinstance(x, jax.core.Tracer)
    try:
        if not numbers or np.ndim(x) or np.asarray(x).dtype.kind not in "iufVO":  # V: bfloat16; O: whole numbers beyond 64 bits
            return None
        return float(x)
    except OverflowError:
        return math.inf
    except TypeError:
        return None
