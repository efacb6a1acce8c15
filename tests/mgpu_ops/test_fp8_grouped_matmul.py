"""What a user of `mgpu_ops.fp8_grouped_matmul` relies on: values, gradients and their dtypes, rows of no group."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mgpu_ops import capture, fp8_grouped_matmul, grouped_matmul
from tests import thorough
from tests.arrays import normal

BF16, F32 = jnp.bfloat16, jnp.float32
M, N, K, SIZES = 130, 160, 272, (40, 0, 60, 21)


def share(found: Any, wanted: Any) -> float:
    """The error's norm as a share of what is wanted."""
    found, wanted = (np.asarray(x).astype(np.float64) for x in (found, wanted))
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def operands(transpose_rhs: bool = False) -> tuple[jax.Array, jax.Array]:
    lhs, rhs = normal(0, M, K, dtype=BF16), normal(1, 4, K, N, dtype=BF16) / 16
    return lhs, rhs.mT if transpose_rhs else rhs


def gradients(function: Callable[..., jax.Array], *arrays: jax.Array) -> Any:
    """Of a sum with random weights, some 10^-4 in size, as gradients are."""
    weights = normal(9, M, N) / 1e4
    loss = lambda *x: jnp.sum(function(*x, jnp.array(SIZES)).astype(F32) * weights)  # noqa: E731
    return jax.jit(jax.grad(loss, tuple(range(len(arrays)))))(*arrays)


@pytest.mark.parametrize(
    ("scheme", "transpose_rhs"),
    [
        ("block", False),
        pytest.param("block", True, marks=thorough.only_in_all),
        pytest.param("row", True, marks=thorough.only_in_all),
        ("tensor", True),
    ],
)
def test_the_product_and_its_gradients_are_those_of_16_bits_within_rounding(scheme, transpose_rhs):
    arrays = operands(transpose_rhs)
    of_8 = functools.partial(fp8_grouped_matmul, scheme=scheme, transpose_rhs=transpose_rhs)
    of_16 = functools.partial(grouped_matmul, transpose_rhs=transpose_rhs)
    out, wanted = of_8(*arrays, SIZES), of_16(*arrays, SIZES)
    assert out.dtype == BF16
    assert 0.01 < share(out, wanted) < 0.05  # of numbers with 4 significant bits
    found, wanted = gradients(of_8, *arrays), gradients(of_16, *arrays)
    assert [x.dtype for x in found] == [BF16, BF16]
    assert 0.02 < share(found[0], wanted[0]) < 0.09  # a gradient has 3
    np.testing.assert_array_equal(found[1], wanted[1])  # of 16 bits


def test_rows_of_no_group_are_zeros_and_reach_nothing():
    lhs, rhs = operands()
    poisoned = lhs.at[sum(SIZES) :].set(jnp.nan)
    for scheme in ("tensor", "block"):
        of_8 = functools.partial(fp8_grouped_matmul, scheme=scheme)
        out = of_8(poisoned, rhs, SIZES)
        np.testing.assert_array_equal(out, of_8(lhs.at[sum(SIZES) :].set(0), rhs, SIZES))
        np.testing.assert_array_equal(out[sum(SIZES) :], 0)
        dlhs, drhs = gradients(of_8, poisoned, rhs)
        np.testing.assert_array_equal(dlhs[sum(SIZES) :], 0)
        assert bool(jnp.isfinite(drhs).all())


def test_a_shard_and_vmap_give_what_calls_one_by_one_give():
    lhs, rhs = operands()
    whole = fp8_grouped_matmul(lhs, rhs, SIZES, out_dtype=F32)
    parts = [fp8_grouped_matmul(lhs, rhs[i : i + 2], SIZES, group_offset=i, out_dtype=F32) for i in (0, 2)]
    np.testing.assert_array_equal(sum(parts), whole)
    both = jax.vmap(lambda x: fp8_grouped_matmul(x, rhs, jnp.array(SIZES), out_dtype=F32))(jnp.stack([lhs, -lhs]))
    np.testing.assert_allclose(both, np.stack([whole, -np.asarray(whole)]), rtol=1e-5, atol=1e-5)


def test_a_training_step_is_two_products_of_8_bits_and_one_of_16():
    loss = lambda *x: jnp.sum(fp8_grouped_matmul(*x, jnp.array(SIZES)).astype(F32))  # noqa: E731
    seen = capture(jax.value_and_grad(loss, (0, 1)), "h200")(*operands())
    found = {(x.op, x.problem.dtype, x.problem.rhs_dtype) for x in seen.uses}
    assert found == {
        ("grouped_matmul", "float8_e4m3fn", "none"),
        ("grouped_matmul", "float8_e5m2", "float8_e4m3fn"),
        ("ragged_contraction", "bfloat16", "none"),
    }


def test_wrong_arguments_are_told():
    lhs, rhs = operands()
    with pytest.raises(ValueError, match="fp8_grouped_matmul quantizes bfloat16"):
        fp8_grouped_matmul(lhs.astype("float8_e4m3fn"), rhs, SIZES)
    with pytest.raises(ValueError, match="scheme='column' is not one of tensor, row, block"):
        fp8_grouped_matmul(lhs, rhs, SIZES, scheme="column")
    with pytest.raises(ValueError, match="differ in k"):
        fp8_grouped_matmul(lhs, rhs, SIZES, transpose_rhs=True)
    with pytest.raises(ValueError, match="more than the 130 rows"):
        fp8_grouped_matmul(lhs, rhs, (100, 100, 0, 0))
    with pytest.raises(ValueError, match="out_dtype=float64"):
        fp8_grouped_matmul(lhs, rhs, SIZES, out_dtype="float64")
