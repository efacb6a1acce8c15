"""Scales of whole operands are multiplied first: a large and a small one give what their product does, through each backend."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import mgpu_ops

K = 256


@pytest.mark.usefixtures("no_races")
@pytest.mark.parametrize("backend", ["xla", "interpret"])
@pytest.mark.parametrize("scales", [(1e33, 1e-33), (1e-33, 1e33)])
def test_a_sum_times_one_scale_may_be_beyond_float32(scales: tuple[float, float], backend: str) -> None:
    a, b = jnp.full((128, K), 448, jnp.float8_e4m3fn), jnp.full((64, K), 448, jnp.float8_e4m3fn)
    of_a, of_b = map(np.float32, scales)
    wanted = K * 448.0**2 * np.float64(of_a) * np.float64(of_b)
    options = {"out_dtype": jnp.float32, "backend": backend}
    one = mgpu_ops.matmul(a, b, scale_a=of_a, scale_b=of_b, transpose_b=True, **options)
    sizes, both, of_both = jnp.array([64, 64], jnp.int32), jnp.stack([b, b]), np.full(2, of_b)
    grouped = mgpu_ops.grouped_matmul(a, both, sizes, transpose_rhs=True, scale_lhs=of_a, scale_rhs=of_both, **options)
    for found in (one, grouped):
        np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=1e-6)
