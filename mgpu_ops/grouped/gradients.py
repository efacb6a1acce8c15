"""The gradients of both grouped ops: each is made of the two."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mgpu_ops.core import mesh
from mgpu_ops.core.activations import activate
from mgpu_ops.grouped import grouped_matmul, ragged_contraction


def _matmul_forward(
    call: grouped_matmul.Call, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, bias: jax.Array | None = None
) -> Any:
    linear = dataclasses.replace(call, activation="none", config=call.config if call.activation == "none" else None)
    out = grouped_matmul.product(linear, lhs, rhs, sizes, bias)
    if call.activation == "none":
        return out, (lhs, rhs, sizes, bias, None)
    return activate(call.activation, out), (lhs, rhs, sizes, bias, out)


def _matmul_backward(call: grouped_matmul.Call, saved: Any, g: jax.Array) -> tuple[Any, ...]:
    """dlhs = g rhs^T by group, drhs = lhs^T g by group, dbias = the groups' sums of g."""
    lhs, rhs, sizes, bias, linear = saved
    if linear is not None:
        (g,) = jax.vjp(functools.partial(activate, call.activation), linear)[1](g)
    g = g.astype(lhs.dtype)
    name, t = lhs.dtype.name, call.transpose_rhs
    dlhs = grouped_matmul.product(grouped_matmul.Call(not t, name, "none", call.spread, None, call.backend), g, rhs, sizes)
    contract = functools.partial(ragged_contraction.contraction, ragged_contraction.Call(name, call.spread, None, call.backend))
    drhs = contract(g, lhs, sizes) if t else contract(lhs, g, sizes)
    if bias is None:
        return dlhs, drhs, None, None
    ones = jnp.ones((lhs.shape[0], 8), lhs.dtype)  # the narrowest lhs that the kernel takes
    wide = np.promote_types(g.dtype, np.float32).name
    contract = functools.partial(ragged_contraction.contraction, ragged_contraction.Call(wide, call.spread, None, call.backend))
    dbias = contract(*mesh.same_mesh_axes(ones, g, sizes))[:, 0]
    return dlhs, drhs, None, dbias.astype(bias.dtype)


grouped_matmul.product.defvjp(_matmul_forward, _matmul_backward)


def _contraction_forward(call: ragged_contraction.Call, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> Any:
    return ragged_contraction.contraction(call, lhs, rhs, sizes), (lhs, rhs, sizes)


def _contraction_backward(call: ragged_contraction.Call, saved: Any, g: jax.Array) -> tuple[Any, ...]:
    """dlhs[i] = rhs[i] g[group of i]^T and drhs[i] = lhs[i] g[group of i]."""
    lhs, rhs, sizes = saved
    g = g.astype(lhs.dtype)
    product = functools.partial(grouped_matmul.grouped_matmul, spread=call.spread, backend=call.backend)
    return product(rhs, g, sizes, transpose_rhs=True), product(lhs, g, sizes), None


ragged_contraction.contraction.defvjp(_contraction_forward, _contraction_backward)
