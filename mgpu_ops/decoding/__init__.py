"""decoding_layer: the products between two layers' attention in decoding, in one launch, for NVIDIA Hopper.

Here: the public function, its gradient and batching rules, and the same through XLA. `products.py`: sizes and units.
`kernel.py`: the kernel. Nothing is tuned.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from mgpu_ops import flags, floats
from mgpu_ops.core import mesh
from mgpu_ops.core.activations import Activation, activate, checked_activation
from mgpu_ops.decoding.products import supports
from mgpu_ops.matmul import matmul
from mgpu_ops.matmul.gated.activation import gated_activation
from mgpu_ops.registry import dispatch
from mgpu_ops.rows_norm import checked_epsilon, factors


@dataclasses.dataclass(frozen=True)
class _Call:
    activation: Activation
    next_normalised: bool
    backend: dispatch.Backend | None


def decoding_layer(
    attended: ArrayLike,
    x: ArrayLike,
    w_out: ArrayLike,
    w_gate_up: ArrayLike,
    w_down: ArrayLike,
    w_next: ArrayLike | None = None,
    *,
    activation: Activation | None = "silu",
    next_normalised: bool = False,
    rms_epsilon: float = 1e-6,
    backend: dispatch.Backend | None = None,
) -> tuple[jax.Array, ...]:
    """What a layer of Llama's shape computes behind attention, and the next layer's first product, for few rows.

        x = x + attended w_out
        x = x + (activation(norm(x) w_gate) * (norm(x) w_up)) w_down
        product = x w_next, or norm(x) w_next

    norm(x) is x / sqrt(mean of x^2 + rms_epsilon), row by row: an RMS norm whose weight is a factor of the rows of the matrix
    that it is multiplied with. Sums are of float32; x and what is between the products are rounded as they are apart. With the
    few rows of decoding a product takes as long as its weights take to come, and memory waits from one kernel to the next. With
    backend="mosaic" this is one kernel. That was not timed yet in its present form, so that a call that names no backend runs
    `matmul` and `gated_activation`, product by product.

    Args:
      attended: [..., k], what attention yields.
      x: [..., width], the rows between layers, of attended's dtype, as all arrays.
      w_out: [k, width].
      w_gate_up: [width, 2 hidden]: w_gate's columns before w_up's.
      w_down: [hidden, width].
      w_next: [width, n], of the next layer's queries, keys and values, or of the vocabulary. Default: none.
      activation: "silu", "gelu" (the tanh approximation), "gelu_erf", "relu", or "none" or None.
      next_normalised: product = norm(x) w_next. Without, `rotary_into_cache` can divide the product by the norm of its rows.
      rms_epsilon: a number of at least 0.
      backend: "mosaic" (the kernel; a Hopper GPU, up to 64 rows of 16-bit floats, k, width, hidden and n multiples of 128),
        "interpret" (the kernel in JAX's GPU interpreter, with race detection; any machine, slow), "xla". Default:
        $MGPU_OPS_BACKEND, else what `matmul` and `gated_activation` choose.

    Returns:
      x, and where w_next is given the product, [..., n].

    Works under jit, grad (reverse mode; through XLA), vmap and scan. The kernel asks for all of the GPU's SMs at one time: do
    not run it beside kernels that never end.

    Raises:
      ValueError: shapes or dtypes that do not fit each other, an unknown activation or backend, or one that cannot run the
        kernel.
      TypeError: not arrays of floats.
    """
    given = {"attended": attended, "x": x, "w_out": w_out, "w_gate_up": w_gate_up, "w_down": w_down}
    given |= {} if w_next is None else {"w_next": w_next}
    arrays = {name: floats.array("decoding_layer", name, a) for name, a in given.items()}
    _check(arrays)
    epsilon = checked_epsilon("rms_epsilon", rms_epsilon)
    call = _Call(
        checked_activation(activation), flags.checked("next_normalised", next_normalised), dispatch.requested_backend(backend)
    )
    if call.backend is None:
        return _apart(call, epsilon, *arrays.values())
    rows, count = arrays["x"], math.prod(arrays["x"].shape[:-1])
    flat = [arrays.pop(name).reshape(count, -1) for name in ("attended", "x")]
    found = _layer(call, *mesh.same_mesh_axes(*flat, jnp.full((1,), epsilon, np.float32), *arrays.values()))
    return tuple(a.reshape(*rows.shape[:-1], a.shape[-1]) for a in found)


def _check(arrays: dict[str, jax.Array]) -> None:
    attended, x, w_out, w_gate_up, w_down = (arrays[name] for name in ("attended", "x", "w_out", "w_gate_up", "w_down"))
    for name, a in arrays.items():
        if a.dtype != x.dtype:
            raise ValueError(f"x is {x.dtype} and {name} is {a.dtype}: cast one with .astype")
        if a.ndim != 2 and name.startswith("w_"):
            raise ValueError(f"{name} has shape {a.shape}: weights of decoding_layer have rank 2; use jax.vmap")
    if not x.ndim or not attended.ndim or attended.shape[:-1] != x.shape[:-1] or not x.shape[-1] or not attended.shape[-1]:
        raise ValueError(f"attended{attended.shape} and x{x.shape} must be [..., k] and [..., width], with equal leading sizes")
    width, hidden = x.shape[-1], w_down.shape[0]
    if (w_out.shape, w_gate_up.shape, w_down.shape) != ((attended.shape[-1], width), (width, 2 * hidden), (hidden, width)):
        raise ValueError(
            f"attended{attended.shape}, x{x.shape}, w_out{w_out.shape}, w_gate_up{w_gate_up.shape} and w_down{w_down.shape} do "
            "not fit: they are [..., k], [..., width], [k, width], [width, 2 hidden] and [hidden, width]"
        )
    if "w_next" in arrays and arrays["w_next"].shape[0] != width:
        raise ValueError(f"w_next has shape {arrays['w_next'].shape}: it must be [width, n] with width={width}")


def _apart(call: _Call, epsilon: float, attended: jax.Array, x: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
    """An op for each product."""
    w_out, w_gate_up, w_down, *w_next = weights
    x = matmul(attended, w_out, residual=x)
    hidden = gated_activation(matmul(x, w_gate_up), activation=call.activation, rms_rows=x, rms_epsilon=epsilon)
    x = matmul(hidden, w_down, residual=x)
    return x, *(matmul(x, w, rms_epsilon=epsilon if call.next_normalised else None) for w in w_next)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layer(call: _Call, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Of attended and x, [rows, ...], epsilon [1], and the weights."""
    found: tuple[jax.Array, ...] = _batchable(call)(*arrays)
    return found


def _forward(call: _Call, *arrays: jax.Array) -> Any:
    return _layer(call, *arrays), arrays


def _backward(call: _Call, saved: Any, g: Any) -> tuple[jax.Array, ...]:
    gradients: tuple[jax.Array, ...] = jax.vjp(functools.partial(reference, call.activation, call.next_normalised), *saved)[1](
        g
    )
    return gradients


_layer.defvjp(_forward, _backward)


@functools.cache
def _batchable(call: _Call) -> Any:
    """The call as a function of arrays. vmap gives it more rows; where weights differ, XLA runs it."""

    @jax.custom_batching.custom_vmap
    def layer(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return _run(call, *arrays)

    @layer.def_vmap
    def _(size: int, batched: Sequence[bool], *arrays: jax.Array) -> tuple[Any, Any]:
        if any(batched[2:]):
            each = jax.vmap(
                functools.partial(reference, call.activation, call.next_normalised), [0 if b else None for b in batched]
            )
            out = each(*arrays)
        else:
            folded = (
                (a if mapped else jnp.broadcast_to(a, (size, *a.shape))).reshape(-1, a.shape[-1])
                for a, mapped in zip(arrays[:2], batched[:2], strict=True)
            )
            out = tuple(a.reshape(size, -1, a.shape[-1]) for a in layer(*folded, *arrays[2:]))
        return out, (True,) * len(out)

    return jax.jit(layer)


def _run(call: _Call, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """On the backend that the call asks for."""
    attended, x, _, *weights = arrays
    choice = dispatch.choose_for(
        "decoding_layer", f"of x{x.shape}", lambda device: supports(attended, x, weights, device), call.backend
    )
    if choice.device is None:
        return reference(call.activation, call.next_normalised, *arrays)
    from mgpu_ops.decoding import kernel  # it imports Pallas

    interpret = choice.backend == "interpret"
    return kernel.launch(call.activation, call.next_normalised, choice.device, *arrays, interpret=interpret)


def reference(activation: str, next_normalised: bool, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The same through XLA."""
    attended, x, epsilon, w_out, w_gate_up, w_down, *w_next = arrays
    wide = np.promote_types(x.dtype, np.float32)
    product = functools.partial(jnp.matmul, preferred_element_type=wide)
    x = (x.astype(wide) + product(attended, w_out)).astype(x.dtype)
    gate, up = jnp.split(product(x, w_gate_up) * factors(x, epsilon), 2, -1)
    hidden = (activate(activation, gate) * up).astype(x.dtype)
    x = (x.astype(wide) + product(hidden, w_down)).astype(x.dtype)
    if not w_next:
        return (x,)
    following = product(x, w_next[0])
    return x, (following * factors(x, epsilon) if next_normalised else following).astype(x.dtype)
