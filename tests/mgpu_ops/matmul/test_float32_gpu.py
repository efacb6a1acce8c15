"""Products of float32 on a Hopper GPU: how precise the tensor cores' sums are in fact, and XLA's algorithms beside them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mgpu_ops import MatmulProblem, matmul, spec_of
from mgpu_ops.core import gpu
from mgpu_ops.matmul import algorithms

pytestmark = pytest.mark.gpu

MATMUL = spec_of("matmul")
SIDES = [(256, 512, 1024), (200, 136, 272), (17, 4096, 2048), (1000, 1032, 2000)]
BOUNDS = {"bf16": 2.0**-7, "tf32": 2.0**-9, "bf16_x3": 2.0**-14, "bf16_x6": 2.0**-23, "bf16_x9": 0.0}


def relative(problem, out, a, b):
    """The largest error, as a part of the product of the magnitudes."""
    left, right = (
        np.asarray(x, np.float64).swapaxes(-1, -2) if t == "t" else np.asarray(x, np.float64)
        for x, t in zip((a, b), problem.layout, strict=True)
    )
    return float(np.max(np.abs(np.asarray(out, np.float64) - left @ right) / (np.abs(left) @ np.abs(right))))


@pytest.mark.parametrize("algorithm", algorithms.KERNEL)
@pytest.mark.parametrize(("sides", "layout"), list(zip(SIDES, ("nt", "nn", "nn", "tt"), strict=True)), ids=str)
def test_any_schedule_is_as_precise_as_stated(sides, layout, algorithm):
    device = gpu.current()
    problem = MatmulProblem(*sides, "float32", "float32", layout, algorithm=algorithm)
    a, b = jax.jit(functools.partial(MATMUL.inputs, problem))(jax.random.key(0))
    configs = MATMUL.candidates(problem, device)
    by_schedule = {(c.tile_m < 64, c.cluster, c.split_k > 1): c for c in reversed(configs[:40])}
    errors = {}
    for schedule, config in list(by_schedule.items())[:4]:
        out = jax.jit(functools.partial(MATMUL.run, problem, config, device))(a, b)
        errors[schedule] = relative(problem, out, a, b)
    of_xla = relative(problem, jax.jit(functools.partial(MATMUL.reference, problem))(a, b), a, b)
    print(f"{algorithm} {sides} {layout}: {errors}, XLA {of_xla:.3g}, 2^-24 k = {sides[2] * 2.0**-24:.3g}")
    assert max(errors.values()) <= BOUNDS[algorithm] + sides[2] * 2.0**-24


@pytest.mark.parametrize("algorithm", ["bf16_x3", "bf16_x6"])
def test_warpgroups_in_turn(algorithm):
    device = gpu.current()
    problem = MatmulProblem(4096, 4096, 1024, "float32", "float32", algorithm=algorithm)
    config = next(c for c in MATMUL.candidates(problem, device) if c.schedule == "pingpong")
    a, b = jax.jit(functools.partial(MATMUL.inputs, problem))(jax.random.key(0))
    out = jax.jit(functools.partial(MATMUL.run, problem, config, device))(a, b)
    assert relative(problem, out, a, b) <= BOUNDS[algorithm] + problem.k * 2.0**-24


@pytest.mark.parametrize("k", [1024, 16384])
def test_sums_of_equal_signs_stay_within_float32s_bound(k):
    """The worst case of additions that cut off."""
    a, b = (jnp.abs(jax.random.normal(jax.random.key(i), shape)) for i, shape in enumerate([(256, k), (k, 256)]))
    problem = MatmulProblem(256, 256, k, "float32", "float32")
    errors = {}
    for algorithm in algorithms.KERNEL:
        out = matmul(a, b, precision=algorithms.PRESETS[algorithm], backend="mosaic")
        errors[algorithm] = relative(problem, out, a, b)
    print(f"k={k}, times 2^-24 k: { ({name: round(error / (k * 2.0**-24), 4) for name, error in errors.items()}) }")
    for algorithm, bound in BOUNDS.items():
        assert errors[algorithm] <= bound + k * 2.0**-24


@pytest.mark.parametrize("sides", [(1, 512, 1000), (300, 1, 512), (33, 47, 82)], ids=str)
@pytest.mark.parametrize("algorithm", ["bf16_x3", "bf16_x6", "bf16_x9"])
def test_xla_in_the_kernels_place_is_as_precise_as_stated(sides, algorithm):
    problem = MatmulProblem(*sides, "float32", "float32", algorithm=algorithm)
    a, b = jax.jit(functools.partial(MATMUL.inputs, problem))(jax.random.key(0))
    error = relative(problem, jax.jit(functools.partial(MATMUL.reference, problem))(a, b), a, b)
    assert error <= BOUNDS[algorithm] + problem.k * 2.0**-24


@pytest.mark.parametrize("precision", ["default", "high", "highest"])
def test_numbers_that_are_not_finite_are_those_of_arithmetic(precision):
    largest = np.finfo(np.float32).max
    a = jax.random.normal(jax.random.key(0), (200, 512)).at[:, 0].set(1.0).at[3, 0].set(jnp.inf).at[5, 1].set(jnp.nan)
    a = a.at[6].set(0.0).at[6, 0].set(largest)
    b = jnp.minimum(jnp.abs(jax.random.normal(jax.random.key(1), (512, 136))), 0.9).at[0, ::2].set(0.5)
    out = np.asarray(matmul(a, b, precision=precision, backend="mosaic"))
    np.testing.assert_array_equal(out[3], np.inf)
    assert np.isnan(out[5]).all()
    np.testing.assert_allclose(out[6, ::2], largest * 0.5, rtol=1e-3)
    assert np.isfinite(np.delete(out, (3, 5), 0)).all()


def test_the_smallest_normal_numbers_are_not_lost():
    """Their parts are not normal, which neither XLA's kernels nor the tensor cores may take for zero."""
    a = jnp.full((64, 64), 1.2345678 * 2.0**-120, jnp.float32)
    b = jnp.full((64, 64), 2.0**100, jnp.float32)
    out = np.asarray(matmul(a, b, precision="highest", backend="mosaic"), np.float64)
    print("relative error", np.max(np.abs(out / (np.asarray(a, np.float64) @ np.asarray(b, np.float64)) - 1)))
    np.testing.assert_allclose(out, np.asarray(a, np.float64) @ np.asarray(b, np.float64), rtol=2.0**-14)


@pytest.mark.parametrize("precision", ["default", "highest"])
def test_gradients(precision, assert_near):
    a, b = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(192, 256), (256, 320)]))
    g = 2 * np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    grads = jax.jit(jax.grad(lambda a, b: (matmul(a, b, precision=precision, backend="mosaic") ** 2).sum(), (0, 1)))(a, b)
    for found, wanted in zip(grads, (g @ np.asarray(b, np.float64).T, np.asarray(a, np.float64).T @ g), strict=True):
        assert_near(found, wanted, {"default": 2e-2, "highest": 1e-5}[precision])
