"""vmap of what has no launch for a whole batch: one call after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax


def one_after_the_other(function: Callable[..., Any], batched: Sequence[bool], arrays: Sequence[jax.Array]) -> Any:
    """The function mapped over the leading axis of those arrays that are batched, in a loop. All its results are batched."""
    mapped = [x for x, is_batched in zip(arrays, batched, strict=True) if is_batched]

    def call(slices: list[jax.Array]) -> Any:
        each = iter(slices)
        return function(*(next(each) if is_batched else x for x, is_batched in zip(arrays, batched, strict=True)))

    return lax.map(call, mapped)
