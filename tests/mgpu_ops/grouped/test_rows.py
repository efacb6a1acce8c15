"""Rows gathered by index, and their transpose, which adds them up in a fixed order."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr

from mgpu_ops import gated_grouped_matmul, grouped_matmul
from mgpu_ops.grouped.rows import rows_at, sums_at
from tests.arrays import normal

RNG = np.random.default_rng(0)
INDICES = {
    "a permutation": RNG.permutation(100),
    "some of them often": RNG.integers(0, 30, 100),
    "one that all name": np.full(700, 3),
    "one that many name": np.sort(RNG.integers(0, 60, 700) % 30),
    "each eight times": np.repeat(np.arange(20), 8),
    "one": np.zeros(1, int),
    "none": np.zeros(0, int),
}


@pytest.mark.parametrize("indices", INDICES.values(), ids=INDICES)
def test_rows_are_added_where_their_indices_say(indices):
    rows = RNG.integers(-9, 9, (indices.size, 5)).astype(np.float32)  # whose sums are exact in any order
    wanted = np.zeros((101, 5))
    np.add.at(wanted, indices, rows)
    out = jax.jit(sums_at, static_argnums=2)(rows, indices.astype(np.int32), 101)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, wanted)


def test_each_index_has_its_own_sums_under_vmap(assert_near):
    rows, indices = RNG.normal(size=(3, 40, 4)).astype(np.float32), RNG.integers(0, 4, (3, 40)) * np.array([[0], [1], [1]])
    wanted = np.zeros((3, 5, 4))
    for out, index, row in zip(wanted, indices, rows, strict=True):
        np.add.at(out, index, row)
    assert_near(jax.vmap(lambda r, i: sums_at(r, i, 5))(rows, jnp.asarray(indices, jnp.int32)), wanted, 1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_each_is_the_others_gradient(dtype):
    x, indices = normal(0, 12, 6, dtype=dtype), jnp.asarray(RNG.integers(0, 12, 30), jnp.int32)
    g = normal(1, 30, 6, dtype=dtype)
    sums = jax.vjp(lambda rows: sums_at(rows, indices, 12), g)[1](x.astype(jnp.float32))[0]
    np.testing.assert_array_equal(sums, rows_at(x, indices))
    np.testing.assert_array_equal(rows_at(x, indices), np.asarray(x)[np.asarray(indices)])


def floating_scatters(jaxpr: Any) -> list[Any]:
    """The scatters of floats that a function makes, those of its inner functions too."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name.startswith("scatter") and jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.floating):
            found.append(equation)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: isinstance(x, ClosedJaxpr | Jaxpr)):
            if isinstance(inner, ClosedJaxpr | Jaxpr):
                found += floating_scatters(getattr(inner, "jaxpr", inner))
    return found


def test_the_gradient_of_named_rows_has_no_scatter_whose_sums_differ_from_run_to_run():
    lhs, rhs = normal(0, 24, 16, dtype=jnp.bfloat16), normal(1, 3, 16, 8, dtype=jnp.bfloat16)
    indices, sizes = jnp.asarray(RNG.integers(0, 24, 60), jnp.int32), jnp.array([30, 0, 29])

    def loss(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        plain = grouped_matmul(lhs, rhs, sizes, row_indices=indices, backend="interpret")
        return (plain * gated_grouped_matmul(lhs, rhs, rhs, sizes, row_indices=indices, backend="interpret")).sum()

    assert floating_scatters(jax.make_jaxpr(lambda x: x.at[indices].add(1.0))(lhs[:, 0]).jaxpr)  # finds one where there is one
    assert not floating_scatters(jax.make_jaxpr(jax.grad(loss, (0, 1)))(lhs, rhs).jaxpr)
