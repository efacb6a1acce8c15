"""Random operands from NumPy: for each shape, XLA would spend a tenth of a second or more on compiling its random numbers."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def normal(seed: int, *shape: int, dtype: Any = "float32") -> jax.Array:
    """Standard normal numbers, the same for each dtype up to rounding."""
    numbers = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(numbers.astype(jnp.dtype(dtype)))


def inputs(spec: Any, problem: Any, seed: int = 0) -> tuple[jax.Array, ...]:
    """Arrays like those of `spec.inputs`: normal floats; integers, which are sizes of groups, are zero."""
    shapes = jax.eval_shape(functools.partial(spec.inputs, problem), jax.random.key(0))
    positive = getattr(problem, "normalised", False)  # epsilon, [1] and the only array of its shape
    return tuple(
        jnp.full(1, 0.25, x.dtype)
        if positive and x.shape == (1,)
        else normal(seed + number, *x.shape, dtype=x.dtype)
        if jnp.issubdtype(x.dtype, jnp.floating)
        else jnp.zeros(x.shape, x.dtype)
        for number, x in enumerate(shapes)
    )
