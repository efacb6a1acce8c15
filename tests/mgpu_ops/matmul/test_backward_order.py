"""What the backward pass of a chain of layers keeps in memory, and what of it is left out where nobody asks for it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import mgpu_ops
from mgpu_ops.core import aot

SIDE = 512


def matmuls(x: jax.Array, weights: list[tuple[jax.Array, ...]]) -> jax.Array:
    for w, *_ in weights:
        x = mgpu_ops.matmul(jnp.sin(x), w, backend="xla")  # which computes the sine again, where a kernel would keep it
    return x.astype(jnp.float32).sum()


def kernels(x: jax.Array, weights: list[tuple[jax.Array, ...]]) -> jax.Array:
    for w, *_ in weights:
        x = mgpu_ops.matmul(x, w, residual=x)
    return x.astype(jnp.float32).sum()


def gated_layers(x: jax.Array, weights: list[tuple[jax.Array, ...]]) -> jax.Array:
    for gate, up, down in weights:
        x = mgpu_ops.gated_mlp(x, gate, up, down, residual=x)
    return x.astype(jnp.float32).sum()


@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
@pytest.mark.parametrize(
    ("f", "argnums", "layers", "arrays"), [(matmuls, 1, 8, 10), (kernels, (0, 1), 8, 8), (gated_layers, 1, 2, 8.51)]
)
def test_what_a_weights_gradient_is_computed_from_is_not_kept_to_the_end_of_the_backward_pass(f, argnums, layers, arrays):
    """The memory that XLA plans, in arrays of activations.

    Those of gated layers are 8.5 and some bytes, and 9 where the gradients of gate and up do not take the place of these.
    """
    x, w = jax.ShapeDtypeStruct((32 * SIDE, SIDE), jnp.bfloat16), jax.ShapeDtypeStruct((SIDE, SIDE), jnp.bfloat16)
    planned = aot.program("h200", jax.grad(f, argnums), x, [(w,) * 3] * layers)
    assert planned.temporary_bytes <= arrays * 2 * 32 * SIDE**2


@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
def test_a_gated_layer_of_few_tokens_keeps_no_hidden_array_beside_the_gradients_of_gate_and_up():
    """Weights as large as what tokens have: 3 arrays of hidden columns, 4.25 where one product is not made after the other."""
    tokens, width, hidden = 2 * SIDE, 2 * SIDE, 8 * SIDE
    x, *weights = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((tokens, width), *[(width, hidden)] * 2, (hidden, width))
    )
    planned = aot.program("h200", jax.grad(gated_layers, 1), x, [tuple(weights)] * 2)
    assert planned.temporary_bytes <= 3.01 * 2 * tokens * hidden


def test_gradients_that_nobody_asks_for_are_not_computed():
    array = jnp.ones((64, 64), jnp.bfloat16)
    step = jax.jit(jax.grad(matmuls)).lower(array, [(array,)] * 3).compile().as_text()
    assert step.count(" dot(") + step.count("__onednn$matmul") <= 2 * 3
