"""Floats of a caller as arrays, and an error that names what is none."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def array(op: str, name: str, x: Any) -> jax.Array:
    """x as an array. TypeError where it is none, or none of floats."""
    try:
        found = jnp.asarray(x)
    except (TypeError, ValueError):
        shapes = "; jax.eval_shape takes shapes" if isinstance(x, jax.ShapeDtypeStruct) else ""
        raise TypeError(f"{name} is {x!r:.80}, which is no array: {op} takes arrays of floats{shapes}") from None
    if not jnp.issubdtype(found.dtype, jnp.floating):
        raise TypeError(f"{name} has dtype {found.dtype}: {op} takes floats; cast it first")
    return found
