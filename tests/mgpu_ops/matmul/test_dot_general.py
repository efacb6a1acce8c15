"""What a user of `mgpu_ops.dot_general` relies on: it takes the place of `jax.lax.dot_general`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mgpu_ops
from mgpu_ops import dot_general
from tests.arrays import normal

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
DENSE = (((1,), (0,)), ((), ()))

pytestmark = pytest.mark.usefixtures("no_races")


def array(seed: int, *shape: int, dtype: Any = BF16) -> jax.Array:
    return normal(seed, *shape).astype(dtype)


def problems(*args: Any, **kwargs: Any) -> list[Any]:
    """The problems of matmul that a call runs on an H200."""
    return [use.problem for use in mgpu_ops.capture(functools.partial(dot_general, **kwargs), "h200")(*args).uses]


def is_ours(*args: Any, **kwargs: Any) -> bool:
    return bool(problems(*args, **kwargs))


# --- the same arguments, the same values

OURS: dict[str, tuple[Any, ...]] = {  # lhs, rhs, dimension numbers
    "a dense layer": (array(0, 3, 5, 16), array(1, 16, 8), (((2,), (0,)), ((), ()))),
    "its gradient of the input": (array(0, 3, 5, 8), array(1, 16, 8), (((2,), (1,)), ((), ()))),
    "its gradient of the kernel": (array(0, 3, 5, 16), array(1, 3, 5, 8), (((0, 1), (0, 1)), ((), ()))),
    "several features": (array(0, 3, 4, 2, 8), array(1, 2, 8, 4, 4), (((2, 3), (0, 1)), ((), ()))),
    "both transposed": (array(0, 16, 4), array(1, 8, 16), (((0,), (1,)), ((), ()))),
    "batches": (array(0, 2, 3, 8, 16), array(1, 2, 3, 16, 8), (((3,), (2,)), ((0, 1), (0, 1)))),
    "a batch, contracted first": (array(0, 2, 16, 8), array(1, 2, 8, 16), (((1,), (2,)), ((0,), (0,)))),
    "a vector and a matrix": (array(0, 16), array(1, 16, 8), (((0,), (0,)), ((), ()))),
    "two vectors": (array(0, 16), array(1, 16), (((0,), (0,)), ((), ()))),
    "no rows": (array(0, 0, 16), array(1, 16, 8), DENSE),
    "nothing to sum": (array(0, 4, 0), array(1, 0, 8), DENSE),
    "numpy": (np.asarray(array(0, 4, 16)), np.asarray(array(1, 16, 8)), DENSE),
    "float16": (array(0, 4, 16, dtype=F16), array(1, 16, 8, dtype=F16), DENSE),
    "float32": (array(0, 4, 16, dtype=F32), array(1, 16, 8, dtype=F32), DENSE),
    "contracted in another order": (array(0, 3, 2, 8), array(1, 2, 8, 4), (((2, 1), (1, 0)), ((), ()))),
}
JAXS: dict[str, tuple[Any, ...]] = {
    "two dtypes": (array(0, 4, 16), array(1, 16, 8, dtype=F32), DENSE),
    "int8": (np.ones((4, 16), np.int8), np.ones((16, 8), np.int8), DENSE),
    "an outer product": (array(0, 4), array(1, 8), (((), ()), ((), ()))),
    "contracted in the middle": (array(0, 3, 16, 5), array(1, 16, 8), (((1,), (0,)), ((), ()))),
    "contracted apart": (array(0, 4, 3, 16), array(1, 4, 16, 8), (((0, 2), (0, 1)), ((), ()))),
    "contracted in two orders": (array(0, 3, 2, 8), array(1, 8, 2, 4), (((2, 1), (0, 1)), ((), ()))),
    "a batch that is not first": (array(0, 8, 2, 16), array(1, 2, 16, 8), (((2,), (1,)), ((1,), (0,)))),
}


@pytest.mark.parametrize("case", OURS | JAXS)
def test_values_shape_and_dtype_are_those_of_jax(case: str, assert_near: Callable[..., None]) -> None:
    lhs, rhs, numbers = (OURS | JAXS)[case]
    wanted = lax.dot_general(lhs, rhs, numbers)
    for ours in (dot_general(lhs, rhs, numbers), jax.jit(dot_general, static_argnums=2)(lhs, rhs, numbers)):
        assert (ours.shape, ours.dtype, ours.weak_type) == (wanted.shape, wanted.dtype, wanted.weak_type)
        if ours.size and jnp.any(wanted):
            assert_near(ours, wanted, 8e-3)
    assert is_ours(lhs, rhs, dimension_numbers=numbers) == (case in OURS)


def test_a_dense_layer_and_its_gradients_are_products_that_read_their_operands_in_place() -> None:
    x, w = array(0, 3, 5, 16), array(1, 16, 8)
    loss = lambda x, w: jnp.sum(dot_general(x, w, (((2,), (0,)), ((), ()))).astype(F32) ** 2)  # noqa: E731
    uses = mgpu_ops.capture(jax.jit(jax.grad(loss, argnums=(0, 1))), "h200")(x, w).uses
    assert [(u.problem.m, u.problem.n, u.problem.k, u.problem.layout) for u in uses] == [
        (15, 8, 16, "nn"),
        (16, 8, 15, "tn"),
        (15, 16, 8, "nt"),
    ]


OPTIONS: dict[str, tuple[dict[str, Any], bool]] = {  # and whether ours computes it
    "float32 out": ({"preferred_element_type": F32}, True),
    "its own dtype": ({"preferred_element_type": "bfloat16"}, True),
    "another 16 bits out": ({"preferred_element_type": F16}, False),
    "precision": ({"precision": lax.Precision.HIGHEST}, True),
    "precision by name": ({"precision": "highest"}, True),
    "a precision each": ({"precision": ("default", "highest")}, True),
    "an algorithm": ({"precision": lax.DotAlgorithmPreset.BF16_BF16_F32, "preferred_element_type": F32}, True),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_are_those_of_jax(case: str, assert_near: Callable[..., None]) -> None:
    options, ours = OPTIONS[case]
    arrays = array(0, 4, 16), array(1, 16, 8)
    wanted = lax.dot_general(*arrays, DENSE, **options)
    out = dot_general(*arrays, DENSE, **options)
    assert (out.shape, out.dtype) == (wanted.shape, wanted.dtype)
    assert_near(out, wanted, 8e-3)
    assert is_ours(*arrays, dimension_numbers=DENSE, **options) == ours


def test_parameters_have_jaxs_names_order_and_defaults() -> None:
    ours, jaxs = (list(inspect.signature(f).parameters.values()) for f in (dot_general, lax.dot_general))
    assert [(p.name, p.default, p.kind) for p in ours[: len(jaxs)]] == [(p.name, p.default, p.kind) for p in jaxs]
    assert [p.name for p in ours[len(jaxs) :]] == ["backend"]


@given(data=st.data())
def test_any_dimension_numbers_do_what_jax_does(data: st.DataObject) -> None:
    """Wrong ones too: the same error, or the same shape and values."""
    ranks = [data.draw(st.integers(0, 4)) for _ in range(2)]
    shapes = [tuple(data.draw(st.sampled_from((2, 2, 2, 4))) for _ in range(rank)) for rank in ranks]
    dims = lambda: tuple(data.draw(st.lists(st.integers(-1, 4), max_size=2)))  # noqa: E731
    numbers = ((dims(), dims()), (dims(), dims()))
    arrays = [array(seed, *shape) for seed, shape in enumerate(shapes)]
    try:
        wanted = lax.dot_general(*arrays, numbers)
    except Exception as error:
        with pytest.raises(type(error)):
            dot_general(*arrays, numbers)
        return
    out = dot_general(*arrays, numbers)
    assert (out.shape, out.dtype) == (wanted.shape, wanted.dtype)
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(wanted, np.float32), rtol=0.02, atol=0.05)


# --- gradients, transforms, backends


def test_gradients_are_those_of_jax(assert_near: Callable[..., None]) -> None:
    x, w = array(0, 3, 5, 16), array(1, 16, 8)

    def loss(dot: Any, x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(dot(x, w, (((2,), (0,)), ((), ())), preferred_element_type=F32)))

    ours, jaxs = (jax.grad(functools.partial(loss, dot), argnums=(0, 1))(x, w) for dot in (dot_general, lax.dot_general))
    for own, wanted in zip(ours, jaxs):
        assert own.dtype == wanted.dtype
        assert_near(own, wanted, 2e-2)


def test_vmap_and_the_interpreted_kernel(assert_near: Callable[..., None]) -> None:
    x, w = array(0, 2, 64, 64), array(1, 64, 64)
    wanted = jax.vmap(lambda x: lax.dot_general(x, w, DENSE))(x)
    assert_near(jax.vmap(lambda x: dot_general(x, w, DENSE))(x), wanted, 8e-3)
    assert_near(dot_general(x[0], w, DENSE, backend="interpret"), wanted[0], 8e-3)


def test_a_named_kernel_that_cannot_run_it_is_refused() -> None:
    with pytest.raises(ValueError, match="backend='mosaic' cannot run this dot_general"):
        dot_general(array(0, 4), array(1, 8), (((), ()), ((), ())), backend="mosaic")
    with pytest.raises(ValueError, match="backend='cuda' is not one of"):
        dot_general(array(0, 4, 16), array(1, 16, 8), DENSE, backend="cuda")


def test_dimensions_that_are_no_integers_are_refused_as_by_jax() -> None:
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        dot_general(array(0, 4, 16), array(1, 16, 8), (((1.0,), (0,)), ((), ())))


def test_explicit_sharding_is_left_to_jax() -> None:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    sharding = NamedSharding(mesh, PartitionSpec("x", None))
    x, w = jax.device_put(array(0, 4, 16), sharding), jax.device_put(array(1, 16, 8), NamedSharding(mesh, PartitionSpec()))
    with jax.set_mesh(mesh):
        out = dot_general(x, w, DENSE, out_sharding=sharding)
    assert jax.typeof(out).sharding.spec == PartitionSpec("x", None)


@pytest.mark.gpu
def test_a_dense_layer_runs_in_the_kernel(assert_near: Callable[..., None]) -> None:
    x, w = array(0, 3, 128, 256), array(1, 256, 512)
    numbers = (((2,), (0,)), ((), ()))
    assert_near(dot_general(x, w, numbers, backend="mosaic"), lax.dot_general(x, w, numbers), 8e-3)
