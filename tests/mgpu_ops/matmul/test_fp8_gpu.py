"""Products of 8-bit floats on a Hopper GPU: what the interpreter cannot show, the sums of its tensor cores above all."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mgpu_ops import MatmulProblem, matmul, spec_of
from mgpu_ops.core import gpu
from mgpu_ops.matmul.problem import accumulation_error

pytestmark = pytest.mark.gpu

MATMUL = spec_of("matmul")
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
SIDES = [(256, 512, 1024), (200, 136, 272), (17, 4096, 4096), (1, 264, 144), (1000, 1032, 2000)]


@pytest.mark.parametrize("scales", ["none", "tensor", "row", "block"])
@pytest.mark.parametrize("sides", SIDES, ids=str)
def test_product_and_epilogue_on_every_schedule(sides, scales, assert_matmul):
    device = gpu.current()
    for b_dtype, out_dtype, more in ((E4M3, "bfloat16", False), (E5M2, "float32", True)):
        epilogue = {"bias": more, "activation": "gelu" if more else "none", "residual": more}
        problem = MatmulProblem(*sides, E4M3, out_dtype, "nt", **epilogue, b_dtype=b_dtype, scales=scales)
        arrays = jax.jit(functools.partial(MATMUL.inputs, problem))(jax.random.key(0))
        configs = MATMUL.candidates(problem, device)
        by_schedule = {(c.tile_m < 64, c.cluster, c.split_k > 1, c.wg_dimension): c for c in reversed(configs[:40])}
        assert len(by_schedule) > 2
        for config in list(by_schedule.values())[:4]:
            out = jax.jit(functools.partial(MATMUL.run, problem, config, device))(*arrays)
            assert_matmul(problem, out, *arrays)


@pytest.mark.parametrize("k", [4096, 16384])
def test_sums_of_equal_signs_stay_within_the_stated_error(k):
    """The worst case of sums that cut off: every addend is positive."""
    a, b = (jnp.abs(jax.random.normal(jax.random.key(i), (256, k))).astype(E4M3) for i in range(2))
    wanted = np.asarray(a).astype(np.float64) @ np.asarray(b).astype(np.float64).T
    problem = MatmulProblem(256, 256, k, E4M3, "float32", "nt")
    errors = {}
    for scales, shape in (("none", None), ("block", (256, k // 128))):
        more = {} if shape is None else {"scale_a": jnp.ones(shape)}
        out = matmul(a, b, transpose_b=True, out_dtype="float32", backend="mosaic", **more)
        errors[scales] = np.max(np.abs(np.asarray(out) / wanted - 1.0))
        assert errors[scales] <= accumulation_error(replace(problem, scales=scales))
    print(f"k={k}: relative errors {errors}")
    assert errors["block"] < errors["none"]


def test_nan_stays_in_its_row_and_columns_of_zeros_are_zero():
    a = jax.random.normal(jax.random.key(0), (200, 512)).astype(E4M3).at[3, 5].set(jnp.nan)
    b = jnp.ones((136, 512), E4M3).at[7].set(0)
    out = np.asarray(matmul(a, b, transpose_b=True, out_dtype="float32", backend="mosaic"))
    assert np.isnan(out[3]).all()
    assert np.isfinite(np.delete(out, 3, 0)).all()
    assert not np.delete(out, 3, 0)[:, 7].any()
