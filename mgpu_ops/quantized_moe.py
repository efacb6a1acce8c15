"""quantized_moe: a mixture-of-experts layer for serving, whose experts have weights of 8 or 4 bits.

Two `quantized_grouped_matmul`, the first one of gate and up, which so reads the rows once; the rest is that of `moe`. The
routing weights are factors in XLA's sum of a token's rows.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from mgpu_ops import floats, quantized_grouped
from mgpu_ops.core import mesh
from mgpu_ops.core.activations import Activation, checked_activation
from mgpu_ops.grouped import routing
from mgpu_ops.grouped.calls import checked_operands, checked_spread
from mgpu_ops.grouped.sizes import Spread
from mgpu_ops.matmul.gated.activation import gated
from mgpu_ops.matmul.quantized import checked_weights
from mgpu_ops.moe import (
    checked_routing,
    own_experts,
    routed,
    rows_of_tokens,
    rule_of_experts,
    sorted_by_expert,
    tokens_of,
    weighted_sums,
)
from mgpu_ops.quantized_grouped import checked_scales
from mgpu_ops.registry import dispatch, partition


def quantized_moe(
    x: ArrayLike,
    router_logits: ArrayLike,
    w_gate_up: ArrayLike,
    w_down: ArrayLike,
    gate_up_scales: ArrayLike,
    down_scales: ArrayLike,
    top_k: int,
    *,
    gate_up_zero_points: ArrayLike | None = None,
    down_zero_points: ArrayLike | None = None,
    norm_topk_prob: bool = True,
    activation: Activation | None = "silu",
    spread: Spread = "random",
    backend: dispatch.Backend | None = None,
) -> jax.Array:
    """`moe` for serving, with weights of int8 or int4.

    out[t] = sum over the top_k experts e of token t of weight[t, e] * expert_e(x[t]) with
    expert_e(x) = (activation(x gate[e]^T) * (x up[e]^T)) down[e]^T. gate[e] and up[e] are the halves of
    (w_gate_up[e] - zero points) scales, down[e] is (w_down[e] - zero points) scales; the weights are those of `moe_route`. No
    token is dropped.

    Args:
      x: [..., d]. bfloat16 or float16 for the kernels; other floats run through XLA.
      router_logits: [..., experts] floats, as in `moe`.
      w_gate_up: int8 or int4, [experts, 2 hidden, d]: gate's rows, then up's.
      w_down: int8 or int4, [experts, d, hidden].
      gate_up_scales: floats, [experts, 2 hidden], or [experts, d / group size, 2 hidden], as in `quantized_grouped_matmul`.
      down_scales: floats, [experts, d], or [experts, hidden / group size, d].
      top_k, norm_topk_prob, activation, spread: as in `moe`.
      gate_up_zero_points, down_zero_points: numbers of the scales' shapes, as in `quantized_grouped_matmul`. Default: 0.
      backend: of the products, as in `quantized_grouped_matmul`.

    Returns:
      [..., d] of x's dtype. Gate and up, activation(gate) * up, and each expert's result are each rounded to it once. A token's
      results are multiplied by their weights and added in float32, in the order of its experts.

    Works under jit, grad (reverse mode) with respect to x and router_logits, vmap, scan, checkpoint and shard_map. Weights,
    scales and zero points are constants: a gradient of scales or zero points raises. The backward pass dequantises all experts'
    weights to 16 bits.

    Raises:
      ValueError: as `moe`, and for scales and zero points as `quantized_grouped_matmul`.
      TypeError: x, router_logits or scales that are no floats, weights that are no int8 or int4, a top_k that is no integer.

    Example:
      >>> x, logits = jnp.ones((4, 128), jnp.bfloat16), jnp.zeros((4, 8))
      >>> w_gate_up, w_down = jnp.ones((8, 512, 128), jnp.int8), jnp.ones((8, 128, 256), jnp.int8)
      >>> mgpu_ops.quantized_moe(x, logits, w_gate_up, w_down, jnp.ones((8, 512)), jnp.ones((8, 128)), top_k=2).shape
      (4, 128)

    Source: as for `moe`; of the products as for `quantized_grouped_matmul`.
    """
    op = "quantized_moe"
    given = {
        "w_gate_up": checked_weights(op, "w_gate_up", w_gate_up),
        "w_down": checked_weights(op, "w_down", w_down),
        "gate_up_scales": floats.scale(op, "gate_up_scales", gate_up_scales),
        "down_scales": floats.scale(op, "down_scales", down_scales),
    }
    for product, zero_points in (("gate_up", gate_up_zero_points), ("down", down_zero_points)):
        if zero_points is not None:
            name = f"{product}_zero_points"
            given[name] = floats.zero_points(op, name, zero_points, given[f"w_{product}"].dtype)
    options = activation, spread, dispatch.requested_backend(backend)

    def of_routed(x: jax.Array, weights: jax.Array, experts: jax.Array, *arrays: jax.Array) -> jax.Array:
        return _experts((x, weights, experts), dict(zip(given, arrays, strict=True)), *options)

    def of_sorted(x: jax.Array, found: routing.Sorted, *arrays: jax.Array) -> jax.Array:
        return _experts((x, *found.unknown()), dict(zip(given, arrays, strict=True)), *options, found=found)

    return routed(
        op, of_routed, x, router_logits, given, top_k, norm_topk_prob, _dimensions(given), of_sorted, backend=options[-1]
    )


def quantized_moe_experts(
    x: ArrayLike,
    weights: ArrayLike,
    experts: ArrayLike,
    w_gate_up: ArrayLike,
    w_down: ArrayLike,
    gate_up_scales: ArrayLike,
    down_scales: ArrayLike,
    *,
    gate_up_zero_points: ArrayLike | None = None,
    down_zero_points: ArrayLike | None = None,
    num_experts: int | None = None,
    group_offset: ArrayLike | None = None,
    activation: Activation | None = "silu",
    spread: Spread = "random",
    backend: dispatch.Backend | None = None,
) -> jax.Array:
    """`quantized_moe` of tokens that were routed already: by `moe_route`, or in any other way.

    Args:
      x: [tokens, d].
      weights: [tokens, top_k] floats.
      experts: [tokens, top_k] integers, as `moe_dispatch` takes them.
      w_gate_up, w_down, gate_up_scales, down_scales, gate_up_zero_points, down_zero_points: as in `quantized_moe`, of all
        experts; or of a device's share, with `num_experts` and `group_offset`.
      num_experts, group_offset: as in `moe_experts`. Other experts add nothing.
      activation, spread, backend: as in `quantized_moe`.

    Returns:
      [tokens, d] of x's dtype.

    Raises:
      ValueError, TypeError: as `moe_experts` and `quantized_grouped_matmul`.

    Example:
      >>> x = jnp.ones((4, 128), jnp.bfloat16)
      >>> w_gate_up, w_down = jnp.ones((8, 512, 128), jnp.int8), jnp.ones((8, 128, 256), jnp.int8)
      >>> weights, experts = mgpu_ops.moe_route(jnp.zeros((4, 8)), top_k=2)
      >>> mgpu_ops.quantized_moe_experts(x, weights, experts, w_gate_up, w_down, jnp.ones((8, 512)), jnp.ones((8, 128))).shape
      (4, 128)
    """
    arrays: dict[str, ArrayLike | None] = {"w_gate_up": w_gate_up, "w_down": w_down}
    arrays |= {"gate_up_scales": gate_up_scales, "down_scales": down_scales}
    arrays |= {"gate_up_zero_points": gate_up_zero_points, "down_zero_points": down_zero_points}
    return _experts((x, weights, experts), arrays, activation, spread, backend, share=(num_experts, group_offset))


def _experts(
    tokens: tuple[ArrayLike, ArrayLike, ArrayLike],
    of_experts: Mapping[str, Any],
    activation: Activation | None,
    spread: Spread,
    backend: dispatch.Backend | None,
    share: tuple[int | None, ArrayLike | None] = (None, None),
    found: routing.Sorted | None = None,
) -> jax.Array:
    """`quantized_moe_experts` of (x, weights, experts), matrices, scales and zero points by name, (num_experts, group_offset).

    found: the tokens sorted by expert, in place of weights and experts.
    """
    op, (x, weights, experts) = "quantized_moe_experts", tokens
    (x,) = checked_operands(op, ("x", x, 2))
    given = _checked_matrices(op, x, of_experts["w_gate_up"], of_experts["w_down"])
    own, both, d = given["w_gate_up"].shape
    of_tokens, offset, count = checked_routing(op, x, weights, experts, ("w_gate_up", given["w_gate_up"]), *share)
    for product, sides in (("gate_up", (own, d, both)), ("down", (own, both // 2, d))):
        names, of = (f"{product}_scales", f"{product}_zero_points"), given[f"w_{product}"].dtype
        scales, zero_points = (of_experts.get(name) for name in names)
        given |= dict(zip(names, checked_scales(op, scales, zero_points, of, sides, f"{product}_"), strict=False))
    activation, backend = checked_activation(activation), dispatch.requested_backend(backend)
    call = quantized_grouped.Call(True, x.dtype.name, checked_spread(spread), None, backend, group_offset=False)
    # The activation's kernel runs where it can and rows are few, as without a named backend: that is the products'.
    of_activation: dispatch.Backend | None = None if backend in (None, "mosaic") else "xla"

    def layer(x: jax.Array, weights: jax.Array, experts: jax.Array, *rest: jax.Array) -> jax.Array:
        experts = own_experts(experts, own, count, *rest[len(given) :])
        sorting = sorted_by_expert(x, experts, own)
        x, weights, experts, *arrays = mesh.same_mesh_axes(x, weights, experts, *sorting, *rest[: len(given)])
        sizes, order, positions = arrays[:3]
        out = products(rows_of_tokens(x, tokens_of(order, positions), positions), sizes, *arrays[3:])
        known = jnp.where(experts >= 0, weights, 0)
        return weighted_sums(out, known, order, positions).astype(x.dtype)

    def products(rows: jax.Array, sizes: jax.Array, *arrays: jax.Array) -> jax.Array:
        of = dict(zip(given, arrays, strict=True))

        def matmul(rows: jax.Array, name: str) -> jax.Array:
            zero_points = [of[f"{name}_zero_points"]] if f"{name}_zero_points" in of else []
            arrays = mesh.same_mesh_axes(rows, of[f"w_{name}"], of[f"{name}_scales"], sizes, *zero_points)
            found: jax.Array = quantized_grouped.product(call, *arrays)
            return found

        gate_up = matmul(rows, "gate_up")
        return matmul(gated(activation, of_activation, gate_up) if both else gate_up, "down")

    if found is not None:
        x, *arrays = mesh.same_mesh_axes(x, *found, *given.values())
        of_rows, sorted_weights, sizes, positions = arrays[:4]
        out = products(rows_of_tokens(x, of_rows, positions), sizes, *arrays[4:])
        return weighted_sums(out, sorted_weights[positions], of_rows, positions).astype(x.dtype)
    rule = functools.partial(rule_of_experts, op, dimensions=_dimensions(given))
    result: jax.Array = partition.with_first(layer, rule, 3, x, *of_tokens, *given.values(), *offset)
    return result


def _checked_matrices(op: str, x: jax.Array, w_gate_up: ArrayLike, w_down: ArrayLike) -> dict[str, jax.Array]:
    """Both matrices by name. Raises for what are no weights, and for shapes that do not fit x or each other."""
    given = {"w_gate_up": checked_weights(op, "w_gate_up", w_gate_up), "w_down": checked_weights(op, "w_down", w_down)}
    gate_up, down = given.values()
    for name, w in given.items():
        if w.ndim != 3:
            raise ValueError(f"{name} has shape {w.shape}: {op} takes rank 3; use jax.vmap for batches")
    experts, both, d = gate_up.shape
    if d != x.shape[1] or both % 2:
        raise ValueError(
            f"w_gate_up{gate_up.shape} does not fit x{x.shape}: it is [experts, 2 hidden, d], gate's rows before up's, "
            "transposed beside the matrices of moe"
        )
    if down.shape != (experts, d, both // 2):
        raise ValueError(
            f"w_gate_up{gate_up.shape} and w_down{down.shape} differ: they are [experts, 2 hidden, d] and "
            "[experts, d, hidden], transposed beside the matrices of moe"
        )
    return given


_DIMENSIONS = {"w_gate_up": "E B D", "w_down": "E D H", "gate_up": "E S B", "down": "E G D"}


def _dimensions(given: dict[str, jax.Array]) -> str:
    """Of these arrays for a `partition.Rule`: each device has all experts. Scales [experts, columns] have no groups."""
    found = []
    for name, x in given.items():
        dims = _DIMENSIONS[name.removesuffix("_scales").removesuffix("_zero_points")].split()
        found.append(" ".join(dims if x.ndim == 3 else dims[::2]))
    return ", ".join(found)
