"""`mgpu_ops.ragged_dot_general` takes the place of JAX's: by ours in the forms that JAX's gradients have."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mgpu_ops import ragged_dot_general
from tests.arrays import normal

M, K, N, SIZES = 12, 8, 16, np.array([4, 0, 8], np.int32)


def numbers(contracting: Any, ragged: Any, groups: Any, batch: Any = ((), ())) -> lax.RaggedDotDimensionNumbers:
    return lax.RaggedDotDimensionNumbers((contracting, batch), ragged, groups)


FORMS = {  # lhs, rhs and how they are multiplied, of which ours have those of `OURS`
    "product": ((M, K), (3, K, N), numbers(((1,), (1,)), [0], [0])),
    "rows' gradient": ((M, N), (3, K, N), numbers(((1,), (2,)), [0], [0])),
    "matrices' gradient": ((M, K), (M, N), numbers(((0,), (0,)), [0], [])),
    "matrices stored otherwise": ((M, K), (K, 3, N), numbers(((1,), (0,)), [0], [1])),
    "a batch": ((2, M, K), (2, 3, K, N), numbers(((2,), (2,)), [1], [1], ((0,), (0,)))),
    "a batch elsewhere": ((M, 2, K), (3, K, N, 2), numbers(((2,), (1,)), [0], [0], ((1,), (3,)))),
    "two batches, rows' gradient": ((2, M, 5, N), (5, 3, 2, K, N), numbers(((3,), (4,)), [1], [1], ((2, 0), (0, 2)))),
    "a batch, matrices' gradient": ((2, M, K), (M, 2, N), numbers(((1,), (0,)), [1], [], ((0,), (1,)))),
    "a ragged batch": ((M, 2, K), (M, K, N), numbers(((2,), (1,)), [0], [], ((0,), (0,)))),
}
OURS = [name for name in FORMS if name not in ("matrices stored otherwise", "a ragged batch")]
PLAIN = OURS[:3]


def called(name: str, function: Any, dtype: str = "float32", **options: Any) -> Any:
    of_lhs, of_rhs, how = FORMS[name]
    sizes = np.stack([SIZES, SIZES[::-1]]) if name in ("a batch", "a batch, matrices' gradient") else SIZES
    lhs, rhs = (normal(i, *shape).astype(dtype) for i, shape in enumerate((of_lhs, of_rhs)))
    return lambda: function(lhs, rhs, jnp.asarray(sizes), how, **options)


@pytest.mark.parametrize("name", FORMS)
def test_it_computes_what_jaxs_does_and_runs_ours_where_it_can(name):
    ours = called(name, ragged_dot_general)
    np.testing.assert_allclose(ours(), called(name, lax.ragged_dot_general)(), rtol=1e-5, atol=1e-5)
    traced = str(jax.make_jaxpr(ours)())
    assert ("ragged_dot_general" in traced) == (name not in OURS)
    assert "unroll=1" not in traced  # one launch for a batch: no loop, but for those of a search, whose turns jax 0.11 unrolls


@pytest.mark.parametrize("name", PLAIN)
def test_dtypes_and_preferred_ones_are_those_of_jax(name):
    for options in ({}, {"preferred_element_type": jnp.float32}):
        out, wanted = (called(name, f, "bfloat16", **options)() for f in (ragged_dot_general, lax.ragged_dot_general))
        assert (out.dtype, out.shape) == (wanted.dtype, wanted.shape)
        np.testing.assert_allclose(out.astype("float32"), wanted.astype("float32"), rtol=0.02, atol=0.02)
    ints = called(name, ragged_dot_general, "int32")
    assert "ragged_dot_general" in str(jax.make_jaxpr(ints)())


def test_its_arguments_are_those_of_jax_and_errors_too():
    ours, jaxs = (list(inspect.signature(f).parameters) for f in (ragged_dot_general, lax.ragged_dot_general))
    assert ours == [*jaxs, "backend"]
    with pytest.raises(ValueError, match="only JAX's own does"):
        called("a ragged batch", ragged_dot_general, backend="mosaic")()
    _, _, how = FORMS["product"]
    with pytest.raises(TypeError):
        ragged_dot_general(jnp.ones((M, K)), jnp.ones((3, K + 1, N)), jnp.asarray(SIZES), how)


@pytest.mark.parametrize("name", [*PLAIN[:2], "a batch"])  # JAX has none of the contraction
def test_gradients_of_a_form_are_those_of_jax(name):
    of_lhs, of_rhs, how = FORMS[name]
    arrays = [normal(i, *shape) for i, shape in enumerate((of_lhs, of_rhs))]
    found = [
        jax.grad(lambda x, y: (f(x, y, jnp.asarray(SIZES), how) ** 2).sum(), (0, 1))(*arrays)  # noqa: B023
        for f in (ragged_dot_general, lax.ragged_dot_general)
    ]
    for x, y in zip(*found, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-3)
