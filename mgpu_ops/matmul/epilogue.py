"""The epilogue of a matmul through XLA, and the arrays that it takes: out = activation(A B + bias) + residual."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from mgpu_ops.core.activations import activate
from mgpu_ops.matmul.problem import Problem


def ranks(p: Problem) -> tuple[int, ...]:
    """The ranks of a product's arrays without the batch dimension: A, B, and where it has them bias and residual."""
    return (2, 2) + (1,) * p.bias + (2,) * p.residual


def by_name(p: Problem, extra: Sequence[jax.Array]) -> dict[str, jax.Array]:
    """The arrays that follow A and B, by name."""
    names = ["bias"] * p.bias + ["residual"] * p.residual
    return dict(zip(names, extra, strict=True))


def with_epilogue(
    p: Problem, product: jax.Array, bias: jax.Array | None = None, residual: jax.Array | None = None
) -> jax.Array:
    """The epilogue of a product [..., m, n], in the product's dtype, rounded to out_dtype in the end."""
    if bias is not None:
        product = product + bias[..., None, :].astype(product.dtype)
    product = activate(p.activation, product)
    if residual is not None:
        product = product + residual.astype(product.dtype)
    return product.astype(p.out_dtype)
