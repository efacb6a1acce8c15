"""What a user of `mgpu_ops.einsum` relies on: it takes the place of `jax.numpy.einsum`."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mgpu_ops
from mgpu_ops import einsum
from tests.arrays import normal

BF16 = jnp.bfloat16
pytestmark = pytest.mark.usefixtures("no_races")


def array(seed: int, *shape: int, dtype: Any = BF16) -> jax.Array:
    return normal(seed, *shape, dtype=dtype)


# subscripts, shapes of the operands, and (m, n, k, batch, layout) of each product that matmul runs
CASES: dict[str, tuple[str, list[tuple[int, ...]], list[tuple[Any, ...]]]] = {
    "a dense layer": ("btf,fh->bth", [(2, 3, 16), (16, 8)], [(6, 8, 16, 1, "nn")]),
    "implicit": ("ij,jk", [(4, 16), (16, 8)], [(4, 8, 16, 1, "nn")]),
    "an ellipsis": ("...f,fh->...h", [(2, 3, 16), (16, 8)], [(6, 8, 16, 1, "nn")]),
    "stored transposed": ("bi,oi->bo", [(4, 16), (8, 16)], [(4, 8, 16, 1, "nt")]),
    "the result transposed": ("ij,jk->ki", [(4, 16), (16, 8)], [(8, 4, 16, 1, "tt")]),
    "a batch": ("bij,bjk->bik", [(2, 4, 16), (2, 16, 8)], [(4, 8, 16, 2, "nn")]),
    "heads": ("bqhd,hdo->bqo", [(2, 3, 4, 8), (4, 8, 16)], [(6, 16, 32, 1, "nn")]),
    "heads, named against the alphabet": ("bqzd,zdo->bqo", [(2, 3, 4, 8), (4, 8, 16)], [(6, 16, 32, 1, "nn")]),
    "a chain": ("ij,jk,kl->il", [(4, 16), (16, 8), (8, 32)], [(4, 8, 16, 1, "nn"), (4, 32, 8, 1, "tn")]),
    "a batch that is not first": ("bqhd,bkhd->bhqk", [(2, 3, 4, 8), (2, 5, 4, 8)], []),
    "a sum": ("ij->i", [(4, 8)], []),
    "an outer product": ("i,j->ij", [(4,), (8,)], []),
    "a trace": ("ii->", [(4, 4)], []),
}


@pytest.mark.parametrize("case", CASES)
def test_values_shape_and_dtype_are_those_of_jax(case, assert_near):
    subscripts, shapes, products = CASES[case]
    arrays = [array(i, *shape) for i, shape in enumerate(shapes)]
    wanted, ours = jnp.einsum(subscripts, *arrays), einsum(subscripts, *arrays)
    assert (ours.shape, ours.dtype, ours.weak_type) == (wanted.shape, wanted.dtype, wanted.weak_type)
    assert_near(ours, wanted, 1.6e-2)
    uses = mgpu_ops.capture(functools.partial(einsum, subscripts), "h200")(*arrays).uses
    found = [(p.m, p.n, p.k, p.batch, p.layout) for p in (use.problem for use in uses for _ in range(use.count))]
    assert sorted(map(either_way, found)) == sorted(map(either_way, products))


def either_way(product: tuple[Any, ...]) -> tuple[Any, ...]:
    """One name for a product and its transposed one: JAX may multiply the second operand by the first."""
    m, n, k, batch, layout = product
    return min(product, (n, m, k, batch, layout.translate(str.maketrans("nt", "tn"))[::-1]))


def test_parameters_are_jaxs_and_backend():
    ours, jaxs = (dict(inspect.signature(f).parameters) for f in (einsum, jnp.einsum))
    assert [(p.name, p.default, p.kind) for p in ours.values() if p.name != "backend"] == [
        (p.name, p.default, p.kind) for p in jaxs.values() if p.name != "_dot_general"
    ]


def test_gradients_and_vmap_are_those_of_jax(assert_near):
    x, w = array(0, 2, 3, 16), array(1, 16, 8)

    def loss(f: Any, x: Any, w: Any) -> Any:
        return (f("btf,fh->bth", x, w, preferred_element_type=jnp.float32) ** 2).sum()

    for ours, wanted in zip(*(jax.grad(functools.partial(loss, f), (0, 1))(x, w) for f in (einsum, jnp.einsum)), strict=True):
        assert ours.dtype == wanted.dtype
        assert_near(ours, wanted, 1.6e-2)
    product = functools.partial(einsum, "tf,fh->th")
    assert_near(jax.vmap(product, (0, None))(x, w), jnp.einsum("btf,fh->bth", x, w), 8e-3)


def test_a_backend_is_that_of_every_product(assert_near):
    x, w = array(0, 8, 16), array(1, 16, 8)
    assert_near(einsum("ij,jk->ik", x, w, backend="interpret"), x @ w, 8e-3)
    with pytest.raises(ValueError, match="backend='cuda' is not one of"):
        einsum("ij,jk->ik", x, w, backend="cuda")
    with pytest.raises(ValueError, match="backend='interpret' cannot run this dot_general"):
        einsum("i,j->ij", x[0], w[0], backend="interpret")


def test_float32_keeps_its_precision_and_is_jaxs_own_without_a_kernel():
    x, w = array(0, 8, 16, dtype="float32"), array(1, 16, 8, dtype="float32")
    (use,) = mgpu_ops.capture(functools.partial(einsum, "ij,jk->ik", precision="highest"), "h200")(x, w).uses
    assert use.problem.algorithm == "bf16_x6"
    product = functools.partial(einsum, "ij,jk->ik")
    np.testing.assert_array_equal(product(x, w), jnp.einsum("ij,jk->ik", x, w))
    _, tangent = jax.jvp(product, (x, w), (x, w))  # which matmul has not
    np.testing.assert_allclose(tangent, 2 * x @ w, rtol=1e-5)


@pytest.mark.parametrize(
    ("subscripts", "shapes"), [("ij,jk->il", [(4, 8), (8, 4)]), ("ij,jk", [(4, 8), (4, 8)]), ("ij", [(4, 8), (4, 8)])]
)
def test_errors_are_jaxs(subscripts, shapes):
    arrays = [array(0, *shape) for shape in shapes]
    with pytest.raises(Exception) as wanted:
        jnp.einsum(subscripts, *arrays)
    with pytest.raises(type(wanted.value)):
        einsum(subscripts, *arrays)
