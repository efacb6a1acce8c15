"""The gradients of the grouped ops: each is made of grouped matmuls and ragged contractions."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mgpu_ops.core import activations, mesh
from mgpu_ops.core.derivatives import first_order, refuse_8_bits
from mgpu_ops.grouped import gated, grouped_matmul, ragged_contraction
from mgpu_ops.grouped.rows import rows_at, sums_at
from mgpu_ops.grouped.sizes import in_a_group, split


def _matmul_forward(
    call: grouped_matmul.Call,
    lhs: jax.Array,
    rhs: jax.Array,
    sizes: jax.Array,
    bias: jax.Array | None = None,
    row_scale: jax.Array | None = None,
    scale_lhs: jax.Array | None = None,
    scale_rhs: jax.Array | None = None,
    indices: jax.Array | None = None,
    residual: jax.Array | None = None,
) -> Any:
    """With an activation its argument is kept; the activation, the scale and the residual are then XLA's."""
    refuse_8_bits("grouped_matmul", "mgpu_ops.fp8_grouped_matmul", lhs, rhs, scales=call.scales)
    saved = lhs, rhs, sizes, bias, row_scale, indices, None if residual is None else ()  # of a residual, that there is one
    if call.activation == "none":
        out = grouped_matmul.product(call, lhs, rhs, sizes, bias, row_scale, row_indices=indices, residual=residual)
        return out, (*saved, None)
    plain = dataclasses.replace(call, activation="none", config=None)
    linear = grouped_matmul.product(plain, lhs, rhs, sizes, bias, row_indices=indices)
    out = activations.activate_as_kernels(call.activation, linear)
    if row_scale is not None:
        out = _scaled(call, out, row_scale, sizes)
    if residual is not None:
        out = out.astype(np.promote_types(out.dtype, np.float32))
        out = _of_groups(call, out + residual.astype(out.dtype), sizes)
    return out.astype(call.out_dtype), (*saved, linear)


def _matmul_backward(call: grouped_matmul.Call, saved: Any, g: jax.Array) -> tuple[Any, ...]:
    """dlhs = g rhs^T by group, drhs = lhs^T g by group, dbias = the groups' sums of g; g is scaled and through the activation.

    dresidual = g before that, and zeros for rows of no group.

    Without an activation, dlhs before it is scaled gives the scale's gradient too, as its product with lhs.
    """
    given, rhs, sizes, bias, scale, indices, residual, linear = saved
    dresidual = None if residual is None else _of_groups(call, g, sizes)
    lhs, dscale = _rows_at(given, indices), None
    if linear is not None:
        if scale is not None:
            dscale = _row_sums(call, g, activations.activate_as_kernels(call.activation, linear), sizes)
            g = _scaled(call, g, scale, sizes).astype(linear.dtype)
        g = activations.gradient(call.activation, linear, g)
    g = g.astype(lhs.dtype)
    name, t = lhs.dtype.name, call.transpose_rhs
    plain = grouped_matmul.Call(not t, name, "none", call.spread, None, call.backend, call.group_offset)
    dlhs = grouped_matmul.product(plain, g, rhs, sizes)
    left, right = lhs, g
    if scale is not None and linear is None:
        dscale = _row_sums(call, dlhs, lhs, sizes)
        if bias is not None:
            dscale += _row_sums(call, g, bias[_groups_of_rows(call, sizes, lhs.shape[0])], sizes)
        dlhs = _scaled(call, dlhs, scale, sizes).astype(name)
        if bias is None and lhs.shape[1] < g.shape[1]:  # whichever is narrower
            left = _scaled(call, lhs, scale, sizes).astype(name)
        else:
            right = g = _scaled(call, g, scale, sizes).astype(name)
    left, right = (right, left) if t else (left, right)
    drhs, dbias = _contracted(call, name, left, right, sizes), _dbias(call, bias, g, sizes)
    return _added_at(given, indices, dlhs), drhs, None, dbias, dscale, None, None, None, dresidual


def _rows_at(lhs: jax.Array, indices: jax.Array | None) -> jax.Array:
    """The rows that the indices name, or lhs without any."""
    return lhs if indices is None else rows_at(lhs, indices)


def _added_at(lhs: jax.Array, indices: jax.Array | None, drows: jax.Array) -> jax.Array:
    """The gradient of lhs from that of `_rows_at`, added up in float32 or wider, in a fixed order."""
    return drows if indices is None else sums_at(drows, indices, lhs.shape[0]).astype(lhs.dtype)


def _dbias(call: grouped_matmul.Call, bias: jax.Array | None, g: jax.Array, sizes: jax.Array) -> jax.Array | None:
    if bias is None:
        return None
    ones = jnp.ones((g.shape[0], 8), g.dtype)  # the narrowest lhs that the kernel takes
    wide = np.promote_types(g.dtype, np.float32).name
    return _contracted(call, wide, *mesh.same_mesh_axes(ones, g, sizes))[:, 0].astype(bias.dtype)


def _contracted(call: grouped_matmul.Call, out_dtype: str, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
    """lhs^T rhs by group."""
    contraction = ragged_contraction.Call(out_dtype, call.spread, None, call.backend, call.group_offset)
    return ragged_contraction.contraction(contraction, lhs, rhs, sizes)


# Rows of no group may hold anything, NaN too, and are zeros in every result.


def _scaled(call: grouped_matmul.Call, x: jax.Array, scale: jax.Array, sizes: jax.Array) -> jax.Array:
    """Each row times its factor, in the factor's dtype."""
    return _of_groups(call, x.astype(scale.dtype) * scale[:, None], sizes)


def _of_groups(call: grouped_matmul.Call, x: jax.Array, sizes: jax.Array) -> jax.Array:
    """The rows of groups, and zeros for those of none."""
    return jnp.where(in_a_group(sizes, x.shape[0], call.group_offset), x, 0)


def _row_sums(call: grouped_matmul.Call, x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
    """The sums of each row of x * y, float32 or wider."""
    wide = np.promote_types(x.dtype, np.float32)
    products = x.astype(wide) * y.astype(wide)
    return jnp.where(in_a_group(sizes, x.shape[0], call.group_offset), products, 0).sum(axis=1)


def _groups_of_rows(call: grouped_matmul.Call, sizes: jax.Array, rows: int) -> jax.Array:
    """The group of each row; any group for rows of none."""
    start, sizes = split(sizes, rows, call.group_offset)
    ends = start + jnp.cumsum(sizes, dtype=jnp.int32)
    group = jnp.searchsorted(ends, jnp.arange(rows, dtype=jnp.int32), side="right", method="scan_unrolled")
    return jnp.minimum(group, sizes.size - 1)


grouped_matmul.product.defvjp(_matmul_forward, _matmul_backward)


def _gated_forward(
    call: gated.Call, lhs: jax.Array, w_gate: jax.Array, w_up: jax.Array, sizes: jax.Array, *rest: jax.Array
) -> Any:
    refuse_8_bits("gated_grouped_matmul", "two mgpu_ops.fp8_grouped_matmul", lhs, w_gate, scales=call.scales)
    return gated.gated(call, lhs, w_gate, w_up, sizes, *rest), (lhs, w_gate, w_up, sizes, *rest)


def _gated_backward(call: gated.Call, saved: Any, g: jax.Array) -> tuple[Any, ...]:
    """dgate and dup by the kernel; dlhs = dgate w_gate^T + dup w_up^T in one, dw_gate = lhs^T dgate and dw_up = lhs^T dup."""
    given, w_gate, w_up, sizes, *rest = saved
    indices = rest[-1] if call.row_indices else None
    lhs = _rows_at(given, indices)
    name, t = lhs.dtype.name, call.transpose_w
    dgate, dup = gated.gradients(call, lhs, w_gate, w_up, sizes, g.astype(name))
    plain = grouped_matmul.Call(not t, name, "none", call.spread, None, call.backend, call.group_offset)
    dlhs = grouped_matmul.sum_of_two(plain, dgate, w_gate, sizes, dup, w_up)

    def dw(of: jax.Array) -> jax.Array:
        left, right = (of, lhs) if t else (lhs, of)
        return _contracted(plain, name, left, right, sizes)

    return _added_at(given, indices, dlhs), dw(dgate), dw(dup), None, *(None for _ in rest)


gated.gated.defvjp(*first_order("gated_grouped_matmul", _gated_forward, _gated_backward))


def _contraction_forward(call: ragged_contraction.Call, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> Any:
    return ragged_contraction.contraction(call, lhs, rhs, sizes), (lhs, rhs, sizes)


def _contraction_backward(call: ragged_contraction.Call, saved: Any, g: jax.Array) -> tuple[Any, ...]:
    """dlhs[i] = rhs[i] g[group of i]^T and drhs[i] = lhs[i] g[group of i]."""
    lhs, rhs, sizes = saved
    g = g.astype(lhs.dtype)

    def product(rows: jax.Array, transpose: bool) -> jax.Array:
        of = grouped_matmul.Call(transpose, rows.dtype.name, "none", call.spread, None, call.backend, call.group_offset)
        return grouped_matmul.product(of, *mesh.same_mesh_axes(rows, g, sizes))

    return product(rhs, True), product(lhs, False), None


ragged_contraction.contraction.defvjp(_contraction_forward, _contraction_backward)
