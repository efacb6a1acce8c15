"""gated_mlp: values, gradients and transforms, through XLA and the kernels interpreted, and what it keeps and writes."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from mgpu_ops import GatedMatmulProblem, capture, explain, gated_mlp, spec_of
from mgpu_ops.core import gpu
from mgpu_ops.core.activations import activate
from tests import thorough
from tests.arrays import normal

BF16, F32 = jnp.bfloat16, jnp.float32


def layer(*lead: int) -> tuple[jax.Array, ...]:
    """x, the weights and a residual."""
    weights = (normal(1, 64, 136, dtype=BF16) / 8, normal(2, 64, 136, dtype=BF16) / 8, normal(3, 136, 64, dtype=BF16) / 12)
    return normal(0, *lead, 72, 64, dtype=BF16), *weights, normal(4, *lead, 72, 64, dtype=BF16)


def written_out(activation: str, *arrays: jax.Array) -> jax.Array:
    x, w_gate, w_up, w_down, *residual = (a.astype(F32) for a in arrays)
    product = functools.partial(jnp.matmul, precision="highest")
    out = product(activate(activation, product(x, w_gate)) * product(x, w_up), w_down)
    return out + residual[0] if residual else out


def ours(*arrays: jax.Array, **options: Any) -> jax.Array:
    return gated_mlp(*arrays[:4], residual=arrays[4] if len(arrays) > 4 else None, **options)


def gradients(f: Callable[..., jax.Array], *args: jax.Array) -> Any:
    weights = normal(5, *args[0].shape[:-1], 64)
    loss = lambda *a: (f(*a).astype(F32) * weights).sum()  # noqa: E731
    return jax.jit(jax.value_and_grad(loss, argnums=tuple(range(len(args)))))(*args)


@pytest.mark.usefixtures("no_races")
@pytest.mark.parametrize(
    ("backend", "activation", "lead", "residual"),
    [
        ("xla", "silu", (2,), True),
        pytest.param("xla", "gelu", (), False, marks=thorough.only_in_all),
        pytest.param("interpret", "silu", (), True, marks=thorough.only_in_all),
    ],
)
def test_result_and_gradients_are_those_in_float32(backend, activation, lead, residual, assert_near):
    arrays = layer(*lead)[: 5 if residual else 4]
    value, found = gradients(functools.partial(ours, activation=activation, backend=backend), *arrays)
    wanted_value, wanted = gradients(functools.partial(written_out, activation), *(a.astype(F32) for a in arrays))
    assert_near(ours(*arrays, activation=activation, backend=backend), written_out(activation, *arrays), 1.5e-2)
    assert_near(value, wanted_value, 1e-2)
    for y, z, argument in zip(found, wanted, arrays, strict=True):
        assert (y.dtype, y.shape) == (argument.dtype, argument.shape)
        assert_near(y, z, 3e-2)  # gate, up, their gradients and their product are rounded to bfloat16


def test_gradients_are_eight_kernels_and_nothing_between_them():
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in layer()]
    with gpu.target("h200"):
        step = jax.jit(lambda g, *arrays: jax.vjp(functools.partial(ours, backend="mosaic"), *arrays)[1](g))
        text = step.trace(shapes[0], *shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert "output_operand_alias" in text  # the gradients of gate and up take the place of these
    assert set(re.findall(r"(?<!#)stablehlo\.(\w+)", text)) <= {"custom_call", "reshape", "optimization_barrier"}
    found = capture(step, gpu="h200")(shapes[0], *shapes)
    gate, gradient = (p.problem for p in found.problems if p.op == "gated_matmul" and p.problem.stored)
    assert {gate.gradient, gradient.gradient} == {False, True}
    assert sum(p.count for p in found.problems if p.op == "matmul") == 6  # gate, dx of gate and of up, and three weights


def test_without_a_gradient_only_the_hidden_activations_are_written():
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in layer()]
    found = capture(ours, gpu="h200")(*shapes)
    assert {(p.op, getattr(p.problem, "stored", None), p.problem.n) for p in found.problems} == {
        ("gated_matmul", False, 136),
        ("matmul", None, 64),
    }


def test_a_stored_gate_runs_its_kernel_where_it_was_measured_or_is_predicted_to_be_faster():
    for name in ("llama3-8b-8192-stored", "llama3-8b-8192-stored-gradient"):
        assert re.search("runs +the kernel", explain("gated_matmul", spec_of("gated_matmul").shapes[name], gpu="h200"))
    for problem, runs in (
        (GatedMatmulProblem(5407, 6144, 2048, stored=True), "the kernel"),
        (GatedMatmulProblem(1616, 9216, 2304, layout="nt", stored=True, gradient=True), "the kernel"),
        (GatedMatmulProblem(256, 28672, 8192, stored=True), "XLA"),
        (GatedMatmulProblem(133, 3584, 4096, layout="nt", stored=True, gradient=True), "XLA"),
    ):
        assert re.search(f"runs +{runs}", explain("gated_matmul", problem, gpu="h200"))


@pytest.mark.parametrize("axes", [(0, None, None, None, 0), (0, 0, None, None, None)], ids=str)
def test_vmap_maps_any_of_the_arrays(axes, assert_near):
    arrays = [jnp.stack([a, a[::-1]]) if axis == 0 else a for a, axis in zip(layer(), axes)]
    f = jax.vmap(functools.partial(ours, backend="xla"), axes)
    wanted = jax.vmap(functools.partial(written_out, "silu"), axes)
    assert_near(f(*arrays), wanted(*arrays), 1.5e-2)
    grads = jax.grad(lambda *a: f(*a).astype(F32).sum(), argnums=(0, 1, 2, 3))(*arrays)
    for y, z in zip(grads, jax.grad(lambda *a: wanted(*a).sum(), argnums=(0, 1, 2, 3))(*(a.astype(F32) for a in arrays))):
        assert_near(y, z, 4e-2)


def test_gradients_through_shard_map_over_rows(assert_near):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    rows, whole = PartitionSpec("x"), PartitionSpec()
    specs = (rows, whole, whole, whole, rows)
    f = jax.shard_map(functools.partial(ours, backend="xla"), mesh=mesh, in_specs=specs, out_specs=rows)
    grads = jax.grad(lambda *a: f(*a).astype(F32).sum(), argnums=(0, 1, 2, 3))(*layer())
    wanted = jax.grad(lambda *a: written_out("silu", *a).sum(), argnums=(0, 1, 2, 3))(*(a.astype(F32) for a in layer()))
    for y, z in zip(grads, wanted):
        assert_near(y, z, 3e-2)


X, W = np.zeros((8, 16), BF16), np.zeros((16, 24), BF16)


@pytest.mark.parametrize(
    ("arrays", "options", "error", "message"),
    [
        ((X, W, W, W), {}, ValueError, r"x\(8, 16\), w_gate\(16, 24\), w_up\(16, 24\) and w_down\(16, 24\) do not fit"),
        ((X, W, W[:, :8], W.T), {}, ValueError, r"w_up\(16, 8\).* do not fit"),
        ((X, W, W, W.T[None]), {}, ValueError, r"w_down has shape \(1, 24, 16\): .* use jax.vmap"),
        ((X, W, W, W.T.astype(np.float16)), {}, ValueError, "x is bfloat16 and w_down is float16: cast one with .astype"),
        ((X, W, W, W.T), {"residual": X[:, :4]}, ValueError, r"residual has shape \(8, 4\): it must broadcast"),
        ((X, W, W, W.T), {"residual": X.astype(np.float32)}, ValueError, "x is bfloat16 and residual is float32"),
        ((X.astype(int), W, W, W.T), {}, TypeError, "x has dtype int.*cast it first"),
        ((X, W, W, W.T), {"activation": "swish"}, ValueError, "activation='swish' is not one of none, relu"),
    ],
)
def test_error_names_the_value_the_rule_and_the_way_out(arrays, options, error, message):
    with pytest.raises(error, match=message):
        gated_mlp(*arrays, **options)
