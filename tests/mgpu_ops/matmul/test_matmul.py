"""What a user of `mgpu_ops.matmul` relies on: values, transforms, configs, backends, errors."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import mgpu_ops
from mgpu_ops import MatmulProblem, matmul, use_configs
from mgpu_ops.core import aot, engine, gpu
from mgpu_ops.registry import dispatch
from tests import thorough
from tests.arrays import normal as numpy_normal
from tests.configs import BASE

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
BOTH = pytest.mark.parametrize("backend", ["xla", "interpret"])
LAYOUTS = ["nn", "nt", "tn", "tt"]
OPPOSITE_LAYOUTS = pytest.mark.parametrize("layout", thorough.cases(LAYOUTS, ["nt", "tn"]))  # gradients of them have the others
SMALL = dataclasses.replace(BASE, tile_m=64, tile_n=64, max_concurrent_steps=2, compute_warpgroups=1)


pytestmark = pytest.mark.usefixtures("no_races")


normal = functools.partial(numpy_normal, dtype=BF16)


def operands(layout: str, m: int, n: int, k: int, *lead: int) -> tuple[jax.Array, jax.Array]:
    a = normal(0, *lead, *((k, m) if layout[0] == "t" else (m, k)))
    b = normal(1, *lead, *((n, k) if layout[1] == "t" else (k, n)))
    return a, b


def call(layout: str, backend: str | None, **kwargs: Any) -> Callable[..., jax.Array]:
    return functools.partial(
        matmul,
        transpose_a=layout[0] == "t",
        transpose_b=layout[1] == "t",
        backend=backend,
        **kwargs,
    )


def float32_matmul(layout: str) -> Callable[..., jax.Array]:
    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = (x.mT if t == "t" else x for x, t in zip((a, b), layout))
        return jnp.matmul(a.astype(F32), b.astype(F32), precision="highest")

    return product


def tolerance(dtype: Any) -> float:
    return {BF16: 8e-3, F16: 1e-3, F32: 1e-4}[dtype]


# --- values


@BOTH
@pytest.mark.parametrize("layout", LAYOUTS)
def test_product_of_operands_as_they_are_stored(backend, layout, assert_near):
    a, b = operands(layout, 72, 136, 88)
    out = call(layout, backend)(a, b)
    assert out.dtype == BF16
    assert_near(out, float32_matmul(layout)(a, b), tolerance(BF16))


@BOTH
@pytest.mark.parametrize(("dtype", "out_dtype"), [(BF16, F32), (F16, F16), (F16, F32)], ids=lambda d: d.__name__)
def test_dtypes_of_inputs_and_output(backend, dtype, out_dtype, assert_near):
    a, b = normal(0, 72, 88, dtype=dtype), normal(1, 88, 136, dtype=dtype)
    out = matmul(a, b, out_dtype=out_dtype, backend=backend)
    assert out.dtype == out_dtype
    assert_near(out, float32_matmul("nn")(a, b), tolerance(out_dtype))


@pytest.mark.parametrize("out_dtype", [None, F32, "float32", np.float32, jnp.dtype("float32")])
def test_out_dtype_is_named_in_any_way_numpy_knows(out_dtype):
    a, b = operands("nn", 8, 8, 8)
    wanted = BF16 if out_dtype is None else F32
    assert matmul(a, b, out_dtype=out_dtype, backend="xla").dtype == wanted


@BOTH
def test_float32_output_keeps_what_rounding_to_bfloat16_loses(backend):
    a = jnp.ones((64, 320), BF16)
    b = jnp.ones((320, 64), BF16).at[0].set(2)
    out = matmul(a, b, out_dtype=F32, backend=backend)
    np.testing.assert_array_equal(out, np.full((64, 64), 321))  # not a bfloat16


@BOTH
def test_nan_and_infinity_stay_in_their_row_or_column(backend):
    a, b = operands("nn", 33, 72, 40)  # tails everywhere
    a = a.at[5, 7].set(jnp.nan).at[32, 39].set(jnp.inf)
    b = b.at[0, 71].set(-jnp.inf)
    out = np.asarray(matmul(a, b, backend=backend), np.float32)
    with np.errstate(invalid="ignore"):
        wanted = np.asarray(a, np.float32) @ np.asarray(b, np.float32)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(wanted))
    np.testing.assert_array_equal(np.isposinf(out), np.isposinf(wanted))
    np.testing.assert_array_equal(np.isneginf(out), np.isneginf(wanted))


@pytest.mark.parametrize("shape", [(0, 8, 8), (8, 0, 8), (8, 8, 0), (0, 0, 0)], ids=str)
def test_dimensions_of_zero_give_what_jnp_matmul_gives(shape):
    m, n, k = shape
    a, b = jnp.ones((m, k), BF16), jnp.ones((k, n), BF16)
    out, wanted = matmul(a, b), jnp.matmul(a, b)
    assert out.dtype == wanted.dtype
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_numpy_arrays_are_taken_as_jax_takes_them(dtype):
    a, b = np.ones((8, 16), dtype), np.ones((16, 8), dtype)
    out = matmul(a, b)
    assert out.dtype == jnp.matmul(a, b).dtype == F32
    np.testing.assert_array_equal(out, np.full((8, 8), 16))


def test_given_config_gives_the_same_values(assert_near):
    a, b = operands("nn", 130, 136, 72)
    out = matmul(a, b, config=SMALL, backend="interpret")
    assert_near(out, float32_matmul("nn")(a, b), tolerance(BF16))


# --- leading dimensions, as in jax.numpy.matmul

SHAPES = {  # a, b
    "rows of one product": ((2, 3, 24, 16), (16, 40)),
    "a batch": ((2, 3, 24, 16), (2, 3, 16, 40)),
    "a shared": ((24, 16), (3, 16, 40)),
    "batches that are broadcast": ((2, 1, 24, 16), (3, 16, 40)),
    "a vector a": ((16,), (16, 40)),
    "a vector a, a batch": ((16,), (3, 16, 40)),
    "a vector b": ((24, 16), (16,)),
    "vectors": ((16,), (16,)),
    "rows and a vector b": ((2, 24, 16), (16,)),
    "an empty batch": ((0, 24, 16), (0, 16, 40)),
    "no rows": ((2, 0, 16), (16, 40)),
    "nothing to sum": ((2, 24, 0), (0, 40)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_leading_dimensions_and_vectors_are_those_of_jnp(name):
    a, b = (normal(i, *shape) for i, shape in enumerate(SHAPES[name]))
    out, wanted = matmul(a, b, out_dtype=F32), jnp.matmul(a.astype(F32), b.astype(F32))
    assert out.dtype == F32
    assert out.shape == wanted.shape
    np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["tn", "nt"])
def test_batches_are_stored_transposed(layout, assert_near):
    a, b = operands(layout, 24, 40, 16, 2, 3)
    for x, y in ((a, b), (a[0, 0], b), (a, b[0, 0])):
        assert_near(call(layout, "xla")(x, y), float32_matmul(layout)(x, y), tolerance(BF16))


@pytest.mark.parametrize("name", ["rows of one product", "a batch", "a vector a, a batch"])
def test_leading_dimensions_through_the_kernel(name, assert_near):
    a, b = (normal(i, *shape) for i, shape in enumerate(SHAPES[name]))
    assert_near(matmul(a, b, backend="interpret"), jnp.matmul(a.astype(F32), b.astype(F32)), tolerance(BF16))


@pytest.mark.parametrize("shapes", [SHAPES["rows of one product"], SHAPES["a batch"], SHAPES["a shared"]], ids=str)
def test_leading_dimensions_are_one_launch_and_no_copy(shapes):
    a, b = (jax.ShapeDtypeStruct(shape, BF16) for shape in shapes)
    with gpu.target("h200"):
        text = jax.jit(call("nn", "mosaic")).trace(a, b).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1
    assert {op for op in re.findall(r"stablehlo\.(\w+)", text) if op != "custom_call"} <= {"reshape"}


@pytest.mark.parametrize("name", ["rows of one product", "a batch", "batches that are broadcast", "a vector b"])
def test_gradients_have_the_operands_leading_dimensions(name, assert_near):
    a, b = (normal(i, *shape) for i, shape in enumerate(SHAPES[name]))

    def gradients(product: Callable[..., jax.Array], *args: jax.Array) -> Any:
        return jax.grad(lambda a, b: (product(a, b).astype(F32) ** 2).sum(), argnums=(0, 1))(*args)

    wanted = gradients(jnp.matmul, a.astype(F32), b.astype(F32))
    for x, y in zip(gradients(matmul, a, b), wanted):
        assert_near(x, y, 3e-2)  # the product is rounded before it is squared, and sums over a batch add bfloat16s


# --- epilogues

ACTIVATED = [None, "relu", "silu", "gelu", "gelu_erf"]


def with_epilogue(activation: str | None, *arrays: jax.Array) -> jax.Array:
    a, b, bias, residual = (x.astype(F32) for x in arrays)
    functions = {None: lambda x: x, "relu": jax.nn.relu, "silu": jax.nn.silu, "gelu": jax.nn.gelu}
    functions["gelu_erf"] = functools.partial(jax.nn.gelu, approximate=False)
    return functions[activation](jnp.matmul(a, b, precision="highest") + bias) + residual


def ours(activation: str | None, backend: str, *arrays: jax.Array) -> jax.Array:
    a, b, bias, residual = arrays
    return matmul(a, b, bias=bias, activation=activation, residual=residual, backend=backend)


def layer(*lead: int) -> tuple[jax.Array, ...]:
    return normal(0, *lead, 72, 64), normal(1, 64, 136) / 8, normal(2, 136, dtype=F32), normal(3, *lead, 72, 136)


@pytest.mark.parametrize("activation", ACTIVATED)
def test_bias_is_added_before_the_activation_and_the_residual_after(activation, assert_near):
    assert_near(ours(activation, "xla", *layer()), with_epilogue(activation, *layer()), tolerance(BF16))


def test_epilogue_through_the_kernel_with_leading_dimensions(assert_near):
    assert_near(ours("gelu", "interpret", *layer(2)), with_epilogue("gelu", *layer(2)), tolerance(BF16))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float16", "float32", "float64"])
def test_a_bias_may_have_another_dtype_than_the_product(dtype):
    """The kernel loads a part of it for each tile, from an element on that is a multiple of eight."""
    a, b, *_ = layer()
    with jax.enable_x64(dtype == "float64"):
        bias = jnp.arange(b.shape[1]).astype(dtype)
        out = matmul(a, b, bias=bias, preferred_element_type=F32, backend="interpret")
    wanted = a.astype(F32) @ b.astype(F32) + np.asarray(bias, "float32")
    np.testing.assert_allclose(out, wanted, rtol=1e-3, atol=1e-3)


def test_residual_broadcasts_and_vectors_have_epilogues():
    a, b, bias, _ = layer()
    wanted = jax.nn.relu(a[0].astype(F32) @ b.astype(F32) + bias) + 1
    out = matmul(a[0], b, bias=bias, activation="relu", residual=jnp.ones((), F32), preferred_element_type=F32)
    np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("backend", "activation"), [*(("xla", f) for f in ACTIVATED), ("interpret", "silu")])
def test_gradients_of_an_epilogue_are_those_in_float32(backend, activation, assert_near):
    arrays, weights = layer(), normal(4, 72, 136, dtype=F32)

    def gradients(f: Callable[..., jax.Array], *args: jax.Array) -> Any:
        return jax.jit(jax.grad(lambda *args: (f(*args).astype(F32) * weights).sum(), argnums=(0, 1, 2, 3)))(*args)

    wanted = gradients(functools.partial(with_epilogue, activation), *(x.astype(F32) for x in arrays))
    for x, y, argument in zip(gradients(functools.partial(ours, activation, backend), *arrays), wanted, arrays):
        assert x.dtype == argument.dtype
        assert_near(x, y, 2e-2)  # the activation's argument and the cotangent are rounded to bfloat16


@pytest.mark.parametrize("backend", ["xla", "mosaic"])
def test_a_gradient_keeps_the_activations_argument_and_nothing_else_of_its_size(backend):
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in layer()]

    def kept(activation: str | None) -> list[tuple[int, ...]]:
        with gpu.target("h200"):
            _, vjp = jax.eval_shape(lambda *arrays: jax.vjp(functools.partial(ours, activation, backend), *arrays), *shapes)
        return [x.shape for x in jax.tree.leaves(vjp) if x.shape == (72, 136)]

    assert kept(None) == []
    assert kept("gelu") == [(72, 136)]


@pytest.mark.parametrize(
    "names", [["bias"], ["residual"], ["a"], ["a", "residual"], ["b", "bias"], ["a", "b", "bias", "residual"]]
)
def test_vmap_maps_any_of_the_arrays(names, assert_near):
    axes = tuple(0 if name in names else None for name in ("a", "b", "bias", "residual"))
    arrays = [jnp.stack([x, x[::-1]]) if axis == 0 else x for x, axis in zip(layer(), axes)]
    out = jax.vmap(functools.partial(ours, "silu", "xla"), axes)(*arrays)
    assert_near(out, jax.vmap(functools.partial(with_epilogue, "silu"), axes)(*arrays), tolerance(BF16))
    nested = jax.vmap(jax.vmap(functools.partial(ours, "silu", "xla"), axes), axes)
    twice = [jnp.stack([x, 2 * x]) if axis == 0 else x for x, axis in zip(arrays, axes)]
    wanted = jax.vmap(jax.vmap(functools.partial(with_epilogue, "silu"), axes), axes)(*twice)
    assert_near(nested(*twice), wanted, tolerance(BF16))


@pytest.mark.parametrize("function", [matmul, mgpu_ops.fp8_matmul, lambda a, b: mgpu_ops.gated_activation(matmul(a, b))])
def test_export_with_a_symbolic_number_of_rows(function):
    step = jax.jit(jax.value_and_grad(lambda a, b: jnp.sin(function(a, b)).sum(), (0, 1)))
    a, b = normal(0, 48, 32), normal(1, 32, 16)
    given = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("m"), 32), a.dtype), b
    found = jax.export.deserialize(jax.export.export(step)(*given).serialize()).call(a, b)
    for x, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(step(a, b))):
        np.testing.assert_allclose(x, wanted, rtol=1e-5, atol=1e-4)


def test_gradients_of_an_epilogue_through_shard_map(assert_near):
    a, b, bias, residual = layer()
    rows, whole = PartitionSpec("x"), PartitionSpec()
    specs = {"in_specs": (rows, whole, whole, rows), "out_specs": rows}
    sharded = jax.shard_map(functools.partial(ours, "gelu", "xla"), mesh=mesh(2), **specs)
    grads = jax.grad(lambda *args: sharded(*args).astype(F32).sum(), argnums=(0, 1, 2, 3))(a, b, bias, residual)
    wide = [x.astype(F32) for x in (a, b, bias, residual)]
    wanted = jax.grad(lambda *args: with_epilogue("gelu", *args).sum(), argnums=(0, 1, 2, 3))(*wide)
    for x, y in zip(grads, wanted):
        assert_near(x, y, 2e-2)


def with_norm(a: jax.Array, b: jax.Array, bias: jax.Array, residual: jax.Array) -> jax.Array:
    rows = a.astype(F32)
    rows = rows / jnp.sqrt(jnp.mean(rows * rows, -1, keepdims=True) + 0.25)
    return jnp.matmul(rows, b.astype(F32), precision="highest") + bias.astype(F32) + residual.astype(F32)


def ours_with_norm(*arrays: jax.Array, backend: str = "xla") -> jax.Array:
    a, b, bias, residual = arrays
    return matmul(a, b, bias=bias, residual=residual, rms_epsilon=0.25, backend=backend)


@pytest.mark.parametrize("lead", [(), (2,)], ids=str)
def test_rows_are_divided_by_their_root_mean_square_before_the_product(lead, assert_near):
    assert_near(ours_with_norm(*layer(*lead)), with_norm(*layer(*lead)), 1.5 * tolerance(BF16))


def test_gradients_of_a_product_of_normalised_rows_are_those_in_float32(assert_near):
    arrays, weights = layer(), normal(4, 72, 136, dtype=F32)

    def gradients(f: Callable[..., jax.Array], *args: jax.Array) -> Any:
        return jax.jit(jax.grad(lambda *args: (f(*args).astype(F32) * weights).sum(), argnums=(0, 1, 2, 3)))(*args)

    wanted = gradients(with_norm, *(x.astype(F32) for x in arrays))
    for x, y, argument in zip(gradients(ours_with_norm, *arrays), wanted, arrays):
        assert x.dtype == argument.dtype
        assert_near(x, y, 2e-2)


@pytest.mark.parametrize("m", [128, 4096])
def test_what_was_measured_for_a_plain_product_counts_for_it_with_an_epilogue(m):
    """The config, and whether XLA is faster: not what models say of them."""
    plain = MatmulProblem(m, 4096, 4096)
    fused = replace(plain, bias=True, activation="gelu")
    tuned = mgpu_ops.explain("matmul", plain, gpu="h200").splitlines()
    found = mgpu_ops.explain("matmul", fused, gpu="h200").splitlines()
    assert "near, distance 0.1: measured" in found[3]
    assert found[1:3] == tuned[1:3]
    assert "measured" in found[1]


def test_an_entry_of_a_plain_product_that_a_residual_does_not_run_with_is_passed_over():
    text = mgpu_ops.explain("matmul", MatmulProblem(4096, 4096, 4096, layout="tn", residual=True), gpu="h200")
    assert re.search(r"near: .*passed over: schedule='deferred' does not run with this residual", text)


# --- transforms


@BOTH
@OPPOSITE_LAYOUTS
def test_gradients_are_those_of_a_float32_product(backend, layout, assert_near):
    a, b = operands(layout, 72, 136, 88)
    weights = normal(2, 72, 136)

    def gradients(product: Callable[..., jax.Array], *args: jax.Array) -> Any:
        loss = lambda a, b: (product(a, b).astype(F32) * weights.astype(F32)).sum()  # noqa: E731
        return jax.jit(jax.grad(loss, argnums=(0, 1)))(*args)

    ours = gradients(call(layout, backend), a, b)
    wanted = gradients(float32_matmul(layout), a.astype(F32), b.astype(F32))
    for x, y, argument in zip(ours, wanted, (a, b)):
        assert x.dtype == argument.dtype
        assert_near(x, y, tolerance(BF16))


@BOTH
def test_gradients_of_a_float32_output_have_the_inputs_dtype(backend, assert_near):
    a, b = operands("nn", 64, 64, 72)
    loss = lambda a, b: matmul(a, b, out_dtype=F32, backend=backend).sum()  # noqa: E731
    da, db = jax.grad(loss, argnums=(0, 1))(a, b)
    assert da.dtype == db.dtype == BF16
    assert_near(da, np.broadcast_to(np.asarray(b, np.float64).sum(1), a.shape), tolerance(BF16))
    assert_near(db, np.broadcast_to(np.asarray(a, np.float64).sum(0)[:, None], b.shape), 8e-3)


VMAPS = {  # in_axes, out_axes, axes of a and b before m, k, n
    "a": ((0, None), 0, "a"),
    "b": ((None, 0), 0, "b"),
    "both": ((0, 0), 0, "ab"),
    "a, last axis": ((2, None), 1, "a"),
    "b, middle axis": ((None, 1), 2, "b"),
    "both, different axes": ((1, 2), 1, "ab"),
    "negative axes": ((-1, -2), -1, "ab"),
}


@OPPOSITE_LAYOUTS
@pytest.mark.parametrize("name", VMAPS)
def test_vmap_maps_any_axis_of_either_operand(name, layout, assert_near):
    in_axes, out_axes, batched = VMAPS[name]
    a, b = operands(layout, 24, 40, 16, 3)
    a = jnp.moveaxis(a, 0, in_axes[0]) if "a" in batched else a[0]
    b = jnp.moveaxis(b, 0, in_axes[1]) if "b" in batched else b[0]
    out = jax.vmap(call(layout, "xla"), in_axes, out_axes)(a, b)
    wanted = jax.vmap(float32_matmul(layout), in_axes, out_axes)(a, b)
    assert_near(out, wanted, tolerance(BF16))


@pytest.mark.parametrize("name", ["a", "b", "both, different axes"])
def test_vmap_through_the_kernel(name, assert_near):
    in_axes, out_axes, batched = VMAPS[name]
    a, b = operands("nn", 33, 72, 40, 3)
    a = jnp.moveaxis(a, 0, in_axes[0]) if "a" in batched else a[0]
    b = jnp.moveaxis(b, 0, in_axes[1]) if "b" in batched else b[0]
    out = jax.vmap(call("nn", "interpret"), in_axes, out_axes)(a, b)
    wanted = jax.vmap(float32_matmul("nn"), in_axes, out_axes)(a, b)
    assert_near(out, wanted, tolerance(BF16))


@OPPOSITE_LAYOUTS
@pytest.mark.parametrize("name", ["a", "b", "both"])
def test_vmap_of_a_float32_output(name, layout, assert_near):
    in_axes, _, batched = VMAPS[name]
    a, b = (x if n in batched else x[0] for n, x in zip("ab", operands(layout, 24, 40, 16, 3)))
    out = jax.vmap(call(layout, "xla", out_dtype=F32), in_axes)(a, b)
    wanted = jax.vmap(float32_matmul(layout), in_axes)(a, b)
    assert_near(out, wanted, tolerance(F32))


NESTED = {  # in_axes of the outer and of the inner vmap, leading axes of a and b
    "both, both": ((0, 0), (0, 0), (2, 3), (2, 3)),
    "outer a, inner b": ((0, None), (None, 0), (2,), (3,)),
    "outer b, inner a": ((None, 0), (0, None), (3,), (2,)),
    "a twice": ((0, None), (0, None), (2, 3), ()),
    "b twice": ((None, 0), (None, 0), (), (2, 3)),
    "both, then a": ((0, 0), (0, None), (2, 3), (2,)),
    "a, then both": ((0, None), (0, 0), (2, 3), (3,)),
    "b, then both": ((None, 0), (0, 0), (3,), (2, 3)),
}


@OPPOSITE_LAYOUTS
@pytest.mark.parametrize("name", NESTED)
def test_nested_vmap(name, layout, assert_near):
    outer, inner, lead_a, lead_b = NESTED[name]
    a, b = operands(layout, 24, 40, 16, *lead_a)[0], operands(layout, 24, 40, 16, *lead_b)[1]
    out = jax.vmap(jax.vmap(call(layout, "xla"), inner), outer)(a, b)
    wanted = jax.vmap(jax.vmap(float32_matmul(layout), inner), outer)(a, b)
    assert_near(out, wanted, tolerance(BF16))


def test_nested_vmap_through_the_kernel(assert_near):
    a, b = normal(0, 2, 33, 40), normal(1, 2, 3, 40, 72)
    run = lambda f: jax.vmap(jax.vmap(f, (None, 0)))(a, b)  # noqa: E731
    assert_near(run(call("nn", "interpret")), run(float32_matmul("nn")), tolerance(BF16))


@pytest.mark.parametrize("name", ["a", "b", "both", "both, different axes"])
@OPPOSITE_LAYOUTS
def test_gradients_of_a_vmap(name, layout, assert_near):
    in_axes, _, batched = VMAPS[name]
    a, b = operands(layout, 24, 40, 16, 3)
    a = jnp.moveaxis(a, 0, in_axes[0]) if "a" in batched else a[0]
    b = jnp.moveaxis(b, 0, in_axes[1]) if "b" in batched else b[0]
    weights = normal(2, 3, 24, 40)

    def gradients(product: Callable[..., jax.Array], *args: jax.Array) -> Any:
        def loss(a: jax.Array, b: jax.Array) -> jax.Array:
            return (jax.vmap(product, in_axes)(a, b).astype(F32) * weights.astype(F32)).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(*args)

    wanted = gradients(float32_matmul(layout), a.astype(F32), b.astype(F32))
    for x, y in zip(gradients(call(layout, "xla"), a, b), wanted):
        assert_near(x, y, 1.5e-2)  # the sum over the batch of what is shared adds bfloat16s


def test_gradients_of_a_vmap_through_the_kernel(assert_near):
    a, b = operands("nn", 24, 40, 16, 2)

    def gradients(product: Callable[..., jax.Array], *args: jax.Array) -> Any:
        loss = lambda a, b: jax.vmap(product)(a, b).astype(F32).sum()  # noqa: E731
        return jax.jit(jax.grad(loss, argnums=(0, 1)))(*args)

    wanted = gradients(float32_matmul("nn"), a.astype(F32), b.astype(F32))
    for x, y in zip(gradients(call("nn", "interpret"), a, b), wanted):
        assert_near(x, y, tolerance(BF16))


def layers(product: Any, step: Any, x: jax.Array, weights: jax.Array) -> jax.Array:
    body = step(lambda x, w: (product(x, w), None))
    return jax.lax.scan(body, x, weights)[0].astype(F32).sum()


def same(f: Any) -> Any:
    return f


# JAX has no checkpoint of what has effects, and the interpreter's callbacks are that.
@pytest.mark.parametrize(("backend", "step"), [("xla", jax.checkpoint), ("xla", same), ("interpret", same)])
def test_gradients_through_scan_and_checkpoint(backend, step, assert_near):
    weights = normal(0, 3, 64, 64) / 8
    x = normal(1, 64, 64)

    def run(product: Any, dtype: Any) -> Any:
        loss = jax.value_and_grad(functools.partial(layers, product, step), argnums=(0, 1))
        return jax.jit(loss)(x.astype(dtype), weights.astype(dtype))

    value, grads = run(call("nn", backend), BF16)
    wanted, wanted_grads = run(float32_matmul("nn"), F32)
    assert abs(value - wanted) < 0.05 * np.sqrt(64 * 64)
    for g, w in zip(grads, wanted_grads):
        assert_near(g, w, 4e-2)  # three layers of roundings


@BOTH
def test_eager_and_jitted_calls_agree(backend, assert_near):
    a, b = operands("nn", 33, 72, 40)
    f = call("nn", backend)
    assert_near(f(a, b), jax.jit(f)(a, b), 1e-2)


@OPPOSITE_LAYOUTS
@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (0, 0)])
def test_vmap_is_one_launch(in_axes, layout):
    """Of the operands as they are: none is copied, not even one that all products share."""
    a, b = operands(layout, 72, 64, 64, 5)
    a, b = (x if axis == 0 else x[0] for x, axis in zip((a, b), in_axes))
    with gpu.target("h200"):
        mapped = jax.jit(jax.vmap(call(layout, "mosaic"), in_axes))
        text = mapped.trace(a, b).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1
    assert {op for op in re.findall(r"stablehlo\.(\w+)", text) if op != "custom_call"} <= {"reshape"}


@pytest.mark.parametrize("layout", ["nn", "tn"])
def test_vmap_of_a_gradient_is_a_launch_for_each_operand(layout):
    a, b = operands(layout, 72, 64, 64, 5)

    def loss(a, b):
        return call(layout, "mosaic")(a, b).sum()

    with gpu.target("h200"):
        text = jax.jit(jax.vmap(jax.grad(loss, (0, 1)))).trace(a, b).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 2  # the product itself is not used
    assert "stablehlo.while" not in text


# --- several devices


def mesh(devices: int) -> jax.sharding.Mesh:
    return jax.make_mesh((devices,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


ROWS = {"in_specs": (PartitionSpec("x"), PartitionSpec()), "out_specs": PartitionSpec("x")}
DEPTH = {
    "in_specs": (PartitionSpec(None, "x"), PartitionSpec("x")),
    "out_specs": PartitionSpec(),
}
PLACES = pytest.mark.parametrize(("backend", "devices"), [("xla", 8), ("interpret", 1), ("interpret", 2)])


def sharded_rows(backend: str | None, devices: int) -> Callable[..., jax.Array]:
    return jax.jit(jax.shard_map(call("nn", backend), mesh=mesh(devices), **ROWS))


def sharded_depth(backend: str | None, devices: int) -> Callable[..., jax.Array]:
    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.psum(matmul(a, b, out_dtype=F32, backend=backend), "x")

    return jax.jit(jax.shard_map(product, mesh=mesh(devices), **DEPTH))


@PLACES
@pytest.mark.parametrize("sharded", [sharded_rows, sharded_depth])
def test_shard_map_over_rows_and_over_the_contraction(sharded, backend, devices, assert_near):
    a, b = operands("nn", 64, 72, 128)
    out = sharded(backend, devices)(a, b)
    assert_near(out, float32_matmul("nn")(a, b), tolerance(BF16))


@PLACES
@pytest.mark.parametrize("sharded", [sharded_rows, sharded_depth])
def test_gradients_through_shard_map(sharded, backend, devices, assert_near):
    a, b = operands("nn", 64, 72, 128)

    def gradients(f: Any, *args: jax.Array) -> Any:
        return jax.grad(lambda a, b: f(a, b).astype(F32).sum(), argnums=(0, 1))(*args)

    ours = gradients(sharded(backend, devices), a, b)
    wanted = gradients(float32_matmul("nn"), a.astype(F32), b.astype(F32))
    for x, y in zip(ours, wanted):
        assert_near(x, y, 1.5e-2)


@pytest.mark.parametrize("backend", ["xla", "mosaic"])
def test_output_varies_over_the_mesh_axes_that_either_operand_varies_over(backend):
    """Else shard_map would take an output that differs between devices for a replicated one."""
    seen = []

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        seen.append(jax.typeof(matmul(a, b, backend=backend)).manual_axis_type.varying)
        return a

    abstract = AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (PartitionSpec("x"), PartitionSpec()), "out_specs": PartitionSpec("x")}
    with gpu.target("h200"):
        a, b = operands("nn", 128, 64, 64)
        jax.eval_shape(jax.shard_map(product, mesh=abstract, **specs), a, b)
    assert seen == [{"x"}]


@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
@pytest.mark.parametrize("axis", ["x", "cluster", "wg", "block"])
def test_kernel_compiles_in_a_shard_map_whose_axis_has_any_name(axis):
    abstract = AbstractMesh((2,), (axis,), axis_types=(AxisType.Auto,))
    rows = PartitionSpec(axis)
    f = jax.shard_map(call("nn", "mosaic"), mesh=abstract, in_specs=(rows, PartitionSpec()), out_specs=rows)
    shape = jax.ShapeDtypeStruct((256, 256), BF16)
    (kernel,) = aot.compile_for("h200", f, shape, shape, devices=2).kernels
    assert "HGMMA" in kernel.sass


# --- which config runs


@pytest.fixture
def configs_that_run(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The config of every kernel that is traced from now on; the kernel itself is XLA's product."""
    module = importlib.import_module("mgpu_ops.matmul")
    seen: list[Any] = []

    def run(problem: Any, config: Any, device: Any, *arrays: Any, interpret: bool) -> jax.Array:
        seen.append(config)
        return module.reference(problem, *arrays)

    jax.clear_caches()
    monkeypatch.setattr(module, "SPEC", replace(module.SPEC, run=run))
    yield seen
    jax.clear_caches()


OTHER = replace(SMALL, max_concurrent_steps=5)
THIRD = replace(SMALL, raster_width=1)


def test_use_configs_retraces_and_ends_with_its_block(configs_that_run):
    a, b = operands("nn", 24, 40, 16)
    f = jax.jit(functools.partial(matmul, backend="mosaic"))
    with gpu.target("h20"):
        f(a, b)
        with use_configs({"matmul": OTHER}):
            f(a, b)
            f(a, b)  # traced already
            with use_configs({"matmul": THIRD}):
                f(a, b)
            f(a, b)
        f(a, b)
    first, *rest = configs_that_run
    assert first not in (OTHER, THIRD)
    assert rest == [OTHER, THIRD]


def test_use_configs_names_the_ops_that_there_are():
    with pytest.raises(ValueError, match="op 'matmull' is not one of matmul, gated_matmul"), use_configs({"matmull": OTHER}):
        pass


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (mgpu_ops.RmsNormConfig(1, 1), "takes a mgpu_ops.MatmulConfig, not a mgpu_ops.RmsNormConfig, Config(blocks=1, "),
        ([(mgpu_ops.RmsNormProblem(1, 1), SMALL)], "takes a mgpu_ops.MatmulProblem, not a mgpu_ops.RmsNormProblem, Problem("),
        ([(mgpu_ops.RmsNormProblem(1, 1), "xla")], "takes a mgpu_ops.MatmulProblem, not a mgpu_ops.RmsNormProblem, Problem("),
        ([(MatmulProblem(8, 8, 8), mgpu_ops.RmsNormConfig(1, 1))], "takes a mgpu_ops.MatmulConfig, not a mgpu_ops.RmsNormC"),
        (mgpu_ops.MatmulConfig, "takes a mgpu_ops.MatmulConfig, not a type, <class "),
        (8, "takes a Config or [(Problem, Config)], not 8"),
    ],
)
def test_use_configs_refuses_at_once_what_is_of_another_op(answer, told):
    with pytest.raises(TypeError, match=f"^use_configs: matmul {re.escape(told)}"):
        use_configs({"matmul": answer})


def test_use_configs_can_name_one_problem(configs_that_run):
    with gpu.target("h20"), use_configs({"matmul": [(MatmulProblem(24, 40, 16), OTHER)]}):
        matmul(*operands("nn", 24, 40, 16), backend="mosaic")
        matmul(*operands("nn", 24, 40, 24), backend="mosaic")
    first, second = configs_that_run
    assert first == OTHER
    assert second != OTHER


def test_argument_comes_before_use_configs(configs_that_run):
    with gpu.target("h20"), use_configs({"matmul": OTHER}):
        matmul(*operands("nn", 24, 40, 16), config=THIRD)
    assert configs_that_run == [THIRD]


def test_config_of_the_forward_pass_is_not_used_for_the_backward_pass(configs_that_run):
    with gpu.target("h20"):
        jax.grad(lambda a, b: matmul(a, b, config=OTHER, backend="mosaic").sum())(*operands("nn", 24, 40, 16))
    forward, *backward = configs_that_run
    assert forward == OTHER
    assert backward
    assert OTHER not in backward


def test_use_configs_changes_the_lowered_kernel():
    a, b = operands("nn", 128, 128, 128)

    def lowered() -> str:
        with gpu.target("h200"):
            traced = jax.jit(call("nn", "mosaic")).trace(a, b)
            return traced.lower(lowering_platforms=("cuda",)).as_text()

    texts = []
    for config in (SMALL, OTHER):
        with use_configs({"matmul": config}):
            texts.append(lowered())
    assert texts[0] != texts[1]


def test_config_that_cannot_run_raises_at_the_call_with_its_reason():
    a, b = operands("nn", 64, 64, 64)
    for value, reason in ((100, "100"), ("64", "tile_m='64' of Config must be of type int, not str")):
        bad = replace(SMALL, tile_m=value)
        for where in ("argument", "override"):
            with (
                pytest.raises(ValueError, match=rf"(?s)tile_m={value!r}.*from {where} cannot run .*m=64.*{reason}"),
                use_configs({"matmul": bad} if where == "override" else {}),
            ):
                matmul(a, b, config=bad if where == "argument" else None, backend="interpret")


# --- explain


def test_explain_names_the_config_and_where_it_is_from():
    problem = MatmulProblem(4096, 4096, 4096)
    config = mgpu_ops.SPECS["matmul"].default(problem, gpu.find("h200"))
    with use_configs({"matmul": config}):
        text = mgpu_ops.explain("matmul", problem, gpu="h200")
    assert str(config) in text
    assert "from      override" in text
    assert "on h200" in text


def test_explain_takes_the_problem_as_a_mapping():
    wanted = mgpu_ops.explain("matmul", MatmulProblem(4096, 4096, 4096), gpu="NVIDIA H200")
    assert mgpu_ops.explain("matmul", {"m": 4096, "n": 4096, "k": 4096}, gpu="h200") == wanted


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("matmull", {}), "op 'matmull' is not one of matmul"),
        (("matmul", {"m": 1, "n": 8}), "is no matmul problem: it needs k too"),
        (("matmul", {"m": 1, "n": 8, "k": 8, "rows": 2}), "rows"),
        (("matmul", {"m": "1", "n": 8, "k": 8}), "m"),
        (("matmul", MatmulProblem(8, 8, 8)), "name one, e.g. gpu='h200'"),
        (("matmul", MatmulProblem(8, 8, 8), "h300"), "gpu='h300' is not a GPU in the table"),
    ],
)
def test_explain_says_what_is_wrong_with_its_arguments(args, message):
    with pytest.raises(ValueError, match=message):
        mgpu_ops.explain(*args)


# --- backends


def test_environment_names_the_backend_and_the_argument_overrides_it(monkeypatch):
    a, b = operands("nn", 64, 64, 8)
    monkeypatch.setenv("MGPU_OPS_BACKEND", "interpret")
    matmul(a, b, backend="xla")
    with pytest.raises(RuntimeError, match="no kernel was interpreted"):
        engine.races_found()
    matmul(a, b).block_until_ready()
    assert not engine.races_found()


def test_why_xla_runs_is_logged_once_per_reason(caplog, monkeypatch):
    monkeypatch.setattr(dispatch, "_said", set())
    with caplog.at_level(logging.WARNING, "mgpu_ops"):
        for m in (3, 5, 7):  # a shape is traced once; three shapes ask three times
            matmul(*operands("nn", m, 8, 8))
        with gpu.target("h200"):
            for m in (3, 5, 7):
                matmul(*operands("nn", m, 8, 8), out_dtype=F16)
        with gpu.target("b200"):
            for m in (3, 5, 7):
                matmul(*operands("nn", m, 8, 8))
    first, second, third = (record.getMessage() for record in caplog.records)
    assert first == "matmul runs through XLA: no NVIDIA GPU is in use"
    assert "out_dtype float16 is neither the inputs' bfloat16 nor float32" in second
    assert "NVIDIA B200 is not a Hopper GPU" in third


def test_named_xla_is_not_worth_a_log(caplog, monkeypatch):
    monkeypatch.setattr(dispatch, "_said", set())
    with caplog.at_level(logging.WARNING, "mgpu_ops"):
        matmul(*operands("nn", 3, 16, 8), backend="xla")
    assert not caplog.records


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_wide_floats_run_through_xla(dtype, assert_near):
    with jax.enable_x64(True):
        a, b = normal(0, 24, 16, dtype=dtype), normal(1, 16, 40, dtype=dtype)
        out = matmul(a, b)
        assert out.dtype == dtype
        grads = jax.grad(lambda a, b: matmul(a, b).sum(), argnums=(0, 1))(a, b)
    wanted = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    assert_near(out, wanted, {"float32": 1e-5, "float64": 1e-13}[dtype])
    assert [g.dtype for g in grads] == [dtype, dtype]


# --- errors: the value, the rule, the way out

X = jax.ShapeDtypeStruct


@pytest.mark.parametrize(
    ("a", "b", "kwargs", "error", "message"),
    [
        (X((), BF16), X((8, 8), BF16), {}, ValueError, "a is a scalar: matmul takes arrays of rank 1 or more; multiply by it"),
        (X((8,), BF16), X((8, 8), BF16), {"transpose_a": True}, ValueError, r"transpose_a=True.*a vector has no transpose"),
        (X((3, 8, 8), BF16), X((2, 8, 8), BF16), {}, ValueError, r"a\(3, 8, 8\) and b\(2, 8, 8\) do not broadcast"),
        (
            X((8, 8), BF16),
            X((8, 8), BF16),
            {"bias": np.ones(4)},
            ValueError,
            r"bias has shape \(4,\): it must be \[n\] = \(8,\)",
        ),
        (X((8, 8), BF16), X((8, 8), BF16), {"bias": 1.0}, ValueError, r"bias has shape \(\): it must be \[n\] = \(8,\)"),
        (X((8, 8), BF16), X((8, 8), BF16), {"bias": 2**70}, TypeError, "bias is 118.*, which is no array: matmul takes"),
        (X((8, 8), BF16), X((8, 8), BF16), {"residual": "x"}, TypeError, "residual is 'x', which is no array: matmul takes"),
        (X((8, 8), BF16), X((8, 8), BF16), {"out_dtype": "bf"}, TypeError, "out_dtype='bf' is no dtype: name a float's, such"),
        (X((8, 8), BF16), X((8, 8), BF16), {"bias": np.ones(8, int)}, TypeError, "bias has dtype int.*cast it first"),
        (X((8, 8), BF16), X((8, 8), BF16), {"activation": "swish"}, ValueError, "activation='swish' is not one of none, relu"),
        (
            X((8, 8), BF16),
            X((8, 8), BF16),
            {"residual": np.ones((8, 8), np.float32)},
            ValueError,
            "residual is float32 and the result bfloat16: cast it, or pass its dtype as out_dtype",
        ),
        (
            X((8, 8), F32),
            X((8, 8), F32),
            {"residual": np.ones((2, 8, 8), np.float32)},
            ValueError,
            r"residual has shape \(2, 8, 8\): it must broadcast to the result's, \(8, 8\)",
        ),
        (
            X((8, 8), BF16),
            X((8, 8), BF16),
            {"out_dtype": F32, "preferred_element_type": BF16},
            ValueError,
            "out_dtype=float32 and preferred_element_type=bfloat16 are one argument",
        ),
        (X((8, 8), BF16), X((8, 8), BF16), {"rms_epsilon": -1.0}, ValueError, "rms_epsilon=-1.0 must be a finite number of at"),
        (X((8, 8), BF16), X((8, 8), BF16), {"rms_epsilon": "x"}, TypeError, "rms_epsilon='x' is no Python number"),
        (
            X((8, 8), BF16),
            X((8, 8), BF16),
            {"rms_epsilon": 1, "transpose_a": True},
            ValueError,
            "m, k., without scales",
        ),
        (X((8, 16), BF16), X((24, 8), BF16), {}, ValueError, r"\(8, 16\).*\(24, 8\).*k: 16 != 24"),
        (
            X((8, 16), BF16),
            X((16, 8), BF16),
            {"transpose_a": True},
            ValueError,
            "k: 8 != 16.*transpose_a=True",
        ),
        (
            X((8, 16), BF16),
            X((16, 8), BF16),
            {"transpose_b": True},
            ValueError,
            "k: 16 != 8.*transpose_b=True",
        ),
        (
            X((8, 8), BF16),
            X((8, 8), F16),
            {},
            ValueError,
            "a is bfloat16 and b is float16: cast one with .astype",
        ),
        (X((8, 8), jnp.int32), X((8, 8), BF16), {}, TypeError, "a has dtype int32.*cast it first"),
        (X((8, 8), BF16), X((8, 8), jnp.int8), {}, ValueError, "a is bfloat16 and b is int8: cast one with .astype"),
        (X((8, 8), bool), X((8, 8), bool), {}, TypeError, "a has dtype bool.*cast it first"),
        (X((8, 8), "complex64"), X((8, 8), "complex64"), {}, TypeError, "complex64: matmul takes"),
        (
            X((8, 8), BF16),
            X((8, 8), BF16),
            {"out_dtype": jnp.int32},
            TypeError,
            "out_dtype int32 is not a float: cast the result",
        ),
        (
            X((8, 8), BF16),
            X((8, 8), BF16),
            {"config": {"tile_m": 64}},
            TypeError,
            r"config is \{'tile_m': 64\}: pass a mgpu_ops.MatmulConfig",
        ),
        (
            X((8, 8), BF16),
            X((8, 8), BF16),
            {"backend": "cuda"},
            ValueError,
            "backend='cuda' is not one of mosaic, interpret, xla",
        ),
        (
            X((8, 8), BF16),
            X((8, 8), BF16),
            {"backend": "mosaic"},
            ValueError,
            "backend='mosaic' cannot run matmul.*no NVIDIA GPU is in use",
        ),
        (
            X((8, 8), BF16),
            X((8, 100), BF16),
            {"backend": "interpret"},
            ValueError,
            "n=100 needs 16-byte rows of b.*pad to 104 or pass backend='xla'",
        ),
        (
            X((8, 100), BF16),
            X((100, 8), BF16),
            {"backend": "interpret"},
            ValueError,
            "k=100 needs 16-byte rows of a.*pad to 104 or pass backend='xla'",
        ),
        (
            X((8, 100), BF16),
            X((8, 8), BF16),
            {"backend": "interpret", "transpose_a": True},
            ValueError,
            "m=100 needs 16-byte rows of a.*pad to 104 or pass backend='xla'",
        ),
        (
            X((8, 8), F32),
            X((8, 8), F32),
            {"backend": "interpret", "out_dtype": BF16},
            ValueError,
            "out_dtype bfloat16 of float32 operands is not float32: cast the result, or use backend='xla'",
        ),
        (
            X((8, 8), BF16),
            X((8, 8), BF16),
            {"backend": "interpret", "out_dtype": F16},
            ValueError,
            "out_dtype float16 is neither.*bfloat16 nor float32: cast the result, or use",
        ),
        (
            X((0, 8), BF16),
            X((8, 8), BF16),
            {"backend": "interpret"},
            ValueError,
            "m=0.*zero: there is nothing to compute",
        ),
    ],
)
def test_error_names_the_value_the_rule_and_the_way_out(a, b, kwargs, error, message):
    a, b = (jnp.zeros(x.shape, x.dtype) for x in (a, b))
    with pytest.raises(error, match=f"(?s){message}"):
        matmul(a, b, **kwargs)


@pytest.mark.parametrize(
    ("a", "message"),
    [
        (None, "^a is None, which is no array: matmul takes arrays of floats$"),
        ("w", "^a is 'w', which is no array"),
        ([[1.0], [2.0, 3.0]], r"^a is \[\[1.0\], \[2.0, 3.0\]\], which is no array"),
        (X((8, 2), BF16), "^a is ShapeDtypeStruct.*which is no array: .*; jax.eval_shape takes shapes$"),
    ],
    ids=["None", "str", "ragged", "shape"],
)
def test_what_is_no_array_is_a_type_error_that_names_it(a, message):
    with pytest.raises(TypeError, match=message):
        matmul(a, jnp.ones((2, 8), BF16))


def test_an_array_of_another_byte_order_is_told_so_with_a_way_out_that_works():
    other = np.dtype("f4").newbyteorder()
    a, b = np.ones((3, 5), other), np.ones((5, 4), np.float32)
    with pytest.raises(TypeError, match=f"^a has dtype {other.str}, bytes in another order than this machine's: pass a.astype"):
        matmul(a, b)
    with pytest.raises(TypeError, match=r'pass bias.astype\(bias.dtype.newbyteorder\("="\)\)$'):
        matmul(b.T, b, bias=np.ones(4, other))
    np.testing.assert_array_equal(matmul(a.astype(a.dtype.newbyteorder("=")), b), np.full((3, 4), 5.0))


def test_unknown_backend_of_the_environment_is_named_as_such(monkeypatch):
    monkeypatch.setenv("MGPU_OPS_BACKEND", "triton")
    with pytest.raises(ValueError, match="MGPU_OPS_BACKEND='triton' is not one of mosaic"):
        matmul(*operands("nn", 8, 8, 8))


def test_float64_through_the_kernel_is_an_error_that_says_what_to_do():
    with jax.enable_x64(True), gpu.target("h200"):
        a = jnp.zeros((8, 8), "float64")
        with pytest.raises(ValueError, match=r"dtype float64 is not one of.*backend='xla'"):
            matmul(a, a, backend="mosaic")


def test_kernel_on_a_gpu_of_another_architecture_is_an_error():
    with gpu.target("b200"), pytest.raises(ValueError, match="B200 is not a Hopper GPU"):
        matmul(*operands("nn", 8, 8, 8), backend="mosaic")


def test_forward_mode_is_refused_rather_than_wrong():
    a, b = operands("nn", 8, 8, 8)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(matmul, (a, b), (a, b))
