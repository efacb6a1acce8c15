"""What a user of `mgpu_ops.grouped_matmul` relies on: values, sizes of any kind, transforms, configs, errors."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from jax.test_util import check_grads

import mgpu_ops
from mgpu_ops import GroupedMatmulProblem, grouped_matmul, use_configs
from mgpu_ops.core import aot, gpu
from tests.mgpu_ops.grouped import ragged
from tests.mgpu_ops.grouped.ragged import (
    BASE,
    BF16,
    F16,
    F32,
    TOLERANCE,
    assert_same_gradients,
    gradients,
    needs_compiler,
    normal,
    of_arrays,
)

SPEC = mgpu_ops.spec_of("grouped_matmul")
H200 = gpu.find("h200")
pytestmark = pytest.mark.usefixtures("no_races")


def operands(m: int, n: int, k: int, groups: int, dtype: Any = BF16, transpose_rhs: bool = False) -> tuple[jax.Array, ...]:
    rhs = (groups, n, k) if transpose_rhs else (groups, k, n)
    return normal(0, m, k, dtype=dtype), normal(1, *rhs, dtype=dtype)


# --- values

SIZES = {
    "sums to m": [30, 0, 41, 1],
    "first rows only": [5, 9, 2, 0],
    "all empty": [0, 0, 0, 0],
    "one-hot": [0, 0, 72, 0],
    "one row each": [1, 1, 1, 1],
    "whole blocks": [64, 0, 0, 8],
}


@pytest.mark.parametrize("transpose_rhs", [False, True])
@pytest.mark.parametrize("name", SIZES)
def test_each_group_of_rows_is_multiplied_by_its_own_matrix(name, transpose_rhs, assert_near):
    lhs, rhs = operands(72, 40, 24, 4, transpose_rhs=transpose_rhs)
    sizes = np.array(SIZES[name])
    out = grouped_matmul(lhs, rhs, sizes, transpose_rhs=transpose_rhs)
    assert out.dtype == BF16
    wanted = ragged.grouped(lhs, rhs, sizes, transpose_rhs=transpose_rhs)
    if wanted.any():
        assert_near(out, wanted, TOLERANCE[BF16])
    np.testing.assert_array_equal(out[sizes.sum() :], 0)


@pytest.mark.parametrize("rows", [1003, 40])
def test_256_groups(rows, assert_near):
    lhs, rhs = operands(rows, 16, 8, 256)
    sizes = np.random.default_rng(0).multinomial(rows - rows // 10, np.ones(256) / 256)
    assert_near(grouped_matmul(lhs, rhs, sizes), ragged.grouped(lhs, rhs, sizes), TOLERANCE[BF16])


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (7, 13, 5), (131, 3, 17), (300, 72, 200)])
def test_odd_shapes(m, n, k, assert_near):
    lhs, rhs = operands(m, n, k, 3)
    sizes = np.array([m // 3, 0, m - m // 3])
    assert_near(grouped_matmul(lhs, rhs, sizes), ragged.grouped(lhs, rhs, sizes), TOLERANCE[BF16])


@pytest.mark.parametrize("shape", [(0, 8, 8), (8, 0, 8), (8, 8, 0)], ids=str)
def test_dimensions_of_zero(shape):
    m, n, k = shape
    out = grouped_matmul(jnp.ones((m, k), BF16), jnp.ones((2, k, n), BF16), [m // 2, 0])
    assert out.dtype == BF16
    np.testing.assert_array_equal(out, np.zeros((m, n)))


def test_without_depth_the_bias_is_left():
    out = grouped_matmul(jnp.ones((8, 0)), jnp.ones((2, 0, 8)), [2, 3], bias=jnp.array([[1.0] * 8, [-2.0] * 8]))
    np.testing.assert_array_equal(out[:, 0], [1, 1, -2, -2, -2, 0, 0, 0])


@pytest.mark.parametrize(("dtype", "out_dtype"), [(BF16, F32), (F16, F16), (F16, F32)], ids=lambda d: d.__name__)
def test_dtypes_of_operands_and_output(dtype, out_dtype, assert_near):
    lhs, rhs = operands(72, 40, 24, 3, dtype)
    out = grouped_matmul(lhs, rhs, [30, 0, 40], out_dtype=out_dtype)
    assert out.dtype == out_dtype
    assert_near(out, ragged.grouped(lhs, rhs, [30, 0, 40]), TOLERANCE[out_dtype])


@pytest.mark.parametrize("out_dtype", [None, F32, "float32", np.float32, jnp.dtype("float32")])
def test_out_dtype_is_named_in_any_way_numpy_knows(out_dtype):
    wanted = BF16 if out_dtype is None else F32
    assert grouped_matmul(*operands(8, 8, 8, 2), [3, 5], out_dtype=out_dtype).dtype == wanted


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_wide_floats_run_through_xla(dtype, assert_near):
    with jax.enable_x64(True):
        lhs, rhs = operands(24, 40, 16, 2, dtype)
        bias = normal(2, 2, 40, dtype=dtype)
        out = grouped_matmul(lhs, rhs, [9, 11], bias=bias, activation="gelu")
        assert out.dtype == dtype
    wanted = ragged.grouped(lhs, rhs, [9, 11], bias, activation="gelu")
    assert_near(out, wanted, {"float32": 1e-5, "float64": 1e-13}[dtype])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_numpy_arrays_are_taken_as_jax_takes_them(dtype):
    out = grouped_matmul(np.ones((8, 16), dtype), np.ones((2, 16, 8), dtype), np.array([4, 2]))
    assert out.dtype == F32
    np.testing.assert_array_equal(out[:, 0], [16] * 6 + [0] * 2)


@pytest.mark.parametrize("activation", ["none", "relu", "silu", "gelu"])
def test_bias_and_activation_are_applied_in_float32_to_rows_of_groups_only(activation, assert_near):
    lhs, rhs = operands(72, 40, 24, 3)
    bias = normal(2, 3, 40, dtype=F32)
    out = grouped_matmul(lhs, rhs, [30, 0, 33], bias=bias, activation=activation)
    assert_near(out, ragged.grouped(lhs, rhs, [30, 0, 33], bias, activation=activation), TOLERANCE[BF16])
    np.testing.assert_array_equal(out[63:], 0)  # not activation(bias)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=lambda d: d.__name__)
def test_bias_of_any_float_dtype(dtype, assert_near):
    lhs, rhs = operands(24, 16, 8, 2)
    bias = normal(2, 2, 16, dtype=dtype)
    out = grouped_matmul(lhs, rhs, [9, 11], bias=bias, out_dtype=F32)
    assert_near(out, ragged.grouped(lhs, rhs, [9, 11], bias), TOLERANCE[F32])


@pytest.mark.parametrize(("dtype", "jit"), [("int8", False), ("int8", True), ("uint8", True), ("uint32", True)])
def test_sizes_of_any_integer_dtype(dtype, jit, assert_near):
    lhs, rhs = operands(300, 8, 8, 3)
    sizes = np.array([120, 0, 100], dtype)
    f = jax.jit(grouped_matmul) if jit else grouped_matmul
    assert_near(f(lhs, rhs, sizes), ragged.grouped(lhs, rhs, sizes), TOLERANCE[BF16])


BAD_SIZES = {
    "negative": [-7, 30, 10, -1],
    "more than m": [30, 10, 50, 9],
    "one too large": [1000, 1, 1, 1],
    "sum overflows int32": [2**31 - 1, 2**31 - 1, 2, 2**31 - 1],
    "least int32": [-(2**31), 2**31 - 1, -(2**31), 5],
}


@pytest.mark.parametrize("name", BAD_SIZES)
def test_traced_sizes_count_from_zero_to_the_end_of_the_rows_whatever_they_are(name, assert_near):
    lhs, rhs = operands(72, 16, 8, 4)
    sizes = np.array(BAD_SIZES[name], np.int32)
    out, (dlhs, drhs) = traced_with_gradients(lhs, rhs, sizes)
    assert_near(out, ragged.grouped(lhs, rhs, sizes), TOLERANCE[BF16])
    g = np.ones((72, 16))
    assert_near(dlhs, ragged.grouped(g, rhs, sizes, transpose_rhs=True), TOLERANCE[BF16])
    assert_near(drhs, ragged.contraction(lhs, g, sizes), TOLERANCE[BF16])


WIDE_SIZES = {
    "a multiple of 2^32, and some": ("int64", [20, 2**32 + 3, 2**32, 7]),
    "least and largest int64": ("int64", [5, -(2**63), 2**63 - 1, 2**63 - 1]),
    "negative, the low half positive": ("int64", [5, 3 - 2**32, 10, 0]),
    "uint32": ("uint32", [20, 2**31 + 3, 2**32 - 1, 7]),
    "uint64": ("uint64", [20, 2**64 - 1, 2**64 - 1, 7]),
}


@pytest.mark.parametrize("name", WIDE_SIZES)
def test_traced_sizes_wider_than_int32_end_at_the_last_row(name, assert_near):
    dtype, sizes = WIDE_SIZES[name]
    lhs, rhs = operands(72, 16, 8, 4)
    with jax.enable_x64(True):
        out, (dlhs, drhs) = traced_with_gradients(lhs, rhs, jnp.array(sizes, dtype))
    assert_near(out, ragged.grouped(lhs, rhs, sizes), TOLERANCE[BF16])
    g = np.ones((72, 16))
    assert_near(dlhs, ragged.grouped(g, rhs, sizes, transpose_rhs=True), TOLERANCE[BF16])
    assert_near(drhs, ragged.contraction(lhs, g, sizes), TOLERANCE[BF16])


@jax.jit
def traced_with_gradients(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> Any:
    out, vjp = jax.vjp(lambda lhs, rhs: grouped_matmul(lhs, rhs, sizes), lhs, rhs)
    return out, vjp(jnp.ones_like(out))


def test_nan_stays_in_its_row_and_in_its_group():
    lhs, rhs = operands(72, 40, 24, 4)
    sizes = [20, 0, 11, 30]
    clean = grouped_matmul(lhs, rhs, sizes)
    lhs = lhs.at[5].set(jnp.nan).at[61:].set(jnp.inf)  # a row of group 0, and those of no group
    rhs = rhs.at[1].set(jnp.nan).at[2].set(jnp.nan)  # an empty group, and one of 11 rows
    out = np.asarray(grouped_matmul(lhs, rhs, sizes), np.float32)
    bad = np.isin(np.arange(72), [5, *range(20, 31)])
    assert np.isnan(out[bad]).all()
    np.testing.assert_array_equal(out[~bad], np.asarray(clean, np.float32)[~bad])


@pytest.mark.parametrize("spread", ["even", "skewed", "sparse"])
def test_spread_never_changes_the_answer(spread, assert_near):
    lhs, rhs = operands(24, 16, 8, 2)
    assert_near(grouped_matmul(lhs, rhs, [9, 11], spread=spread), grouped_matmul(lhs, rhs, [9, 11]), TOLERANCE[BF16])


# --- a scale for each row, and shards of the groups


@pytest.mark.parametrize(("bias", "activation"), [(False, "none"), (True, "silu")])
def test_row_scale_multiplies_the_rows_of_groups_in_float32(bias, activation, assert_near):
    lhs, rhs = operands(72, 40, 24, 4)
    scale = jnp.where(jnp.arange(72) < 60, normal(3, 72, dtype=F32), jnp.nan)
    extra = {"bias": normal(2, 4, 40, dtype=F32)} if bias else {}
    out = grouped_matmul(lhs, rhs, [30, 0, 29, 1], row_scale=scale, activation=activation, **extra)
    wanted = ragged.grouped(lhs, rhs, [30, 0, 29, 1], row_scale=scale, activation=activation, **extra)
    assert out.dtype == BF16
    assert_near(out, wanted, TOLERANCE[BF16])


@pytest.mark.parametrize("activation", ["none", "silu"])
def test_row_indices_take_rows_in_any_order_as_often_as_named(activation, assert_near):
    """Values, and all gradients: those of the rows gathered before."""
    lhs, rhs = normal(0, 24, 16, dtype=F32), normal(1, 3, 16, 8, dtype=F32)
    extra = {"bias": normal(2, 3, 8, dtype=F32), "row_scale": normal(3, 60, dtype=F32)}
    indices, sizes = np.random.default_rng(0).integers(0, 20, 60), [30, 0, 29]

    def ours(lhs: jax.Array, rhs: jax.Array, extra: Any) -> jax.Array:
        return grouped_matmul(lhs, rhs, sizes, row_indices=indices, activation=activation, **extra)

    def before(lhs: jax.Array, rhs: jax.Array, extra: Any) -> jax.Array:
        return grouped_matmul(lhs[indices], rhs, sizes, activation=activation, **extra)

    np.testing.assert_array_equal(ours(lhs.at[20:].set(jnp.nan), rhs, extra), before(lhs, rhs, extra))
    cotangent = normal(4, 60, 8, dtype=F32)
    for x, y in zip(*(jax.tree.leaves(jax.vjp(f, lhs, rhs, extra)[1](cotangent)) for f in (ours, before)), strict=True):
        assert_near(x, y, 1e-5)


def test_rows_by_index_are_the_kernels_on_a_gpu():
    told = mgpu_ops.explain("grouped_matmul", {"m": 1024, "n": 512, "k": 512, "groups": 8, "lhs_rows": 300}, gpu="h200")
    assert "runs the kernel" in " ".join(told.split())


@pytest.mark.parametrize("offset", [0, 1, 3, np.array([2]), jnp.int32(2)], ids=str)
def test_group_offset_multiplies_the_rows_of_a_shards_groups_and_no_others(offset, assert_near):
    sizes = np.array([9, 0, 30, 12, 20])
    first = int(np.reshape(offset, ()))
    lhs, rhs = operands(72, 40, 24, 2)
    rows = slice(sizes[:first].sum(), sizes[: first + 2].sum())
    lhs = jnp.full_like(lhs, jnp.nan).at[rows].set(lhs[rows])
    wanted = ragged.grouped(lhs, rhs, sizes[first : first + 2], start=rows.start)
    for out in (
        grouped_matmul(lhs, rhs, sizes, group_offset=offset),
        jax.jit(lambda o: grouped_matmul(lhs, rhs, sizes, group_offset=o))(jnp.asarray(offset)),
        jax.jit(lambda lhs: grouped_matmul(lhs, rhs, sizes, group_offset=offset))(lhs),
    ):
        assert_near(out, wanted, TOLERANCE[BF16])
        np.testing.assert_array_equal(out[: rows.start], 0)
        np.testing.assert_array_equal(out[rows.stop :], 0)


with_offset = jax.jit(lambda lhs, rhs, sizes, offset: grouped_matmul(lhs, rhs, sizes, group_offset=offset))


@pytest.mark.parametrize("offset", [-3, -1, 2, 3, 4, 2**31 - 1, -(2**31)])
def test_groups_that_do_not_exist_have_no_rows(offset, assert_near):
    """A traced offset may be anything."""
    sizes = np.array([9, 30, 12])
    lhs, rhs = operands(60, 40, 24, 2)
    out = with_offset(lhs, rhs, sizes, jnp.int32(offset))
    wanted = np.zeros((60, 40))
    for own, group in enumerate(range(offset, offset + 2)):
        if 0 <= group < 3:
            rows = slice(sizes[:group].sum(), sizes[: group + 1].sum())
            wanted[rows] = ragged.float64(lhs[rows]) @ ragged.float64(rhs[own])
    assert_near(out, wanted, TOLERANCE[BF16]) if wanted.any() else np.testing.assert_array_equal(out, 0)


def test_the_shards_of_all_groups_add_up_to_the_whole():
    lhs, rhs = operands(72, 40, 24, 6)
    sizes = np.array([9, 0, 30, 12, 3, 10])
    parts = [grouped_matmul(lhs, rhs[g : g + 2], sizes, group_offset=g) for g in (0, 2, 4)]
    np.testing.assert_array_equal(sum(parts), grouped_matmul(lhs, rhs, sizes))


SCALED = {  # bias, the call's arguments
    "scale": (False, {}),
    "scale, wide rhs": (False, {"transpose_rhs": True}),
    "scale, bias": (True, {}),
    "scale, bias, silu": (True, {"activation": "silu"}),
    "scale, shard": (False, {"group_offset": 1}),
    "scale, bias, gelu, shard": (True, {"activation": "gelu", "group_offset": 1}),
}


@pytest.mark.parametrize(("name", "dtype"), [*((name, F32) for name in SCALED), ("scale, bias, gelu, shard", BF16)])
def test_gradients_with_a_row_scale_and_an_offset_are_those_of_plain_jax(name, dtype, assert_near):
    bias, kwargs = SCALED[name]
    lhs, rhs = operands(
        40, *((16, 24) if name == "scale, wide rhs" else (24, 16)), 3, dtype, kwargs.get("transpose_rhs", False)
    )
    sizes = [2, 9, 0, 20, 3] if "group_offset" in kwargs else [9, 0, 22]
    arrays = (lhs, rhs / 4, normal(3, 40, dtype=F32), *([normal(2, 3, 24, dtype=dtype)] if bias else []))
    f, plain = (ragged.of_scaled(f, sizes, **kwargs) for f in (grouped_matmul, ragged.plain_grouped))
    assert_same_gradients(f, plain, arrays, assert_near, 1e-5 if dtype == F32 else 2e-2)


def test_gradients_with_a_row_scale_of_a_shard_through_the_kernels(assert_near):
    lhs, rhs = operands(72, 40, 24, 2)
    arrays = (lhs, rhs / 4, normal(3, 72, dtype=F32))
    sizes = [30, 0, 33, 4]
    f = ragged.of_scaled(grouped_matmul, sizes, group_offset=1, backend="interpret")
    assert_same_gradients(f, ragged.of_scaled(ragged.plain_grouped, sizes, group_offset=1), arrays, assert_near, 2e-2)


@pytest.mark.parametrize("activation", ["none", "silu"])
def test_rows_of_other_shards_have_no_gradient_whatever_they_and_their_cotangents_are(activation):
    lhs, rhs = operands(40, 24, 16, 2)
    scale, outside = normal(3, 40, dtype=F32), (jnp.arange(40) < 5) | (jnp.arange(40) >= 31)
    lhs, scale = jnp.where(outside[:, None], jnp.nan, lhs), jnp.where(outside, jnp.nan, scale)
    f = ragged.of_scaled(grouped_matmul, [5, 6, 20, 9], group_offset=1, activation=activation)
    cotangent = jnp.broadcast_to(jnp.where(outside[:, None], jnp.nan, 1.0).astype(BF16), (40, 24))
    dlhs, drhs, dscale = jax.vjp(f, lhs, rhs, scale)[1](cotangent)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in (dlhs, drhs, dscale))
    np.testing.assert_array_equal(dlhs[outside], 0)
    np.testing.assert_array_equal(dscale[outside], 0)


# --- gradients

ARGUMENTS = {  # transpose_rhs, bias, activation
    "plain": (False, False, "none"),
    "transposed": (True, False, "none"),
    "bias": (False, True, "none"),
    "relu": (False, False, "relu"),
    "silu, bias": (False, True, "silu"),
    "gelu, bias, transposed": (True, True, "gelu"),
}


def arguments(name: str, dtype: Any, m: int = 40, n: int = 24, k: int = 16) -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
    transpose_rhs, bias, activation = ARGUMENTS[name]
    lhs, rhs = operands(m, n, k, 3, dtype, transpose_rhs)
    arrays = (lhs, rhs / 4, normal(2, 3, n, dtype=dtype)) if bias else (lhs, rhs / 4)
    return arrays, {"transpose_rhs": transpose_rhs, "activation": activation}


@pytest.mark.parametrize(("name", "dtype"), [*((name, F32) for name in ARGUMENTS), ("plain", BF16), ("silu, bias", BF16)])
def test_gradients_are_those_of_plain_jax(name, dtype, assert_near):
    arrays, kwargs = arguments(name, dtype)
    f, plain = (of_arrays(f, [9, 0, 22], **kwargs) for f in (grouped_matmul, ragged.plain_grouped))
    # The cotangent is rounded to bfloat16, and with an activation its argument is, too.
    assert_same_gradients(f, plain, arrays, assert_near, 1e-5 if dtype == F32 else 2e-2)


def test_gradients_through_the_kernels(assert_near):
    arrays, kwargs = arguments("gelu, bias, transposed", BF16, 72, 40, 24)
    f = of_arrays(grouped_matmul, [30, 0, 33], backend="interpret", **kwargs)
    assert_same_gradients(f, of_arrays(ragged.plain_grouped, [30, 0, 33], **kwargs), arrays, assert_near, 2e-2)


def test_first_and_second_derivatives_agree_with_differences():
    with jax.enable_x64(True):
        arrays, kwargs = arguments("gelu, bias, transposed", "float64", 7, 5, 3)
        f = jax.jit(of_arrays(grouped_matmul, [3, 0, 3], **kwargs))
        check_grads(f, arrays, order=2, modes=["rev"], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("activation", ["none", "silu"])
def test_rows_of_no_group_have_no_gradient_whatever_they_and_their_cotangents_are(activation):
    arrays, _ = arguments("bias", BF16)
    lhs, rhs, bias = arrays
    lhs = lhs.at[31:].set(jnp.nan)

    def pulled_back(cotangent: jax.Array) -> Any:
        f = of_arrays(grouped_matmul, [9, 0, 22], activation=activation)
        return jax.vjp(f, lhs, rhs, bias)[1](cotangent)

    ones = jnp.ones((40, 24), BF16)
    for x, y in zip(pulled_back(ones), pulled_back(ones.at[31:].set(jnp.nan))):
        assert np.isfinite(np.asarray(x, np.float32)).all()
        np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(pulled_back(ones)[0][31:], 0)


def test_gradient_of_a_bias_in_float64_is_accurate_to_float64(assert_near):
    with jax.enable_x64(True):
        lhs, rhs = operands(40, 16, 8, 3, "float64")
        weight = np.random.default_rng(0).standard_normal((40, 16))
        loss = lambda bias: (grouped_matmul(lhs, rhs, [9, 0, 22], bias=bias) * weight).sum()  # noqa: E731
        dbias = jax.grad(loss)(normal(2, 3, 16, dtype="float64"))
    assert_near(dbias, [weight[:9].sum(0), np.zeros(16), weight[9:31].sum(0)], 1e-14)


def test_gradients_of_an_empty_group_are_zeros():
    arrays, _ = arguments("bias", BF16)
    _, drhs, dbias = gradients(of_arrays(grouped_matmul, [9, 0, 22]), arrays)
    assert (drhs[1] == 0).all()
    assert (dbias[1] == 0).all()


def test_forward_mode_is_refused_rather_than_wrong():
    lhs, rhs = operands(8, 8, 8, 2)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda lhs: grouped_matmul(lhs, rhs, [3, 5]), (lhs,), (lhs,))


def lowered(f: Callable[..., Any], *arrays: Any) -> str:
    with gpu.target("h200"):
        return jax.jit(f).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_gradients_are_kernels_that_read_the_matrices_as_stored(transpose_rhs):
    lhs, rhs = operands(256, 128, 192, 4, transpose_rhs=transpose_rhs)
    f = of_arrays(functools.partial(grouped_matmul, transpose_rhs=transpose_rhs, backend="mosaic"), [100, 0, 50, 60])
    text = lowered(lambda lhs, rhs: jax.vjp(f, lhs, rhs)[1](jnp.ones((256, 128), BF16)), lhs, rhs)
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 2  # the output itself is not used
    assert "stablehlo.transpose" not in text


# --- transforms


def test_eager_and_jitted_calls_agree(assert_near):
    lhs, rhs = operands(33, 72, 40, 3)
    sizes = jnp.array([10, 0, 20])
    assert_near(grouped_matmul(lhs, rhs, sizes), jax.jit(grouped_matmul)(lhs, rhs, sizes), TOLERANCE[BF16])


def stacked(lhs: Any, rhs: Any, sizes: Any, bias: Any, **kwargs: Any) -> np.ndarray:
    """The truth for each of the three calls of a vmap, of which some arguments have a leading axis."""
    each = lambda x, rank, i: np.asarray(x)[i] if np.ndim(x) > rank else x  # noqa: E731
    calls = [(each(lhs, 2, i), each(rhs, 3, i), each(sizes, 1, i), each(bias, 2, i)) for i in range(3)]
    return np.stack([ragged.grouped(*call, **kwargs) for call in calls])


NAMES = ["lhs", "rhs", "sizes", "bias"]


def batched_arguments(batched: str) -> tuple[jax.Array, ...]:
    """Arguments of three calls; those that are not batched are the same in all."""
    sizes = jnp.array([[5, 11], [0, 24], [3, 0]])
    arrays = (normal(0, 3, 24, 16), normal(1, 3, 2, 16, 40), sizes, normal(3, 3, 2, 40))
    return tuple(x if name in batched else x[0] for x, name in zip(arrays, NAMES))


COMBINATIONS = ["lhs", "rhs", "sizes", "bias", "lhs sizes", "rhs sizes", "lhs rhs bias", "lhs rhs sizes bias"]


def with_bias(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, bias: jax.Array, **kwargs: Any) -> jax.Array:
    return grouped_matmul(lhs, rhs, sizes, bias=bias, **kwargs)


@pytest.mark.parametrize("batched", COMBINATIONS)
def test_vmap_maps_any_of_the_arguments(batched, assert_near):
    arrays = batched_arguments(batched)
    out = jax.vmap(with_bias, [0 if name in batched else None for name in NAMES])(*arrays)
    assert_near(out, stacked(*arrays), TOLERANCE[BF16])


def test_vmap_through_the_kernel(assert_near):
    arrays = batched_arguments("lhs sizes")
    out = jax.vmap(functools.partial(with_bias, backend="interpret"), (0, None, 0, None))(*arrays)
    assert_near(out, stacked(*arrays), TOLERANCE[BF16])


def test_vmap_over_other_axes(assert_near):
    lhs, rhs, sizes, bias = batched_arguments("lhs rhs sizes")
    out = jax.vmap(with_bias, (1, -1, 1, None), 2)(jnp.moveaxis(lhs, 0, 1), jnp.moveaxis(rhs, 0, -1), sizes.T, bias)
    assert_near(jnp.moveaxis(out, 2, 0), stacked(lhs, rhs, sizes, bias), TOLERANCE[BF16])


def test_nested_vmap(assert_near):
    lhs, rhs, sizes, bias = batched_arguments("lhs rhs sizes")
    inner = jax.vmap(with_bias, (0, None, 0, None))
    out = jax.vmap(inner, (None, 0, None, None))(lhs, rhs, sizes, bias)
    wanted = np.stack([stacked(lhs, matrices, sizes, bias) for matrices in rhs])
    assert_near(out, wanted, TOLERANCE[BF16])


def test_gradients_of_a_vmap(assert_near):
    lhs, rhs, sizes, bias = (x.astype(F32) if x.dtype == BF16 else x for x in batched_arguments("lhs sizes"))

    def mapped(f: Any) -> Any:
        g = lambda lhs, rhs, sizes, bias: f(lhs, rhs, sizes, bias=bias, activation="silu")  # noqa: E731
        return lambda lhs, rhs, bias: jax.vmap(g, (0, None, 0, None))(lhs, rhs, sizes, bias)

    assert_same_gradients(mapped(grouped_matmul), mapped(ragged.plain_grouped), (lhs, rhs, bias), assert_near, 1e-5)


def test_scan_and_checkpoint_and_their_gradients(assert_near):
    x, matrices = normal(0, 24, 16, dtype=F32), normal(1, 4, 3, 16, 16, dtype=F32) / 4
    sizes = jnp.array([[9, 0, 15], [24, 0, 0], [8, 8, 8], [1, 2, 3]])

    def layers(f: Any) -> Any:
        body = jax.checkpoint(lambda x, layer: (x + f(x, layer[0], layer[1], activation="silu"), None))
        return lambda x, matrices: jax.lax.scan(body, x, (matrices, sizes))[0]

    ours, plain = layers(grouped_matmul), layers(ragged.plain_grouped)
    assert_near(ours(x, matrices), plain(x, matrices), 1e-5)
    assert_same_gradients(ours, plain, (x, matrices), assert_near, 1e-5)


# --- several devices

X = PartitionSpec("x")
WHOLE = PartitionSpec()


def mesh(devices: int) -> jax.sharding.Mesh:
    return jax.make_mesh((devices,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


def sharded(backend: str, devices: int, in_specs: Any, out_specs: Any) -> Any:
    """Of given sizes, a function of lhs, rhs and bias."""
    f = functools.partial(with_bias, backend=backend)
    shards = jax.shard_map(f, mesh=mesh(devices), in_specs=in_specs, out_specs=out_specs)
    return lambda sizes: lambda lhs, rhs, bias: jax.jit(shards)(lhs, rhs, sizes, bias)


EXPERTS = ((X, X, X, X), X)  # each device has its experts, and the rows that were sent to them
COLUMNS = ((WHOLE, PartitionSpec(None, None, "x"), WHOLE, PartitionSpec(None, "x")), PartitionSpec(None, "x"))


def by_expert(sizes: np.ndarray, devices: int) -> Any:
    """Plain JAX for shards of rows that hold the groups of their device and end in padding."""

    def plain(lhs: jax.Array, rhs: jax.Array, bias: jax.Array) -> jax.Array:
        shards = [jnp.split(x, devices) for x in (lhs, rhs, jnp.asarray(sizes), bias)]
        return jnp.concatenate([ragged.plain_grouped(*shard) for shard in zip(*shards)])

    return plain


@pytest.mark.parametrize(("backend", "devices"), [("xla", 4), ("interpret", 1), ("interpret", 2)])
def test_shard_map_over_experts_and_its_gradients(backend, devices, assert_near):
    lhs, rhs, bias = normal(0, 64, 16), normal(1, 8, 16, 40), normal(2, 8, 40)
    sizes = jnp.array([3, 5, 0, 8, 1, 0, 7, 9]) if devices > 1 else jnp.array([3, 5, 0, 16, 1, 0, 7, 9]) // 2
    ours = sharded(backend, devices, *EXPERTS)(sizes)
    plain = by_expert(sizes, devices)
    assert_near(ours(lhs, rhs, bias), plain(*(x.astype(F32) for x in (lhs, rhs, bias))), TOLERANCE[BF16])
    if backend == "xla":
        arrays = tuple(x.astype(F32) for x in (lhs, rhs, bias))
        assert_same_gradients(ours, plain, arrays, assert_near, 1e-5)


def test_shard_map_over_columns_and_its_gradients(assert_near):
    lhs, rhs, bias = normal(0, 24, 16), normal(1, 2, 16, 64), normal(2, 2, 64)
    sizes = jnp.array([9, 11])
    ours = sharded("xla", 4, *COLUMNS)(sizes)
    assert_near(ours(lhs, rhs, bias), ragged.grouped(lhs, rhs, sizes, bias), TOLERANCE[BF16])
    # lhs is on every device: its gradient is the sum of theirs.
    arrays = tuple(x.astype(F32) for x in (lhs, rhs, bias))
    plain = lambda lhs, rhs, bias: ragged.plain_grouped(lhs, rhs, sizes, bias)  # noqa: E731
    assert_same_gradients(ours, plain, arrays, assert_near, 1e-5)


@pytest.mark.parametrize("backend", ["xla", "mosaic"])
@pytest.mark.parametrize("argument", [0, 1, 2, 3])
def test_output_varies_over_the_mesh_axes_that_any_argument_varies_over(backend, argument):
    """Else shard_map would take an output that differs between devices for a replicated one."""
    seen = []

    def product(*arrays: jax.Array) -> jax.Array:
        out = with_bias(*arrays, backend=backend)
        seen.append(jax.typeof(out).manual_axis_type.varying)
        return out

    shapes = [(64, 16), (2, 16, 64), (2,), (2, 64)]
    shapes[argument] = (2 * shapes[argument][0], *shapes[argument][1:])
    in_specs = [X if i == argument else WHOLE for i in range(4)]
    abstract = AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,))
    arrays = [jax.ShapeDtypeStruct(s, "int32" if i == 2 else BF16) for i, s in enumerate(shapes)]
    with gpu.target("h200"):
        jax.eval_shape(jax.shard_map(product, mesh=abstract, in_specs=tuple(in_specs), out_specs=X), *arrays)
    assert seen == [{"x"}]


# --- which config runs

OTHER = replace(BASE, max_concurrent_steps=5)
THIRD = replace(BASE, raster_width=1)


@pytest.fixture
def configs_that_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The op and config of every kernel that is traced from now on; the kernel itself is XLA's product."""
    seen: list[Any] = []

    def stand_in(module: Any) -> Any:
        def run(problem: Any, config: Any, device: Any, *arrays: Any, interpret: bool) -> jax.Array:
            seen.append((module.SPEC.name, config))
            return module.reference(problem, *arrays)

        return run

    jax.clear_caches()
    for name in ("grouped_matmul", "ragged_contraction"):
        module = importlib.import_module(f"mgpu_ops.grouped.{name}")
        monkeypatch.setattr(module, "SPEC", replace(module.SPEC, run=stand_in(module)))
    yield seen
    jax.clear_caches()


def test_use_configs_retraces_and_ends_with_its_block(configs_that_run):
    lhs, rhs = operands(24, 40, 16, 2)
    f = jax.jit(lambda lhs, rhs: grouped_matmul(lhs, rhs, jnp.array([9, 11])))
    with gpu.target("h20"):
        f(lhs, rhs)
        with use_configs({"grouped_matmul": OTHER}):
            f(lhs, rhs)
            f(lhs, rhs)  # traced already
        f(lhs, rhs)
    (_, first), *rest = configs_that_run
    assert first != OTHER
    assert rest == [("grouped_matmul", OTHER)]


def test_argument_comes_before_use_configs_and_is_for_the_forward_pass_only(configs_that_run):
    lhs, rhs = operands(24, 40, 16, 2)
    with gpu.target("h20"), use_configs({"grouped_matmul": OTHER, "ragged_contraction": OTHER}):
        jax.grad(lambda *x: grouped_matmul(*x, jnp.array([9, 11]), config=THIRD).sum().astype(F32), argnums=(0, 1))(lhs, rhs)
    forward, *backward = configs_that_run
    assert forward == ("grouped_matmul", THIRD)
    assert sorted(backward) == [("grouped_matmul", OTHER), ("ragged_contraction", OTHER)]


def test_config_that_cannot_run_raises_at_the_call_with_its_reason():
    lhs, rhs = operands(64, 64, 64, 2)
    bad = replace(BASE, tile_m=96)
    for where in ("argument", "override"):
        with (
            pytest.raises(ValueError, match=rf"(?s)tile_m=96.*from {where} cannot run .*m=64.*96"),
            use_configs({"grouped_matmul": bad} if where == "override" else {}),
        ):
            grouped_matmul(lhs, rhs, [9, 11], config=bad if where == "argument" else None, backend="interpret")


P = GroupedMatmulProblem


def test_explain_names_the_problem_the_config_and_where_it_is_from():
    problem = P(8192, 1536, 2048, 128, spread="skewed")
    with use_configs({"grouped_matmul": BASE}):
        text = mgpu_ops.explain("grouped_matmul", problem, gpu="h200")
    assert str(problem) in text
    assert str(BASE) in text
    assert "from      override" in text


def test_explain_takes_the_problem_as_a_mapping():
    fields = {"m": 8192, "n": 1536, "k": 2048, "groups": 128, "dtype": "float16"}
    wanted = mgpu_ops.explain("grouped_matmul", P(8192, 1536, 2048, 128, "float16", "float16"), gpu="h200")
    assert mgpu_ops.explain("grouped_matmul", fields, gpu="h200") == wanted


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ({"m": 1, "n": 8, "k": 8}, "is no grouped_matmul problem: it needs groups too"),
        ({"m": 1, "n": 8, "k": 8, "groups": 2, "sizes": 3}, "no sizes: the fields are activation, bias"),
        (P(8, 8, 8, 2), "name one, e.g. gpu='h200'"),
    ],
)
def test_explain_says_what_is_wrong_with_its_arguments(problem, message):
    with pytest.raises(ValueError, match=message):
        mgpu_ops.explain("grouped_matmul", problem)


# --- compiled, without a GPU


@needs_compiler
@pytest.mark.parametrize(
    ("problem", "config"),
    [
        (P(512, 192, 136, 4, bias=True, activation="gelu"), None),
        (P(512, 256, 192, 4, "float16", "float32", "nt"), None),
        (P(512, 256, 256, 4), replace(BASE, tile_m=128, tile_n=256, tile_k=128, compute_warpgroups=2, epilogue_tile_n=128)),
        (P(4096, 2048, 1024, 4, group_offset=True, row_scale=True), None),
        (P(4096, 2048, 1024, 4, layout="nt", second=True), None),
    ],
    ids=[
        "default, bias, gelu",
        "default, float32, transposed",
        "two warpgroups, wide epilogue tiles",
        "shard, row scale",
        "two products",
    ],
)
def test_kernel_compiles_without_spills_into_the_bytes_that_check_counts(problem, config):
    ragged.assert_compiles(SPEC, problem, config)


# --- errors: the value, the rule, the way out

S = jax.ShapeDtypeStruct
LHS, RHS = S((8, 16), BF16), S((2, 16, 8), BF16)
TWO = np.array([3, 5])


@pytest.mark.parametrize(
    ("lhs", "rhs", "sizes", "kwargs", "error", "message"),
    [
        (S((8,), BF16), RHS, TWO, {}, ValueError, r"lhs has shape \(8,\): grouped_matmul takes rank 2; use jax.vmap"),
        (LHS, S((16, 8), BF16), TWO, {}, ValueError, r"rhs has shape \(16, 8\): grouped_matmul takes rank 3; use jax.vmap"),
        (LHS, S((2, 24, 8), BF16), TWO, {}, ValueError, r"lhs\(8, 16\) and rhs\(2, 24, 8\) differ in k: 16 != 24.*=False"),
        (LHS, RHS, TWO, {"row_indices": [0, 8]}, ValueError, r"row_indices\[1\]=8 is not from 0 to 7: lhs has 8 rows"),
        (LHS, RHS, TWO, {"transpose_rhs": True}, ValueError, r"differ in k: 16 != 8 \(transpose_rhs=True\)"),
        (LHS, S((2, 16, 8), F16), TWO, {}, ValueError, "lhs is bfloat16 and rhs is float16: cast one with .astype"),
        (S((8, 16), "int32"), RHS, TWO, {}, TypeError, "lhs has dtype int32: grouped_matmul takes floats; cast it first"),
        (LHS, S((2, 16, 8), "int8"), TWO, {}, TypeError, "rhs has dtype int8: grouped_matmul takes floats; cast it first"),
        (S((8, 16), "complex64"), RHS, TWO, {}, TypeError, "lhs has dtype complex64"),
        (LHS, RHS, np.int32(8), {}, ValueError, r"group_sizes has shape \(\): grouped_matmul takes one size per group"),
        (LHS, RHS, np.ones((2, 1), int), {}, ValueError, r"group_sizes has shape \(2, 1\).*\[groups\], at least one"),
        (LHS, S((0, 16, 8), BF16), np.ones(0, int), {}, ValueError, r"group_sizes has shape \(0,\).*at least one"),
        (LHS, RHS, [], {}, ValueError, r"group_sizes has shape \(0,\).*at least one"),
        (LHS, RHS, [3.0, 5.0], {}, TypeError, "group_sizes has dtype float64: it must hold integers; cast it"),
        (LHS, RHS, None, {}, TypeError, "group_sizes is None, which is no array of integers"),
        (LHS, RHS, [[1], [2, 3]], {}, TypeError, r"group_sizes is \[\[1\], \[2, 3\]\], which is no array of integers"),
        (LHS, RHS, jax.ShapeDtypeStruct((2,), np.int32), {}, TypeError, "group_sizes is Shape.*; jax.eval_shape takes shapes"),
        (LHS, RHS, [3, 5], {"bias": "none"}, TypeError, "bias is 'none', which is no array: grouped_matmul takes"),
        (LHS, RHS, [3, 5], {"out_dtype": "float99"}, TypeError, "out_dtype='float99' is no dtype: name a float's"),
        (LHS, RHS, [3, 5], {"transpose_rhs": np.ones(2)}, TypeError, "transpose_rhs=array.* is neither True nor False"),
        (LHS, RHS, np.ones(2, bool), {}, TypeError, "group_sizes has dtype bool: .*cast it"),
        (LHS, RHS, [1, 2, 3], {}, ValueError, "group_sizes has 3 entries but rhs has 2 groups"),
        (LHS, RHS, [4, -3], {}, ValueError, r"group_sizes\[1\]=-3 is negative: a group has 0 rows or more"),
        (LHS, RHS, [4, 5], {}, ValueError, "group_sizes sum to 9, more than the 8 rows of lhs"),
        (LHS, RHS, np.array([2**31 - 1] * 2, np.int32), {}, ValueError, "sum to 4294967294, more than the 8 rows"),
        (LHS, RHS, jnp.array([9, 0]), {}, ValueError, "group_sizes sum to 9, more than the 8 rows"),
        (LHS, RHS, np.array([2**63, 2**63], np.uint64), {}, ValueError, "sum to 18446744073709551616, more than the 8 rows"),
        (LHS, RHS, [2**62 + 3, 5 - 2**62], {}, ValueError, r"group_sizes\[1\]=-4611686018427387899 is negative"),
        (LHS, RHS, TWO, {"bias": jnp.ones(8)}, ValueError, r"bias has shape \(8,\): it must be \[groups, n\] = \(2, 8\)"),
        (LHS, RHS, TWO, {"bias": jnp.ones((2, 8), int)}, TypeError, "bias has dtype int32.*takes floats; cast it first"),
        (LHS, RHS, TWO, {"activation": "swish"}, ValueError, "activation='swish' is not one of none, relu, silu, gelu"),
        (LHS, RHS, TWO, {"spread": "wide"}, ValueError, "spread='wide' is not one of even, random, skewed, sparse"),
        (LHS, RHS, TWO, {"out_dtype": jnp.int32}, TypeError, "out_dtype int32 is not a float: cast the result instead"),
        (LHS, RHS, TWO, {"config": {"tile_m": 64}}, TypeError, "config is .*64.*: pass a mgpu_ops.GroupedMatmulConfig"),
        (LHS, RHS, TWO, {"backend": "cuda"}, ValueError, "backend='cuda' is not one of mosaic, interpret, xla"),
        (
            LHS,
            RHS,
            TWO,
            {"row_scale": jnp.ones((8, 1))},
            ValueError,
            r"row_scale has shape \(8, 1\): it must be \[m\] = \(8,\)",
        ),
        (LHS, RHS, TWO, {"row_scale": jnp.ones(8, int)}, TypeError, "row_scale has dtype int32: .*takes floats; cast it first"),
        (LHS, RHS, [1, 2, 3], {"group_offset": 2}, ValueError, "group_offset=2 is not from 0 to 1: group_sizes has 3 groups"),
        (LHS, S((0, 16, 8), BF16), [1, 2], {"group_offset": 0}, ValueError, "rhs has no groups: grouped_matmul takes at least"),
        (LHS, RHS, TWO, {"spread": np.ones(2)}, ValueError, "spread=array.* is not one of even, random, skewed, sparse"),
        (LHS, RHS, TWO, {"activation": np.ones(2)}, ValueError, "activation=array.* is not one of none, relu, silu, gelu"),
        (LHS, RHS, TWO, {"backend": np.ones(2)}, ValueError, "backend=array.* is not one of mosaic, interpret, xla"),
        (LHS, RHS, [1, 2, 3], {"group_offset": -1}, ValueError, "group_offset=-1 is not from 0 to 1"),
        (LHS, RHS, [1], {"group_offset": 0}, ValueError, "group_sizes has 1 entries but rhs has 2 groups: with group_offset"),
        (LHS, RHS, [1, 2, 3], {"group_offset": [0, 1]}, ValueError, r"group_offset has shape \(2,\): it is one integer"),
        (LHS, RHS, [1, 2, 3], {"group_offset": 0.5}, TypeError, "group_offset has dtype float64"),
        (LHS, RHS, TWO, {"backend": "mosaic"}, ValueError, "cannot run grouped_matmul.*no NVIDIA GPU is in use"),
        (
            LHS,
            S((2, 16, 100), BF16),
            TWO,
            {"backend": "interpret"},
            ValueError,
            "n=100 needs 16-byte rows of rhs.*pad to 104 or pass backend='xla'",
        ),
    ],
)
def test_error_names_the_value_the_rule_and_the_way_out(lhs, rhs, sizes, kwargs, error, message):
    lhs, rhs = (jnp.zeros(x.shape, x.dtype) for x in (lhs, rhs))
    with pytest.raises(error, match=f"(?s){message}"):
        grouped_matmul(lhs, rhs, sizes, **kwargs)


def test_sizes_that_are_traced_raise_only_for_their_shape_and_dtype():
    lhs, rhs = operands(8, 8, 16, 2)
    f = jax.jit(lambda sizes: grouped_matmul(lhs, rhs, sizes))
    f(jnp.array([-1, 100]))
    with pytest.raises(ValueError, match="group_sizes has 3 entries but rhs has 2 groups"):
        f(jnp.array([1, 2, 3]))
    with pytest.raises(TypeError, match="group_sizes has dtype float32"):
        f(jnp.ones(2))


# --- supports and check

WIDE = replace(BASE, tile_m=128, tile_n=128, compute_warpgroups=2)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (P(64, 64, 64, 2, "float32", "float32"), "dtype float32 is not one of bfloat16, float16: cast, or use backend='xla'"),
        (P(64, 64, 64, 2, "float16", "bfloat16"), "out_dtype bfloat16 is neither the inputs' float16 nor float32: cast the"),
        (P(64, 64, 64, 2, layout="tn"), "layout 'tn' is neither 'nn' nor 'nt'"),
        (P(64, 64, 64, 2, activation="tanh"), "activation 'tanh' is not one of none, relu, silu, gelu"),
        (P(64, 64, 64, 2, spread="wide"), "spread 'wide' is not one of even, random, skewed, sparse"),
        (P(0, 64, 64, 2), "a dimension of .*m=0.* is zero: there is nothing to compute"),
        (P(64, 64, 64, 0), "a dimension of .*groups=0.* is zero"),
        (P(64, 64, 60, 2), "k=60 needs 16-byte rows of lhs .*: pad to 64 or pass backend='xla'"),
        (P(64, 60, 64, 2), "n=60 needs 16-byte rows of rhs .*: pad to 64 or pass backend='xla'"),
        (P(64, 60, 64, 2, layout="nt"), "n=60 needs 16-byte rows of the output .*: pad to 64 or pass backend='xla'"),
        (P(64, 66, 64, 2, out_dtype="float32", layout="nt"), "n=66 needs 16-byte rows of the output .*: pad to 68"),
        (P(2**28, 64, 64, 2), "m=268435456 rows are more than 268435200: split them, or pass backend='xla'"),
        (
            P(64, 64, 64, 2, lhs_rows=2**28),
            "lhs_rows=268435456 of k=64 are more than 17179869184 bytes: gather the rows before",
        ),
        (P(64, 64, 64, 2, second=True, lhs_rows=8), "lhs_rows=8: rows are gathered for one product of 16-bit floats"),
        (P(2**20, 2**24, 64, 2**14), "8589934592 tiles of 64 x 64 are more than 2147483392: split the groups"),
    ],
)
def test_supports_says_why_no_config_can_run(problem, reason):
    with pytest.raises(ValueError, match=reason):
        raise ValueError(SPEC.supports(problem, H200))
    with pytest.raises(ValueError, match=f"no config of grouped_matmul fits .*: {reason}"):
        SPEC.default(problem, H200)


def test_supports_refuses_other_architectures():
    assert "B200 is not a Hopper GPU: the kernel uses wgmma" in SPEC.supports(P(64, 64, 64, 2), gpu.find("b200"))


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        (P(64, 128, 64, 2), replace(BASE, tile_n=72), "epilogue_tile_n=64 must divide a warpgroup's 72 columns"),
        (
            P(64, 128, 64, 2, out_dtype="float32"),
            replace(BASE, tile_n=96, epilogue_tile_n=32),
            "tile_n=96 must be a multiple of 64, one swizzle row of rhs",
        ),
        (
            P(64, 128, 64, 2, out_dtype="float32"),
            replace(WIDE, tile_n=192, wg_dimension="n", epilogue_tile_n=32),
            "a warpgroup's 96 columns of tile_n=192 must be a multiple of 64, one swizzle row of rhs",
        ),
        (P(64, 72, 64, 2), WIDE, "tile_n=128 must be at most n=72, which is no multiple of 64: TMA clips one swizzle row only"),
        (P(64, 2**25 + 8, 8, 2), WIDE, "tile_n=128 must be 64: blocks that end with a row of n=33554440 begin below 33554432"),
        (
            P(64, 64, 72, 2, layout="nt"),
            replace(BASE, tile_k=128),
            "tile_k=128 must be 64 because k=72 is no multiple of 64: TMA clips one swizzle row only",
        ),
        (
            P(64, 72, 64, 2, layout="nt"),
            replace(WIDE, epilogue_tile_n=128),
            "epilogue_tile_n=128 must be 64 because n=72 is no multiple of it: TMA clips one swizzle row only",
        ),
        (
            P(64, 64, 64, 2),
            replace(WIDE, max_concurrent_steps=12),
            "[0-9]+ bytes of shared memory exceed the 232448 of NVIDIA H200: use fewer steps or smaller tiles",
        ),
        (P(64, 64, 64, 2), replace(BASE, tile_m=100), "100 rows of tile_m=100 must be a multiple of 64"),
    ],
)
def test_check_says_why_a_config_cannot_run(problem, config, reason):
    with pytest.raises(ValueError, match=reason):
        raise ValueError(SPEC.check(problem, config, H200))


@pytest.mark.parametrize(
    ("problem", "config"),
    [
        (P(1, 8, 8, 256), BASE),
        (P(64, 128, 72, 2), replace(BASE, tile_k=128)),  # nn: k ends within a step
        (P(64, 72, 128, 2, layout="nt"), WIDE),  # nt: n ends within a tile
        (P(64, 136, 64, 2), WIDE),  # nn: the last tile ends with n
        (P(64, 128, 64, 2, layout="nt", out_dtype="float32"), replace(BASE, tile_n=96, epilogue_tile_n=32)),
    ],
    ids=str,
)
def test_check_allows_what_tma_clips(problem, config):
    assert SPEC.check(problem, config, H200) is None


@needs_compiler
def test_rows_beyond_a_group_are_not_loaded():
    """TMA takes four times as long to fill them with zeros as to load rows. Each of 128 threads expects a byte of each row."""
    problem, config = P(512, 256, 256, 4), replace(BASE, tile_m=128, tile_n=192, compute_warpgroups=2)
    assert SPEC.check(problem, config, H200) is None
    arrays = jax.eval_shape(functools.partial(SPEC.inputs, problem), jax.random.key(0))
    ptx = "".join(aot.ptx(H200, functools.partial(SPEC.run, problem, config, H200), *arrays))
    numbers = dict(re.findall(r"mov\.b32\s+(%r\d+), (\d+);", ptx))
    expected = {int(numbers[name]) for name in re.findall(r"expect_tx[^;]*, (%r\d+);", ptx)}
    assert expected == {8, 16, 32, 64, 128, 192}  # the last: columns of the matrix


def test_export_with_a_symbolic_number_of_rows_and_its_gradients(assert_near):
    rows = jax.export.symbolic_shape("m")
    lhs, rhs = operands(37, 32, 16, 4, F32)
    sizes = jnp.array([10, 0, 20, 5], jnp.int32)
    shapes = (jax.ShapeDtypeStruct((*rows, 16), F32), *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (rhs, sizes)))

    def both(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> Any:
        return jax.value_and_grad(lambda *of: grouped_matmul(*of, sizes).sum(), argnums=(0, 1))(lhs, rhs)

    exported = jax.export.export(jax.jit(both))(*shapes)
    for got, wanted in zip(
        jax.tree.leaves(exported.call(lhs, rhs, sizes)), jax.tree.leaves(both(lhs, rhs, sizes)), strict=True
    ):
        assert_near(got, wanted, 1e-5)
