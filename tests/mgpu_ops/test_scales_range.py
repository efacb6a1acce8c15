"""Scales of operands whose product, or a sum times one of which, leaves the range of float32, though the result does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mgpu_ops
from mgpu_ops.grouped.ragged_contraction import Call, transposed_contraction

pytestmark = pytest.mark.usefixtures("no_races")

F8, F32 = jnp.float8_e4m3fn, jnp.float32
K, LARGE, SMALL = 256, np.float32(448), np.float32(2**-9)  # the largest number of e4m3, and the smallest
SIZES = jnp.array([64, 64], jnp.int32)
CASES = {  # the operands' numbers, and the scales
    "a sum times one scale would overflow": (LARGE, 1e33, 1e-33),
    "the same, in the other order": (LARGE, 1e-33, 1e33),
    "the product of the scales would be 0": (LARGE, 1e-19, 1e-22),
    "the product of the scales would overflow": (SMALL, 1e20, 1e19),
    "zeros stay zeros": (np.float32(0), 1e32, 1e32),
    "a scale of 0": (LARGE, 0.0, 1e37),
}
BACKENDS = pytest.mark.parametrize("backend", ["xla", "interpret"])


def matmul(a: Any, b: Any, of_a: Any, of_b: Any, backend: str) -> jax.Array:
    return mgpu_ops.matmul(a, b, scale_a=of_a, scale_b=of_b, transpose_b=True, out_dtype=F32, backend=backend)


def grouped(a: Any, b: Any, of_a: Any, of_b: Any, backend: str) -> jax.Array:
    scales = {"scale_lhs": of_a, "scale_rhs": np.full(2, of_b)}
    both = jnp.stack([b, b])
    return mgpu_ops.grouped_matmul(a, both, SIZES, transpose_rhs=True, out_dtype=F32, backend=backend, **scales)


def contraction(a: Any, b: Any, of_a: Any, of_b: Any, backend: str) -> jax.Array:
    call = Call("float32", "random", None, backend)
    return transposed_contraction(call, a, b, jnp.array([K], jnp.int32), jnp.array([of_a, of_b]))[0]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("op", [matmul, grouped, contraction])
@BACKENDS
def test_a_result_within_float32_is_right_whatever_the_scales(op: Callable[..., jax.Array], case: str, backend: str) -> None:
    number, of_a, of_b = CASES[case]
    a, b = jnp.full((128, K), number, F8), jnp.full((64, K), number, F8)
    of_a, of_b = np.float32(of_a), np.float32(of_b)
    wanted = K * np.float64(number) ** 2 * np.float64(of_a) * np.float64(of_b)
    np.testing.assert_allclose(np.asarray(op(a, b, of_a, of_b, backend), np.float64), wanted, rtol=1e-6)


@BACKENDS
def test_of_a_gated_product_too(backend: str) -> None:
    """relu(gate) up with a gate of 1, where the product of the scales of lhs and up would be 0."""
    a, b = jnp.full((128, K), LARGE, F8), jnp.full((2, 64, K), LARGE, F8)
    total = K * np.float64(LARGE) ** 2
    scales = {"scale_lhs": np.float32(1e-22)}
    scales |= {"scale_gate": np.full(2, 1e22 / total, np.float32), "scale_up": np.full(2, 1e-19, np.float32)}
    options: dict[str, Any] = {"activation": "relu", "transpose_w": True, "out_dtype": F32, "backend": backend}
    out = mgpu_ops.gated_grouped_matmul(a, b, b, SIZES, **scales, **options)
    np.testing.assert_allclose(np.asarray(out, np.float64), total * 1e-41, rtol=1e-5)
