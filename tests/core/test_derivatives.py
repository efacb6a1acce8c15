"""Derivatives that there are not are told by the name of the function, whatever runs."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

import mgpu_ops

X = jnp.ones((64, 64), jnp.bfloat16)
W = jnp.ones((4, 64, 64), jnp.bfloat16)
ANGLES = jnp.ones((16, 32))
FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gated_matmul": lambda x: mgpu_ops.gated_matmul(x, W[0], W[1]),
    "gated_mlp": lambda x: mgpu_ops.gated_mlp(x, *W[:3]),
    "gated_grouped_matmul": lambda x: mgpu_ops.gated_grouped_matmul(x, W[:1], W[:1], [64]),
    "moe": lambda x: mgpu_ops.moe(x, x[:, :4], W, W, W, 2),
    "flash_attention": lambda x: mgpu_ops.flash_attention(*[x.reshape(64, 1, 64)] * 3),
    "rotary_attention": lambda x: mgpu_ops.rotary_attention(x.reshape(16, 256), ANGLES, ANGLES, heads=2, kv_heads=1),
    "rotary_qkv with norms": lambda x: mgpu_ops.rotary_qkv(
        x.reshape(16, 256), ANGLES, ANGLES, heads=2, kv_heads=1, q_norm=X[0], k_norm=X[0]
    )[0],
    "fp8_matmul": lambda x: mgpu_ops.fp8_matmul(x, W[0]),
    "fp8_gated_mlp": lambda x: mgpu_ops.fp8_gated_mlp(x, *W[:3]),
    "fp8_grouped_matmul": lambda x: mgpu_ops.fp8_grouped_matmul(x, W[:1], [64]),
    "fp8_moe": lambda x: mgpu_ops.fp8_moe(x, x[:, :4], W, W, W, 2),
    "cross_entropy": lambda x: mgpu_ops.cross_entropy(x, jnp.zeros(64, int)),
    "rms_norm": lambda x: mgpu_ops.rms_norm(x, X[0]),
    "embedding": lambda x: mgpu_ops.embedding(x, jnp.arange(2)),
}


@pytest.mark.parametrize("gpu", [None, "h200"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_gradient_of_a_gradient_that_there_is_not_is_told_by_name(name: str, gpu: str | None) -> None:
    def loss(x: jax.Array) -> jax.Array:
        return (FUNCTIONS[name](x).astype(jnp.float32) ** 2).sum()

    def penalty(x: jax.Array) -> jax.Array:
        return (jax.grad(loss)(x).astype(jnp.float32) ** 2).sum()

    with mgpu_ops.target(gpu):
        with pytest.raises(ValueError, match=f"^{name} has a gradient, but no gradient of that.*jax.numpy.*stop_gradient"):
            jax.eval_shape(jax.grad(penalty), X)
        held = jax.grad(lambda x: loss(x) + jax.lax.stop_gradient(loss(x)))
        assert jax.eval_shape(jax.checkpoint(held), X).shape == X.shape


def of_8_bits(*shape: int) -> jax.Array:
    return jnp.ones(shape, jnp.float8_e4m3fn)


_X, _W, _DOWN, _SIZES = of_8_bits(3, 5), of_8_bits(2, 5, 7), of_8_bits(2, 7, 5), jnp.array([1, 2])
PRODUCTS: dict[str, tuple[Callable[[jax.Array], jax.Array], str]] = {
    "matmul": (lambda x: mgpu_ops.matmul(x, _W[0]), "fp8_matmul"),
    "gated_matmul": (lambda x: mgpu_ops.gated_matmul(x, _W[0], _W[1]), "fp8_gated_mlp"),
    "gated_mlp": (lambda x: mgpu_ops.gated_mlp(x, _W[0], _W[1], _DOWN[0]), "fp8_gated_mlp"),
    "grouped_matmul": (lambda x: mgpu_ops.grouped_matmul(x, _W, _SIZES), "fp8_grouped_matmul"),
    "gated_grouped_matmul": (lambda x: mgpu_ops.gated_grouped_matmul(x, _W, _W, _SIZES), "fp8_grouped_matmul"),
    "moe": (lambda x: mgpu_ops.moe(x, jnp.ones((3, 2)), _W, _W, _DOWN, 1), "fp8_moe"),
}


@pytest.mark.parametrize("op", PRODUCTS)
def test_a_gradient_of_8_bits_is_refused_and_a_product_that_trains_is_named(op: str) -> None:
    product, instead = PRODUCTS[op]
    assert jnp.isfinite(product(_X).astype(jnp.float32)).all()
    with pytest.raises(ValueError, match=f"^{op} of float8_e4m3fn has no gradient: .* Train with .*mgpu_ops.{instead} of"):
        jax.grad(lambda x: product(x).astype(jnp.float32).sum())(_X)
