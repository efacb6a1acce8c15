"""The arrays and dtypes that matmul, gated_matmul and quantize are called with: their checks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from mgpu_ops import floats
from mgpu_ops.core.limits import FLOAT8, result_dtype
from mgpu_ops.rms_rows import checked_epsilon


def checked_arrays(**given: ArrayLike | None) -> dict[str, jax.Array]:
    """The arrays there are, by name. Raises for no array of floats, a scale that is not finite, two dtypes of a and b."""
    there = {name: x for name, x in given.items() if x is not None or name in ("a", "b")}
    arrays = {name: _checked_array(name, x) for name, x in there.items()}
    for name in ("a", "b"):
        if arrays[name].ndim == 0:
            raise ValueError(f"{name} is a scalar: matmul takes arrays of rank 1 or more; multiply by it")
    dtypes = {arrays[name].dtype.name for name in ("a", "b")}
    if len(dtypes) == 2 and not dtypes <= {*FLOAT8}:
        raise ValueError(f"a is {arrays['a'].dtype} and b is {arrays['b'].dtype}: cast one with .astype")
    return arrays


def _checked_array(name: str, x: Any) -> jax.Array:
    if name in ("a", "b") and isinstance(x, jax.Array | np.ndarray) and x.dtype == np.int8:
        return jnp.asarray(x)
    return floats.scale("matmul", name, x, np.float32) if name.startswith("scale") else floats.array("matmul", name, x)


def checked_bias(bias: jax.Array, n: int) -> jax.Array:
    """The bias of n columns. Raises for one of another shape."""
    if bias.shape != (n,):
        raise ValueError(f"bias has shape {bias.shape}: it must be [n] = {(n,)}")
    return bias


def epsilon_of(rms_epsilon: Any, a: jax.Array) -> jax.Array:
    """rms_epsilon as the kernel takes it, float32 [1]. Raises for one that is no number of at least 0, and for A of 8 bits."""
    epsilon = checked_epsilon("rms_epsilon", rms_epsilon)
    if a.dtype.name in FLOAT8 or not jnp.issubdtype(a.dtype, jnp.floating):
        raise ValueError(f"rms_epsilon divides rows of floats of 16 bits and more, not of {a.dtype}")
    return jnp.full((1,), epsilon, jnp.float32)


def checked_out_dtype(out_dtype: DTypeLike | None, preferred: DTypeLike | None, arrays: dict[str, jax.Array]) -> Any:
    """The dtype of the result: the one asked for, or that of a, if that is of 8 bits a wider one."""
    default = result_dtype(arrays["a"].dtype.name)
    if default == "int32":
        asked = {floats.any_dtype("out_dtype", x).name for x in (out_dtype, preferred) if x is not None}
        if asked == {"int32"} or (not asked and not arrays.keys() - {"a", "b"}):
            return jnp.dtype("int32")
        default = "bfloat16"
    return float_dtype(out_dtype, preferred, default)


def float_dtype(out_dtype: DTypeLike | None, preferred: DTypeLike | None, dtype: DTypeLike) -> Any:
    """The dtype of the result. Raises for one that is no float, and for two that differ."""
    given = {"out_dtype": out_dtype, "preferred_element_type": preferred}
    named = [floats.any_dtype(name, x) for name, x in given.items() if x is not None]
    if len({*named}) == 2:
        raise ValueError(f"out_dtype={named[0]} and preferred_element_type={named[1]} are one argument: pass one of them")
    return floats.dtype("out_dtype", named[0] if named else dtype)
