"""fp8_moe: a mixture-of-experts layer whose products, forward and backward, are computed in 8-bit floats.

The rows of each expert begin at a multiple of 128 and are followed by zeros: all operands in 8 bits have this order, and so the
tensor cores sum over rows as they lie, in gradients of matrices. One kernel gathers tokens, rounds them, and writes both the
rows and their transpose; two others do so with the hidden array and with the gradients of gate and up, from gate and up in 16
bits. An assignment is a token and one of its experts.

Sources: those of `moe` and `fp8_matmul`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from mgpu_ops import integers
from mgpu_ops.core import mesh, order
from mgpu_ops.core.derivatives import first_order
from mgpu_ops.grouped import grouped_matmul, ragged_contraction
from mgpu_ops.grouped.calls import checked_spread
from mgpu_ops.grouped.ragged_contraction.problem import PADDED, padded
from mgpu_ops.grouped.sizes import Spread
from mgpu_ops.matmul import quantizing
from mgpu_ops.matmul.fp8 import E4M3, E5M2, FLOATS, Products, Quantized, next_state, of_gates, of_mesh
from mgpu_ops.matmul.fp8_gated import CURRENT, Fp8GatedState, checked_gated_state
from mgpu_ops.matmul.rounding import largest_finite, scale_or_one
from mgpu_ops.moe import checked_experts, matrices_of, own_experts, routed, rule_of_experts
from mgpu_ops.registry import dispatch, partition
from mgpu_ops.sorting import counting_sort


@dataclasses.dataclass(frozen=True)
class _Call(Products):
    """How products are computed, and the dtypes of x and of the three matrices."""

    spread: Spread
    x_dtype: str
    w_dtypes: tuple[str, ...]


def fp8_moe(
    x: ArrayLike,
    router_logits: ArrayLike,
    w_gate: ArrayLike,
    w_up: ArrayLike,
    w_down: ArrayLike,
    top_k: int,
    *,
    norm_topk_prob: bool = True,
    state: Fp8GatedState | None = None,
    spread: Spread = "random",
    backend: dispatch.Backend | None = None,
) -> jax.Array:
    """`moe` for training in FP8: all nine products, three forward and six backward, are of 8-bit floats.

    out[t] = sum over the top_k experts e of token t of weight[t, e] * expert_e(x[t]) with
    expert_e(x) = (silu(x w_gate[e]) * (x w_up[e])) w_down[e], and the weights of `moe_route`. No token is dropped.

    float8_e4m3fn are x, the matrices and the hidden array silu(gate) up weight; float8_e5m2 the gradients of the result and of
    gate and up. Each array is rounded once, with one scale for all of it, the matrices for all experts; w_gate and w_up share
    one, and so do the gradients of gate and up. Tokens of no expert count for no scale. Sums are in float32, as in `matmul` of
    8-bit floats, and so are the router's weights and their gradient.

    Args:
      x: [..., d]. bfloat16, float16 or float32.
      router_logits: [..., experts] floats, as in `moe`.
      w_gate, w_up: [experts, d, hidden]; each bfloat16, float16 or float32.
      w_down: [experts, hidden, d]; bfloat16, float16 or float32.
      top_k, norm_topk_prob, spread: as in `moe`.
      state: None (default): current scaling, a scale is found from the array itself. A `Fp8GatedState`: delayed scaling, as in
        `fp8_gated_mlp`; its gradient is the next call's state. Not over explicit axes of a mesh: there call it in
        `jax.shard_map`, or without a state.
      backend: as in `matmul`, of all products.

    Returns:
      [..., d] of x's dtype. Each expert's result is rounded to it once; a token's are added in float32. Gradients have the
      dtypes of their arrays.

    Works under jit, grad (reverse mode, once), scan, checkpoint and shard_map; under vmap without a state. The backward pass
    keeps gate and up in x's dtype, and in 8 bits the matrices, and x and the hidden array of each token's experts. For the
    kernel d and hidden are multiples of 16; else XLA runs, and a log line says why.

    Raises:
      ValueError: as `moe`; dtypes that are not those above, a state that `fp8_gated_mlp` refuses or over explicit axes of a
        mesh.
      TypeError: not arrays of floats, a top_k that is no integer, a state that is no `Fp8GatedState`.

    Example:
      >>> x, logits = jnp.ones((64, 128), jnp.bfloat16), jnp.zeros((64, 8))
      >>> w_gate, w_up = jnp.ones((2, 8, 128, 256), jnp.bfloat16)
      >>> w_down = jnp.ones((8, 256, 128), jnp.bfloat16)
      >>> loss = lambda x: mgpu_ops.fp8_moe(x, logits, w_gate, w_up, w_down, top_k=2).astype(jnp.float32).sum()
      >>> jax.grad(loss)(x).shape
      (64, 128)

    Source: as for `moe` and `fp8_matmul`; see docs/kernels/moe.md.
    """
    of_routed = functools.partial(fp8_moe_experts, state=state, spread=spread, backend=backend)
    return routed("fp8_moe", of_routed, x, router_logits, matrices_of("fp8_moe", w_gate, w_up, w_down), top_k, norm_topk_prob)


def fp8_moe_experts(
    x: ArrayLike,
    weights: ArrayLike,
    experts: ArrayLike,
    w_gate: ArrayLike,
    w_up: ArrayLike,
    w_down: ArrayLike,
    *,
    num_experts: int | None = None,
    group_offset: ArrayLike | None = None,
    state: Fp8GatedState | None = None,
    spread: Spread = "random",
    backend: dispatch.Backend | None = None,
) -> jax.Array:
    """`fp8_moe` of tokens that were routed already: by `moe_route`, or in any other way.

    Args:
      x: [tokens, d].
      weights: [tokens, top_k] floats.
      experts: [tokens, top_k] integers, as `moe_dispatch` takes them.
      w_gate, w_up, w_down: as in `fp8_moe`, of all experts; or of a device's share, with `num_experts` and `group_offset`.
      num_experts, group_offset: as in `moe_experts`. Other experts add nothing.
      state, spread, backend: as in `fp8_moe`.

    Returns:
      [tokens, d] of x's dtype.

    Raises:
      ValueError, TypeError: as `moe_experts`, and as `fp8_moe` for dtypes and a state.

    Example:
      >>> x = jnp.ones((64, 128), jnp.bfloat16)
      >>> w_gate, w_up = jnp.ones((2, 8, 128, 256), jnp.bfloat16)
      >>> w_down = jnp.ones((8, 256, 128), jnp.bfloat16)
      >>> weights, experts = mgpu_ops.moe_route(jnp.zeros((64, 8)), top_k=2)
      >>> mgpu_ops.fp8_moe_experts(x, weights, experts, w_gate, w_up, w_down).shape
      (64, 128)
    """
    op = "fp8_moe_experts"
    arrays, count = checked_experts(
        op, x, weights, experts, (w_gate, w_up, w_down), num_experts=num_experts, group_offset=group_offset, mixed=FLOATS
    )
    floats = [arrays[0], *arrays[3:6]]
    for name, array in zip(("x", "w_gate", "w_up", "w_down"), floats, strict=True):
        if array.dtype.name not in FLOATS:
            raise ValueError(f"{name} is {array.dtype}: {op} quantizes {', '.join(FLOATS)}; cast it")
    state = checked_gated_state(op, state)
    if state is not None and mesh.explicit_axes(mesh.mesh_of(arrays)):
        raise ValueError(f"{op} has no state over explicit axes of a mesh: call it in jax.shard_map, or leave the state out")
    own = arrays[3].shape[0]
    integers.check_count("the rows of all experts, each padded to 128,", padded_rows(arrays[2].size, own))
    x_dtype, *w_dtypes = (array.dtype.name for array in floats)
    call = _Call("tensor", dispatch.requested_backend(backend), checked_spread(spread), x_dtype, tuple(w_dtypes))

    def layer(x: jax.Array, weights: jax.Array, experts: jax.Array, *rest: jax.Array) -> jax.Array:
        places = sorted_and_padded(own_experts(experts, own, count, *rest[3:]), own)
        return _layer(call, state, *mesh.same_mesh_axes(x, weights, *rest[:3], *places))

    found: jax.Array = partition.with_first(layer, functools.partial(rule_of_experts, op), 3, *arrays)
    return found


# --- The order of rows


class Padded(NamedTuple):
    """Assignments sorted by expert, whose rows begin at multiples of 128.

    sizes: int32 [experts], how many rows each expert has, without the padding. token: int32 [rows], the token of each row, or
    the number of tokens where there is none. row: int32 [tokens, top_k], the row of each assignment, or the number of rows
    where its expert is none of these.
    """

    sizes: jax.Array
    token: jax.Array
    row: jax.Array


def padded_rows(assignments: int, experts: int) -> int:
    """How many rows there are at most."""
    return (assignments + (PADDED - 1) * min(assignments, experts)) // PADDED * PADDED


def sorted_and_padded(experts: jax.Array, count: int) -> Padded:
    """experts: integers [tokens, top_k]; one outside of 0 to count - 1 names no expert."""
    tokens, top_k = experts.shape
    rows = padded_rows(experts.size, count)
    key = jnp.where((experts >= 0) & (experts < count), experts, count).astype(jnp.int32).reshape(-1)
    positions, sizes = counting_sort(key, count)
    starts, starts_padded = (jnp.cumsum(one, dtype=jnp.int32) - one for one in (sizes, padded(sizes, rows)))
    moved = starts_padded - starts
    positions, moved, key = mesh.same_mesh_axes(positions, jnp.append(moved, 0), key)
    row = jnp.where(key < count, positions + moved.at[key].get(mode="promise_in_bounds"), rows)
    none, row, token = mesh.same_mesh_axes(
        jnp.full(rows, tokens, jnp.int32), row, lax.div(jnp.arange(key.size, dtype=jnp.int32), jnp.int32(max(top_k, 1)))
    )
    return Padded(sizes, none.at[row].set(token, mode="drop", unique_indices=True), row.reshape(experts.shape))


def _of_rows(of_assignments: jax.Array, places: Padded) -> jax.Array:
    """What there is for each assignment, [tokens, top_k], for each row; zeros where there is none. float32."""
    zeros = jnp.zeros(places.token.shape, jnp.float32)
    zeros, row, values = mesh.same_mesh_axes(zeros, places.row.reshape(-1), of_assignments.astype(jnp.float32).reshape(-1))
    return zeros.at[row].set(values, mode="drop", unique_indices=True)


def _sums(rows: jax.Array, places: Padded) -> jax.Array:
    """For each token the sum of its assignments' rows, in their order, in float32."""
    if not rows.size:  # jax.vmap does not see that a gather of nothing is of an array that it maps
        return jnp.broadcast_to(jnp.sum(rows, 0, dtype=jnp.float32), (places.row.shape[0], rows.shape[1]))
    each = [rows.at[places.row[:, j]].get(mode="fill", fill_value=0) for j in range(places.row.shape[1])]
    zeros, *_ = mesh.same_mesh_axes(jnp.zeros((places.row.shape[0], rows.shape[1]), jnp.float32), rows)
    return functools.reduce(jnp.add, (one.astype(jnp.float32) for one in each), zeros)


# --- Products


def _tokens_both_ways(
    call: _Call, x: jax.Array, places: Padded, dtype: Any, scale: jax.Array | None
) -> tuple[Quantized, Quantized, jax.Array | None]:
    """The rows of x, quantized, and their transpose. With a known scale also the largest value.

    Tokens that none of the experts has count for neither.
    """
    known = scale is not None
    if scale is None:
        here = (places.row < places.token.size).any(1, keepdims=True)
        scale = scale_or_one(largest_finite(jnp.where(here, x, 0)), dtype)
    by, amax = scale, "also" if known else "none"
    x, token, by = mesh.same_mesh_axes(x, places.token, by)
    values, values_t, *largest = quantizing.both_ways((x,), (by,), dtype, amax=amax, index=token, backend=call.backend)
    return (values, by), (values_t, by), largest[0] if known else None


def _matrices_both_ways(
    call: _Call, matrices: Sequence[jax.Array], scales: Sequence[jax.Array | None]
) -> list[tuple[Quantized, Quantized, jax.Array | None]]:
    """Each [experts, ., .] of the matrices, quantized with one scale for all, and the transpose of each expert's.

    With known scales, of which the largest counts, also its largest value.
    """
    known = [scale for scale in scales if scale is not None]
    by = functools.reduce(jnp.maximum, known or [largest_finite(w) for w in matrices])
    by = by if known else scale_or_one(by, E4M3)
    amax, found = "also" if known else "none", []
    for w in matrices:
        values, values_t, *largest = quantizing.both_ways((w,), (by,), E4M3, amax=amax, backend=call.backend)
        found.append(((values, by), (values_t, by), largest[0] if known else None))
    return found


def _product(call: _Call, sizes: jax.Array, lhs: Quantized, rhs: Quantized, *second: Quantized) -> jax.Array:
    """lhs[rows, k] rhs[experts, n, k]^T by expert, in x's dtype; plus that of a second pair of the same scales."""
    (l8, scale_lhs), (r8, scale_rhs) = lhs, rhs
    of = grouped_matmul.Call(True, call.x_dtype, "none", call.spread, None, call.backend, scales="tensor")
    scales = scale_lhs.reshape(1), jnp.broadcast_to(scale_rhs, (r8.shape[0],))
    l8, r8, sizes, *rest = mesh.same_mesh_axes(l8, r8, padded(sizes, l8.shape[0]), *(values for values, _ in second), *scales)
    if second:
        return grouped_matmul.sum_of_two(of, l8, r8, sizes, *rest)
    return grouped_matmul.product(of, l8, r8, sizes, scale_lhs=rest[0], scale_rhs=rest[1])


def _contraction(call: _Call, lhs: Quantized, rhs: Quantized, sizes: jax.Array, dtype: str) -> jax.Array:
    """lhs[k, rows] rhs[n, rows]^T over the rows of each expert, [experts, k, n] of a dtype."""
    (l8, scale_lhs), (r8, scale_rhs) = lhs, rhs
    of = ragged_contraction.Call(dtype, call.spread, None, call.backend)
    arrays = mesh.same_mesh_axes(l8, r8, sizes, (scale_lhs * scale_rhs).reshape(1))
    return ragged_contraction.transposed_contraction(of, *arrays)


def _in_order(first: jax.Array, *later: Quantized) -> tuple[Any, ...]:
    """The same; what is computed from the values of `later` after this is computed after `first`."""
    first, values = order.weights_first(first, [of_one for of_one, _ in later])
    return first, *((of_one, scale) for of_one, (_, scale) in zip(values, later, strict=True))


# --- The layer after routing, with a gradient of its own


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layer(
    call: _Call,
    state: Fp8GatedState | None,
    x: jax.Array,
    weights: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    *places: jax.Array,
) -> jax.Array:
    """`fp8_moe_experts` of `Padded` assignments."""
    return _forward(call, state, x, weights, w_gate, w_up, w_down, *places)[0]


def _forward(call: _Call, state: Fp8GatedState | None, x: jax.Array, weights: jax.Array, *arrays: jax.Array) -> Any:
    """The result, and what the backward pass needs: of the matrices and arrays of rows those that lie as it reads them."""
    matrices, places, known = arrays[:3], Padded(*arrays[3:]), state or CURRENT
    by_weight = _of_rows(weights, places)
    x8, x8_t, of_x = _tokens_both_ways(call, x, places, E4M3, known.gate.input_scale)
    of_kernels = [of.kernel_scale for of in known]
    w8 = [
        *_matrices_both_ways(call, matrices[:2], of_kernels[:2]),
        *_matrices_both_ways(call, matrices[2:], of_kernels[2:]),
    ]
    gate, up = (_product(call, places.sizes, x8, w8_t) for _, w8_t, _ in w8[:2])
    ((hidden8, hidden8_t),), of_hidden = of_gates(
        call, "gate", (gate, up), E4M3, (known.down.input_scale,), row_scale=by_weight
    )
    out = _sums(_product(call, places.sizes, hidden8, w8[2][1]), places).astype(x.dtype)
    seen = None
    if state is not None:
        inputs = ((of_x, x), (of_x, x), (of_hidden[0], gate))
        kernels = [(largest, w) for (_, _, largest), w in zip(w8, matrices, strict=True)]
        pairs = zip(inputs, kernels, state, strict=True)
        seen = [(of_mesh(*of_input, of), of_mesh(*of_kernel, of)) for of_input, of_kernel, of in pairs]
    return out, (weights, places, by_weight, gate, up, x8_t, hidden8_t, [one for one, _, _ in w8], state, seen)


def _backward(call: _Call, saved: Any, g: jax.Array) -> tuple[Any, ...]:
    weights, places, by_weight, gate, up, x8_t, hidden8_t, (w_gate8, w_up8, w_down8), state, seen = saved
    *of_both, of_down_grad = (of.output_grad_scale for of in state or CURRENT)
    g8, g8_t, of_g = _tokens_both_ways(call, g, places, E5M2, of_down_grad)
    d_hidden = _product(call, places.sizes, g8, w_down8)
    ((gate8, gate8_t), (up8, up8_t)), found = of_gates(
        call, "gate_gradient", (d_hidden, gate, up), E5M2, of_both, shared=True, row_scale=by_weight
    )
    *of_gated, of_weight = found
    # First what reads the copies of gate and up, then one product after the other: what it alone reads is gone for the next.
    rows = _product(call, places.sizes, gate8, w_gate8, up8, w_up8)
    rows, gate8_t, up8_t, g8_t = _in_order(rows, gate8_t, up8_t, g8_t)
    of_gate, of_up, of_down = (functools.partial(_contraction, call, sizes=places.sizes, dtype=name) for name in call.w_dtypes)
    dw_down, gate8_t, up8_t = _in_order(of_down(hidden8_t, g8_t), gate8_t, up8_t)
    dw_gate, up8_t = _in_order(of_gate(x8_t, gate8_t), up8_t)
    dw_up, rows = order.weights_first(of_up(x8_t, up8_t), rows)
    dx = _sums(rows, places).astype(call.x_dtype)
    dweights = of_weight.at[places.row].get(mode="fill", fill_value=0).astype(weights.dtype)
    new = None
    if state is not None:
        products = zip(state, seen, (*of_gated, of_g), strict=True)
        new = Fp8GatedState(*(next_state(of, (*pair, of_mesh(largest, g, of))) for of, pair, largest in products))
    return (new, dx, dweights, dw_gate, dw_up, dw_down, *[None] * len(places))


_layer.defvjp(*first_order("fp8_moe", _forward, _backward))
