"""A mixture-of-experts layer: routing, tokens sorted by expert, gated experts, and the weighted sum back to tokens.

`moe` is the layer; its parts are public as well: `moe_route`, `moe_dispatch`, `moe_experts`, `moe_combine`. The products are
kernels (`gated_grouped_matmul`, and `grouped_matmul` with the routing weights as `row_scale`); the rest is XLA's, without a
scatter-add, so that the same inputs give the same bits. An assignment is a token and one of its experts; there are tokens x
top_k of them, and nothing larger than their rows is made.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from mgpu_ops import floats, integers
from mgpu_ops.core import mesh
from mgpu_ops.core.activations import Activation
from mgpu_ops.grouped.calls import checked_operands
from mgpu_ops.grouped.gated import gated_grouped_matmul
from mgpu_ops.grouped.grouped_matmul import grouped_matmul
from mgpu_ops.grouped.sizes import Spread
from mgpu_ops.registry import dispatch


class MoeDispatch(NamedTuple):
    """Tokens' rows sorted by expert: what `moe_dispatch` returns.

    rows: [assignments, d], the token's row of each assignment, those of expert 0 first; an expert's in the order of tokens.
    group_sizes: int32 [num_experts], how many rows each expert has.
    order: int32 [assignments], the assignment of each row, counted as token * top_k + choice.
    positions: int32 [tokens, top_k], the row of each assignment.
    """

    rows: jax.Array
    group_sizes: jax.Array
    order: jax.Array
    positions: jax.Array


def moe(
    x: ArrayLike,
    router_logits: ArrayLike,
    w_gate: ArrayLike,
    w_up: ArrayLike,
    w_down: ArrayLike,
    top_k: int,
    *,
    norm_topk_prob: bool = True,
    activation: Activation | None = "silu",
    spread: Spread = "random",
    backend: dispatch.Backend | None = None,
) -> jax.Array:
    """The experts' part of a layer: out[t] = sum over the top_k experts e of token t of weight[t, e] * expert_e(x[t]).

    expert_e(x) = (activation(x w_gate[e]) * (x w_up[e])) w_down[e], and the weights are those of `moe_route`. No
    token is dropped, however uneven the routing.

    Args:
      x: [..., d]. bfloat16 or float16 for the kernels; other floats run through XLA.
      router_logits: [..., experts] floats, x times the router's matrix, best in float32.
      w_gate, w_up: [experts, d, hidden], of x's dtype.
      w_down: [experts, hidden, d], of x's dtype.
      top_k: experts of each token, from 1 to the number of experts.
      norm_topk_prob: as in `moe_route`.
      activation: as in `gated_grouped_matmul`.
      spread: how tokens usually spread over the experts, as in `grouped_matmul`: chooses configs, never the answer.
      backend: of the products, as in `grouped_matmul`.

    Returns:
      [..., d] of x's dtype. Each expert's result is scaled in float32 and rounded once; a token's are added in float32.

    Works under jit, grad (reverse mode), vmap, scan, checkpoint and shard_map. The backward pass keeps the rows sorted by
    expert and the hidden activations (tokens x top_k rows of d and of hidden), and computes gate and up again. Under
    `jax.checkpoint` all is computed again.

    Raises ValueError and TypeError for what its parts refuse.

    Source: Shazeer et al., arXiv:1701.06538, section 2; see docs/kernels/moe.md.
    """
    x, logits, w_gate = (floats.array("moe", *of) for of in (("x", x), ("router_logits", router_logits), ("w_gate", w_gate)))
    if not x.ndim or not logits.ndim or x.shape[:-1] != logits.shape[:-1]:
        raise ValueError(f"x{x.shape} and router_logits{logits.shape} differ: they are [..., d] and [..., experts]")
    if w_gate.ndim == 3 and logits.shape[-1] != w_gate.shape[0]:
        raise ValueError(
            f"router_logits{logits.shape} are of {logits.shape[-1]} experts, w_gate{w_gate.shape} of {w_gate.shape[0]}"
        )
    tokens = int(np.prod(x.shape[:-1], dtype=np.int64))
    weights, experts = moe_route(logits.reshape(tokens, logits.shape[-1]), top_k, norm_topk_prob=norm_topk_prob)
    options: dict[str, Any] = {"activation": activation, "spread": spread, "backend": backend}
    out = moe_experts(x.reshape(tokens, x.shape[-1]), weights, experts, w_gate, w_up, w_down, **options)
    return out.reshape(x.shape)


def moe_route(router_logits: ArrayLike, top_k: int, *, norm_topk_prob: bool = True) -> tuple[jax.Array, jax.Array]:
    """The top_k experts of each token, the likeliest first, and their weights: (weights, experts), both [..., top_k].

    Args:
      router_logits: [..., experts] floats; computed in float32 or wider.
      top_k: from 1 to the number of experts.
      norm_topk_prob: True: the weights are the softmax over the chosen logits, and sum to 1; the same as the softmax over all,
        divided by the sum of those chosen. False: they are the softmax over all experts.

    Returns:
      weights: float32 (float64 for such logits); the gradient goes through them to the logits.
      experts: int32. Of equal logits, the expert of the smaller number comes first.

    Raises:
      ValueError: no experts, or a top_k beyond them. TypeError: logits that are no floats, a top_k that is no integer.
    """
    logits = floats.array("moe_route", "router_logits", router_logits)
    if not logits.ndim:
        raise ValueError("router_logits have shape (): they are [..., experts]")
    _check_top_k(top_k, logits.shape[-1])
    logits = logits.astype(np.promote_types(logits.dtype, np.float32))
    experts = lax.top_k(lax.stop_gradient(logits), int(top_k))[1].astype(jnp.int32)
    of = logits if norm_topk_prob else jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(of, experts, axis=-1, mode="promise_in_bounds")
    return (jax.nn.softmax(chosen) if norm_topk_prob else jnp.exp(chosen)), experts


def moe_dispatch(x: ArrayLike, experts: ArrayLike, num_experts: int) -> MoeDispatch:
    """The rows of x, once for each of a token's experts, sorted by expert: what grouped products take.

    Args:
      x: [tokens, d], of any dtype.
      experts: [tokens, top_k] integers. One outside of 0 to num_experts - 1 names no expert: its row comes after all groups.
      num_experts: how many experts there are.

    The sort is stable, and the gradient of x is a sum of top_k rows in float32, in the order of `experts`: no scatter-add.

    Raises ValueError for shapes that do not fit each other, and TypeError for experts or num_experts that are no integers.
    """
    x, experts = jnp.asarray(x), jnp.asarray(integers.array("experts", experts))
    if x.ndim != 2 or experts.ndim != 2 or x.shape[0] != experts.shape[0]:
        raise ValueError(f"x{x.shape} and experts{experts.shape}: moe_dispatch takes [tokens, d] and [tokens, top_k]")
    if isinstance(num_experts, bool) or not isinstance(num_experts, int | np.integer):
        raise TypeError(f"num_experts={num_experts!r} is no integer")
    if num_experts < 1:
        raise ValueError(f"num_experts={num_experts} is not at least 1")
    tokens, top_k = experts.shape
    known = (experts >= 0) & (experts < num_experts)
    key = jnp.where(known, experts, num_experts).astype(jnp.int32).reshape(-1)
    order = jnp.argsort(key, stable=True).astype(jnp.int32)
    counted = jnp.arange(tokens * top_k, dtype=jnp.int32)
    key, order, counted = mesh.same_mesh_axes(key, order, counted)
    positions = jnp.zeros_like(counted).at[order].set(counted, unique_indices=True, mode="promise_in_bounds")
    # A sum of comparisons is one pass over the keys; a search in them, or a count by adding, would be many small steps.
    sizes = jnp.sum(key[:, None] == jnp.arange(num_experts, dtype=jnp.int32), axis=0, dtype=jnp.int32)
    positions = positions.reshape(tokens, top_k)
    x, order, positions, sizes = mesh.same_mesh_axes(x, order, positions, sizes)
    return MoeDispatch(_rows_of_tokens(x, order // max(top_k, 1), positions), sizes, order, positions)


def moe_combine(rows: ArrayLike, order: ArrayLike, positions: ArrayLike, *, out_dtype: DTypeLike | None = None) -> jax.Array:
    """out[t] = sum over j of rows[positions[t, j]]: the rows of each token's experts added up, the reverse of `moe_dispatch`.

    Args:
      rows: [assignments, d] floats, such as `grouped_matmul` gives with the routing weights as `row_scale`.
      order, positions: as `moe_dispatch` gives them.
      out_dtype: of the result; by default that of rows.

    Added in float32 or wider, in the order of j: the same rows give the same bits. Its gradient is a gather.

    Raises ValueError for shapes that do not fit each other, and TypeError for floats or integers expected and not found.
    """
    rows = floats.array("moe_combine", "rows", rows)
    order, positions = (jnp.asarray(integers.array(*of)) for of in (("order", order), ("positions", positions)))
    if rows.ndim != 2 or positions.ndim != 2 or not rows.shape[0] == order.size == positions.size:
        raise ValueError(
            f"rows{rows.shape}, order{order.shape} and positions{positions.shape}: moe_combine takes [assignments, d], "
            "[assignments] and [tokens, top_k]"
        )
    rows, order, positions = mesh.same_mesh_axes(rows, order, positions)
    out = _sums_of_rows(rows, order // max(positions.shape[1], 1), positions)
    return out.astype(rows.dtype if out_dtype is None else out_dtype)


def moe_experts(
    x: ArrayLike,
    weights: ArrayLike,
    experts: ArrayLike,
    w_gate: ArrayLike,
    w_up: ArrayLike,
    w_down: ArrayLike,
    *,
    num_experts: int | None = None,
    group_offset: ArrayLike | None = None,
    activation: Activation | None = "silu",
    spread: Spread = "random",
    backend: dispatch.Backend | None = None,
) -> jax.Array:
    """`moe` of tokens that were routed already: by `moe_route`, or in any other way.

    Args:
      x: [tokens, d]. weights: [tokens, top_k] floats. experts: [tokens, top_k] integers, as `moe_dispatch` takes them.
      w_gate, w_up, w_down: as in `moe`, of all experts; or of a device's share, with `num_experts` and `group_offset`.
      num_experts, group_offset: how many experts there are in all, and the first of those that w_gate, w_up and w_down hold.
        Other experts add nothing: summed over the devices, the results are those of the whole layer.
      activation, spread, backend: as in `moe`.

    Returns:
      [tokens, d] of x's dtype.

    Raises ValueError and TypeError for what its parts refuse.
    """
    weights = floats.array("moe_experts", "weights", weights)
    given = (("x", x, 2), ("w_gate", w_gate, 3), ("w_up", w_up, 3), ("w_down", w_down, 3))
    x, w_gate, w_up, w_down = checked_operands("moe_experts", *given)
    if weights.shape != np.shape(experts):
        raise ValueError(f"weights{weights.shape} and experts{np.shape(experts)} differ: both are [tokens, top_k]")
    if (num_experts is None) != (group_offset is None):
        raise ValueError(f"num_experts={num_experts} and group_offset={group_offset}: a share of the experts takes both")
    if num_experts is not None and isinstance(num_experts, int | np.integer) and num_experts < w_gate.shape[0]:
        raise ValueError(
            f"num_experts={num_experts} is less than the {w_gate.shape[0]} experts of w_gate: it counts all experts"
        )
    if w_down.shape != (w_gate.shape[0], w_gate.shape[2], x.shape[-1]):
        raise ValueError(
            f"w_gate{w_gate.shape} and w_down{w_down.shape} do not fit x{x.shape}: they are [experts, d, hidden] and "
            "[experts, hidden, d]"
        )
    rows, sizes, order, positions = moe_dispatch(x, experts, w_gate.shape[0] if num_experts is None else num_experts)
    options: dict[str, Any] = {"group_offset": group_offset, "spread": spread, "backend": backend}
    hidden = gated_grouped_matmul(rows, w_gate, w_up, sizes, activation=activation, **options)
    flat, order = mesh.same_mesh_axes(weights.reshape(-1), order)
    scale = flat.at[order].get(unique_indices=True, mode="promise_in_bounds")
    return moe_combine(grouped_matmul(hidden, w_down, sizes, row_scale=scale, **options), order, positions)


def _check_top_k(top_k: int, experts: int) -> None:
    if isinstance(top_k, bool) or not isinstance(top_k, int | np.integer):
        raise TypeError(f"top_k={top_k!r} is no integer")
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k={top_k} is not from 1 to the {experts} experts of router_logits")


# --- Each of these two is the other's transpose. Indices are of a permutation: none is out of bounds.


@jax.custom_vjp
def _rows_of_tokens(x: jax.Array, token: jax.Array, positions: jax.Array) -> jax.Array:
    """x[token]."""
    return x.at[token].get(mode="promise_in_bounds")


@jax.custom_vjp
def _sums_of_rows(rows: jax.Array, token: jax.Array, positions: jax.Array) -> jax.Array:
    """sum over j of rows[positions[:, j]], float32 or wider."""
    wide = np.promote_types(rows.dtype, np.float32)
    zero, *_ = mesh.same_mesh_axes(jnp.zeros((positions.shape[0], rows.shape[1]), wide), rows)
    each = (rows.at[positions[:, j]].get(mode="promise_in_bounds").astype(wide) for j in range(positions.shape[1]))
    return functools.reduce(jnp.add, each, zero)


def _rows_backward(saved: Any, g: jax.Array) -> tuple[jax.Array, None, None]:
    dtype, token, positions = saved
    return _sums_of_rows(g, token, positions).astype(dtype.dtype), None, None


def _sums_backward(saved: Any, g: jax.Array) -> tuple[jax.Array, None, None]:
    dtype, token, positions = saved
    return _rows_of_tokens(g.astype(dtype.dtype), token, positions), None, None


def _saved(x: jax.Array, token: jax.Array, positions: jax.Array) -> Any:
    return jnp.zeros((0,), x.dtype), token, positions


_rows_of_tokens.defvjp(lambda *arrays: (_rows_of_tokens(*arrays), _saved(*arrays)), _rows_backward)
_sums_of_rows.defvjp(lambda *arrays: (_sums_of_rows(*arrays), _saved(*arrays)), _sums_backward)
