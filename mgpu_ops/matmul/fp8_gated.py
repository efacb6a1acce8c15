"""fp8_gated_mlp: a gated layer, three products in 8-bit floats, whose hidden array is never stored in 16 bits.

Sources: those of `fp8_matmul`; Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, Self

import jax
from jax.typing import ArrayLike

from mgpu_ops import floats
from mgpu_ops.core import mesh, order
from mgpu_ops.core.derivatives import first_order
from mgpu_ops.matmul import like_the_result
from mgpu_ops.matmul.fp8 import (
    E4M3,
    E5M2,
    FLOATS,
    Fp8State,
    Products,
    both_ways,
    checked_state,
    next_state,
    of_gates,
    of_mesh,
    of_quantized,
)
from mgpu_ops.registry import dispatch


class Fp8GatedState(NamedTuple):
    """What delayed scaling knows of the three products of a gated layer: a `Fp8State` for each.

    gate, up: of x w_gate and x w_up, with their gradients. x is rounded once, with gate's input_scale.
    down: of the hidden array and w_down.
    """

    gate: Fp8State
    up: Fp8State
    down: Fp8State

    @classmethod
    def init(cls, amax_history_length: int = 1024) -> Self:
        """A state that has seen nothing, as `Fp8State.init`."""
        return cls(*(Fp8State.init(amax_history_length) for _ in cls._fields))


_NOT_KNOWN: Any = None
CURRENT = Fp8GatedState(*[Fp8State(*[_NOT_KNOWN] * len(Fp8State._fields))] * 3)  # scaling, in place of a state


@dataclasses.dataclass(frozen=True)
class _Call(Products):
    """The dtypes of a call's arrays, and whether a residual is among them."""

    x_dtype: str
    w_dtypes: tuple[str, ...]
    residual: bool


def fp8_gated_mlp(
    x: ArrayLike,
    w_gate: ArrayLike,
    w_up: ArrayLike,
    w_down: ArrayLike,
    *,
    residual: ArrayLike | None = None,
    state: Fp8GatedState | None = None,
    backend: dispatch.Backend | None = None,
) -> jax.Array:
    """A gated layer in 8-bit floats, forward and backward: `gated_mlp` with silu for training in FP8.

    out = (silu(x w_gate) * (x w_up)) w_down + residual, each product as in `fp8_matmul` with one scale for each array. The
    hidden array silu(gate) * up and the gradients of gate and up are computed in float32 and rounded to 8 bits in the kernel
    that computes them: they are never stored in 16 bits.

    Args:
      x: [..., m, k] bfloat16, float16 or float32; leading dimensions are more rows.
      w_gate, w_up: [k, n]; each bfloat16, float16 or float32.
      w_down: [n, width]; bfloat16, float16 or float32.
      residual: of x's dtype, and of the result's shape or one that broadcasts to it. Default: none.
      state: None (default): current scaling. A `Fp8GatedState`: delayed scaling, as in `fp8_matmul`; its gradient is the next
        call's state. No array is then read twice, for its largest value and to be rounded.
      backend: as in `matmul`, of all products.

    Returns:
      [..., m, width] of x's dtype. Gradients have the dtypes of their arrays.

    Works under jit, grad (reverse mode, once), scan, checkpoint and shard_map; under vmap without a state. The backward pass
    keeps gate and up in x's dtype, and in 8 bits x, the hidden array and the weights. For the kernels m, k, n and width are
    multiples of 16; else XLA runs.

    Raises:
      ValueError: shapes or dtypes that do not fit, an unknown backend, a state that `fp8_matmul` refuses.
      TypeError: not arrays of floats, or a state that is no `Fp8GatedState`.

    Example:
      >>> x, w_down = jnp.ones((128, 256), jnp.bfloat16), jnp.ones((512, 256), jnp.bfloat16)
      >>> w_gate, w_up = jnp.ones((2, 256, 512), jnp.bfloat16)
      >>> mgpu_ops.fp8_gated_mlp(x, w_gate, w_up, w_down, residual=x).shape
      (128, 256)

    Source: as for `fp8_matmul`; Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202.
    """
    arrays = {"x": x, "w_gate": w_gate, "w_up": w_up, "w_down": w_down}
    found = {name: floats.array("fp8_gated_mlp", name, value) for name, value in arrays.items()}
    shape = _checked(**found)
    call = _Call(
        "tensor",
        dispatch.requested_backend(backend),
        found["x"].dtype.name,
        tuple(found[name].dtype.name for name in ("w_gate", "w_up", "w_down")),
        residual is not None,
    )
    found["x"] = mesh.as_rows("x", found["x"])
    if residual is not None:
        added = floats.array("fp8_gated_mlp", "residual", residual)
        found["residual"] = mesh.as_rows("residual", like_the_result(added, shape, call.x_dtype))
    out: jax.Array = _mlp(call, checked_gated_state("fp8_gated_mlp", state), *mesh.same_mesh_axes(*found.values()))
    return out.reshape(shape)


def checked_gated_state(op: str, state: Any) -> Fp8GatedState | None:
    """A state or None. Raises, with the op, for what is none."""
    if state is None:
        return None
    if not isinstance(state, Fp8GatedState):
        raise TypeError(f"state is {state!r:.80}: pass a mgpu_ops.Fp8GatedState, as Fp8GatedState.init() makes it")
    names = (f"state.{name}" for name in state._fields)
    return Fp8GatedState(*(checked_state(op, name, one) for name, one in zip(names, state, strict=True)))


def _checked(x: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array) -> tuple[int, ...]:
    """The shape of the result."""
    for name, array in (("x", x), ("w_gate", w_gate), ("w_up", w_up), ("w_down", w_down)):
        if array.dtype.name not in FLOATS:
            raise ValueError(f"{name} is {array.dtype}: fp8_gated_mlp quantizes {', '.join(FLOATS)}; cast it")
        if array.ndim != 2 and (name != "x" or array.ndim < 2):
            raise ValueError(f"{name} has shape {array.shape}: pass x of rank 2 or more, and weights of rank 2")
    if x.shape[-1] != w_gate.shape[0] or w_gate.shape != w_up.shape or w_down.shape[0] != w_up.shape[1]:
        raise ValueError(
            f"x{x.shape}, w_gate{w_gate.shape}, w_up{w_up.shape} and w_down{w_down.shape} do not fit: they are [..., k], "
            "[k, n], [k, n] and [n, width]"
        )
    return (*x.shape[:-1], w_down.shape[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(call: _Call, state: Fp8GatedState | None, *arrays: jax.Array) -> jax.Array:
    """Of x [m, k], the three weights, and a residual [m, width] if there is one."""
    return _forward(call, state, *arrays)[0]


def _forward(call: _Call, state: Fp8GatedState | None, x: jax.Array, *arrays: jax.Array) -> Any:
    """The result, and for the backward pass gate and up, and quantized along their other dimension x, hidden and weights.

    With a state also that, and the largest values of the arrays that are products' inputs and kernels.
    """
    weights, residual, known = arrays[:3], arrays[3:], state or CURRENT
    x8, x8_t, of_x = both_ways(call, x, known.gate.input_scale, (False, False))
    weights8 = [both_ways(call, w, of.kernel_scale, (True, True)) for w, of in zip(weights, known, strict=True)]
    gate, up = (of_quantized(call, x8, w8_t, call.x_dtype) for _, w8_t, _ in weights8[:2])
    ((hidden8, hidden8_t),), of_hidden = of_gates(call, "gate", (gate, up), E4M3, (known.down.input_scale,))
    out = of_quantized(call, hidden8, weights8[2][1], call.x_dtype, **({"residual": residual[0]} if residual else {}))
    seen = None
    if state is not None:
        inputs = ((of_x, x), (of_x, x), (of_hidden[0], gate))
        kernels = [(largest, w) for (_, _, largest), w in zip(weights8, weights, strict=True)]
        pairs = zip(inputs, kernels, state, strict=True)
        seen = [(of_mesh(*of_input, of), of_mesh(*of_kernel, of)) for of_input, of_kernel, of in pairs]
    return out, (gate, up, x8_t, hidden8_t, [w8 for w8, _, _ in weights8], state, seen)


def _backward(call: _Call, saved: Any, g: jax.Array) -> tuple[Any, ...]:
    gate, up, x8_t, hidden8_t, (w_gate8, w_up8, w_down8), state, seen = saved
    of_gate, of_up, of_down = call.w_dtypes
    *of_both, of_down_grad = (of.output_grad_scale for of in state or CURRENT)
    g8, g8_t, of_g = both_ways(call, g, of_down_grad, (False, True), E5M2)
    d_hidden = of_quantized(call, g8, w_down8, call.x_dtype)
    ((gate8, gate8_t), (up8, up8_t)), of_gated = of_gates(call, "gate_gradient", (d_hidden, gate, up), E5M2, of_both)
    weights = (
        of_quantized(call, x8_t, gate8_t, of_gate),
        of_quantized(call, x8_t, up8_t, of_up),
        of_quantized(call, hidden8_t, g8_t, of_down),
    )
    weights, (gate8, up8) = order.weights_first(weights, (gate8, up8))
    of_one = of_quantized(call, gate8, w_gate8, call.x_dtype)
    dx = of_quantized(call, up8, w_up8, call.x_dtype, residual=of_one)
    new = None
    if state is not None:
        products = zip(state, seen, (*of_gated, of_g), strict=True)
        new = Fp8GatedState(*(next_state(of, (*pair, of_mesh(largest, g, of))) for of, pair, largest in products))
    return (new, dx, *weights, *[g] * call.residual)


_mlp.defvjp(*first_order("fp8_gated_mlp", _forward, _backward))
