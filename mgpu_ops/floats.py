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
    _remember(found, "finite")
    return found


def zero_points(op: str, name: str, x: Any, of: Any, dtype: Any = None) -> jax.Array:
    """x as an array of zero points of weights whose dtype is `of`; in a dtype if one is given.

    TypeError where it is none of numbers; ValueError for known ones that are not whole and of the weights' range.
    """
    found = any_array(op, name, x, "numbers")
    if not (jnp.issubdtype(found.dtype, jnp.integer) or jnp.issubdtype(found.dtype, jnp.floating)):
        raise TypeError(f"{name} has dtype {found.dtype}: pass integers, or whole numbers as floats")
    given = _known(x if isinstance(x, _NUMBERS) else found, of)
    if given is not None:
        low, high = int(jnp.iinfo(of).min), int(jnp.iinfo(of).max)
        values = given.astype(np.float64)
        wrong = ~((values >= low) & (values <= high) & (values == np.rint(values)))
        if wrong.any():
            what = _told(name, f"whole and from {low} to {high}", wrong, given[_first(wrong)])
            raise ValueError(
                f"{what}: zero points of {of} weights are. Round and clip them before weights are quantised with them; where "
                f"both are unsigned, take {-low} off both"
            )
    cast = found if dtype is None else found.astype(dtype)
    for each in (found, cast):
        _remember(each, of)
    return cast


_NUMBERS = np.ndarray | np.generic | int | float
# Arrays whose numbers are known to be good, by their ids and what was checked. They never change: no other call waits for the
# device to tell.
_good: weakref.WeakValueDictionary[tuple[int, Any], jax.Array] = weakref.WeakValueDictionary()


def _remember(x: Any, checked: Any) -> None:
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
        _good[id(x), checked] = x


def _known(x: Any, checked: Any) -> np.ndarray | None:
    """The numbers of x; None where nothing is known of them, or that they are good."""
    if isinstance(x, jax.Array):
        if isinstance(x, jax.core.Tracer) or _good.get((id(x), checked)) is x or not x.is_fully_addressable:
            return None
    elif not isinstance(x, _NUMBERS):
        return None  # none, or a list of what may be traced
    return np.asarray(jax.device_get(x))


def check_finite(name: str, scale: Any, dtype: Any, rows: slice | None = None) -> None:
    """Raises ValueError for known scales of which one is not finite in a dtype; nothing is known of traced ones.

    rows: those of the first dimension that count; all by default. NumPy looks at them: JAX would make it part of a program that
    is traced around the call.
    """
    known = _known(scale, "finite")
    if known is None:
        return
    given = known[... if rows is None else rows]
    with np.errstate(over="ignore"):
        values = given.astype(dtype)
    wrong = ~np.isfinite(values)
    if wrong.any():
        raise ValueError(_not_finite(name, given, values, wrong, rows.start if rows else 0))
    if rows is None:
        _remember(scale, "finite")


def _not_finite(name: str, given: np.ndarray, values: np.ndarray, wrong: np.ndarray, row: int) -> str:
    """The error of scales as given and as values of a dtype. row: the number of their first one."""
    first = _first(wrong)
    value = f"{values[first]} in {values.dtype}" if np.isfinite(given[first]) else f"{values[first]}"
    what = _told(name, "finite", wrong, value, row)
    return (
        f"{what}: scales must be finite, or what they multiply is lost. Take them from finite numbers alone, as "
        f"mgpu_ops.quantize does, or put others in their place: jnp.where(jnp.isfinite({name}), {name}, 1)"
    )


def _first(wrong: np.ndarray) -> tuple[int, ...]:
    return tuple(map(int, np.argwhere(wrong)[0]))


def _told(name: str, what: str, wrong: np.ndarray, value: object, row: int = 0) -> str:
    """That numbers are not `what`, how many, and which value the first of them has. row: the number of their first one."""
    if not (first := _first(wrong)):
        return f"{name}={value} is not {what}"
    at = ", ".join(map(str, (first[0] + row, *first[1:])))
    return f"{name} has {wrong.sum()} of {wrong.size} values that are not {what}, the first {name}[{at}]={value}"


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
        if isinstance(x, np.ndarray | np.generic) and not x.dtype.isnative:
            way_out = f'pass {name}.astype({name}.dtype.newbyteorder("="))'
            raise TypeError(f"{name} has dtype {x.dtype.str}, bytes in another order than this machine's: {way_out}") from None
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
