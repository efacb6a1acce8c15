"""A mixture-of-experts layer: routing, tokens sorted by expert, gated experts, and the weighted sum back to tokens.

`moe` is the layer; its parts are public as well: `moe_route`, `moe_dispatch`, `moe_experts`, `moe_combine`. The products are
kernels (`gated_grouped_matmul`, and `grouped_matmul` with the routing weights as `row_scale`), and for few tokens routing and
sort; the rest is XLA's, without a scatter-add, so that the same inputs give the same bits. An assignment is a token and one of
its experts; there are tokens x top_k of them, and nothing larger than their rows is made.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from mgpu_ops import flags, floats, integers
from mgpu_ops.core import mesh
from mgpu_ops.core.activations import Activation, checked_activation
from mgpu_ops.core.derivatives import first_order, refuse_8_bits
from mgpu_ops.grouped import gated, grouped_matmul, ragged_contraction, routing
from mgpu_ops.grouped.calls import checked_offset, checked_operands, checked_sizes, checked_spread
from mgpu_ops.grouped.rows import rows_at
from mgpu_ops.grouped.sizes import Spread
from mgpu_ops.registry import dispatch, partition
from mgpu_ops.sorting import are_few, best, counting_sort, in_places, inverse, of_few

MATRICES = "E D H, E D H, E H D"  # of a `partition.Rule`: each device has all experts


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
    """A mixture-of-experts layer: a gated layer by each of a token's top_k experts, added up with the router's weights.

    out[t] = sum over the top_k experts e of token t of weight[t, e] * expert_e(x[t]) with
    expert_e(x) = (activation(x w_gate[e]) * (x w_up[e])) w_down[e], and the weights of `moe_route`. No token is dropped.

    Args:
      x: [..., d]. bfloat16 or float16 for the kernels; other floats run through XLA.
      router_logits: [..., experts] floats, x times the router's matrix, best in float32.
      w_gate, w_up: [experts, d, hidden], of x's dtype.
      w_down: [experts, hidden, d], of x's dtype.
      top_k: experts of each token, from 1 to the number of experts.
      norm_topk_prob: True (default): the weights of a token sum to 1. False: they are the softmax over all experts.
      activation: "silu" (default), "gelu" (the tanh approximation), "gelu_erf", "relu", or "none" or None for a bilinear layer.
      spread: how tokens usually spread over the experts, as in `grouped_matmul`: chooses the config, never the answer.
      backend: of the products, as in `grouped_matmul`.

    Returns:
      [..., d] of x's dtype. Each expert's result is scaled in float32 and rounded once; a token's are added in float32.

    Works under jit, grad (reverse mode), vmap, scan, checkpoint and shard_map.

    Memory: the backward pass keeps x, and gate and up before the activation, each with tokens x top_k rows of hidden. It
    gathers the rows of x again, but computes no product twice; `jax.checkpoint` keeps less and computes all again. Without
    gradients, and with at most 1280 columns of `hidden`, the first kernel loads the rows of x by index, and no sorted copy of
    them is made.

    Raises:
      ValueError: shapes or dtypes that do not fit each other, a top_k beyond the experts, an unknown activation, spread or
        backend.
      TypeError: not arrays of floats, a top_k that is no integer.

    Example:
      >>> x, logits = jnp.ones((2, 16, 128), jnp.bfloat16), jnp.zeros((2, 16, 8))
      >>> w_gate, w_up = jnp.ones((2, 8, 128, 256), jnp.bfloat16)
      >>> w_down = jnp.ones((8, 256, 128), jnp.bfloat16)
      >>> mgpu_ops.moe(x, logits, w_gate, w_up, w_down, top_k=2).shape
      (2, 16, 128)

    Source: Shazeer et al., arXiv:1701.06538, section 2; see docs/kernels/moe.md.
    """
    options: dict[str, Any] = {"activation": activation, "spread": spread, "backend": backend}
    of_routed = functools.partial(moe_experts, **options)
    call = _Call(checked_activation(activation), checked_spread(spread), dispatch.requested_backend(backend), False)

    def of_sorted(x: jax.Array, found: routing.Sorted, *matrices: jax.Array) -> jax.Array:
        checked, _ = checked_experts("moe_experts", x, *found.unknown(), matrices, num_experts=None, group_offset=None)
        return _of_sorted(call, *mesh.same_mesh_axes(x, *checked[3:], *found))

    matrices = matrices_of("moe", w_gate, w_up, w_down)
    return routed(
        "moe", of_routed, x, router_logits, matrices, top_k, norm_topk_prob, of_sorted=of_sorted, backend=call.backend
    )


def matrices_of(op: str, *given: ArrayLike) -> dict[str, jax.Array]:
    """w_gate, w_up and w_down as arrays. TypeError for what are no floats."""
    return {name: floats.array(op, name, one) for name, one in zip(("w_gate", "w_up", "w_down"), given, strict=True)}


def routed(
    op: str,
    of_routed: Callable[..., jax.Array],
    x: ArrayLike,
    router_logits: ArrayLike,
    matrices: Mapping[str, jax.Array],
    top_k: int,
    norm_topk_prob: bool,
    dimensions: str = MATRICES,
    of_sorted: Callable[..., jax.Array] | None = None,
    backend: dispatch.Backend | None = None,
) -> jax.Array:
    """A layer of x, logits and the experts' arrays: `of_routed` of x [tokens, d], weights, experts and those arrays.

    matrices: by name, the first one [experts, ., .]. dimensions: of all of them, for a `partition.Rule`. of_sorted: the layer
    of x, a `routing.Sorted` and the arrays, where `routing.kernel` with the backend makes one.
    """
    x, logits = floats.array(op, "x", x), floats.array(op, "router_logits", router_logits)
    if not x.ndim or not logits.ndim or x.shape[:-1] != logits.shape[:-1]:
        raise ValueError(f"x{x.shape} and router_logits{logits.shape} differ: they are [..., d] and [..., experts]")
    name, first = next(iter(matrices.items()))
    if first.ndim == 3 and logits.shape[-1] != first.shape[0]:
        raise ValueError(
            f"router_logits{logits.shape} are of {logits.shape[-1]} experts, {name}{first.shape} of {first.shape[0]}"
        )

    def layer(x: jax.Array, logits: jax.Array, *matrices: jax.Array) -> jax.Array:
        def of_rows(x: jax.Array, logits: jax.Array, *matrices: jax.Array) -> jax.Array:
            weights, experts = moe_route(logits, top_k, norm_topk_prob=norm_topk_prob)
            return of_routed(x, weights, experts, *matrices)

        tokens, run = math.prod(x.shape[:-1]), of_rows
        rows, of_tokens = (of.reshape(tokens, of.shape[-1]) for of in (x, logits))
        if of_sorted is not None:
            _check_top_k(top_k, logits.shape[-1])
            route = routing.kernel(of_tokens, int(top_k), flags.checked("norm_topk_prob", norm_topk_prob), backend)
            if route is not None:
                run = routing.of_few(lambda x, logits, *matrices: of_sorted(x, route(logits), *matrices), of_rows)
        return run(rows, of_tokens, *matrices).reshape(x.shape)

    def rule(x: jax.Array, logits: jax.Array, *matrices: jax.Array) -> partition.Rule:
        tokens = " ".join(f"t{i}" for i in range(x.ndim - 1))
        return partition.Rule(op, f"{tokens} D, {tokens} E, {dimensions} -> {tokens} D")

    out: jax.Array = partition.with_first(layer, rule, 2, x, logits, *matrices.values())
    return out


def moe_route(router_logits: ArrayLike, top_k: int, *, norm_topk_prob: bool = True) -> tuple[jax.Array, jax.Array]:
    """The top_k experts of each token, the likeliest first, and their weights: (weights, experts), both [..., top_k].

    Args:
      router_logits: [..., experts] floats; computed in float32 or wider.
      top_k: experts of each token, from 1 to the number of experts.
      norm_topk_prob: True (default): the weights are the softmax over the chosen logits, and sum to 1. False: they are the
        softmax over all experts.

    Returns:
      weights: float32 (float64 for such logits); the gradient goes through them to the logits.
      experts: int32. Of equal logits, the expert of the smaller number comes first.

    Raises:
      ValueError: no experts, or a top_k beyond them.
      TypeError: logits that are no floats, a top_k that is no integer.

    Example:
      >>> weights, experts = mgpu_ops.moe_route(jnp.array([0.0, 2.0, 1.0]), top_k=2)
      >>> experts.tolist()
      [1, 2]
    """
    logits = floats.array("moe_route", "router_logits", router_logits)
    if not logits.ndim:
        raise ValueError("router_logits have shape (): they are [..., experts]")
    _check_top_k(top_k, logits.shape[-1])
    flags.checked("norm_topk_prob", norm_topk_prob)

    def route(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = logits.astype(np.promote_types(logits.dtype, np.float32))
        of = logits if norm_topk_prob else jax.nn.log_softmax(logits)
        experts, chosen = best(lax.stop_gradient(logits), of, int(top_k))
        return (jax.nn.softmax(chosen) if norm_topk_prob else jnp.exp(chosen)), experts

    def rule(logits: jax.Array) -> partition.Rule:
        tokens = " ".join(f"t{i}" for i in range(logits.ndim - 1))
        return partition.Rule("moe_route", f"{tokens} E -> {tokens} K, {tokens} K")

    found: tuple[jax.Array, jax.Array] = partition.with_first(route, rule, 1, logits)
    return found


def moe_dispatch(x: ArrayLike, experts: ArrayLike, num_experts: int) -> MoeDispatch:
    """The rows of x, once for each of a token's experts, sorted by expert: what grouped products take.

    Args:
      x: [tokens, d], of any dtype.
      experts: [tokens, top_k] integers. One outside of 0 to num_experts - 1 names no expert: its row comes after all groups.
      num_experts: how many experts there are, at least 1.

    Returns:
      A `MoeDispatch`: rows, group_sizes, order and positions.

    The sort is stable. The gradient of x is a sum of top_k rows in float32, in the order of `experts`, without a scatter-add.

    Raises:
      ValueError: shapes that do not fit each other, a symbolic number of tokens.
      TypeError: experts or num_experts that are no integers.

    Example:
      >>> sorted_by_expert = mgpu_ops.moe_dispatch(jnp.ones((2, 4)), jnp.array([[2, 0], [2, 1]]), num_experts=3)
      >>> sorted_by_expert.group_sizes.tolist()
      [1, 1, 2]
    """
    x = floats.any_array("moe_dispatch", "x", x, "any dtype")

    def dispatched(x: jax.Array, experts: jax.Array) -> MoeDispatch:
        sizes, order, positions = sorted_by_expert(x, experts, num_experts)
        x, order, positions, sizes = mesh.same_mesh_axes(x, order, positions, sizes)
        return MoeDispatch(rows_of_tokens(x, tokens_of(order, positions), positions), sizes, order, positions)

    rule = partition.Rule("moe_dispatch", "TOKENS d, TOKENS K -> ROWS d, SIZES, ROWS, TOKENS K")  # sorted are all tokens
    experts = _numbers_of_experts(experts)
    found: MoeDispatch = partition.with_first(dispatched, lambda *_: rule, 2, x, experts)
    return found


def _checked_count(num_experts: Any) -> int:
    """The number of experts as an int. Raises for what is none."""
    if isinstance(num_experts, bool) or not isinstance(num_experts, int | np.integer):
        raise TypeError(f"num_experts={num_experts!r} is no integer")
    if num_experts < 1:
        raise ValueError(f"num_experts={num_experts} is not at least 1")
    if num_experts >= integers.INT32.max:
        raise ValueError(f"num_experts={num_experts} must be below {integers.INT32.max}: an int32 numbers them")
    return int(num_experts)


def sorted_by_expert(x: jax.Array, experts: ArrayLike, num_experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """group_sizes, order and positions of `MoeDispatch`."""
    experts = _numbers_of_experts(experts)
    if x.ndim != 2 or experts.ndim != 2 or x.shape[0] != experts.shape[0]:
        raise ValueError(f"x{x.shape} and experts{experts.shape}: moe_dispatch takes [tokens, d] and [tokens, top_k]")
    if not isinstance(x.shape[0], int):
        raise ValueError(
            f"x{x.shape} has a symbolic number of tokens, and to sort them by expert it must be known: export a function for "
            "each number, or for the largest one and pad"
        )
    num_experts = _checked_count(num_experts)
    integers.check_count("the rows of all experts, tokens times top_k,", experts.size)
    known = (experts >= 0) & (experts < num_experts)
    key = jnp.where(known, experts, num_experts).astype(jnp.int32).reshape(-1)
    positions, sizes = counting_sort(key, num_experts)
    order = inverse(positions)
    sizes, order, positions = mesh.same_mesh_axes(sizes, order, positions.reshape(experts.shape))
    return sizes, order, positions


def _numbers_of_experts(experts: ArrayLike) -> jax.Array:
    """The argument `experts` as int32: what that does not hold names no expert, -1, and does not wrap around to one.

    Nor may the number of experts, which is compared with them: 200 is -56 in int8.
    """
    found = integers.array("experts", experts)
    if not isinstance(found, jax.Array):
        found = np.where((found >= 0) & (found <= integers.INT32.max), found.astype(np.int64), -1)
    elif not integers.fits(found.dtype):
        found = jnp.where((found >= 0) & (found <= integers.INT32.max), found, -1)
    return jnp.asarray(found, jnp.int32)


def moe_combine(rows: ArrayLike, order: ArrayLike, positions: ArrayLike, *, out_dtype: DTypeLike | None = None) -> jax.Array:
    """Adds up the rows of each token's experts, the reverse of `moe_dispatch`: out[t] = sum over j of rows[positions[t, j]].

    Args:
      rows: [assignments, d] floats, such as `grouped_matmul` gives with the routing weights as `row_scale`.
      order: [assignments] integers, as `moe_dispatch` gives them.
      positions: [tokens, top_k] integers, as `moe_dispatch` gives them.
      out_dtype: of the result; by default that of rows.

    Returns:
      [tokens, d] of out_dtype, added in float32 or wider, in the order of j: the same rows give the same bits.

    The gradient of rows is a gather.

    Raises:
      ValueError: shapes that do not fit each other, known numbers that name no row.
      TypeError: rows that are no floats, order or positions that are no integers.

    Example:
      >>> rows, _, order, positions = mgpu_ops.moe_dispatch(jnp.ones((2, 4)), jnp.array([[2, 0], [2, 1]]), num_experts=3)
      >>> mgpu_ops.moe_combine(rows, order, positions).shape
      (2, 4)
    """
    rows = floats.array("moe_combine", "rows", rows)
    rows_of, places = integers.array("order", order), integers.array("positions", positions)
    if (rows.ndim, rows_of.ndim, places.ndim) != (2, 1, 2) or not rows.shape[0] == rows_of.size == places.size:
        raise ValueError(
            f"rows{rows.shape}, order{rows_of.shape} and positions{places.shape}: moe_combine takes [assignments, d], "
            "[assignments] and [tokens, top_k]"
        )
    dtype = floats.dtype("out_dtype", rows.dtype if out_dtype is None else out_dtype)
    rows_of = integers.rows("order", rows_of, "rows", rows.shape[0])
    places = integers.rows("positions", places, "rows", rows.shape[0])

    def combined(*arrays: jax.Array) -> jax.Array:
        rows, order, positions = mesh.same_mesh_axes(*arrays)
        return _sums_of_rows(rows, tokens_of(order, positions), positions).astype(dtype)

    rule = partition.Rule("moe_combine", "ROWS d, ROWS, TOKENS K -> TOKENS d")  # the gradient of rows takes all tokens
    found: jax.Array = partition.with_first(combined, lambda *_: rule, 3, rows, rows_of, places)
    return found


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
      x: [tokens, d].
      weights: [tokens, top_k] floats.
      experts: [tokens, top_k] integers, as `moe_dispatch` takes them.
      w_gate, w_up, w_down: as in `moe`, of all experts; or of a device's share, with `num_experts` and `group_offset`.
      num_experts, group_offset: how many experts there are in all, and the first of those that w_gate, w_up and w_down hold.
        Other experts add nothing: summed over the devices, the results are those of the whole layer.
      activation, spread, backend: as in `moe`.

    Returns:
      [tokens, d] of x's dtype.

    Raises:
      ValueError: as `moe`; of num_experts and group_offset only one, or a share beyond all experts.
      TypeError: not arrays of floats, experts, num_experts or group_offset that are no integers.

    Example:
      >>> x = jnp.ones((16, 128), jnp.bfloat16)
      >>> w_gate, w_up = jnp.ones((2, 8, 128, 256), jnp.bfloat16)
      >>> w_down = jnp.ones((8, 256, 128), jnp.bfloat16)
      >>> weights, experts = mgpu_ops.moe_route(jnp.zeros((16, 8)), top_k=2)
      >>> mgpu_ops.moe_experts(x, weights, experts, w_gate, w_up, w_down).shape
      (16, 128)
    """
    arrays, count = checked_experts(
        "moe_experts", x, weights, experts, (w_gate, w_up, w_down), num_experts=num_experts, group_offset=group_offset
    )
    groups = arrays[3].shape[0]
    call = _Call(checked_activation(activation), checked_spread(spread), dispatch.requested_backend(backend), count is not None)

    def layer(x: jax.Array, weights: jax.Array, experts: jax.Array, *rest: jax.Array) -> jax.Array:
        matrices, offset = rest[:3], next(iter(rest[3:]), None)
        sizes, order, positions = sorted_by_expert(x, experts, groups if count is None else count)
        sizes = checked_sizes("moe_experts", sizes, groups, order.size, offset, "w_gate")
        return _layer(call, *mesh.same_mesh_axes(x, weights, *matrices, sizes, order, positions))

    found: jax.Array = partition.with_first(layer, functools.partial(rule_of_experts, "moe_experts"), 3, *arrays)
    return found


def checked_experts(
    op: str,
    x: ArrayLike,
    weights: ArrayLike,
    experts: ArrayLike,
    matrices: Sequence[ArrayLike],
    *,
    num_experts: int | None,
    group_offset: ArrayLike | None,
    mixed: Sequence[str] = (),
) -> tuple[list[jax.Array], int | None]:
    """x, weights, experts, the three matrices and, for a share of the experts, the offset; and how many there are in all.

    mixed: dtypes of which x and the matrices may have different ones. Raises for what does not fit.
    """
    named = zip(("w_gate", "w_up", "w_down"), matrices, strict=True)
    x, w_gate, w_up, w_down = checked_operands(op, ("x", x, 2), *((name, one, 3) for name, one in named), mixed=mixed)
    of_tokens, offset, count = checked_routing(op, x, weights, experts, ("w_gate", w_gate), num_experts, group_offset)
    if w_up.shape != w_gate.shape:
        raise ValueError(f"w_gate{w_gate.shape} and w_up{w_up.shape} differ: both are [experts, d, hidden]")
    if w_down.shape != (w_gate.shape[0], w_gate.shape[2], x.shape[-1]):
        raise ValueError(
            f"w_gate{w_gate.shape} and w_down{w_down.shape} do not fit x{x.shape}: they are [experts, d, hidden] and "
            "[experts, hidden, d]"
        )
    return [x, *of_tokens, w_gate, w_up, w_down, *offset], count


def checked_routing(
    op: str,
    x: jax.Array,
    weights: ArrayLike,
    experts: ArrayLike,
    matrix: tuple[str, jax.Array],
    num_experts: int | None,
    group_offset: ArrayLike | None,
) -> tuple[list[jax.Array], list[jax.Array], int | None]:
    """[weights, experts]; of a share of the experts [its offset], else []; and how many there are in all, None of no share.

    matrix: the name of an array [experts, ., .] of those that are here, and the array. Raises for what does not fit.
    """
    weights, (name, own) = floats.array(op, "weights", weights), matrix
    if weights.shape != integers.array("experts", experts).shape:
        raise ValueError(f"weights{weights.shape} and experts{np.shape(experts)} differ: both are [tokens, top_k]")
    if weights.ndim != 2 or weights.shape[0] != x.shape[0]:
        raise ValueError(f"x{x.shape} and experts{weights.shape}: {op} takes [tokens, d] and [tokens, top_k]")
    if not own.shape[0]:
        raise ValueError(f"{name}{own.shape} has no experts: {op} takes at least one")
    if (num_experts is None) != (group_offset is None):
        raise ValueError(f"num_experts={num_experts} and group_offset={group_offset}: a share of the experts takes both")
    of_tokens = [weights, _numbers_of_experts(experts)]
    if num_experts is None:
        return of_tokens, [], None
    count = _checked_count(num_experts)
    if count < own.shape[0]:
        raise ValueError(f"num_experts={count} is less than the {own.shape[0]} experts of {name}: it counts all experts")
    return of_tokens, [checked_offset(group_offset, count, own.shape[0], name)], count


def own_experts(experts: jax.Array, own: int, count: int | None, *offset: jax.Array) -> jax.Array:
    """The numbers of experts among a device's `own`: of all, or of `count` in all those from `offset` on. Else -1."""
    here = (experts >= 0) & (experts < (own if count is None else count))
    for first in offset:
        here = here & (experts >= first) & (experts - first < own)
        experts = experts - first
    return jnp.where(here, experts, -1)


def rule_of_experts(op: str, *arrays: jax.Array, dimensions: str = MATRICES) -> partition.Rule:
    """How a layer of x, weights, experts, arrays of these dimensions, and perhaps an offset is split over devices."""
    offset = ", " * (len(arrays) > 4 + dimensions.count(","))  # it has no dimension
    return partition.Rule(op, f"t D, t K, t K, {dimensions}{offset} -> t D")


# --- The layer after routing, with a gradient of its own


@dataclasses.dataclass(frozen=True)
class _Call:
    """What a call says beside its arrays. group_offset: the sizes are those of a shard, as `sizes.of_shard` gives them."""

    activation: Activation
    spread: Spread
    backend: dispatch.Backend | None
    group_offset: bool

    def gated(self, dtype: str) -> gated.Call:
        """Of the first two products."""
        return gated.Call(self.activation, False, dtype, self.spread, None, self.backend, self.group_offset)

    def grouped(self, dtype: str, transpose: bool, activation: Activation = "none") -> grouped_matmul.Call:
        """Of a product with w_down, or of one of a gradient."""
        return grouped_matmul.Call(transpose, dtype, activation, self.spread, None, self.backend, self.group_offset)

    def contraction(self, dtype: str) -> ragged_contraction.Call:
        """Of the gradient of a matrix."""
        return ragged_contraction.Call(dtype, self.spread, None, self.backend, self.group_offset)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layer(
    call: _Call,
    x: jax.Array,
    weights: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    sizes: jax.Array,
    order: jax.Array,
    positions: jax.Array,
) -> jax.Array:
    """`moe_experts` of sorted assignments."""
    tokens, scale = _in_order(weights, order, positions)
    return _of_sorted(call, x, w_gate, w_up, w_down, tokens, scale, sizes, positions)


def _of_sorted(
    call: _Call,
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    tokens: jax.Array,
    scale: jax.Array,
    sizes: jax.Array,
    positions: jax.Array,
) -> jax.Array:
    """The layer without a gradient, of the token and the weight of each sorted assignment."""
    first = call.gated(x.dtype.name)
    columns = w_gate.shape[2]
    if isinstance(columns, int) and columns <= _IN_THE_LOAD:  # an exported function may have a symbolic number
        hidden = gated.gated(dataclasses.replace(first, row_indices=True), x, w_gate, w_up, sizes, tokens)
    else:
        hidden = gated.gated(first, rows_of_tokens(x, tokens, positions), w_gate, w_up, sizes)
    return _down(call, hidden, w_down, sizes, scale, positions)


_IN_THE_LOAD = 1280  # columns of a gate, at most: with more, rows that are loaded by index cost more than a sorted copy


def tokens_of(order: jax.Array, positions: jax.Array) -> jax.Array:
    """The token of each assignment, sorted."""
    return order // max(positions.shape[1], 1)


def _scale(weights: jax.Array, order: jax.Array) -> jax.Array:
    """The weight of each assignment, sorted."""
    scale = weights.reshape(-1).at[order].get(unique_indices=True, mode="promise_in_bounds")
    return scale.astype(np.promote_types(scale.dtype, np.float32))


def _in_order(weights: jax.Array, order: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`tokens_of` and `_scale`. Of few assignments they are found as `order` is, and that is not: two kernels of XLA's less."""

    def many(weights: jax.Array, order: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        return tokens_of(order, positions), _scale(weights, order)

    def few(weights: jax.Array, order: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        each = jnp.int32(max(positions.shape[1], 1))
        of_tokens = lax.div(jnp.arange(order.size, dtype=jnp.int32), each)
        tokens, scale = in_places(positions.reshape(-1), of_tokens, weights.reshape(-1))
        return tokens, scale.astype(np.promote_types(scale.dtype, np.float32))

    run = of_few(few, many) if are_few(order.size, order.size) else many
    found: tuple[jax.Array, jax.Array] = run(weights, order, positions)
    return found


def _down(
    call: _Call, hidden: jax.Array, w_down: jax.Array, sizes: jax.Array, scale: jax.Array, positions: jax.Array
) -> jax.Array:
    """The second half: down, scaled, and summed by token."""
    dtype = hidden.dtype
    rows = grouped_matmul.product(call.grouped(dtype.name, False), hidden, w_down, sizes, None, scale)
    return _sums_of_rows(rows, positions, positions).astype(dtype)


def _layer_forward(call: _Call, x: jax.Array, weights: jax.Array, *arrays: jax.Array) -> Any:
    """It keeps gate and up, of which hidden and all gradients are made.

    The rows of x are gathered before, as the backward pass does again: XLA makes one gather of both where it sees both.
    """
    w_gate, w_up, w_down, sizes, order, positions = arrays
    refuse_8_bits("moe", "mgpu_ops.fp8_moe", x, w_gate, w_up, w_down)
    rows = rows_of_tokens(x, tokens_of(order, positions), positions)
    hidden, gate, up = gated.kept(call.gated(x.dtype.name), rows, w_gate, w_up, sizes)
    return _down(call, hidden, w_down, sizes, _scale(weights, order), positions), (x, weights, *arrays, gate, up)


def _layer_backward(call: _Call, saved: Any, g: jax.Array) -> tuple[Any, ...]:
    """One kernel for what the gradient of hidden is made into, one for the rows' gradient, three for those of the matrices."""
    x, weights, w_gate, w_up, w_down, sizes, order, positions, gate, up = saved
    tokens, scale = tokens_of(order, positions), _scale(weights, order)
    rows, g = (rows_of_tokens(of, tokens, positions) for of in (x, g.astype(x.dtype)))
    name, contraction = x.dtype.name, ragged_contraction.contraction
    gradients = grouped_matmul.gated_gradients(call.grouped(name, True, call.activation), g, w_down, sizes, gate, up, scale)
    dgate, dup, scaled, dscale = gradients
    drows = grouped_matmul.sum_of_two(call.grouped(name, True), dgate, w_gate, sizes, dup, w_up)
    dx = _sums_of_rows(drows, positions, positions).astype(name)
    of = call.contraction(name)
    dw_gate, dw_up = (contraction(of, rows, d, sizes) for d in (dgate, dup))
    dweights = dscale.at[positions].get(unique_indices=True, mode="promise_in_bounds").astype(weights.dtype)
    return dx, dweights, dw_gate, dw_up, contraction(of, scaled, g, sizes), None, None, None


_layer.defvjp(*first_order("moe", _layer_forward, _layer_backward))


def _check_top_k(top_k: int, experts: int) -> None:
    if isinstance(top_k, bool) or not isinstance(top_k, int | np.integer):
        raise TypeError(f"top_k={top_k!r} is no integer")
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k={top_k} is not from 1 to the {experts} experts of router_logits")


# --- Sums of rows, and the rows of tokens, which are their transpose. Indices are of a permutation: none is out of bounds.


@jax.custom_vjp
def rows_of_tokens(x: jax.Array, token: jax.Array, positions: jax.Array) -> jax.Array:
    """x[token]."""
    return rows_at(x, token)


@jax.custom_vjp
def _sums_of_rows(rows: jax.Array, token: jax.Array, positions: jax.Array) -> jax.Array:
    """sum over j of rows[positions[:, j]], float32 or wider."""
    return _added(rows, positions)


@jax.custom_vjp
def weighted_sums(rows: jax.Array, weights: jax.Array, order: jax.Array, positions: jax.Array) -> jax.Array:
    """sum over j of weights[:, j] rows[positions[:, j]], float32 or wider."""
    return _added(rows, positions, weights)


def _added(rows: jax.Array, positions: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    wide = np.promote_types(rows.dtype, np.float32 if weights is None else np.promote_types(weights.dtype, np.float32))
    zero, *_ = mesh.same_mesh_axes(jnp.zeros((positions.shape[0], rows.shape[1]), wide), rows)
    each = (rows.at[positions[:, j]].get(mode="promise_in_bounds").astype(wide) for j in range(positions.shape[1]))
    if weights is not None:
        each = (row * weights[:, j, None].astype(wide) for j, row in enumerate(each))
    return functools.reduce(jnp.add, each, zero)


def _rows_backward(saved: Any, g: jax.Array) -> tuple[jax.Array, None, None]:
    dtype, token, positions = saved
    return _sums_of_rows(g, token, positions).astype(dtype.dtype), None, None


def _sums_backward(saved: Any, g: jax.Array) -> tuple[jax.Array, None, None]:
    dtype, token, positions = saved
    return rows_of_tokens(g.astype(dtype.dtype), token, positions), None, None


def _weighted_backward(saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array, None, None]:
    rows, weights, order, positions = saved
    of_rows = rows_at(g, tokens_of(order, positions))
    drows = of_rows * _scale(weights, order)[:, None]
    dscale = jnp.sum(of_rows * rows, 1)
    dweights = dscale.at[positions].get(unique_indices=True, mode="promise_in_bounds")
    return drows.astype(rows.dtype), dweights.astype(weights.dtype), None, None


def _saved(x: jax.Array, token: jax.Array, positions: jax.Array) -> Any:
    return jnp.zeros((0,), x.dtype), token, positions


rows_of_tokens.defvjp(lambda *arrays: (rows_of_tokens(*arrays), _saved(*arrays)), _rows_backward)
_sums_of_rows.defvjp(lambda *arrays: (_sums_of_rows(*arrays), _saved(*arrays)), _sums_backward)
weighted_sums.defvjp(lambda *arrays: (weighted_sums(*arrays), arrays), _weighted_backward)
