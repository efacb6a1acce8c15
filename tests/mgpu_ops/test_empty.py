"""Arrays of no elements, mapped and differentiated: shapes are found as for others."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mgpu_ops

NO_ROWS = np.zeros(2, np.int32)  # of either group


def experts_of_8_bits(hidden: int, width: int) -> list[np.ndarray]:
    """Matrices of two experts, and their scales."""
    shapes = [(2, 2 * hidden, width), (2, width, hidden)]
    return [*(np.ones(shape, np.int8) for shape in shapes), *(np.ones(shape[:2], np.float32) for shape in shapes)]


CALLS: dict[str, Any] = {  # function, and its arrays for m, n and k
    "matmul": (mgpu_ops.matmul, lambda m, n, k: [(m, k), (k, n)]),
    "gated_matmul": (mgpu_ops.gated_matmul, lambda m, n, k: [(m, k), (k, n), (k, n)]),
    "gated_mlp": (mgpu_ops.gated_mlp, lambda m, n, k: [(m, k), (k, n), (k, n), (n, k)]),
    "fp8_matmul": (mgpu_ops.fp8_matmul, lambda m, n, k: [(m, k), (k, n)]),
    "fp8_gated_mlp": (mgpu_ops.fp8_gated_mlp, lambda m, n, k: [(m, k), (k, n), (k, n), (n, k)]),
    **{
        name: (
            functools.partial(getattr(mgpu_ops, name), top_k=1),
            lambda m, n, k: [(m, k), (m, 2), (2, k, n), (2, k, n), (2, n, k)],
        )
        for name in ("moe", "fp8_moe")
    },
    "rms_norm": (mgpu_ops.rms_norm, lambda m, n, k: [(m, k), (k,)]),
    "grouped_matmul": (lambda x, w: mgpu_ops.grouped_matmul(x, w, NO_ROWS), lambda m, n, k: [(m, k), (2, k, n)]),
    "ragged_contraction": (lambda x, y: mgpu_ops.ragged_contraction(x, y, NO_ROWS), lambda m, n, k: [(m, k), (m, n)]),
    "quantized_matmul": (
        lambda x: mgpu_ops.quantized_matmul(x, np.ones((x.shape[1], 8), np.int8), np.ones(8, np.float32)),
        lambda m, n, k: [(m, k)],
    ),
    "quantized_moe": (
        lambda x, logits: mgpu_ops.quantized_moe(x, logits, *experts_of_8_bits(8, x.shape[1]), 1),
        lambda m, n, k: [(m, k), (m, 2)],
    ),
    "quantized_moe, hidden": (
        lambda x, logits, hidden: mgpu_ops.quantized_moe(x, logits, *experts_of_8_bits(hidden.size, x.shape[1]), 1),
        lambda m, n, k: [(m, k), (m, 2), (n,)],
    ),
}


def shapes_of_gradients(function: Any, shapes: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    total = lambda *xs: function(*xs).astype(jnp.float32).sum()  # noqa: E731
    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    return [x.shape for x in jax.eval_shape(jax.grad(total, argnums=tuple(range(len(shapes)))), *given)]


@pytest.mark.parametrize("empty", ["m", "n", "k"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_and_its_gradients_may_have_an_empty_dimension_mapped_or_not(name, empty):
    function, of = CALLS[name]
    shapes = of(**{"m": 8, "n": 16, "k": 24} | {empty: 0})
    assert shapes_of_gradients(function, shapes) == shapes
    every = [(2, *shape) for shape in shapes]
    assert shapes_of_gradients(jax.vmap(function), every) == every
    one = [every[0], *shapes[1:]]
    assert shapes_of_gradients(jax.vmap(function, in_axes=[0] + [None] * (len(one) - 1)), one) == one
