"""The epilogue of a matmul through XLA, and the arrays it takes: out = activation(scale_a A B scale_b + bias) + residual."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mgpu_ops.core.activations import activate
from mgpu_ops.core.fp8 import BLOCK
from mgpu_ops.matmul.problem import Problem, scales_sums
from mgpu_ops.matmul.quantities import scale_shapes


def names(p: Problem) -> tuple[str, ...]:
    """The names of a product's arrays, in their order."""
    scales = ("scale_a", "scale_b") if p.scales != "none" else ()
    return ("a", "b", *scales, *("epsilon",) * p.normalised, *("bias",) * p.bias, *("residual",) * p.residual)


def ranks(p: Problem) -> tuple[int, ...]:
    """The ranks of a product's arrays without the batch dimension: A, B, and what it has of scales, epsilon, bias, residual."""
    return (2, 2, *map(len, scale_shapes(p))) + (1,) * p.normalised + (1,) * p.bias + (2,) * p.residual


def by_name(p: Problem, extra: Sequence[jax.Array]) -> dict[str, jax.Array]:
    """The arrays that follow A and B, by name."""
    return dict(zip(names(p)[2:], extra, strict=True))


def with_epilogue(
    p: Problem,
    product: jax.Array,
    scale_a: jax.Array | None = None,
    scale_b: jax.Array | None = None,
    epsilon: jax.Array | None = None,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
) -> jax.Array:
    """The epilogue of a product [..., m, n], in the product's dtype, rounded to out_dtype in the end.

    Scales of blocks are no part of it: they are factors of parts of the product (`scaled`). Nor is epsilon, of A's rows.
    """
    del epsilon
    if p.out_dtype != "int32" and jnp.issubdtype(product.dtype, jnp.integer):
        product = product.astype(np.float32)
    if scale_a is not None and scale_b is not None and scales_sums(p):
        product = product.astype(jnp.promote_types(product.dtype, np.float32))
        scale_a, scale_b = scale_a[..., :, None].astype(product.dtype), scale_b[..., None, :].astype(product.dtype)
        product = product * (scale_a * scale_b) if p.scales == "tensor" else product * scale_a * scale_b
    if bias is not None:
        product = product + bias[..., None, :].astype(product.dtype)
    product = activate(p.activation, product)
    if residual is not None:
        product = product + residual.astype(product.dtype)
    return product.astype(p.out_dtype)


def scaled(x: jax.Array, scale: jax.Array) -> jax.Array:
    """x[..., rows, k], of which each block of 128 of k has the scales [..., rows, k / 128], multiplied by them in float32."""
    wide = jnp.repeat(scale.astype(np.float32), BLOCK, -1)[..., : x.shape[-1]]
    return x.astype(np.float32) * wide


def rows_of_blocks(scale: jax.Array, rows: int) -> jax.Array:
    """The scales [..., rows / 128, k / 128] of blocks of 128 rows, [..., rows, k / 128] of each row."""
    return jnp.repeat(scale, BLOCK, -2)[..., :rows, :]
