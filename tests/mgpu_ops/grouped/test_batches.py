"""vmap of the grouped ops is one launch for all of a batch, and gives what calls one by one give."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_ops import capture, gated_grouped_matmul, grouped_matmul, ragged_contraction
from tests import thorough
from tests.arrays import normal
from tests.mgpu_ops.grouped import ragged

F32 = jnp.float32
SIZES = jnp.array([[5, 0, 11], [0, 24, 0], [3, 4, 0]], jnp.int32)  # of 24 rows: some are of no group


def one_by_one(f: Any, in_axes: Any, arrays: Any) -> Any:
    each = [f(*(x if axis is None else x[i] for x, axis in zip(arrays, in_axes, strict=True))) for i in range(3)]
    return jax.tree.map(lambda *x: jnp.stack(x), *each)


def problems_of(f: Any, *arrays: jax.Array) -> list[Any]:
    """Those that a call of bfloat16 arrays would run on an H200."""
    like = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16 if x.dtype == F32 else x.dtype) for x in arrays]
    found = capture(f, gpu="h200")(*like)
    assert max(use.count for use in found.uses) < 3  # none for each
    return [use.problem for use in found.uses]


def rows(*shape: int) -> jax.Array:
    """With NaN where a row is of no group."""
    x = normal(0, *shape, dtype=F32)
    used = SIZES.sum(1)
    return jnp.where(jnp.arange(24)[None, :, None] < used[:, None, None], x, jnp.nan)


@pytest.mark.parametrize("axes", [(0, None, 0, 0), (None, None, 0, 0), (0, 0, None, 0), (None, 0, 0, None)], ids=str)
def test_products_of_rows_by_index_are_one_too(axes, assert_near):
    each = normal(0, 3, 20, 16, dtype=F32), normal(1, 3, 3, 16, 40, dtype=F32), SIZES
    indices = jnp.asarray(np.random.default_rng(0).integers(0, 20, (3, 24)), jnp.int32)
    arrays = tuple(x if axis == 0 else x[0] for x, axis in zip((*each[:2], indices, SIZES), axes, strict=True))
    for f in (
        lambda lhs, rhs, indices, sizes: grouped_matmul(lhs, rhs, sizes, row_indices=indices),
        lambda lhs, rhs, indices, sizes: gated_grouped_matmul(lhs, rhs, rhs, sizes, row_indices=indices),
    ):
        mapped = jax.vmap(f, axes)
        assert_near(mapped(*arrays), one_by_one(f, axes, arrays), 1e-5)
        (problem,) = problems_of(mapped, *arrays)
        assert (problem.m, problem.lhs_rows) == (72, 60 if axes[0] == 0 else 20)


def test_products_with_the_same_matrices_are_one_in_which_the_rows_of_a_group_come_together(assert_near):
    lhs, rhs = rows(3, 24, 16), normal(1, 3, 16, 40, dtype=F32)
    mapped = jax.vmap(grouped_matmul, (0, None, 0))
    assert_near(mapped(lhs, rhs, SIZES), one_by_one(grouped_matmul, (0, None, 0), (lhs, rhs, SIZES)), 1e-6)
    (problem,) = problems_of(mapped, lhs, rhs, SIZES)
    assert (problem.m, problem.groups) == (72, 3)


def test_products_with_matrices_of_their_own_are_one_of_all_groups(assert_near):
    arrays = (
        rows(3, 24, 16),
        normal(1, 3, 3, 16, 40, dtype=F32),
        SIZES,
        normal(2, 3, 40, dtype=F32),
        normal(3, 3, 24, dtype=F32),
    )
    f = lambda lhs, rhs, sizes, bias, scale: grouped_matmul(lhs, rhs, sizes, bias=bias, row_scale=scale)  # noqa: E731
    in_axes = (0, 0, 0, None, 0)
    mapped = jax.vmap(f, in_axes)
    assert_near(mapped(*arrays), one_by_one(f, in_axes, arrays), 1e-6)
    (problem,) = problems_of(mapped, *arrays)
    assert (problem.m, problem.groups) == (72, 9)


def test_shards_of_a_batch_are_one_product(assert_near):
    """As in expert parallelism, where each device has its own first group."""
    lhs, rhs = normal(0, 3, 24, 16, dtype=F32), normal(1, 2, 16, 40, dtype=F32)
    f = lambda lhs, rhs, sizes, offset: grouped_matmul(lhs, rhs, sizes, group_offset=offset)  # noqa: E731
    arrays, in_axes = (lhs, rhs, SIZES, jnp.array([0, 1, 1])), (0, None, 0, 0)
    mapped = jax.jit(jax.vmap(f, in_axes))
    assert_near(mapped(*arrays), one_by_one(f, in_axes, arrays), 1e-6)
    assert [problem.m for problem in problems_of(mapped, *arrays)] == [72]


def test_gated_products_and_their_gradients_are_one(assert_near):
    lhs, gate, up = normal(0, 3, 24, 16, dtype=F32), *(normal(i, 3, 16, 8, dtype=F32) for i in (1, 2))
    f = jax.grad(lambda lhs, gate, up, sizes: (gated_grouped_matmul(lhs, gate, up, sizes) ** 2).sum())
    arrays, in_axes = (lhs, gate, up, SIZES), (0, None, None, 0)
    mapped = jax.vmap(f, in_axes)
    assert_near(mapped(*arrays), one_by_one(f, in_axes, arrays), 1e-5)
    assert {problem.m for problem in problems_of(mapped, *arrays)} == {72}


def test_contractions_are_one_of_all_groups(assert_near):
    lhs, rhs = rows(3, 24, 16), rows(3, 24, 8)
    mapped = jax.vmap(ragged_contraction)
    assert_near(mapped(lhs, rhs, SIZES), one_by_one(ragged_contraction, (0, 0, 0), (lhs, rhs, SIZES)), 1e-6)
    (problem,) = problems_of(mapped, lhs, rhs, SIZES)
    assert (problem.m, problem.groups) == (72, 9)


@thorough.only_in_all
def test_the_kernel_runs_once_and_is_right(assert_near):
    lhs, rhs = normal(0, 3, 24, 16), normal(1, 3, 16, 40)
    out = jax.vmap(functools.partial(grouped_matmul, backend="interpret"), (0, None, 0))(lhs, rhs, SIZES)
    assert_near(out, one_by_one(grouped_matmul, (0, None, 0), (lhs, rhs, SIZES)), 8e-3)


def test_shared_matrices_with_biases_of_their_own_are_not_copied(assert_near):
    lhs, rhs, bias = normal(0, 24, 16, dtype=F32), normal(1, 3, 16, 40, dtype=F32), normal(2, 3, 3, 40, dtype=F32)
    f = lambda bias: grouped_matmul(lhs, rhs, SIZES[0], bias=bias)  # noqa: E731
    assert_near(jax.vmap(f)(bias), one_by_one(f, (0,), (bias,)), 1e-6)
    found = capture(jax.vmap(f), gpu="h200")(bias)
    assert [(use.problem.m, use.count) for use in found.uses] == [(24, 3)]  # one after the other


sizes = st.lists(st.integers(-3, 20), min_size=2, max_size=2)


@pytest.mark.parametrize("shared", [True, False])
@thorough.examples(10)
@given(of_each=st.lists(sizes, min_size=3, max_size=3))
def test_any_sizes_are_safe(shared, of_each):
    lhs = np.asarray(normal(0, 3, 24, 4, dtype=F32))
    rhs = np.asarray(normal(1, *(() if shared else (3,)), 2, 4, 8, dtype=F32))
    out = MAPPED[shared](lhs, rhs, jnp.array(of_each, jnp.int32))
    for i in range(3):
        wanted = ragged.grouped(lhs[i], rhs if shared else rhs[i], of_each[i])
        np.testing.assert_allclose(out[i], wanted, rtol=1e-5, atol=1e-5)


MAPPED = {shared: jax.jit(jax.vmap(grouped_matmul, (0, None if shared else 0, 0))) for shared in (True, False)}
