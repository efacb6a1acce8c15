"""Integers of a caller, of any dtype, as the int32 that kernels read: none wraps around."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

INT32 = np.iinfo(np.int32)


def array(name: str, x: Any) -> Any:
    """x as a NumPy or JAX array of integers, as wide as it is. An empty list is of int32. TypeError for what holds none."""
    found = x if isinstance(x, jax.Array | np.ndarray | np.generic) else _converted(x)
    if found is None or (not isinstance(found, jax.Array) and found.dtype.kind in "OSU"):
        shapes = "; jax.eval_shape takes shapes" if isinstance(x, jax.ShapeDtypeStruct) else ""
        raise TypeError(f"{name} is {x!r:.80}, which is no array of integers{shapes}")
    if not jnp.issubdtype(found.dtype, jnp.integer):
        raise TypeError(f"{name} has dtype {found.dtype}: it must hold integers; cast it first")
    return found


def _converted(x: Any) -> Any:
    """What is no array yet as one, int32 where it is empty. None where it cannot be one."""
    traced = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(x))
    try:
        found = jnp.asarray(x) if traced else np.asarray(x)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if found.size else found.astype(np.int32)


def clipped(x: Any, high: int) -> jax.Array:
    """As int32: values that it cannot hold count as 0 or `high`, whichever is nearer; others may stay as they are."""
    if not fits(x.dtype):
        x = (jnp if isinstance(x, jax.Array) else np).clip(x, 0, high)
    return jnp.asarray(x, jnp.int32)


def rows(name: str, x: Any, of: str, count: int) -> jax.Array:
    """Numbers of `count` rows of `of`, as int32. ValueError for a known one that is no row; traced ones are clipped."""
    if not isinstance(x, jax.core.Tracer) and x.size:
        known = np.asarray(x)
        if (wrong := (known < 0) | (known >= count)).any():
            at = tuple(map(int, np.argwhere(wrong)[0]))
            where = ", ".join(map(str, at))
            raise ValueError(f"{name}[{where}]={known[at]} is not from 0 to {count - 1}: {of} has {count} rows")
    return jnp.clip(clipped(x, count), 0, max(count - 1, 0))


def check_count(what: str, size: Any) -> None:
    """Raises ValueError where `size` (of `what`, such as "the rows of lhs") is more than int32 counts."""
    if isinstance(size, int) and size > INT32.max:
        raise ValueError(
            f"{what} are {size}: an int32 numbers them, so {INT32.max} at most; split the array into several calls"
        )


def comparable(x_name: str, x: Any, y_name: str, y: Any) -> tuple[jax.Array, jax.Array]:
    """As int32 numbers that are equal where x and y are, and in the same order.

    Where int32 does not hold them, they are numbered: NumPy's here, JAX's by a sort when the function runs. ValueError for
    dtypes that no dtype of JAX's holds both of.
    """
    if all(fits(each.dtype) or _holds_small(each) for each in (x, y)):
        return jnp.asarray(x, jnp.int32), jnp.asarray(y, jnp.int32)
    if not isinstance(x, jax.Array) and not isinstance(y, jax.Array):
        both = np.array([*np.ravel(x).tolist(), *np.ravel(y).tolist()], object)  # Python's integers
        numbers = np.unique(both, return_inverse=True)[1].astype(np.int32)
        return jnp.asarray(numbers[: x.size].reshape(x.shape)), jnp.asarray(numbers[x.size :].reshape(y.shape))
    x, y = (jnp.asarray(each, jnp.int32) if _holds_small(each) else each for each in (x, y))
    common = np.promote_types(x.dtype, y.dtype)
    if not jnp.issubdtype(common, jnp.integer) or (common.itemsize == 8 and not jax.config.jax_enable_x64):
        raise ValueError(
            f"{x_name} are {x.dtype} and {y_name} {y.dtype}: no dtype of JAX's holds both here; cast both to int32, renumbered "
            "where int32 does not hold them"
        )
    x, y = jnp.asarray(x, common), jnp.asarray(y, common)
    if common == np.uint32:
        return tuple(lax.bitcast_convert_type(each ^ np.uint32(1 << 31), jnp.int32) for each in (x, y))  # type: ignore[return-value]
    order = jnp.sort(jnp.concatenate([x.ravel(), y.ravel()]))
    return tuple(jnp.searchsorted(order, each, method="sort").astype(jnp.int32) for each in (x, y))  # type: ignore[return-value]


def fits(dtype: Any) -> bool:
    """Whether int32 holds every value of a dtype."""
    return INT32.min <= jnp.iinfo(dtype).min and jnp.iinfo(dtype).max <= INT32.max


def _holds_small(x: Any) -> bool:
    """Whether x is known, and int32 holds its values."""
    return not isinstance(x, jax.Array) and (x.size == 0 or (INT32.min <= x.min() and x.max() <= INT32.max))
