"""gated_mlp: a gated layer, (activation(x w_gate) * (x w_up)) w_down + residual, for NVIDIA Hopper; forward and backward."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jax.typing import ArrayLike

from mgpu_ops import floats
from mgpu_ops.core import mesh, order
from mgpu_ops.core.activations import Activation, checked_activation
from mgpu_ops.core.derivatives import first_order, refuse_8_bits
from mgpu_ops.matmul import like_the_result, matmul
from mgpu_ops.matmul.gated import Call, batchable, gated_matmul
from mgpu_ops.registry import dispatch


def gated_mlp(
    x: ArrayLike,
    w_gate: ArrayLike,
    w_up: ArrayLike,
    w_down: ArrayLike,
    *,
    activation: Activation | None = "silu",
    residual: ArrayLike | None = None,
    backend: dispatch.Backend | None = None,
) -> jax.Array:
    """(activation(x w_gate) * (x w_up)) w_down + residual: a gated layer, the feed-forward part of Llama and others.

    Args:
      x: [..., k]. bfloat16 or float16 for the kernels; other floats run through XLA.
      w_gate, w_up: [k, n], of x's dtype.
      w_down: [n, d], of x's dtype.
      activation: "silu", "gelu" (the tanh approximation), "gelu_erf", "relu", or "none" or None for a bilinear layer.
      residual: of x's dtype, and of the result's shape or one that broadcasts to it. Default: none.
      backend: as in `gated_matmul`, for all kernels. Default: for each, what is known or predicted to be faster.

    Returns:
      [..., d] of x's dtype.

    Without a gradient it is `gated_matmul` and `matmul`, and writes activation(gate) * up alone. For the gradient the forward
    pass keeps gate, up and activation(gate) * up, [..., n] each, so that nothing is computed again. In the forward pass the
    product that yields up also reads gate and writes activation(gate) * up; in the backward pass the product that yields the
    gradient of activation(gate) * up writes those of gate and up in its place. `gated_matmul` and `matmul` apart keep less,
    and take longer.

    Works under jit, grad (reverse mode), vmap and shard_map.

    Raises:
      ValueError: shapes or dtypes that do not fit each other, an unknown activation or backend.
      TypeError: not arrays of floats.
    """
    named = {"x": x, "w_gate": w_gate, "w_up": w_up, "w_down": w_down} | ({} if residual is None else {"residual": residual})
    arrays = {name: floats.array("gated_mlp", name, a) for name, a in named.items()}
    rows, gate, up, down = (arrays[name] for name in ("x", "w_gate", "w_up", "w_down"))
    for name, a in arrays.items():
        if a.dtype != rows.dtype:
            raise ValueError(f"x is {rows.dtype} and {name} is {a.dtype}: cast one with .astype")
        if a.ndim != 2 and name.startswith("w_"):
            raise ValueError(f"{name} has shape {a.shape}: weights of gated_mlp have rank 2; use jax.vmap")
    if rows.ndim == 0 or gate.shape != up.shape or gate.shape != (rows.shape[-1], down.shape[0]):
        raise ValueError(
            f"x{rows.shape}, w_gate{gate.shape}, w_up{up.shape} and w_down{down.shape} do not fit: they are [..., k], "
            "[k, n], [k, n] and [n, d]"
        )
    call = Call(checked_activation(activation), False, rows.dtype.name, None, dispatch.requested_backend(backend))
    shape = (*rows.shape[:-1], down.shape[1])
    flat = [mesh.as_rows("x", rows), gate, up, down]
    if residual is not None:
        flat.append(mesh.as_rows("residual", like_the_result(arrays["residual"], shape, rows.dtype.name)))
    return _layer(call, *mesh.same_mesh_axes(*flat)).reshape(shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layer(call: Call, *arrays: jax.Array) -> jax.Array:
    """Of x, w_gate, w_up and w_down, and a residual or none."""
    x, w_gate, w_up, w_down, *residual = arrays
    hidden = gated_matmul(x, w_gate, w_up, activation=call.activation, backend=call.backend)
    return _down(call, hidden, w_down, *residual)


def _down(call: Call, hidden: jax.Array, w_down: jax.Array, residual: jax.Array | None = None) -> jax.Array:
    return matmul(hidden, w_down, residual=residual, backend=call.backend)


def _forward(call: Call, *arrays: jax.Array) -> Any:
    """The result, and what the backward pass needs: all inputs but the residual, gate, up, and what w_down multiplies."""
    refuse_8_bits("gated_mlp", "mgpu_ops.fp8_gated_mlp", *arrays)
    x, w_gate, w_up, w_down, *residual = arrays
    gate = matmul(x, w_gate, backend=call.backend)
    hidden, up = batchable(dataclasses.replace(call, stored=True))(x, w_up, gate)
    return _down(call, hidden, w_down, *residual), (x, w_gate, w_up, w_down, gate, up, hidden, bool(residual))


def _backward(call: Call, saved: Any, g: jax.Array) -> tuple[jax.Array, ...]:
    """dgate and dup by the kernel, of g w_down^T; dx = dgate w_gate^T + dup w_up^T; of each weight its input^T times those."""
    x, w_gate, w_up, w_down, gate, up, hidden, has_residual = saved
    # In a larger program nothing reads gate and up after this; where something does, XLA copies them.
    in_place = isinstance(gate, jax.core.Tracer)
    gradient = dataclasses.replace(call, transpose_w=True, gradient=True, stored=True, in_place=in_place)
    dgate, dup = batchable(gradient)(g, w_down, gate, up)
    product = functools.partial(matmul, backend=call.backend)
    # One after the other, so that hidden, then dgate, is gone before the next gradient of a weight is there.
    of_down, (dgate, dup) = order.weights_first(product(hidden, g, transpose_a=True), (dgate, dup))
    of_gate, dgate = order.weights_first(product(x, dgate, transpose_a=True), dgate)
    dx, dup = order.weights_first(product(dgate, w_gate, transpose_b=True), dup)
    of_up, (dx, dup) = order.weights_first(product(x, dup, transpose_a=True), (dx, dup))
    dx = product(dup, w_up, transpose_b=True, residual=dx)
    return dx, of_gate, of_up, of_down, *((g,) if has_residual else ())


_layer.defvjp(*first_order("gated_mlp", _forward, _backward))
