"""A caller's arrays, floats above all, and an error that names what is none."""

from __future__ import annotations

import math
import weakref
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


def scale(op: str, name: str, x: Any, dtype: Any = None) -> jax.Array:
    """x as an array of scales, of a dtype if one is given. Raises what `array` and `check_finite` raise."""
    found = array(op, name, x)
    check_finite(name, x if isinstance(x, _NUMBERS) else found, dtype or found.dtype)
    found = found if dtype is None else found.astype(dtype)
    if not isinstance(found, jax.core.Tracer):
        _finite[id(found)] = found
    return found


_NUMBERS = np.ndarray | np.generic | int | float
# Arrays that are known to be finite, by their ids. They never change: no other call waits for the device to tell.
_finite: weakref.WeakValueDictionary[int, jax.Array] = weakref.WeakValueDictionary()


def check_finite(name: str, scale: Any, dtype: Any, rows: slice | None = None) -> None:
    """Raises ValueError for known scales of which one is not finite in a dtype; nothing is known of traced ones.

    rows: those of the first dimension that count; all by default. NumPy looks at them: JAX would make it part of a program that
    is traced around the call.
    """
    if isinstance(scale, jax.Array):
        if isinstance(scale, jax.core.Tracer) or _finite.get(id(scale)) is scale or not scale.is_fully_addressable:
            return
    elif not isinstance(scale, _NUMBERS):
        return  # none, or a list of what may be traced
    given = np.asarray(jax.device_get(scale))[... if rows is None else rows]
    with np.errstate(over="ignore"):
        values = given.astype(dtype)
    wrong = ~np.isfinite(values)
    if wrong.any():
        raise ValueError(_not_finite(name, given, values, wrong, rows.start if rows else 0))
    if isinstance(scale, jax.Array) and rows is None:
        _finite[id(scale)] = scale


def _not_finite(name: str, given: np.ndarray, values: np.ndarray, wrong: np.ndarray, row: int) -> str:
    """The error of scales as given and as values of a dtype. row: the number of their first one."""
    first = tuple(map(int, np.argwhere(wrong)[0]))
    value = f"{values[first]} in {values.dtype}" if np.isfinite(given[first]) else f"{values[first]}"
    what = f"{name}={value} is not finite"
    if first:
        at = ", ".join(map(str, (first[0] + row, *first[1:])))
        what = f"{name} has {wrong.sum()} of {wrong.size} values that are not finite, the first {name}[{at}]={value}"
    return (
        f"{what}: scales must be finite, or what they multiply is lost. Take them from finite numbers alone, as "
        f"mgpu_ops.quantize does, or put others in their place: jnp.where(jnp.isfinite({name}), {name}, 1)"
    )


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
