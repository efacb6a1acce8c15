"""What a user of `mgpu_ops.quantize` relies on: how far values times scales are from x, zeros, NaN, shapes, and the product."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mgpu_ops import matmul, quantize
from tests.arrays import normal

E4M3, E5M2, F32 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float32
SHAPES = {"tensor": (), "row": (3, 200), "block": (3, 200, 3), "square": (3, 2, 3)}


def dequantized(values: jax.Array, scales: jax.Array, scheme: str) -> np.ndarray:
    wide, scale = np.asarray(values).astype(np.float64), np.asarray(scales).astype(np.float64)
    if scheme == "row":
        scale = scale[..., None]
    if scheme in ("block", "square"):
        scale = scale.repeat(128, -1)[..., : wide.shape[-1]]
    if scheme == "square":
        scale = scale.repeat(128, -2)[..., : wide.shape[-2], :]
    return wide * scale


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("scheme", SHAPES)
def test_values_times_scales_are_x_within_half_a_step(scheme, dtype):
    x = normal(0, 3, 200, 264) * 10.0 ** normal(1, 3, 200, 264)  # of many sizes
    values, scales = quantize(x, scheme, dtype=dtype)
    assert (values.dtype, values.shape, scales.dtype, scales.shape) == (dtype, x.shape, F32, SHAPES[scheme])
    exact = np.asarray(x).astype(np.float64)
    half, least = (2.0**-4, 2.0**-10) if dtype == E4M3 else (2.0**-3, 2.0**-17)
    scale = dequantized(jnp.ones(x.shape), scales, scheme)
    allowed = np.maximum(half * np.abs(exact), least * scale) + 2.0**-22 * np.abs(exact)
    assert (np.abs(dequantized(values, scales, scheme) - exact) <= allowed).all()
    largest = np.abs(np.asarray(values).astype(np.float64)).max()
    assert largest == float(jnp.finfo(dtype).max)  # the whole range is used


@pytest.mark.parametrize("scheme", SHAPES)
def test_zeros_have_scale_one_and_stay_zero(scheme):
    values, scales = quantize(jnp.zeros((3, 200, 264)), scheme)
    assert (np.asarray(scales) == 1).all()
    assert not np.asarray(values).astype(np.float32).any()


@pytest.mark.parametrize("largest", [1e-45, 1e-38, 3e38])
def test_the_smallest_and_largest_numbers_stay_finite(largest):
    values, scales = quantize(jnp.full((2, 16), largest, F32), "row")
    assert np.isfinite(np.asarray(scales)).all()
    assert (np.asarray(scales) > 0).all()
    assert np.isfinite(np.asarray(values).astype(np.float32)).all()


@pytest.mark.parametrize(("dtype", "infinite"), [(E4M3, np.isnan), (E5M2, np.isinf)])
def test_what_is_not_finite_is_shown_and_changes_nothing_else(dtype, infinite):
    x = normal(0, 4, 32)
    values, scales = quantize(x.at[1, 2].set(jnp.nan).at[2, 3].set(jnp.inf), "tensor", dtype=dtype)
    wide = np.asarray(values).astype(np.float32)
    assert np.isnan(wide[1, 2])
    assert infinite(wide[2, 3])
    assert (~np.isfinite(wide)).sum() == 2
    assert np.isfinite(scales)


@pytest.mark.parametrize("scheme", SHAPES)
def test_the_transposed_copy_is_that_of_the_transposed_array(scheme):
    x = normal(0, 200, 264)
    values, scales, values_t, scales_t = quantize(x, scheme, transpose=True)
    for found, wanted in zip((values, scales, values_t, scales_t), (*quantize(x, scheme), *quantize(x.T, scheme))):
        np.testing.assert_array_equal(np.asarray(found).astype(np.float32), np.asarray(wanted).astype(np.float32))


@pytest.mark.parametrize("scheme", SHAPES)
def test_the_gradient_with_a_transposed_copy_is_that_without(scheme):
    x = normal(0, 32, 48)

    def gradient(**options):
        return jax.grad(lambda x: jnp.sum(quantize(x, scheme, **options)[0].astype(F32)))(x)

    with_copy, without = gradient(transpose=True), gradient()
    np.testing.assert_array_equal(with_copy, without)


def test_axis_names_the_dimension_that_shares_a_scale():
    x = normal(0, 200, 264)
    for axis in (-2, 0):
        values, scales = quantize(x, "row", axis=axis)
        wanted, of_rows = quantize(x.T, "row")
        assert scales.shape == (264,)
        np.testing.assert_array_equal(scales, of_rows)
        np.testing.assert_array_equal(np.asarray(values.T).astype(np.float32), np.asarray(wanted).astype(np.float32))
    assert quantize(x, "block", axis=-2)[1].shape == (2, 264)


@pytest.mark.parametrize(("of_a", "of_b"), [("tensor", "tensor"), ("row", "row"), ("block", "square"), ("tensor", "square")])
def test_matmul_takes_values_and_scales_as_they_are(of_a, of_b, assert_near):
    x, w = normal(0, 3, 40, 272), normal(1, 200, 272) * jnp.exp(normal(2, 200, 1))
    a, scale_a = quantize(x, of_a)
    b, scale_b = quantize(w, of_b)
    out = matmul(a, b, scale_a=scale_a, scale_b=scale_b, transpose_b=True, out_dtype=F32)
    wanted = dequantized(a, scale_a, of_a) @ dequantized(b, scale_b, of_b).T
    assert_near(out, wanted, 1e-5)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    assert np.linalg.norm(np.asarray(out) - exact) < 0.05 * np.linalg.norm(exact)


@pytest.mark.parametrize(
    ("arguments", "error", "reason"),
    [
        ({"scheme": "column"}, ValueError, "scheme='column' is not one of tensor, row, block, square"),
        ({"scheme": "row", "axis": 0}, ValueError, r"axis=0 is none of the last two dimensions of x\(2, 3, 4\)"),
        ({"scheme": "row", "dtype": "float9"}, ValueError, "dtype=float9 is not one of float8_e4m3fn, float8_e5m2"),
        ({"scheme": "row", "axis": -1.0}, ValueError, "axis=-1.0 is none of the last two dimensions"),
        ({"scheme": "row", "dtype": jnp.float16}, ValueError, "dtype=float16 is not one of float8_e4m3fn, float8_e5m2"),
        ({"scheme": "row", "x": jnp.ones(4)}, ValueError, r"x has shape \(4,\): scheme='row' takes arrays of rank 2"),
        ({"scheme": "row", "x": jnp.ones((4, 4), jnp.int32)}, TypeError, "x has dtype int32: quantize takes floats"),
    ],
)
def test_bad_input_is_told(arguments, error, reason):
    with pytest.raises(error, match=reason):
        quantize(**{"x": jnp.ones((2, 3, 4)), **arguments})


@pytest.mark.parametrize(("scheme", "shape"), [("row", (0,)), ("block", (0, 2)), ("square", (0, 2))])
def test_no_rows_have_no_scales(scheme, shape):
    values, scales = quantize(jnp.ones((0, 256)), scheme)
    assert (values.shape, scales.shape) == ((0, 256), shape)
